"""`Relay`: channels of this host on another one."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, Final, Literal

from ..channel.inspect import Inspector
from ..channel.names import check_channel
from ..endpoints.base import Local
from ..errors import ArgumentError, ArgumentTypeError, ClosedError, ForkedError, WireError
from ..options import check_choice, check_count, check_timeout, parse_bytes
from ..ring.layout import MAX_SLOTS
from ..rpc.endpoints import check_service
from ..shielded import CallQueue, aside
from ..statistics import RelayStatistics
from .frames import FAN_OUT, MOST_PAYLOAD, PATTERNS, SERVICE
from .inbound import Inbound
from .keys import user_name
from .outbound import FAILED, Outbound
from .session import Session, check_endpoint
from .stream import Terms
from .threads import Closing, is_own

log = logging.getLogger("shmtensor.relay")

WINDOW: Final = 256
WINDOW_BYTES: Final = 32 << 20
AWAY: Final = 30.0
_MOST_USER: Final = 256
_LINGER_S: Final = 5.0
_MAKING_S: Final = 2.0
"""Seconds that the first member of a channel may take to make it."""
_PAUSE_S: Final = 0.005
_NAMES: Final = {number: name for name, number in PATTERNS.items()}

open_relays: weakref.WeakSet[Relay] = weakref.WeakSet()
"""Those of this process that are not closed; in a forked child, its parent's as well."""
_dropped: Final = CallQueue("shmtensor relay end", stays=False, daemon=False)
"""Closes those that nobody refers to any more, in that order: a near one lingers while a far one is still there."""


def _close_open() -> None:
    """Close what a program has left open: Zenoh runs callbacks in threads that the interpreter waits for at its end,
    and `atexit` comes after that. Near ones first, while a far one of this process takes what is under way."""
    for relay in sorted(open_relays, key=lambda it: it.is_far):
        try:
            relay._finish()
        except Exception:
            log.exception("%r could not be closed at the end", relay)
        except BaseException:
            relay.close(linger=0)
            raise


threading._register_atexit(_close_open)  # type: ignore[attr-defined]


class Relay(Local):
    """Makes channels of one host channels of another: one relay on each, joined by Zenoh.

    The near one, with `to=`, runs where the senders are: it is a subscriber or consumer of each channel. The far one,
    with `listen=`, runs where the receivers are: each sender of the near channel appears there as a sender of the
    channel of that name. Values arrive as they do locally. A fan-out's message holds its slot here until it lies in a
    ring there, a queue's until a consumer there has done it. Of a service, the near relay is a server where the clients
    are, and the far one a client where the servers are: docs/guide/relay.md.

    Args:
        name: the channel's name, or several: each has a window of its own, so that one that stalls holds up no other.
        to: near: the endpoint of the far relay, such as `"tcp/192.0.2.7:7447"`, or several of which one is enough.
        listen: far: the endpoint at which near relays are taken, such as `"tcp/0.0.0.0:7447"`, or several.
        scout: look for the other relay by multicast as well; a near relay then needs no `to`.
        config: path of a Zenoh configuration file, for TLS, access control and the rest.
        pattern: near: `"fan-out"`, `"work-queue"` or `"service"`; None: that of the channel, which must exist then.
        remote: near: the channel's name there, if it is another. Only with one `name`.
        transit: near: also relay what another relay has brought to this host. False where each host has a relay to
            each other one: over two ways, a message would arrive twice.
        delivery: near, fan-out: `"all"`, every message; `"latest"`, what the network cannot carry is dropped here;
            `"auto"`: as `"latest"` while all subscribers there are `latest`, else `"all"`.
        user: both relays must name the same; None: the login name.
        window, window_bytes: far: most messages that are sent and not acknowledged, of each near relay, and most bytes
            that wait here for a slot.
        away: far: seconds after which the senders of a near relay that cannot be reached leave the channel.
        slots, max_bytes: far: of the senders here, as for `Publisher`.

    A relay has threads, and Zenoh's: make it after a fork, not before.

    Raises:
        ArgumentError, ArgumentTypeError: an argument, or an endpoint, is not valid.
        DependencyError: Zenoh is not installed; the text says what to install.
        ResourceError: the address is in use, or not this host's; the configuration file is missing.

    >>> import shmtensor
    >>> shmtensor.Relay("camera", to="192.0.2.7")
    Traceback (most recent call last):
    shmtensor.errors.ArgumentError: to='192.0.2.7': an endpoint is PROTOCOL/ADDRESS, like tcp/192.0.2.7:7447
    """

    def __init__(
        self,
        name: str | Sequence[str],
        *,
        to: str | Sequence[str] | None = None,
        listen: str | Sequence[str] | None = None,
        scout: bool = False,
        config: str | os.PathLike[str] | None = None,
        pattern: Literal["fan-out", "work-queue", "service"] | None = None,
        remote: str | None = None,
        transit: bool = True,
        delivery: Literal["auto", "all", "latest"] = "auto",
        user: str | None = None,
        window: int | None = None,
        window_bytes: int | str | None = None,
        away: float | None = None,
        slots: int | None = None,
        max_bytes: int | str | None = None,
    ) -> None:
        self._channels: list[Outbound | Inbound] = []
        self._session: Session | None = None
        self._pid, self._closing = os.getpid(), Closing()
        self.names = [check_channel(each) for each in ([name] if isinstance(name, str) else name)]
        if not self.names or len(set(self.names)) != len(self.names):
            raise ArgumentError(f"name={name!r}: one channel, or several that differ")
        self.is_far = listen is not None
        endpoints = _endpoints(to, "to"), _endpoints(listen, "listen")
        if self.is_far and to is not None:
            raise ArgumentError("to= is for the near relay, listen= for the far one: a relay is one of the two")
        if not self.is_far and not endpoints[0] and not scout:
            raise ArgumentError("a near relay needs to=, a far one listen=, or pass scout=True to look for a far one")
        own: dict[str, object] = {
            "pattern": pattern, "remote": remote, "transit": None if transit is True else transit,
            "delivery": None if delivery == "auto" else delivery,
        }  # fmt: skip
        theirs: dict[str, object] = {
            "window": window, "window_bytes": window_bytes, "away": away, "slots": slots, "max_bytes": max_bytes
        }  # fmt: skip
        for option, value in (own if self.is_far else theirs).items():
            if value is not None:
                raise ArgumentError(
                    f"{option}={value!r} is for the {'near' if self.is_far else 'far'} relay, this is the other one"
                )
        if not isinstance(transit, bool):
            raise ArgumentTypeError(f"transit is True or False, not {transit!r}")
        check_choice("delivery", delivery, ("auto", "all", "latest"))
        if pattern is not None:
            check_choice("pattern", pattern, tuple(PATTERNS))
        if remote is not None:
            check_channel(remote)
            if len(self.names) > 1:
                raise ArgumentError(f"remote={remote!r} names one channel, but name= names {len(self.names)}")
        if user is not None and not isinstance(user, str):
            raise ArgumentTypeError(f"user is a str, not {type(user).__name__}")
        if user is not None and (not user.isprintable() or len(user) > _MOST_USER):
            raise ArgumentError(f"user={user[:_MOST_USER]!r}: a name has at most {_MOST_USER} printable characters")
        who = user_name() if user is None else user
        check_count("window", WINDOW if window is None else window, 1, 1 << 20)
        if slots is not None:
            check_count("slots", slots, 1, MAX_SLOTS)
        if max_bytes is not None:
            parse_bytes(max_bytes, "max_bytes")
        check_timeout(away, "away")
        terms = Terms(
            WINDOW if window is None else window,
            WINDOW_BYTES if window_bytes is None else parse_bytes(window_bytes, "window_bytes"),
            AWAY if away is None else away, slots, max_bytes, who,
        )  # fmt: skip
        check_count("window_bytes", terms.nbytes, 1, MOST_PAYLOAD)
        patterns = [] if self.is_far else [_pattern_of(each, pattern) for each in self.names]
        for each, kind in zip(self.names, patterns, strict=False):
            if kind == SERVICE:
                check_service(each)
                check_service(remote or each)
            if kind != FAN_OUT and delivery != "auto":
                raise ArgumentError(f'delivery={delivery!r} is for a fan-out, channel "{each}" is a {_NAMES[kind]}')

        def begin() -> None:
            open_relays.add(self)
            self._session = session = Session(to=endpoints[0], listen=endpoints[1], scout=scout, config=config)
            channel: Outbound | Inbound
            for number, each in enumerate(self.names):
                if self.is_far:
                    channel = Inbound(session, each, terms)
                else:
                    channel = Outbound(
                        session, each, remote or each, patterns[number], delivery=delivery, user=who, transit=transit
                    )
                if self.is_far:
                    log.info("relay of channel %s listens at %s", each, ", ".join(endpoints[1]))
                self._channels.append(channel)
                channel.start()  # what it begins, `close` ends from here on

        try:
            aside(begin, "shmtensor relay start")
        except BaseException:
            self.close(linger=0)
            raise

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the other relay is there, for every channel.

        Raises:
            WireError: the far relay refuses this one: another version or user, or something is short there, such as
                room in `/dev/shm`. It is asked again later. That the channel there has another pattern shows when the
                first sender comes: then this call raises, and `statistics()` says `"refused"`.
            TimedOut: it did not come within `timeout` seconds.
            ClosedError: this relay is closed.
        """
        check_timeout(timeout)
        self._check()
        deadline = None if timeout is None else time.monotonic() + timeout
        for channel in self._channels:
            channel.wait(deadline)

    def check(self) -> None:
        """Raise `WireError` if a channel can be relayed no more, such as one in device memory; `ClosedError`."""
        self._check()
        for channel in self._channels:
            if channel.state == FAILED:
                raise WireError(f'relay of channel "{channel.name}": {channel.reason}')

    def statistics(self) -> dict[str, RelayStatistics]:
        """Counters of each channel since this relay was made, by its name."""
        found: dict[str, Any] = {}
        for channel in self._channels:
            found[channel.name] = RelayStatistics(
                state=channel.state, messages=channel.messages, nbytes=channel.nbytes,
                acknowledged=channel.acknowledged, in_flight=channel.in_flight,
                resent=getattr(channel, "resent", 0), duplicates=getattr(channel, "duplicates", 0),
                connections=channel.connections, reason=channel.reason, refused=getattr(channel, "refused", 0),
                bad_frames=channel.bad_frames,
            )  # fmt: skip
        return found

    def close(self, linger: float = _LINGER_S) -> None:
        """End the relay. Idempotent.

        Args:
            linger: near: seconds to wait until what is under way is acknowledged. What is not then: of a queue, it goes
                to another consumer, and may be done twice; of a fan-out, it may be missing there. Another call of
                `close` meanwhile, as by a signal handler, ends the waiting. If an exception, as of Ctrl-C, ends this
                call, the relay goes on to its end.
        """
        check_timeout(linger, "linger")
        if self._closing.is_running and self._pid == os.getpid():
            for channel in self._channels:
                channel.stop()
        self._finish(linger)

    def _finish(self, linger: float = _LINGER_S) -> None:
        """As `close`, but another call that lingers goes on. For the end of the program."""
        if not self._closing.is_over and self._pid == os.getpid():
            aside(
                lambda: self._closing.run(lambda: self._end(linger)), "shmtensor relay end", wait=not is_own(),
                complete=False,
            )  # fmt: skip

    def _end(self, linger: float) -> None:
        deadline = time.monotonic() + linger
        for limit in (0.0, deadline) if linger else ():  # first, none of them takes anything more
            for channel in self._channels:
                channel.drain(limit)
        for channel in self._channels:
            channel.stop()
        for channel in self._channels:
            channel.close()
            log.info("relay of channel %s has ended", channel.name)
        if self._session is not None:
            self._session.close()
        open_relays.discard(self)

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise ForkedError(f"this relay belongs to process {self._pid}, which forked this one: make one here")
        if self._closing.is_over:
            raise ClosedError("this relay is closed")

    def _instead(self) -> str:
        return "make a Relay of its own in the other process"

    def __del__(self) -> None:
        """Close the relay, for instance after an interrupted constructor. Not in this thread: a finalizer may run in
        any thread, at any moment."""
        if getattr(self, "_session", None) is not None and not self._closing.is_over and self._pid == os.getpid():
            _dropped.put(self.close)

    def __enter__(self) -> Relay:
        self._check()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        states = ", ".join(f"{channel.name}: {channel.state}" for channel in self._channels)
        return f"<Relay {'far' if self.is_far else 'near'} {'closed' if self._closing.is_over else states}>"


def _endpoints(given: str | Sequence[str] | None, what: str) -> list[str]:
    if given is None:
        return []
    found = [check_endpoint(each, what) for each in ([given] if isinstance(given, str) else given)]
    if not found:
        raise ArgumentError(f"{what}={given!r} names no endpoint")
    return found


def _pattern_of(name: str, pattern: str | None) -> int:
    """The pattern of a channel, as frames name it. Raises `ArgumentError` if it is not known."""
    inspector, until = Inspector(), time.monotonic() + _MAKING_S
    while (info := inspector.channel(name)) is not None and not info.readable and time.monotonic() < until:
        time.sleep(_PAUSE_S)  # it is just being made
    if info is not None and not info.readable:
        raise ArgumentError(f'channel "{name}" cannot be read: {info.notes[0]}')
    exists = info is not None and info.kind != "unknown"  # else nothing but leftovers
    kind = info.kind.replace(" ", "-") if info is not None and exists else None
    if kind is None and pattern is None:
        raise ArgumentError(
            f'channel "{name}" does not exist yet: pass pattern="fan-out", "work-queue" or "service", or start a '
            "member first"
        )
    if kind is not None and kind not in PATTERNS:
        raise ArgumentError(f'channel "{name}" is a {kind}: a relay takes {", ".join(PATTERNS)}')
    if kind is not None and pattern is not None and kind != pattern:
        raise ArgumentError(f'channel "{name}" is a {kind}, not a {pattern}')
    return PATTERNS[kind or pattern or ""]
