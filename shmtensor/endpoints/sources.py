"""What a receiver reads from: the senders of its channel, attached, noticed when they go, and let go of."""

from __future__ import annotations

import contextlib
import logging
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from ..channel import control as ctl
from ..channel.control import Entry
from ..channel.names import ledger_name, ring_name, socket_path
from ..errors import ResourceError, WireError
from ..memory.fifos import Rouser
from ..memory.segment import Unreadable
from ..memory.words import settle
from ..ring.feed import ALL, Feed, Reception
from ..ring.implementation import Counts, make_feed
from ..ring.layout import FAN_OUT
from ..ring.ledger import Ledger
from ..ring.ring import Ring
from ..views.implementation import codec, decode
from .base import Endpoint
from .message import Message

log = logging.getLogger("shmtensor")


class Sources(Endpoint):
    """The half of a receiver that deals with its senders."""

    _kind: int
    _control_words: memoryview
    _senders_before: int
    _mode = ALL
    _max_attempts = 0  # how often a work queue's message is delivered
    _ahead: Any = None
    _turns: dict[bytes, int]
    _direct: Any = None
    """The feed of the only sender, if its messages can be taken without the mutex."""

    def __init__(self) -> None:
        super().__init__()
        self._counts = Counts()
        self._feeds: list[Any] = []  # of `Feed`
        self._retired: list[Any] = []  # read to the end, but others may still need what their senders left
        self._epoch = -1
        self._unattached: dict[int, tuple[Entry, str]] = {}  # of the table, and why; "": no ledger
        self._strangers: dict[int, str] = {}  # of another version, and what says so: never attached again
        self._bad_records = 0

    @property
    def _maps_writable(self) -> bool:
        """Whether the values are this receiver's alone."""
        return self._kind != FAN_OUT

    def _refresh(self) -> None:
        """Read the table: attach new senders, notice those that left."""
        self._turns = {}
        control = self._member.control
        epoch = control.epoch
        settle()
        present = {entry.uid: entry for entry in control.members() if entry.role == ctl.SENDER}
        for feed in self._feeds:
            if feed.uid not in present or feed.ledger.closed:
                feed.gone = True
            present.pop(feed.uid, None)
        for feed in list(self._retired):
            if feed.uid in present:
                del present[feed.uid]
            else:
                feed.close()
                self._retired.remove(feed)
        unattached: dict[int, tuple[Entry, str]] = {}
        self._strangers = {uid: why for uid, why in self._strangers.items() if uid in present}
        for entry in present.values():
            if entry.uid in self._strangers:
                unattached[entry.uid] = entry, self._strangers[entry.uid]
                continue
            try:
                self._feeds.append(self._attach(entry))
            except FileNotFoundError:
                unattached[entry.uid] = entry, ""
            except (WireError, Unreadable) as error:
                unattached[entry.uid] = entry, str(error)
                if entry.uid not in self._unattached:
                    self._report(entry.uid, str(error))
        self._unattached = unattached
        # crash: attach.done
        self._epoch = epoch
        for feed in self._feeds:
            feed.epoch = epoch
        self._retire_drained()
        only = self._feeds[0] if len(self._feeds) == 1 and self._ahead is None else None
        self._direct = only if only is not None and only.direct else None

    def _report(self, uid: int, why: str) -> None:
        self._bad_records += 1
        log.error("channel %s: cannot attach to producer %016x: %s", self.name, uid, why)

    def _disown(self, feed: Feed, why: str) -> None:
        """Let go of a sender whose first message says that it is of another version, as if it had not been attached.

        What it sends is not taken: a work queue's is there for consumers that can read it.
        """
        self._report(feed.uid, why)
        self._strangers[feed.uid] = why
        feed.abandon()
        self._direct = None
        self._epoch = -1  # the next look puts it among the unattached
        feed.ledger.finish(self._member.index, self._member.uid)  # once it is gone, it need not stay for us
        self._feeds = [other for other in self._feeds if other is not feed]  # anew: somebody may walk through it
        feed.close()

    def _attach(self, entry: Entry) -> Feed:
        control = self._member.control
        ledger = Ledger.attach(ledger_name(control.channel, entry.uid), entry.uid, control.capacity)
        try:
            rouser = self._rouser(entry)
        except FileNotFoundError:
            rouser = None
        except ResourceError:
            ledger.close()
            raise

        kind, writable = self._kind, self._maps_writable

        def attach_ring(index: int) -> Ring:
            try:
                return Ring.attach(
                    ring_name(control.channel, entry.uid, index), entry.uid, index,
                    kind=kind, capacity=control.capacity, writable=writable,
                )  # fmt: skip
            except FileNotFoundError as error:
                if ledger.closed or control.owner(entry.index) != entry.uid or not control.is_alive(entry.index):
                    raise  # removed with its producer
                raise WireError(str(error)) from None

        try:
            asleep = ctl.asleep_word(entry.index)
            feed = make_feed(self._reception(), ledger, entry.index, asleep, rouser, attach_ring)
        except BaseException:
            ledger.close()
            if rouser is not None:
                rouser.close()
            raise
        feed.gone = ledger.closed
        return feed

    def _mapped_rings(self) -> list[Ring]:
        return [ring for feed in (*self._feeds, *self._retired) for ring in feed.rings]

    def _reception(self) -> Reception:
        member = self._member
        return Reception(
            mode=self._mode, decode=decode, codec=codec, message=Message, counts=self._counts,
            is_locked=self._mutex.locked, control=member.control.words, epoch_at=ctl.W_EPOCH, member=member.index,
            member_uid=member.uid, owner=member, readonly=not self._maps_writable, max_attempts=self._max_attempts,
        )  # fmt: skip

    def _retire_drained(self) -> None:
        """Let go of senders that are gone and read to the end; the last receiver to do so removes what they left."""
        drained = [feed for feed in self._feeds if feed.gone and self._is_drained(feed)]
        if not drained:
            return
        for feed in drained:
            self._feeds.remove(feed)
            self._retired.append(feed)
            feed.unmap()
            feed.ledger.finish(self._member.index, self._member.uid)
            # crash: drain.finished
        self._member.reap()  # moves the epoch; the next refresh forgets them

    @abstractmethod
    def _is_drained(self, feed: Any) -> bool:
        """Whether nothing more can come from a sender that is gone."""

    def _is_over(self) -> bool:
        """Whether every sender that was there since this receiver joined is gone and drained."""
        if any(feed.gone for feed in self._feeds):
            self._retire_drained()
        if self._feeds or self._member.control.senders <= self._senders_before:
            return False
        if self._control_words[ctl.W_EPOCH] != self._epoch:
            self._refresh()
        if self._feeds:
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
        """A sender may be waiting for subscribers."""
        words = self._control_words
        for entry in self._member.peers():
            asleep = words[ctl.asleep_word(entry.index)]
            if entry.role == ctl.SENDER and asleep & 1:
                with contextlib.suppress(FileNotFoundError, ResourceError):
                    rouser = self._rouser(entry)
                    rouser.rouse(asleep)
                    rouser.close()

    def _rouser(self, sender: Entry) -> Rouser:
        return Rouser(ledger_name(self.name, sender.uid), socket_path(self._member.directory, sender.uid))

    @abstractmethod
    def _lease_emptied(self) -> None:
        """The last lease of a feed ended after close."""
