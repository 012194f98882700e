"""What a receiver reads from: the senders of its channel, from attaching to them until they have left."""

from __future__ import annotations

import contextlib
import logging
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from ..channel import control as ctl
from ..channel.control import Entry
from ..channel.names import ring_name, sequence_table_name, socket_path
from ..codec.implementation import codec, decode
from ..errors import ResourceError, WireError
from ..memory.fifos import SenderWaker
from ..memory.segment import Unreadable
from ..memory.words import acquire_fence
from ..ring.implementation import Counts, make_reader
from ..ring.reader import ALL, Reader, Reception
from ..ring.ring import Ring
from ..ring.sequence_table import SequenceTable
from .base import Endpoint
from .message import Message, SenderInfo
from .traits import ReceiverTraits

log = logging.getLogger("shmtensor.endpoints")


class Producers(Endpoint):
    """The half of a receiver that deals with its senders."""

    _traits: ReceiverTraits
    _control_words: memoryview
    _senders_before: int
    _mode = ALL
    _depth = 1  # how many of the newest messages a newest-only receiver takes
    _max_attempts = 0  # how often a work queue's message is delivered
    _waits_for_more = False
    """Whether the end of all senders is no end of the stream: others may come."""
    _prefetch: Any = None  # a `Prefetch` if messages are received on a device
    _turns: dict[bytes, int]
    _direct: Any = None
    """The reader of the only sender, if its messages can be taken without the mutex."""

    def __init__(self) -> None:
        super().__init__()
        self._counts = Counts()
        self._readers: list[Any] = []  # of `Reader`
        self._retired: list[Any] = []  # read to the end, but others may still need what their senders left
        self._epoch = -1
        self._unattached: dict[int, tuple[Entry, str]] = {}  # by uid, and why; "": it has no sequence table
        self._strangers: dict[int, str] = {}  # of another version, by uid, and why: never attached again
        self._bad_records = 0

    def _refresh(self) -> None:
        """Read the table of members: attach new senders, mark those that left."""
        self._turns = {}
        control = self._member.control
        epoch = control.epoch
        acquire_fence()
        entries = list(control.members())
        present = {entry.uid: entry for entry in entries if entry.role == ctl.SENDER}
        for reader in self._readers:
            if reader.uid not in present or reader.sequences.closed:
                reader.gone = True
            present.pop(reader.uid, None)
        for reader in list(self._retired):
            if reader.uid in present:
                del present[reader.uid]
            else:
                reader.close()
                self._retired.remove(reader)
        unattached: dict[int, tuple[Entry, str]] = {}
        self._strangers = {uid: why for uid, why in self._strangers.items() if uid in present}
        for entry in present.values():
            if entry.uid in self._strangers:
                unattached[entry.uid] = entry, self._strangers[entry.uid]
                continue
            try:
                self._readers.append(self._attach(entry))
            except FileNotFoundError:
                unattached[entry.uid] = entry, ""
            except (WireError, Unreadable) as error:
                unattached[entry.uid] = entry, str(error)
                if entry.uid not in self._unattached:
                    self._report(entry.uid, str(error))
        self._unattached = unattached
        events = self._tracing.follow(self._member, entries)
        for reader in (*self._readers, *self._retired):
            reader.trace(events, reader.uid)
        # crash: attach.done
        self._epoch = epoch
        for reader in self._readers:
            reader.epoch = epoch
        self._retire_drained()
        only = self._readers[0] if len(self._readers) == 1 and self._prefetch is None else None
        self._direct = only if only is not None and only.direct else None

    def _report(self, uid: int, why: str) -> None:
        """Count and log a sender that cannot be attached."""
        self._bad_records += 1
        log.error("channel %s: cannot attach to producer %016x: %s", self.name, uid, why)

    def _disown(self, reader: Reader, why: str) -> None:
        """Detach a sender whose first message turns out to be of another version.

        Its messages are not taken: on a work queue, other consumers may be able to read them.
        """
        self._report(reader.uid, why)
        self._strangers[reader.uid] = why
        reader.abandon()
        self._direct = None
        self._epoch = -1  # the next `_refresh` lists it as unattached
        if self._member.group is None:  # another member of the group may be able to read it
            reader.sequences.finish(*self._member.recipient)  # what it leaves need not stay for this receiver
        # a new list: a caller may iterate over the old one
        self._readers = [other for other in self._readers if other is not reader]
        reader.close()

    def _attach(self, entry: Entry) -> Reader:
        """A reader of the sender of that entry."""
        control = self._member.control
        sequences = SequenceTable.attach(sequence_table_name(control.channel, entry.uid), entry.uid, control.capacity)
        if sequences.device and self._member.group is not None:
            sequences.close()
            raise WireError("it sends device memory, which a group does not take: subscribe without group=")
        try:
            waker = self._waker(entry)
        except FileNotFoundError:
            waker = None
        except ResourceError:
            sequences.close()
            raise

        kind, writable = self._traits.kind, self._traits.maps_writable

        def attach_ring(index: int) -> Ring:
            try:
                return Ring.attach(
                    ring_name(control.channel, entry.uid, index), entry.uid, index,
                    kind=kind, capacity=control.capacity, writable=writable,
                )  # fmt: skip
            except FileNotFoundError as error:
                if sequences.closed or control.owner(entry.index) != entry.uid or not control.is_alive(entry.index):
                    raise  # removed with its producer
                raise WireError(str(error)) from None

        try:
            asleep = ctl.asleep_word(entry.index)
            reader = make_reader(self._reception(), sequences, entry.index, asleep, waker, attach_ring)
        except BaseException:
            sequences.close()
            if waker is not None:
                waker.close()
            raise
        reader.gone = sequences.closed
        reader.sender = SenderInfo(f"{entry.uid:016x}", control.label(entry), entry.pid)
        return reader

    def _mapped_rings(self) -> list[Ring]:
        """Every ring that is attached."""
        return [ring for reader in (*self._readers, *self._retired) for ring in reader.rings]

    def _reception(self) -> Reception:
        """What a reader needs to know of this receiver."""
        member = self._member
        return Reception(
            mode=self._mode, decode=decode, codec=codec, message=Message, counts=self._counts,
            is_locked=self._mutex.locked, control=member.control.words, epoch_at=ctl.W_EPOCH, member=member.index,
            recipient=member.recipient, owner=member, readonly=not self._traits.maps_writable,
            max_attempts=self._max_attempts, depth=self._depth, shown_at=ctl.counters_word(member.index) + ctl.C_MISSED,
        )  # fmt: skip

    def _retire_drained(self) -> None:
        """Detach senders that are gone and read to the end; the last receiver to do so removes what they left."""
        drained = [reader for reader in self._readers if reader.gone and self._is_drained(reader)]
        if not drained:
            return
        for reader in drained:
            self._readers.remove(reader)
            self._retired.append(reader)
            reader.unmap()
            reader.sequences.finish(*self._member.recipient)
            # crash: drain.finished
        self._member.reap()  # moves the epoch; the next refresh forgets them

    @abstractmethod
    def _is_drained(self, reader: Any) -> bool:
        """Whether nothing more can come from a sender that is gone."""

    def _is_over(self) -> bool:
        """Whether at least one sender has been there since this receiver joined, and all are gone and drained."""
        if any(reader.gone for reader in self._readers):
            self._retire_drained()
        if self._readers or self._waits_for_more or self._member.control.senders <= self._senders_before:
            return False
        if self._control_words[ctl.W_EPOCH] != self._epoch:
            self._refresh()
        if self._readers:
            return False
        unread = self.unread()
        if unread is not None:
            raise unread
        return not any(self._living_strangers())

    def unread(self) -> WireError | None:
        """The error that says which living sender cannot be attached, and why; None if all can be."""
        for entry, why in self._living_strangers():
            if why:
                return WireError(f'channel "{self.name}": process {entry.pid} sends what cannot be read here: {why}')
        return None

    def _living_strangers(self) -> Iterator[tuple[Entry, str]]:
        control = self._member.control
        return (it for it in self._unattached.values() if control.is_alive(it[0].index))

    def _wake_senders(self) -> None:
        """Wake sleeping senders: they may wait for receivers to join, or to give slots back."""
        words = self._control_words
        for entry in self._member.peers():
            asleep = words[ctl.asleep_word(entry.index)]
            if entry.role == ctl.SENDER and asleep & 1:
                with contextlib.suppress(FileNotFoundError, ResourceError):
                    waker = self._waker(entry)
                    waker.wake(asleep)
                    waker.close()

    def _waker(self, sender: Entry) -> SenderWaker:
        """What wakes a sender."""
        return SenderWaker(sequence_table_name(self.name, sender.uid), socket_path(self._member.directory, sender.uid))

    @abstractmethod
    def _lease_emptied(self) -> None:
        """Called when the last lease of a reader ends after close."""
