"""The commands that look at channels for as long as they run: `shmtensor top`, `hz`, `echo` and `metrics`."""

from __future__ import annotations

import contextlib
import enum
import errno
import fnmatch
import itertools
import operator
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, NamedTuple

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import ConsoleDimensions
from rich.live import Live
from rich.text import Text

from ..channel.info import ChannelInfo, Holding, MemberInfo
from ..channel.inspect import Inspector
from ..codec.outline import as_json as json_of
from ..codec.outline import as_text
from ..errors import DependencyError
from ..metrics import collector
from ..observe.messages import Messages, Seen
from ..observe.rates import NONE, Ends, Rate, Rates, has_newest
from ..options import format_bytes
from .ls import program, user_name
from .output import (
    LONGEST_S,
    Unreadable,
    bytes_per_second,
    console,
    fail,
    guarded,
    named,
    print_json_line,
    seconds,
    signals_interrupt,
    until_interrupted,
    wait_for_channel,
)
from .terminal import Key, Stops, keys_at_once, read_keys

_MARKED_S: Final = 0.5
"""Seconds for which a member is shown as dead, or until the next reading."""
_LOOK_S: Final = 0.4
"""Seconds between two looks for the deaths of processes that cannot be seen to end. With what is above, less than 1."""


class Order(str, enum.Enum):
    """What the channels are sorted by."""

    NAME = "name"
    RATE = "rate"
    BYTES = "bytes"
    DEPTH = "depth"
    OLDEST = "oldest"
    MEMORY = "memory"


@guarded
def top(
    pattern: Annotated[str, typer.Argument(help='Only channels with such names, for example "camera*".')] = "*",
    sort: Annotated[Order, typer.Option(help="What comes first: the largest; or the first name.")] = Order.NAME,
    interval: Annotated[float, typer.Option(help="Seconds between two readings.", min=0.1, max=LONGEST_S)] = 1.0,
    count: Annotated[int, typer.Option(help="End after so many readings; 0: on Ctrl-C.", min=0)] = 0,
    once: Annotated[bool, typer.Option("--once", help="End after one reading: --count 1.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each reading as one line of JSON.")] = False,
) -> None:
    """Show channels and members live: messages and bytes per second, what waits, who holds what, and how old it is.

    Only looks, as ls does. Rates come from two readings, so the first one with rates is shown after an interval. A
    reading comes earlier if a process ends: its members are shown as dead in that one, and are gone in the next, unless
    messages of theirs are still needed. Bytes are estimated by the size of each sender's newest message. On 140 columns
    and more, also what each member has counted since it joined: waits for a slot, sleeps, and so on. Ctrl-C ends it.

    Keys on a terminal: q quits, s sorts by what comes next, up, down, PgUp and PgDn scroll, Ctrl-Z stops it until `fg`.
    """
    if not pattern:
        raise fail("PATTERN is empty, which is no channel's name: leave it out for all channels", 2)
    live = not as_json and not once and not count and sys.stdout.isatty()
    view = View(re.compile(fnmatch.translate(pattern)).match, sort)
    limit = 1 if once else count
    # the first of them gives the terminal back, which a second one must not interrupt
    ending = (signal.SIGTERM, signal.SIGHUP, *((signal.SIGINT,) if live else ()))
    with until_interrupted(), signals_interrupt(*ending), Ends() as ends:
        if live:
            _show_live(view, ends, interval)
        else:
            for reading in _readings(view, ends, interval, limit):
                _print_reading(reading, as_json)


def _readings(view: View, ends: Ends, interval: float, limit: int) -> Iterator[Reading]:
    reading = view.read()
    done = 0
    while not limit or done < limit:
        ends.watch(reading.channels)
        _wait(view, ends, time.monotonic() + reading.pause(interval))
        reading = view.read()
        yield reading
        done += 1


def _wait(view: View, ends: Ends, until: float, also: Collection[int] = ()) -> set[int]:
    """Wait until then, or until a process of a member ends, or one of the descriptors `also` is readable: those."""
    while (left := until - time.monotonic()) > 0:
        ready = ends.wait(min(left, _LOOK_S) if ends.unseen else left, also)
        if ready or (ends.unseen and view.lacks(ends.unseen)):
            return ready.intersection(also)
    return set()


def _print_reading(reading: Reading, as_json: bool) -> None:
    if as_json:
        print_json_line(as_dict(reading))
        return
    out = console()
    out.print(Text("\n").join(lines(reading, out.width)), soft_wrap=True)  # one call for all: each costs 60 µs
    out.print()


def _show_live(view: View, ends: Ends, interval: float) -> None:
    out = console()
    screen = _Screen(view.read(), view)
    with Stops() as stops:
        while True:
            with contextlib.ExitStack() as stack:
                keys = stack.enter_context(keys_at_once())
                live = Live(Text(), console=out, screen=True, auto_refresh=False)
                stack.callback(live.stop)  # also of one that is interrupted while it starts
                stack.enter_context(live)
                if not _follow(screen, ends, interval, live, keys, stops.fd):
                    return
            stops.stop()
            screen.reading = view.read()


def _follow(screen: _Screen, ends: Ends, interval: float, live: Live, keys: int | None, stops: int) -> bool:
    """Show one reading after the other, until somebody quits, or stops it: whether it is to go on."""
    also = [stops] if keys is None else [stops, keys]
    while True:
        ends.watch(screen.reading.channels)
        due = time.monotonic() + screen.reading.pause(interval)
        while True:
            live.update(screen.text(live.console.size, keys is not None), refresh=True)
            ready = _wait(screen.view, ends, due, also)
            if stops in ready:
                return True
            if keys not in ready:
                break
            for key in read_keys(keys):
                if key is Key.QUIT:
                    return False
                screen.press(key, live.console.height)
        screen.reading = screen.view.read()


class _Screen:
    """Which lines of a reading are shown, below the headings."""

    def __init__(self, reading: Reading, view: View) -> None:
        self.reading, self.view = reading, view
        self._first = 0

    def press(self, key: Key, height: int) -> None:
        """Sort by what comes next, or scroll."""
        if key is Key.SORT:
            orders = list(Order)
            self.view.order = orders[(orders.index(self.view.order) + 1) % len(orders)]
            self.reading = self.reading.by(self.view.order)
            self._first = 0
        else:
            page = max(1, height - 2)
            self._first += {Key.UP: -1, Key.DOWN: 1, Key.PAGE_UP: -page, Key.PAGE_DOWN: page}[key]

    def text(self, size: ConsoleDimensions, has_keys: bool) -> Text:
        heading, *found = lines(self.reading, size.width)
        if not has_keys and len(found) < size.height:
            return Text("\n").join([heading, *found])
        room = max(1, size.height - 2)
        first = self._first = max(0, min(self._first, len(found) - room))
        shown, rest = found[first : first + room], len(found) - room
        if has_keys:
            where = f"lines {first + 1} to {first + room} of {len(found)} (up, down, PgUp, PgDn)  " if rest > 0 else ""
            note = f"by {self.view.order.value} (s)  {where}quit (q)"
        else:
            note = f"... {rest} more lines: name a PATTERN, or sort"
        blank = [Text()] * (room - len(shown))
        return Text("\n").join([heading, *shown, *blank, Text(_cut(note, size.width), style="dim")])


@dataclass(frozen=True)
class Reading:
    """What is shown at one moment."""

    at: float
    """Unix time."""
    channels: list[ChannelInfo]
    """Sorted, without the dead that were shown before."""
    rates: Rates
    has_news_of_deaths: bool
    watched: float
    """Seconds since the first reading: what was held then may have been held for longer."""

    def pause(self, interval: float) -> float:
        """Seconds until the next reading: shorter if there are dead to be removed."""
        return min(interval, _MARKED_S) if self.has_news_of_deaths else interval

    def by(self, order: Order) -> Reading:
        """The same, in this order; channels that are alike in it by name."""
        channels = sorted(self.channels, key=lambda it: it.name)
        if (key := _KEYS.get(order)) is not None:
            channels.sort(key=lambda it: -key(it, self.rates.of_channel(it) or NONE))
        return replace(self, channels=channels)


_KEYS: Final[dict[Order, Callable[[ChannelInfo, Rate], float]]] = {
    Order.RATE: lambda channel, rate: rate.messages,
    Order.BYTES: lambda channel, rate: rate.nbytes,
    Order.DEPTH: lambda channel, rate: channel.depth,
    Order.OLDEST: lambda channel, rate: channel.oldest_unread,
    Order.MEMORY: lambda channel, rate: channel.nbytes,
}


class View:
    """Reads again and again."""

    def __init__(self, wanted: Callable[[str], object], order: Order) -> None:
        self._inspector, self._rates, self._wanted, self.order = Inspector(), Rates(), wanted, order
        self._dead: set[int] = set()
        self._first: float | None = None

    def read(self) -> Reading:
        """The next reading."""
        began = time.monotonic()
        found = self._inspector.channels(self._wanted)
        now = time.monotonic()
        self._first = now if self._first is None else self._first
        self._rates.update(found, now)
        channels = [left for channel in found if (left := self._without_the_dead(channel)) is not None]
        before, self._dead = self._dead, {it.uid for each in found for it in each.members if not it.alive}
        return Reading(
            time.time(), channels, self._rates, bool(self._dead - before), max(0.0, began - self._first)
        ).by(self.order)  # fmt: skip

    def lacks(self, uids: set[int]) -> bool:
        """Whether one of these members does not live now. Only looks: the next reading is as if this had not been."""
        found = self._inspector.channels(self._wanted)
        return not uids <= {it.uid for channel in found for it in channel.members if it.alive}

    def _without_the_dead(self, channel: ChannelInfo) -> ChannelInfo | None:
        """The channel without members that were shown as dead before; None if no member is left."""
        if not channel.readable:
            return channel
        gone = self._dead and {
            it.uid for it in channel.members if it.uid in self._dead and not any(r.slots_used for r in it.rings)
        }
        if gone:
            members = tuple(it for it in channel.members if it.uid not in gone)
            holdings = tuple(it for it in channel.holdings if it.uid not in gone)
            channel = replace(channel, members=members, holdings=holdings)
        return channel if channel.members else None


def as_dict(reading: Reading) -> dict[str, Any]:
    """The JSON form of a reading: times in seconds, sizes in bytes, uids as 16 hex digits, unknown rates as null."""
    return {
        "time": reading.at,
        "channels": [_channel_dict(channel, reading.rates) for channel in reading.channels],
    }


def _channel_dict(channel: ChannelInfo, rates: Rates) -> dict[str, Any]:
    rate = rates.of_channel(channel)
    holdings: dict[int, list[dict[str, Any]]] = {}
    for it in channel.holdings:
        found = {
            "how": it.how, "messages": it.messages, "bytes": it.nbytes, "oldest": it.oldest, "held": it.held,
            "group": it.group or None,
        }  # fmt: skip
        holdings.setdefault(it.uid, []).append(found)
    members, living = [], 0
    for member in channel.members:
        members.append(_member_dict(member, rates.of(member), holdings.get(member.uid, [])))
        living += member.alive
    return {
        "name": channel.name, "kind": channel.kind, "service": channel.service or None,
        "user": user_name(channel.owner), "living": living if channel.readable else None,
        "messages_per_second": None if rate is None else rate.messages,
        "bytes_per_second": None if rate is None else rate.nbytes,
        "depth": channel.depth, "oldest_unread": channel.oldest_unread, "bytes": channel.nbytes,
        "members": members, "holds": holdings.get(0, []),
        "notes": list(channel.notes),
    }  # fmt: skip


def _member_dict(it: MemberInfo, rate: Rate | None, holds: list[dict[str, Any]]) -> dict[str, Any]:
    """Each field by its name, since `top` makes many of these: merging parts takes twice as long."""
    takes_all = it.delivery == "all"
    return {
        "uid": f"{it.uid:016x}", "role": it.role, "delivery": it.delivery or None, "group": it.group or None,
        "pid": it.pid, "host_pid": it.host_pid or None, "process": it.process or None, "label": it.label or None,
        "alive": it.alive, "stopped": it.stopped,
        "messages_per_second": None if rate is None else rate.messages,
        "bytes_per_second": None if rate is None or it.role != "sender" else rate.nbytes,
        "published": it.published, "received": it.received if takes_all else None,
        "unread": it.unread if takes_all else None, "oldest_unread": it.oldest_unread if takes_all else None,
        "waits": it.waits, "dropped": it.dropped, "sleeps": it.sleeps, "late": it.late, "missed": it.missed,
        "redelivered": it.redelivered, "holds": holds,
    }  # fmt: skip


# --- as text

_NUMBERS: Final = (6, 7, 6, 7)
_HEADINGS: Final = ("msg/s", "bytes/s", "depth", "oldest")
_WIDE: Final = 140
"""Columns from which on there is one for what members have counted, of `_COUNTED` characters."""
_COUNTED: Final = 18
_HELD: Final = 16
"""Columns, at least, of the last one: `1 claimed >5.0 s`."""
_FREE: Final = ("waiting", "abandoned")
"""How messages are held that the next receiver takes."""
_BY_WEIGHT: Final = ("dropped", "missed", "redelivered", "late", "waits", "sleeps")


def lines(reading: Reading, width: int) -> list[Text]:
    """The reading as lines of at most `width` columns."""
    counted = _COUNTED if width >= _WIDE else 0
    rows = [row for channel in reading.channels for row in _channel_rows(channel, reading)]
    rest = max(2 * _HELD, width - sum(each + 1 for each in _NUMBERS) - 2 - (counted + 2 if counted else 0))
    most = rest - max(_HELD, rest // 3)
    first = min(most, max((cell_len(row.name) for row in rows if row.cells is not None), default=0))
    first = max(first, cell_len("channel"))
    columns = _Columns(width, first, counted, rest - first)
    found = [columns.line(_Row("channel", _HEADINGS, "counted", "held", "dim"))]
    found += [columns.line(row) for row in rows]
    if not rows:
        found.append(Text("no channels"))
    return found


class _Row(NamedTuple):
    name: str
    cells: tuple[str, ...] | None
    """None: the name takes the whole line."""
    counted: str = ""
    held: str = ""
    style: str = ""


@dataclass(frozen=True)
class _Columns:
    width: int
    first: int
    counted: int
    """0: no such column."""
    last: int

    def line(self, row: _Row) -> Text:
        if row.cells is None:
            return Text(_cut(row.name, self.width), style=row.style)
        free = len(list(itertools.takewhile(operator.not_, row.cells)))  # the name may take those, too
        first = self.first + sum(1 + size for size in _NUMBERS[:free])
        cells = [set_cell_size(_cut(row.name, first), first)]
        numbers = list(zip(row.cells, _NUMBERS, strict=True))[free:]
        cells += [_cut(text, size).rjust(size) for text, size in numbers]
        if self.counted:
            cells += ["", _cut(row.counted, self.counted).ljust(self.counted)]
        whole = " ".join([*cells, "", _cut(row.held, self.last)])
        return Text(set_cell_size(whole, min(self.width, cell_len(whole))).rstrip(), style=row.style)


def _cut(text: str, width: int) -> str:
    """A text of at most so many columns of a terminal, of which some characters take two."""
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def _channel_rows(channel: ChannelInfo, reading: Reading) -> Iterator[_Row]:
    rates, watched = reading.rates, reading.watched
    if not channel.readable:
        why = channel.notes[0] if channel.notes else "cannot be read"
        yield _Row(f"{channel.name}: {why}", None, style="yellow")
        return
    waiting = _waiting_cells(channel.depth, channel.oldest_unread)
    yield _Row(
        f"{channel.name} ({channel.kind})", (*_rate_cells(rates.of_channel(channel)), *waiting), "",
        _holdings_text([it for it in channel.holdings if not it.uid], watched, waiting), "bold",
    )  # fmt: skip
    for member in channel.members:
        arrow = {"sender": ">", "receiver": "<"}.get(member.role, "o")
        life = (
            " stopped"
            if member.stopped
            else ""
            if member.alive
            else " closed"
            if member.role == "sender" and member.leaving
            else " dead"
        )
        # that of a sender behind a relay, which has no label of its own, begins with a blank
        parts = (member.process, _delivery(member), member.label.strip())
        held = [it for it in channel.holdings if it.uid == member.uid and it.uid]
        yield _Row(
            " ".join([f" {arrow} {member.pid}{life}", *filter(None, parts)]),
            (*_rate_cells(rates.of(member)), *_waiting_cells(member.unread, member.oldest_unread)),
            _counted_text(member), _holdings_text([it for it in held if it.how != "unread"], watched),
            "" if member.alive and not member.stopped else "red",
        )  # fmt: skip


def _delivery(member: MemberInfo) -> str:
    """What a subscriber gets, unless it is everything."""
    return f"[{member.group}]" if member.group else "latest" if member.delivery == "latest" else ""


def _rate_cells(rate: Rate | None) -> tuple[str, str]:
    if rate is None:
        return "", ""
    number = f"{rate.messages:.1f}" if rate.messages < 9_999 else _short(round(rate.messages))
    return number, bytes_per_second(rate.nbytes).removesuffix("/s") if rate.nbytes else ""


def _waiting_cells(messages: int, oldest: float) -> tuple[str, str]:
    return (_short(messages), seconds(oldest)) if messages else ("", "")


def _short(number: int) -> str:
    return str(number) if number < 1_000_000 else f"{number // 1000}k"


def _counted_text(member: MemberInfo) -> str:
    counted = [(name, getattr(member, name)) for name in _BY_WEIGHT]
    return ", ".join(f"{count} {name}" for name, count in counted if count)


def _holdings_text(holdings: list[Holding], watched: float, waiting: tuple[str, str] = ("", "")) -> str:
    """Who holds what. `waiting`: the number and the time in the row; of what nobody has they are not said again, but
    of a group, for each has its own."""
    free = [(it, _waiting_cells(it.messages, it.oldest)) for it in holdings if it.how in _FREE]
    said = free[0][0] if len(free) == 1 and free[0][1] == waiting and not free[0][0].group else None
    return ", ".join(
        f"{f'{it.group}: ' if it.group else ''}"
        f"{it.how if it is said else f'{it.messages} {it.how} {_time_of(it, watched)}'} {format_bytes(it.nbytes)}"
        for it in holdings
    )


def _time_of(it: Holding, watched: float) -> str:
    """How long one of them has been held; of what no member holds, how long the oldest waits."""
    if not it.uid and not it.pid:
        return seconds(it.oldest)
    return (">" if it.held >= watched else "") + seconds(it.held)


class _Point(NamedTuple):
    at: float
    published: int
    nbytes: int | None
    """Of the newest message; None if it is not known."""


class Windows:
    """What each sender had published in the readings of the last seconds."""

    def __init__(self, length: float) -> None:
        self._length = length
        self._points: dict[int, deque[_Point]] = {}

    def add(self, channel: ChannelInfo, now: float) -> None:
        """Add a reading that was made at `now`; senders that are gone are forgotten."""
        senders = {member.uid: member for member in channel.members if member.role == "sender"}
        for uid in self._points.keys() - senders:
            del self._points[uid]
        for uid, member in senders.items():
            points = self._points.setdefault(uid, deque())
            points.append(_Point(now, member.published, member.newest_bytes if has_newest(member) else None))
            while len(points) > 2 and points[1].at <= now - self._length:
                points.popleft()

    def rate(self, member: MemberInfo) -> tuple[float, float] | None:
        """Messages and bytes per second over the window; None before the second reading of this sender."""
        points = self._points.get(member.uid)
        if not points or len(points) < 2 or points[-1].at <= points[0].at:
            return None
        each = (points[-1].published - points[0].published) / (points[-1].at - points[0].at)
        sizes = [point.nbytes for point in points if point.nbytes is not None]
        return each, each * sum(sizes) / len(sizes) if sizes else 0.0


@guarded
def hz(
    channel: Annotated[str, typer.Argument(metavar="NAME", help="The channel.")],
    window: Annotated[float, typer.Option(help="Seconds over which rates are averaged.", min=0.1)] = 10.0,
    interval: Annotated[float, typer.Option(help="Seconds between two lines.", min=0.1, max=LONGEST_S)] = 1.0,
    count: Annotated[int, typer.Option(help="End after so many readings; 0: on Ctrl-C.", min=0)] = 0,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds to wait for the channel; by default without limit.", min=0.0)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each reading as one line of JSON.")] = False,
) -> None:
    """Print how many messages each sender of a channel sends per second, over a window, every second.

    Only looks: it joins no channel, so that a sender without receivers is measured as well. Bytes are estimated by the
    sizes of each sender's newest messages. Waits for a channel that does not exist yet, or that has ended. Ctrl-C ends
    it; exit code 1 if there is no channel in time, or it cannot be read.
    """
    named(channel)
    with until_interrupted():
        _watch_rates(channel, Windows(window), interval, count, timeout, as_json)


def _watch_rates(
    channel: str, windows: Windows, interval: float, count: int, timeout: float | None, as_json: bool
) -> None:
    inspector, unreadable, done = Inspector(), Unreadable(), -1
    while not count or done < count:
        wait_for_channel(channel, timeout)
        info = inspector.channel(channel)
        if info is None or not info.readable:
            why = "it has just ended, or there is something else under its name" if info is None else info.notes[0]
            unreadable.again(channel, why)
            continue
        unreadable.over()
        windows.add(info, time.monotonic())
        done += 1
        if done:
            _print_rates(info, windows, as_json)
        if not count or done < count:
            time.sleep(interval)


def _print_rates(info: ChannelInfo, windows: Windows, as_json: bool) -> None:
    senders = [member for member in info.members if member.role == "sender"]
    if as_json:
        print_json_line(
            {
                "time": time.time(),
                "channel": info.name,
                "senders": [_sender_dict(it, windows.rate(it)) for it in senders],
            }
        )
        return
    out = console()
    if not senders:
        out.print(f'channel "{info.name}" has no sender')
    for member in senders:
        rate = windows.rate(member)
        measured = "measuring" if rate is None else f"{rate[0]:.2f} msg/s  {bytes_per_second(rate[1])}"
        newest = f"  newest {seconds(member.newest_age)} ago" if member.newest_age else ""
        who = f"{member.pid} {program(member)}".strip() + ("" if member.alive else " (dead or closed)")
        out.print(f"{who}  {measured}  {member.published} sent{newest}", soft_wrap=True, markup=False)


def _sender_dict(member: MemberInfo, rate: tuple[float, float] | None) -> dict[str, Any]:
    return {
        "uid": f"{member.uid:016x}", "pid": member.pid, "process": member.process or None,
        "label": member.label or None, "alive": member.alive,
        "messages_per_second": None if rate is None else rate[0], "bytes_per_second": None if rate is None else rate[1],
        "published": member.published, "newest_bytes": member.newest_bytes, "newest_age": member.newest_age,
    }  # fmt: skip


_LEAST_PAUSE_S: Final = 0.001
_MOST_PAUSE_S: Final = 0.02
_PAUSE: Final = 1 / 8
"""`echo` waits for this part of the time since it has found a message: it looks often enough for a stream of any
steady rate up to 1 kHz, and of what is silent seldom."""


@guarded
def echo(
    channel: Annotated[str, typer.Argument(metavar="NAME", help="The channel.")],
    count: Annotated[int, typer.Option(help="End after so many messages; 0: on Ctrl-C.", min=0)] = 0,
    digest: Annotated[bool, typer.Option(help="Read the whole payload for a digest, or leave it alone.")] = True,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds to wait for the channel; by default without limit.", min=0.0)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each message as one line of JSON.")] = False,
) -> None:
    """Print the messages of a channel: structure, dtypes, shapes, scalars, meta, and a digest of the bytes.

    First those that are still needed, then each new one that can be read before its slot is used again; it says how
    many it missed. It joins no channel: nothing is taken from a work queue, and no sender waits. What was overwritten
    while it was read is not printed. The digest (xxh3, 64 bits) and the values of NumPy scalars are left out if the
    payload may have been written to meanwhile. Ctrl-C ends it; exit code 1 if there is no channel in time, or it cannot
    be read.
    """
    named(channel)
    with until_interrupted(), contextlib.closing(_messages(channel, digest, timeout)) as messages:
        for seen in itertools.islice(messages, count or None):
            _print_message(channel, seen, as_json)


def _messages(channel: str, digest: bool, timeout: float | None) -> Generator[Seen]:
    """The messages of a channel, and of the next one of its name when it has ended. (What printing them raises does not
    come here: it is not about the channel.)"""
    unreadable = Unreadable()
    while True:
        wait_for_channel(channel, timeout)
        try:
            with Messages(channel, digests=digest) as messages:
                unreadable.over()
                yield from _until_ended(messages)
        except FileNotFoundError:
            continue  # it has just ended, or is just being made
        except (OSError, ValueError) as error:
            unreadable.again(channel, error)


def _until_ended(messages: Messages) -> Generator[Seen]:
    last, newest = False, 0.0
    while not last:
        last = messages.ended  # what was sent before that is read once more
        found = messages.new()
        yield from found
        now = time.monotonic()
        if found:
            newest = now
        else:
            time.sleep(min(_MOST_PAUSE_S, max(_LEAST_PAUSE_S, _PAUSE * (now - newest))))


def _print_message(channel: str, seen: Seen, as_json: bool) -> None:
    age = max(0.0, (time.monotonic_ns() - seen.sent_ns) / 1e9)
    if as_json:
        print_json_line(_message_dict(channel, seen, age))
        return
    parts = [f"#{seen.seq} of {seen.pid}", f"{seconds(age)} ago", format_bytes(seen.nbytes)]
    if seen.digest is not None:
        parts.append(seen.digest)
    parts.append(as_text(seen.value))
    if seen.meta is not None:
        parts.append(f"meta {as_text(seen.meta)}")
    out = console()
    if seen.missed:
        out.print(f"{seen.missed} before the next one missed", style="dim")
    out.print("  ".join(parts), soft_wrap=True, markup=False)


def _message_dict(channel: str, seen: Seen, age: float) -> dict[str, Any]:
    return {
        "channel": channel,
        "sender": f"{seen.sender:016x}",
        "pid": seen.pid,
        "seq": seen.seq,
        "time": time.time() - age,
        "bytes": seen.nbytes,
        "value": json_of(seen.value),
        "meta": json_of(seen.meta),
        "digest": seen.digest,
        "missed": seen.missed,
    }


class _Impatient:
    """A handler of requests with this base class gives up a connection on which nothing comes."""

    timeout = 10.0
    """Seconds."""

    def handle(self) -> None:
        with contextlib.suppress(TimeoutError):
            super().handle()  # type: ignore[misc]


@guarded
def metrics(
    port: Annotated[int, typer.Option(help="Port to listen at; 0: any that is free.", min=0, max=65535)] = 9464,
    address: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    pattern: Annotated[str, typer.Argument(help='Only channels with such names, for example "camera*".')] = "*",
) -> None:
    """Serve the metrics of all channels and services of this machine at http://ADDRESS:PORT/metrics.

    In the formats of Prometheus and OpenMetrics. Each request reads shared memory anew: a process that has died is gone
    from the next scrape. Joins no channel. SIGTERM and Ctrl-C end it. Needs prometheus_client (pip
    install '.[metrics]' in a checkout).
    """
    found = collector(pattern)
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise DependencyError(str(error), name="prometheus_client") from None
    registry = CollectorRegistry()
    registry.register(found)

    def where(port: int) -> str:
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        server, thread = start_http_server(port, address, registry)
    except OSError as error:
        remedy = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--address"
        raise fail(f"cannot listen at {where(port)}: {error.strerror or error}: choose another {remedy}") from None
    handler: Any = server.RequestHandlerClass
    server.RequestHandlerClass = type("Handler", (_Impatient, handler), {})
    try:
        with until_interrupted():
            url = f"http://{where(server.server_port)}/metrics"
            console(stderr=True).print(f"metrics at {url}", soft_wrap=True, markup=False)
            ended.wait()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
