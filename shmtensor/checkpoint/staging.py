"""The trainer's half of one save: make room as `busy` says, then copy chunk after chunk into slots.

It runs in the writer's thread. Every wait is one of at most a quarter of a second; in between it looks whether there is
still somebody to wait for, and whether the caller still waits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np

from ..calls import Call
from ..endpoints.loan import Loan
from ..errors import ClosedError, PeerDied, RingFull, TimedOut
from .chunks import Chunk
from .flight import Flight
from .handle import FAILED, REPLACED, WAITING, WRITING, SaveHandle
from .offload import Offload
from .plan import Plan
from .slots import ABANDON, END, HEAD, Stager
from .transfer import Transfer

_T = TypeVar("_T")
_TICK: Final = 0.25
"""Seconds to wait for a slot between two looks."""
_TAKE_BACK: Final = 60.0
"""Seconds to wait for a small slot, to say that a save was given up."""


class Staging:
    """Copies states into the slots of one writer. `is_lost()`: there is no writing process any more."""

    def __init__(self, stager: Stager, flight: Flight, is_lost: Callable[[], bool]) -> None:
        self._stager, self._flight, self._is_lost = stager, flight, is_lost
        self._call: Call[Any] | None = None

    def make_room(self, call: Call[Any], busy: str, count: int) -> list[SaveHandle] | None:
        """Do what `busy` says for a state of `count` chunks; the saves that were asked to give way. None: skip it."""
        stager, flying, self._call = self._stager, self._flight.handles, call
        if busy == "block" or not flying or (stager.fits(count) and stager.has_room(count)):
            return []
        if busy == "skip":
            return None
        asked = [handle for handle in flying if handle.status == WAITING]
        for handle in asked:
            self._insist(partial(stager.tell, ABANDON, handle.number, force=False), None, handle)
        return asked

    def stage(
        self, call: Call[Any], handle: SaveHandle, plan: Plan, after: dict[int, Any], chunks: Sequence[Chunk],
        described: bytes, options: dict[str, Any], deadline: float | None,
    ) -> Callable[[], None] | None:  # fmt: skip
        """Copy everything. A save that fails meanwhile ends it; an exception takes the save back, and so does a caller
        who has abandoned the call before its end was published.

        What lies on a device is under way when this returns, after the events `after`. What is returned then is to be
        called: it hands over each chunk when its copies are complete, and says that this is all.
        """
        stager, number, loud = self._stager, handle.number, bool(options["streams"])
        offload = None
        self._call = call
        try:
            head = np.frombuffer(described, np.uint8)
            if plan.devices:
                offload = handle._offload = stager.offload(plan, after)
            self._insist(partial(stager.tell, HEAD, number, head, loud=loud, **options), deadline, handle)
            # crash: stage.begun
            if offload is not None:
                self._offload(handle, offload, Transfer(plan, offload.copy), chunks, deadline, loud=loud)
                return partial(self._finish, handle, offload, plan.nbytes, loud=loud)
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
        return None

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
            slots.clear()  # a slot is not free as long as we have a view of it
            loans.clear()
            del loan

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
                del loan

    def _lend(self, handle: SaveHandle, index: int, offload: Offload, deadline: float | None, *, loud: bool) -> Loan:
        """A slot for a chunk. Slots that are full are handed over meanwhile: the writing process gives back what it has
        got, and nothing else."""
        while True:
            for loan in offload.complete(wait=False):
                self._stager.publish(loan, loud=loud)
                del loan
            if not offload.pending:
                return self._insist(partial(self._stager.lend, handle.number, index), deadline, handle)
            try:
                return self._stager.lend(handle.number, index, timeout=0)
            except RingFull:
                self._stager.publish(next(offload.complete(wait=True)), loud=loud)

    # --- what is done after `save` has returned

    def _finish(self, handle: SaveHandle, offload: Offload, nbytes: int, *, loud: bool) -> None:
        try:
            for loan in offload.complete(wait=True):
                self._stager.publish(loan, loud=loud)
            self._end(handle, None)
        except _Over:
            offload.abandon()
        except Abandoned:
            offload.abandon()
            self._take_back(handle.number)
            return
        except BaseException as error:
            offload.abandon()
            self._take_back(handle.number, FAILED, error)
            if not handle.staged.done():
                handle.staged.set_exception(error)
            return
        offload.forget()
        handle.staged.set_result(nbytes)

    def _end(self, handle: SaveHandle, deadline: float | None) -> None:
        # crash: stage.filled
        self._insist(partial(self._stager.tell, END, handle.number), deadline, handle)
        # crash: stage.ended

    def _insist(self, call: Callable[..., _T], deadline: float | None, handle: SaveHandle, *, over: bool = False) -> _T:
        """`call(timeout=)` until there is a slot, looking at the caller, the process, the save and the clock in
        between."""
        self._check_call(over=over)
        try:
            return call(timeout=0)  # what is free is not waited for, however long it takes to have it
        except RingFull as error:
            full, began = str(error), time.monotonic()  # the text: an error keeps the frames, and these keep slots
        try:
            return self._wait_for_room(call, deadline, handle, full, over=over)
        finally:
            handle.waited += time.monotonic() - began

    def _wait_for_room(
        self, call: Callable[..., _T], deadline: float | None, handle: SaveHandle, full: str, *, over: bool
    ) -> _T:
        while True:
            self._check_call(over=over)
            if handle.status not in (WAITING, WRITING) and not over:
                raise _Over
            if self._is_lost():
                raise PeerDied("the writing process of checkpoints is dead")
            if deadline is not None and time.monotonic() >= deadline:
                raise TimedOut(f"no room for the checkpoint within timeout=: {full}")
            try:
                return call(timeout=_TICK)
            except RingFull as error:
                full = str(error)

    def _check_call(self, *, over: bool) -> None:
        if self._call is not None and self._call.abandoned and not over:
            raise Abandoned

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


class Abandoned(Exception):
    """The caller of `save` was thrown out of it."""


class _Over(Exception):
    """The save that is being staged is over: it has failed in the meantime."""
