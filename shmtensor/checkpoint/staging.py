"""The trainer's half of one save: make room as `busy` says, then copy chunk after chunk into slots.

It runs in the writer's thread. No wait takes longer than a quarter of a second; after each it checks that the writing
process lives and that the caller still waits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np

from ..endpoints.loan import Loan
from ..errors import ClosedError, PeerDied, RingFull, TimedOut
from ..shielded import Call
from .handle import FAILED, REPLACED, WAITING, WRITING, Save
from .in_flight import SavesInFlight
from .offload import Offload
from .plan import Plan
from .slots import ABANDON, END, HEAD, Stager
from .transfer import Chunk, Transfer

_T = TypeVar("_T")
_CHECK_INTERVAL: Final = 0.25
"""Seconds to wait for a slot before it checks again."""
_TAKE_BACK: Final = 60.0
"""Seconds to wait for a small slot, for the message that takes a save back."""


class Staging:
    """Copies states into the slots of one writer. `is_lost()`: there is no writing process, nor will there be one."""

    def __init__(self, stager: Stager, saves: SavesInFlight, is_lost: Callable[[], bool]) -> None:
        self._stager, self._saves, self._is_lost = stager, saves, is_lost
        self._call: Call[Any] | None = None

    def make_room(self, call: Call[Any], busy: str, count: int) -> list[Save] | None:
        """Do what `busy` says for a state of `count` chunks. Returns the saves that the writing process was asked to
        drop, or None if this one is to be skipped."""
        stager, in_flight, self._call = self._stager, self._saves.in_flight, call
        if busy == "block" or not in_flight or (stager.fits(count) and stager.has_room(count)):
            return []
        if busy == "skip":
            return None
        asked = [save for save in in_flight if save.status == WAITING]
        for save in asked:
            self._call_with_room(partial(stager.send_small, ABANDON, save.number, force=False), None, save)
        return asked

    def stage(
        self, call: Call[Any], save: Save, plan: Plan, after: dict[int, Any], chunks: Sequence[Chunk],
        described: bytes, options: dict[str, Any], deadline: float | None,
    ) -> Callable[[], None] | None:  # fmt: skip
        """Copy everything, unless the save fails meanwhile. An exception takes the save back, and so does a caller that
        abandons the call before the end of the save is published.

        Copies from devices start after the events `after` and are under way when this returns. Then it returns a
        function to call: it publishes each chunk when its copies are complete, and then the end of the save.
        """
        stager, number, wake = self._stager, save.number, bool(options["streams"])
        offload = None
        self._call = call
        try:
            head = np.frombuffer(described, np.uint8)
            if plan.devices:
                offload = save.offload = stager.offload(plan, after)
            self._call_with_room(partial(stager.send_small, HEAD, number, head, wake=wake, **options), deadline, save)
            # crash: stage.begun
            if offload is not None:
                self._offload(save, offload, Transfer(plan, offload.copy), chunks, deadline, wake=wake)
                return partial(self._finish, save, offload, plan.nbytes, wake=wake)
            self._copy(save, Transfer(plan), chunks, deadline, wake=wake)
            self._end(save, deadline)
        except _Over:
            if offload is not None:
                offload.abandon()  # the save has the reason
        except BaseException:
            if offload is not None:
                offload.abandon()
            self._take_back(number)
            raise
        save.staged.set_result(plan.nbytes)
        return None

    def _copy(
        self, save: Save, transfer: Transfer, chunks: Sequence[Chunk], deadline: float | None, *, wake: bool
    ) -> None:
        """Copy host memory. A state that streams is copied slot by slot, so that the writing process can start at once.
        For any other state all free slots are taken first, and the copies follow each other without a pause."""
        stager, number, done = self._stager, save.number, 0
        while done < len(chunks):
            loans = [self._call_with_room(partial(stager.lend, number, chunks[done].index), deadline, save)]
            if not wake:
                loans += stager.lend_more(number, [chunk.index for chunk in chunks[done + 1 :]])
            slots = [loan.array for loan in loans]
            try:
                transfer.fill(chunks[done : done + len(loans)], slots)
                for loan in loans:
                    # crash: stage.copied
                    stager.publish(loan, wake=wake)
            except BaseException:
                slots.clear()  # the exception's traceback keeps this frame, and must not keep the slots
                for loan in loans:
                    loan.discard()
                raise
            done += len(loans)
            slots.clear()  # a slot is not free while a view of it is alive
            loans.clear()
            del loan

    def _offload(
        self, save: Save, offload: Offload, transfer: Transfer, chunks: Sequence[Chunk],
        deadline: float | None, *, wake: bool,
    ) -> None:  # fmt: skip
        """Start the copies from devices, slot by slot, and copy the rest."""
        with offload.under_way():
            for chunk in chunks:
                loan = self._lend(save, chunk.index, offload, deadline, wake=wake)
                try:
                    transfer.fill([chunk], [loan.array])
                except BaseException:
                    offload.hold(loan)  # a device may be writing into it
                    raise
                offload.note(loan)
                del loan

    def _lend(self, save: Save, index: int, offload: Offload, deadline: float | None, *, wake: bool) -> Loan:
        """A slot for a chunk. While it waits it publishes the slots that are filled: only those can come back free."""
        while True:
            for loan in offload.complete(wait=False):
                self._stager.publish(loan, wake=wake)
                del loan
            if not offload.pending:
                return self._call_with_room(partial(self._stager.lend, save.number, index), deadline, save)
            try:
                return self._stager.lend(save.number, index, timeout=0)
            except RingFull:
                self._stager.publish(next(offload.complete(wait=True)), wake=wake)

    # --- after `CheckpointWriter.save` has returned

    def _finish(self, save: Save, offload: Offload, nbytes: int, *, wake: bool) -> None:
        """Publish the chunks whose copies are under way, and the end of the save."""
        try:
            for loan in offload.complete(wait=True):
                self._stager.publish(loan, wake=wake)
            self._end(save, None)
        except _Over:
            offload.abandon()
        except Abandoned:
            offload.abandon()
            self._take_back(save.number)
            return
        except BaseException as error:
            offload.abandon()
            self._take_back(save.number, FAILED, error)
            if not save.staged.done():
                save.staged.set_exception(error)
            return
        offload.forget()
        save.staged.set_result(nbytes)

    def _end(self, save: Save, deadline: float | None) -> None:
        # crash: stage.filled
        self._call_with_room(partial(self._stager.send_small, END, save.number), deadline, save)
        # crash: stage.ended

    def _call_with_room(self, call: Callable[..., _T], deadline: float | None, save: Save, *, over: bool = False) -> _T:
        """Repeat `call(timeout=)` until there is a slot, and check the caller, the writing process, the save and the
        deadline in between. With `over`, go on though the caller has left or the save has ended."""
        self._check_call(over=over)
        try:
            return call(timeout=0)  # at once if a slot is free, even if the deadline has passed
        except RingFull as error:
            full, began = str(error), time.monotonic()  # only the text: the error's frames would keep slots
        try:
            return self._wait_for_room(call, deadline, save, full, over=over)
        finally:
            save.waited += time.monotonic() - began

    def _wait_for_room(
        self, call: Callable[..., _T], deadline: float | None, save: Save, full: str, *, over: bool
    ) -> _T:
        while True:
            self._check_call(over=over)
            if save.status not in (WAITING, WRITING) and not over:
                raise _Over
            if self._is_lost():
                raise PeerDied("the writing process of checkpoints is dead")
            if deadline is not None and time.monotonic() >= deadline:
                raise TimedOut(f"no room for the checkpoint within timeout=: {full}")
            try:
                return call(timeout=_CHECK_INTERVAL)
            except RingFull as error:
                full = str(error)

    def _check_call(self, *, over: bool) -> None:
        if self._call is not None and self._call.abandoned and not over:
            raise Abandoned

    def _take_back(self, number: int, status: str = REPLACED, error: BaseException | None = None) -> None:
        """Have the writing process drop a save that was not staged to its end."""
        save = next((save for save in self._saves.in_flight if save.number == number), None)
        if save is None:
            return
        if error is not None:  # before the writing process reports that it was replaced
            self._saves.finish(number, status, error)
        abandon = partial(self._stager.send_small, ABANDON, number, force=True)
        with contextlib.suppress(PeerDied, TimedOut, ClosedError, _Over):
            self._call_with_room(abandon, time.monotonic() + _TAKE_BACK, save, over=True)
        self._saves.finish(number, status, error)


class Abandoned(Exception):
    """The caller of `CheckpointWriter.save` has abandoned the call."""


class _Over(Exception):
    """The save that is being staged has failed in the meantime."""
