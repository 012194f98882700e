"""The far side of a channel: it puts what near relays send into rings of its own, and reports what it has received.

Each near relay has a `Stream`. docs/internals/relay.md.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import struct
import time
from typing import Any, Final

from ..errors import TimedOut, WireError
from ..shielded import Condition
from ..wire import record, spec
from .frames import FAN_OUT, MOST_TEXT, ONE_VERSION, Bye, Hello, OtherProtocol, Refuse, parse
from .keys import Keys, path_hash
from .session import Session
from .stream import Stream, Terms

log = logging.getLogger("shmtensor.relay")

_TICK_S: Final = 0.25
_MOST_STREAMS: Final = 256

_NEAR_AT: Final = 16
_peek_near = struct.Struct("<Q").unpack_from


class Inbound:
    """One channel of a far relay: its streams, by the number of their near relay."""

    def __init__(self, session: Session, name: str, terms: Terms) -> None:
        self.reason = ""
        self.name, self.terms, self.session, self.keys = name, terms, session, Keys(name)
        self.id, self.path = secrets.randbits(63) | 1, path_hash(name)
        self.lock = Condition()
        self._streams: dict[int, Stream] = {}
        self._known: dict[int, int] = {}  # of fan-outs' near relays that were given up: what they need not send again
        self._ended: set[Stream] = set()  # which take nothing more, but wait until their messages are done
        self._told: dict[int, str] = {}
        self._alive: set[int] = set()  # near relays whose tokens are there
        self._stop = False
        self.messages = self.nbytes = self.duplicates = self.bad_frames = self.refused = self.connections = 0
        self.acknowledged = 0

    def start(self) -> None:
        """Begin to listen. Whatever ends this early, `close` ends the rest."""
        session = self.session
        session.receive(self.keys.far(self.id), self._on_data)
        session.receive(self.keys.hello, self._on_hello)
        session.appear(self.keys.alive_far(self.id))
        session.watch(self.keys.alive_near("*"), self._on_token)

    # --- in Zenoh's threads

    def _on_hello(self, head: bytes, body: Any) -> None:
        try:
            frame = parse(head, body.to_bytes())
        except OtherProtocol as error:
            if error.near:
                self.refuse(error.near, error.attempt, str(error))
            return
        except WireError as error:
            self.count_bad(error)
            return
        if not isinstance(frame, Hello):
            self.count_bad(WireError(f"{type(frame).__name__} where a HELLO is expected"))
            return
        why = self._objection(frame)
        if why:
            self.refuse(frame.near, frame.attempt, why)
            return
        with self.lock:
            if self._stop:
                return
            stream, is_there, failed = self._streams.get(frame.near), frame.near in self._alive, ""
            is_new = stream is None and len(self._streams) < _MOST_STREAMS
            if is_new:
                try:
                    stream = Stream(self, frame)
                    stream.start()
                except RuntimeError as error:
                    failed = str(error)
                else:
                    self._streams[frame.near] = stream
                    self.connections += 1
                    self.lock.notify_all()
        if failed:
            self.refuse(frame.near, frame.attempt, f"the far relay has no thread for another near one: {failed}")
            return
        if is_new:
            log.info("relay of channel %s: near relay %016x has come", self.name, frame.near)
        if stream is None:
            self.refuse(frame.near, frame.attempt, f"the far relay has {_MOST_STREAMS} near ones, and takes no more")
        else:
            stream.welcome(frame, is_there)

    def _objection(self, frame: Hello) -> str:
        """Why a near relay is not accepted; empty if it is."""
        if (frame.record, frame.description) != (record.VERSION, spec.VERSION):
            return (
                f"the near relay has messages of record version {frame.record} and description version "
                f"{frame.description}, the far one of {record.VERSION} and {spec.VERSION}: {ONE_VERSION}"
            )
        if frame.user != self.terms.user:
            return (
                f"the near relay is of user {frame.user!r}, the far one of {self.terms.user!r}: pass the same user= on "
                "both hosts"
            )
        if frame.path == self.path:
            return f'it would lead from channel "{self.name}" to itself: name another one there, by remote='
        return ""

    def refuse(self, near: int, attempt: int, why: str) -> bool:
        """Refuse a near relay, which asks again later. Returns whether the reason is a new one, which is logged."""
        is_new = self._tell(near, why)
        with self.lock:
            self.refused += 1
        if is_new:
            log.error("relay of channel %s refuses near relay %016x: %s", self.name, near, why)
        body = why.encode("utf-8", "replace")[:MOST_TEXT]
        self.session.answer(self.keys.near(near), Refuse(near, self.id, attempt, why).head(body), body)
        return is_new

    def note_shortage(self, near: int, why: str) -> None:
        """Log that a near relay's items wait, since this host lacks a resource."""
        if self._tell(near, why):
            log.error("relay of channel %s holds up near relay %016x, and goes on trying: %s", self.name, near, why)

    def note_supply(self, near: int) -> None:
        """Log that a shortage that was logged for a near relay is over."""
        with self.lock:
            self._told.pop(near, None)
        log.info("relay of channel %s: near relay %016x goes on", self.name, near)

    def _tell(self, near: int, why: str) -> bool:
        """Whether the reason why a near relay is not served must be logged: it differs from the one that was logged
        last."""
        with self.lock:
            is_new = self._told.get(near) != why
            if len(self._told) > _MOST_STREAMS:
                self._told.clear()
            self._told[near] = why
        return is_new

    def _on_data(self, head: bytes, body: Any) -> None:
        near = _peek_near(head, _NEAR_AT)[0] if len(head) >= _NEAR_AT + 8 else 0
        with self.lock:
            stream = self._streams.get(near)
        if stream is not None:
            stream.feed(head, body)
            return
        try:
            frame = parse(head, body.to_bytes())
        except WireError as error:
            self.count_bad(error)
            return
        if not isinstance(frame, Bye):  # it has been given up here: it shall begin anew
            self.session.answer(self.keys.near(near), Bye(near, self.id, frame.attempt, False).head())

    def _on_token(self, key: str, is_there: bool) -> None:
        with contextlib.suppress(ValueError):
            near = int(key.rpartition("/")[2], 16)
            with self.lock:
                if is_there:
                    self._alive.add(near)
                else:
                    self._alive.discard(near)
                stream = self._streams.get(near)
            if stream is not None:
                stream.note_presence(is_there)

    def count_bad(self, error: WireError) -> None:
        """Count and log a frame, or an item, that is dropped."""
        with self.lock:
            self.bad_frames += 1
        log.error("relay of channel %s: a frame is dropped: %s", self.name, str(error))

    # --- its streams

    def forget(self, stream: Stream) -> None:
        """A stream takes nothing more."""
        with self.lock:
            if self._streams.get(stream.near) is stream:
                del self._streams[stream.near]
                self._ended.add(stream)
                if stream.pattern == FAN_OUT:  # a queue's may be lost with its senders here: it comes again
                    self._known.pop(stream.near, None)
                    self._known[stream.near] = stream.received
                    while len(self._known) > _MOST_STREAMS:
                        self._known.pop(next(iter(self._known)))

    def known(self, hello: Hello) -> int:
        """The newest item of a near relay that it need not send again, though it was given up; 0: none."""
        return self._known.get(hello.near, 0) if hello.pattern == FAN_OUT else 0

    def note_end(self, stream: Stream) -> None:
        """A stream has left the channel."""
        with self.lock:
            self._ended.discard(stream)
        log.info("relay of channel %s: near relay %016x has left", self.name, stream.near)

    # --- outside

    @property
    def state(self) -> str:
        with self.lock:
            return "open" if self._streams else "listening"

    @property
    def in_flight(self) -> int:
        with self.lock:
            return sum(stream.in_flight for stream in self._streams.values())

    def wait(self, deadline: float | None) -> None:
        """Wait until a near relay is there. Raises `TimedOut`."""
        with self.lock:
            while True:
                if self._streams:
                    return
                remaining = _TICK_S if deadline is None else min(_TICK_S, deadline - time.monotonic())
                if remaining <= 0:
                    raise TimedOut(f'relay of channel "{self.name}": no near relay has come')
                self.lock.wait(remaining)

    def drain(self, deadline: float) -> None:
        """Do nothing: the near relay keeps what is not acknowledged."""

    def stop(self) -> None:
        """Take nothing more: `close` follows."""
        with self.lock:
            self._stop = True
            streams = [*self._streams.values(), *self._ended]
        for stream in streams:
            stream.stop()

    def close(self) -> None:
        """End every stream. What lies in the rings stays for the receivers that are here. Idempotent."""
        with self.lock:
            self._stop = True
            streams = [*self._streams.values(), *self._ended]
        for stream in streams:
            stream.stop()
        for stream in streams:
            stream.join()
