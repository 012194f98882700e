"""`shmtensor top`: channels and their members, live."""

from __future__ import annotations

import enum
import fnmatch
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

import typer
from rich.live import Live
from rich.text import Text

from ..channel.info import ChannelInfo, Holding, MemberInfo
from ..channel.inspect import COUNTERS, Inspector
from ..observe.ends import Ends
from ..observe.rates import NONE, Rate, Rates
from ..options import format_bytes
from .ls import program, taken_dict, user_name
from .output import bytes_per_second, console, guarded, print_json_line, seconds, until_interrupted

_MARKED_S: Final = 0.5
"""Seconds for which a member is shown as dead, or until the next reading."""


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
    interval: Annotated[float, typer.Option(help="Seconds between two readings.", min=0.1)] = 1.0,
    count: Annotated[int, typer.Option(help="End after so many readings; 0: on Ctrl-C.", min=0)] = 0,
    once: Annotated[bool, typer.Option("--once", help="End after one reading: --count 1.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each reading as one line of JSON.")] = False,
) -> None:
    """Show channels and members live: messages and bytes per second, what waits, who holds what, and how old it is.

    Only looks, as ls does. Rates come from two readings, so the first one with rates is shown after an interval. A
    reading comes earlier if a process ends: its members are shown as dead in that one, and are gone in the next, unless
    messages of theirs are still needed. Bytes are estimated by the size of each sender's newest message. On 140 columns
    and more, also what each member has counted since it joined: waits for a slot, sleeps, and so on. Ctrl-C ends it.
    """
    live = not as_json and not once and not count and sys.stdout.isatty()
    view = View(lambda name: fnmatch.fnmatchcase(name, pattern), sort)
    limit = 1 if once else count
    with until_interrupted(), Ends() as ends:
        if live:
            _show_live(view, ends, interval)
        else:
            for reading in _readings(view, ends, interval, limit):
                _print(reading, as_json)


def _readings(view: View, ends: Ends, interval: float, limit: int) -> Iterator[Reading]:
    reading = view.read()
    ends.watch(reading.channels)
    done = 0
    while not limit or done < limit:
        ends.wait(reading.pause(interval))
        reading = view.read()
        ends.watch(reading.channels)
        yield reading
        done += 1


def _print(reading: Reading, as_json: bool) -> None:
    if as_json:
        print_json_line(as_dict(reading))
        return
    out = console()
    for line in lines(reading, out.width):
        out.print(line, soft_wrap=True)
    out.print()


def _show_live(view: View, ends: Ends, interval: float) -> None:
    out = console()

    def screen(reading: Reading) -> Text:
        shown = lines(reading, out.width)
        if len(shown) > out.height:
            rest = len(shown) - out.height + 1
            shown = [*shown[: out.height - 1], Text(f"... {rest} more lines: name a PATTERN, or sort", style="dim")]
        return Text("\n").join(shown)

    reading = view.read()
    with Live(screen(reading), console=out, screen=True, auto_refresh=False) as live:
        while True:
            ends.watch(reading.channels)
            ends.wait(reading.pause(interval))
            reading = view.read()
            live.update(screen(reading), refresh=True)


@dataclass(frozen=True)
class Reading:
    """What is shown at one moment."""

    at: float
    """Unix time."""
    channels: list[ChannelInfo]
    """Sorted, without the dead that were shown before."""
    rates: Rates
    has_news_of_deaths: bool

    def pause(self, interval: float) -> float:
        """Seconds until the next reading: shorter if there are dead to be removed."""
        return min(interval, _MARKED_S) if self.has_news_of_deaths else interval


_KEYS: Final[dict[Order, Callable[[ChannelInfo, Rate], float]]] = {
    Order.RATE: lambda channel, rate: rate.messages,
    Order.BYTES: lambda channel, rate: rate.nbytes,
    Order.DEPTH: lambda channel, rate: channel.depth,
    Order.OLDEST: lambda channel, rate: channel.oldest_unread,
    Order.MEMORY: lambda channel, rate: channel.nbytes,
}


class View:
    """Reads again and again."""

    def __init__(self, wanted: Callable[[str], bool], sort: Order) -> None:
        self._inspector, self._rates, self._wanted, self._sort = Inspector(), Rates(), wanted, sort
        self._dead: set[int] = set()

    def read(self) -> Reading:
        """The next reading."""
        found = self._inspector.channels(self._wanted)
        self._rates.update(found, time.monotonic())
        channels = [left for channel in found if (left := self._without_the_dead(channel)) is not None]
        before, self._dead = self._dead, {it.uid for each in found for it in each.members if not it.alive}
        key = _KEYS.get(self._sort)
        if key is not None:
            channels.sort(key=lambda channel: -key(channel, self._rates.of_channel(channel) or NONE))
        return Reading(time.time(), channels, self._rates, bool(self._dead - before))

    def _without_the_dead(self, channel: ChannelInfo) -> ChannelInfo | None:
        """The channel without members that were shown as dead before; None if no member is left."""
        if not channel.readable:
            return channel
        gone = {it.uid for it in channel.members if it.uid in self._dead and not any(r.slots_used for r in it.rings)}
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
    holdings: dict[int, list[dict[str, Any]]] = {}
    for it in channel.holdings:
        found = {"how": it.how, "messages": it.messages, "bytes": it.nbytes, "oldest": it.oldest}
        holdings.setdefault(it.uid, []).append(found)
    return {
        "name": channel.name, "kind": channel.kind, "service": channel.service or None,
        "user": user_name(channel.owner), "living": channel.living if channel.readable else None,
        **_rate_dict(rates.of_channel(channel)), "depth": channel.depth, "oldest_unread": channel.oldest_unread,
        "bytes": channel.nbytes,
        "members": [
            {
                "uid": f"{it.uid:016x}", "role": it.role, "delivery": it.delivery or None,
                "group": it.group or None, "pid": it.pid,
                "host_pid": it.host_pid or None, "process": it.process or None,
                "label": it.label or None, "alive": it.alive,
                "stopped": it.stopped, **_rate_dict(rates.of(it), has_bytes=it.role == "sender"),
                "published": it.published, **taken_dict(it), **{name: getattr(it, name) for name in COUNTERS},
                "holds": holdings.get(it.uid, []),
            }
            for it in channel.members
        ],
        "holds": holdings.get(0, []),
        "notes": list(channel.notes),
    }  # fmt: skip


def _rate_dict(rate: Rate | None, *, has_bytes: bool = True) -> dict[str, float | None]:
    return {
        "messages_per_second": None if rate is None else rate.messages,
        "bytes_per_second": rate.nbytes if rate is not None and has_bytes else None,
    }


# --- as text

_NUMBERS: Final = (9, 10, 7, 8)
_HEADINGS: Final = ("msg/s", "bytes/s", "depth", "oldest")
_WIDE: Final = 140
"""Columns from which on there is one for what members have counted, of `_COUNTED` characters."""
_COUNTED: Final = 18
_BY_WEIGHT: Final = ("dropped", "missed", "redelivered", "late", "waits", "sleeps")


def lines(reading: Reading, width: int) -> list[Text]:
    """The reading as lines of at most `width` columns."""
    numbers = sum(each + 1 for each in _NUMBERS)
    counted = _COUNTED if width >= _WIDE else 0
    rest = max(24, width - numbers - 2)
    first = max(16, rest * 11 // 20)
    columns = _Columns(width, first, counted, rest - first - (counted + 2 if counted else 0))
    found = [columns.line("channel", _HEADINGS, "counted", "held", "dim")]
    for channel in reading.channels:
        found += _channel_lines(columns, channel, reading.rates)
    if not reading.channels:
        found.append(Text("no channels"))
    return found


@dataclass(frozen=True)
class _Columns:
    width: int
    first: int
    counted: int
    """0: no such column."""
    last: int

    def line(self, name: str, numbers: tuple[str, ...], counted: str, held: str, style: str = "") -> Text:
        cells = [_cut(name, self.first).ljust(self.first)]
        cells += [_cut(text, size).rjust(size) for text, size in zip(numbers, _NUMBERS, strict=True)]
        if self.counted:
            cells += ["", _cut(counted, self.counted).ljust(self.counted)]
        return Text(" ".join([*cells, "", _cut(held, self.last)])[: self.width].rstrip(), style=style)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _channel_lines(columns: _Columns, channel: ChannelInfo, rates: Rates) -> Iterator[Text]:
    if not channel.readable:
        why = channel.notes[0] if channel.notes else "cannot be read"
        yield Text(_cut(f"{channel.name}: {why}", columns.width), style="yellow")
        return
    nobody = [it for it in channel.holdings if not it.uid]
    yield columns.line(
        f"{channel.name} ({channel.kind})",
        (*_rate_cells(rates.of_channel(channel)), *_waiting_cells(channel.depth, channel.oldest_unread)),
        "", _holdings_text(nobody), "bold",
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
        held = [it for it in channel.holdings if it.uid == member.uid and it.uid]
        yield columns.line(
            f" {arrow} {member.pid}{life}{_delivery(member)} {program(member)}",
            (*_rate_cells(rates.of(member)), *_waiting_cells(member.unread, member.oldest_unread)),
            _counted_text(member), _holdings_text([it for it in held if it.how != "unread"]),
            "" if member.alive and not member.stopped else "red",
        )  # fmt: skip


def _delivery(member: MemberInfo) -> str:
    """What a subscriber gets, unless it is everything."""
    return f" [{member.group}]" if member.group else " latest" if member.delivery == "latest" else ""


def _rate_cells(rate: Rate | None) -> tuple[str, str]:
    if rate is None:
        return "", ""
    number = f"{rate.messages:.1f}" if rate.messages < 99_999 else f"{rate.messages / 1e3:.0f}k"
    return number, bytes_per_second(rate.nbytes) if rate.nbytes else ""


def _waiting_cells(messages: int, oldest: float) -> tuple[str, str]:
    return (str(messages), seconds(oldest)) if messages else ("", "")


def _counted_text(member: MemberInfo) -> str:
    counted = [(name, getattr(member, name)) for name in _BY_WEIGHT]
    return ", ".join(f"{count} {name}" for name, count in counted if count)


def _holdings_text(holdings: list[Holding]) -> str:
    return ", ".join(f"{it.messages} {it.how} {seconds(it.oldest)} {format_bytes(it.nbytes)}" for it in holdings)
