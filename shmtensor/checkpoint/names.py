"""Names: of a writer's channel, so that others find what it holds, and of checkpoints."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Set
from typing import Any, Final

from ..errors import ArgumentError, ArgumentTypeError
from .directory import LATEST, Directory, highest_number

PREFIX: Final = "ckpt"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+-]{0,199}")


def channels_of(directory: str) -> str:
    """What the channels of all writers of a directory begin with."""
    info = os.stat(directory)
    key = hashlib.sha256(f"{info.st_dev}:{info.st_ino}".encode()).hexdigest()[:16]
    return f"{PREFIX}-{key}-"


def channel_of(directory: str, writer: str) -> str:
    """The channel of one writer: its work queue of chunks."""
    return channels_of(directory) + writer


def check_name(name: object) -> str:
    """A checkpoint's name, or a clear error."""
    if not isinstance(name, str):
        raise ArgumentTypeError(f"name must be a string, not {type(name).__name__}")
    if not _NAME.fullmatch(name) or name == LATEST:
        raise ArgumentError(
            f"checkpoint name {name!r}: use 1 to 200 of the characters A-Z a-z 0-9 . _ = + -, not a dot, dash or sign "
            f'first, and not "{LATEST}"'
        )
    return name


class Namer:
    """Chooses names of checkpoints in one directory, so that nothing is overwritten."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def choose(self, name: str | None, step: int | None, ending: str, taken: Set[str], count: int) -> tuple[str, int]:
        """The name with its ending, and the number that `keep_every` goes by.

        name: what the user asked for; step: what the state says; taken: names of saves that are in flight; count: which
        save it is.
        """
        if name is not None:
            full = check_name(name) + ending
            if full in taken or self._directory.is_taken(full):
                raise ArgumentError(f"checkpoint {self._directory.at(full)} exists: pass another name, or remove it")
            return full, count if step is None else step
        if step is None:
            step = highest_number({*self._directory.names(), *taken}, "save-") + 1
            stem = f"save-{step:08d}"
        else:
            stem = f"step-{step:08d}"
        full, again = stem + ending, 1
        while full in taken or self._directory.is_taken(full):
            again += 1
            full = f"{stem}-{again}{ending}"
        return full, step


def step_of(state: Any, meta: Any) -> int | None:
    """The step that `meta`, or else the state, tells."""
    for place in (meta, state):
        step = place.get("step") if isinstance(place, dict) else None
        if isinstance(step, int) and not isinstance(step, bool) and step >= 0:
            return step
    return None
