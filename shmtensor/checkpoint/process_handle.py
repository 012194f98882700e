"""The trainer's handle of its writing process: starts it, receives its reports, and starts it again if it dies.

One thread does all of this. It ends when the process has reported that it is finished, or will not be restarted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from io import FileIO
from typing import Any, Final

from ..channel.cleanup import sweep_channel
from ..channel.names import socket_dir
from ..children import python_command, python_environment
from ..endpoints.workqueue import Consumer, Producer
from ..errors import EndOfStream, PeerDied, ResourceError, ShmTensorError, TimedOut
from ..shielded import Flag

_ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1"}
"""Environment of the process, which computes nothing. Otherwise NumPy would start an OpenBLAS thread for each core, and
these spin for a tenth of a second on the trainer's cores."""
LAUNCH: Final = "from shmtensor.checkpoint.writer_process import main; main()"
DEATHS: Final = 5
"""Deaths in a row, without a finished save in between, after which the process is not started again."""

_LIVENESS_INTERVAL: Final = 0.25
_REMINDER: Final = 2.0
_PATIENCE: Final = 60.0
_PAUSES: Final = (0.0, 0.1, 0.5, 1.0, 2.0)
_IONICE: Final = {"idle": ("-c", "3"), "low": ("-c", "2", "-n", "7")}

log = logging.getLogger("shmtensor.checkpoint")


def results_channel(channel: str) -> str:
    """The channel on which a writing process reports."""
    return f"{channel}-r"


def check_ionice(ionice: str | None) -> tuple[str, ...]:
    """The words to put before the command of the process."""
    if ionice is None:
        return ()
    found = shutil.which("ionice")
    if found is None:
        raise ResourceError(2, f"ionice={ionice!r} needs the program ionice (util-linux), which is not installed")
    return (found, *_IONICE[ionice])


class Orders(FileIO):
    """The orders of a trainer to its writing processes: a file in memory, which is their standard input.

        | 1 byte: "x" once the trainer closes | settings, a line of JSON | secret |

    All but the first byte is written before a process starts, and removed when it has been read. A signal could not
    show that the trainer closes, since any program may send one. An argument has 128 KiB at most, and every user can
    read it.
    """

    @property
    def is_closing(self) -> bool:
        """Whether the trainer closes, so that nothing more will come."""
        return os.pread(self.fileno(), 1, 0) == b"x"

    def show_closing(self) -> None:
        """Set the byte that shows that the trainer closes."""
        os.pwrite(self.fileno(), b"x", 0)

    def give(self, settings: dict[str, Any], secret: bytes) -> None:
        """Pass settings and secret to the next process."""
        self.forget()  # a process that died may not have read its own
        os.pwrite(self.fileno(), json.dumps(settings).encode("ascii") + b"\n" + secret, 1)

    def read_all(self) -> tuple[dict[str, Any], bytes]:
        """Settings and secret."""
        settings, _, secret = os.pread(self.fileno(), os.fstat(self.fileno()).st_size, 1).partition(b"\n")
        return json.loads(settings), secret

    def forget(self) -> None:
        """Remove settings and secret."""
        os.ftruncate(self.fileno(), 1)


class ProcessHandle:
    """A writing process, and its successors. Thread-safe.

    Args:
        channel: the writer's channel.
        settings: options of the process, as JSON can hold them.
        prefix: see `check_ionice`.
        alive: what the process must know about the saves in flight.
        on_report: called with each report. All callbacks are called in the handle's thread.
        on_death: called with the exit code before each restart; returns `alive` for the next process.
        on_lost: called with the error when there will be no other process.
        secret: bytes that every process receives; b"" for none.
    """

    def __init__(
        self,
        channel: str,
        settings: dict[str, Any],
        prefix: tuple[str, ...],
        alive: dict[str, Any],
        on_report: Callable[[dict[str, Any]], None],
        on_death: Callable[[int], dict[str, Any]],
        on_lost: Callable[[PeerDied], None],
        secret: bytes = b"",
    ) -> None:
        self.channel = channel
        self.restarts = 0
        self.lost = False
        self._settings, self._prefix, self._secret = settings, prefix, secret
        self._on_report, self._on_death, self._on_lost = on_report, on_death, on_lost
        self._stderr = tempfile.TemporaryFile("a+b", prefix="shmtensor-")  # noqa: SIM115
        self._ready_or_lost = Flag()
        self.closing = False
        """Set when every save is durable or has failed: the trainer leaves, and the process may end."""
        self._over = False
        self._deaths = 0
        self._orders = Orders(os.memfd_create("shmtensor-writer"), "r+")
        self._results = Consumer(results_channel(channel), acknowledge="next")
        try:
            self._process = self._spawn(alive)
        except BaseException:
            self._close_files()
            raise
        self._thread = threading.Thread(target=self._run, name="shmtensor checkpoint", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Process id of the writing process."""
        return self._process.pid

    def wait_ready(self, timeout: float | None) -> None:
        """Wait until the process has started and joined its channels. `TimedOut`, or `PeerDied` if it is lost."""
        if not self._ready_or_lost.wait(timeout):
            raise TimedOut(f"the writing process was not ready within {timeout:g} s")
        if self.lost:
            raise PeerDied(self._death_text())

    @property
    def is_here(self) -> bool:
        """Whether the current thread is the handle's own."""
        return self._thread.ident == threading.get_ident()

    def wait_joined(self, timeout: float, is_given_up: Callable[[], bool]) -> None:
        """Wait until a writing process has joined: then what was staged is written even if the trainer dies. Returns
        also if there will be no process, at the time-out, and if `is_given_up()`."""
        deadline = time.monotonic() + timeout
        while not self.lost and time.monotonic() < deadline and not is_given_up():
            if self._ready_or_lost.wait(0.05) and self._process.poll() is None:
                return
            time.sleep(0.001)  # it has died, and will be started again

    def show_end(self) -> None:
        """Show the process the end of a work queue that the trainer has never joined, since it has saved nothing."""
        if self._ready_or_lost.wait(_REMINDER) and not self.lost:
            with contextlib.suppress(ShmTensorError):  # then it looks within a second
                Producer(self.channel).close()

    def finish(self) -> None:
        """Wait for the end of process and thread. Call it when the trainer's end of the work queue is closed.

        Nothing is left to be written then. A process that joined too late to see the end finds it in its orders, and
        one that does not end at all (stopped, or blocked by a dead file system) is killed.
        """
        self.closing = True
        deadline = time.monotonic() + _PATIENCE
        while self._thread.is_alive():
            self._orders.show_closing()
            self._thread.join(_REMINDER)
            if time.monotonic() > deadline:
                self._process.kill()
        self._close_files()
        if self._process.returncode:  # it died as the last member of its channels
            for channel in (self.channel, results_channel(self.channel)):
                sweep_channel(channel, socket_dir(), patience=1.0)

    def _close_files(self) -> None:
        for each in (self._results, self._stderr, self._orders):
            each.close()

    # --- the thread

    def _run(self) -> None:
        try:
            while self._receive_reports() or self._restart():
                pass
        except Exception as error:
            log.exception("the thread that watches the writing process %d failed", self.pid)
            self._give_up(PeerDied(f"the writing process is not watched any more: {error}"))

    def _receive_reports(self) -> bool:
        """Receive reports for a while. False if the process has ended, or has reported that it is finished."""
        try:
            self._take(_LIVENESS_INTERVAL)
        except TimedOut:
            pass
        except EndOfStream:  # it has not joined yet, or has left
            time.sleep(0.02)
        if self._over and self.closing:
            # crash: close.over
            self._results.close()  # the process ends after us and removes the channels
            # crash: close.left
            self._process.wait()
            return False
        if self._process.poll() is None:
            return True
        try:
            while True:
                self._take(0)
        except (TimedOut, EndOfStream):
            return False

    def _take(self, timeout: float) -> None:
        with self._results.recv(timeout=timeout) as message:
            report = message.meta
        if report["r"] == "over":
            self._over = True
            return
        if report["r"] == "ready":
            self._ready_or_lost.set()
        elif report["r"] in ("durable", "error", "uploaded"):
            self._deaths = 0
        self._on_report(report)

    def _restart(self) -> bool:
        """Start another process after one has ended; False if there will be none."""
        code = self._process.returncode
        if self.closing:  # no save is in flight
            return False
        self._deaths += 1
        alive = self._on_death(code)
        log.warning("the writing process %d of checkpoints died (%s)", self.pid, self._end_text())
        if self._deaths >= DEATHS:
            self._give_up(PeerDied(self._death_text()))
            return False
        time.sleep(_PAUSES[self._deaths])
        if self.closing:
            return False
        self._ready_or_lost.clear()
        self._over = False
        try:
            self._process = self._spawn(alive)
        except OSError as error:
            self._give_up(PeerDied(f"the writing process died and cannot be started again: {error}"))
            return False
        self.restarts += 1
        return True

    def _give_up(self, error: PeerDied) -> None:
        self.lost = True
        self._process.kill()  # if it lives: it would keep its slots, and the directory, from the next one
        self._on_lost(error)
        self._ready_or_lost.set()
        self._process.wait()

    def _spawn(self, alive: dict[str, Any]) -> subprocess.Popen[bytes]:
        if not sys.executable:
            raise ResourceError(2, "sys.executable is empty: there is no Python to start the writing process with")
        self._orders.give({**self._settings, "channel": self.channel, **alive}, self._secret)
        return subprocess.Popen(
            [*self._prefix, *python_command(LAUNCH)],
            stdin=self._orders,
            stdout=subprocess.DEVNULL,  # it may outlive us: readers of our output must see its end
            stderr=self._stderr,
            start_new_session=True,  # Ctrl-C in the terminal must reach only the trainer
            env={**_ONE_THREAD, **python_environment(CUDA_VISIBLE_DEVICES="")},
        )

    def _end_text(self) -> str:
        code = self._process.returncode
        return f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"

    def _death_text(self) -> str:
        return (
            f"the writing process of checkpoints died {self._deaths} times in a row, last {self._end_text()}: "
            f"{self._last_words() or 'it said nothing'}"
        )

    def _last_words(self) -> str:
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - 2000))
        return self._stderr.read().decode("utf-8", "replace").strip()[-1000:]
