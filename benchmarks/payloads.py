"""The bytes that are sent, in the form that a transport takes, and the check that they arrived."""

from __future__ import annotations

from typing import Any

import numpy as np

BLOCK = 1 << 20
"""Bytes that are random; more is made by repeating them, each time with another number at the front."""


def make(form: str, nbytes: int, seed: int = 0) -> Any:
    """`nbytes` random bytes as a float32 `"torch"` tensor or `"numpy"` array, or as `"bytes"`.

    `"objects"`: a small dict of plain Python objects, as programs put into queues, whatever `nbytes` is.
    """
    if form == "objects":
        return {"index": seed, "path": f"images/train/{seed:06}.jpg", "box": [0.25, 0.5, 112.0, 96.5], "label": None}
    block = np.random.default_rng(seed).integers(0, 256, min(nbytes, BLOCK), np.uint8)
    array = np.resize(block, nbytes)
    array[::BLOCK] = np.arange(len(array[::BLOCK])) & 0xFF
    if form == "bytes":
        return array.tobytes()
    if form == "numpy":
        return array.view(np.float32)
    import torch

    return torch.from_numpy(array).view(torch.float32)


def check(form: str, value: Any, expected: Any) -> None:
    """Raise unless `value` is of the form and has the expected bytes. Never called in a timed part."""
    if type(value) is not type(expected):
        raise AssertionError(f"sent {type(expected).__name__}, received {type(value).__name__}")
    same = value == expected if form == "objects" else np.array_equal(_raw(form, value), _raw(form, expected))
    if not same:
        raise AssertionError(f"the {form} value that arrived has other bytes than the one that was sent")


def read(form: str, value: Any) -> int:
    """Read every byte: the sum of the value's 64-bit words."""
    if form == "torch":
        import torch

        return int(value.view(torch.int64).sum())
    return int(_raw(form, value).view(np.int64).sum())


def _raw(form: str, value: Any) -> Any:
    if form == "torch":
        import torch

        return value.view(torch.uint8).numpy()
    return np.frombuffer(value, np.uint8) if form == "bytes" else value.view(np.uint8)
