"""The trainer's half of one save: make room as `busy` says, then copy chunk after chunk into slots.

Every wait is one of at most a quarter of a second; in between it looks whether there is still somebody to wait for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np

from ..errors import ClosedError, PeerDied, RingFull, TimedOut
from .chunks import Chunk
from .flight import Flight
from .handle import REPLACED, WAITING, WRITING, SaveHandle
from .plan import Plan
from .slots import ABANDON, END, HEAD, Stager
from .transfer import Transfer

_T = TypeVar("_T")
_TAKE_BACK: Final = 60.0
"""Seconds to wait for a small slot, to say that a save was given up."""


class Staging:
    """Copies states into the slots of one writer. `is_lost()`: there is no writing process any more."""

    def __init__(self, stager: Stager, flight: Flight, is_lost: Callable[[], bool]) -> None:
        self._stager, self._flight, self._is_lost = stager, flight, is_lost

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
        deadline: float | None,
    ) -> None:  # fmt: skip
        """Copy everything. A save that fails meanwhile ends it; an exception takes the save back."""
        stager, number, transfer, loud = self._stager, handle.number, Transfer(plan), bool(options["streams"])
        try:
            head = np.frombuffer(described, np.uint8)
            self._insist(partial(stager.tell, HEAD, number, head, loud=loud, **options), deadline, handle)
            # crash: stage.begun
            done = 0
            while done < len(chunks):
                # A state that streams goes slot by slot, so that the writing process has something to do. Of another
                # every slot that is free is taken first: the copies then follow each other without a pause.
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
            # crash: stage.filled
            self._insist(partial(stager.tell, END, number), deadline, handle)
            # crash: stage.ended
        except _Over:
            pass  # the handle says why
        except BaseException:
            self._take_back(number)
            raise
        handle.staged.set_result(plan.nbytes)

    def _insist(self, call: Callable[[], _T], deadline: float | None, handle: SaveHandle) -> _T:
        """Try until there is a slot, looking at the process, the save and the clock in between."""
        while True:
            began = time.monotonic()
            try:
                return call()
            except RingFull as error:
                full = error
            handle.waited += time.monotonic() - began
            if handle.status not in (WAITING, WRITING):
                raise _Over
            if self._is_lost():
                raise PeerDied("the writing process of checkpoints is dead")
            if deadline is not None and time.monotonic() >= deadline:
                raise TimedOut(f"no room for the checkpoint within timeout=: {full}")

    def _take_back(self, number: int) -> None:
        """A save that was not staged to its end: nobody shall write it."""
        handle = next((handle for handle in self._flight.handles if handle.number == number), None)
        if handle is None:
            return
        tell = partial(self._stager.tell, ABANDON, number, force=True)
        with contextlib.suppress(PeerDied, TimedOut, ClosedError, _Over):
            self._insist(tell, time.monotonic() + _TAKE_BACK, handle)
        self._flight.settle(number, REPLACED)


class _Over(Exception):
    """The save that is being staged is over: it has failed in the meantime."""
