"""What the test process names when it starts a member of the cast; imports no part of the package itself."""

from __future__ import annotations

import os

import numpy as np


def play(role: str, pipe, options: dict, *args) -> None:
    """Run in a child of the fork server, where `cast` is loaded already."""
    from . import cast

    getattr(cast, role)(pipe, *args, **options)


def arm_one(path: str, point: str, action: str, nth: int) -> None:
    """An executor's initializer: only one worker of all that start is to die."""
    from . import points

    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    points.arm(point, action, nth)


def add(array: np.ndarray, number: int) -> np.ndarray:
    """A call with something large both ways."""
    return array + number
