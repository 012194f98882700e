"""The bytes that are sent, in the form that a transport takes, and the check that they arrived."""

from __future__ import annotations

from typing import Any

import numpy as np


def make(form: str, nbytes: int, seed: int = 0) -> Any:
    """`nbytes` random bytes as a float32 `"torch"` tensor or `"numpy"` array, or as `"bytes"`."""
    array = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
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
    if _raw(form, value) != _raw(form, expected):
        raise AssertionError(f"the {form} value that arrived has other bytes than the one that was sent")


def _raw(form: str, value: Any) -> bytes:
    if form == "torch":
        import torch

        value = value.view(torch.uint8).numpy()
    return value if form == "bytes" else value.tobytes()
