"""`keys=`: a part of a state, by dotted names."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ..errors import ArgumentError, ArgumentTypeError
from .json_values import key_of


def select(tree: Any, keys: Iterable[str] | str, *, objects: bool = False) -> Any:
    """The part of a tree that keys name; with `objects`, of a state of dicts instead of a tree.

    A key is the dotted name of anything inside dicts, such as `"model"` or `"model.layer1.weight"`, and selects all
    below it. It also matches dict keys that have dots themselves (state dicts): `"model.layer1"` selects
    `layer1.weight` and `layer1.bias` of the dict `model`. Lists and tuples are selected whole. Raises `ArgumentError`
    for a key that names nothing.
    """
    wanted = [keys] if isinstance(keys, str) else list(keys)
    if not all(isinstance(key, str) for key in wanted):
        raise ArgumentTypeError("keys= takes dotted names, such as keys=['model', 'optim.state']")
    used: set[str] = set()
    names: list[str] = []
    result = _Selection(wanted, used, names, _object_entries if objects else _entries).select(tree, "")
    for key in wanted:
        if key not in used:
            raise unknown(key, names)
    return ({} if objects else {"d": {}}) if result is None else result


def descend(tree: Any, key: str, *, objects: bool = False) -> Any:
    """The value under one dotted name. Raises `ArgumentError` if there is none."""
    names: list[str] = []
    found = _descend(tree, "", key, names, _of_dict if objects else children)
    if found is None:
        raise unknown(key, names)
    return found[0]


def unknown(key: str, names: list[str]) -> ArgumentError:
    """The error for a name that the checkpoint does not have; it suggests similar ones."""
    near = difflib.get_close_matches(key, names, 3)
    hint = f"did you mean {', '.join(near)}?" if near else f"it has {', '.join(names[:5]) or 'no names'}"
    return ArgumentError(f"the checkpoint has nothing named {key!r:.80}: {hint}")


def replaced(state: Any, key: str, function: Callable[[Any], Any]) -> Any:
    """A state of dicts with `function(value)` in place of the value under one dotted name; the dicts around it are
    copied. Raises `ArgumentError` if there is none."""
    names: list[str] = []
    found = _replaced(state, "", key, names, function)
    if found is None:
        raise unknown(key, names)
    return found[0]


def _replaced(value: Any, name: str, key: str, names: list[str], function: Callable[[Any], Any]) -> tuple[Any] | None:
    for text, child in _of_dict(value):
        path = f"{name}.{text}" if name else str(text)
        names.append(path)
        made: tuple[Any] | None = None
        if path == key:
            made = (function(child),)
        elif key.startswith(f"{path}."):
            made = _replaced(child, path, key, names, function)
        if made is not None:
            copied = copy.copy(value)
            copied[text] = made[0]
            return (copied,)
    return None


def children(node: Any) -> list[tuple[Any, Any]]:
    """Keys and nodes of a dict's node; empty for other nodes."""
    if isinstance(node, dict):
        for tag in ("d", "k", "o", "c"):
            if tag in node:
                return list(node["d"].items()) if tag == "d" else [(key_of(key), child) for key, child in node[tag]]
    return []


def _of_dict(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


_Children = Callable[[Any], list[tuple[Any, Any]]]


def _descend(node: Any, name: str, key: str, names: list[str], children_of: _Children) -> tuple[Any] | None:
    for text, child in children_of(node):
        path = f"{name}.{text}" if name else str(text)
        names.append(path)
        if path == key:
            return (child,)
        found = _descend(child, path, key, names, children_of) if key.startswith(f"{path}.") else None
        if found is not None:
            return found
    return None


class _Entries(NamedTuple):
    """The entries of a dict or its node, (token or key, its text, child), and how to make one of fewer pairs."""

    found: list[tuple[Any, str, Any]]
    smaller: Callable[[list[tuple[Any, Any]]], Any]


def _entries(node: Any) -> _Entries | None:
    tags = [tag for tag in ("d", "k", "o", "c") if tag in node] if isinstance(node, dict) else []
    if not tags:
        return None
    tag, rest = tags[0], {key: value for key, value in node.items() if key == "m"}
    if tag == "d":
        return _Entries([(key, key, child) for key, child in node[tag].items()], lambda kept: {tag: dict(kept)})
    return _Entries(
        [(token, str(key_of(token)), child) for token, child in node[tag]],
        lambda kept: {tag: [list(pair) for pair in kept], **rest},
    )


def _object_entries(value: Any) -> _Entries | None:
    if not isinstance(value, dict):
        return None

    def smaller(kept: list[tuple[Any, Any]]) -> Any:
        made = copy.copy(value)  # a dict of the same class, with torch's `_metadata`
        made.clear()
        made.update(dict(kept))
        return made

    return _Entries([(key, str(key), child) for key, child in value.items()], smaller)


class _Selection(NamedTuple):
    """One selection. `used` collects the keys that were found, `names` the names that were visited."""

    wanted: list[str]
    used: set[str]
    names: list[str]
    entries: Callable[[Any], _Entries | None]

    def select(self, node: Any, name: str) -> Any:
        entries = self.entries(node)
        if entries is None:
            return None
        kept: list[tuple[Any, Any]] = []
        for token, text, child in entries.found:
            path = f"{name}.{text}" if name else text
            self.names.append(path)
            hits = [key for key in self.wanted if path == key or path.startswith(f"{key}.")]
            if hits:
                self.used.update(hits)
                kept.append((token, child))
            elif any(key.startswith(f"{path}.") for key in self.wanted):
                part = self.select(child, path)
                if part is not None:
                    kept.append((token, part))
        return entries.smaller(kept) if kept else None
