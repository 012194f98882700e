"""The structure of a value, as flat tokens, and the dynamic part of a message, as JSON.

The tokens list the value in preorder, so that decoding needs no nested JSON:

| token | value |
|---|---|
| `0` | the next leaf of the leaf table |
| `1` | the next scalar of the dynamic part |
| `"l", n` and n values | list |
| `"t", n` and n values | tuple |
| `"d", n`, n keys and n values | dict |
| `[kind, int...]`, its leaves, its scalars | composite, see `COMPOSITES` |

A key is a string, or `["i", hex]`, `["f", hex]`, `["b", 0 or 1]`, `["n"]` for int, float, bool and None.

The dynamic part is empty if there is neither a scalar nor a meta, else JSON `[scalars, meta]`. A scalar is null,
true, false, a number (NaN, Infinity and -Infinity included), a string, or `[hex]` for an int of more than 1024 bits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NamedTuple, cast

from ..errors import ArgumentError, ArgumentTypeError, WireError
from .spec import read_json

MAX_DEPTH = 64
MAX_DYNAMIC = 16 << 20
MAX_META = 64 << 10

LEAF, SCALAR = 0, 1
_MAX_PLAIN_BITS = 1024  # longer ints travel as hex: Python refuses decimal texts of more than 4300 digits
_MAX_PARAMETERS = 80
_HEX = re.compile(r"-?0x[0-9a-f]+\Z")

_encode_json = json.JSONEncoder(separators=(",", ":")).encode


class Composite(NamedTuple):
    """How many leaves, scalars and int parameters one kind of composite has."""

    leaves: int
    scalars: int
    parameters: int  # exactly so many, or at least so many if `sized`
    sized: bool = False  # the remaining parameters are the shape


COMPOSITES: dict[str, Composite] = {
    "generic": Composite(1, 0, 0),  # NumPy scalar: its 0-d array
    "bytes": Composite(1, 0, 0),  # numpy.bytes_: its bytes
    "str": Composite(0, 1, 0),  # numpy.str_: its text
    "coo": Composite(2, 0, 1, True),  # is_coalesced, size...; indices, values
    "csr": Composite(3, 0, 0, True),  # size...; compressed indices, plain indices, values
    "csc": Composite(3, 0, 0, True),
    "bsr": Composite(3, 0, 0, True),
    "bsc": Composite(3, 0, 0, True),
    "quantized": Composite(1, 2, 0),  # integers; scale, zero point
    "quantized_channels": Composite(3, 0, 1),  # axis; integers, scales, zero points
    "quantized_packed": Composite(3, 0, 1, True),  # axis, size...; packed bytes, scales, zero points
    "nested": Composite(2, 0, 0),  # flat buffer, int64 sizes [n, ndim]
    "jagged": Composite(2, 0, 3),  # ragged dimension, min and max length or -1; values, offsets
    "jagged_lengths": Composite(3, 0, 3),  # the same and lengths
}


class Node(NamedTuple):
    """One parsed value. `kind` is "leaf", "scalar", "l", "t", "d" or a composite's name."""

    kind: str
    parameters: tuple[int, ...] = ()
    keys: tuple[object, ...] = ()
    children: tuple[Node, ...] = ()
    leaf: int = 0  # index of its first leaf
    scalar: int = 0  # index of its first scalar


def key_token(key: object) -> object:
    """The token of a dict key; `ArgumentTypeError` for a type of key that is not sent."""
    if isinstance(key, str):
        return str.__str__(key)
    if key is None:
        return ("n",)
    if isinstance(key, bool):
        return ("b", int(key))
    if isinstance(key, int):
        return ("i", hex(key))
    if isinstance(key, float):
        return ("f", float.hex(key))
    raise ArgumentTypeError(f"dict key of type {type(key).__name__}: keys are str, int, float, bool or None")


def key_of(token: object) -> object:
    """The dict key of a token; `WireError` if it is none."""
    if isinstance(token, str):
        return token
    match token:
        case ["n"]:
            return None
        case ["b", int() as bit] if bit in (0, 1) and not isinstance(bit, bool):
            return bool(bit)
        case ["i", str() as text] if _HEX.match(text):
            return int(text, 16)
        case ["f", str() as text] if len(text) < 64:
            try:
                return float.fromhex(text)
            except (ValueError, OverflowError):
                pass
    raise WireError("invalid dict key in the tokens")


class _Parser:
    def __init__(self, tokens: Sequence[object]) -> None:
        self.tokens = tokens
        self.at = 0
        self.leaves = 0
        self.scalars = 0

    def take(self) -> object:
        if self.at >= len(self.tokens):
            raise WireError("tokens end early")
        self.at += 1
        return self.tokens[self.at - 1]

    def count(self) -> int:
        count = self.take()
        if type(count) is not int or not 0 <= count <= len(self.tokens) - self.at:
            raise WireError(f"container of {count!r:.40} values, {len(self.tokens) - self.at} tokens are left")
        return count

    def value(self, depth: int) -> Node:
        token = self.take()
        leaf, scalar = self.leaves, self.scalars
        if type(token) is int and token == LEAF:
            self.leaves += 1
            return Node("leaf", leaf=leaf)
        if type(token) is int and token == SCALAR:
            self.scalars += 1
            return Node("scalar", scalar=scalar)
        if isinstance(token, str) and token in ("l", "t", "d"):
            if depth >= MAX_DEPTH:
                raise WireError(f"containers are nested more than {MAX_DEPTH} deep")
            count = self.count()
            keys: tuple[object, ...] = ()
            if token == "d":
                keys = tuple([key_of(self.take()) for _ in range(count)])
                if len(set(keys)) != count:
                    raise WireError("dict has a key twice")
            children = tuple([self.value(depth + 1) for _ in range(count)])
            return Node(token, keys=keys, children=children, leaf=leaf, scalar=scalar)
        if isinstance(token, list) and token and isinstance(token[0], str) and token[0] in COMPOSITES:
            shape = COMPOSITES[token[0]]
            parameters = tuple(token[1:])
            if (
                len(parameters) < shape.parameters
                or len(parameters) > (_MAX_PARAMETERS if shape.sized else shape.parameters)
                or not all(type(p) is int and -1 <= p < 1 << 62 for p in parameters)
            ):
                raise WireError(f"composite {token[0]!r} has invalid parameters")
            self.leaves += shape.leaves
            self.scalars += shape.scalars
            return Node(token[0], parameters, leaf=leaf, scalar=scalar)
        raise WireError("unknown token")


def parse(tokens: Sequence[object], leaves: int) -> tuple[Node, int]:
    """The parsed value of a message with so many leaves, and its number of scalars; `WireError` if invalid."""
    parser = _Parser(tokens)
    node = parser.value(0)
    if parser.at != len(tokens):
        raise WireError(f"{len(tokens) - parser.at} tokens are left over")
    if parser.leaves != leaves:
        raise WireError(f"tokens name {parser.leaves} leaves, the table has {leaves}")
    return node, parser.scalars


def scalar(value: object) -> object:
    """The JSON form of one scalar; subclasses of int, float and str lose their class."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        return int(value) if value.bit_length() <= _MAX_PLAIN_BITS else [hex(value)]
    if isinstance(value, float):
        return float(value)
    return str.__str__(cast(str, value))


def _scalar(value: object) -> object:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str) and _HEX.match(value[0]):
        return int(value[0], 16)
    raise WireError("invalid scalar in the dynamic part")


def encode_dynamic(scalars: Sequence[object], meta: object) -> bytes:
    """The dynamic part of scalars that `scalar` made, and of a meta: a dict that JSON can express, or None.

    Tuples in the meta arrive as lists. Raises `ArgumentTypeError` or `ArgumentError` if the meta is no such dict, or
    too large (64 KiB; 16 MiB with the scalars).
    """
    if meta is None:
        if not scalars:
            return b""
        text = "null"
    else:
        text = _encode_meta(meta)
        if len(text) > MAX_META:
            raise ArgumentError(
                f"meta takes {len(text)} bytes as JSON, at most {MAX_META} are allowed: send large things in the value"
            )
    data = f"[{_encode_json(scalars)},{text}]".encode("ascii")
    if len(data) > MAX_DYNAMIC:
        raise ArgumentError(
            f"scalars and meta take {len(data)} bytes as JSON, at most {MAX_DYNAMIC} are allowed: "
            "send many numbers as a tensor, and long text as numpy.frombuffer(text.encode(), 'u1')"
        )
    return data


def check_meta(meta: object) -> None:
    """`ArgumentTypeError` or `ArgumentError` unless it is a dict that JSON can express."""
    _encode_meta(meta)


def _encode_meta(meta: object) -> str:
    if not isinstance(meta, dict):
        raise ArgumentTypeError(f"meta is a {type(meta).__name__}: a dict that JSON can express, or None, is allowed")
    try:
        text = _encode_json(meta)
        _check_keys(meta)
    except ArgumentTypeError:
        raise
    except TypeError as error:
        raise ArgumentTypeError(f"meta is not JSON: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"meta is not JSON: {error}") from None
    return text


def _check_keys(value: object) -> None:
    # json would turn such keys into strings without a word
    if isinstance(value, dict):
        for key, child in value.items():
            if not isinstance(key, str):
                raise ArgumentTypeError(f"meta has the key {key!r:.40}: only str keys are allowed there")
            _check_keys(child)
    elif isinstance(value, (list, tuple)):
        for child in value:
            _check_keys(child)


def decode_dynamic(dynamic: bytes, scalars: int) -> tuple[Sequence[object], object]:
    """Scalars, of which there must be so many, and meta. Raises `WireError` on anything invalid."""
    if not dynamic:
        if scalars:
            raise WireError(f"dynamic part is empty, {scalars} scalars were expected")
        return (), None
    if len(dynamic) > MAX_DYNAMIC:
        raise WireError(f"dynamic part has {len(dynamic)} bytes, at most {MAX_DYNAMIC} are allowed")
    parts = read_json(dynamic)
    if not (isinstance(parts, list) and len(parts) == 2 and isinstance(parts[0], list)):
        raise WireError("dynamic part is not [scalars, meta]")
    if len(parts[0]) != scalars:
        raise WireError(f"dynamic part has {len(parts[0])} scalars, {scalars} were expected")
    if parts[1] is not None and not isinstance(parts[1], dict):
        raise WireError("meta is neither a dict nor null")
    return [_scalar(value) for value in parts[0]], parts[1]
