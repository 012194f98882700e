"""`shmtensor share`: a segment server, for containers that share a directory and no `/dev/shm`."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
from typing import Annotated, Any

import typer

from ..channel.names import socket_dir
from ..errors import ArgumentError
from ..memory.segment_server import SegmentServer
from ..options import reason
from .output import fail, guarded


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
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    os.environ["SHMTENSOR_DIR"] = os.path.abspath(directory)
    where = socket_dir()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # each name takes a descriptor
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        made = SegmentServer(where, limit)
    except ArgumentError as error:
        raise fail(reason(error), 2) from None
    with made as server:

        def end(*_: Any) -> None:
            server.stop()

        before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            _notify("READY=1")
            server.run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _notify(state: str) -> None:
    """Tell systemd, if it has started this (`sd_notify(3)`)."""
    path = os.environ.get("NOTIFY_SOCKET")
    if path:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.sendto(state.encode(), "\0" + path[1:] if path[0] == "@" else path)
