"""The parent's side of a pool: the two channels that it shares with its workers, the calls in flight, and how they end.

An attempt ends with its task finished, or kept for a fresh pool if the pool broke.
"""

from __future__ import annotations

import collections
import os
import secrets
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from concurrent.futures import process as standard
from concurrent.futures._base import CANCELLED_AND_NOTIFIED, LOGGER, PENDING
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, Final, NamedTuple

from ..mp.direct import DirectConsumer, DirectProducer, MessageRef, inline, unfold, value_of
from ..mp.pickling import Transfer, Transfers, loads, nbytes_of
from ..shielded import Condition, OwnThread, aside
from .worker import INTERRUPTED, NOTHING, Address, Packed, Raised

AT_ONCE_MOST: Final = 4 << 20
"""Calls of at most so many bytes are copied into a slot by the thread that also takes results; more would delay it."""


class WouldWait(Exception):
    """Raised without `wait` if copying a call would take long."""


class Task(Future[Any]):
    """The future that `submit` returns. An `Attempt` runs it; a retry is another attempt.

    A task that is cancelled does not cancel its attempt: a worker gets an empty call instead. (Before Python 3.12 a
    cancelled future that waits when the pool breaks ends the management thread, and all others wait for ever.)

    An asynchronous exception leaves no lock held and no waiter without notice: `cancel` finishes what it has begun.
    """

    _state: str
    _exception: BaseException | None
    _waiters: list[Any]
    _done_callbacks: list[Callable[[Future[Any]], object]]

    def __init__(self, value: list[Any]) -> None:
        super().__init__()
        self._condition = Condition()
        self.value: list[Any] | None = value
        """The pickled call, until the task has ended: its tensors are the caller's own, no copies."""
        self._transfer: Transfer | None = None
        self.deaths = 0
        """How many workers died while running it."""
        self._reported = False
        """Whether waiters of `concurrent.futures.wait` and the like were notified that it was cancelled."""

    def cancel(self) -> bool:
        """Cancel the call unless a worker was chosen for it. True if it is cancelled."""
        try:
            return self._cancel()
        except BaseException:
            self._cancel()
            raise

    def _cancel(self) -> bool:
        """May be interrupted, and called again."""
        with self._condition:
            if self._state == PENDING:
                self._state = CANCELLED_AND_NOTIFIED  # waiters need not wait until the executor comes to it
            elif self._state != CANCELLED_AND_NOTIFIED:
                return False
            self._condition.notify_all()
        self.value = None
        if self._waiters and not self._reported:
            aside(self._report, "shmtensor cancelled", wait=False)
        self._invoke_callbacks()
        return True

    def _report(self) -> None:
        with self._condition:
            if not self._reported:
                self._reported = True
                for waiter in self._waiters:
                    waiter.add_cancelled(self)

    def _invoke_callbacks(self) -> None:
        """Call each once, also where it is called again after an exception."""
        callbacks = self._done_callbacks
        while callbacks:
            callback = callbacks[0]  # from here until the call there is no interrupt and no thread switch
            del callbacks[0]
            try:
                callback(self)
            except Exception:
                LOGGER.exception("exception calling callback for %r", self)

    def begin(self) -> bool:
        """Note that a worker was chosen. False if there is nothing to run because the task was cancelled, or its pool
        broke."""
        with self._condition:
            if self._state == PENDING:
                self.set_running_or_notify_cancel()
        return self.running()

    def finish(self, result: object, transfer: Transfer | None = None) -> None:
        """Set the result; `transfer` if its tensors are being copied to a device."""
        self.value = None
        self._transfer = transfer
        self.set_result(result)

    def result(self, timeout: float | None = None) -> Any:
        """As for the standard future. Tensors on a device are safe on the stream that is current here."""
        try:
            result = super().result(timeout)
            if self._exception is not None:  # false as a truth value: before Python 3.13 the standard future ignores it
                raise self._exception
            if self._transfer is not None:
                self._transfer.hand_over()
            return result
        finally:
            self = None  # type: ignore[assignment]  # an error's traceback refers to this frame

    def fail(self, error: BaseException | None) -> None:
        """Set the error that the call raised, or because of which it cannot be run."""
        self.value = None
        try:
            self.set_exception(error)
        except InvalidStateError:  # cancelled just now
            pass


class CallChannels:
    """The parent's endpoints on both channels of a pool. Closed by `close`, or when it is garbage collected."""

    def __init__(self, max_bytes: int | None, transfers: Transfers | None, *, slots_only: bool) -> None:
        name = f"executor-{os.getpid()}-{secrets.token_hex(4)}"
        self._max_bytes, self._transfers, self._slots_only = max_bytes, transfers, slots_only
        self._producer = DirectProducer(f"{name}.calls", max_bytes)
        try:
            self._consumer = DirectConsumer(f"{name}.results")
        except BaseException:
            self._producer.close()
            raise
        self._under_way: set[Attempt] = set()
        self.address = Address(f"{name}.calls", f"{name}.results", self._producer.index, max_bytes)

    def send(self, attempt: Attempt, wait: bool) -> Packed:
        """Put a call into a slot, or pack it for the socket message if it is small.

        If there is no room, it waits as long as other calls are in flight, and then raises `ResourceError`; without
        `wait` it raises `RingFull`, and `WouldWait` for a large one.
        """
        value = attempt.task.value
        if value is None or not attempt.task.begin():
            return NOTHING
        packed = None if self._slots_only else inline(value)
        if packed is not None:
            self._under_way.add(attempt)
            return packed
        if wait:
            holder = "calls that run, and by arguments that workers keep"
            attempt.ref = self._producer.post(value, lambda: self._may_get_room(attempt), "a call", holder)
        elif nbytes_of(value) <= AT_ONCE_MOST:
            attempt.ref = self._producer.post_now(value)
        else:
            raise WouldWait
        self._under_way.add(attempt)
        return attempt.ref

    def _may_get_room(self, attempt: Attempt) -> bool:
        return bool(self._under_way) and not attempt.over

    def returned(self, attempt: Attempt) -> None:
        """Note that an attempt has ended."""
        attempt.over = True
        self._under_way.discard(attempt)

    def killed(self, attempt: Attempt) -> bool:
        """Whether a worker took the call and died. Only valid while the other workers live."""
        return attempt.ref is not None and self._producer.was_lost(attempt.ref)

    def open(self, sent: Packed | Raised) -> tuple[Any, Transfer | None]:
        """The object that a worker sent. Large tensors and arrays in it are views of the worker's slot, or are being
        copied to the device: then there is a transfer. Those in an exception are not copied."""
        packed, transfers = (sent.packed, None) if isinstance(sent, Raised) else (sent, self._transfers)
        if isinstance(packed, bytes):
            return unfold(packed), None
        message = self._consumer.take(packed)
        try:
            value = value_of(message)
            if transfers is None:
                return loads(value), None
            value, transfer = transfers.start(value, self._consumer)
            return loads(value), transfer
        finally:
            message.release()

    def close(self) -> None:
        """Leave both channels. Living results stay valid. Idempotent."""
        self._producer.close()
        self._consumer.close()

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self.close()


OnEnd = Callable[["Attempt", Packed | Raised | None, BaseException | None], None]
"""Gets what the worker has sent; or else the error of a call that was not run to its end."""


class Attempt:
    """One try of a task. The standard executor carries it until the call is sent (`transport.py`).

    The call is sent when a worker will soon be free, not in `submit`, so that a thousand waiting calls take no slots.
    For the standard executor it is also the call's future, which it asks whether to begin and on which it sets the
    outcome.
    """

    ref: MessageRef | None = None
    over = False
    """Whether the attempt has ended, perhaps before it was sent."""

    def __init__(self, channels: CallChannels, task: Task, on_end: OnEnd) -> None:
        self.channels, self.task, self._on_end = channels, task, on_end
        self.begun = False

    def send(self, wait: bool) -> Packed:
        """See `CallChannels.send`."""
        return self.channels.send(self, wait)

    # --- the future of the standard executor, for its management thread

    def set_running_or_notify_cancel(self) -> bool:
        """Begin, unless it was cancelled."""
        self.begun = True
        return not self.over

    def cancel(self) -> bool:
        """Called by `shutdown`: end it unless it has begun."""
        if self.begun:
            return False
        self._ended(None, CancelledError())
        return True

    def set_result(self, sent: Packed | Raised) -> None:
        """Set what the worker has sent."""
        self._ended(sent, None)

    def set_exception(self, error: BaseException) -> None:
        """Set the error of a call that cannot be run."""
        self._ended(None, error)

    def _ended(self, sent: Packed | Raised | None, error: BaseException | None) -> None:
        try:
            self._on_end(self, sent, error)
        except Exception:
            LOGGER.exception("exception at the end of a call")


class Lost(NamedTuple):
    """A task whose attempt was lost with its pool."""

    task: Task
    killed: bool
    """Whether this task's worker died, as far as shared memory shows."""


class Retries:
    """Keeps the tasks of a pool that broke, until a thread has created a fresh pool for them.

    The standard executor breaks as a whole when a worker dies, because the dead one may hold a lock of its queues. So
    every task in flight is run again, but a death counts only against the task that the dead worker ran. Deaths of
    workers that ran nothing count against the pool, which fails after `most` of them without a finished task between.
    """

    def __init__(self, renew: weakref.WeakMethod[Callable[[], None]], most: int) -> None:
        self.most = most
        self._renew = renew
        self._lock = threading.Lock()
        self._lost: list[Lost] = []
        self._failed: collections.deque[tuple[Task, BrokenProcessPool]] = collections.deque()
        self._manager: threading.Thread | None = None  # the management thread of the pool that broke
        self._renewals: list[threading.Thread] = []
        self._idle_deaths = 0
        self._stopped = False

    def stop(self) -> None:
        """The executor was shut down: retry nothing."""
        self._stopped = True

    def finished(self) -> None:
        """Note that a task was finished."""
        self._idle_deaths = 0

    def join(self) -> None:
        """Wait for the threads that create fresh pools. In a callback, which one of them runs, it does not wait."""
        with self._lock:
            renewals = self._renewals
        if threading.current_thread() not in renewals:
            for renewal in renewals:
                renewal.join()

    def take(self, attempt: Attempt) -> bool:
        """Keep a task for another attempt; False if there is no retry. Called by the management thread."""
        if not self.most:
            return False
        with self._lock:
            if self._manager is None:
                self._manager = threading.current_thread()
                _join_dead_workers(self._manager)
                renewal = OwnThread(target=_renew, args=(self._renew, self), name="shmtensor renewal")
                try:
                    renewal.start()
                except RuntimeError:  # the interpreter ends
                    self._manager = None
                    return False
                self._renewals = [*filter(threading.Thread.is_alive, self._renewals), renewal]
            self._lost.append(Lost(attempt.task, attempt.channels.killed(attempt)))
        return True

    def collect(self) -> list[Task]:
        """The lost tasks to retry, in order; the others are to fail. Waits until the pool has ended.

        Do not call it in the management thread.
        """
        with self._lock:
            manager = self._manager
        if manager is not None:
            manager.join()  # it reports all its tasks, then ends the remaining workers
        with self._lock:
            lost, self._lost, self._manager = self._lost, [], None
        if not lost:
            return []
        if any(each.killed for each in lost):
            self._idle_deaths = 0
        else:
            self._idle_deaths += 1
        if any(process.exitcode == INTERRUPTED for process in _workers(manager)):
            return self._give_up_all(lost, "Ctrl-C ended a worker: nothing is run again")
        if self._stopped:
            return self._give_up_all(lost, "a worker died, and the executor was shut down: nothing is run again")
        if self._idle_deaths > self.most:
            return self._give_up_all(lost, f"{self._idle_deaths} times in a row a worker died before it ran anything")
        again = []
        for task, killed in lost:
            task.deaths += killed
            if task.deaths > self.most:
                why = f"each of the {task.deaths} workers that ran this call died (retry_on_death={self.most})"
                self.give_up(task, BrokenProcessPool(why))
            else:
                again.append(task)
        return again

    def _give_up_all(self, lost: list[Lost], why: str) -> list[Task]:
        for task, _ in lost:
            self.give_up(task, BrokenProcessPool(why))
        return []

    def give_up(self, task: Task, error: BrokenProcessPool) -> None:
        """Note the error of a task, which is set by the thread that creates a fresh pool, when it has done so.

        Any thread may collect lost tasks, while it holds the executor's gate and others wait for that: so it must not
        run callbacks.
        """
        self._failed.append((task, error))

    def fail(self) -> None:
        """Set the errors of the tasks that were given up."""
        while True:
            try:
                task, error = self._failed.popleft()
            except IndexError:
                return
            task.fail(error)


def _workers(manager: threading.Thread | None) -> list[BaseProcess]:
    return list(getattr(manager, "processes", {}).values())


def _join_dead_workers(manager: threading.Thread) -> None:
    """Wait for workers that are dying: such a process still holds its locks for a moment."""
    workers = {worker.sentinel: worker for worker in _workers(manager)}
    for sentinel in connection.wait(list(workers), 0):
        workers[sentinel].join()  # type: ignore[index]


def _renew(reference: weakref.WeakMethod[Callable[[], None]], retries: Retries) -> None:
    renew = reference()
    try:
        if renew is None:  # the executor was dropped
            retries.stop()
            retries.collect()
        else:
            renew()
    finally:
        del renew  # callbacks may wait long
        retries.fail()


def end_attempt(retries: Retries, attempt: Attempt, sent: Packed | Raised | None, error: BaseException | None) -> None:
    """End an attempt's task, unless it is retried. Runs in the management thread."""
    channels, task = attempt.channels, attempt.task
    channels.returned(attempt)
    if task.cancelled():
        return
    if isinstance(error, CancelledError):  # by `shutdown`
        if not task.cancel():  # the task runs already: this was a retry
            task.fail(BrokenProcessPool("a worker died at this call, and its next try was cancelled"))
        return
    if isinstance(error, BrokenProcessPool) and retries.take(attempt):
        return
    if sent is None:
        task.fail(error)
        return
    retries.finished()
    try:
        value, transfer = channels.open(sent)
        if isinstance(sent, Raised):
            value = value.rebuilt(standard._RemoteTraceback)
    except BaseException as failure:
        task.fail(failure)
        return
    if isinstance(sent, Raised):
        task.fail(value)
    else:
        task.finish(value, transfer)
