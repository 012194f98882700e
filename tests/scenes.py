"""Scenes that are played in a process of their own: with a `/dev/shm` of its own, with limits; and fellow processes.

A scene is a function of a test module. It asserts by itself; a test starts it with `play`, which sees it end well.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing.resource_sharer  # noqa: F401  # other users may not be able to read the standard library
import os
import re
import resource
import shlex
import subprocess
import sys
from multiprocessing import context
from pathlib import Path

import numpy as np
import pytest

import shmtensor
from shmtensor.channel.control import LOCK
from shmtensor.channel.names import control_name
from shmtensor.memory import segment as shm

from .forkservers import Program
from .waiting import wait_for_stop

ROOT = Path(__file__).parents[1]
PATIENCE = 120.0
HANGS = 300.0
"""Seconds after which a scene counts as hanging."""
PAIRS = [("Publisher", "Subscriber"), ("Producer", "Consumer")]


HIDDEN = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
"""
"""The beginning of a program where no module `name` can be imported."""


def play(scene, *args: object, mounts: tuple[str, ...] = ()) -> str:
    """Run `scene(*args)` in a new interpreter; what it printed. `mounts`: tmpfs options and place, each of its own."""
    code = f"from {scene.__module__} import {scene.__name__} as scene; scene(*{args!r})"
    command = [sys.executable, "-W", "error", "-X", "faulthandler", "-c", code]
    if mounts:
        script = " && ".join(f"mount -t tmpfs -o {mount}" for mount in mounts)
        before, after = "", ""
        for number, path in enumerate(hidden_by(mounts), start=5):  # seen again, where it was
            place = shlex.quote(str(path))
            before += f"exec {number}< {place} && "
            after += f" && mkdir -p {place} && mount -c --bind /proc/self/fd/{number} {place} && exec {number}<&-"
        command = [*namespace(), "sh", "-c", f"{before}{script}{after} && exec {shlex.join(command)}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr[-4000:]}"
    return done.stdout


def hidden_by(mounts: tuple[str, ...]) -> list[Path]:
    """Of the package and the interpreter, what lies where something is to be mounted."""
    found: list[Path] = []
    for path in (ROOT, Path(sys.prefix)):
        covered = any(path.is_relative_to(mount.rpartition(" ")[2]) for mount in mounts)
        if covered and not any(path.is_relative_to(other) for other in found):
            found.append(path)
    return found


def own_shm(options: str) -> str:
    """A mount for `play`: a `/dev/shm` that nobody else sees."""
    return f"mode=1777,{options} tmpfs /dev/shm"


@functools.cache
def _namespace() -> tuple[list[str], str]:
    command = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Urm"]
    try:
        tried = subprocess.run([*command, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True)
    except FileNotFoundError as error:
        return command, str(error)
    return command, "" if tried.returncode == 0 else tried.stderr.strip() or f"exit code {tried.returncode}"


def namespace() -> list[str]:
    """The command that gives a mount namespace; skips the test where none may be had."""
    command, refusal = _namespace()
    if refusal:
        pytest.skip(f"no mount namespace here: {shlex.join(command)}: {refusal}")
    return command


def files(channel: str = "") -> set[str]:
    """The library's files in `/dev/shm`."""
    return {name for name in os.listdir("/dev/shm") if f"shmtensor.{channel}" in name}


@contextlib.contextmanager
def unswept(*channels: str):
    """Within, what the dead of these channels leave stays: they are locked, and whoever sweeps passes by.

    Any other program that makes an endpoint sweeps. Nobody can join or leave these channels meanwhile either.
    """
    with contextlib.ExitStack() as held:
        for channel in channels:
            locks = held.enter_context(shm.attach(control_name(channel))).locks()
            held.callback(locks.close)
            locks.wait_exclusive(LOCK, PATIENCE, channel)
        yield


@contextlib.contextmanager
def few_files(left: int):
    """Within, this process may open `left` more files."""
    gc.collect()  # else it may close some meanwhile
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = max(map(int, os.listdir("/proc/self/fd"))) + 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(left):
            os.close(taken.pop())
        if not left:  # nor when a thread closes one of its own: a number below this one is free for none
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 16), limits[1]))
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextlib.contextmanager
def limited(what: int, soft: int):
    """Within, a soft limit of this process is lower."""
    before = resource.getrlimit(what)
    resource.setrlimit(what, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def address_space() -> int:
    """Bytes of address space that this process uses."""
    with open("/proc/self/statm") as lines:
        return int(lines.read().split()[0]) * resource.getpagesize()


class Fellow:
    """Another process of a scene: told what to do line by line, answers line by line.

    An interpreter of its own, or, where its end is not one that an interpreter comes to, a child of a fork server.
    """

    def __init__(self, code: str, *args: object, forks: context.ForkServerContext | None = None) -> None:
        if forks is not None:
            strictly = f"import warnings; warnings.simplefilter('error')\n{code}"
            self.process: subprocess.Popen | Program = Program(forks, strictly, *map(str, args))
            return
        command = [sys.executable, "-W", "error", "-c", code, *map(str, args)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def listen(self, until: str) -> None:
        """Wait for it to say something."""
        said = self.process.stdout.readline().strip()
        assert said == until, (said, until)

    def say(self, text: str = "go") -> None:
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def stopped(self) -> None:
        """Wait until it is stopped."""
        wait_for_stop(self.process.pid)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, code: int = 0) -> None:
        """Wait for its end."""
        self.process.stdin.close()
        ended = self.process.wait(PATIENCE)
        self.process.stdout.close()
        assert ended == code, ended

    def kill(self) -> None:
        self.process.kill()
        self.end(-9)

    def __del__(self) -> None:
        if self.process.poll() is None:  # its test has failed
            self.process.kill()
            self.process.wait()


def pair_of(names):
    return getattr(shmtensor, names[0]), getattr(shmtensor, names[1])


def works(names, tx=None) -> None:
    """A message goes through."""
    make, take = pair_of(names)
    tx = tx or make("works", slots=2)
    with tx, take(tx.name) as rx:
        tx.send(np.arange(5), timeout=PATIENCE)
        assert rx.recv(timeout=PATIENCE).value.tolist() == [0, 1, 2, 3, 4]


def come_and_go(name: str) -> None:
    """An endpoint is made and closed."""
    options = {"slots": 2, "slot_bytes": 64} if name in ("Publisher", "Producer") else {}
    getattr(shmtensor, name)("c", **options).close()


def is_refused(call, code: int, *said: str) -> bool:
    """Whether the call raised a `ResourceError`; if so, it is this one, and its text has each of `said`."""
    try:
        call()
    except shmtensor.ResourceError as error:
        refusal = error
    else:
        return False
    if refusal.errno != code:
        raise refusal
    for text in said:
        assert re.search(text, str(refusal)), (text, str(refusal))
    return True


def refused(call, code: int, *said: str) -> None:
    """The call raises a `ResourceError` whose text has each of `said`."""
    assert is_refused(call, code, *said)
