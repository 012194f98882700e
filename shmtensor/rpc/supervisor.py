"""The processes of a pool's workers: started, restarted when they die, replaced by a reload, ended.

All of it happens in one thread, which waits for whatever comes first: a report or the end of a process, a call of the
pool, a restart that is due. A worker has up to three processes:

    process     serves, or is to serve. If it ends, another one is started after a delay that grows.
    successor   only in a reload: starts, while `process` serves. Once it is ready it takes that one's place.
    leaving     only in a reload: was replaced, finishes what it took, and is killed after `grace` seconds.

A reload goes from worker to worker, so there is one process more than workers at most. If a successor ends before it is
ready, the reload ends, and `process` serves on. If `process` dies meanwhile, the successor takes its place at once.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from io import FileIO
from multiprocessing import connection, context, popen_spawn_posix, reduction, resource_tracker, spawn, util
from multiprocessing.connection import Connection
from typing import Any, Final

from ..children import how_ended, python_command, python_environment, safe_path
from ..errors import ArgumentError, ClosedError, PeerDied, RemoteError, ShmTensorError
from ..statistics import WorkerStatistics
from . import worker
from .worker import Board, Counts, Row


class _Spawned(popen_spawn_posix.Popen):
    """A spawned process of `multiprocessing`, started by another command and with another `sys.path`.

    The command of `multiprocessing` searches the current directory first, and then, as in this process, the script's.
    """

    _fds: list[int]
    _process: subprocess.Popen[bytes]

    def _launch(self, process: Any) -> None:
        prepared = spawn.get_preparation_data(process._name)
        prepared["sys_path"] = safe_path(prepared["sys_path"])
        pickled = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(prepared, pickled)
            reduction.dump(process, pickled)
        finally:
            context.set_spawning_popen(None)
        tracker = getattr(resource_tracker._resource_tracker, "_fd", None)  # shared, if there is one: none is needed
        ends: list[int] = []
        try:
            ends += (*os.pipe(), *os.pipe())
            sentinel, its_sentinel, read, write = ends  # the first is readable when the process has ended
            passed = [*self._fds, its_sentinel, read, *([] if tracker is None else [tracker])]
            command = python_command(_enter(tracker, read), "--multiprocessing-fork")
            command[1:1] = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
            self._process = subprocess.Popen(
                command, executable=spawn.get_executable(), env=python_environment(), pass_fds=passed
            )
            self.pid = self._process.pid
            with open(write, "wb", closefd=False) as pipe:
                pipe.write(pickled.getbuffer())
            self.sentinel = sentinel
            self.finalizer = util.Finalize(self, _close, (sentinel, write))  # the process sees the end of `write`
            del ends[:], sentinel, write
            _close(its_sentinel, read)
        finally:
            _close(*ends)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            self.returncode = self._process.poll() if flag == os.WNOHANG else self._process.wait()
        return self.returncode


def _enter(tracker: int | None, pipe: int) -> str:
    """The code that a worker runs first. It restores `PYTHONPATH` for programs that the worker starts."""
    path = os.environ.get("PYTHONPATH")
    restore = "" if path is None else f"import os; os.environ['PYTHONPATH'] = {path!r}; "
    return restore + (
        f"from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd={tracker}, pipe_handle={pipe})"
    )


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class SpawnedProcess(context.SpawnProcess):
    """`multiprocessing.get_context("spawn").Process` for workers."""

    _Popen = _Spawned


def process_class(chosen: Any) -> Any:
    """The class of a context's processes; for plain `"spawn"` contexts `SpawnedProcess`."""
    plain = type(chosen) in (context.SpawnContext, context.DefaultContext)
    return SpawnedProcess if plain and chosen.get_start_method() == "spawn" else chosen.Process


def check_picklable(handler: Callable[..., Any], what: str) -> None:
    """Raise `ArgumentError` unless a function can be pickled and unpickled by a worker that is not a fork."""
    names = _MainNames(io.BytesIO())
    try:
        names.dump(handler)
    except Exception as error:
        raise ArgumentError(
            f"the {what} cannot be sent to a worker ({type(error).__name__}: {error}): define it at the top of a "
            'module, pass its name as "module:name", or mp_context="fork"'
        ) from None
    if names.found and not _can_import_main():
        raise ArgumentError(
            f"the {what} needs {names.found[0]} of __main__, which workers cannot import: it is a notebook, an "
            "interactive interpreter, python -c or standard input. Put it into a module, and pass that module's "
            'function or its name as "module:name", or pass mp_context="fork"'
        )


class _MainNames(pickle.Pickler):
    """Collects the names of `__main__` that a pickle refers to."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.found: list[str] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__":
            self.found.append(obj.__qualname__)
        return NotImplemented


def _can_import_main() -> bool:
    """Whether a worker can import this process's `__main__`, by its module's name or its file."""
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None:
        return True
    path = getattr(main, "__file__", None)
    return path is not None and os.path.isfile(path)


log = logging.getLogger("shmtensor.serve")

FIRST_DELAY: Final = 0.1
LONGEST_DELAY: Final = 30.0
LONGEST_WAIT: Final = 1.0
"""Seconds after which the pool looks for ended processes, where no pidfd wakes it. `poll` takes 24 days at most."""
KILLED: Final = 3
"""Exit code of a pool that killed workers before they had finished."""
STEADY: Final = 60.0
"""Seconds after which the earlier deaths of a worker that has served without dying do not count."""
LOST: Final = 255
"""Stands for an unknown exit code, as in `multiprocessing`."""
UNGUARDED: Final = 121
"""Exit code of a worker whose program starts the pool again when the worker imports it."""
UNGUARDED_TEXT: Final = (
    "importing this program starts the pool, and every worker imports it: put the call below a line "
    '`if __name__ == "__main__":`'
)


class Process:
    """A process of a worker, from its start to its end."""

    def __init__(self, process: Any, is_child: bool, pipe: Connection, row: Row, generation: int) -> None:
        self.process, self.pipe, self.row, self.generation = process, pipe, row, generation
        self._is_child, self._missed = is_child, 0
        self.pid: int = process.pid
        self.sentinel: Any = process.sentinel  # readable when it has ended
        with contextlib.suppress(OSError, AttributeError):  # a kernel, or a sandbox, without it
            # every child that the process forks inherits the other end of `process.sentinel`, a pipe
            self.sentinel = FileIO(os.pidfd_open(self.pid))
        self.ready_since: float | None = None
        self.report: tuple[str, str, str] | None = None  # why it cannot serve: kind, text, traceback
        self.reported = False
        self.deadline = math.inf  # when it is killed
        self.killed = False  # by the pool, before it had finished

    @property
    def is_ready(self) -> bool:
        return self.ready_since is not None

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, even if the kernel or another part of the program has reaped it."""
        if self.process.exitcode is not None:
            return True
        try:
            if self._is_child:
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # or another thread is just about to note the exit code, for the second look
            self._missed += 1
        return self._missed > 1

    def wait(self) -> str:
        """Wait until the process has ended; return in words how it ended."""
        self.process.join()
        if self.process.exitcode is None:  # SIGCHLD is ignored, or other code waits for every child
            self.process._popen.returncode = LOST
            return "exit code unknown"
        return how_ended(self.process.exitcode)

    def close(self) -> None:
        """Release the resources of a process that has ended."""
        if isinstance(self.sentinel, FileIO):
            self.sentinel.close()
        self.process.close()
        self.pipe.close()


class Worker:
    """A worker of the pool, and its processes."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: Process | None = None
        self.successor: Process | None = None
        self.leaving: Process | None = None
        self.due: float | None = None  # when to start it again
        self.deaths = 0  # in a row
        self.restarts = 0
        self.handled = self.errors = 0  # by processes that have ended
        self.last_error, self.failed_ns = "", 0

    @property
    def processes(self) -> list[Process]:
        return [each for each in (self.process, self.successor, self.leaving) if each is not None]

    @property
    def is_ready(self) -> bool:
        return self.process is not None and self.process.is_ready

    def died(self, served: float) -> float:
        """Count a death, after `served` seconds of service; returns the seconds after which to start the worker
        again."""
        self.deaths = 1 if served >= STEADY else self.deaths + 1
        return min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(self.deaths - 1, 64))

    def note(self, error: str, failed_ns: int) -> None:
        """Keep the newest error."""
        if failed_ns > self.failed_ns:
            self.last_error, self.failed_ns = error, failed_ns

    def statistics(self, board: Board) -> WorkerStatistics:
        """See `WorkerStatistics`."""
        counts = [board.read(each.row) for each in self.processes]
        process = self.process
        now = Counts() if process is None else counts[0]
        newest = max(counts, key=lambda each: each.failed_ns, default=now)
        return WorkerStatistics(
            worker=self.number, pid=0 if process is None else process.pid, alive=process is not None,
            ready=self.is_ready, restarts=self.restarts, generation=0 if process is None else process.generation,
            handled=self.handled + sum(each.handled for each in counts),
            errors=self.errors + sum(each.errors for each in counts),
            busy=(time.monotonic_ns() - now.busy_ns) * 1e-9 if now.busy_ns else None,
            last_error=newest.error if newest.failed_ns > self.failed_ns else self.last_error,
        )  # fmt: skip


class Reload:
    """A call of `reload`: it is done when every worker has been replaced since, or the reload has failed."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: ShmTensorError | None = None
        self.is_given_up = False

    def finish(self, error: ShmTensorError | None) -> None:
        """End it."""
        self.error = error
        self.done.set()


class _Replacing:
    """The reload that is going on."""

    def __init__(self, calls: list[Reload], workers: list[Worker]) -> None:
        self.calls, self.left = calls, deque(workers)
        self.worker: Worker | None = None
        self.process: Process | None = None  # its new one, which is waited for

    @property
    def is_given_up(self) -> bool:
        return all(each.is_given_up for each in self.calls)


class Supervisor:
    """Keeps a pool's workers running. All but `run` may be called from any thread, `stop`, `kill` and `request` also in
    a signal handler."""

    def __init__(self, name: str, count: int, job: worker.Job, context: Any, max_restarts: int) -> None:
        self.name, self._job, self._context, self._max_restarts = name, job, context, max_restarts
        self._process_class = process_class(context)
        self.workers = [Worker(number) for number in range(count)]
        self.board = Board(2 * count + 1)
        self.changed = threading.Condition()
        """Notified when a worker becomes ready or ends, and when the pool stops. Held while processes are replaced."""
        self.exit_code: int | None = None
        self.stop_reason: str | None = None
        self.reloads = 0
        self._impatient = False
        self._has_served = False  # a worker has been ready
        self._requested: deque[Reload] = deque()
        self._replacing: _Replacing | None = None
        self._waker, self._wake = multiprocessing.Pipe(duplex=False)

    # --- from other threads and signal handlers

    @property
    def is_reloading(self) -> bool:
        return self._replacing is not None or bool(self._requested)

    def stop(self, reason: str) -> None:
        """Tell the workers to finish what they have taken and end."""
        if self.stop_reason is None:
            self.stop_reason = reason
            self._wake_up()

    def kill(self) -> None:
        """End the workers now."""
        self._impatient = True
        if self.stop_reason is None:
            self.stop_reason = "killed"
        self._wake_up()

    def request(self, reload: Reload) -> None:
        """Begin a reload, after the one that is going on."""
        self._requested.append(reload)
        self._wake_up()
        if self.stop_reason is not None:  # it may not see this one any more
            self._refuse_requests()

    def give_up(self, reload: Reload) -> None:
        """Note that a call does not wait for this reload any more. The reload ends unless another call waits for it as
        well."""
        reload.is_given_up = True
        self._wake_up()

    def statistics(self) -> tuple[WorkerStatistics, ...]:
        """Of each worker."""
        with self.changed:
            return tuple(each.statistics(self.board) for each in self.workers)

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # it has ended
            self._wake.send_bytes(b"!")

    # --- the pool's own thread

    def run(self) -> None:
        """Start the workers, and keep them running until the pool ends."""
        code, failure = 1, "failed"
        try:
            code = self._watch()
        except Exception as error:
            log.exception("pool %s: failed", self.name)
            failure = f"failed: {type(error).__name__}: {error}"
        finally:
            self.stop_reason = self.stop_reason or failure
            for each in self.workers:
                for process in each.processes:
                    with contextlib.suppress(Exception):  # whatever is raised here, the pool reports that it has ended
                        process.process.kill()
                        self._ended(each, process)
            with self.changed:
                self.board.close()
                self.exit_code = code
                self.changed.notify_all()
            self._end_reload(ClosedError(f'worker pool "{self.name}" has ended ({self.stop_reason}) during a reload'))
            self._refuse_requests()
            self._waker.close()  # not the other end: a thread may be in `_wake_up`, and the number another file's then
            log.info("pool %s: ended with exit code %d", self.name, code)

    def _watch(self) -> int:
        """Start the workers, and go on until all have ended; returns the exit code."""
        for each in self.workers:
            self._start(each, "process")
        stopping = killed = False
        code = 0
        while self._running() or self.stop_reason is None:
            self._wait()
            for each in self.workers:
                code = max(code, self._check(each))
            if self.stop_reason is None:
                self._reload()
            elif not stopping:
                log.info("pool %s: stopping (%s)", self.name, self.stop_reason)
                stopping = True
                for _, process in self._running():
                    self._terminate(process)
                with self.changed:
                    self.changed.notify_all()
                self._end_reload(
                    ClosedError(f'worker pool "{self.name}" was stopped during a reload ({self.stop_reason})')
                )
                self._refuse_requests()
            if self._kill_late(stopping and self._impatient):
                killed = killed or stopping
        return code or (KILLED if killed else 0)

    def _running(self) -> list[tuple[Worker, Process]]:
        return [(each, process) for each in self.workers for process in each.processes]

    def _wait(self) -> None:
        """Wait until a worker reports or ends, a call wakes this, a restart is due, or a process is to be killed."""
        things: list[Any] = [self._waker]
        times = [time.monotonic() + LONGEST_WAIT]
        for _, process in self._running():
            things.append(process.sentinel)
            if not process.reported:
                things.append(process.pipe)
            if not process.killed:
                times.append(process.deadline)
        if self.stop_reason is None:
            times += [each.due for each in self.workers if each.process is None and each.due is not None]
            if self._requested and self._replacing is None:  # since the last reload has ended
                return
        connection.wait(things, max(0.0, min(times) - time.monotonic()))
        while self._waker.poll():
            self._waker.recv_bytes()

    def _check(self, each: Worker) -> int:
        """Handle what a worker's processes reported, their ends, or its restart that is due; 1 if the pool gives up."""
        if each.process is None and each.due is not None and time.monotonic() >= each.due and self.stop_reason is None:
            return self._restart(each)
        code = 0
        for process in each.processes:
            has_ended = process.has_ended  # before its report is looked for: it may be the last act
            if not process.reported and process.pipe.poll():
                self._read_report(each, process)
            if has_ended:
                code = max(code, self._ended(each, process))
        return code

    def _read_report(self, each: Worker, process: Process) -> None:
        process.reported = True
        try:
            kind, text, trace = process.pipe.recv()
        except (EOFError, OSError):  # it dies
            return
        if kind == worker.READY:
            log.info("worker %d: ready (pid %d)", each.number, process.pid)
            with self.changed:
                process.ready_since = time.monotonic()
                self._has_served = True
                self.changed.notify_all()
            return
        process.report = kind, text, trace
        if self.stop_reason is None:
            trace = trace and f"\n{trace.rstrip()}"
            log.error("worker %d: cannot start (pid %d): %s%s", each.number, process.pid, text, trace)

    def _start(self, each: Worker, role: str) -> Process:
        """Start a process of a worker, which becomes its `process` or its `successor`."""
        ours, theirs = self._context.Pipe()
        method = self._context.get_start_method()
        ends = [ours, *(other.pipe for _, other in self._running())] if method == "fork" else []
        row = self.board.take()
        process = self._process_class(
            target=worker.main, args=(self.name, each.number, self._job, theirs, row, ends),
            name=f"shmtensor worker {each.number} of {self.name}",
        )  # fmt: skip
        try:
            process.start()
        except BaseException:
            ours.close()
            self.board.give_back(row)
            raise
        finally:
            theirs.close()
        started = Process(process, method != "forkserver", ours, row, self.reloads)
        with self.changed:
            setattr(each, role, started)
            each.due = None
        log.info("worker %d: started (pid %d)", each.number, started.pid)
        return started

    def _restart(self, each: Worker) -> int:
        each.restarts += 1
        try:
            self._start(each, "process")
        except Exception as error:  # no memory or no process for it, now
            each.note(f"could not be started: {error}", time.monotonic_ns())
            return self._died(each, f"it could not be started: {error}", str(error), 0.0)
        return 0

    def _terminate(self, process: Process) -> None:
        """Tell a process to finish what it has taken and end."""
        grace = self._job.grace
        process.deadline = math.inf if grace is None else time.monotonic() + grace
        process.process.terminate()  # ends one at once that has not come to `worker.main`
        # The signal may be lost before `main`: a worker inherits that it is blocked or ignored, a forked one a handler
        with contextlib.suppress(OSError):  # it has ended
            process.pipe.send_bytes(worker.STOP)

    def _kill_late(self, everything: bool) -> bool:
        """Kill the processes that have not finished in time; whether there were any."""
        killed = False
        for each, process in self._running():
            if not process.killed and (everything or time.monotonic() >= process.deadline):
                log.warning("worker %d: killed before it had finished (pid %d)", each.number, process.pid)
                process.killed = killed = True
                process.process.kill()
        return killed

    def _ended(self, each: Worker, process: Process) -> int:
        """Clean up after a process that has ended; 1 if the pool gives up."""
        how = process.wait()
        unguarded = process.process.exitcode == UNGUARDED and not process.is_ready
        process.close()
        with self.changed:
            role = next(name for name in ("process", "successor", "leaving") if getattr(each, name) is process)
            setattr(each, role, None)
            counts = self.board.read(process.row)
            self.board.give_back(process.row)
            each.handled, each.errors = each.handled + counts.handled, each.errors + counts.errors
            each.note(counts.error, counts.failed_ns)
            self.changed.notify_all()
        if self.stop_reason is not None:
            log.info("worker %d: ended (pid %d, %s)", each.number, process.pid, how)
            return 0
        if role == "leaving":
            log.info("worker %d: replaced (pid %d, %s)", each.number, process.pid, how)
            return 0
        failure = UNGUARDED_TEXT if unguarded else process.report[1] if process.report else ""
        if not process.killed:  # by the pool: its reload was given up
            each.note(failure or f"died (pid {process.pid}, {how})", time.monotonic_ns())
        if self._replacing is not None and self._replacing.process is process:
            self._reload_failed(self._replacing, process, how)
        if role == "successor":
            return 0
        if each.successor is not None:  # it would start now anyway
            with self.changed:
                each.process, each.successor = each.successor, None
            log.warning("worker %d: died (pid %d, %s), its new process goes on", each.number, process.pid, how)
            return 0
        final = unguarded or (process.report is not None and process.report[0] == worker.REFUSED)
        if final and not self._has_served:  # a restarted worker would report the same
            if unguarded:
                log.error("worker %d: %s", each.number, failure)
            self.stop_reason = failure
            return 1
        served = 0.0 if process.ready_since is None else time.monotonic() - process.ready_since
        return self._died(each, f"pid {process.pid}, {how}", failure, served)

    def _died(self, each: Worker, how: str, failure: str, served: float) -> int:
        """Schedule the restart of a worker that died after so many seconds of service, or give up (1)."""
        delay = each.died(served)
        if each.deaths > self._max_restarts:
            log.error(
                "worker %d: died (%s), as it did %d times in a row before: giving up", each.number, how, each.deaths - 1
            )
            why = f", the last time: {failure}" if failure else ""
            self.stop_reason = f"worker {each.number} died {each.deaths} times{why}"
            return 1
        each.due = time.monotonic() + delay
        log.warning(
            "worker %d: died (%s), restart %d of %d in %g s", each.number, how, each.deaths, self._max_restarts, delay
        )
        return 0

    # --- reloading

    def _reload(self) -> None:
        """Begin a reload that was requested; go on with the one that is going on, as far as that is possible now."""
        if self._replacing is None:
            calls = list(self._take_requests())
            if not calls:
                return
            self.reloads += 1
            self._replacing = _Replacing(calls, self.workers)
            log.info("pool %s: reloading", self.name)
        replacing = self._replacing
        if replacing.is_given_up:
            self._abandon(replacing)
            return
        while True:
            each, process = replacing.worker, replacing.process
            if each is not None and process is not None:
                if not process.is_ready:
                    return
                replacing.process = None
                self._replace(each, process)
            if each is not None and each.leaving is not None:
                return
            if not replacing.left:
                log.info("pool %s: reloaded", self.name)
                self._end_reload(None)
                return
            if replacing.left[0].successor is not None or replacing.left[0].leaving is not None:
                return  # of a reload that was given up
            replacing.worker = each = replacing.left.popleft()
            try:
                replacing.process = self._start(each, "process" if each.process is None else "successor")
            except Exception as error:
                self._reload_failed(replacing, None, str(error))
                return

    def _replace(self, each: Worker, process: Process) -> None:
        """The new process of a worker is ready: it takes the old one's place, which ends."""
        if each.successor is process:
            with self.changed:
                each.leaving, each.process, each.successor = each.process, process, None
                self.changed.notify_all()
        each.deaths = 0
        if each.leaving is not None:
            self._terminate(each.leaving)

    def _abandon(self, replacing: _Replacing) -> None:
        """End the current reload, for which no call waits any more, and its new process that is not ready."""
        each, process = replacing.worker, replacing.process
        replacing.process = None
        if each is not None and process is not None and each.successor is process:
            log.warning("worker %d: killed, since the reload was given up (pid %d)", each.number, process.pid)
            process.killed = True
            process.process.kill()
        log.warning("pool %s: reload given up", self.name)
        self._end_reload(None)

    def _reload_failed(self, replacing: _Replacing, process: Process | None, how: str) -> None:
        each = replacing.worker
        number = -1 if each is None else each.number
        done = len(self.workers) - len(replacing.left) - 1
        text = (
            f'worker pool "{self.name}": reload stopped at worker {number}, after {done} of {len(self.workers)} were '
            f"replaced; the others serve on as they were: the new process "
        )
        error: ShmTensorError
        if process is None:
            error = PeerDied(f"{text}could not be started: {how}")
        elif process.report is None:
            error = PeerDied(f"{text}died before it was ready (pid {process.pid}, {how})")
        else:
            kind, _, why = process.report[1].partition(": ")
            if process.report[0] == worker.REFUSED:
                kind, why = "Refused", process.report[1]
            error = RemoteError(kind, f"{text}cannot start: {why}", process.report[2], "worker")
        log.error("%s", f"{text}{'cannot start' if process and process.report else 'died'} ({how})")
        self._end_reload(error)

    def _end_reload(self, error: ShmTensorError | None) -> None:
        replacing, self._replacing = self._replacing, None
        if replacing is not None:
            for each in replacing.calls:
                each.finish(error)

    def _take_requests(self) -> Iterator[Reload]:
        while True:
            try:
                reload = self._requested.popleft()
            except IndexError:
                return
            if not reload.is_given_up:
                yield reload

    def _refuse_requests(self) -> None:
        for each in self._take_requests():
            each.finish(ClosedError(f'worker pool "{self.name}" has ended ({self.stop_reason})'))
