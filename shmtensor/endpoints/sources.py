"""What a receiver reads from: the senders of its channel, attached, noticed when they go, and let go of."""

from __future__ import annotations

import contextlib
import logging
from abc import abstractmethod
from typing import Any, Generic, TypeVar

from ..channel import control as ctl
from ..channel.control import Entry
from ..channel.names import ledger_name, ring_name, socket_path
from ..errors import ResourceError, WireError
from ..memory.fifos import Rouser
from ..memory.words import settle
from ..ring.feed import Feed
from ..ring.layout import FAN_OUT
from ..ring.ledger import Ledger
from ..ring.ring import Ring
from .base import Endpoint

log = logging.getLogger("shmtensor")

_F = TypeVar("_F", bound=Feed)


class Sources(Endpoint, Generic[_F]):
    """The half of a receiver that deals with its senders."""

    _kind: int
    _control_words: memoryview
    _senders_before: int

    def __init__(self) -> None:
        super().__init__()
        self._feeds: list[_F] = []
        self._retired: list[_F] = []  # read to the end, but others may still need what their senders left
        self._epoch = -1
        self._incomplete = False  # a sender of the table could not be attached: try again, though the table stands
        self._bad_records = 0

    @property
    def _maps_writable(self) -> bool:
        """Whether the values are this receiver's alone."""
        return self._kind != FAN_OUT

    def _refresh(self) -> None:
        """Read the table: attach new senders, notice those that left."""
        self._unlearn()
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
        self._incomplete = False
        for entry in present.values():
            feed_or_none = self._attach(entry)
            if feed_or_none is None:
                self._incomplete = True
            else:
                self._feeds.append(feed_or_none)
        # crash: attach.done
        self._epoch = epoch
        self._retire_drained()

    def _attach(self, entry: Entry) -> _F | None:
        control = self._member.control
        name = ledger_name(control.channel, entry.uid)
        try:
            ledger = Ledger.attach(name, entry.uid, control.capacity)
        except FileNotFoundError:
            return None
        except WireError as error:
            self._bad_records += 1
            log.error("channel %s: cannot attach to producer %016x: %s", self.name, entry.uid, str(error))
            return None
        try:
            rouser = self._rouser(entry)
        except FileNotFoundError:
            rouser = None
        except ResourceError:
            ledger.close()
            raise

        kind, writable = self._kind, self._maps_writable

        def attach_ring(index: int) -> Ring:
            return Ring.attach(
                ring_name(control.channel, entry.uid, index), entry.uid, index,
                kind=kind, capacity=control.capacity, writable=writable,
            )  # fmt: skip

        feed = self._make_feed(
            ledger, entry.index, self._member.index, control.words, ctl.asleep_word(entry.index), rouser,
            attach_ring, self._member,
        )  # fmt: skip
        feed.gone = ledger.closed
        return feed

    def _mapped_rings(self) -> list[Ring]:
        return [ring for feed in (*self._feeds, *self._retired) for ring in feed.rings]

    @abstractmethod
    def _make_feed(self, *args: Any) -> _F:
        """The feed of a new sender; `args` are those of `Feed`."""

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
    def _is_drained(self, feed: _F) -> bool:
        """Whether nothing more can come from a sender that is gone."""

    def _is_over(self) -> bool:
        """Whether every sender that was there since this receiver joined is gone and drained."""
        if any(feed.gone for feed in self._feeds):
            self._retire_drained()
        if self._feeds or self._member.control.senders <= self._senders_before:
            return False
        if self._control_words[ctl.W_EPOCH] != self._epoch:
            self._refresh()
        return not self._feeds

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
