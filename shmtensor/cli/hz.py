"""`shmtensor hz`: how many messages each sender of a channel sends per second."""

from __future__ import annotations

import time
from collections import deque
from typing import Annotated, Any, NamedTuple

import typer

from ..channel.info import ChannelInfo, MemberInfo
from ..channel.inspect import Inspector
from .ls import program
from .output import bytes_per_second, console, guarded, print_json_line, seconds, until_interrupted
from .waiting import Unreadable, named, wait_for_channel


class _Point(NamedTuple):
    at: float
    published: int
    nbytes: int


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
            points.append(_Point(now, member.published, member.newest_bytes))
            while len(points) > 2 and points[1].at <= now - self._length:
                points.popleft()

    def rate(self, member: MemberInfo) -> tuple[float, float] | None:
        """Messages and bytes per second over the window; None before the second reading of this sender."""
        points = self._points.get(member.uid)
        if not points or len(points) < 2 or points[-1].at <= points[0].at:
            return None
        each = (points[-1].published - points[0].published) / (points[-1].at - points[0].at)
        sizes = [point.nbytes for point in points if point.published]
        return each, each * sum(sizes) / len(sizes) if sizes else 0.0


@guarded
def hz(
    channel: Annotated[str, typer.Argument(metavar="NAME", help="The channel.")],
    window: Annotated[float, typer.Option(help="Seconds over which rates are averaged.", min=0.1)] = 10.0,
    interval: Annotated[float, typer.Option(help="Seconds between two lines.", min=0.1)] = 1.0,
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
    inspector, windows, unreadable, done = Inspector(), Windows(window), Unreadable(), -1
    with until_interrupted():
        while not count or done < count:
            wait_for_channel(channel, timeout)
            info = inspector.channel(channel)
            if info is None:
                continue
            if not info.readable:
                unreadable.again(channel, info.notes[0])
                continue
            unreadable.over()
            windows.add(info, time.monotonic())
            done += 1
            if done:
                _print(info, windows, as_json)
            if not count or done < count:
                time.sleep(interval)


def _print(info: ChannelInfo, windows: Windows, as_json: bool) -> None:
    senders = [member for member in info.members if member.role == "sender"]
    if as_json:
        print_json_line(
            {"time": time.time(), "channel": info.name, "senders": [_dict(it, windows.rate(it)) for it in senders]}
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


def _dict(member: MemberInfo, rate: tuple[float, float] | None) -> dict[str, Any]:
    return {
        "uid": f"{member.uid:016x}", "pid": member.pid, "process": member.process or None,
        "label": member.label or None, "alive": member.alive,
        "messages_per_second": None if rate is None else rate[0], "bytes_per_second": None if rate is None else rate[1],
        "published": member.published, "newest_bytes": member.newest_bytes, "newest_age": member.newest_age,
    }  # fmt: skip
