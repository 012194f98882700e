"""Chooses the writer of a sender: the compiled one, or the reference where nothing was compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import native
from ..channel import control as ctl
from ..channel.zmtp import frame_head
from ..codec.implementation import codec
from ..ring.layout import FAN_OUT
from ..ring.writer import Writer
from ..wire.record import BELL_SIZE, pack_bell

if TYPE_CHECKING:
    from ..channel.membership import Member
    from ..ring.sequence_table import SequenceTable


def make_writer(
    member: Member, sequences: SequenceTable, *, kind: int, encode: Callable[[Any, Any], Any],
    locked: Callable[[], bool], checks_verdicts: bool, widest: int, share: int,
) -> Any:  # fmt: skip
    """The writer of a new sender, docs/internals/core.md.

    locked: whether a call of the endpoint is in progress: `send` leaves the message to the endpoint then
    widest: `send` chooses a ring whose slots are at most so many times larger than the message wants; 0: any; -1: none
    share: `send` takes at most one part in so many of a ring for a message
    """
    competing, history = kind != FAN_OUT, sequences.history
    if native.module is None:
        return Writer(
            sequences=sequences, member=member.index, competing=competing, history=history,
            checks_verdicts=checks_verdicts, encode=encode,
        )  # fmt: skip
    return native.module.Writer(
        codec=codec, locked=locked, encode=None if encode == codec.encode else encode, lock_file=sequences.locks,
        control=member.control.words, epoch_at=ctl.W_EPOCH, table=sequences.words, order=sequences.shape.order,
        mask=sequences.mask, capacity=sequences.shape.capacity, member=member.index, competing=competing,
        history=history, checks_verdicts=checks_verdicts, widest=widest, share=share,
        bell=frame_head(BELL_SIZE) + pack_bell(member.uid, b""),
    )  # fmt: skip
