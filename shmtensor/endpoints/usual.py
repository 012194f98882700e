"""The usual message of an endpoint, handed to the compiled module where there is one: `shmtensor/hot`.

Who makes what: a sender's `Outbox` and a receiver's `Inlet` are made by the first message that the Python code
handled, and forgotten when anything changes that they were told: the members, the rings, the end of the endpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import hot
from ..channel import control as ctl
from ..channel.zmtp import frame_head
from ..ring.feed import held
from ..ring.layout import FAN_OUT, L_PUBLISHED, NOTE, RELEASED, WORK_QUEUE
from ..wire.record import BELL_SIZE, BODY_OFFSET, CONSTANT_OFFSET, INLINE_OFFSET, SIZE, SLOT_OFFSET, pack_bell
from .message import Message

if TYPE_CHECKING:
    from ..ring.feed import Feed, Found
    from ..ring.ring import Ring
    from ..views.outgoing import Outgoing
    from .receiver import Receiver
    from .sender import Sender

_MOST_PEERS = 64


def outbox(sender: Sender, ring: Ring) -> Any:
    """An `Outbox` for a sender as it is now, or None."""
    module = hot.module(tensors=False)
    if module is None or len(sender._listeners) > _MOST_PEERS:
        return None
    if sender._kind == FAN_OUT:
        peers, step = tuple(ring.state + peer.index * ring.row for peer in sender._recipients), 1
        note = ring.state + sender._member.index * ring.row
    else:
        peers, step, note = (ring.state + RELEASED,), 8, ring.state + NOTE
    return module.Outbox(
        locked=sender._mutex.locked, ring=ring, busy=ring.busy, described=ring.described, recipients=sender._recipients,
        control=sender._control_words, ledger=sender._words, head=ring.words, data=ring.buffer,
        epoch_at=ctl.W_EPOCH, epoch=sender._epoch, published_at=L_PUBLISHED, order_at=sender._order, mask=sender._mask,
        ring_index=ring.index, slots=ring.slots, slot_bytes=ring.slot_bytes, records_at=ring.records, record_bytes=SIZE,
        sent_ns_at=BODY_OFFSET, constant_at=CONSTANT_OFFSET, slot_at=SLOT_OFFSET, peers=peers, step=step,
        twice=sender._kind == FAN_OUT, sleepers=tuple(peer.asleep for peer in sender._listeners),
        listeners=sender._listeners, bell=frame_head(BELL_SIZE) + pack_bell(sender._member.uid, b""),
        note_at=note,
    )  # fmt: skip


def constant_of(ring: Ring, slot: int, out: Outgoing) -> bytes:
    """What a plan's record has in common in every slot, read from one where it stands."""
    record = ring.records + slot * SIZE
    return bytes(ring.view[record + CONSTANT_OFFSET : record + INLINE_OFFSET + len(out.static)])


def inlet(receiver: Receiver[Any], feed: Feed, found: Found, siblings: tuple[int, ...] = ()) -> Any:
    """An `Inlet` for a receiver as it is now, or None. `siblings`: where the other consumers of a work queue sleep."""
    module = hot.module(tensors=False)
    ring = found.ring
    if module is None or len(siblings) > _MOST_PEERS or receiver._ahead is not None:
        return None
    competes = receiver._kind == WORK_QUEUE
    note = ring.state + NOTE if competes else ring.state + feed.index * ring.row
    return module.Inlet(
        locked=receiver._mutex.locked, message=Message, feed=feed, leases=feed.leases, held=held,
        control=receiver._control_words, ledger=feed.words, head=ring.words, data=ring.buffer,
        epoch_at=ctl.W_EPOCH, epoch=receiver._epoch, asleep_at=ctl.asleep_word(feed.index), published_at=L_PUBLISHED,
        order_at=feed.order, mask=feed.mask, ring_index=ring.index, slots=ring.slots, slot_bytes=ring.slot_bytes,
        records_at=ring.records, record_bytes=SIZE, sent_ns_at=BODY_OFFSET, constant_at=CONSTANT_OFFSET,
        slot_at=SLOT_OFFSET, state_at=ring.state if competes else ring.state + feed.member * ring.row,
        note_at=note, locks=feed.ledger.locks if competes else None, siblings=siblings,
    )  # fmt: skip
