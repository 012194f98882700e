"""What the test process names when it starts a member of the cast; imports no part of the package itself."""

from __future__ import annotations

import os

import numpy as np

from ..waiting import runs, wait_until


def play(role: str, pipe, options: dict, *args) -> None:
    """Run in a child of the fork server, where `cast` is loaded already."""
    from . import cast

    getattr(cast, role)(pipe, *args, **options)


def arm_one(path: str, point: str, action: str, nth: int) -> None:
    """A pool's initializer: only one worker of all that start is to die. The others keep its place in `_armed`."""
    from . import points

    global _armed
    mine = f"{path}.{os.getpid()}"
    with open(mine, "w") as file:
        file.write(str(os.getpid()))
    try:
        os.link(mine, path)
    except FileExistsError:
        _armed = path
    else:
        points.arm(point, action, nth)


_armed: str | None = None
"""Where the pid of the worker is that is to die, in the others."""


def add_after_the_death(array: np.ndarray, number: int) -> np.ndarray:
    """As `add`; workers that are not to die wait until the one that is has: it gets calls, however busy the machine."""
    if _armed is not None:
        with open(_armed) as file:
            pid = int(file.read())
        wait_until(lambda: not runs(pid))
    return add(array, number)


def add(array: np.ndarray, number: int) -> np.ndarray:
    """A call with something large both ways."""
    return array + number
