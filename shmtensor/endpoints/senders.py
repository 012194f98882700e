"""A receiver's access to the segments of its senders: attach to them, and wake senders that sleep."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..channel import control as ctl
from ..channel.control import Entry
from ..channel.membership import Member
from ..channel.names import sequence_table_name, socket_path
from ..errors import ResourceError, WireError
from ..memory import placement
from ..memory.semaphores import SenderWaker
from ..memory.words import store
from ..ring.implementation import make_reader
from ..ring.layout import MAX_RINGS, lease_word
from ..ring.reader import Reader, Reception
from ..ring.ring import Ring
from .device_fanout import make_device_reader
from .message import SenderInfo


def attach(member: Member, entry: Entry, reception: Reception) -> Reader:
    """A reader of the sender of that entry.

    Raises `FileNotFoundError` if it has no sequence table, `WireError` or `Unreadable` if it cannot be read here, and
    `Unserved`, at once, if there is no segment server now that knows. Rings that are attached later wait for one.
    """
    with placement.at_once():
        return _attach(member, entry, reception)


def _attach(member: Member, entry: Entry, reception: Reception) -> Reader:
    control = member.control
    sequences = control.sequence_table(entry.uid)
    waker = None
    try:
        with contextlib.suppress(FileNotFoundError):
            waker = _waker(member, entry)

        def attach_ring(index: int) -> Ring:
            try:
                return control.ring(entry.uid, index, writable=not reception.readonly)
            except FileNotFoundError as error:
                if sequences.closed or control.owner(entry.index) != entry.uid or not control.is_alive(entry.index):
                    raise  # removed with its producer
                raise WireError(str(error)) from None

        make = make_device_reader if sequences.device else make_reader
        reader = make(reception, sequences, entry.index, ctl.asleep_word(entry.index), waker, attach_ring)
    except BaseException:
        sequences.close()
        if waker is not None:
            waker.close()
        raise
    reader.gone = sequences.closed
    reader.sender = SenderInfo(f"{entry.uid:016x}", control.label(entry), entry.pid)
    return reader


def _waker(member: Member, entry: Entry) -> SenderWaker:
    """The object that wakes a sender, or None."""
    return SenderWaker(sequence_table_name(member.channel, entry.uid), socket_path(member.directory, entry.uid))


def wake_senders(member: Member) -> None:
    """Wake the senders that sleep: they may wait for receivers to give slots back."""
    words = member.control.words
    for entry in member.peers():
        asleep = words[ctl.asleep_word(entry.index)]
        if entry.role == ctl.SENDER and asleep & 1:
            with contextlib.suppress(FileNotFoundError, ResourceError), placement.at_once():
                waker = _waker(member, entry)
                waker.wake(asleep)
                waker.close()


def clear_words(member: Member) -> None:
    """Clear the words of a former member at this receiver's index, while it joins a fan-out: they must not count for
    the messages that are kept for it."""
    for ring in _retaining_rings(member):
        row = lease_word(ring, member.recipient[0], 0)
        for word in range(row, row + ring.slots):
            store(ring.words, word, 0)


def _retaining_rings(member: Member) -> Iterator[Ring]:
    """The rings of every publisher with `history=`, as far as they can be attached."""
    control = member.control
    for entry in control.members():
        if entry.role != ctl.SENDER:
            continue
        try:
            sequences = control.sequence_table(entry.uid)
        except (FileNotFoundError, WireError):
            continue
        sequences.close()
        for index in range(min(sequences.rings, MAX_RINGS) if sequences.history else 0):
            with contextlib.suppress(FileNotFoundError, WireError):
                yield control.ring(entry.uid, index, writable=False)
