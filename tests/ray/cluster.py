"""A Ray cluster for tests: `ray.cluster_utils.Cluster` in a process of its own, with namespaces of its own.

Its processes end with that process, however it ends; there is no network but 127.0.0.1; and what Ray writes, in `/tmp`
and `/dev/shm`, is gone with the namespace. A node may have a `/dev/shm` of its own, as a machine has.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
from typing import Any

import pytest

from ..scenes import ROOT, namespace

HANGS = 300.0
MISSING = None if importlib.util.find_spec("ray") and importlib.util.find_spec("zenoh") else "Ray or Zenoh is missing"


class Failed(AssertionError):
    """A play has raised; the text is its traceback."""


class RayCluster:
    """Runs functions of a module here in a driver that is connected to a cluster of two nodes, which are two hosts.

    `hook`: what the processes of workers call first, by its name.
    """

    def __init__(self, module: str, hook: str = "") -> None:
        self._directory = tempfile.mkdtemp(prefix="shmt-ray-", dir="/tmp")  # short: Ray has sockets there
        command = [
            *namespace(), "-n", "-p", "-f", "--kill-child", "--mount-proc",
            sys.executable, "-X", "faulthandler", "-m", "tests.ray.driver", self._directory, module, hook,
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # until `close`
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log
        )

    def play(self, name: str, *args: Any) -> Any:
        """Call a function of the module with the cluster and these, and return what it returns, as JSON."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, *args]).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._answer()
        if "error" in answer:
            raise Failed(f"{answer['error']}\n{self._said()}")
        return answer["result"]

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], HANGS)[0]:
            raise Failed(f"the driver hangs\n{self._said()}")
        line = self._process.stdout.readline()
        if not line:
            raise Failed(f"the driver has ended with {self._process.wait()}\n{self._said()}")
        return json.loads(line)

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read()[-6000:]

    def close(self) -> None:
        """End it, and everything in it."""
        try:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(60)
        finally:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._log.close()
            os.rmdir(self._directory)


def skip_unless_there() -> None:
    """Skip where Ray is not installed."""
    if MISSING:
        pytest.skip(MISSING)
