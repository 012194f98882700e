"""What the end of an attempt means for its task, and what becomes of tasks whose pool broke."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from ..calls import OwnThread
from . import worker as worker_side
from .shipping import Shipment, Task
from .worker import INTERRUPTED, Packed


class Lost(NamedTuple):
    """A task whose attempt went down with its pool."""

    task: Task
    killed: bool
    """Whether it was this task's worker that died, as far as shared memory tells."""


class Retries:
    """Keeps the tasks of a pool that broke, until a thread has made a fresh pool for them.

    The standard executor breaks as a whole when a worker dies: the dead one may hold a lock of its queues. So every
    task that was under way is run again, but a death counts only against the task at which the worker died. Deaths of
    workers that ran nothing count against the pool: it is given up when there were `most` with no task finished since.
    """

    def __init__(self, renew: weakref.WeakMethod[Callable[[], None]], most: int) -> None:
        self.most = most
        self._renew = renew
        self._lock = threading.Lock()
        self._lost: list[Lost] = []
        self._manager: threading.Thread | None = None  # the management thread of the pool that broke
        self._renewal: threading.Thread | None = None
        self._causeless = 0
        self._stopped = False

    def stop(self) -> None:
        """The executor was shut down and waits for no more than what runs: try nothing again."""
        self._stopped = True

    def finished(self) -> None:
        """A task came to its end."""
        self._causeless = 0

    def join(self) -> None:
        """Wait until the thread that was to make a fresh pool has ended."""
        renewal = self._renewal
        if renewal is not None and renewal is not threading.current_thread():
            renewal.join()

    def take(self, shipment: Shipment) -> bool:
        """Keep a task for another attempt; False if there will be none. Called by the management thread."""
        if not self.most:
            return False
        with self._lock:
            if self._manager is None:
                self._manager = threading.current_thread()
                _bury(self._manager)
                self._renewal = OwnThread(target=_renew, args=(self._renew, self), name="shmtensor renewal")
                try:
                    self._renewal.start()
                except RuntimeError:  # the interpreter ends
                    self._renewal = None
                    self._manager = None
                    return False
            self._lost.append(Lost(shipment.task, shipment.depot.killed(shipment)))
        return True

    def collect(self) -> list[Task]:
        """The lost tasks that are to be tried again, in their order; the others fail. Waits until the pool has ended.

        Not for the management thread.
        """
        with self._lock:
            manager = self._manager
        if manager is not None:
            manager.join()  # it hands over all its tasks, then ends every worker that is left
        with self._lock:
            lost, self._lost, self._manager = self._lost, [], None
        if not lost:
            return []
        if any(each.killed for each in lost):
            self._causeless = 0
        else:
            self._causeless += 1
        if any(process.exitcode == INTERRUPTED for process in _workers(manager)):
            return self._give_up(lost, "Ctrl-C ended a worker: nothing is run again")
        if self._stopped:
            return self._give_up(lost, "a worker died, and the executor was shut down: nothing is run again")
        if self._causeless > self.most:
            return self._give_up(lost, f"{self._causeless} times in a row a worker died before it ran anything")
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


def _bury(manager: threading.Thread) -> None:
    """Wait until the workers whose end was noticed have ended: a dying process still holds its locks for a moment."""
    workers = {worker.sentinel: worker for worker in _workers(manager)}
    for sentinel in connection.wait(list(workers), 0):
        workers[sentinel].join()  # type: ignore[index]


def fail_overlooked(manager: Any) -> None:
    """End what was submitted while its pool broke.

    Before Python 3.12 the management thread fails what it finds, under no lock, and may miss or stumble over a call
    that comes in at that moment.
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


def settle(retries: Retries, shipment: Shipment, packed: Packed | None, error: BaseException | None) -> None:
    """An attempt has ended: so does its task, unless it is tried again.

    Runs in the management thread, or in that of `CallLine`.
    """
    depot, task = shipment.depot, shipment.task
    depot.arrived(shipment)
    if task.cancelled():
        return
    if isinstance(error, CancelledError) and packed is None and not shipment.begun:  # by `shutdown`
        if not task.cancel():  # of a later attempt the caller saw nothing: the task runs
            task.fail(BrokenProcessPool("a worker died at this call, and its next try was cancelled"))
        return
    if isinstance(error, BrokenProcessPool) and not worker_side.raised(error) and retries.take(shipment):
        return
    if error is None:
        retries.finished()
        try:
            result, arrival = depot.open(packed)
        except BaseException as failure:
            error = failure
        else:
            task.finish(result, arrival)
            return
    task.fail(error)
