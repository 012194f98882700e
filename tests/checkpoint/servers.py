"""Servers of files on this machine: over HTTP, with ranges and with faults on request; and an S3 server."""

from __future__ import annotations

import contextlib
import http.server
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from urllib.parse import quote, unquote

import pytest

from ..waiting import wait_until

RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class Server(http.server.ThreadingHTTPServer):
    """Serves the files of a directory.

    requests: (method, path, first byte, one behind the last) of each
    over:     is set at its end: what hangs waits for it
    fault:    `fault(handler, path, start, data)` is called before an answer, and returns what is sent in place of the
              bytes; it may also answer by itself, and return None
    """

    daemon_threads = True
    block_on_close = True

    def __init__(self, directory: Path, *, ranges: bool = True, port: int = 0) -> None:
        self.directory, self.ranges = directory, ranges
        self.requests: list[tuple[str, str, int, int]] = []
        self.fault = None
        self.over = threading.Event()
        self.connections: list[socket.socket] = []
        super().__init__(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    def handle_error(self, request, client_address):
        """A client that has gone, or a connection that a fault has cut."""

    def get_request(self):
        found = super().get_request()
        self.connections.append(found[0])
        return found

    def end(self) -> None:
        """Close the port and every connection, whatever is being sent."""
        self.over.set()
        self.shutdown()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.server_close()
        self._thread.join()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms for the acknowledgement of its headers

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = unquote(self.path.partition("?")[0])
        file = Path(f"{self.server.directory}{path}")
        if file.is_dir():
            links = "".join(
                f'<a href="{quote(each.name)}{"/" * each.is_dir()}">x</a>' for each in sorted(file.iterdir())
            )
            data, kind = f"<html>{links}</html>".encode(), "text/html"
            if not path.endswith("/"):
                self.send_response(301)
                self.send_header("Location", path + "/")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
        elif file.is_file():
            data, kind = file.read_bytes(), "application/octet-stream"
        else:
            self.send_error(404)
            return
        start, end, total = 0, len(data), len(data)
        asked = RANGE.fullmatch(self.headers.get("Range", "")) if self.server.ranges and body else None
        if asked is not None:
            start = int(asked[1])
            end = min(int(asked[2]) + 1 if asked[2] else total, total)
            data = data[start:end]
        self.server.requests.append((self.command, path, start, end))
        if self.server.fault is not None:
            data = self.server.fault(self, path, start, data)
            if data is None:
                return
        self.send_response(200 if asked is None else 206)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if file.is_file():
            changed = file.stat()
            self.send_header("Last-Modified", self.date_time_string(int(changed.st_mtime)))
            self.send_header("ETag", f'"{changed.st_ino}-{changed.st_mtime_ns}-{changed.st_size}"')
        if self.server.ranges:
            self.send_header("Accept-Ranges", "bytes")
        if asked is not None:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{total}")
        self.end_headers()
        if body:
            self.wfile.write(data)


class S3:
    """moto's server, with a bucket named `bucket`. Its credentials are in the environment, as fsspec finds them."""

    def __init__(self, directory: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = (directory / "moto.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=self._log, stderr=self._log, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self.environment = {
            "AWS_ACCESS_KEY_ID": "key-of-a-test", "AWS_SECRET_ACCESS_KEY": "secret-of-a-test",
            "AWS_DEFAULT_REGION": "us-east-1", "FSSPEC_S3_ENDPOINT_URL": self.url,
            "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip
        wait_until(lambda: self._listens(port))

    def _listens(self, port: int) -> bool:
        assert self._process.poll() is None, "the S3 server has ended"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        return False

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


class Redis:
    """A Redis server on a socket and a port, whose data lie in the directory and are written with each command.

    options: for its command line
    """

    def __init__(self, directory: Path, *options: str) -> None:
        directory.mkdir(exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._folder = tempfile.TemporaryDirectory()  # a socket's path is short
        self.socket = f"{self._folder.name}/redis.sock"
        self._command = [
            "redis-server", "--bind", "127.0.0.1", "--port", str(self.port), "--unixsocket", self.socket,
            "--dir", str(directory), "--save", "", "--appendonly", "yes", "--appendfsync", "always",
            "--logfile", str(directory / "log"), *options,
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)
        wait_until(self._answers)

    def _answers(self) -> bool:
        assert self.process.poll() is None, "redis-server has ended"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as found:
            found.sendall(b"PING\r\n")
            return found.recv(100).startswith((b"+PONG", b"-NOAUTH"))
        return False

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        self.kill()
        self._folder.cleanup()


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory):
    """A Redis server with empty databases. A request to it fails after two seconds without an answer."""
    import fsspec

    pytest.importorskip("redis")
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    server = Redis(tmp_path_factory.mktemp("redis"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FSSPEC_REDIS_SOCKET_TIMEOUT", "2")
            fsspec.config.set_conf_env(fsspec.config.conf)
            yield server
    finally:
        fsspec.config.conf.pop("redis", None)
        server.end()


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    """An S3 server with an empty bucket, which fsspec finds, in the processes that a test starts as well."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server", exc_type=ImportError)
    import fsspec

    server = S3(tmp_path_factory.mktemp("s3"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in server.environment.items():
                patch.setenv(name, value)
            fsspec.config.set_conf_env(fsspec.config.conf)
            server.fs = fsspec.filesystem("s3", skip_instance_cache=True)
            server.fs.mkdir("bucket")
            yield server
    finally:
        fsspec.config.conf.pop("s3", None)
        server.end()


def copy(source: Path, to: Path) -> None:
    """Copy the files of a directory, without links, as an upload does."""
    to.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_symlink():
            continue
        if path.is_dir():
            copy(path, to / path.name)
        elif not path.name.endswith(".lock"):
            shutil.copy2(path, to / path.name)


def put(source: Path, fs, key: str) -> None:
    """The same into a file system of fsspec."""
    for folder, _, names in os.walk(source):
        for name in names:
            path = Path(folder, name)
            if not path.is_symlink() and not name.endswith(".lock"):
                fs.pipe_file(f"{key}/{path.relative_to(source)}", path.read_bytes())
