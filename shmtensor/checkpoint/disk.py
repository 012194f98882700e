"""Threads that write: as many as may be started, and without any whoever asks them to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple


class _Call(NamedTuple):
    done: Future[None]
    function: Callable[..., None]
    args: tuple[Any, ...]


class Disk:
    """`count` threads, made at once; they end with the process.

    Not a `ThreadPoolExecutor`: its `submit` raises where a thread cannot be started, and may run the call all the same,
    later, into files that are closed by then.
    """

    def __init__(self, count: int) -> None:
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        self.threads = 0
        for number in range(count):
            thread = threading.Thread(target=self._work, name=f"shmtensor disk {number}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads may be started
                return
            self.threads += 1

    def submit(self, function: Callable[..., None], *args: Any) -> Future[None]:
        """Call the function: soon, in one of the threads; without any, now. The future has what it raised."""
        call = _Call(Future(), function, args)
        if self.threads:
            self._calls.put(call)
        else:
            _run(*call)
        return call.done

    def _work(self) -> None:
        while True:
            _run(*self._calls.get())


def _run(done: Future[None], function: Callable[..., None], args: tuple[Any, ...]) -> None:
    try:
        function(*args)
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(None)
