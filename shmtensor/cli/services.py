"""`shmtensor relay`: channels of this host on another one."""

from __future__ import annotations

import logging
import signal
import threading
import time
from typing import Annotated, Any, Final, Literal, cast

import typer

from ..errors import ArgumentError, TimedOut
from ..options import reason
from .output import fail, guarded

_SLICE_S: Final = 0.25


@guarded
def relay(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="The channels, by their names.")],
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to", metavar="tcp/HOST:PORT", help="Near side: where the far relay listens. May be given several times."
        ),
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(
            "--listen",
            metavar="tcp/HOST:PORT",
            help="Far side: where near relays are taken. May be given several times.",
        ),
    ] = None,
    scout: Annotated[
        bool, typer.Option("--scout", help="Look for the other relay by multicast as well; --to is not needed then.")
    ] = False,
    config: Annotated[
        str | None,
        typer.Option("--config", metavar="FILE", help="A Zenoh configuration (JSON5): TLS, access control and so on."),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            "--pattern",
            metavar="fan-out|work-queue|service",
            help="Near side: the channels' pattern; default: that of the channels, which must exist then.",
        ),
    ] = None,
    remote: Annotated[
        str | None, typer.Option("--remote", metavar="NAME", help="Near side: the channel's name there, if another.")
    ] = None,
    no_transit: Annotated[
        bool,
        typer.Option(
            "--no-transit",
            help="Near side: not what another relay has brought here; where each host has a relay to each other one.",
        ),
    ] = False,
    delivery: Annotated[
        str,
        typer.Option(
            "--delivery",
            metavar="auto|all|latest",
            help="Near side, fan-out: every message, or the newest, dropping here what the network cannot carry; auto: "
            "as the subscribers there do.",
        ),
    ] = "auto",
    user: Annotated[
        str | None, typer.Option("--user", help="Both sides must name the same; default: the login name.")
    ] = None,
    window: Annotated[
        int | None, typer.Option("--window", min=1, help="Far side: most messages unacknowledged; default: 256.")
    ] = None,
    window_bytes: Annotated[
        str | None,
        typer.Option("--window-bytes", help='Far side: most bytes that wait for a slot, like "8MiB"; default: 32MiB.'),
    ] = None,
    away: Annotated[
        float | None,
        typer.Option(
            "--away",
            min=0.0,
            help="Far side: seconds until the senders of a near relay that cannot be reached leave; default: 30.",
        ),
    ] = None,
    slots: Annotated[int | None, typer.Option("--slots", min=1, help="Far side: slots of each ring.")] = None,
    max_bytes: Annotated[
        str | None, typer.Option("--max-bytes", help='Far side: most shared memory of each sender, like "1GiB".')
    ] = None,
    wait: Annotated[
        float | None,
        typer.Option(
            "--wait", min=0.0, help="End with exit code 1 if the other relay is not there in so many seconds."
        ),
    ] = None,
) -> None:
    """Make channels of this host channels of another, over Zenoh.

    One relay on each host. The near one, with --to, runs where the senders or clients are; the far one, with --listen,
    where the receivers or servers are. Each may be started first, and restarted at any time: what is not acknowledged
    is sent again. One line per event goes to stderr. SIGTERM and Ctrl-C end it, when what is under way is acknowledged
    (5 s at most).

    Example: shmtensor relay camera --listen tcp/0.0.0.0:7447, and on the cameras' host
    shmtensor relay camera --to tcp/192.0.2.7:7447 --pattern fan-out
    """
    from ..relay.relay import Relay

    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    ended = threading.Event()

    def end(*_: Any) -> None:
        ended.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with Relay(
            names, to=to or None, listen=listen or None, scout=scout, config=config,
            pattern=cast('Literal["fan-out", "work-queue", "service"] | None', pattern), remote=remote,
            transit=not no_transit,
            delivery=cast('Literal["auto", "all", "latest"]', delivery), user=user, window=window,
            window_bytes=window_bytes, away=away, slots=slots, max_bytes=max_bytes,
        ) as made:  # fmt: skip
            deadline = None if wait is None else time.monotonic() + wait
            while deadline is not None and not ended.is_set():  # in slices: a signal's handler only sets `ended`
                remaining = deadline - time.monotonic()
                try:
                    made.wait(max(0.0, min(remaining, _SLICE_S)))
                    break
                except TimedOut:
                    if remaining <= 0:
                        raise
            while not ended.wait(1.0):
                made.check()
    except ArgumentError as error:
        raise fail(reason(error), 2) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
