"""`shmtensor serve`: worker processes that answer a service's requests with a function."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from ..errors import ArgumentError
from ..rpc import worker
from ..rpc.pool import serve as serve_forever
from .output import fail, guarded


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
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
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
