"""SPDL's shared-memory arenas: the segment pool (views) and the ring buffer (copies out).

SPDL uses them inside `iterate_in_subprocess` only. Here its own two ends, `offload` and `restore`, are joined by
a pipe instead of its queue, so that the arena is measured and not the pipeline around it; or by the standard
executor's result queue (`ArenaExecutor`), so that it carries the results of calls.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from functools import partial
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


class ArenaExecutor(ProcessPoolExecutor):
    """The standard executor with forked workers, whose results go through arenas: one for each worker, who alone writes
    to it. Arguments go as ever, or, of one worker, through an arena as well.

    An arena must be read in the order in which it was written, and both queues of the standard executor keep that order
    where there is one writer and one reader. So values are put into the arena while the queue's message is pickled, and
    restored while it is unpickled: that costs no second future, no further thread, and no wait but the queue's own.
    The arenas are closed and unlinked at shutdown.
    """

    def __init__(self, results: Sequence[Any], calls: Any = None) -> None:
        if calls is not None and len(results) != 1:
            raise ValueError("an arena of calls has one reader")
        fork = multiprocessing.get_context("fork")
        self._arenas = {next(_numbers): arena for arena in (*results, *([] if calls is None else [calls]))}
        for number, arena in self._arenas.items():
            arena._space_cv = fork.Condition()  # its own is of the default context and refuses any other
            _ends[number] = quiet_arenas()._Arena(arena)
        numbers = list(self._arenas)
        self._calls = None if calls is None else numbers[-1]
        super().__init__(len(results), fork, _choose_arena, (fork.Value("i", 0), numbers))

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:
        given = args if self._calls is None else _Through(self._calls, args)
        return super().submit(_call, function, given)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait, cancel_futures=cancel_futures)
        while self._arenas:
            number, arena = self._arenas.popitem()
            del _ends[number]
            arena.close()
            arena.unlink()


class TwoWayArenaExecutor(Executor):
    """Arenas for arguments and results: an `ArenaExecutor` for each worker, so that one alone reads its arguments.
    A call goes to the worker that has the fewest."""

    def __init__(self, results: Sequence[Any], calls: Sequence[Any]) -> None:
        self._each = [ArenaExecutor([result], call) for result, call in zip(results, calls, strict=True)]
        for executor in self._each:  # forks the worker
            executor.submit(len, ()).result()

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:
        return min(self._each, key=_under_way).submit(function, *args)

    def map(
        self, function: Callable[..., Any], *iterables: Any, timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[Any]:
        calls = zip(*iterables, strict=False)
        chunks = iter(lambda: list(itertools.islice(calls, chunksize)), [])
        return itertools.chain.from_iterable(super().map(partial(_call_each, function), chunks, timeout=timeout))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for executor in self._each:
            executor.shutdown(wait, cancel_futures=cancel_futures)


def _under_way(executor: Any) -> int:
    return len(executor._pending_work_items)


_numbers = itertools.count()
_ends: dict[int, Any] = {}
"""By number of the arena, in the process that made the executors and, by fork, in workers: what reads or writes it."""
_results: list[int] = []
"""In a worker: the number of its arena."""


class _Through:
    """A value that goes through an arena when it is pickled. Unpickled, it is the value."""

    def __init__(self, number: int, value: Any) -> None:
        self.number, self.value = number, value

    def __reduce__(self) -> tuple[Callable[[int, bytes], Any], tuple[int, bytes]]:
        return _restore, (self.number, _ends[self.number].offload(self.value))


def _restore(number: int, marker: bytes) -> Any:
    return _ends[number].restore(marker)


def _choose_arena(counter: Any, numbers: Sequence[int]) -> None:
    with counter.get_lock():
        _results[:] = [numbers[counter.value]]
        counter.value += 1


def _call_each(function: Callable[..., Any], calls: Sequence[Sequence[Any]]) -> list[Any]:
    return [function(*args) for args in calls]


def _call(function: Callable[..., Any], args: Sequence[Any]) -> _Through:
    return _Through(_results[0], function(*args))
