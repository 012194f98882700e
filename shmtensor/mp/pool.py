"""`Pool`: the standard library's pool of processes, with tensors and arrays in shared memory.

It is `multiprocessing.pool.Pool` with its threads, its worker loop and its results. In place of its two pipes there are
two work queues:

    task handler   --- tasks -->    any worker          job, number, pickled call
    result handler <-- results ---  all workers         job, number, deaths, scarce, pickled result

A worker holds the message of its task until the result is sent. If it dies, the work queue delivers the message again,
to another worker or to the one that replaces it. By `Message.attempt`, that worker sees that the task has killed
workers; if it may not be tried again, the worker sends their number in place of a result.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from multiprocessing import pool, util
from typing import Any, Final, NamedTuple

from ..children import ParentWatch, how_ended
from ..endpoints.message import Message
from ..endpoints.workqueue import Consumer
from ..errors import ArgumentError, ClosedError, EndOfStream, PeerDied, ResourceError, TimedOut
from ..memory.segment import free_bytes
from ..options import check_count, context_of, parse_bytes
from .direct import MOST_WORKERS, DirectProducer, Patience, ThreadLocks, value_of
from .pickling import DescribedError, dumps, loads
from .queue_handle import default_limit

_PER_WORKER: Final = 8
"""Tasks per worker that wait for it or run; the others wait in the parent and take no slots."""

_PARENT_CHECK: Final = 1.0
"""Seconds after which a worker without a task checks whether its parent lives."""

_SMALL_SLOT_BYTES: Final = 256
"""Slot size of the first ring of each end: an error, or the end, has room there when no other ring can be made."""

log = logging.getLogger("shmtensor.mp")

_RETRY: Final = 1.0
"""Seconds after which a step that failed for lack of memory or open files is tried again."""
_TELL_AGAIN: Final = 60.0
"""Seconds after which such a failure that goes on is logged again."""

_REMEMBERED: Final = 64
"""Deaths of workers that the parent remembers, for the errors of their tasks."""
_NOTICED: Final = 10.0
"""Seconds within which the process of a worker that left its task unfinished should have ended."""
_BRIEFLY: Final = 1.0
"""The same if workers may also end without having left a task."""
_LOOK: Final = 0.02
"""Seconds between two checks whether it has ended."""
_MOST_ATTEMPTS: Final = 250
_MOST_RETRIES: Final = 100


class _Channels(NamedTuple):
    """How a worker finds its pool."""

    tasks: str
    results: str
    max_bytes: int | None
    retries: int


class _Receiver(Consumer):
    """Takes tasks or results. It does not warn of those that end with the pool."""

    _traits = replace(Consumer._traits, counts_lost=False)


class _WorkerEnds:
    """A worker's ends of both queues, in one object, with the methods that the standard library's worker loop calls.

    The parent has one, too, which only sends the parent itself the end of the results.
    """

    parent: _ParentEnds
    """The parent's ends. Not set in a worker, unless it was forked."""

    def __init__(self, channels: _Channels) -> None:
        self._channels = channels
        self._begin()

    def __reduce__(self) -> Any:
        return _WorkerEnds, (self._channels,)

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._consumer: Consumer | None = None
        self._parent: ParentWatch | None = None
        self._producer: Any = None  # a `DirectProducer`, made before a task is taken
        self._task: Message | None = None
        """The message of the task that runs."""
        self._shortage = _Shortage("a worker of a pool")

    def get(self) -> Any:
        """The next task; None: there will be none. `EOFError` if the parent is gone."""
        if self._pid != os.getpid():  # forked
            self._begin()
        consumer = self._consumer or self._join()
        while True:
            message = self._recv(consumer)
            # crash: task.taken
            job, number, *value = value_of(message)
            if job is None:
                message.release()
                return None
            self._task = message
            if message.attempt > 1 + self._channels.retries:
                self._answer(job, number, dumps(None), deaths=message.attempt - 1)
                continue
            try:
                task = job, number, *loads(value)
            except Exception as error:  # this task's, not the worker's
                self._fail(job, number, error)
                continue
            # crash: task.read
            return task

    def _join(self) -> Consumer:
        """Become a member of both channels, with room for an error: a worker that cannot answer takes no task.

        Waits while there is no memory for that. A worker that ended would be replaced by another, over and over.
        """
        self._parent = ParentWatch()
        # an exit in a task: its message must not live until the interpreter clears its modules, which it needs to end
        util.Finalize(None, self._let_go, exitpriority=10)
        while True:
            try:
                if self._producer is None:
                    self._producer = DirectProducer(self._channels.results, self._channels.max_bytes, _SMALL_SLOT_BYTES)
                self._consumer = _Receiver(self._channels.tasks, acknowledge="release", max_attempts=_MOST_ATTEMPTS)
                return self._consumer
            except ResourceError as error:
                self._check_parent()
                self._shortage.wait(error)

    def _let_go(self) -> None:
        """Release, at the end of the worker, the task that an exit has cut short. It is not marked as done."""
        self._task = None

    def _recv(self, consumer: Consumer) -> Message:
        """The next message of the parent; `EOFError` if it is gone, even if it has sent more tasks ahead."""
        while True:
            try:
                message = consumer.recv(timeout=_PARENT_CHECK)
            except TimedOut:
                self._check_parent()
            except ResourceError as error:
                self._check_parent()
                self._shortage.wait(error)
            except (EndOfStream, ClosedError):
                raise EOFError from None
            else:
                self._check_parent()
                return message

    def _check_parent(self) -> None:
        if self._parent is None or self._parent.has_ended():
            raise EOFError from None

    def _fail(self, job: int, number: int, error: Exception) -> None:
        """Answer with an exception."""
        self.put((job, number, (False, pool.ExceptionWithTraceback(error, error.__traceback__))))  # type: ignore[attr-defined]

    def put(self, item: Any) -> None:
        """Send a result; then its task is done. Raises what pickling it raises, unless it is an exception.

        None: the end of the results.
        """
        if item is None:
            self.parent.end_results()
            return
        job, number, (succeeded, result) = item
        if isinstance(result, pool.ExceptionWithTraceback):  # type: ignore[attr-defined]
            error, trace = result.exc, result.tb
            result = DescribedError.of(error, trace, lambda failure: pool.MaybeEncodingError(failure, error))  # type: ignore[attr-defined]
        value = dumps((succeeded, result))
        # crash: task.returned
        try:
            self._answer(job, number, value)
        except ResourceError as error:  # no room
            self._answer(job, number, dumps((False, error)))

    def _answer(self, job: int, number: int, value: list[Any], deaths: int = 0) -> None:
        limit, producer = self._channels.max_bytes, self._producer
        scarce = limit is not None and producer.statistics().ring_bytes > limit // 2
        holder, patience = "results that the pool's process keeps", Patience(producer)

        def may_get_room() -> bool:
            self._check_parent()
            return patience()

        try:
            producer.post(value, may_get_room, "a result", holder, (job, number, deaths, scarce))
        except EOFError:  # no process will take it: the next `get` ends this worker
            return
        # crash: task.answered
        task, self._task = self._task, None
        if task is not None:
            task.release()  # its slot comes back when the last view of the arguments dies
            # crash: task.done


class _Shortage:
    """Waits for memory or open files: what is to be received stays where it is.

    (The standard library's threads and workers would end at the error.)
    """

    def __init__(self, who: str) -> None:
        self._who, self._told = who, float("-inf")

    def wait(self, error: ResourceError) -> None:
        """Wait a moment. Logs the error, but one that lasts only once a minute."""
        now = time.monotonic()
        if now - self._told >= _TELL_AGAIN:
            self._told = now
            log.warning("%s goes on when it has what it needs: %s", self._who, str(error))  # its frames refer to slots
        time.sleep(_RETRY)


class _ParentEnds:
    """The parent's ends of both queues: for its task handler and its result handler, each a thread."""

    def __init__(self, channels: _Channels, workers: int, copies: bool) -> None:
        self._most = _PER_WORKER * workers
        self._copies = copies
        """Whether no result is a view of its slot."""
        self._running: dict[tuple[int, int], int] = {}
        """Job and number of tasks that were sent and whose results have not come -> `_died` when they were sent."""
        self._workers: list[Any] = []
        """The processes of workers, until their end was noted."""
        self._died = 0
        """How many workers have died."""
        self._deaths: deque[str] = deque(maxlen=_REMEMBERED)
        """The last workers that died, and how they died."""
        self._lost: deque[tuple[int, int, int, float]] = deque()
        """Tasks whose workers died: job, number, deaths, and until when to wait for the end of their processes."""
        self._room = threading.Condition()
        self._over = False
        self._shortage = _Shortage("a pool's process")
        # with a ring each from the start: a pool can be ended when there is no memory left
        self._tasks = DirectProducer(channels.tasks, channels.max_bytes, _SMALL_SLOT_BYTES)
        try:
            self._results = _Receiver(channels.results, acknowledge="release", until="closed")
            self._end = DirectProducer(channels.results, None, _SMALL_SLOT_BYTES, slots=4)
        except BaseException:
            self.close()
            raise

    def put(self, task: Any) -> None:
        """Send a task, or None, which ends one worker. Raises what pickling it raises.

        Waits while enough tasks are sent, or while there is no room for it and others run; then raises `ResourceError`.
        """
        if task is None:
            self._send(dumps(None), (None, 0))
            return
        job, number, *call = task
        value = dumps(call)
        with self._room:
            self._room.wait_for(lambda: self._over or len(self._running) < self._most)
            self._running[job, number] = self._died
        try:
            self._send(value, (job, number))
        except BaseException:
            self._running.pop((job, number), None)
            raise

    def _send(self, value: list[Any], head: tuple[Any, ...]) -> None:
        if self._over:
            raise BrokenPipeError("the pool was terminated")
        holder = "tasks that run, and by arguments that workers keep"
        try:
            self._tasks.post(value, self._may_get_room, "a task", holder, head)
        except ClosedError:
            raise BrokenPipeError("the pool was terminated") from None

    def _may_get_room(self) -> bool:
        return len(self._running) > 1 and not self._over

    def get(self) -> Any:
        """The next result; None: their end. `EOFError` once the pool is closed."""
        while True:
            if self._lost and (error := self._death_of(*self._lost[0])) is not None:
                job, number, *_ = self._lost.popleft()
                if self._ended(job, number):
                    return job, number, (False, error)
            try:
                message = self._results.recv(timeout=_LOOK if self._lost else None)
            except TimedOut:
                continue
            except ClosedError:
                raise EOFError from None
            except ResourceError as error:  # no room to map a worker's ring, or too few open files: its result stays
                self._shortage.wait(error)
                continue
            job, number, deaths, scarce = message.value[:4]
            if job is None:
                message.release()
                return None
            result: tuple[bool, Any] | None = None
            if deaths:
                # with `maxtasksperchild` an exit with 0 tells nothing
                patience = _BRIEFLY if self._copies else _NOTICED
                self._lost.append((job, number, deaths, time.monotonic() + patience))
            else:
                copies = self._copies or scarce or free_bytes() < default_limit()
                try:
                    result = loads(value_of(message, copies)[4:])
                    if isinstance(result[1], DescribedError):
                        result = False, result[1].rebuilt(pool.RemoteTraceback)  # type: ignore[attr-defined]
                except Exception as error:
                    result = False, error
            message.release()
            del message
            if result is not None and self._ended(job, number):
                return job, number, result
            del result

    def _ended(self, job: int, number: int) -> bool:
        """Note that a task has a result; False if it had one already, since its worker died after sending it."""
        with self._room:
            first = self._running.pop((job, number), None) is not None
            self._room.notify()
        return first

    def worker(self, context: Any, *args: Any, **options: Any) -> Any:
        """The process of a worker. The pool's thread that replaces workers calls this for each that has ended.

        Only that thread asks for exit codes: with forkserver, two that ask at once may get a wrong one.
        """
        living, died = [], []
        for process in self._workers:
            if process.exitcode is None:
                living.append(process)
            elif process.exitcode or not self._copies:  # with `maxtasksperchild` they end
                died.append(f"pid {process.pid}, {how_ended(process.exitcode)}")
        process = context.Process(*args, **options)
        self._workers = [*living, process]
        with self._room:
            self._deaths.extend(died)
            self._died += len(died)
        return process

    def _death_of(self, job: int, number: int, deaths: int, until: float) -> PeerDied | None:
        """The error of a task whose workers died; None as long as it is not known which workers died, until `until`.

        The work queue says how many workers died with the task, not which, and may say so before they have ended.
        """
        with self._room:
            count = self._died - self._running.get((job, number), self._died)
            if count < deaths and not self._over and time.monotonic() < until:
                return None
            named = "; ".join(list(self._deaths)[-count:]) if count else ""
        if named:
            named = f" (of those that died meanwhile: {named})" if count > deaths else f" ({named})"
        who = "a worker died while it" if deaths == 1 else f"{deaths} workers died while they"
        return PeerDied(
            f"{who} ran this task of the pool{named}: killed by the kernel for lack of memory, by a signal or by an "
            "exit in the task (retry_on_death= runs a task again)"
        )

    def end_results(self) -> None:
        """Make the result handler get None, the end of the results."""
        try:
            self._end.post(dumps(None), bool, "the end", "results", (None, 0, 0, False))
        except ClosedError:
            pass  # it has ended

    def stop(self) -> None:
        """Send no more tasks: `put` raises."""
        with self._room:
            self._over = True
            self._room.notify_all()

    def close(self) -> None:
        """Leave both channels. Results that are alive stay valid. Idempotent."""
        self.stop()
        for name in ("_tasks", "_end", "_results"):
            if hasattr(self, name):
                getattr(self, name).close()


class Pool(pool.Pool):
    """`multiprocessing.Pool`, with tensors and arrays sent through shared memory, both ways.

    `get_context(...).Pool` makes it. All methods are the standard library's.

    Args:
        processes, initializer, initargs, maxtasksperchild, context: as for the standard pool, with at most 250 workers.
        max_bytes: shared memory (bytes, or a string such as `"4GiB"`) that the parent may take for tasks, and each
            worker for its results; None: a ring is added only if it takes at most half of what `/dev/shm` has free.
        retry_on_death: how often a task is run again after the worker that ran it died. A task (of `map`, a chunk of
            them) whose workers died more often fails with `PeerDied`; the pool goes on with workers that replace them.

    Tensors and arrays in a result are writable views of the worker's slot, which is reused when the last view has died.
    Values up to 64 KiB are copied out; so are larger ones when memory is scarce: `/dev/shm` less than half free, or a
    worker's rings more than half of `max_bytes`; and all results with `maxtasksperchild`, as views would keep files of
    ended workers open. A task gets its arguments in the same way.

    A task raises what unpickling its call raises; what pickling its result or its exception raises, as
    `MaybeEncodingError`; what unpickling its exception raises; and `ResourceError` if there is no room for it or its
    result. The worker's traceback is the `__cause__` of an exception, whatever becomes of that.

    >>> import numpy as np, shmtensor
    >>> with shmtensor.get_context("fork").Pool(2) as pool:
    ...     total = pool.apply(np.add, (np.ones((512, 512)), 1)).sum()
    >>> int(total)
    524288
    """

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        maxtasksperchild: int | None = None,
        context: Any = None,
        *,
        max_bytes: int | str | None = None,
        retry_on_death: int = 0,
    ) -> None:
        self._pool: list[Any] = []  # for `__del__`, as the standard pool does
        self._state = pool.INIT
        check_count("retry_on_death", retry_on_death, 0, _MOST_RETRIES)
        if processes is None:
            processes = min(os.cpu_count() or 1, MOST_WORKERS)
        elif processes > MOST_WORKERS:
            raise ArgumentError(f"processes must be <= {MOST_WORKERS}, not {processes}: use several pools")
        name = f"pool-{os.getpid()}-{secrets.token_hex(4)}"
        limit = None if max_bytes is None else parse_bytes(max_bytes, "max_bytes")
        self._channels = _Channels(f"{name}.tasks", f"{name}.results", limit, retry_on_death)
        self._workers = processes
        # the caller of `map` keeps all results: as views, they would keep four open files of each ended worker
        self._copies = maxtasksperchild is not None
        try:
            locks = ThreadLocks(context_of(context, "context"))
            super().__init__(processes, initializer, initargs, maxtasksperchild, locks)
        except BaseException:
            if hasattr(self, "_ends"):
                self._ends.close()
            raise

    def _setup_queues(self) -> None:
        self._ends = _ParentEnds(self._channels, self._workers, self._copies)
        self._inqueue = self._outqueue = _WorkerEnds(self._channels)
        self._inqueue.parent = self._ends
        self._quick_put, self._quick_get = self._ends.put, self._ends.get
        # not a method of the pool: its threads would keep it
        self.Process = self._ends.worker  # type: ignore[method-assign, assignment]

    def _get_sentinels(self) -> list[Any]:
        return [self._change_notifier._reader]  # type: ignore[attr-defined]

    @staticmethod
    def _help_stuff_finish(inqueue: Any, task_handler: Any, size: int) -> None:
        inqueue.parent.stop()

    @classmethod
    def _terminate_pool(cls, taskqueue: Any, inqueue: Any, *others: Any) -> None:
        super()._terminate_pool(taskqueue, inqueue, *others)  # type: ignore[misc]
        inqueue.parent.close()

    def join(self) -> None:
        """Wait for the workers to end, after `close` or `terminate`. Living results stay valid."""
        super().join()
        self._ends.close()
