"""The end of an attempt: finish its task, or keep it for a fresh pool if the pool broke."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from ..shielded import OwnThread
from . import worker as worker_side
from .calls import Attempt, Task
from .worker import INTERRUPTED, Packed


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
        self._manager: threading.Thread | None = None  # the management thread of the pool that broke
        self._renewal: threading.Thread | None = None
        self._idle_deaths = 0
        self._stopped = False

    def stop(self) -> None:
        """The executor was shut down: retry nothing."""
        self._stopped = True

    def finished(self) -> None:
        """Note that a task was finished."""
        self._idle_deaths = 0

    def join(self) -> None:
        """Wait for the thread that creates a fresh pool."""
        renewal = self._renewal
        if renewal is not None and renewal is not threading.current_thread():
            renewal.join()

    def take(self, attempt: Attempt) -> bool:
        """Keep a task for another attempt; False if there is no retry. Called by the management thread."""
        if not self.most:
            return False
        with self._lock:
            if self._manager is None:
                self._manager = threading.current_thread()
                _join_dead_workers(self._manager)
                self._renewal = OwnThread(target=_renew, args=(self._renew, self), name="shmtensor renewal")
                try:
                    self._renewal.start()
                except RuntimeError:  # the interpreter ends
                    self._renewal = None
                    self._manager = None
                    return False
            self._lost.append(Lost(attempt.task, attempt.channels.killed(attempt)))
        return True

    def collect(self) -> list[Task]:
        """The lost tasks to retry, in order; the others fail. Waits until the pool has ended.

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
            return self._give_up(lost, "Ctrl-C ended a worker: nothing is run again")
        if self._stopped:
            return self._give_up(lost, "a worker died, and the executor was shut down: nothing is run again")
        if self._idle_deaths > self.most:
            return self._give_up(lost, f"{self._idle_deaths} times in a row a worker died before it ran anything")
        again = []
        for task, killed in lost:
            task.deaths += killed
            if task.deaths > self.most:
                task.fail(
                    BrokenProcessPool(
                        f"each of the {task.deaths} workers that ran this call died (retry_on_death={self.most})"
                    )
                )
            else:
                again.append(task)
        return again

    def _give_up(self, lost: list[Lost], why: str) -> list[Task]:
        for task, _ in lost:
            task.fail(BrokenProcessPool(why))
        return []


def _workers(manager: threading.Thread | None) -> list[BaseProcess]:
    return list(getattr(manager, "processes", {}).values())


def _join_dead_workers(manager: threading.Thread) -> None:
    """Wait for workers that are dying: such a process still holds its locks for a moment."""
    workers = {worker.sentinel: worker for worker in _workers(manager)}
    for sentinel in connection.wait(list(workers), 0):
        workers[sentinel].join()  # type: ignore[index]


def fail_overlooked(manager: Any) -> None:
    """Fail calls that were submitted while the pool broke.

    Before Python 3.12 the management thread fails calls without a lock, and may miss one that is submitted just then.
    """
    manager.join()
    for worker in _workers(manager):
        worker.terminate()
    for item in list(manager.pending_work_items.values()):
        item.future.set_exception(BrokenProcessPool("a worker died while this call was submitted"))


def _renew(reference: weakref.WeakMethod[Callable[[], None]], retries: Retries) -> None:
    renew = reference()
    if renew is None:  # the executor was dropped
        retries.stop()
        retries.collect()
    else:
        renew()


def end_attempt(retries: Retries, attempt: Attempt, packed: Packed | None, error: BaseException | None) -> None:
    """End an attempt's task, unless it is retried.

    Runs in the management thread, or in the feeder thread of `CallSocket`.
    """
    channels, task = attempt.channels, attempt.task
    channels.returned(attempt)
    if task.cancelled():
        return
    if isinstance(error, CancelledError) and packed is None and not attempt.begun:  # by `shutdown`
        if not task.cancel():  # the task runs already: this was a retry
            task.fail(BrokenProcessPool("a worker died at this call, and its next try was cancelled"))
        return
    if isinstance(error, BrokenProcessPool) and not worker_side.raised(error) and retries.take(attempt):
        return
    if error is None:
        retries.finished()
        try:
            result, transfer = channels.open(packed)
        except BaseException as failure:
            error = failure
        else:
            task.finish(result, transfer)
            return
    task.fail(error)
