"""Names of channels, of their segments and semaphores, and of the socket directory."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import stat
from typing import Final

from ..errors import ArgumentError, ArgumentTypeError, ResourceError
from ..memory import segment as shm
from ..wire.segment_packets import LOCKS, NEW_SOCKET, SOCKET

PREFIX: Final = "/shmtensor."
_CHANNEL = re.compile(r"[A-Za-z0-9._-]{1,64}")
_IPC_PATH_MAX = 107
_SOCKET = re.compile(r"[0-9a-f]{16}")
_FILE = re.compile(r"(?:sem\.)?shmtensor\.(?P<channel>[A-Za-z0-9._-]{1,64})(?:,(?P<uid>[0-9a-f]{16})(?:,\d+)?)?")


def check_channel(name: object) -> str:
    """Return the channel name. Raises `ArgumentError` or `ArgumentTypeError` if it is not valid."""
    return _check(name, "channel")


def check_group(name: object) -> str:
    """Return the name of a group. Raises `ArgumentError` or `ArgumentTypeError` if it is not valid."""
    return _check(name, "group")


def _check(name: object, what: str) -> str:
    if not isinstance(name, str):
        raise ArgumentTypeError(f"a {what} name is a string, not {type(name).__name__}")
    if not _CHANNEL.fullmatch(name):
        raise ArgumentError(f"{what} name {name!r}: use 1 to 64 of the characters A-Z a-z 0-9 . _ -")
    return name


def control_name(channel: str) -> str:
    """The channel's control segment."""
    return PREFIX + channel


def sequence_table_name(channel: str, uid: int) -> str:
    """A producer's sequence table; its semaphore has the same name."""
    return f"{PREFIX}{channel},{uid:016x}"


def ring_name(channel: str, uid: int, index: int) -> str:
    """One of a producer's rings."""
    return f"{PREFIX}{channel},{uid:016x},{index}"


def semaphore_name(channel: str, uid: int, number: int) -> str:
    """A counting semaphore that the processes with a queue share; `uid` is that of the member that owns it."""
    return f"{PREFIX}{channel},{uid:016x},{number}"


def reply_channel(service: str, uid: int) -> str:
    """The name of the channel of the replies to one client of a service. The client is its only subscriber."""
    return f"{service}.{uid:016x}"


@functools.lru_cache(4096)
def parse_file(name: str) -> tuple[str, int | None] | None:
    """(channel, uid or None) of a file name in `/dev/shm`; None if it is not this library's."""
    match = _FILE.fullmatch(name)
    if match is None:
        return None
    return match["channel"], int(match["uid"], 16) if match["uid"] else None


def files_by_channel() -> dict[str, dict[str, int]]:
    """The names of every channel's files, of any user, with the uid in each; 0 for the control segment."""
    found: dict[str, dict[str, int]] = {}
    for name in shm.listing():
        if parsed := parse_file(name):
            found.setdefault(parsed[0], {})[name] = parsed[1] or 0
    return found


SERVER_FILES: Final = frozenset({SOCKET, LOCKS, NEW_SOCKET})
"""In the socket directory: what belongs to a segment server."""


def is_socket_name(name: str) -> bool:
    """Whether an entry of the socket directory may be a member's inbox or FIFO."""
    return _SOCKET.fullmatch(name) is not None


def socket_dir() -> str:
    """The directory of this user's sockets: `$SHMTENSOR_DIR`, else `/tmp/shmtensor-<user id>`. Made if it is missing.

    Raises `ResourceError` unless it belongs to this user and has mode 0700.
    """
    path = os.environ.get("SHMTENSOR_DIR") or f"/tmp/shmtensor-{os.geteuid()}"
    try:
        with contextlib.suppress(FileExistsError):  # its kind is checked below
            os.makedirs(path, mode=0o700, exist_ok=True)
        info = os.lstat(path)
    except OSError as error:
        raise ResourceError(
            error.errno,
            f"socket directory {path}: {error.strerror}, for user {os.geteuid()}: set SHMTENSOR_DIR to another one; "
            "containers that share one all run as its user",
        ) from None
    if not stat.S_ISDIR(info.st_mode):
        raise ResourceError(
            errno.ENOTDIR,
            f"socket directory {path} is {shm.kind_of(info.st_mode)} of user {info.st_uid}, not a directory: remove "
            "it, or set SHMTENSOR_DIR to a directory of your own",
        )
    if info.st_uid != os.geteuid():
        raise ResourceError(
            errno.EPERM,
            f"socket directory {path} belongs to user {info.st_uid}, you are user {os.geteuid()}: set SHMTENSOR_DIR to "
            "a directory of your own; containers that share one all run as its user",
        )
    if info.st_mode & 0o077:
        raise ResourceError(
            errno.EPERM, f"socket directory {path} has mode {info.st_mode & 0o777:o}: run chmod 700 {path}"
        )
    if len(os.fsencode(path)) + 17 > _IPC_PATH_MAX:
        raise ResourceError(
            errno.ENAMETOOLONG,
            f"socket directory {path} is too long, at most {_IPC_PATH_MAX - 17} bytes: set SHMTENSOR_DIR",
        )
    return path


def socket_path(directory: str, uid: int) -> str:
    """The path of a receiver's inbox."""
    return f"{directory}/{uid:016x}"
