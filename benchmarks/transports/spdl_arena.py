"""SPDL's shared-memory arenas: the segment pool (views) and the ring buffer (copies out).

SPDL uses them inside `iterate_in_subprocess` only. Here its own two ends, `offload` and `restore`, are joined by
a pipe instead of its queue, so that the arena is measured and not the pipeline around it.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.shared_memory import SharedMemory
from typing import Any, ClassVar

from .base import FAN_OUT, PAIR, Copies, Link, LinkSettings, Receiver, Sender, Transport

ALIGNMENT = 64


def _attach(name: str) -> SharedMemory:
    """Instead of SPDL's own, which unregisters from a resource tracker that all processes here share."""
    return SharedMemory(name)


def quiet_arenas() -> Any:
    """SPDL's module of arenas, made quiet at clean-up."""
    import spdl.pipeline._arena as arenas

    arenas._pool._attach = arenas._ring._attach = _attach
    return arenas


class SpdlLink(Link):
    def __init__(self, settings: LinkSettings, arena: Any) -> None:
        super().__init__(settings)
        context = multiprocessing.get_context("spawn")
        arena._space_cv = context.Condition()  # its own is of the default context and refuses any other
        self.arena = arena
        self.reading, self.writing = context.Pipe(duplex=False)

    def sender(self, index: int = 0) -> Sender:
        offload, write = quiet_arenas()._Arena(self.arena).offload, self.writing.send_bytes
        return Sender(lambda tensor: write(offload(tensor)), self.writing.close)

    def receiver(self, index: int = 0) -> Receiver:
        restore, read = quiet_arenas()._Arena(self.arena).restore, self.reading.recv_bytes
        return Receiver(lambda: restore(read()), self.reading.close)

    def close(self) -> None:
        self.reading.close()
        self.writing.close()
        self.arena.close()
        self.arena.unlink()


class SpdlPool(Transport):
    name = "SPDL segment pool"
    package = "spdl"
    distribution = "spdl_core"
    form = "numpy"
    work = "copy into a segment, pickle a marker into a pipe; receive an array over the segment"
    patterns = frozenset({PAIR, FAN_OUT})
    kind: ClassVar[str] = "SharedMemorySegmentPool"

    def link(self, settings: LinkSettings) -> Link:
        if settings.pattern == FAN_OUT:
            return Copies(settings, self.link)
        unit, count = settings.nbytes + ALIGNMENT, settings.in_flight + 1
        arenas = quiet_arenas()
        if self.kind == "SharedMemorySegmentPool":
            return SpdlLink(settings, arenas.SharedMemorySegmentPool(unit, count))
        return SpdlLink(settings, arenas.SharedMemoryRingBuffer(unit * count))


class SpdlRing(SpdlPool):
    name = "SPDL ring buffer"
    work = "copy into a ring, pickle a marker into a pipe; receive an array that was copied out"
    kind = "SharedMemoryRingBuffer"
