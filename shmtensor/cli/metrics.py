"""`shmtensor metrics`: the metrics of every channel over HTTP, for Prometheus and what reads its format."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer

from ..errors import DependencyError
from ..metrics import collector
from .output import console, fail, guarded, until_interrupted


@guarded
def metrics(
    port: Annotated[int, typer.Option(help="Port to listen at; 0: any that is free.", min=0, max=65535)] = 9464,
    address: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    pattern: Annotated[str, typer.Argument(help='Only channels with such names, for example "camera*".')] = "*",
) -> None:
    """Serve the metrics of all channels and services of this machine at http://ADDRESS:PORT/metrics.

    In the formats of Prometheus and OpenMetrics. Each request reads shared memory anew: a process that has died is gone
    from the next scrape. Joins no channel. SIGTERM and Ctrl-C end it. Needs prometheus_client: pip install
    'shmtensor[metrics]'.
    """
    found = collector(pattern)
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise DependencyError(str(error), name="prometheus_client") from None
    registry = CollectorRegistry()
    registry.register(found)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        server, thread = start_http_server(port, address, registry)
    except OSError as error:
        raise fail(f"cannot listen at {address}:{port}: {error.strerror or error}: choose another --port") from None
    try:
        with until_interrupted():
            where = f"{address}:{server.server_port}"
            console(stderr=True).print(f"metrics at http://{where}/metrics", soft_wrap=True, markup=False)
            ended.wait()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
