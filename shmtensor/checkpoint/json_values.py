"""JSON forms in a checkpoint's description: dict keys, and the meta.

A key is a string, or `["i", hex]`, `["f", hex]`, `["b", 0 or 1]`, `["n"]` for int, float, bool and None.
"""

from __future__ import annotations

import json
import re

from ..errors import ArgumentError, ArgumentTypeError, WireError

_HEX = re.compile(r"-?0x[0-9a-f]+\Z")
_encode_json = json.JSONEncoder(separators=(",", ":")).encode
_decode_json = json.JSONDecoder().decode


def read_json(data: bytes) -> object:
    """The value of a JSON text in UTF-8; `WireError` if it is invalid."""
    try:
        return _decode_json(data.decode("utf-8"))
    except (ValueError, RecursionError, MemoryError) as error:
        raise WireError(f"invalid JSON of {len(data)} bytes: {type(error).__name__}") from None


def key_token(key: object) -> object:
    """The token of a dict key; `ArgumentTypeError` for an unsupported type of key."""
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
    """The dict key of a token; `WireError` if it is invalid."""
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
    raise WireError("invalid dict key ")


def check_meta(meta: object) -> None:
    """`ArgumentTypeError` or `ArgumentError` unless it is a dict that JSON can express."""
    if not isinstance(meta, dict):
        raise ArgumentTypeError(
            f"meta is of type {type(meta).__name__}: a dict that JSON can express, or None, is allowed"
        )
    try:
        _encode_json(meta)
        _check_keys(meta)
    except ArgumentTypeError:
        raise
    except TypeError as error:
        raise ArgumentTypeError(f"meta is not JSON: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"meta is not JSON: {error}") from None


def _check_keys(value: object) -> None:
    # json would silently turn such keys into strings
    if isinstance(value, dict):
        for key, child in value.items():
            if not isinstance(key, str):
                raise ArgumentTypeError(f"meta has the key {key!r:.40}: only str keys are allowed there")
            _check_keys(child)
    elif isinstance(value, (list, tuple)):
        for child in value:
            _check_keys(child)
