"""What an endpoint is made with: the compiled half of the transport, or the reference where nothing was compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import native
from ..channel import control as ctl
from ..channel.zmtp import frame_head
from ..ring.layout import FAN_OUT
from ..ring.writer import Writer
from ..views.implementation import codec
from ..wire.record import BELL_SIZE, pack_bell

if TYPE_CHECKING:
    from ..channel.membership import Member
    from ..ring.ledger import Ledger


def make_writer(
    member: Member, ledger: Ledger, *, kind: int, encode: Callable[[Any, Any], Any], locked: Callable[[], bool],
    heeds_verdicts: bool, widest: int, share: int,
) -> Any:  # fmt: skip
    """The writer of a new sender, docs/internals/core.md.

    locked: whether a call of the endpoint is under way: `send` keeps out of its way
    widest: `send` chooses a ring whose slots are at most so many times larger than the message wants; 0: any; -1: none
    share: of any ring, `send` takes no larger part than one of so many for a message
    """
    competing, history = kind != FAN_OUT, ledger.history
    if native.module is None:
        return Writer(
            ledger=ledger, member=member.index, competing=competing, history=history, heeds_verdicts=heeds_verdicts,
            encode=encode,
        )  # fmt: skip
    return native.module.Writer(
        codec=codec, locked=locked, encode=None if encode == codec.encode else encode, lock_file=ledger.locks,
        control=member.control.words, epoch_at=ctl.W_EPOCH, table=ledger.words, order=ledger.shape.order,
        mask=ledger.mask, capacity=ledger.shape.capacity, member=member.index, competing=competing, history=history,
        heeds_verdicts=heeds_verdicts, widest=widest, share=share,
        bell=frame_head(BELL_SIZE) + pack_bell(member.uid, b""),
    )  # fmt: skip
