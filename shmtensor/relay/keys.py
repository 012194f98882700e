"""The names of a relay: Zenoh keys, the user, and the hash of a channel, which shows through which channels messages
came."""

from __future__ import annotations

import contextlib
import os
import pwd

import xxhash

from ..memory import placement

_ROOT = "shmtensor/relay"


class Keys:
    """The keys of one channel, by the far host's name of it."""

    def __init__(self, channel: str) -> None:
        self._prefix = f"{_ROOT}/{channel}"

    @property
    def hello(self) -> str:
        """Where far relays listen for near ones."""
        return f"{self._prefix}/hello"

    def near(self, number: int) -> str:
        """Where a near relay listens."""
        return f"{self._prefix}/near/{number:016x}"

    def far(self, number: int) -> str:
        """Where a far relay listens."""
        return f"{self._prefix}/far/{number:016x}"

    def alive_near(self, number: int | str) -> str:
        """The token of a near relay; `"*"`: of each."""
        return f"{self._prefix}/alive/near/{number if isinstance(number, str) else f'{number:016x}'}"

    def alive_far(self, number: int | str) -> str:
        """The token of a far relay; `"*"`: of each."""
        return f"{self._prefix}/alive/far/{number if isinstance(number, str) else f'{number:016x}'}"


def user_name() -> str:
    """The login name of the effective user, or its number."""
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(os.geteuid()).pw_name
    return str(os.geteuid())


def host_id() -> str:
    """What is the same for the processes of this user that share `/dev/shm` or a segment server, and for no other."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot} {placement.current().identity()} {os.geteuid()}"


def path_hash(channel: str) -> int:
    """32 bits that differ between channels of all hosts, and of all namespaces of one host. Never 0."""
    return xxhash.xxh32_intdigest(f"{host_id()} {channel}".encode()) or 1
