"""What `CheckpointWriter.save` returns: what became of one save."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from .offload import Offload

WAITING: Final = "waiting"
WRITING: Final = "writing"
DURABLE: Final = "durable"
FAILED: Final = "failed"
SKIPPED: Final = "skipped"
REPLACED: Final = "replaced"


class Durable(NamedTuple):
    """A checkpoint that is on disk for good: the result of `SaveHandle.durable`."""

    path: str
    """Of the file, or of the directory of shards."""
    nbytes: int
    """Bytes of its files."""
    seconds: float
    """From the beginning of `save` until it was durable; old ones are deleted after that."""
    digest: str
    """xxh3-64 over the digests of its tensors' bytes, hexadecimal."""


class Progress(NamedTuple):
    """How far a save is."""

    written: int
    """Bytes of the files that were handed to the kernel."""
    total: int
    """Bytes of the files."""


class Outcome(Future[Durable]):
    """A future that knows whether anybody has been told its error."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = False
        """Whether somebody got the error, by `result`, `exception` or a callback."""

    def result(self, timeout: float | None = None) -> Durable:
        try:
            return super().result(timeout)
        finally:
            self._note()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            return super().exception(timeout)
        finally:
            self._note()

    def add_done_callback(self, function: Any) -> None:
        self.looked = True
        super().add_done_callback(function)

    def cancel(self) -> bool:
        """A save that was staged is not called back: False, unless it was skipped or replaced."""
        return self.cancelled()

    def _note(self) -> None:
        if self.done():
            self.looked = True

    def give_up(self) -> None:
        """Nobody writes this save: `CancelledError` for whoever asks."""
        super().cancel()
        self.set_running_or_notify_cancel()


class SaveHandle:
    """One save.

    `staged` is done when the state may be changed again: when `save` returns, or, if part of the state lies on a
    device, when the copies from there are complete; its result is the number of bytes that were copied. `durable` is
    done when the checkpoint is safe on disk; its result is a `Durable`, its exception says what went wrong. A save
    that was skipped or replaced (`busy=`) has cancelled futures: `status` says which.

    >>> import numpy as np, shmtensor, tempfile
    >>> with tempfile.TemporaryDirectory() as path, shmtensor.CheckpointWriter(path) as writer:
    ...     handle = writer.save({"w": np.ones(1000), "step": 7})
    ...     handle.staged.done(), handle.durable.result(60).path == handle.path, handle.status
    (True, True, 'durable')
    """

    name: str
    """The checkpoint's name in its directory."""
    path: str
    """Where it lies once it is durable."""
    number: int
    """Which save of its writer it is, from 1; 0 if it was skipped."""
    waited: float
    """With `busy="block"` or `"replace"`: seconds that `save` waited for room."""

    def __init__(self, name: str, path: str, number: int, total: int) -> None:
        self.name, self.path, self.number, self._total = name, path, number, total
        self.staged: Future[int] = Future()
        self.durable = Outcome()
        self._asked: list[SaveHandle] = []
        self._offload: Offload | None = None
        self.waited = 0.0
        self._written = 0
        self._status = WAITING
        self._lock = threading.Lock()

    @property
    def status(self) -> str:
        """`"waiting"`, `"writing"`, `"durable"`, `"failed"`, `"skipped"` or `"replaced"`."""
        return self._status

    @property
    def replaced(self) -> tuple[str, ...]:
        """With `busy="replace"`: names of the saves that made room for this one."""
        return tuple(handle.name for handle in self._asked if handle.status == REPLACED)

    def wait_stream(self, stream: Any = None) -> None:
        """Make a CUDA stream wait until the state was copied from the device; the host does not wait.

        stream: a `torch.cuda.Stream`; None: the current one of each device that the state lies on. Call it before the
        state is changed on that stream, after `save(..., ordered=False)`. Nothing to wait for in host memory.
        """
        if self._offload is not None:
            self._offload.follow(stream)

    @property
    def progress(self) -> Progress:
        """Bytes written and bytes in all. A writer that was restarted begins anew."""
        return Progress(self._total if self._status == DURABLE else self._written, self._total)

    def __repr__(self) -> str:
        return f"<SaveHandle {self.name!r} {self._status} {self._written} of {self._total} bytes>"

    # --- what the writer's threads tell

    def _advance(self, written: int) -> None:
        with self._lock:
            if self._status in (WAITING, WRITING):
                self._status, self._written = WRITING, written

    def _settle(self, status: str, result: Durable | BaseException | None = None) -> bool:
        """The end of it; False if it was over before."""
        with self._lock:
            if self._status not in (WAITING, WRITING):
                return False
            self._status = status
        if isinstance(result, Durable):
            self._written = self._total
            self.durable.set_result(result)
        elif result is not None:
            self.durable.set_exception(result)
        else:
            for future in (self.staged, self.durable):
                if not future.done():
                    _cancel(future)
        return True


def _cancel(future: Future[Any]) -> None:
    if isinstance(future, Outcome):
        future.give_up()
    else:
        future.cancel()
        future.set_running_or_notify_cancel()


__all__ = ["CancelledError", "Durable", "Outcome", "Progress", "SaveHandle"]
