"""The commands that run until they are stopped; each imports what it runs when it is called.

`shmtensor serve`: worker processes that answer a service's requests with a function. `relay`: channels of this host on
another one. `share`: a segment server, for containers that share a directory and no `/dev/shm`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
import threading
import time
from typing import Annotated, Final, Literal, cast

import typer

from ..channel.names import socket_dir
from ..errors import ArgumentError, TimedOut
from ..options import reason
from .output import fail, guarded, signals_handled

_ENDING: Final = (signal.SIGTERM, signal.SIGINT)
_SLICE_S: Final = 0.25


def log_events() -> None:
    """One line per event, to stderr."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)


@guarded
def serve(
    handler: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:NAME",
            help="The function that makes a reply's value of a request's value (and of a context, if it takes two), or "
            "a class: each worker makes one, which loads the model, and calls it. The module may lie in the current "
            "directory.",
        ),
    ],
    name: Annotated[str, typer.Option("--name", help="The service's name, which clients use.")],
    workers: Annotated[int, typer.Option("--workers", min=1, help="Worker processes.")] = 1,
    setup: Annotated[
        str | None,
        typer.Option(
            "--setup",
            metavar="MODULE:NAME",
            help="A function that each worker calls before it takes requests; what it returns is context.state.",
        ),
    ] = None,
    teardown: Annotated[
        str | None,
        typer.Option(
            "--teardown",
            metavar="MODULE:NAME",
            help="A function that each worker calls when it ends, with what --setup returned.",
        ),
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option("--max-batch", min=1, help="Requests to stack into one call; default: one by one.")
    ] = None,
    max_wait: Annotated[
        float | None,
        typer.Option(
            "--max-wait", min=0.0, help="Seconds that a batch waits for more after its first request; default: 0.002."
        ),
    ] = None,
    max_attempts: Annotated[
        int, typer.Option("--max-attempts", min=1, help="How many workers may die with one request before it fails.")
    ] = 3,
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts", min=0, help="Restarts in a row of one worker after deaths; one more death ends the pool."
        ),
    ] = 10,
    grace: Annotated[
        float, typer.Option("--grace", min=0.0, help="Seconds that a stopping worker has to finish what it took.")
    ] = 30.0,
    max_bytes: Annotated[
        str | None, typer.Option("--max-bytes", help='Most shared memory for the replies to one client, e.g. "1GiB".')
    ] = None,
) -> None:
    """Answer requests with worker processes; restart those that die.

    SIGTERM and Ctrl-C stop it once the workers have finished what they took; a second one kills them. SIGHUP replaces
    the workers one by one, for new code or a new model: each new one is ready before the old one ends. One line per
    event goes to stderr. Exit code 0 after a stop, 1 if a worker kept dying or the handler cannot serve, 2 for options
    that cannot be, 3 if workers had to be killed before they had finished.

    Example: shmtensor serve mymodel:predict --name model --workers 4 --max-batch 32
    """
    from ..rpc import worker
    from ..rpc.pool import serve as serve_forever

    log_events()
    try:
        for what, each in (("handler", handler), ("setup", setup), ("teardown", teardown)):
            if each is not None:
                worker.check(each, what)
        code = serve_forever(
            handler, name=name, workers=workers, setup=setup, teardown=teardown, max_batch=max_batch, max_wait=max_wait,
            max_attempts=max_attempts, max_restarts=max_restarts, grace=grace, max_bytes=max_bytes,
        )  # fmt: skip
    except ArgumentError as error:
        raise fail(str(error), 2) from None
    raise typer.Exit(code)


@guarded
def relay(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="The names of the channels.")],
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to", metavar="tcp/HOST:PORT", help="Near side: an endpoint where the far relay listens. May be repeated."
        ),
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(
            "--listen",
            metavar="tcp/HOST:PORT",
            help="Far side: an endpoint where near relays may connect. May be repeated.",
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
        str | None,
        typer.Option("--remote", metavar="NAME", help="Near side: the channel's name on the far host, if different."),
    ] = None,
    no_transit: Annotated[
        bool,
        typer.Option(
            "--no-transit",
            help="Near side: do not relay messages that a relay has brought to this host; for hosts in a mesh.",
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
            "--wait", min=0.0, help="End with exit code 1 if the other relay is not there after so many seconds."
        ),
    ] = None,
) -> None:
    """Extend channels of this host to another host, over Zenoh.

    One relay on each host. The near one, with --to, runs where the senders or clients are; the far one, with --listen,
    where the receivers or servers are. Each may be started first, and restarted at any time: what is not acknowledged
    is sent again. One line per event goes to stderr. SIGTERM and Ctrl-C end it, when what is under way is acknowledged
    (5 s at most).

    Example: shmtensor relay camera --listen tcp/0.0.0.0:7447, and on the cameras' host
    shmtensor relay camera --to tcp/192.0.2.7:7447 --pattern fan-out
    """
    from ..relay.relay import Relay

    log_events()
    ended = threading.Event()
    try:
        with signals_handled(lambda *_: ended.set(), _ENDING), Relay(
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


@guarded
def share(
    directory: Annotated[
        str,
        typer.Argument(
            metavar="DIRECTORY",
            help="The directory that all containers mount, their SHMTENSOR_DIR. Created if its parent is writable.",
        ),
    ],
    limit: Annotated[
        str | None,
        typer.Option(
            "--limit",
            metavar="SIZE",
            help='Most memory of all segments together, like "8GiB"; default: half of the memory of this machine, or '
            "of the limit of this container (cgroup v2).",
        ),
    ] = None,
) -> None:
    """Serve the segments of processes in containers that share a directory, but no /dev/shm.

    Run one per directory, on the host or in a container of its own, as the same user as all the other processes, and
    start it first. Messages do not pass through it. It may be restarted at any time: living processes give it their
    segments, and go on. One line per event goes to stderr, the first one when it is ready; systemd is notified. SIGTERM
    and Ctrl-C end it.

    Example: shmtensor share /run/shmtensor/shared --limit 8GiB, and SHMTENSOR_DIR=/run/shmtensor/shared in each
    container
    """
    from ..memory.segment_server import SegmentServer

    log_events()
    os.environ["SHMTENSOR_DIR"] = os.path.abspath(directory)
    where = socket_dir()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # each name takes a descriptor
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        made = SegmentServer(where, limit)
    except ArgumentError as error:
        raise fail(reason(error), 2) from None
    with made as server, signals_handled(lambda *_: server.stop(), _ENDING):
        _notify("READY=1")
        server.run()


def _notify(state: str) -> None:
    """Tell systemd, if it has started this (`sd_notify(3)`)."""
    path = os.environ.get("NOTIFY_SOCKET")
    if path:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.sendto(state.encode(), "\0" + path[1:] if path[0] == "@" else path)
