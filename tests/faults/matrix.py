"""The cases of the fault matrix: point of death x way of dying x implementation.

Points that the compiled module has as well are run over both implementations, the others once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest

from . import build, points

SOAK = bool(os.environ.get("SHMTENSOR_SOAK"))
ACTIONS = ["kill", "exit", "raise"] if SOAK else ["kill", "raise"]
"""Dying by `_exit` differs from being killed where Python code runs at the end, which it does nowhere here."""

UNBUILT = pytest.mark.skipif(not build.POSSIBLE, reason=build.WHY_NOT)
_ONCE = "compiled" if build.POSSIBLE else "pure"


def cases(of_role: Iterable[str], actions: Iterable[str] = ACTIONS, times: Iterable[int] = (1,)) -> list:
    """(implementation, point, action, nth), those of one implementation together."""
    return [
        pytest.param(
            implementation, point, action, nth, id=f"{implementation}-{point}-{action}-{nth}",
            marks=UNBUILT if implementation == "compiled" else (),
        )
        for implementation in ("compiled", "pure")
        for point in of_role
        if implementation == _ONCE or is_native(point)
        for action in actions
        for nth in times
        if not (implementation == "compiled" and action == "raise" and is_native(point))  # no exception arrives in C
    ]  # fmt: skip


def is_native(point: str) -> bool:
    """Whether it is a point of the compiled module."""
    return point in points.native_names()


def matrix(of_role: Iterable[str], actions: Iterable[str] = ACTIONS):
    """Parameters `server`, whose fixture gets the implementation, `point`, `action` and `nth`."""
    each = cases(of_role, actions, [1, 2, 4] if SOAK else [1])
    return pytest.mark.parametrize(("server", "point", "action", "nth"), each, indirect=["server"])
