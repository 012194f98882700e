"""`shmtensor top`: channels and members live, on a terminal with keys and Ctrl-Z."""

from __future__ import annotations

import contextlib
import enum
import fnmatch
import itertools
import operator
import os
import re
import signal
import sys
import termios
import textwrap
import time
import tty
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, NamedTuple

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import ConsoleDimensions
from rich.live import Live
from rich.text import Text

from ..channel.cleanup import channels as names_of_channels
from ..channel.info import ChannelInfo, Holding, MemberInfo
from ..channel.inspect import Inspector
from ..observe.rates import NONE, Ends, Rate, Rates
from ..options import format_bytes
from .channels import listed, user_name
from .output import (
    LONGEST_S,
    bytes_per_second,
    console,
    fail,
    guarded,
    print_json_line,
    seconds,
    signals_interrupt,
    until_interrupted,
)

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
    pattern: Annotated[str, typer.Argument(help='A pattern for the names of channels, for example "camera*".')] = "*",
    sort: Annotated[Order, typer.Option(help="The sort order: the largest first; names alphabetically.")] = Order.NAME,
    interval: Annotated[float, typer.Option(help="Seconds between two readings.", min=0.1, max=LONGEST_S)] = 1.0,
    count: Annotated[int, typer.Option(help="End after so many readings; 0: on Ctrl-C.", min=0)] = 0,
    once: Annotated[bool, typer.Option("--once", help="End after one reading: --count 1.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each reading as one line of JSON.")] = False,
) -> None:
    """Show channels and members live: messages and bytes per second, what waits, who holds what, and how old it is.

    It joins no channel and changes nothing. Rates need two readings, so they are shown after the first interval. If a
    process ends, the next reading is made at once: its members are shown as dead, and removed in the reading after
    that, unless their messages are still needed. Bytes are estimated by the size of each sender's newest message. On
    140 columns and more, each member's counters since it joined are shown: waits for a slot, sleeps, and so on. Ctrl-C
    ends it.

    Keys on a terminal: q quits, s switches the sort order, up, down, PgUp and PgDn scroll, Ctrl-Z suspends it.
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
    others: Sequence[str] = ()
    """Names of the channels that are not wanted, if none is that would be."""

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
            time.time(), channels, self._rates, bool(self._dead - before), max(0.0, began - self._first),
            () if found else names_of_channels(),
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
        text = f"no channel has such a name: there {listed(reading.others)}" if reading.others else "no channels"
        found += map(Text, textwrap.wrap(text, width))
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
    """Text of who holds what. `waiting`: the number and the time in the row; for messages that no member holds they are
    not repeated, but of a group, for each has its own."""
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


# --- the terminal


class Key(enum.Enum):
    """What a key is for."""

    QUIT = enum.auto()
    SORT = enum.auto()
    UP = enum.auto()
    DOWN = enum.auto()
    PAGE_UP = enum.auto()
    PAGE_DOWN = enum.auto()


_TYPED_AS: Final = {
    b"q": Key.QUIT, b"s": Key.SORT, b"\x1b[A": Key.UP, b"\x1bOA": Key.UP, b"\x1b[B": Key.DOWN, b"\x1bOB": Key.DOWN,
    b"\x1b[5~": Key.PAGE_UP, b"\x1b[6~": Key.PAGE_DOWN,
}  # fmt: skip
_SEQUENCE: Final = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)


@contextlib.contextmanager
def keys_at_once() -> Iterator[int | None]:
    """Within, keys come when they are pressed, from this descriptor, and are not echoed. None if there are none: stdin
    or stdout is no terminal. Signals (Ctrl-C, Ctrl-Z) stay."""
    if sys.stdin is None or not sys.stdin.isatty() or not sys.stdout.isatty():
        yield None
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def restore() -> None:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(fd, termios.TCSADRAIN, before)

    with contextlib.ExitStack() as stack:
        stack.callback(restore)
        stack.callback(restore)  # a signal may end one of them
        tty.setcbreak(fd, termios.TCSADRAIN)  # in the background this stops the process until it is in the foreground
        yield fd


def read_keys(fd: int) -> list[Key]:
    """The keys that were pressed; those that mean nothing are left out."""
    try:
        typed = os.read(fd, 1024)
    except OSError:
        typed = b""
    if not typed:  # the terminal is gone
        return [Key.QUIT]
    return [key for each in _SEQUENCE.findall(typed) if (key := _TYPED_AS.get(each)) is not None]


class Stops:
    """Within, Ctrl-Z (SIGTSTP) makes `fd` readable in place of stopping the process, for `stop` to do it in time.

    Where it is ignored, it stays so.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._before = signal.getsignal(signal.SIGTSTP)

    def __enter__(self) -> Stops:
        self._handle()
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTSTP, self._before)
        os.close(self.fd)

    def _handle(self) -> None:
        if self._before != signal.SIG_IGN:
            signal.signal(signal.SIGTSTP, lambda *_: os.eventfd_write(self.fd, 1))

    def stop(self) -> None:
        """Stop as Ctrl-Z does by default; returns when the process goes on."""
        os.eventfd_read(self.fd)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        try:
            signal.raise_signal(signal.SIGTSTP)
        finally:
            self._handle()
