"""`ProcessPoolExecutor` whose tensors and arrays go through shared-memory slots.

It is the standard executor with its management thread and its worker loop; only the calls and their transport differ.
`submit` pickles a call at once, and it is sent when a worker is about to be free (`calls.py`); a worker sends its
result the same way (`worker.py`); sockets carry the names of slots (`transport.py`).

Asynchronous exceptions such as Ctrl-C are raised in the calling thread, between any two steps. There, a call is handed
over in one step, under locks that a C function takes. Work of several steps (create the pool, start workers, shut down)
runs on a thread that no other code knows (`shielded.aside`), and may be repeated.
"""

from __future__ import annotations

import _thread
import collections
import concurrent.futures
import contextlib
import contextvars
import functools
import itertools
import operator
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import process as standard
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import util
from typing import Any, Final

from ..errors import ArgumentError, ArgumentTypeError, ForkedError, ReentrantError
from ..mp.direct import MOST_WORKERS, ThreadLocks, check_fits
from ..mp.pickling import Transfers, dumps
from ..options import check_count, context_of, parse_bytes
from ..shielded import OwnThread, aside
from . import transport, worker
from .calls import Attempt, CallChannels, Retries, Task, end_attempt

_TRIES: Final = 10
"""How often `submit` tries again because the pool breaks at that moment."""

_BREAKS_LOCKED: Final = hasattr(standard._ExecutorManagerThread, "_terminate_broken")
"""Whether the management thread holds the pool's lock while it marks the pool as broken, as newer versions do."""

_channels_of: weakref.WeakKeyDictionary[threading.Thread, CallChannels] = weakref.WeakKeyDictionary()
"""Pools' channels by management thread: they are kept alive until the workers have ended."""


def _grad_mode() -> bool | None:
    """PyTorch's grad mode of this thread; None if PyTorch is not imported."""
    torch: Any = sys.modules.get("torch")
    return None if torch is None else torch.is_grad_enabled()


def _finish() -> None:
    """End all management threads, and wait for them."""
    while True:
        try:
            standard._python_exit()
            return
        except OSError:  # one of them has just closed the pipe that would have woken it, and is not woken again
            pass


def _finish_with_process() -> None:
    """Register that a `multiprocessing` child finishes its calls before its endpoints leave, and before it joins its
    children, which include the workers. Without this its main thread would not wait for the management threads
    first."""
    global _finished_pid
    if _finished_pid != os.getpid():
        util.Finalize(None, _finish, exitpriority=_EXIT_PRIORITY)  # twice, if interrupted: harmless
        _finished_pid = os.getpid()


_finished_pid = 0
_EXIT_PRIORITY: Final = 20
"""The priority of that finalizer: it runs before all finalizers of objects that callbacks may use."""


class ProcessPoolExecutor(concurrent.futures.ProcessPoolExecutor):
    """`concurrent.futures.ProcessPoolExecutor`, with tensors and arrays sent through shared memory, both ways.

    Args:
        max_workers, initializer, initargs, max_tasks_per_child: as for the standard executor, with at most 250 workers.
            `max_tasks_per_child` needs Python 3.11.
        mp_context: a `multiprocessing` context or a start method's name, such as `"fork"`; None: the default one.
        max_bytes: shared memory (bytes, or a string such as `"4GiB"`) that the parent may take for the arguments of
            calls, and each worker for its results; None: a ring is added only if it takes at most half of what
            `/dev/shm` has free.
        retry_on_death: how often a call is run again after the worker that ran it died. With 0, a worker's death
            breaks the pool, as it does the standard one.
        device: (experimental) such as `"cuda"`: tensors in results are CUDA tensors, copied there from the worker's
            slot on a stream of their own, and safe to use on the stream that is current where `result()` is called.
            Arrays stay in host memory, workers do not touch CUDA. `ResourceError` where CUDA is missing.

    Tensors and arrays in a future's result are writable views of the worker's slot, which is reused when the last view
    has died. (Values up to 64 KiB are copied out.) A call gets its arguments in the same way.

    `submit` raises what pickling its arguments raises, and `ResourceError` if they are larger than `max_bytes`. A
    future raises what its call raises, what pickling the result raises, `ResourceError` if there is no room for the
    result, and `BrokenProcessPool` if its worker died.

    >>> import numpy as np, shmtensor
    >>> with shmtensor.ProcessPoolExecutor(2, mp_context="fork") as pool:
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
        try:
            max_workers = min(os.cpu_count() or 1, MOST_WORKERS) if max_workers is None else operator.index(max_workers)
        except TypeError:
            raise ArgumentTypeError(f"max_workers must be an int or None, not {type(max_workers).__name__}") from None
        if max_workers > MOST_WORKERS:
            raise ArgumentError(f"max_workers must be <= {MOST_WORKERS}, not {max_workers}: use several executors")
        newer: dict[str, Any] = {}
        if max_tasks_per_child is not None:
            if sys.version_info < (3, 11):
                raise ArgumentError("max_tasks_per_child needs Python 3.11 or newer")
            newer["max_tasks_per_child"] = max_tasks_per_child
        self._max_bytes = None if max_bytes is None else parse_bytes(max_bytes, "max_bytes")
        self._transfers = Transfers.to(device)
        if mp_context is None and max_tasks_per_child is not None:
            mp_context = "spawn"  # as the standard executor: it may not be "fork"
        mp_context = context_of(mp_context, "mp_context")
        self._given = (max_workers, mp_context), newer, (initializer, initargs)
        self._retries = Retries(weakref.WeakMethod(self._renew), retry_on_death)
        self._end_attempt = functools.partial(end_attempt, self._retries)
        self._gate = threading.RLock()  # one at a time: hand over a task, or create a fresh pool
        self._starting, self._forgetting = _thread.allocate_lock(), _thread.allocate_lock()
        self._leaving = threading.RLock()  # one at a time: drop the channels
        self._numbers = itertools.count()
        self._ending = False
        self._pid = os.getpid()
        _finish_with_process()
        aside(self._open, "shmtensor pool start")

    def _open(self) -> None:
        """Become a fresh pool that has not started a worker."""
        general, newer, beginning = self._given
        channels = CallChannels(self._max_bytes, self._transfers, slots_only=self._retries.most > 0)
        workers, context = general
        try:
            locks: Any = ThreadLocks(context)
            super().__init__(workers, locks, **newer)  # it makes queues, which are replaced
        except BaseException:
            channels.close()
            raise
        self._mp_context = context
        self._channels: CallChannels | None = channels
        transport.install(self)
        self._work_ids = queue.SimpleQueue()  # type: ignore[assignment]
        self._grows: bool = getattr(self, "_safe_to_dynamically_spawn_children", True)  # not there before Python 3.10.5
        self._initializer, self._initargs = worker.start, (channels.address, *beginning)
        self._manager: weakref.ref[threading.Thread] | None = None

    @property  # type: ignore[override]
    def _broken(self) -> bool | str:
        """Why the pool is broken, or False; set under the lock under which a call is handed over.

        So each call is either refused or among those that the management thread fails, and no worker is started from
        sockets that it has begun to close.
        """
        return self._breakage

    @_broken.setter
    def _broken(self, why: bool | str) -> None:
        with contextlib.nullcontext() if _BREAKS_LOCKED else self._shutdown_lock:
            self._breakage = why

    # --- calls

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Schedule `fn(*args, **kwargs)`; returns its future.

        The call is pickled before this returns. Tensors and arrays in it are copied when a worker is chosen for it: as
        with the standard executor, change them only when the call has ended.
        """
        self._check_open()  # before the gate, which is held for long while a fresh pool is created
        if self._is_inside() and not isinstance(threading.current_thread(), OwnThread):
            raise ReentrantError(
                "a signal handler or finalizer called submit() in the middle of another submit() of its own thread: "
                "submit from another thread, or set a flag there"
            )
        value = dumps((fn, args, kwargs))
        check_fits(value, self._max_bytes, "a call")
        task = Task(value)
        for attempts_left in range(_TRIES, -1, -1):
            if self._retries.most and self._broken:
                aside(self._renew, "shmtensor renewal")
            try:
                with self._gate:
                    self._check_open()
                    self._attempt(task)
                break
            except BrokenProcessPool:  # just now
                if not self._retries.most or not attempts_left:
                    raise
        return task

    def _is_inside(self) -> bool:
        """Whether this thread is handing over a call."""
        return self._gate._is_owned()  # type: ignore[attr-defined, no-any-return]

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise ForkedError(
                f"this ProcessPoolExecutor belongs to process {self._pid}, which forked this one: create a new one here"
            )
        if self._ending:
            raise RuntimeError("cannot schedule new futures after shutdown")

    def _attempt(self, task: Task) -> None:
        """Hand a task to the standard executor."""
        channels = self._channels
        if channels is None:
            raise RuntimeError("cannot schedule new futures after shutdown")
        attempt = Attempt(channels, task, self._end_attempt)
        item = standard._WorkItem(attempt, worker.run, (attempt,), {})  # type: ignore[arg-type]
        with self._shutdown_lock:
            if self._broken:
                raise BrokenProcessPool(self._broken)
            if self._shutdown_thread:
                raise RuntimeError("cannot schedule new futures after shutdown")
            if standard._global_shutdown:
                raise RuntimeError("cannot schedule new futures after interpreter shutdown")
            number = next(self._numbers)
            try:
                self._queue_count = number + 1
                self._pending_work_items[number] = item  # from here to the next line there is no interrupt
                self._work_ids.put(number)
                self._dispatch()
            except BaseException:
                if number in self._pending_work_items:
                    self._dispatch()
                raise

    def _dispatch(self) -> None:
        """Wake the management thread and start workers for a new call. May be interrupted, and repeated."""
        self._executor_manager_thread_wakeup.wakeup()
        manager = self._executor_manager_thread
        if manager is None or (self._grows and self._lacks_worker()):
            inherited = contextvars.copy_context(), _grad_mode()
            aside(functools.partial(inherited[0].run, self._start, inherited[1]), "shmtensor pool start")

    def _start(self, grad_mode: bool | None) -> None:
        """Start a worker, or with fork all of them, and the management thread if there is none.

        A forked worker inherits the state of the thread that forks it, which is not the caller's: so the caller's
        context variables and PyTorch's grad mode are set here.
        """
        if grad_mode is not None:
            sys.modules["torch"].set_grad_enabled(grad_mode)
        with self._starting:
            if self._grows:
                self._adjust_process_count()
            try:
                self._start_executor_manager_thread()
            except BaseException:  # else `shutdown` would wait for a thread that was not started
                self._executor_manager_thread = None  # type: ignore[assignment]
                raise
            manager: Any = self._executor_manager_thread
            if manager not in _channels_of and self._channels is not None:
                _channels_of[manager] = self._channels
                self._manager = weakref.ref(manager)

    def _lacks_worker(self) -> bool:
        """Whether there are more calls than workers, and another worker may be started."""
        processes: Any = self._processes  # None after `shutdown(wait=False)`
        return processes is not None and len(processes) < min(self._given[0][0], len(self._pending_work_items))

    def _adjust_process_count(self) -> None:
        """Start a worker if one is lacking. The management thread calls this when one has exited.

        The standard executor counts idle workers by a semaphore: with `max_tasks_per_child` the count includes those
        that have exited, and none replaces them.
        """
        if self._lacks_worker():
            self._spawn_process()  # type: ignore[attr-defined]

    # --- ends

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As for the standard executor. Living results stay valid.

        If a signal handler or finalizer that interrupts a `submit` of the same thread calls it, it returns at once and
        takes effect when `submit` ends. In a forked child it ends nothing of the parent's.
        """
        if self._pid != os.getpid():
            transport.leave(self)
            self._channels = None
            return
        self._ending = True
        if threading.current_thread() is self._living_manager():  # in a callback
            if cancel_futures:
                self._retries.stop()
            super().shutdown(wait=wait, cancel_futures=cancel_futures)
        else:
            shut_down = functools.partial(self._shut_down, wait, cancel_futures)
            aside(shut_down, "shmtensor pool shutdown", wait=not self._is_inside(), complete=False)

    def _shut_down(self, wait: bool, cancel_futures: bool) -> None:
        """May run on several threads at once."""
        if self._retries.most:
            self._shut_down_at_last(wait, cancel_futures)
        else:
            manager = self._living_manager() if self._flag(cancel_futures) else None
            if wait and manager is not None:
                manager.join()
            self._forget(wait)
        with self._leaving:
            manager = self._living_manager()
            channels = self._channels or (None if manager is None else _channels_of.get(manager))
            if wait and channels is not None and (manager is None or not manager.is_alive()):
                channels.close()  # else it closes when the management thread has ended
                if manager is not None:
                    _channels_of.pop(manager, None)
            self._channels = None
            del channels, manager  # before the lock is released: the thread that takes it next finds nothing left

    def _flag(self, cancel_futures: bool) -> bool:
        """Tell the management thread to end; False if an earlier shutdown has finished with it."""
        with self._shutdown_lock:
            wakeup = self._executor_manager_thread_wakeup
            if cancel_futures:
                self._cancel_pending_futures = True
            self._shutdown_thread = True
            if wakeup is not None:
                wakeup.wakeup()
        return wakeup is not None

    def _forget(self, wait: bool) -> None:
        """Drop what the standard executor drops, and the calls that it has carried."""
        with self._forgetting:
            calls = getattr(self, "_call_queue", None)
            if calls is not None and self._manager is None:  # no management thread could be started: end the workers
                calls.hang_up()
                calls.close()
                for process in list(self._processes.values()) if wait else []:
                    process.join()
            manager: Any = self._executor_manager_thread
            if manager is not None and not manager.is_alive():  # a pipe that nobody reads would be written to
                self._executor_manager_thread_wakeup = None  # type: ignore[assignment]
            del manager
            super().shutdown(wait=wait, cancel_futures=self._cancel_pending_futures)
            self._pending_work_items = {}

    def _shut_down_at_last(self, wait: bool, cancel_futures: bool) -> None:
        """Shut down the pool, and again as long as a worker's death has led to another pool."""
        if cancel_futures:
            self._retries.stop()
        while True:
            with self._gate:
                self._flag(cancel_futures)
                manager = self._living_manager()
            if not wait:
                self._forget(wait)
                return
            if manager is not None:
                manager.join()
            self._renew()
            with self._gate:
                if self._living_manager() is manager:
                    self._forget(wait)
                    break
        self._retries.join()

    def _living_manager(self) -> threading.Thread | None:
        return None if self._manager is None else self._manager()

    def _renew(self) -> None:
        """Replace the pool if it broke, and hand over its lost tasks again. Runs no callbacks."""
        with self._gate:
            waiting: collections.deque[Task] = collections.deque()
            try:
                self._hand_over_all(waiting)
            except Exception as error:
                if not waiting:
                    raise
                for task in waiting:
                    failure = BrokenProcessPool("a worker died, and no fresh pool could be made")
                    failure.__cause__ = error
                    self._retries.give_up(task, failure)

    def _hand_over_all(self, waiting: collections.deque[Task]) -> None:
        while self._hand_over(waiting):
            pass

    def _hand_over(self, waiting: collections.deque[Task]) -> bool:
        """One try of `_renew`; True if another is needed, because the fresh pool broke meanwhile."""
        waiting.extendleft(reversed(self._retries.collect()))
        if not waiting and (self._ending or not self._broken):
            return False
        try:
            if self._broken:
                manager = self._living_manager()
                if manager is not None:
                    manager.join()
                if self._channels is not None:
                    self._channels.close()
                self._open()
            while True:
                if not waiting:
                    break
                self._attempt(waiting[0])
                waiting.popleft()
        except BrokenProcessPool:
            return True
        finally:
            if self._ending:
                super().shutdown(wait=False)
                self._channels = None
        return False
