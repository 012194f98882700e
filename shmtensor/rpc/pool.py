"""`WorkerPool` and `serve`: worker processes that answer a service's requests, restarted when they die."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..channel import control as ctl
from ..channel.control import Control
from ..channel.names import control_name, ring_name, sequence_table_name
from ..endpoints.base import Local
from ..errors import ArgumentTypeError, ClosedError, TimedOut, WireError
from ..memory import segment as shm
from ..options import check_count, check_timeout, context_of
from ..ring import layout as lay
from ..statistics import PoolStatistics
from . import worker
from .endpoints import CANCELLED, FOREVER, check_service
from .server import check_handler, check_options, check_plain
from .supervisor import UNGUARDED, UNGUARDED_TEXT, Reload, Supervisor, Worker, check_picklable


def _why_not(workers: list[Worker]) -> str:
    """Why a worker is not ready, as text for errors; "" if that is not known."""
    errors = [each.last_error for each in workers if each.last_error and not each.is_ready]
    return f" ({errors[0]})" if errors else ""


def waiting_requests(service: str) -> int:
    """Requests of living clients that no living server has taken. A snapshot: clients and servers go on meanwhile.

    Not counted are requests that a client could not send for lack of room, and those that a server has taken for its
        next batch.
    """
    return sum(_of_client(service, uid) for uid in _clients(service))


def _clients(service: str) -> list[int]:
    """The uids of the living clients."""
    try:
        with shm.look_at(control_name(service)) as segment:
            if segment.nbytes != Control.nbytes():
                return []
            words = segment.read(0, Control.nbytes() // 8)
            if [words[ctl.W_MAGIC], words[ctl.W_VERSION], words[ctl.W_KIND]] != [ctl.MAGIC, ctl.VERSION, lay.SERVICE]:
                return []
            senders = [index for index in range(ctl.CAPACITY) if words[ctl.base(index) + ctl.M_ROLE] == ctl.SENDER]
            living = [index for index in senders if segment.is_locked(ctl.LIFE + index)]
            return [uid for index in living if (uid := words[ctl.base(index)])]
    except (FileNotFoundError, WireError):  # no one is there, or the last one has just left
        return []


def _of_client(service: str, uid: int) -> int:
    waiting, claimed = 0, list[int]()
    try:
        with shm.look_at(sequence_table_name(service, uid)) as table:
            head = table.read(0, lay.L_MEMBERS)
            lay.table_shape(table.name, head, uid)
            for index in range(min(head[lay.L_RINGS], lay.MAX_RINGS)):
                for seq, was_taken in _open_requests(service, uid, index, head[lay.L_PUBLISHED]):
                    waiting += not was_taken
                    claimed += [seq] * was_taken
            waiting += sum(not table.is_locked(seq) for seq in claimed)  # their servers died
    except (FileNotFoundError, WireError):  # it has just left, or is another version's
        return 0
    return waiting


def _open_requests(service: str, uid: int, index: int, published: int) -> Iterator[tuple[int, bool]]:
    """(sequence number, whether a server has ever taken it) of the requests in a ring that are not done."""
    with shm.look_at(ring_name(service, uid, index)) as ring:
        shape = lay.ring_shape(ring.name, ring.read(0, lay.R_DEVICE + 1), uid, index, lay.WORK_QUEUE)
        words = ring.read(shape.state, lay.STATE_WORDS * shape.slots)
    states = np.frombuffer(words, np.uint64).reshape(shape.slots, lay.STATE_WORDS)
    note, done, claimed = states[:, lay.NOTE], states[:, lay.DONE], states[:, lay.CLAIMED]
    seq = note >> np.uint64(8)
    is_open = (seq > 0) & (seq <= np.uint64(published)) & (done < seq) & (note & np.uint64(CANCELLED) == 0)
    for number in np.flatnonzero(is_open):
        yield int(seq[number]), bool(claimed[number] == seq[number])


def _as_wait(timeout: float | None) -> float | None:
    """Check a call's time-out and return it; None if it is longer than threads can wait."""
    check_timeout(timeout)
    return None if timeout is None or timeout >= FOREVER else timeout


def _end_at_exit(supervisor: Supervisor, reference: weakref.ref[threading.Thread]) -> None:
    thread = reference()
    if thread is not None and thread.is_alive():
        supervisor.stop("the program ended")
        thread.join()


class WorkerPool(Local):
    """Processes that answer a service's requests with a handler. A worker that dies is started again.

    Args:
        handler: `handler(value)` returns the reply's value. One that takes a second argument (without a default, or
            called `context`) is called as `handler(value, context)`, with a `RequestContext`, or with `max_batch` a
            `BatchContext`. A class is instantiated in each worker. Or the name of either, as `"module:name"`, imported
            in the workers only. With a start method other than `"fork"` it must be picklable, as `multiprocessing`
            demands.
        name: the service's name.
        workers: how many processes.
        setup: called once in each worker before it takes requests: loads the model, for instance. What it returns is
            `context.state`. Called as `setup(worker)`, with the worker's index from 0, if it takes an argument that
            has no default. A worker whose `setup` raises has died, and is started again later.
        teardown: called once when a worker ends and Python code can still run, with what `setup` returned if it takes
            an argument that has no default. Only after `setup` has returned. It may take what is left of the `grace`
            seconds.
        max_batch, max_wait, max_attempts, slots, max_bytes: as for `Server`.
        max_restarts: how often in a row one worker is started again after it died, after 0.1 s and twice as long each
            time, up to 30 s; after a minute of service its deaths are forgotten. One more death ends the pool.
        grace: seconds that a stopping worker has to finish what it took, before it is killed; None: no limit.
        mp_context: a `multiprocessing` context or a start method's name; None: `"spawn"`, which is safe whatever runs
            in this process.

    The pool is a context manager: leaving the block stops it, and so does the end of the program. A pool that nothing
    refers to any more is stopped, too: keep it in a variable. It uses one thread of its own. Events are logged on the
    logger `shmtensor.serve`, one line each.

    >>> import shmtensor, torch
    >>> with shmtensor.WorkerPool(torch.neg, name="doc", workers=1) as pool:
    ...     pool.wait_ready(timeout=60)
    ...     with shmtensor.Client("doc") as client:
    ...         client.request(torch.arange(3), timeout=60)
    tensor([ 0, -1, -2])
    """

    def __init__(
        self,
        handler: worker.Handler | str,
        *,
        name: str,
        workers: int = 1,
        setup: worker.Handler | str | None = None,
        teardown: worker.Handler | str | None = None,
        max_batch: int | None = None,
        max_wait: float | None = None,
        max_attempts: int = 3,
        slots: int | None = None,
        max_bytes: int | str | None = None,
        max_restarts: int = 10,
        grace: float | None = 30.0,
        mp_context: Any = None,
    ) -> None:
        check_service(name)
        check_count("workers", workers, 1, 200)
        check_count("max_restarts", max_restarts, 0, 1_000_000)
        check_timeout(grace, "grace")
        check_options(max_batch, max_wait, max_attempts, slots, max_bytes)
        functions = {"handler": handler, "setup": setup, "teardown": teardown}
        for what, each in functions.items():
            if not (isinstance(each, str) or callable(each) or (each is None and what != "handler")):
                raise ArgumentTypeError(f"{what} must be callable or a string module:name, not {type(each).__name__}")
            if isinstance(each, str):
                worker.split_path(each, what)
            if what != "handler" and callable(each):
                check_plain(each, what, f"{what}(...)")
        if not isinstance(handler, str):
            check_handler(handler, arguments=2)
        _check_importable()
        context = context_of("spawn" if mp_context is None else mp_context, "mp_context")
        if context.get_start_method() != "fork":
            for what, each in functions.items():
                if callable(each):
                    check_picklable(each, what)
        self.name = name
        options = {
            "max_batch": max_batch, "max_wait": max_wait, "max_attempts": max_attempts, "slots": slots,
            "max_bytes": max_bytes,
        }  # fmt: skip
        job = worker.Job(handler, setup, teardown, options, grace)
        supervisor = self._supervisor = Supervisor(name, workers, job, context, max_restarts)
        # the thread does not refer to the pool, which is stopped when nobody else does
        thread = self._thread = threading.Thread(target=supervisor.run, name="shmtensor worker pool", daemon=True)
        weakref.finalize(self, supervisor.stop, "the program dropped it").atexit = False
        # before multiprocessing waits for its processes at exit, which nobody else would stop
        multiprocessing.util.Finalize(thread, _end_at_exit, (supervisor, weakref.ref(thread)), exitpriority=10)
        try:
            self._thread.start()
        except BaseException:  # of a signal handler: the pool may run, and the caller does not get it
            self.stop("its creation was interrupted")
            raise

    # --- for users

    @property
    def pids(self) -> list[int]:
        """Process ids of the current worker processes."""
        return [process.pid for each in self._supervisor.workers if (process := each.process) is not None]

    @property
    def ready(self) -> int:
        """How many workers take requests now: 0 if a request would have to wait for one to start."""
        return sum(each.is_ready for each in self._supervisor.workers)

    @property
    def exit_code(self) -> int | None:
        """None while the pool runs; 0 if it was stopped, 1 if it gave up or failed, 3 if it had to kill workers."""
        return self._supervisor.exit_code

    @property
    def stopping(self) -> bool:
        """Whether the pool was stopped, gave up or has ended."""
        return self._supervisor.stop_reason is not None

    def statistics(self) -> PoolStatistics:
        """The state of each worker now, and how many requests wait.

        Cheap enough to ask before each HTTP request: it reads shared memory, and asks no worker.
        """
        supervisor = self._supervisor
        workers = supervisor.statistics()
        return PoolStatistics(
            workers=workers, ready=sum(each.ready for each in workers), waiting=waiting_requests(self.name),
            reloads=supervisor.reloads, reloading=supervisor.is_reloading,
        )  # fmt: skip

    def wait_ready(self, *, timeout: float | None = None) -> None:
        """Wait until every worker takes requests: its `setup` is over.

        Raises `TimedOut` after `timeout` seconds, and `ClosedError` if the pool has ended or is stopping.
        """
        timeout = _as_wait(timeout)
        supervisor = self._supervisor
        with supervisor.changed:
            done = supervisor.changed.wait_for(
                lambda: supervisor.stop_reason is not None or self.ready == len(supervisor.workers), timeout
            )
            if supervisor.stop_reason is not None:
                raise ClosedError(f'worker pool "{self.name}" has ended ({supervisor.stop_reason})')
            if not done:
                raise TimedOut(
                    f'worker pool "{self.name}": {self.ready} of {len(supervisor.workers)} workers are ready after '
                    f"{timeout:g} s{_why_not(supervisor.workers)}"
                )

    def reload(self, *, timeout: float | None = None, wait: bool = True) -> None:
        """Replace every worker's process by a new one, one worker after the other: for new code, or a new model.

        A new process is ready, its `setup` over, before the one that it replaces is asked to end; that one then
        finishes what it has taken. So requests are answered all the time, none is lost or refused, and there is one
        process more than `workers` meanwhile. Returns when the last worker has been replaced.

        New processes import what they need, except with the start method `"fork"`: there, what this process has
        imported stays as it is. The handler that was passed to the pool stays the same function of the same module.

        Args:
            timeout: seconds; after them the reload ends where it is. So it does if the call is interrupted.
            wait: False to return at once; whether it succeeds is then logged. Safe in a signal handler.

        Raises:
            RemoteError: a new process cannot start, for instance as `setup` raised. The reload ends there, and the
                process that was to be replaced goes on. Workers that were replaced before stay so: see `generation` in
                `statistics()`.
            PeerDied: a new process died before it was ready; as above.
            TimedOut: it took longer than `timeout`.
            ClosedError: the pool was stopped, or has ended.
        """
        timeout = _as_wait(timeout)
        reload = Reload()
        try:
            self._supervisor.request(reload)
            if wait and not reload.done.wait(timeout):
                raise TimedOut(f'worker pool "{self.name}": not every worker is replaced after {timeout:g} s')
        finally:
            if wait and not reload.done.is_set():
                self._supervisor.give_up(reload)
        if wait and reload.error is not None:
            raise reload.error

    def stop(self, reason: str = "asked to") -> None:
        """Tell the workers to finish what they have taken and end. Returns at once. Safe in a signal handler."""
        self._supervisor.stop(reason)

    def kill(self) -> None:
        """End the workers now, whatever they do: other servers get what they had taken. Safe in a signal handler."""
        self._supervisor.kill()

    def join(self, *, timeout: float | None = None) -> int:
        """Wait until every worker has ended, after `stop()` or since the pool gave up; the exit code.

        Raises `TimedOut` after `timeout` seconds.
        """
        timeout = _as_wait(timeout)
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimedOut(f'worker pool "{self.name}" has not ended within {timeout:g} s')
        return 1 if self.exit_code is None else self.exit_code

    def _instead(self) -> str:
        return "pass the service's name, and make a Client in the other process"

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop("its block was left")
        self.join()

    def __repr__(self) -> str:
        state = "ended" if self.exit_code is not None else "stopping" if self.stopping else "running"
        return f'<WorkerPool "{self.name}" {state} ready={self.ready} workers={len(self._supervisor.workers)}>'


def _check_importable() -> None:
    """End a worker that creates a pool while it imports the pool's program: it would start workers without end."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # multiprocessing checks the same
        print(UNGUARDED_TEXT, file=sys.stderr, flush=True)
        os._exit(UNGUARDED)  # a fork server ends with code 1 for any exception


def serve(
    handler: worker.Handler | str,
    *,
    name: str,
    workers: int = 1,
    setup: worker.Handler | str | None = None,
    teardown: worker.Handler | str | None = None,
    max_batch: int | None = None,
    max_wait: float | None = None,
    max_attempts: int = 3,
    slots: int | None = None,
    max_bytes: int | str | None = None,
    max_restarts: int = 10,
    grace: float | None = 30.0,
    mp_context: Any = None,
) -> int:
    """Answer a service's requests with worker processes, until SIGTERM or SIGINT (Ctrl-C); the exit code.

    Arguments are those of `WorkerPool`, which does the same without waiting. On a signal the workers finish what they
    have taken; a second one kills them. Returns 0 then; 1 if a worker died once more than `max_restarts` allows, if the
    handler cannot serve, or if no worker could be started; 3 if workers were killed before they had finished.

    SIGHUP reloads the workers, as `WorkerPool.reload` does; a reload that fails is logged, and the old workers go on.
    When the terminal is closed, SIGHUP stops the pool as SIGTERM does; if SIGHUP was ignored before, as under `nohup`,
    it stays ignored.

    Signals are handled only if it is called in the main thread.
    """
    pool = WorkerPool(
        handler, name=name, workers=workers, setup=setup, teardown=teardown, max_batch=max_batch, max_wait=max_wait,
        max_attempts=max_attempts, slots=slots, max_bytes=max_bytes, max_restarts=max_restarts, grace=grace,
        mp_context=mp_context,
    )  # fmt: skip
    had_terminal = _has_terminal()

    def stop(number: int, _: object) -> None:
        if pool.stopping:
            pool.kill()
        else:
            pool.stop(signal.Signals(number).name)

    def hang_up(*_: object) -> None:
        if had_terminal and not _has_terminal():
            pool.stop("its terminal was closed")
        elif not pool.stopping:
            pool.reload(wait=False)

    before: dict[signal.Signals, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for each in (signal.SIGTERM, signal.SIGINT):
                before[each] = signal.signal(each, stop)
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
                before[signal.SIGHUP] = signal.signal(signal.SIGHUP, hang_up)
        return pool.join()
    finally:
        pool.stop("serve was interrupted")
        pool.join()
        for each, previous in before.items():
            signal.signal(each, previous)


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal: not after that was closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
