"""What `CheckpointWriter.save` returns: what became of one save."""

from __future__ import annotations

import _thread
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, TimeoutError
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from ..calls import CallQueue, Flag
from ..endpoints.local import Local

if TYPE_CHECKING:
    from .offload import Offload

_T = TypeVar("_T")
WAITING: Final = "waiting"
WRITING: Final = "writing"
VOTED: Final = "voted"
DURABLE: Final = "durable"
COMPLETE: Final = "complete"
FAILED: Final = "failed"
SKIPPED: Final = "skipped"
REPLACED: Final = "replaced"

log = logging.getLogger("shmtensor")


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


class _Mutex(_thread.RLock):  # type: ignore[misc]  # final only in typeshed
    """A future's condition. Its lock is taken, and given back, in one C call: `threading.Condition` does so in Python,
    and an exception in between would keep it for ever. There is nobody to be notified: see `_Result.result`."""

    def notify_all(self) -> None:
        pass


class _Result(Local, Future[_T]):
    """A future that ends in a thread of the writer's: its callbacks are called in a thread that may block, without any
    lock. A wait that is ended by an exception leaves nothing locked."""

    def __init__(self, callbacks: CallQueue | None) -> None:
        super().__init__()
        self._condition: Any = _Mutex()
        self._callbacks = callbacks
        self._ended = Flag()

    def _instead(self) -> str:
        return "pass its result"

    def result(self, timeout: float | None = None) -> _T:
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait(timeout)
        return super().exception(0)

    def _wait(self, timeout: float | None) -> None:
        if not self._ended.wait(timeout if timeout is None else max(0.0, timeout)):
            raise TimeoutError

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        """Call `function(future)` when it is done: in a thread of the writer's for callbacks, one after the other; in
        this thread if it is done."""
        if self._callbacks is None or self._ended.is_set():
            super().add_done_callback(function)
        else:
            super().add_done_callback(partial(_call_later, self._callbacks, function))

    def set_result(self, result: _T) -> None:
        super().set_result(result)
        self._ended.set()

    def set_exception(self, exception: BaseException | None) -> None:
        super().set_exception(exception)
        self._ended.set()

    def give_up(self) -> None:
        """Nobody writes this save: `CancelledError` for whoever asks."""
        super().cancel()
        self.set_running_or_notify_cancel()
        self._ended.set()


def _call_later(callbacks: CallQueue, function: Callable[[Any], object], future: _Result[Any]) -> None:
    callbacks.put(partial(_call_back, function, future))


def _call_back(function: Callable[[Any], object], future: _Result[Any]) -> None:
    try:
        function(future)
    except BaseException:  # also an exit: it would end the thread, and nobody else's callback would be called
        log.exception("a callback of %r failed", future)


class Outcome(_Result[Durable]):
    """A future that knows whether anybody has been told its error."""

    def __init__(self, callbacks: CallQueue | None = None) -> None:
        super().__init__(callbacks)
        self.looked = False
        """Whether somebody got the error, by `result`, `exception` or a callback."""

    def result(self, timeout: float | None = None) -> Durable:
        try:
            return super().result(timeout)
        except BaseException as error:
            if error is self._exception:  # not one that came in between
                self.looked = True
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self.looked = True
        return error

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        super().add_done_callback(function)
        self.looked = True

    def cancel(self) -> bool:
        """A save that was staged is not called back: False, unless it was skipped or replaced."""
        return self.cancelled()

    @property
    def error(self) -> BaseException | None:
        """The exception of one that has failed; does not count as asked for."""
        return self._exception if self._ended.is_set() else None


class SaveHandle(Local):
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
    """The checkpoint's name in its directory. With `rank=` it may get `-2` behind it until it is durable."""
    path: str
    """Where it lies once it is durable."""
    number: int
    """Which save of its writer it is, from 1; 0 if it was skipped."""
    waited: float
    """With `busy="block"` or `"replace"`: seconds that `save` waited for room."""

    def __init__(self, name: str, path: str, number: int, total: int, callbacks: CallQueue | None = None) -> None:
        self.name, self.path, self.number, self._total = name, path, number, total
        self.staged: Future[int] = _Result(callbacks)
        self.durable = Outcome(callbacks)
        self._asked: list[SaveHandle] = []
        self._offload: Offload | None = None
        self.waited = 0.0
        self._written = 0
        self._missing: dict[int, str] = {}
        self._alias = ""
        self._status = WAITING
        self._lock = threading.Lock()

    @property
    def status(self) -> str:
        """`"waiting"`, `"writing"`, `"durable"`, `"complete"`, `"failed"`, `"skipped"` or `"replaced"`.

        `"voted"`, with `rank=`: this rank's part is durable, and other ranks' are not yet: `missing` tells whose.
        `"complete"`: it has its name and can be loaded, but the disk did not confirm it: `durable` has the error.
        """
        return self._status

    @property
    def replaced(self) -> tuple[str, ...]:
        """With `busy="replace"`: names of the saves that made room for this one."""
        return tuple(handle.name for handle in self._asked if handle.status == REPLACED)

    @property
    def missing(self) -> dict[int, str]:
        """With `rank=`, once this rank's part is durable: the ranks whose parts are awaited, as was last seen. Each is
        `"late"` (its processes live), `"not open"` (it has not opened its `CheckpointWriter`) or `"dead"`."""
        return dict(self._missing) if self._status == VOTED else {}

    def wait_stream(self, stream: Any = None) -> None:
        """Make a CUDA stream wait until the state was copied from the device; the host does not wait.

        Call it after `save(..., ordered=False)`, before the state is changed on that stream. For a state in host memory
        it does nothing.

        Args:
            stream: a `torch.cuda.Stream`; None: the current one of each device that the state lies on.
        """
        if self._offload is not None:
            self._offload.follow(stream)

    @property
    def progress(self) -> Progress:
        """Bytes written and bytes in all. A writer that was restarted begins anew."""
        return Progress(self._total if self._status in (DURABLE, COMPLETE) else self._written, self._total)

    def _instead(self) -> str:
        return "pass its path"

    def __repr__(self) -> str:
        return f"<SaveHandle {self.name!r} {self._status} {self._written} of {self._total} bytes>"

    # --- what the writer's threads tell

    def _advance(self, written: int) -> None:
        with self._lock:
            if self._status in (WAITING, WRITING):
                self._status, self._written = WRITING, written

    def _vote(self) -> None:
        """This rank's part is durable."""
        with self._lock:
            if self._status in (WAITING, WRITING):
                self._status, self._written = VOTED, self._total

    def _settle(self, status: str, result: Durable | BaseException | None = None) -> bool:
        """The end of it; False if it was over before. To be called without any lock."""
        with self._lock:
            if self._status not in (WAITING, WRITING, VOTED):
                return False
            self._status = status
        if isinstance(result, Durable):
            self._written = self._total
            self.path, self.name = result.path, os.path.basename(result.path)
            self.durable.set_result(result)
        elif result is not None:
            self.durable.set_exception(result)
        else:
            for future in (self.staged, self.durable):
                if not future.done() and isinstance(future, _Result):
                    future.give_up()
        return True


__all__ = ["CancelledError", "Durable", "Outcome", "Progress", "SaveHandle"]
