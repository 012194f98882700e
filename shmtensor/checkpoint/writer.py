"""`CheckpointWriter`: copy a state into shared memory, and let a background process make a durable file of it."""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

from ..calls import Call, CallQueue
from ..endpoints.base import check_choice, check_count, check_timeout
from ..endpoints.local import Local
from ..errors import ArgumentError, ClosedError, ForkedError, ResourceError
from ..memory.segment import SHM_DIR
from ..statistics import WriterStatistics
from ..units import parse_bytes
from . import exits
from .bar import Bar
from .directory import Directory
from .flight import Flight
from .formats import get_format
from .handle import COMPLETE, DURABLE, FAILED, REPLACED, SKIPPED, SaveHandle
from .link import Link, check_ionice
from .names import Namer, RankNamer, channel_of, check_best, check_directory, check_metrics, check_ranks, step_of
from .offload import marks
from .recall import Prepared, Recall
from .run import RankDirectory
from .slots import LEAST_MEMORY, Stager, check_memory
from .staging import Abandoned, Staging

_T = TypeVar("_T")
_HEAD_EXTRA: Final = 4096  # bytes that the options of a head take beside the plan's description
_SLACK: Final = 4 << 20
_START: Final = 30.0
"""Seconds that `save` waits at most for a writing process that starts."""
_MOST_VOTED: Final = 2
"""Saves of a rank that may wait for other ranks' parts; one more waits for them, as their parts take up the disk."""


class CheckpointWriter(Local):
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
            written yet. See `SaveHandle.status`, `waited` and `replaced`.
        keep_last: how many of the newest checkpoints stay; older ones that this library wrote are deleted. None: all.
        keep_every: older ones whose step is a multiple of it stay as well.
        keep_best: `(metric, "min" or "max", count)`: so many older ones with the best `metrics=` stay as well.
        on_error: `"raise"` or `"warn"`: what the next `save` or `close` does with an error that nobody has asked
            `SaveHandle.durable` for.
        nice: added to the niceness of the writing process, 0 to 19.
        ionice: `"idle"` or `"low"`: its class of disk access, by the program ionice; None: as the trainer's.
        progress: draw a progress bar on standard error.
        rank, world_size: this writer saves the part of one rank, 0 to `world_size - 1`, of checkpoints that all ranks
            save together: each opens a writer on the same directory, and saves the same names in the same order. A
            checkpoint is durable, and `latest` leads to it, when the parts of all ranks are: `SaveHandle.missing` tells
            whose are awaited. `format` is one file per rank, `busy` is `"block"`.
            See docs/guide/checkpoints-of-several-ranks.md.

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
        keep_best: tuple[str, str, int] | None = None,
        on_error: str = "raise",
        nice: int = 10,
        ionice: str | None = None,
        progress: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
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
        best = check_best(keep_best, keep_last)
        check_ranks(rank, world_size, busy, max_shard)
        self._memory = None if memory is None else check_memory(parse_bytes(memory, "memory"))
        self._format = get_format(format)
        self._max_shard = None if max_shard is None else parse_bytes(max_shard, "max_shard")
        self._recall = Recall(self._format, self._max_shard)
        self._busy, self._on_error, self._prefix = busy, on_error, check_ionice(ionice)
        self._bar = Bar(shown=progress)
        self._flight = Flight(self._bar)
        self._number = self._skipped = self._restarts = 0
        self._closed = self._ended = self._finishing = False
        self._pid = os.getpid()
        self._calls = CallQueue("shmtensor saves")
        self._callbacks = CallQueue("shmtensor callbacks", stays=False)
        self._link: Link | None = None
        self._stager: Stager | None = None
        self._staging: Staging | None = None
        self._writer = secrets.token_hex(8)
        path = check_directory(directory)
        self._ranks: dict[str, Any] = {} if rank is None else {"rank": rank, "world_size": world_size}
        self._directory = Directory(path) if rank is None else RankDirectory(path, rank, world_size or 0, self._writer)
        self._run(
            lambda call: self._directory.own(lambda: call.abandoned), None, CallQueue("shmtensor opening", stays=False)
        )
        self._namer = Namer(self._directory) if rank is None else RankNamer(self._directory)
        self._channel = channel_of(path, self._writer, ranks=rank is not None)
        self._settings: dict[str, Any] = {
            "directory": self._directory.path, "writer": self._writer, "keep_last": keep_last,
            "keep_every": keep_every, "keep_best": best, "nice": nice, **self._ranks,
        }  # fmt: skip
        if isinstance(self._directory, RankDirectory):
            self._settings["run"] = self._directory.run

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
        deadline = None if timeout is None else time.monotonic() + timeout
        self._check_open()
        head, total, devices = 0, -1, []
        if isinstance(like, (int, str)):
            total = parse_bytes(like, "like")
        elif like is not None:
            made = self._recall.prepare(like, None)
            head, total, devices = len(made.described) + _HEAD_EXTRA, made.geometry.nbytes, made.plan.devices
        link = self._run(lambda call: self._start(head, total, devices), deadline)
        link.wait_ready(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _start(self, head: int, total: int, devices: list[str]) -> Link:
        self._check_open()
        link = self._running()
        if total >= 0:
            self._provide(head, total)
            if self._stager is not None:
                self._stager.pin(devices)
        return link

    def save(
        self, state: Any, name: str | None = None, meta: dict[str, Any] | None = None, *,
        metrics: Mapping[str, float] | None = None, alias: str | None = None, timeout: float | None = None,
        ordered: bool = True,
    ) -> SaveHandle:  # fmt: skip
        """Copy a state into shared memory, to be written in the background. Returns when the copy is made, or, of what
        lies on a device, is under way: `SaveHandle.staged` is done when that is complete.

        Args:
            state: nested dicts, lists and tuples of tensors, arrays and plain values, or an `nn.Module`; whatever is
                changed afterwards does not reach the file.
            name: of the checkpoint in its directory, without ending. An existing name is an `ArgumentError`: nothing
                is ever overwritten. None: `step-00000007` if `meta` or the state has an int `step`, else
                `save-00000001` and so on; with `-2` behind it if that exists.
            meta: a small JSON-able dict that is kept with it.
            metrics: numbers by name, which `keep_best` compares and `list_checkpoints` shows.
            alias: a second name, such as "best", which it takes over from the checkpoint that had it: a link that moves
                when this one is durable. What it leads to is not deleted.
            timeout: seconds to wait for room; None waits as long as the writing process lives.
            ordered: with tensors on a device: what the current stream gets from now on waits for the copies, so that
                it may change the state. False: it does not wait; change nothing of the state before `staged` is done,
                or the stream was told to wait by `SaveHandle.wait_stream`.

        With `on_error="raise"` it raises the error of an earlier save that nobody has asked for, and saves nothing.

        Raises:
            ArgumentTypeError: the state holds something that cannot be saved; the message names where.
            TimedOut: there was no room within `timeout`.
            ResourceError: `/dev/shm` has no room for the slots.
            PeerDied: the writing process is dead, and cannot be started.
        """
        check_timeout(timeout)
        began = time.monotonic()
        deadline = None if timeout is None else began + timeout
        self._check_open()
        step, numbers = step_of(state, meta), check_metrics(metrics)
        while True:
            prepared = self._recall.prepare(state, meta)
            after = marks(prepared.plan) if prepared.plan.devices else {}
            call = Call(partial(self._save, prepared, after, name, alias, step, numbers, began, deadline))
            try:
                self._put(call)
                made = call.wait(deadline, self._busy_with)
                if isinstance(made, SaveHandle):
                    if ordered and made._offload is not None:
                        made._offload.follow()
                    return made
            except BaseException:
                call.abandon()  # before the caller may change the state
                raise
            finally:
                del call, prepared
            self._tell(made, raises=self._on_error == "raise")

    def _save(
        self, prepared: Prepared, after: dict[int, Any], name: str | None, alias: str | None, step: int | None,
        metrics: dict[str, float], began: float, deadline: float | None, call: Call[Any],
    ) -> Any:  # fmt: skip
        """Saves, unless there is an error that nobody has asked for: then these are the result."""
        self._check_open()
        untold = self._flight.untold()
        if untold:
            return untold
        made, described, geometry = prepared
        if self._ranks and not self._flight.wait_for_votes(_MOST_VOTED, deadline, lambda: call.abandoned):
            raise Abandoned
        ending = self._format.suffix if geometry.single and not self._ranks else ""
        taken = {handle.name for handle in self._flight.handles}
        aliases = {handle._alias for handle in self._flight.handles}
        fixed = name is not None
        name, step = self._namer.choose(name, step, ending, taken | aliases, self._number + 1)
        alias = self._namer.check_alias(alias, name, taken)
        said = {key: value if math.isfinite(value) else repr(value) for key, value in metrics.items()}
        head = len(described) + _HEAD_EXTRA + len(json.dumps(said))
        stager, staging = self._stager_for(head, geometry.nbytes)
        chunks = geometry.chunks(stager.chunk)
        handle = SaveHandle(name, self._directory.at(name), 0, geometry.nbytes, self._callbacks)
        handle._alias = alias
        stager.provide(head, len(chunks) * stager.chunk)
        asked = staging.make_room(call, self._busy, len(chunks))
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
            "metrics": said, "alias": alias, "fixed": fixed, **self._ranks,
        }  # fmt: skip
        self._flight.add(handle)
        finish = staging.stage(call, handle, made, after, chunks, described, options, deadline)
        patience = _START if deadline is None else min(_START, max(0.0, deadline - time.monotonic()))
        link.wait_joined(patience, lambda: call.abandoned)
        if finish is not None:
            self._finishing = True
            call.reply(handle)
            finish()
            self._finishing = False
        return handle

    # --- calls: their effects are made by a thread that no exception of the caller's reaches

    def _run(self, function: Callable[[Call[_T]], _T], deadline: float | None, calls: CallQueue | None = None) -> _T:
        """What a function returns, or raises, in the writer's thread."""
        call = Call(function)
        try:
            self._put(call, calls)
            return call.wait(deadline, self._busy_with)
        except BaseException:
            call.abandon()
            raise
        finally:
            del call

    def _put(self, call: Call[Any], calls: CallQueue | None = None) -> None:
        if self._is_own_thread:
            raise ResourceError(
                errno.EDEADLK,
                "a finalizer in one of the writer's own threads cannot wait for it: call from another thread",
            )
        (calls or self._calls).put(call.run)

    @property
    def _is_own_thread(self) -> bool:
        link = self._link
        return self._calls.is_here or (link is not None and link.is_here)

    def _busy_with(self) -> str:
        if self._ended:
            return "a callback of a save has not ended within timeout="
        if self._finishing:
            return "the checkpoint before is still being copied from the device"
        return "another call of this writer has not ended within timeout="

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
        exits.add(self)  # there is something to drain from now on
        if link is None or link.lost:
            if link is not None:
                self._restarts += link.restarts + 1
                link.finish()
            if isinstance(self._directory, RankDirectory):
                self._directory.begin()
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

    def _tell(self, untold: list[tuple[SaveHandle, BaseException]], *, raises: bool) -> None:
        """Errors that nobody has asked for: raise the first, or warn of all. One counts as told when it is."""
        for handle, error in untold[1:] if raises else untold:
            handle.durable.looked = True
            warnings.warn(f"checkpoint {handle.name}: {error}", RuntimeWarning, stacklevel=3)
        if raises and untold:
            untold[0][0].durable.looked = True
            raise untold[0][1]

    # --- the end

    def close(self, timeout: float | None = None) -> None:
        """Wait until everything that was staged is durable or has failed and callbacks have ended, and end the writing
        process. Idempotent.

        With `on_error="raise"` it raises the first error of a save that nobody has asked for; all is closed then.

        Raises:
            TimedOut: after `timeout` seconds; the writer is still open then, or only waits for callbacks.
        """
        check_timeout(timeout)
        self._close(timeout, quietly=False)

    def _close(self, timeout: float | None, *, quietly: bool) -> None:
        if os.getpid() != self._pid:
            self._closed = True
            return
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._is_own_thread:  # of a finalizer: nobody may wait there, and whoever closes next does
            self._calls.put(Call(lambda call: self._shut(call, None)).run)
            return
        if not self._ended:
            self._run(lambda call: self._shut(call, deadline), deadline)
        if not (self._callbacks.is_here or self._callbacks.is_idle):
            self._run(lambda call: None, deadline, self._callbacks)
        self._calls.stop()
        self._tell(self._flight.untold(), raises=self._on_error == "raise" and not quietly)

    def _shut(self, call: Call[None], deadline: float | None) -> None:
        if self._closed or not self._flight.wait(deadline, lambda: call.abandoned):
            return
        self._closed = True
        exits.discard(self)
        try:
            self._leave()
        finally:
            self._ended = True

    def _leave(self) -> None:
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

    def statistics(self) -> WriterStatistics:
        """Counters since this writer was made."""
        counts, link, stager = self._flight.counts, self._link, self._stager
        return WriterStatistics(
            saves=self._number, durable=counts[DURABLE], complete=counts[COMPLETE], failed=counts[FAILED],
            replaced=counts[REPLACED],
            skipped=self._skipped, deleted=self._flight.deleted,
            restarts=self._restarts + (link.restarts if link is not None else 0),
            memory_bytes=stager.memory if stager is not None else 0,
            pid=link.pid if link is not None else 0,
        )  # fmt: skip

    def _instead(self) -> str:
        return "use this one, its methods are thread-safe; a process that saves as well needs a directory of its own"

    def __enter__(self) -> CheckpointWriter:
        self._check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(None, quietly=kind is not None)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._flight)} in flight"
        return f"<CheckpointWriter {self.directory!r} {state}, {self._flight.counts[DURABLE]} durable>"
