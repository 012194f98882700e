"""Which place of names this process uses. It decides once for each directory that `SHMTENSOR_DIR` names."""

from __future__ import annotations

import errno
import os

from ..errors import ArgumentError, ResourceError
from .places import FILES, SOCKET, Files, Place
from .shortage import SHM_DIR

_decided: dict[str, Place] = {}
_by_files: set[str] = set()
"""Directories with which this process has joined channels by files."""


def current() -> Place:
    """The place of this process's names.

    Raises `ArgumentError` if the environment is contradictory.
    """
    get = os.environb.get  # half as long as `environ`
    raw = get(b"SHMTENSOR_DIR")
    if raw:
        directory = os.fsdecode(raw)
        return _decided.get(directory) or _decide(directory)
    return _without_directory() if get(b"SHMTENSOR_SEGMENTS") else FILES


def settle() -> None:
    """Before a join: look again whether a server has appeared where names were files, for one `lstat`.

    Raises `ResourceError` if this process has joined channels by files already: they would be cut off from the others.
    """
    directory = os.environ.get("SHMTENSOR_DIR")
    if not directory:
        _without_directory()
        return
    if isinstance(_decided.get(directory), Files):
        del _decided[directory]
    if isinstance(_decide(directory), Files):
        _by_files.add(directory)
    elif directory in _by_files:
        _decided[directory] = FILES  # for what is open already
        raise ResourceError(
            errno.EBUSY,
            f"a segment server has been started in {directory}, but this process has opened channels in {SHM_DIR} "
            "before: start this process again, the server first, and set SHMTENSOR_SEGMENTS=server to make sure of it",
        )


def _without_directory() -> Place:
    if _is_required():
        raise ArgumentError("SHMTENSOR_SEGMENTS=server needs SHMTENSOR_DIR, the directory of the segment server")
    return FILES


def _decide(directory: str) -> Place:
    if directory not in _decided:
        if _is_required() or os.path.lexists(f"{directory}/{SOCKET}"):
            from .served import Served

            _decided[directory] = Served(directory)
        else:
            _decided[directory] = FILES
    return _decided[directory]


def _is_required() -> bool:
    value = os.environ.get("SHMTENSOR_SEGMENTS", "")
    if value not in ("", "auto", "server"):
        raise ArgumentError(f'SHMTENSOR_SEGMENTS={value!r}: "server" or "auto"')
    return value == "server"
