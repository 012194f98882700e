"""eclipse-zenoh with shared memory: peers over a Unix socket, payloads in its shared-memory provider.

Its Python binding writes and reads shared memory through `bytes` only, so that each side pays a copy of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import tempfile
import time
from typing import Any

from .base import FAN_IN, FAN_OUT, PAIR, Link, LinkSettings, Receiver, Sender, Transport

CONNECTED_WITHIN = 30.0
"""Seconds."""


class ZenohLink(Link):
    """The single end listens on a socket in a directory of its own, the others connect."""

    def __init__(self, settings: LinkSettings) -> None:
        super().__init__(settings)
        self.directory = tempfile.mkdtemp(prefix="bench-zenoh-")

    def _session(self, listens: bool) -> Any:
        import zenoh

        address = f'["unixsock-stream/{self.directory}/socket"]'
        config = zenoh.Config()
        config.insert_json5("mode", '"peer"')
        config.insert_json5("scouting/multicast/enabled", "false")
        config.insert_json5("transport/shared_memory/enabled", "true")
        config.insert_json5("transport/shared_memory/mode", '"init"')
        config.insert_json5("listen/endpoints", address if listens else "[]")
        if not listens:
            config.insert_json5("connect/endpoints", address)
            config.insert_json5("connect/timeout_ms", str(int(CONNECTED_WITHIN * 1000)))
        return zenoh.open(config)

    def sender(self, index: int = 0) -> Sender:
        import zenoh

        settings = self.settings
        session = self._session(settings.pattern == FAN_OUT)
        blocking = zenoh.CongestionControl.BLOCK
        for number in range(settings.peers if settings.pattern == FAN_OUT else 1):
            _wait_for_match(session.declare_publisher(f"{settings.name}/{number}"))
        put = session.declare_publisher(settings.name, congestion_control=blocking, express=True).put
        provider = zenoh.shm.ShmProvider.default_backend((settings.in_flight + 2) * settings.nbytes + (1 << 16))
        policy = zenoh.shm.BlockOn(zenoh.shm.GarbageCollect())
        alloc, nbytes = provider.alloc, settings.nbytes

        def send(data: bytes) -> None:
            buffer = alloc(nbytes, policy)
            buffer[0:nbytes] = data
            put(buffer)

        return Sender(send, session.close)

    def receiver(self, index: int = 0) -> Receiver:
        import zenoh

        session = self._session(self.settings.pattern != FAN_OUT)
        channel = zenoh.handlers.FifoChannel(self.settings.in_flight)
        recv = session.declare_subscriber(self.settings.name, channel).recv
        presence = session.declare_subscriber(f"{self.settings.name}/{index}", zenoh.handlers.FifoChannel(1))

        def close() -> None:
            presence.undeclare()
            session.close()

        return Receiver(lambda: recv().payload.to_bytes(), close)

    def close(self) -> None:
        for name in os.listdir(self.directory):
            os.unlink(os.path.join(self.directory, name))
        os.rmdir(self.directory)
        _sweep()


def _sweep() -> None:
    """Remove zenoh's segments that no process has locked: it leaves its own behind when a process ends."""
    for path in glob.glob("/dev/shm/*.zenoh"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)


def _wait_for_match(publisher: Any) -> None:
    deadline = time.monotonic() + CONNECTED_WITHIN
    while not publisher.matching_status.matching:
        if time.monotonic() > deadline:
            raise TimeoutError("zenoh: the subscriber was not found")
        time.sleep(1e-3)


class Zenoh(Transport):
    name = "zenoh, shared memory"
    package = "zenoh"
    distribution = "eclipse-zenoh"
    form = "bytes"
    work = "allocate, copy bytes in, put; receive, copy out as bytes"
    patterns = frozenset({PAIR, FAN_OUT, FAN_IN})

    def link(self, settings: LinkSettings) -> Link:
        return ZenohLink(settings)
