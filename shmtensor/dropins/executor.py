"""`ProcessPoolExecutor` whose tensors and arrays go through shared-memory slots.

It is the standard executor: its management thread and its worker loop. Only what they carry is another thing, and
what carries it. What `submit` was given is pickled at once and sent when a worker has time for it (`shipping.py`); a
worker sends its result the same way (`worker.py`); sockets carry the name of a slot (`lines.py`).
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Final

from ..channel.control import CAPACITY
from ..endpoints.base import check_count
from ..errors import ArgumentError, ArgumentTypeError
from ..units import parse_bytes
from . import lines, worker
from .arrivals import Arrivals
from .parcels import check_fits
from .retries import Retries, fail_overlooked, settle
from .shipping import Depot, Shipment, Task
from .streams import dumps
from .worker import Packed

MOST_WORKERS: Final = CAPACITY - 6
"""A channel has so many members; some places are left to workers that follow others."""
_TRIES: Final = 10
"""How often a call is offered to pools that break at that very moment."""

_depots: weakref.WeakKeyDictionary[threading.Thread, Depot] = weakref.WeakKeyDictionary()
"""By management thread: a pool's channels stay until its workers have ended, whoever else has dropped them."""


class ProcessPoolExecutor(concurrent.futures.ProcessPoolExecutor):
    """`concurrent.futures.ProcessPoolExecutor`, with tensors and arrays sent through shared memory, both ways.

    Args:
        max_workers, mp_context, initializer, initargs, max_tasks_per_child: as for the standard executor, with at most
            250 workers. `max_tasks_per_child` needs Python 3.11.
        max_bytes: shared memory [bytes, or a string such as `"4GiB"`] that the parent may take for the arguments of
            calls, and each worker for its results; None: as far as `/dev/shm` allows.
        retry_on_death: how often a call is run again after the worker that ran it died. With 0, a worker's death
            breaks the pool, as it does the standard one.
        device: such as `"cuda"`: tensors in results are CUDA tensors, copied there from the worker's slot on a stream
            of their own, and safe to use on the stream that is current where `result()` is called. Arrays stay in
            host memory, workers do not touch CUDA. `ResourceError` where CUDA is missing.

    Tensors and arrays in what a future returns are the worker's slot itself, writable and yours: the slot is used
    again when the last view of them has died. (Values up to 64 KiB are copied out.) A call gets its arguments in the
    same way.

    `submit` raises what pickling its arguments raises, and `ResourceError` if they are larger than `max_bytes`. A
    future raises what its call raises, what pickling the result raises, `ResourceError` if there is no room for the
    result, and `BrokenProcessPool` if its worker died.

    >>> import numpy as np, shmtensor
    >>> from multiprocessing import get_context
    >>> with shmtensor.ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
    ...     total = pool.submit(np.add, np.ones((512, 512)), 1).result().sum()
    >>> int(total)
    524288
    """

    def __init__(
        self,
        max_workers: int | None = None,
        mp_context: Any = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        *,
        max_tasks_per_child: int | None = None,
        max_bytes: int | str | None = None,
        retry_on_death: int = 0,
        device: Any = None,
    ) -> None:
        check_count("retry_on_death", retry_on_death, 0, 1000)
        if initializer is not None and not callable(initializer):
            raise ArgumentTypeError("initializer must be a callable")
        if max_workers is None:
            max_workers = min(os.cpu_count() or 1, MOST_WORKERS)
        elif max_workers > MOST_WORKERS:
            raise ArgumentError(f"max_workers must be <= {MOST_WORKERS}, not {max_workers}: use several executors")
        newer: dict[str, Any] = {}
        if max_tasks_per_child is not None:
            if sys.version_info < (3, 11):
                raise ArgumentError("max_tasks_per_child needs Python 3.11 or newer")
            newer["max_tasks_per_child"] = max_tasks_per_child
        self._max_bytes = None if max_bytes is None else parse_bytes(max_bytes, "max_bytes")
        self._arrivals = Arrivals.to(device)
        self._given = (max_workers, mp_context), newer, (initializer, initargs)
        self._retries = Retries(weakref.WeakMethod(self._renew), retry_on_death)
        self._gate = threading.RLock()  # one at a time: hand over a task, or make a fresh pool
        self._ending = False
        self._open()

    def _open(self) -> None:
        """Become a fresh pool, which has not started a worker yet."""
        general, newer, beginning = self._given
        depot = Depot(self._max_bytes, self._arrivals, slots_only=self._retries.most > 0)
        try:
            super().__init__(*general, **newer)
        except BaseException:
            depot.close()
            raise
        self._depot: Depot | None = depot
        lines.lay(self)
        self._initializer, self._initargs = worker.start, (depot.address, *beginning)
        self._manager: weakref.ref[threading.Thread] | None = None

    # --- calls

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Schedule `fn(*args, **kwargs)`; returns its future.

        The call is pickled before this returns. Tensors and arrays in it are copied when a worker is chosen for it: as
        with the standard executor, change them only when the call has ended.
        """
        value = dumps((fn, args, kwargs))
        check_fits(value, self._max_bytes, "a call")
        task = Task(value)
        self._check_open()  # before the gate: whoever makes a fresh pool holds it for long
        with self._gate:
            self._check_open()
            for attempts_left in range(_TRIES, -1, -1):
                if self._retries.most and self._broken:
                    self._renew()
                try:
                    self._attempt(task)
                    break
                except BrokenProcessPool:  # just now
                    if not self._retries.most or not attempts_left:
                        raise
        return task

    def _check_open(self) -> None:
        if self._ending:
            raise RuntimeError("cannot schedule new futures after shutdown")

    def _attempt(self, task: Task) -> None:
        """Hand a task to the standard executor."""
        depot = self._depot
        if depot is None:
            raise RuntimeError("cannot schedule new futures after shutdown")
        shipment = Shipment(depot, task)
        attempt: Future[Packed] = super().submit(worker.run, shipment)  # type: ignore[arg-type]
        manager: Any = self._executor_manager_thread
        if manager is not None and manager not in _depots:
            _depots[manager] = depot
            self._manager = weakref.ref(manager)
        attempt.add_done_callback(functools.partial(settle, shipment, self._retries))
        if self._broken and manager is not None:  # meanwhile
            threading.Thread(target=fail_overlooked, args=(manager,), name="shmtensor pool end").start()

    # --- ends

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As for the standard executor. Results that are alive stay valid."""
        self._ending = True
        if self._retries.most:
            self._shut_down_at_last(wait, cancel_futures)
        else:
            super().shutdown(wait=wait, cancel_futures=cancel_futures)
        depot, self._depot = self._depot, None
        if wait and depot is not None:  # else it closes when the management thread has ended
            depot.close()

    def _shut_down_at_last(self, wait: bool, cancel_futures: bool) -> None:
        """Shut down whatever pool there is, until no worker's death leads to another one."""
        if cancel_futures:
            self._retries.stop()
        while True:
            with self._gate:
                super().shutdown(wait=False, cancel_futures=cancel_futures)
                manager = self._living_manager()
            if not wait:
                return
            if manager is not None:
                manager.join()
            with self._gate:
                self._renew()
                if self._living_manager() is manager:
                    break
        self._retries.join()

    def _living_manager(self) -> threading.Thread | None:
        return None if self._manager is None else self._manager()

    def _renew(self) -> None:
        """Replace the pool if it broke, and hand over again what was lost with it."""
        with self._gate:
            waiting: collections.deque[Task] = collections.deque()
            try:
                while self._hand_over(waiting):
                    pass
            except Exception as error:
                if not waiting:
                    raise
                for task in waiting:
                    failure = BrokenProcessPool("a worker died, and no fresh pool could be made")
                    failure.__cause__ = error
                    task.fail(failure)

    def _hand_over(self, waiting: collections.deque[Task]) -> bool:
        """One try at that; whether another is needed, since the fresh pool broke meanwhile."""
        waiting.extendleft(reversed(self._retries.collect()))
        if not waiting and (self._ending or not self._broken):
            return False
        try:
            if self._broken:
                manager = self._living_manager()
                if manager is not None:
                    manager.join()
                if self._depot is not None:
                    self._depot.close()
                self._open()
            while waiting:
                self._attempt(waiting[0])
                waiting.popleft()
        except BrokenProcessPool:
            return True
        finally:
            if self._ending:
                super().shutdown(wait=False)
                self._depot = None
        return False
