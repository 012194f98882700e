"""`WorkerPool` and `serve`: worker processes that answer a service's requests, restarted when they die."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import weakref
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any, Final

from ..endpoints.base import Local, check_count, check_timeout
from ..errors import ArgumentTypeError, ClosedError, TimedOut
from ..options import context_of
from . import worker
from .checks import check_handler, check_options
from .sidecar import check_service
from .spawn import check_picklable, process_class

log = logging.getLogger("shmtensor.serve")

FIRST_DELAY: Final = 0.1
LONGEST_DELAY: Final = 30.0
KILLED: Final = 3
"""Exit code of a pool that killed workers before they had finished."""
STEADY: Final = 60.0
"""Seconds after which the earlier deaths of a worker that has served without dying do not count."""
UNGUARDED: Final = 121
"""Exit code of a worker whose program starts the pool again when the worker imports it."""
_UNGUARDED_TEXT: Final = (
    "importing this program starts the pool, and every worker imports it: put the call below a line "
    '`if __name__ == "__main__":`'
)


class _Worker:
    """A worker of the pool, and its process while one runs."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: Any = None
        self.pipe: Connection | None = None  # on which the process reports that it is ready, or why it cannot be
        self.ready_since: float | None = None
        self.deaths = 0  # in a row
        self.due: float | None = None  # when to start it again
        self.killed = False  # by the pool, before it had finished

    @property
    def is_running(self) -> bool:
        return self.process is not None

    @property
    def is_ready(self) -> bool:
        return self.ready_since is not None


def _end_at_exit(reference: weakref.ref[WorkerPool]) -> None:
    pool = reference()
    if pool is not None:
        pool.stop("the program ended")
        pool.join()


class WorkerPool(Local):
    """Processes that answer a service's requests with a handler. A worker that dies is started again.

    Args:
        handler: `handler(value)` returns the reply's value. A class is instantiated in each worker: its `__init__` is
            the place to load a model. Or the name of either, as `"module:name"`, imported in the workers only. With a
            start method other than `"fork"` it must be picklable, as `multiprocessing` demands.
        name: the service's name.
        workers: how many processes.
        max_batch, max_wait, max_attempts, slots, max_bytes: as for `Server`.
        max_restarts: how often in a row one worker is started again after it died, after 0.1 s and twice as long each
            time, up to 30 s; after a minute of service its deaths are forgotten. One death more ends the pool.
        grace: seconds that a stopping worker has to finish what it took, before it is killed; None: no limit.
        mp_context: a `multiprocessing` context or a start method's name; None: `"spawn"`, which is safe whatever runs
            in this process.

    The pool is a context manager: leaving the block stops it, and so does the end of the program. It uses one thread of
    its own. Events are logged on the
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
        check_timeout(grace)
        check_options(max_batch, max_wait, max_attempts, slots, max_bytes)
        if not isinstance(handler, str) and not callable(handler):
            raise ArgumentTypeError(f"handler must be callable or a string module:name, not {type(handler).__name__}")
        if not isinstance(handler, str):
            check_handler(handler)
        _check_importable()
        self._context = context_of("spawn" if mp_context is None else mp_context, "mp_context")
        self._process = process_class(self._context)
        if not isinstance(handler, str) and self._context.get_start_method() != "fork":
            check_picklable(handler)
        self.name, self._handler, self._max_restarts, self._grace = name, handler, max_restarts, grace
        self._options = {
            "max_batch": max_batch, "max_wait": max_wait, "max_attempts": max_attempts, "slots": slots,
            "max_bytes": max_bytes,
        }  # fmt: skip
        self._workers = [_Worker(number) for number in range(1, workers + 1)]
        self._changed = threading.Condition()
        self._exit_code: int | None = None
        self._stop_reason: str | None = None
        self._impatient = False
        self._waker, self._wake = multiprocessing.Pipe(duplex=False)
        self._thread = threading.Thread(target=self._run, name="shmtensor worker pool", daemon=True)
        self._thread.start()
        # before multiprocessing waits for its processes at exit, which nobody else would stop
        multiprocessing.util.Finalize(self, _end_at_exit, (weakref.ref(self),), exitpriority=10)

    # --- for users

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are there now."""
        return [each.process.pid for each in list(self._workers) if each.is_running]

    @property
    def exit_code(self) -> int | None:
        """None while the pool runs; 0 if it was stopped, 1 if it gave up or failed, 3 if it had to kill workers."""
        return self._exit_code

    def wait_ready(self, *, timeout: float | None = None) -> None:
        """Wait until every worker takes requests.

        Raises `TimedOut` after `timeout` seconds, and `ClosedError` if the pool has ended or is stopping.
        """
        check_timeout(timeout)
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._stop_reason is not None or all(each.is_ready for each in self._workers), timeout
            )
            if self._stop_reason is not None:
                raise ClosedError(f'worker pool "{self.name}" has ended ({self._stop_reason})')
            if not done:
                ready = sum(each.is_ready for each in self._workers)
                raise TimedOut(
                    f'worker pool "{self.name}": {ready} of {len(self._workers)} workers are ready after {timeout:g} s'
                )

    def stop(self, reason: str = "asked to") -> None:
        """Tell the workers to finish what they have taken and end. Returns at once. Safe in a signal handler."""
        if self._stop_reason is None:
            self._stop_reason = reason
            with contextlib.suppress(OSError):
                self._wake.send_bytes(b"!")

    def kill(self) -> None:
        """End the workers now, whatever they do: other servers get what they had taken. Safe in a signal handler."""
        self._impatient = True
        if self._stop_reason is None:
            self._stop_reason = "killed"
        with contextlib.suppress(OSError):
            self._wake.send_bytes(b"!")

    def join(self, *, timeout: float | None = None) -> int:
        """Wait until every worker has ended, after `stop()` or since the pool gave up; the exit code.

        Raises `TimedOut` after `timeout` seconds.
        """
        check_timeout(timeout)
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimedOut(f'worker pool "{self.name}" has not ended within {timeout:g} s')
        return 1 if self._exit_code is None else self._exit_code

    def _instead(self) -> str:
        return "pass the service's name, and make a Client in the other process"

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop("its block was left")
        self.join()

    def __repr__(self) -> str:
        ready = sum(each.is_ready for each in self._workers)
        state = "ended" if self._exit_code is not None else "stopping" if self._stop_reason else "running"
        return f'<WorkerPool "{self.name}" {state} ready={ready} workers={len(self._workers)}>'

    # --- the pool's own thread

    def _run(self) -> None:
        code = 1
        try:
            code = self._watch()
        except Exception:
            log.exception("pool %s: failed", self.name)
        finally:
            self._stop_reason = self._stop_reason or "failed"
            for each in self._workers:
                if each.is_running:
                    with contextlib.suppress(Exception):  # whatever is raised here, the pool reports that it has ended
                        each.process.kill()
                        self._reap(each)
            with self._changed:
                self._exit_code = code
                self._changed.notify_all()
            self._waker.close()
            self._wake.close()
            log.info("pool %s: ended with exit code %d", self.name, code)

    def _watch(self) -> int:
        """Start the workers, and restart those that die, until all have ended; returns the exit code."""
        for each in self._workers:
            self._start(each)
        deadline: float | None = None
        code, killed = 0, False
        while any(each.is_running for each in self._workers) or self._stop_reason is None:
            self._wait(deadline)
            for each in self._workers:
                code = max(code, self._check(each))
            if self._stop_reason is not None and deadline is None:
                log.info("pool %s: stopping (%s)", self.name, self._stop_reason)
                deadline = float("inf") if self._grace is None else time.monotonic() + self._grace
                for each in self._workers:
                    if each.is_running:
                        each.process.terminate()
                with self._changed:
                    self._changed.notify_all()
            elif deadline is not None and (self._impatient or time.monotonic() >= deadline):
                deadline = float("inf")
                for each in self._workers:
                    if each.is_running and not each.killed:
                        log.warning("worker %d: killed before it had finished", each.number)
                        each.killed = killed = True
                        each.process.kill()
        return code or (KILLED if killed else 0)

    def _wait(self, deadline: float | None) -> None:
        """Wait until a worker reports or ends, `stop` or `kill` is called, a restart is due, or `deadline`."""
        things: list[Any] = [self._waker]
        times = [] if deadline is None else [deadline]
        for each in self._workers:
            if each.is_running:
                things.append(each.process.sentinel)
                if each.pipe is not None and not each.is_ready:
                    things.append(each.pipe)
            elif each.due is not None and self._stop_reason is None:
                times.append(each.due)
        wait = min(times, default=float("inf")) - time.monotonic()
        for thing in connection.wait(things, None if wait == float("inf") else max(0.0, wait)):
            if thing is self._waker:
                self._waker.recv_bytes()

    def _check(self, each: _Worker) -> int:
        """Handle what a worker reported, its end, or its restart that is due; 1 if the pool gives up."""
        if not each.is_running:
            if each.due is not None and time.monotonic() >= each.due and self._stop_reason is None:
                self._start(each)
            return 0
        if each.pipe is not None and not each.is_ready and each.pipe.poll():
            with contextlib.suppress(EOFError, OSError):
                refusal = each.pipe.recv()
                if refusal is not None:  # a restarted worker would report the same
                    if self._stop_reason is not None:
                        return 0
                    log.error("worker %d: %s", each.number, refusal)
                    self._stop_reason = refusal
                    return 1
                log.info("worker %d: ready (pid %d)", each.number, each.process.pid)
                with self._changed:
                    each.ready_since = time.monotonic()
                    self._changed.notify_all()
        if each.process.exitcode is None:
            return 0
        return self._reap(each)

    def _start(self, each: _Worker) -> None:
        ours, theirs = self._context.Pipe()
        forked = self._context.get_start_method() == "fork"
        arguments = self.name, each.number, self._handler, self._options, theirs, ours if forked else None
        process = self._process(
            target=worker.main, args=arguments, name=f"shmtensor worker {each.number} of {self.name}"
        )
        try:
            process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        each.process, each.pipe, each.due = process, ours, None
        log.info("worker %d: started (pid %d)", each.number, each.process.pid)

    def _reap(self, each: _Worker) -> int:
        """Clean up after a worker that has ended, and schedule its restart; 1 if the pool gives up."""
        each.process.join()
        code, pid, since = each.process.exitcode, each.process.pid, each.ready_since
        each.process.close()
        if each.pipe is not None:
            each.pipe.close()
        with self._changed:
            each.process = each.pipe = each.ready_since = None
            self._changed.notify_all()
        if self._stop_reason is not None:
            log.info("worker %d: ended (pid %d, %s)", each.number, pid, _how(code))
            return 0
        if since is not None and time.monotonic() - since >= STEADY:
            each.deaths = 0
        if code == UNGUARDED and since is None:
            log.error("worker %d: %s", each.number, _UNGUARDED_TEXT)
            self._stop_reason = _UNGUARDED_TEXT
            return 1
        each.deaths += 1
        if each.deaths > self._max_restarts:
            log.error(
                "worker %d: died (pid %d, %s), as it did %d times in a row before: giving up",
                each.number, pid, _how(code), each.deaths - 1,
            )  # fmt: skip
            self._stop_reason = f"worker {each.number} died {each.deaths} times"
            return 1
        delay = min(LONGEST_DELAY, FIRST_DELAY * 2 ** (each.deaths - 1))
        each.due = time.monotonic() + delay
        log.warning(
            "worker %d: died (pid %d, %s), restart %d of %d in %g s",
            each.number, pid, _how(code), each.deaths, self._max_restarts, delay,
        )  # fmt: skip
        return 0


def _how(code: int) -> str:
    """How a process has ended, for the log."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _check_importable() -> None:
    """End a worker that creates a pool while it imports the pool's program: it would start workers without end."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # multiprocessing checks the same
        print(_UNGUARDED_TEXT, file=sys.stderr, flush=True)
        os._exit(UNGUARDED)  # a fork server ends with code 1 for any exception


def serve(
    handler: worker.Handler | str,
    *,
    name: str,
    workers: int = 1,
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
    Signals are handled while it runs if it is called in the main thread; in another thread they are not.
    """
    pool = WorkerPool(
        handler, name=name, workers=workers, max_batch=max_batch, max_wait=max_wait, max_attempts=max_attempts,
        slots=slots, max_bytes=max_bytes, max_restarts=max_restarts, grace=grace, mp_context=mp_context,
    )  # fmt: skip

    def stop(number: int, _: object) -> None:
        if pool._stop_reason is None:
            pool.stop(signal.Signals(number).name)
        else:
            pool.kill()

    before: dict[signal.Signals, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for each in (signal.SIGTERM, signal.SIGINT):
                before[each] = signal.signal(each, stop)
        return pool.join()
    finally:
        pool.stop("serve was interrupted")
        pool.join()
        for each, previous in before.items():
            signal.signal(each, previous)
