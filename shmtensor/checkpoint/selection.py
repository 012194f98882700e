"""`keys=`: a part of a state, by dotted names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from ..errors import ArgumentError, ArgumentTypeError
from ..wire.tree import key_of


def select(tree: Any, keys: Iterable[str] | str) -> Any:
    """The tree without what no key names.

    A key is the dotted name of anything inside dicts: `"model"`, `"model.layer1.weight"`; it takes all that is below.
    Dict keys that have dots themselves (state dicts) are meant as well: `"model.layer1"` takes `layer1.weight` and
    `layer1.bias` of the dict `model`. Lists and tuples are taken whole. Raises `ArgumentError` for a key that names
    nothing.
    """
    wanted = [keys] if isinstance(keys, str) else list(keys)
    if not all(isinstance(key, str) for key in wanted):
        raise ArgumentTypeError("keys= takes dotted names, such as keys=['model', 'optim.state']")
    used: set[str] = set()
    names: list[str] = []
    result = _select(tree, "", wanted, used, names)
    for key in wanted:
        if key not in used:
            raise _unknown(key, names)
    return {"d": {}} if result is None else result


def descend(tree: Any, key: str) -> Any:
    """What lies under one dotted name. Raises `ArgumentError` if nothing does."""
    names: list[str] = []
    found = _descend(tree, "", key, names)
    if found is None:
        raise _unknown(key, names)
    return found[0]


def _unknown(key: str, names: list[str]) -> ArgumentError:
    near = difflib.get_close_matches(key, names, 3)
    hint = f"did you mean {', '.join(near)}?" if near else f"it has {', '.join(names[:5]) or 'no names'}"
    return ArgumentError(f"the checkpoint has nothing named {key!r:.80}: {hint}")


def children(node: Any) -> list[tuple[Any, Any]]:
    """Keys and nodes of a dict's node; none of anything else's."""
    if isinstance(node, dict):
        for tag in ("d", "k", "o", "c"):
            if tag in node:
                return list(node["d"].items()) if tag == "d" else [(key_of(key), child) for key, child in node[tag]]
    return []


def _descend(node: Any, name: str, key: str, names: list[str]) -> tuple[Any] | None:
    for text, child in children(node):
        path = f"{name}.{text}" if name else str(text)
        names.append(path)
        if path == key:
            return (child,)
        found = _descend(child, path, key, names) if key.startswith(f"{path}.") else None
        if found is not None:
            return found
    return None


def _select(node: Any, name: str, wanted: list[str], used: set[str], names: list[str]) -> Any:
    if not isinstance(node, dict):
        return None
    for tag in ("d", "k", "o", "c"):
        if tag not in node:
            continue
        kept: list[tuple[Any, Any]] = []
        for token, child in node[tag].items() if tag == "d" else node[tag]:
            text = str(token if tag == "d" else key_of(token))
            path = f"{name}.{text}" if name else text
            names.append(path)
            hits = [key for key in wanted if path == key or path.startswith(f"{key}.")]
            if hits:
                used.update(hits)
                kept.append((token, child))
            elif any(key.startswith(f"{path}.") for key in wanted):
                part = _select(child, path, wanted, used, names)
                if part is not None:
                    kept.append((token, part))
        if not kept:
            return None
        rest = {key: value for key, value in node.items() if key == "m"}
        return {tag: dict(kept) if tag == "d" else [list(pair) for pair in kept], **rest}
    return None
