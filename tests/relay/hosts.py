"""Two hosts on one machine: relays in this process and in others, with a `/dev/shm` of their own where that matters."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shmtensor
from shmtensor.relay import outbound

from ..scenes import namespace
from ..waiting import PATIENCE, wait_until
from .switch import PREFIX

ROOT = Path(__file__).parents[2]


def endpoint() -> str:
    """An address of this host that is free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp/127.0.0.1:{free.getsockname()[1]}"


def listening_ports() -> set[int]:
    """The TCP ports at which this process listens."""
    own = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{number}"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
            if state == "0A" and f"socket:[{inode}]" in own:
                found.add(int(local.rpartition(":")[2], 16))
    return found


@contextlib.contextmanager
def pair(channel: str, pattern: str = "fan-out", near: Any = None, far: Any = None) -> Iterator[tuple[Any, Any]]:
    """A near relay of the channel, and a far one of the channel with "-far" behind its name, connected."""
    where = endpoint()
    with (
        shmtensor.Relay(f"{channel}-far", listen=where, **far or {}) as there,
        shmtensor.Relay(channel, to=where, remote=f"{channel}-far", pattern=pattern, **near or {}) as here,
    ):
        here.wait(PATIENCE)
        yield here, there


@contextlib.contextmanager
def mesh(channel: str, pattern: Any, **far: Any) -> Iterator[tuple[list[str], dict[tuple[int, int], shmtensor.Relay]]]:
    """Three hosts, played by three channels, with a relay to each other one: their names, and relays by (from, to)."""
    names, wheres = [f"{channel}-{each}" for each in "abc"], [endpoint() for _ in range(3)]
    with contextlib.ExitStack() as stack:
        for name, where in zip(names, wheres, strict=True):
            stack.enter_context(shmtensor.Relay(name, listen=where, **far))
        relays = {}
        for at, name in enumerate(names):
            for to, other in enumerate(names):
                if to != at:
                    relays[at, to] = stack.enter_context(
                        shmtensor.Relay(name, to=wheres[to], remote=other, pattern=pattern, transit=False)
                    )
        for relay in relays.values():
            relay.wait(PATIENCE)
        yield names, relays


def state_of(relay: shmtensor.Relay) -> Any:
    """The counters of a relay's only channel."""
    return next(iter(relay.statistics().values()))


class Remote:
    """`tests/relay/role.py` in a process: a relay, a sender or a receiver, perhaps on another host."""

    def __init__(self, role: str, *, host: Host | None = None, pure: bool = False, **options: Any) -> None:
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.relay.role", role, json.dumps(options)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        if pure:
            environment["SHMTENSOR_PURE"] = "1"
        if host is not None:
            environment["SHMTENSOR_DIR"] = host.directory
            command = [*host.enter, *command]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.said: list[Any] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(json.loads(line))

    def all(self, what: str) -> list[Any]:
        """What it said under that word."""
        return [said[1] for said in list(self.said) if said[0] == what]

    def wait_for(self, what: str, count: int = 1) -> list[Any]:
        """The same, when it has said it so many times."""
        wait_until(
            lambda: len(self.all(what)) >= count or self.process.poll() is not None,
            lambda: f"{len(self.all(what))} of {count} {what}, said {self.said[-3:]}",
        )
        assert len(self.all(what)) >= count, (self.process.poll(), self.said[-5:])
        return self.all(what)

    def ask(self, what: str) -> None:
        """Write it a line."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{what}\n")
            self.process.stdin.flush()

    def statistics(self) -> Any:
        """Of a relay: its counters now, by channel."""
        before = len(self.all("statistics"))
        self.ask("statistics")
        return self.wait_for("statistics", before + 1)[-1]

    def kill(self) -> None:
        """`kill -9`, to the end."""
        self.process.kill()
        self.end()

    def wait_for_death(self) -> None:
        """It kills itself at a crash point."""
        assert self.process.wait(PATIENCE) == -signal.SIGKILL
        self.end()

    def end(self) -> None:
        """Let it end."""
        if self.process.poll() is None:
            self.ask("end")
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self._reader.join()
        for file in (self.process.stdin, self.process.stdout):
            assert file is not None
            with contextlib.suppress(BrokenPipeError):
                file.close()

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class Host:
    """A host of its own, as this library sees it: a `/dev/shm`, a socket directory, and a network if it is asked for.
    Skips where none may be had."""

    def __init__(self, directory: Path, *, network: bool = False) -> None:
        self.directory = str(directory)
        directory.mkdir(mode=0o700)
        command = [*namespace(), *(["-n"] if network else [])]
        script = "mount -t tmpfs -o mode=1777 tmpfs /dev/shm && echo up && exec cat"
        self._keeper = subprocess.Popen(
            [*command, "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._keeper.stdout is not None
        assert self._keeper.stdout.readline() == "up\n"
        self.pid = self._keeper.pid
        spaces = [*([] if os.geteuid() == 0 else ["-U", "--preserve-credentials"]), "-m", *(["-n"] if network else [])]
        self.enter = ["nsenter", "-t", str(self.pid), *spaces, f"--wd={ROOT}", "--"]

    def left(self) -> list[str]:
        """Files of the library that are left there."""
        listed = subprocess.run([*self.enter, "ls", "/dev/shm"], capture_output=True, text=True, check=True)
        return [*listed.stdout.split(), *os.listdir(self.directory)]

    def close(self) -> None:
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._keeper.stdin.close()
        self._keeper.wait(PATIENCE)
        self._keeper.stdout.close()

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return shlex.join(self.enter)


class Network:
    """Hosts and what lies between them: `switch.py` carries the packets. All of it ends with the process that made
    it."""

    def __init__(self, directory: Path, count: int) -> None:
        refusal = networks_refusal()
        if refusal:
            pytest.skip(f"no network namespaces here: {refusal}")
        with contextlib.ExitStack() as stack:
            self.hosts = [
                stack.enter_context(Host(directory / f"host{number}", network=True)) for number in range(count)
            ]
            command = [sys.executable, "-m", "tests.relay.switch", *(str(host.pid) for host in self.hosts)]
            self._switch = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )  # fmt: skip
            stack.callback(self._end)
            self._expect("up\n")
            self._stack = stack.pop_all()

    def _expect(self, line: str) -> None:
        assert self._switch.stdout is not None
        assert self._switch.stdout.readline() == line

    def address(self, host: int, port: int = 7447) -> str:
        """An endpoint at that host."""
        return f"tcp/{PREFIX}{host + 1}:{port}"

    def set(self, *hosts: int, **changes: Any) -> None:
        """Change every link between these hosts, both ways; none named: all of them."""
        among = hosts or range(len(self.hosts))
        for one in among:
            for other in among:
                if one != other:
                    self.set_way(one, other, **changes)

    def set_way(self, one: int, other: int, **changes: Any) -> None:
        """The same, one way."""
        assert self._switch.stdin is not None
        self._switch.stdin.write(json.dumps([one, other, changes]) + "\n")
        self._switch.stdin.flush()
        self._expect("done\n")

    def outage(self, one: int, other: int, seconds: float) -> None:
        """Cut the link between two hosts for so long, both ways, and wait until it is over."""
        for way in ((one, other), (other, one)):
            self.set_way(*way, outage=seconds)
        for _ in range(2):
            self._expect("over\n")

    def left(self) -> list[str]:
        """Files of the library that are left at any host."""
        return [name for host in self.hosts for name in host.left()]

    def _end(self) -> None:
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        self._switch.stdin.close()
        self._switch.wait(PATIENCE)
        self._switch.stdout.close()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@functools.cache
def networks_refusal() -> str:
    """Why no test here can make a network; empty if it can."""
    if os.geteuid() != 0:
        return "it takes root"
    if not os.path.exists("/dev/net/tun"):
        return "the kernel has no /dev/net/tun"
    if shutil.which("ip") is None:
        return "`ip` is not installed"
    tried = subprocess.run(
        ["unshare", "-m", "-n", "ip", "tuntap", "add", "dev", "net0", "mode", "tun"], capture_output=True, text=True
    )
    return tried.stderr.strip() if tried.returncode else ""


def is_open(relay: shmtensor.Relay) -> bool:
    return state_of(relay).state == outbound.OPEN
