"""The trainer's half of one save: make room as `busy` says, then copy chunk after chunk into slots.

Every wait is one of at most a quarter of a second; in between it looks whether there is still somebody to wait for.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np

from ..endpoints.loan import Loan
from ..errors import ClosedError, PeerDied, ResourceError, RingFull, TimedOut
from .chunks import Chunk
from .flight import Flight
from .handle import FAILED, REPLACED, WAITING, WRITING, SaveHandle
from .offload import Offload
from .plan import Plan
from .slots import ABANDON, END, HEAD, Stager
from .transfer import Transfer

_T = TypeVar("_T")
_NO_WAIT: Final = 1e-3
"""Seconds in which a slot is had that was free."""
_TAKE_BACK: Final = 60.0
"""Seconds to wait for a small slot, to say that a save was given up."""


class Staging:
    """Copies states into the slots of one writer. `is_lost()`: there is no writing process any more."""

    def __init__(self, stager: Stager, flight: Flight, is_lost: Callable[[], bool]) -> None:
        self._stager, self._flight, self._is_lost = stager, flight, is_lost
        self._thread: threading.Thread | None = None

    def settle(self, deadline: float | None = None) -> None:
        """Wait until the save before is staged: only one at a time uses the slots. `TimedOut` at the deadline."""
        thread = self._thread
        if thread is not None:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise TimedOut("the checkpoint before is still being copied from the device")
            self._thread = None

    def make_room(self, busy: str, count: int) -> list[SaveHandle] | None:
        """Do what `busy` says for a state of `count` chunks; the saves that were asked to give way. None: skip it."""
        stager, flying = self._stager, self._flight.handles
        if busy == "block" or not flying or (stager.fits(count) and stager.has_room(count)):
            return []
        if busy == "skip":
            return None
        asked = [handle for handle in flying if handle.status == WAITING]
        for handle in asked:
            self._insist(partial(stager.tell, ABANDON, handle.number, force=False), None, handle)
        return asked

    def stage(
        self, handle: SaveHandle, plan: Plan, chunks: Sequence[Chunk], described: bytes, options: dict[str, Any],
        deadline: float | None, *, ordered: bool = True,
    ) -> None:  # fmt: skip
        """Copy everything. A save that fails meanwhile ends it; an exception takes the save back.

        What lies on a device is under way when this returns; with `ordered` the current stream waits for it.
        """
        stager, number, loud = self._stager, handle.number, bool(options["streams"])
        offload = None
        try:
            head = np.frombuffer(described, np.uint8)
            if plan.devices:
                offload = handle._offload = stager.offload(plan)
            self._insist(partial(stager.tell, HEAD, number, head, loud=loud, **options), deadline, handle)
            # crash: stage.begun
            if offload is not None:
                self._offload(handle, offload, Transfer(plan, offload.copy), chunks, deadline, loud=loud)
                if ordered:
                    offload.follow()
                self._finish_later(handle, offload, plan.nbytes, loud=loud)
                return
            self._copy(handle, Transfer(plan), chunks, deadline, loud=loud)
            self._end(handle, deadline)
        except _Over:
            if offload is not None:
                offload.abandon()  # the handle says why
        except BaseException:
            if offload is not None:
                offload.abandon()
            self._take_back(number)
            raise
        handle.staged.set_result(plan.nbytes)

    def _copy(
        self, handle: SaveHandle, transfer: Transfer, chunks: Sequence[Chunk], deadline: float | None, *, loud: bool
    ) -> None:
        """Copy what lies in host memory. A state that streams goes slot by slot, so that the writing process has
        something to do. Of another every slot that is free is taken first: the copies then follow each other without a
        pause."""
        stager, number, done = self._stager, handle.number, 0
        while done < len(chunks):
            loans = [self._insist(partial(stager.lend, number, chunks[done].index), deadline, handle)]
            if not loud:
                loans += stager.lend_more(number, [chunk.index for chunk in chunks[done + 1 :]])
            slots = [loan.array for loan in loans]
            try:
                transfer.fill(chunks[done : done + len(loans)], slots)
                for loan in loans:
                    # crash: stage.copied
                    stager.publish(loan, loud=loud)
            except BaseException:
                slots.clear()  # whoever keeps the exception keeps this frame, and must not keep the slots
                for loan in loans:
                    loan.discard()
                raise
            done += len(loans)

    def _offload(
        self, handle: SaveHandle, offload: Offload, transfer: Transfer, chunks: Sequence[Chunk],
        deadline: float | None, *, loud: bool,
    ) -> None:  # fmt: skip
        """Start the copies of what lies on a device, slot by slot, and copy the rest."""
        with offload.under_way():
            for chunk in chunks:
                loan = self._lend(handle, chunk.index, offload, deadline, loud=loud)
                try:
                    transfer.fill([chunk], [loan.array])
                except BaseException:
                    offload.hold(loan)  # a device may be writing into it
                    raise
                offload.note(loan)

    def _lend(self, handle: SaveHandle, index: int, offload: Offload, deadline: float | None, *, loud: bool) -> Loan:
        """A slot for a chunk. Slots that are full are handed over meanwhile: the writing process gives back what it has
        got, and nothing else."""
        while True:
            for loan in offload.complete(wait=False):
                self._stager.publish(loan, loud=loud)
            if not offload.pending:
                return self._insist(partial(self._stager.lend, handle.number, index), deadline, handle)
            try:
                return self._stager.lend(handle.number, index, timeout=0)
            except RingFull:
                self._stager.publish(next(offload.complete(wait=True)), loud=loud)

    # --- what a thread does after `save` has returned

    def _finish_later(self, handle: SaveHandle, offload: Offload, nbytes: int, *, loud: bool) -> None:
        name, args = f"shmtensor save {handle.number}", (handle, offload, nbytes, loud)
        thread = threading.Thread(target=self._finish, args=args, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            text = f"no thread can be started that waits for copies from the device ({error}): raise ulimit -u"
            raise ResourceError(errno.EAGAIN, text) from None
        self._thread = thread  # only now: one that never ran cannot be joined

    def _finish(self, handle: SaveHandle, offload: Offload, nbytes: int, loud: bool) -> None:
        """Hand over each chunk when its copies are complete, then say that this is all."""
        try:
            for loan in offload.complete(wait=True):
                self._stager.publish(loan, loud=loud)
            self._end(handle, None)
        except _Over:
            offload.abandon()
        except BaseException as error:
            offload.abandon()
            self._take_back(handle.number, FAILED, error)
            handle.staged.set_exception(error)
            return
        offload.forget()
        handle.staged.set_result(nbytes)

    def _end(self, handle: SaveHandle, deadline: float | None) -> None:
        # crash: stage.filled
        self._insist(partial(self._stager.tell, END, handle.number), deadline, handle)
        # crash: stage.ended

    def _insist(self, call: Callable[[], _T], deadline: float | None, handle: SaveHandle, *, over: bool = False) -> _T:
        """Try until there is a slot, looking at the process, the save and the clock in between."""
        while True:
            began = time.monotonic()
            try:
                return call()
            except RingFull as error:
                full = error
            finally:
                waited = time.monotonic() - began
                if waited > _NO_WAIT:
                    handle.waited += waited
            if handle.status not in (WAITING, WRITING) and not over:
                raise _Over
            if self._is_lost():
                raise PeerDied("the writing process of checkpoints is dead")
            if deadline is not None and time.monotonic() >= deadline:
                raise TimedOut(f"no room for the checkpoint within timeout=: {full}")

    def _take_back(self, number: int, status: str = REPLACED, error: BaseException | None = None) -> None:
        """A save that was not staged to its end: nobody shall write it."""
        handle = next((handle for handle in self._flight.handles if handle.number == number), None)
        if handle is None:
            return
        if error is not None:  # before the writing process reports that it was replaced
            self._flight.settle(number, status, error)
        tell = partial(self._stager.tell, ABANDON, number, force=True)
        with contextlib.suppress(PeerDied, TimedOut, ClosedError, _Over):
            self._insist(tell, time.monotonic() + _TAKE_BACK, handle, over=True)
        self._flight.settle(number, status, error)


class _Over(Exception):
    """The save that is being staged is over: it has failed in the meantime."""
