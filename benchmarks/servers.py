"""Servers of files on this machine, in processes of their own: HTTP by aiohttp, S3 by moto."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

BUCKET = "bucket"
PATIENCE = 60.0
_FILES = """
import sys
from aiohttp import web

app = web.Application()
app.router.add_static("/", sys.argv[1])
web.run_app(app, host="127.0.0.1", port=int(sys.argv[2]), print=None, access_log=None)
"""


@dataclass(frozen=True)
class Server:
    """Where it is, and what its clients need in their environment: fsspec reads that."""

    url: str
    environment: dict[str, str] = field(default_factory=dict)


def lacks(kind: str) -> str | None:
    """What is not installed of what the server `"HTTP"` or `"S3"` and its client need."""
    for module in ("fsspec", "aiohttp") if kind == "HTTP" else ("fsspec", "s3fs", "moto", "flask"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed"
    return None


@contextlib.contextmanager
def http_server(directory: Path) -> Iterator[Server]:
    """Serves the files of a directory, with ranges, by `sendfile`."""
    with _running(["-c", _FILES, str(directory)]) as port:
        yield Server(f"http://127.0.0.1:{port}")


@contextlib.contextmanager
def s3_server(*, yields: bool = False) -> Iterator[Server]:
    """Moto's server, which keeps what is put into it in memory; without a bucket.

    yields: it has the lowest priority, so that it takes no core from what stands for another machine's programs
    """
    with _running(["-m", "moto.server", "-H", "127.0.0.1", "-p"], yields=yields) as port:
        yield Server(
            f"s3://{BUCKET}",
            {
                "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_EC2_METADATA_DISABLED": "true", "FSSPEC_S3_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            },
        )  # fmt: skip


@contextlib.contextmanager
def _running(arguments: list[str], *, yields: bool = False) -> Iterator[int]:
    """A Python program that listens at the port that is its last argument."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    process = subprocess.Popen(
        [*(("nice", "-n", "19") if yields else ()), sys.executable, *arguments, str(port)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{arguments[1]} does not listen")
            time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()
