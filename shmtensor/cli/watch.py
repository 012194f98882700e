"""The commands that watch the messages of a channel: `shmtensor hz`, `echo` and `trace`; and `shmtensor metrics`."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TextIO

import typer

from .. import __version__
from ..channel.info import ChannelInfo, MemberInfo
from ..channel.inspect import Inspector
from ..codec.outline import as_json as json_of
from ..codec.outline import as_text
from ..errors import DependencyError, ShmTensorError
from ..metrics import collector
from ..observe.messages import Messages, Seen
from ..observe.rates import has_newest
from ..observe.trace import Tracer, every_that_fits, write_chrome
from ..options import format_bytes
from .channels import program
from .output import (
    LONGEST_S,
    Unreadable,
    bytes_per_second,
    console,
    fail,
    guarded,
    named,
    not_ignored,
    print_json,
    print_json_line,
    signals_handled,
    signals_interrupt,
    until_interrupted,
    wait_for_channel,
)
from .output import seconds as duration

_Patience = Annotated[
    float | None, typer.Option(help="Seconds to wait for the channel; by default without limit.", min=0.0)
]


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
    timeout: _Patience = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each reading as one line of JSON.")] = False,
) -> None:
    """Print how many messages each sender of a channel sends per second, over a window, every second.

    It joins no channel, so that a sender without receivers is measured as well. Bytes are estimated by the sizes of
    each sender's newest messages. It waits for a channel that does not exist yet, or that has ended. Ctrl-C ends it;
    exit code 1 if there is no channel in time, or it cannot be read.
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
        newest = f"  newest {duration(member.newest_age)} ago" if member.newest_age else ""
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
"""`echo` waits for this part of the time since it last found a message: so it checks often enough for a stream of any
steady rate up to 1 kHz, and rarely when the channel is silent."""


@guarded
def echo(
    channel: Annotated[str, typer.Argument(metavar="NAME", help="The channel.")],
    count: Annotated[int, typer.Option(help="End after so many messages; 0: on Ctrl-C.", min=0)] = 0,
    digest: Annotated[bool, typer.Option(help="Whether to read the whole payload for a digest.")] = True,
    timeout: _Patience = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each message as one line of JSON.")] = False,
) -> None:
    """Print the messages of a channel: structure, dtypes, shapes, scalars, meta, and a digest of the bytes.

    It prints messages that are still needed, then each new one that can be read before its slot is used again, and how
    many were missed. It joins no channel: nothing is taken from a work queue, and no sender waits. Messages that were
    overwritten while they were read are not printed. The digest (xxh3, 64 bits) and the values of NumPy scalars are
    left out if the payload may have been written to meanwhile. Ctrl-C ends it; exit code 1 if there is no channel in
    time, or it cannot be read.
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
    parts = [f"#{seen.seq} of {seen.pid}", f"{duration(age)} ago", format_bytes(seen.nbytes)]
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


_POLL_S = 0.02
_SHOW_S = 0.5
_OPEN_END_S = 60.0
"""How long a trace until Ctrl-C is thought to take."""


@guarded
def trace(
    channel: Annotated[str, typer.Argument(metavar="NAME", help="The channel.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write; -: stdout.")] = Path("trace.json"),
    seconds: Annotated[float, typer.Option(help="Seconds to trace; 0: until Ctrl-C.", min=0.0, max=LONGEST_S)] = 5.0,
    every: Annotated[
        int | None,
        typer.Option(
            help="Trace messages whose number is a multiple of it; default: 1, or as many as fit in --most.",
            min=1,
            show_default="1; of a fast channel, what makes --seconds fit into --most",
        ),
    ] = None,
    most: Annotated[int, typer.Option(help="End after so many events.", min=1)] = 500_000,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the channel.", min=0.0)] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was traced as JSON.")] = False,
) -> None:
    """Trace a channel: each send, take and release, with flows between the processes, for ui.perfetto.dev.

    While it runs, the members of the channel write events to memory that they share with this command, which joins the
    channel as a member that neither sends nor receives. Without a trace, they write none. A sleeping member is traced
    from its next message on. The file is in the Trace Event Format of Chrome and Perfetto. Ctrl-C, SIGTERM and SIGHUP
    end it early and write the events so far; a second signal writes no file. Exit code 1 if there is no such channel,
    or it is traced already.
    """
    named(channel)
    to_stdout = str(output) == "-"
    if to_stdout and as_json:
        raise fail("--json prints to stdout as well: choose another --output", 2)
    with contextlib.nullcontext(sys.stdout) if to_stdout else _written_to(output) as file:
        with signals_interrupt(signal.SIGTERM, signal.SIGHUP):
            wait_for_channel(channel, timeout)
        with until_second_interrupt() as interrupted:
            try:
                tracer = Tracer(channel, every=every or every_that_fits(channel, seconds or _OPEN_END_S, most))
            except FileNotFoundError:
                raise fail(f'there is no channel "{channel}": see `shmtensor ls`') from None
            with tracer:
                end = _record(tracer, seconds, most, interrupted)
                unfinished = tracer.close()
            found = tracer.trace
            messages = write_chrome(found, file, __version__)
    lasted = (found.ended_ns - found.began_ns) / 1e9
    if as_json:
        print_json({
            "channel": channel, "kind": found.kind, "file": str(output), "seconds": lasted, "events": found.count,
            "messages": messages, "members": found.writers,
            "every": found.every, "lost": found.lost, "end": end,
        })  # fmt: skip
    else:
        console(stderr=to_stdout).print(
            f"{'stdout' if to_stdout else output}: {found.count} events of {messages} messages in {duration(lasted)}"
            f", {found.lost} lost"
            + (f"; one of {found.every} messages was traced: see --every" if found.every > 1 else "")
            + (f"; it ended early, after --most {most} events: see --every" if end == "full" else ""),
            soft_wrap=True, markup=False, highlight=False,
        )  # fmt: skip
    if not found.count:
        console(stderr=True).print(f"no member sent, took or gave back anything: see `shmtensor ls {channel}`")
    if unfinished:
        console(stderr=True).print(f"{unfinished} messages that no consumer has finished ended with the channel")


@contextlib.contextmanager
def until_second_interrupt() -> Iterator[list[int]]:
    """Within, the first Ctrl-C, SIGTERM or SIGHUP is only noted, in this list: whatever it interrupts goes on, to a
    complete file. Those that are ignored (nohup) stay so."""
    found: list[int] = []

    def note(number: int, frame: object) -> None:
        found.append(number)
        if len(found) > 1:
            raise KeyboardInterrupt

    with signals_handled(note, not_ignored(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
        yield found


def _record(tracer: Tracer, seconds: float, most: int, interrupted: list[int]) -> str:
    """Read until the time is over, or there are enough events. Why it ended."""
    now = time.monotonic()
    until, shown, count = now + seconds if seconds else float("inf"), now, 0
    out = console(stderr=True)
    with out.status("tracing") if out.is_terminal else contextlib.nullcontext() as status:
        while now < until:
            if interrupted:
                return "interrupted"
            time.sleep(min(_POLL_S, until - now))
            count += tracer.poll()
            if count >= most:
                return "full"
            now = time.monotonic()
            if status is not None and now >= shown:
                shown = now + _SHOW_S
                left = f", {duration(max(0.0, until - now))} left" if seconds else ", Ctrl-C ends it"
                status.update(f"tracing: {count} events, {tracer.trace.lost} lost{left}")
    return "time"


@contextlib.contextmanager
def _written_to(path: Path) -> Iterator[TextIO]:
    """A file beside the one that is wanted, which takes its place when it is complete. Ends the command if there can be
    none. A device or a FIFO is written to, and what a link leads to is replaced."""
    if path.is_dir():
        raise fail(f"cannot write {path}: it is a directory: pass the name of a file", 2)
    path = Path(os.path.realpath(path))
    try:
        if path.exists() and not path.is_file():
            number, name = os.open(path, os.O_WRONLY), ""
        else:
            number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise fail(f"cannot write {path}: {error.strerror}: choose another --output", 2) from None
    try:
        with open(number, "w", encoding="utf-8") as file:
            yield file
        if name:
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, path)
    except BaseException as error:
        if name:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
        if isinstance(error, OSError) and not isinstance(error, ShmTensorError):
            raise fail(f"cannot write {path}: {error.strerror}: choose another --output") from None
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


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
    pattern: Annotated[str, typer.Argument(help='A pattern for the names of channels, for example "camera*".')] = "*",
) -> None:
    """Serve the metrics of all channels and services of this machine at http://ADDRESS:PORT/metrics.

    The formats are those of Prometheus and OpenMetrics. Each request reads shared memory anew: the next scrape has no
    process that has died. It joins no channel. SIGTERM and Ctrl-C end it. It needs prometheus_client (pip install
    '.[metrics]' in a checkout).
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
