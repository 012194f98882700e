"""How many requests of a service wait for a server, counted from outside: no member, no lock, nothing kept open."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..channel import control as ctl
from ..channel.control import Control
from ..channel.names import control_name, ring_name, sequence_table_name
from ..errors import WireError
from ..memory import segment as shm
from ..ring import layout as lay
from .sidecar import CANCELLED


def waiting_requests(service: str) -> int:
    """Requests of living clients that no living server has taken. A snapshot: clients and servers go on meanwhile.

    Not counted: what a client could not send for want of room, and what a server has taken for its next batch.
    """
    return sum(_of_client(service, uid) for uid in _clients(service))


def _clients(service: str) -> list[int]:
    """The uids of the living clients."""
    try:
        with shm.look_at(control_name(service)) as segment:
            if segment.nbytes != Control.nbytes():
                return []
            words = segment.read(0, Control.nbytes() // 8)
            if [words[ctl.W_MAGIC], words[ctl.W_VERSION], words[ctl.W_KIND]] != [ctl.MAGIC, ctl.VERSION, lay.SERVICE]:
                return []
            senders = [index for index in range(ctl.CAPACITY) if words[ctl.base(index) + ctl.M_ROLE] == ctl.SENDER]
            living = [index for index in senders if segment.is_locked(ctl.LIFE + index)]
            return [uid for index in living if (uid := words[ctl.base(index)])]
    except (FileNotFoundError, WireError):  # no one is there, or the last one has just left
        return []


def _of_client(service: str, uid: int) -> int:
    waiting, claimed = 0, list[int]()
    try:
        with shm.look_at(sequence_table_name(service, uid)) as table:
            head = table.read(0, lay.L_MEMBERS)
            if [head[lay.L_MAGIC], head[lay.L_VERSION]] != [lay.SEQUENCE_TABLE_MAGIC, lay.VERSION]:
                return 0
            for index in range(min(head[lay.L_RINGS], lay.MAX_RINGS)):
                for seq, was_taken in _open_requests(ring_name(service, uid, index), head[lay.L_PUBLISHED]):
                    waiting += not was_taken
                    claimed += [seq] * was_taken
            waiting += sum(not table.is_locked(seq) for seq in claimed)  # their servers died
    except (FileNotFoundError, WireError):  # it has just left, or is another version's
        return 0
    return waiting


def _open_requests(name: str, published: int) -> Iterator[tuple[int, bool]]:
    """(sequence number, whether a server has ever taken it) of the requests in a ring that are not done."""
    with shm.look_at(name) as ring:
        head = ring.read(0, lay.R_DEVICE + 1)
        if [head[lay.R_MAGIC], head[lay.R_VERSION]] != [lay.RING_MAGIC, lay.VERSION]:
            return
        shape = lay.RingShape(head[lay.R_KIND], head[lay.R_SLOTS], head[lay.R_SLOT_BYTES], head[lay.R_CAPACITY])
        words = ring.read(shape.state, lay.STATE_WORDS * shape.slots)
    states = np.frombuffer(words, np.uint64).reshape(shape.slots, lay.STATE_WORDS)
    note, done, claimed = states[:, lay.NOTE], states[:, lay.DONE], states[:, lay.CLAIMED]
    seq = note >> np.uint64(8)
    is_open = (seq > 0) & (seq <= np.uint64(published)) & (done < seq) & (note & np.uint64(CANCELLED) == 0)
    for number in np.flatnonzero(is_open):
        yield int(seq[number]), bool(claimed[number] == seq[number])
