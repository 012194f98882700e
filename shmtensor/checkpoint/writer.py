"""`CheckpointWriter`: copies a state into shared memory; a background process makes a durable file of it."""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import secrets
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Literal, TypeVar

from ..endpoints.base import Local
from ..errors import ArgumentError, ClosedError, ForkedError, ResourceError, TimedOut
from ..memory import lifecycle
from ..memory.segment import free_bytes, more_room, total_bytes, where
from ..options import check_choice, check_count, check_timeout, format_bytes, parse_bytes
from ..shielded import Call, CallQueue
from ..statistics import WriterStatistics
from . import index
from .directory import Directory
from .envelope import SUFFIX
from .formats import get_format
from .handle import COMPLETE, DURABLE, FAILED, REPLACED, SKIPPED, VOTED, Bar, Save, SaveHandle, SavesInFlight
from .keys import Key, MasterKey
from .names import (
    Namer,
    RankNamer,
    UrlNamer,
    channel_of,
    check_best,
    check_directory,
    check_metrics,
    check_not_local,
    check_ranks,
    check_upload,
    step_of,
)
from .process_handle import ProcessHandle, check_ionice
from .ranks import RankDirectory
from .remote import url_of
from .slots import LEAST_MEMORY, Stager, check_memory, marks
from .staging import Abandoned, PlanCache, Prepared, Staging
from .upload import mark_of

_T = TypeVar("_T")
_HEAD_EXTRA: Final = 4096
"""Bytes of a head message besides the plan's description: its options."""
_SPARE_MEMORY: Final = 4 << 20
_START_TIMEOUT: Final = 30.0
"""Seconds that `save` waits at most for a writing process to start."""
_MAX_VOTED: Final = 2
"""Saves of a rank that may wait for other ranks' parts. `save` waits before it adds one more: parts take disk space."""
_SOON: Final = 1.0
"""Seconds that `close` waits for the parts of other ranks before it says that none of this one follows."""


class CheckpointWriter(Local):
    """Saves states into a directory, in the background.

    `save` copies the state into shared memory and returns; a process of its own writes it. Thread-safe. One writer
    per directory: a second one is a `ResourceError`.

    Args:
        directory: where the checkpoints are written; created if it is missing.
        memory: bytes of shared memory at most, an int or a string like "4GiB". A state that is larger streams through
            it, and `save` waits for the disk. None: as much as two states like the first one need.
        format: `"safetensors"`, `"torch"` (`.pt`), `"npz"`, or `"distcp"`, which stores tensors as DCP does.
        max_shard: bytes of a file; larger states become a directory of several. Only with `format="safetensors"`.
        busy: what `save` does when there is no room for the state beside those that are still being written:
            `"block"`, wait for room; `"skip"`, do not save; `"replace"`, drop those that are not being written yet.
            See `SaveHandle.status`, `waited` and `replaced`.
        keep_last: how many of the newest checkpoints stay; older ones that this library wrote are deleted. None: all.
        keep_every: older ones whose step is a multiple of it stay as well.
        keep_best: `(metric, "min" or "max", count)`: the `count` with the best `metrics=` of all stay as well; those
            among the last `keep_last` count.
        on_error: `"raise"` or `"warn"`: what the next `save` or `close` does with the error of an earlier save that you
            have not got from its `SaveHandle.durable`.
        nice: added to the niceness of the writing process, 0 to 19.
        ionice: `"idle"` or `"low"`: its class of disk access, by the program ionice; None: as the trainer's.
        progress: draw a progress bar on standard error.
        rank, world_size: this writer saves the part of one rank, 0 to `world_size - 1`, of checkpoints that all ranks
            save together: each opens a writer on the same directory, and saves the same names in the same order. A
            checkpoint is durable, and `latest` leads to it, when the parts of all ranks are: `SaveHandle.missing` has
            the ranks whose parts are missing. `format` is one file per rank, `busy` is `"block"`.
            See docs/guide/checkpoints-of-several-ranks.md.
        key: encrypt every file, by AES-256-GCM: 32 bytes, a passphrase (`str`), or an object with `wrap` and `unwrap`
            (`shmtensor.KeyWrapper`). The files' names end in `.encrypted`. `cryptography` is needed:
            the extra `crypto`. Shared memory is not encrypted. See docs/guide/encryption.md.
        readable_names: with `key=`: names, shapes and dtypes of the tensors are readable without it.
        upload: the URL of a directory (`s3://bucket/runs/a`, whatever fsspec can write) to which each checkpoint is
            copied when it is durable, by the writing process: `SaveHandle.uploaded`. `keep_last` deletes none that is
            not uploaded yet, and nothing at the URL; `close` waits for the uploads. With `rank=`, each rank uploads its
            part, and `uploaded` is done when the parts of all ranks are there; the URL is the same for all.
            See docs/guide/remote-checkpoints.md.
        local: False: no local copy is kept: the writing process streams each save from shared memory to `upload=`, and
            `durable` is done when it is there and listed; its `path` is the URL. `directory` has the lock and the list.
            Until then only shared memory has it, so a state has to fit into `memory`, and what was not there yet is
            lost if trainer and writing process both die. `keep_last`, `keep_every` and `keep_best` are for the URL.
            Not with `rank=` or `key=`.
        upload_keep_last: how many of the newest checkpoints stay at the URL, and those that `keep_every` and
            `keep_best` keep; older ones that this library uploaded are deleted there. None: all.

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
        format: Literal["safetensors", "torch", "npz"] = "safetensors",
        max_shard: int | str | None = None,
        busy: Literal["block", "skip", "replace"] = "block",
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: tuple[str, str, int] | None = None,
        on_error: Literal["raise", "warn"] = "raise",
        nice: int = 10,
        ionice: Literal["idle", "low"] | None = None,
        progress: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        key: Key | None = None,
        readable_names: bool = False,
        upload: str | None = None,
        upload_keep_last: int | None = None,
        local: bool = True,
    ) -> None:
        check_choice("busy", busy, ("block", "skip", "replace"))
        check_choice("on_error", on_error, ("raise", "warn"))
        check_choice("ionice", ionice, ("idle", "low")) if ionice is not None else None
        check_count("nice", nice, 0, 19)
        for option, value in (
            ("keep_last", keep_last), ("keep_every", keep_every), ("upload_keep_last", upload_keep_last),
        ):  # fmt: skip
            if value is not None:
                check_count(option, value, 1, 1 << 40)
        least = keep_last if upload_keep_last is None else upload_keep_last
        if keep_every is not None and least is None:
            raise ArgumentError("keep_every says what stays besides keep_last: pass keep_last as well")
        best = check_best(keep_best, least)
        check_ranks(rank, world_size, busy, max_shard)
        if readable_names and key is None:
            raise ArgumentError("readable_names= is for encrypted checkpoints: pass key= as well")
        if upload_keep_last is not None and upload is None:
            raise ArgumentError("upload_keep_last= says what stays at the URL: pass upload= as well")
        if not local:
            check_not_local(upload, upload_keep_last, rank, key)
        self._upload, self._local = check_upload(upload), bool(local)
        self._secret = b"" if key is None else MasterKey.of(key).dump()
        self._readable_names = bool(readable_names)
        self._memory = None if memory is None else check_memory(parse_bytes(memory, "memory"))
        self._format = get_format(format)
        self._max_shard = None if max_shard is None else parse_bytes(max_shard, "max_shard")
        self._plan_cache = PlanCache(self._format, self._max_shard)
        self._busy, self._on_error, self._prefix = busy, on_error, check_ionice(ionice)
        self._bar = Bar(shown=progress)
        self._saves = SavesInFlight(self._bar)
        self._number = self._skipped = self._restarts = 0
        self._closed = self._ended = self._finishing = False
        self._pid = os.getpid()
        self._calls = CallQueue("shmtensor saves")
        self._callbacks = CallQueue("shmtensor callbacks", stays=False)
        self._process: ProcessHandle | None = None
        self._stager: Stager | None = None
        self._staging: Staging | None = None
        self._writer = secrets.token_hex(8)
        path = check_directory(directory)
        self._ranks: dict[str, Any] = {} if rank is None else {"rank": rank, "world_size": world_size}
        self._directory = Directory(path) if rank is None else RankDirectory(path, rank, world_size or 0, self._writer)
        self._run(
            lambda call: self._directory.own(lambda: call.abandoned), None, CallQueue("shmtensor opening", stays=False)
        )
        self._namer: Namer = (RankNamer if rank is not None else Namer)(self._directory)
        if not self._local:
            self._namer = UrlNamer(self._directory, self._upload or "")
        self._channel = channel_of(path, self._writer, ranks=rank is not None)
        self._settings: dict[str, Any] = {
            "directory": self._directory.path, "writer": self._writer, "keep_last": keep_last,
            "keep_every": keep_every, "keep_best": best, "nice": nice, "upload": self._upload,
            "upload_keep_last": upload_keep_last, "local": self._local,
            **self._ranks,
        }  # fmt: skip
        if isinstance(self._directory, RankDirectory):
            self._settings["run"] = self._directory.run

    @property
    def directory(self) -> str:
        """The directory's absolute path."""
        return self._directory.path

    # --- saving

    def start(self, like: Any = None, *, timeout: float | None = None) -> None:
        """Start the writing process now and wait until it is ready, so that the first save need not.

        Args:
            like: a state as `save` takes it, or its size in bytes (int, or a string like "1GiB"): shared memory for it
                is allocated now instead of at the first save, and pinned if part of the state lies on a CUDA device.
            timeout: seconds, after which it raises `TimedOut`.
        """
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        self._check_open()
        head, total, devices = 0, -1, []
        if isinstance(like, (int, str)):
            total = parse_bytes(like, "like")
        elif like is not None:
            made = self._plan_cache.prepare(like, None)
            head, total, devices = len(made.described) + _HEAD_EXTRA, made.geometry.nbytes, made.plan.devices
        process = self._run(lambda call: self._start(head, total, devices), deadline)
        process.wait_ready(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _start(self, head: int, total: int, devices: list[str]) -> ProcessHandle:
        self._check_open()
        process = self._running()
        if total >= 0:
            self._provide(head, total, on_device=bool(devices))
            if self._stager is not None:
                self._stager.pin(devices)
        return process

    def save(
        self, state: Any, name: str | None = None, meta: dict[str, Any] | None = None, *,
        metrics: Mapping[str, float] | None = None, alias: str | None = None, timeout: float | None = None,
        ordered: bool = True,
    ) -> SaveHandle:  # fmt: skip
        """Copy a state into shared memory, to be written in the background. Returns when host memory is copied and
        copies from devices are under way: `SaveHandle.staged` is done when these are complete.

        Args:
            state: nested dicts, lists and tuples of tensors, arrays and plain values, or an `nn.Module`. Later changes
                do not reach the file.
            name: of the checkpoint in its directory, without ending. An existing name is an `ArgumentError`: nothing
                is ever overwritten. None: `step-00000007` if `meta` or the state has an int `step`, else
                `save-00000001` and so on; with `-2` added if that exists.
            meta: a small JSON-able dict that is kept with it.
            metrics: numbers by name, which `keep_best` compares and `list_checkpoints` shows.
            alias: a second name, such as "best": a symbolic link that moves from the checkpoint that had it when this
                one is durable. The checkpoint that it leads to is not deleted.
            timeout: seconds to wait for room, and for an earlier call of this writer; 0 saves only if there is room
                now. None waits as long as the writing process lives.
            ordered: with tensors on a device: later work on the current stream waits for the copies, so that it may
                change the state. False: it does not wait; change nothing of the state before `staged` is done, or make
                the stream wait by `SaveHandle.wait_stream`.

        With `on_error="raise"` it raises the error of an earlier save that you have not seen, and saves nothing.

        With `rank=`, `save-00000003` and the `-2` come from a count, which all ranks have in common as long as no call
        raises. After one that has raised, whatever the reason, such a name is an `ArgumentError`.

        Raises:
            ArgumentTypeError: the state holds something that cannot be saved; the message names where.
            TimedOut: there was no room within `timeout`.
            ResourceError: `/dev/shm` has no room for the slots.
            PeerDied: the writing process is dead and cannot be started again.
        """
        step = step_of(state, meta)
        with self._namer.call(name, step):
            check_timeout(timeout)
            began = time.monotonic()
            deadline = None if timeout is None else began + timeout
            self._check_open()
            numbers = check_metrics(metrics)
            while True:
                prepared = self._plan_cache.prepare(state, meta)
                after = marks(prepared.plan) if prepared.plan.devices else {}
                call = Call(partial(self._save, prepared, after, name, alias, step, numbers, began, deadline))
                try:
                    made = call.wait(deadline, self._busy_text, self._put(call))
                    if isinstance(made, SaveHandle):
                        if ordered:
                            made.wait_stream()
                        return made
                except BaseException:
                    call.abandon()  # before the caller may change the state
                    raise
                finally:
                    del call, prepared
                self._report_errors(made, raises=self._on_error == "raise")

    def _save(
        self, prepared: Prepared, after: dict[int, Any], name: str | None, alias: str | None, step: int | None,
        metrics: dict[str, float], began: float, deadline: float | None, call: Call[Any],
    ) -> Any:  # fmt: skip
        """Save and return the handle; or save nothing and return the errors that the caller has not seen."""
        self._check_open()
        unreported = self._saves.unreported()
        if unreported:
            return unreported
        plan, described, geometry = prepared
        if not self._ranks:  # whose run would be gone with the directory
            self._directory.own_again()
        if self._ranks and not self._saves.wait_for_votes(_MAX_VOTED, deadline, lambda: call.abandoned):
            raise Abandoned
        ending = self._format.suffix + (SUFFIX if self._secret else "") if geometry.single and not self._ranks else ""
        taken = {save.name for save in self._saves.in_flight}
        aliases = {save.alias for save in self._saves.in_flight}
        fixed = name is not None
        name, step = self._namer.choose(name, step, ending, taken | aliases, self._number + 1)
        alias = self._namer.check_alias(alias, name, taken)
        json_metrics = index.json_metrics(metrics)
        head = len(described) + _HEAD_EXTRA + len(json.dumps(json_metrics))
        stager, staging = self._stager_for(head, geometry.nbytes, on_device=bool(plan.devices))
        chunks = geometry.chunks(stager.chunk)
        path = self._directory.at(name) if self._local else url_of(self._upload or "", name)
        save = Save(name, path, geometry.nbytes, alias, self._callbacks, uploads=self._upload is not None)
        handle = SaveHandle(save)
        stager.provide(head, len(chunks) * stager.chunk)
        if not self._local and not stager.fits(len(chunks)):
            what = f"has no room for a state of {format_bytes(geometry.nbytes)}, and local=False keeps all of it there"
            if stager.may_fit(len(chunks)):
                raise ResourceError(
                    errno.ENOSPC,
                    f"{where()}, with {format_bytes(free_bytes())} free, {what} until it is at its URL: {more_room()}",
                )
            raise ArgumentError(
                f"memory={format_bytes(stager.memory)} {what} until it is at its URL: pass a larger memory="
            )
        asked = staging.make_room(call, self._busy, len(chunks))
        if asked is None:
            self._skipped += 1
            save.finish(SKIPPED)
            return handle
        process = self._running()
        self._number += 1
        self._namer.took(name)
        save.number, save.asked_to_yield = self._number, asked
        options = {
            "name": name, "step": step, "format": self._format.name, "max_shard": self._max_shard,
            "chunk": stager.chunk, "streams": not stager.fits(len(chunks)), "began": began,
            "metrics": json_metrics, "alias": alias, "fixed": fixed,
            "readable_names": self._readable_names, "upload": mark_of(self._upload), **self._ranks,
        }  # fmt: skip
        self._saves.add(save)
        finish = staging.stage(call, save, plan, after, chunks, described, options, deadline)
        patience = _START_TIMEOUT if deadline is None else min(_START_TIMEOUT, max(0.0, deadline - time.monotonic()))
        process.wait_joined(patience, lambda: call.abandoned)
        if finish is not None:
            self._finishing = True
            call.reply(handle)
            finish()
            self._finishing = False
        return handle

    # --- calls run on the writer's own thread, where no asynchronous exception arrives

    def _run(self, function: Callable[[Call[_T]], _T], deadline: float | None, calls: CallQueue | None = None) -> _T:
        """Call a function in the writer's thread; return or raise what it does."""
        call = Call(function)
        try:
            return call.wait(deadline, self._busy_text, self._put(call, calls))
        except BaseException:
            call.abandon()
            raise
        finally:
            del call

    def _put(self, call: Call[Any], calls: CallQueue | None = None) -> CallQueue:
        if self._is_own_thread:
            raise ResourceError(
                errno.EDEADLK,
                "a finalizer in one of the writer's own threads cannot wait for it: call from another thread",
            )
        queue = calls or self._calls
        queue.put(call)
        return queue

    @property
    def _is_own_thread(self) -> bool:
        process = self._process
        return self._calls.is_here or (process is not None and process.is_here)

    def _busy_text(self) -> str:
        if self._ended:
            return "a callback of a save has not ended within timeout="
        if self._finishing:
            return "the checkpoint before is still being copied from the device"
        return "another call of this writer has not ended within timeout="

    # --- memory and process

    def _stager_for(self, head: int, total: int, *, on_device: bool) -> tuple[Stager, Staging]:
        if self._stager is None:
            self._provide(head, total, on_device=on_device)
        if self._stager is None or self._staging is None:
            raise ClosedError("the writer is closed")
        return self._stager, self._staging

    def _provide(self, head: int, total: int, *, on_device: bool) -> None:
        if self._stager is None:
            memory = self._memory
            if memory is None:
                memory = min(2 * (total + head) + _SPARE_MEMORY + total // 8, total_bytes() // 2)
            self._stager = Stager(
                self._channel, max(LEAST_MEMORY, memory), whole_segments=bool(self._secret), on_device=on_device
            )
            self._staging = Staging(self._stager, self._saves, lambda: self._process is not None and self._process.lost)
        self._stager.provide(head, total)

    def _running(self) -> ProcessHandle:
        process = self._process
        _track(self)  # from now on there is something to finish at exit
        directory, is_new = self._directory, process is None or process.lost
        if isinstance(directory, RankDirectory) and (is_new or directory.has_ended):
            directory.begin()
        if process is None or process.lost:
            if process is not None:
                self._restarts += process.restarts + 1
                process.finish()
            saves = self._saves
            process = self._process = ProcessHandle(
                self._channel, self._settings, self._prefix, saves.live_numbers(),
                saves.on_report, saves.on_death, saves.on_lost, self._secret,
            )  # fmt: skip
        return process

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(f"CheckpointWriter of {self.directory} belongs to process {self._pid}: make a new one")
        if self._closed:
            raise ClosedError(f"CheckpointWriter of {self.directory} is closed")

    def _report_errors(self, unreported: list[tuple[Save, BaseException]], *, raises: bool) -> None:
        """Raise the first error that the caller has not seen and warn of the others, or warn of all of them."""
        for save, error in unreported[1:] if raises else unreported:
            save.durable.error_seen = True
            warnings.warn(f"checkpoint {save.name}: {error}", RuntimeWarning, stacklevel=3)
        if raises and unreported:
            unreported[0][0].durable.error_seen = True
            raise unreported[0][1]

    # --- the end

    def close(self, timeout: float | None = None) -> None:
        """Wait until everything that was staged is durable or has failed, with `upload=` is uploaded or has failed, and
        callbacks have ended, and end the writing process. Idempotent.

        With `on_error="raise"` it raises the first error of a save that you have not seen; the writer is closed
        nevertheless.

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
        if self._is_own_thread:  # called by a finalizer, which must not wait; the next `close` does
            self._calls.put(Call(lambda call: self._shut(call, None)))
            return
        if not self._ended:
            self._run(lambda call: self._shut(call, deadline), deadline)
        if not (self._callbacks.is_here or self._callbacks.is_idle):
            self._run(lambda call: None, deadline, self._callbacks)
        self._calls.stop()
        self._report_errors(self._saves.unreported(), raises=self._on_error == "raise" and not quietly)

    def _shut(self, call: Call[None], deadline: float | None) -> None:
        if self._closed:
            return
        directory, is_over = self._directory, False
        try:
            is_over = self._wait_for_saves(call, deadline)
        finally:
            if not is_over and isinstance(directory, RankDirectory) and directory.has_ended:  # it may save again
                with contextlib.suppress(OSError):  # then before the next save
                    directory.begin()
        if not is_over:
            return
        self._closed = True
        _untrack(self)
        try:
            self._leave()
        finally:
            self._ended = True

    def _wait_for_saves(self, call: Call[None], deadline: float | None) -> bool:
        """Wait for all saves; False if the caller has given up. After `_SOON`, other ranks need not wait for parts that
        this one has not saved. Raises `TimedOut`."""
        saves, directory = self._saves, self._directory
        while isinstance(directory, RankDirectory) and not directory.has_ended:
            soon = time.monotonic() + _SOON
            try:
                return saves.wait(soon if deadline is None else min(soon, deadline), lambda: call.abandoned)
            except TimedOut:
                if deadline is not None and time.monotonic() >= deadline:
                    raise
            if all(save.status == VOTED for save in saves.in_flight):
                with contextlib.suppress(OSError):  # tried again
                    directory.end()
        return saves.wait(deadline, lambda: call.abandoned)

    def _leave(self) -> None:
        stager, self._stager, self._staging = self._stager, None, None  # so that the memory is freed
        process, self._process = self._process, None
        if process is not None:
            process.closing = True
        if stager is not None:
            stager.close()
        elif process is not None:
            process.show_end()
        # crash: close.staged
        if process is not None:
            process.finish()
            self._restarts += process.restarts
        self._directory.close()
        self._bar.close()

    def statistics(self) -> WriterStatistics:
        """Counters since this writer was created."""
        counts, process, stager = self._saves.counts, self._process, self._stager
        return WriterStatistics(
            saves=self._number, durable=counts[DURABLE], complete=counts[COMPLETE], failed=counts[FAILED],
            replaced=counts[REPLACED],
            skipped=self._skipped, deleted=self._saves.deleted,
            restarts=self._restarts + (process.restarts if process is not None else 0),
            memory_bytes=stager.memory if stager is not None else 0,
            pid=process.pid if process is not None else 0,
            uploaded=self._saves.uploaded, uploading=self._saves.uploading,
        )  # fmt: skip

    def _instead(self) -> str:
        return "use this one, its methods are thread-safe; a process that saves as well needs a directory of its own"

    def __enter__(self) -> CheckpointWriter:
        self._check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(None, quietly=kind is not None)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._saves)} in flight"
        return f"<CheckpointWriter {self.directory!r} {state}, {self._saves.counts[DURABLE]} durable>"


_open_writers: set[CheckpointWriter] = set()
_open_writers_lock = threading.Lock()
_hooked = 0


def _track(writer: CheckpointWriter) -> None:
    """Have this writer closed when the process ends, if not before."""
    global _hooked
    with _open_writers_lock:
        _open_writers.add(writer)
        util = sys.modules.get("multiprocessing.util")
        if util is not None and _hooked != os.getpid():  # such children end without `atexit`
            _hooked = os.getpid()
            util.Finalize(None, close_all, exitpriority=10)  # before the endpoints leave


def _untrack(writer: CheckpointWriter) -> None:
    """Forget a writer that is closed."""
    with _open_writers_lock:
        _open_writers.discard(writer)


@atexit.register
def close_all() -> None:
    """Close every writer; errors become warnings."""
    for writer in list(_open_writers):
        with contextlib.suppress(Exception):
            writer._close(None, quietly=True)


def _forget() -> None:
    """In a forked child: the writers belong to its parent."""
    global _open_writers_lock
    _open_writers_lock = threading.Lock()
    for writer in _open_writers:
        writer._closed = True
    _open_writers.clear()


lifecycle.call_in_child(_forget)
