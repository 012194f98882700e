"""`CheckpointWriter`: copy a state into shared memory, and let a background process make a durable file of it."""

from __future__ import annotations

import os
import secrets
import threading
import time
import warnings
from typing import Any, Final

from ..endpoints.base import check_choice, check_count, check_timeout
from ..errors import ArgumentError, ClosedError, ForkedError
from ..memory.segment import SHM_DIR
from ..statistics import WriterStatistics
from ..units import parse_bytes
from . import exits
from .bar import Bar
from .directory import Directory
from .flight import Flight
from .formats import get_format
from .handle import DURABLE, FAILED, REPLACED, SKIPPED, SaveHandle
from .link import Link, check_ionice
from .names import Namer, channel_of, step_of
from .recall import Recall
from .slots import LEAST_MEMORY, Stager, check_memory
from .staging import Staging

_HEAD_EXTRA: Final = 4096  # bytes that the options of a head take beside the plan's description
_SLACK: Final = 4 << 20
_START: Final = 30.0
"""Seconds that `save` waits at most for a writing process that starts."""


class CheckpointWriter:
    """Saves states into a directory, in the background.

    `save` copies the state into shared memory and returns; a process of its own writes it. Thread-safe. One writer
    per directory: a second one is a `ResourceError`.

    Args:
        directory: where the checkpoints go; made if it is missing.
        memory: bytes of shared memory at most, an int or a string like "4GiB". A state that is larger streams through
            it, and `save` waits for the disk. None: as much as two states like the first one need.
        format: `"safetensors"`, `"torch"` or `"npz"`.
        max_shard: bytes of a file; larger states become a directory of several, where the format has such.
        busy: what `save` does when there is no room for the state beside those that are still being written:
            `"block"`, wait for room; `"skip"`, do not save; `"replace"`, take back those that are not being
            written yet. `SaveHandle.status`, `waited` and `replaced` tell.
        keep_last: how many of the newest checkpoints stay; older ones that this library wrote are deleted. None: all.
        keep_every: older ones whose step is a multiple of it stay as well.
        on_error: `"raise"` or `"warn"`: what the next `save` or `close` does with an error that nobody has asked
            `SaveHandle.durable` for.
        nice: added to the niceness of the writing process, 0 to 19.
        ionice: `"idle"` or `"low"`: its class of disk access, by the program ionice; None: as the trainer's.
        progress: draw a progress bar on standard error.

    >>> import numpy as np, shmtensor, tempfile
    >>> with tempfile.TemporaryDirectory() as path:
    ...     with shmtensor.CheckpointWriter(path, memory="8MiB", keep_last=2) as writer:
    ...         for step in range(3):
    ...             handle = writer.save({"weight": np.full(1000, step), "step": step})
    ...     shmtensor.load_checkpoint(path + "/latest")["step"]
    2
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        memory: int | str | None = None,
        format: str = "safetensors",
        max_shard: int | str | None = None,
        busy: str = "block",
        keep_last: int | None = None,
        keep_every: int | None = None,
        on_error: str = "raise",
        nice: int = 10,
        ionice: str | None = None,
        progress: bool = False,
    ) -> None:
        check_choice("busy", busy, ("block", "skip", "replace"))
        check_choice("on_error", on_error, ("raise", "warn"))
        check_choice("ionice", ionice, ("idle", "low")) if ionice is not None else None
        check_count("nice", nice, 0, 19)
        for option, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None:
                check_count(option, value, 1, 1 << 40)
        if keep_every is not None and keep_last is None:
            raise ArgumentError("keep_every says what stays besides keep_last: pass keep_last as well")
        self._memory = None if memory is None else check_memory(parse_bytes(memory, "memory"))
        self._format = get_format(format)
        self._max_shard = None if max_shard is None else parse_bytes(max_shard, "max_shard")
        self._recall = Recall(self._format, self._max_shard)
        self._busy, self._on_error, self._prefix = busy, on_error, check_ionice(ionice)
        self._bar = Bar(shown=progress)
        self._flight = Flight(self._bar)
        self._number = self._skipped = self._restarts = 0
        self._lock = threading.RLock()
        self._closed = False
        self._pid = os.getpid()
        self._link: Link | None = None
        self._stager: Stager | None = None
        self._staging: Staging | None = None
        self._writer = secrets.token_hex(8)
        self._directory = Directory(os.path.abspath(os.fspath(directory)))
        self._directory.own()
        self._namer = Namer(self._directory)
        self._channel = channel_of(self._directory.path, self._writer)
        self._settings: dict[str, Any] = {
            "directory": self._directory.path, "writer": self._writer, "keep_last": keep_last,
            "keep_every": keep_every, "nice": nice,
        }  # fmt: skip
        exits.add(self)

    @property
    def directory(self) -> str:
        """The directory's absolute path."""
        return self._directory.path

    # --- saving

    def start(self, like: Any = None, *, timeout: float | None = None) -> None:
        """Start the writing process now, and wait until it is ready, so that the first save finds it warm.

        Args:
            like: a state as `save` takes it, or its size in bytes (int, or a string like "1GiB"): shared memory for it
                is made now instead of at the first save, and pinned if part of the state lies on a CUDA device.
            timeout: seconds; `TimedOut` then.
        """
        check_timeout(timeout)
        with self._lock:
            self._check_open()
            link = self._running()
            if isinstance(like, (int, str)):
                self._provide(0, parse_bytes(like, "like"))
            elif like is not None:
                made = self._recall.prepare(like, None)
                self._provide(len(made.described) + _HEAD_EXTRA, made.geometry.nbytes)
                if self._stager is not None:
                    self._stager.pin(made.plan.devices)
        link.wait_ready(timeout)

    def save(
        self, state: Any, name: str | None = None, meta: dict[str, Any] | None = None, *,
        timeout: float | None = None, ordered: bool = True,
    ) -> SaveHandle:  # fmt: skip
        """Copy a state into shared memory, to be written in the background. Returns when the copy is made, or, of what
        lies on a device, is under way: `SaveHandle.staged` tells when that is complete.

        Args:
            state: nested dicts, lists and tuples of tensors, arrays and plain values, or an `nn.Module`; whatever is
                changed afterwards does not reach the file.
            name: of the checkpoint in its directory, without ending. An existing name is an `ArgumentError`: nothing
                is ever overwritten. None: `step-00000007` if `meta` or the state has an int `step`, else
                `save-00000001` and so on; with `-2` behind it if that exists.
            meta: a small JSON-able dict that is kept with it.
            timeout: seconds to wait for room; None waits as long as the writing process lives.
            ordered: with tensors on a device: what the current stream gets from now on waits for the copies, so that
                it may change the state. False: it does not wait; change nothing of the state before `staged` is done,
                or the stream was told to wait by `SaveHandle.wait_stream`.

        Raises:
            the error of an earlier save, with `on_error="raise"`, if nobody has asked for it: nothing is saved then.
            ArgumentTypeError: the state holds something that cannot be saved; the message names where.
            TimedOut: there was no room within `timeout`.
            ResourceError: `/dev/shm` has no room for the slots.
            PeerDied: the writing process is dead, and cannot be started.
        """
        check_timeout(timeout)
        began = time.monotonic()
        deadline = None if timeout is None else began + timeout
        with self._lock:
            self._check_open()
            self._tell_errors()
            made, described, geometry = self._recall.prepare(state, meta)
            ending = self._format.suffix if geometry.single else ""
            taken = {handle.name for handle in self._flight.handles}
            name, step = self._namer.choose(name, step_of(state, meta), ending, taken, self._number + 1)
            stager, staging = self._stager_for(len(described) + _HEAD_EXTRA, geometry.nbytes)
            staging.settle(deadline)
            chunks = geometry.chunks(stager.chunk)
            handle = SaveHandle(name, self._directory.at(name), 0, geometry.nbytes)
            stager.provide(len(described) + _HEAD_EXTRA, len(chunks) * stager.chunk)
            asked = staging.make_room(self._busy, len(chunks))
            if asked is None:
                self._skipped += 1
                handle._settle(SKIPPED)
                return handle
            link = self._running()
            self._number += 1
            handle.number, handle._asked = self._number, asked
            options = {
                "name": name, "step": step, "format": self._format.name, "max_shard": self._max_shard,
                "chunk": stager.chunk, "streams": not stager.fits(len(chunks)), "began": began,
            }  # fmt: skip
            self._flight.add(handle)
            staging.stage(handle, made, chunks, described, options, deadline, ordered=ordered)
            link.wait_joined(_START if deadline is None else min(_START, max(0.0, deadline - time.monotonic())))
        return handle

    # --- memory and process

    def _stager_for(self, head: int, total: int) -> tuple[Stager, Staging]:
        if self._stager is None:
            self._provide(head, total)
        if self._stager is None or self._staging is None:
            raise ClosedError("the writer is closed")
        return self._stager, self._staging

    def _provide(self, head: int, total: int) -> None:
        if self._stager is None:
            memory = self._memory
            if memory is None:
                space = os.statvfs(SHM_DIR)
                memory = min(2 * (total + head) + _SLACK + total // 8, space.f_blocks * space.f_frsize // 2)
            self._stager = Stager(self._channel, max(LEAST_MEMORY, memory))
            self._staging = Staging(self._stager, self._flight, lambda: self._link is not None and self._link.lost)
        self._stager.provide(head, total)

    def _running(self) -> Link:
        link = self._link
        if link is None or link.lost:
            if link is not None:
                self._restarts += link.restarts + 1
                link.finish()
            flight = self._flight
            link = self._link = Link(
                self._channel, self._settings, self._prefix, flight.alive(),
                flight.on_report, flight.on_death, flight.on_lost,
            )  # fmt: skip
        return link

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(f"CheckpointWriter of {self.directory} belongs to process {self._pid}: make a new one")
        if self._closed:
            raise ClosedError(f"CheckpointWriter of {self.directory} is closed")

    def _tell_errors(self, *, quietly: bool = False) -> None:
        """Errors that nobody has asked for: raise the first, or warn of all."""
        untold = self._flight.untold()
        for handle, error in untold:
            if self._on_error == "warn" or quietly or error is not untold[0][1]:
                warnings.warn(f"checkpoint {handle.name}: {error}", RuntimeWarning, stacklevel=3)
        if untold and self._on_error == "raise" and not quietly:
            raise untold[0][1]

    # --- the end

    def close(self, timeout: float | None = None) -> None:
        """Wait until everything that was staged is durable or has failed, and end the writing process. Idempotent.

        Raises:
            the first error that nobody has asked for, with `on_error="raise"`; everything is closed all the same.
            TimedOut: after `timeout` seconds; the writer is still open then.
        """
        check_timeout(timeout)
        if os.getpid() != self._pid:
            self._closed = True
        self._close(timeout, quietly=False)

    def _close(self, timeout: float | None, *, quietly: bool) -> None:
        with self._lock:
            if self._closed:
                return
            deadline = None if timeout is None else time.monotonic() + timeout
            if self._staging is not None:
                self._staging.settle(deadline)
            self._flight.wait(deadline)
            self._closed = True
            exits.discard(self)
            stager, self._stager, self._staging = self._stager, None, None  # to let go of the memory
            link, self._link = self._link, None
            if link is not None:
                link.closing = True
            if stager is not None:
                stager.close()
            # crash: close.staged
            if link is not None:
                link.finish()
                self._restarts += link.restarts
            self._directory.close()
            self._bar.close()
        self._tell_errors(quietly=quietly)

    def statistics(self) -> WriterStatistics:
        """Counters since this writer was made."""
        counts, link, stager = self._flight.counts, self._link, self._stager
        return WriterStatistics(
            saves=self._number, durable=counts[DURABLE], failed=counts[FAILED], replaced=counts[REPLACED],
            skipped=self._skipped, deleted=self._flight.deleted,
            restarts=self._restarts + (link.restarts if link is not None else 0),
            memory_bytes=stager.memory if stager is not None else 0,
            pid=link.pid if link is not None else 0,
        )  # fmt: skip

    def __enter__(self) -> CheckpointWriter:
        self._check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(None, quietly=kind is not None)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._flight.handles)} in flight"
        return f"<CheckpointWriter {self.directory!r} {state}, {self._flight.counts[DURABLE]} durable>"
