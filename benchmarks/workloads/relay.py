"""Channels on another host: a relay beside bare Zenoh and a Ray call, over loopback and between two network
namespaces."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from ..measure import RowSpec, Samples
from ..processes import NO_TORCH, Role, fresh_name, run_roles
from ..sizes import KIB, MIB, label
from ..transports import RAY, SHMTENSOR, ZENOH
from .base import Case, Effort, Workload

SIZES = (KIB, 64 * KIB, MIB, 16 * MIB)
LOOPBACK, VETH = "loopback", "veth pair"
OURS, BARE = "relay", "Zenoh put, acknowledged"
CALL, CALLS = "Ray call", "Ray, 16 calls at once"
CALL_FAR, CALLS_FAR = "Ray call between two nodes", "Ray, 16 calls at once between two nodes"
ALONE, BESIDE = "64 KiB alone", "64 KiB beside a stalled channel"
WINDOW, WINDOW_BYTES = 256, 32 * MIB
"""Messages and bytes under way, of a relay and of bare Zenoh."""
CHANNELS = (1, 8)
FEWEST = 24
"""Calls of Ray, and messages, that are counted at least."""
_ENOUGH = 60.0


def row_name(what: str, nbytes: int, network: str) -> str:
    return f"{what}, {label(nbytes)}, {network}"


def idle_name(channels: int, side: str) -> str:
    return f"{channels} idle channel{'s' * (channels > 1)}, {side}"


def _count(effort: Effort, nbytes: int) -> int:
    """Part of a second of messages in a full run, on a machine that does nothing else."""
    full = max(FEWEST, min(20_000, (256 << 20) // nbytes))
    return {"full": full, "quick": max(16, full // 4), "tiny": 4}[effort.scale]


# --- networks


@dataclass(frozen=True)
class Ends:
    """Where the two sides are: the network namespaces of processes, or this one; and the address of the far one."""

    near: int | None
    far: int | None
    address: str


@cache
def needs_veth() -> str | None:
    """Why two namespaces cannot be joined here."""
    if os.geteuid() != 0:
        return "network namespaces take root"
    if shutil.which("ip") is None:
        return "`ip` is not installed"
    try:
        with network(VETH):
            return None
    except subprocess.CalledProcessError as error:
        return str(error.stderr).strip()
    except OSError as error:
        return str(error)


@contextlib.contextmanager
def network(name: str) -> Iterator[Ends]:
    """Both ends of a network. Namespaces end with the processes in them, and these with this one."""
    if name == LOOPBACK:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        yield Ends(None, None, f"tcp/127.0.0.1:{port}")
        return
    command = ["unshare", "-n", "sh", "-c", "ip link set lo up && echo up && exec cat"]
    keepers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for keeper in keepers:
            if keeper.stdout is None or keeper.stdout.readline() != "up\n":
                raise OSError("no network namespace")
        near, far = (keeper.pid for keeper in keepers)
        commands = [(near, f"link add name relay0 type veth peer name relay0 netns {far}")]
        for pid, number in ((near, 1), (far, 2)):
            commands += (pid, f"address add 10.77.1.{number}/24 dev relay0"), (pid, "link set relay0 up")
        for pid, each in commands:
            ip = "nsenter", "-t", str(pid), "-n", "ip"
            subprocess.run([*ip, *each.split()], check=True, capture_output=True, text=True)
        yield Ends(near, far, "tcp/10.77.1.2:7447")
    finally:
        for keeper in keepers:
            for pipe in (keeper.stdin, keeper.stdout):
                if pipe is not None:
                    pipe.close()
            keeper.wait()


def enter(pid: int | None) -> None:
    """Go into the network of a process. Threads made later are there too."""
    if pid is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as space:
        if libc.setns(space.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")


# --- a relay


def measure_relay(nbytes: int, name: str, effort: Effort, stalled: bool = False) -> Samples:
    """Messages per second from the first `send` there until the last one is received here."""
    channel, count = fresh_name(), _count(effort, nbytes)
    names = [channel, f"{channel}-stalled"] if stalled else [channel]
    with network(name) as ends:
        roles = [
            Role(_send, (names, nbytes, count), NO_TORCH),
            Role(_receive, (names, nbytes, count), NO_TORCH),
            *(Role(_relay, (names, ends, is_far), NO_TORCH) for is_far in (True, False)),
        ]
        start, end, *_ = run_roles(roles)
    return {"rate": [count / (end - start)]}


def _relay(meet: Callable[[], object], names: list[str], ends: Ends, is_far: bool) -> None:
    import shmtensor

    enter(ends.far if is_far else ends.near)
    with contextlib.ExitStack() as stack:
        if is_far:
            there = [f"{name}-far" for name in names]
            stack.enter_context(shmtensor.Relay(there, listen=ends.address))
        else:
            made = [
                stack.enter_context(shmtensor.Relay(name, to=ends.address, remote=f"{name}-far", pattern="fan-out"))
                for name in names
            ]
            for relay in made:
                relay.wait(_ENOUGH)
        for _ in range(3):
            meet()


def _send(meet: Callable[[], object], names: list[str], nbytes: int, count: int) -> float:
    import shmtensor

    data = np.random.default_rng(1).integers(0, 255, nbytes, np.uint8)
    with contextlib.ExitStack() as stack:
        publisher, *stalled = [stack.enter_context(shmtensor.Publisher(name)) for name in names]
        meet()
        for each in stalled:
            with contextlib.suppress(shmtensor.RingFull):
                while True:
                    each.send(data, timeout=1.0)
        for _ in range(max(1, count // 10)):
            publisher.send(data, timeout=_ENOUGH)
        meet()
        start = time.monotonic()
        for _ in range(count):
            publisher.send(data, timeout=_ENOUGH)
        meet()
    return start


def _receive(meet: Callable[[], object], names: list[str], nbytes: int, count: int) -> float:
    import shmtensor

    with contextlib.ExitStack() as stack:
        subscriber, *_ = [stack.enter_context(shmtensor.Subscriber(f"{name}-far", until="closed")) for name in names]
        meet()

        def take(count: int) -> None:
            for _ in range(count):
                with subscriber.recv(timeout=_ENOUGH) as message:
                    if message.nbytes != nbytes:
                        raise ValueError(f"{message.nbytes} bytes came instead of {nbytes}")

        take(max(1, count // 10))
        meet()
        take(count)
        end = time.monotonic()
        meet()
    return end


# --- bare Zenoh


def measure_zenoh(nbytes: int, name: str, effort: Effort) -> Samples:
    """Messages per second from the first put until the last acknowledgement, by hand with the same window."""
    count = _count(effort, nbytes)
    with network(name) as ends:
        roles = [Role(_put, (ends, nbytes, count), NO_TORCH), Role(_acknowledge, (ends,), NO_TORCH)]
        return {"rate": [run_roles(roles)[0]]}


def _session(ends: Ends, listens: bool) -> Any:
    import zenoh

    config = zenoh.Config()
    for key, value in (
        ("mode", '"peer"'), ("scouting/multicast/enabled", "false"), ("transport/shared_memory/enabled", "false"),
        ("listen/endpoints", f'["{ends.address}"]' if listens else "[]"),
        ("connect/endpoints", "[]" if listens else f'["{ends.address}"]'), ("connect/timeout_ms", "60000"),
    ):  # fmt: skip
        config.insert_json5(key, value)
    return zenoh.open(config)


def _put(meet: Callable[[], object], ends: Ends, nbytes: int, count: int) -> float:
    import zenoh

    enter(ends.near)
    meet()
    data = np.random.default_rng(1).integers(0, 255, nbytes, np.uint8).tobytes()
    credit, arrived = threading.Semaphore(max(1, min(WINDOW, WINDOW_BYTES // nbytes))), [0]
    warm = max(1, count // 10)
    reached = {warm: threading.Event(), warm + count: threading.Event()}
    with _session(ends, listens=False) as session:

        def acknowledged(_: Any) -> None:
            arrived[0] += 1
            credit.release()
            if arrived[0] in reached:
                reached[arrived[0]].set()

        session.declare_subscriber("bench/acknowledged", acknowledged)
        publisher = session.declare_publisher("bench/data", congestion_control=zenoh.CongestionControl.BLOCK)
        while not publisher.matching_status.matching:
            time.sleep(0.01)
        sent = 0
        for goal, acknowledged_all in reached.items():
            start = time.monotonic()  # of the last goal, when nothing is under way
            for _ in range(goal - sent):
                credit.acquire()
                publisher.put(data)
            sent = goal
            if not acknowledged_all.wait(_ENOUGH):
                raise ValueError(f"{arrived[0]} of {goal} were acknowledged")
            end = time.monotonic()
        meet()
    return count / (end - start)


def _acknowledge(meet: Callable[[], object], ends: Ends) -> None:
    import zenoh

    enter(ends.far)
    with _session(ends, listens=True) as session:
        publisher = session.declare_publisher("bench/acknowledged", congestion_control=zenoh.CongestionControl.BLOCK)
        session.declare_subscriber("bench/data", lambda sample: publisher.put(b"x") if len(sample.payload) else None)
        meet()
        meet()


# --- Ray


def measure_ray(nodes: int, names: tuple[str, str], effort: Effort) -> Samples:
    """Calls per second of an actor with an array as its argument: one at a time, and 16 at once."""
    return run_roles([Role(_call, (nodes, names, effort), NO_TORCH)])[0]  # type: ignore[no-any-return]


def _call(meet: Callable[[], object], nodes: int, names: tuple[str, str], effort: Effort) -> Samples:
    peer, found = RAY.peer(nodes), Samples()
    try:
        for nbytes in SIZES:
            data = np.random.default_rng(1).integers(0, 255, nbytes, np.uint8)
            for what, at_once in zip(names, (1, 16), strict=True):
                count = max(FEWEST, _count(effort, nbytes) // 20)
                peer.push(data, 3, at_once)
                start = time.monotonic()
                peer.push(data, count, at_once)
                found[f"{what}, {label(nbytes)}"] = [count / (time.monotonic() - start)]
    finally:
        peer.close()
    return found


# --- idle


def measure_idle(channels: int, effort: Effort) -> Samples:
    """Percent of one core that the near and the far relay of idle channels take, each."""
    channel = fresh_name()
    names = [f"{channel}-{number}" for number in range(channels)]
    with network(LOOPBACK) as ends:
        seconds = {"full": 5.0, "quick": 3.0, "tiny": 0.5}[effort.scale]
        roles = [
            Role(_idle_members, (names,), NO_TORCH),
            *(Role(_idle, (names, ends, is_far, seconds), NO_TORCH) for is_far in (True, False)),
        ]
        _, far, near = run_roles(roles)
    return {"near": [near], "far": [far]}


def _idle_members(meet: Callable[[], object], names: list[str]) -> None:
    import shmtensor

    with contextlib.ExitStack() as stack:
        senders = [stack.enter_context(shmtensor.Publisher(name)) for name in names]
        receivers = [stack.enter_context(shmtensor.Subscriber(f"{name}-far", until="closed")) for name in names]
        meet()
        for sender, receiver in zip(senders, receivers, strict=True):
            sender.send(np.zeros(10))
            receiver.recv(timeout=_ENOUGH).release()
        meet()
        meet()


def _idle(meet: Callable[[], object], names: list[str], ends: Ends, is_far: bool, seconds: float) -> float:
    import shmtensor

    where: dict[str, Any] = {"listen": ends.address} if is_far else {"to": ends.address, "pattern": "fan-out"}
    with contextlib.ExitStack() as stack:
        made = [
            stack.enter_context(shmtensor.Relay([f"{name}-far" for name in names], **where))
        ] if is_far else [
            stack.enter_context(shmtensor.Relay(name, remote=f"{name}-far", **where)) for name in names
        ]  # fmt: skip
        for relay in made:
            relay.wait(_ENOUGH)
        meet()
        meet()
        cpu, wall = time.process_time(), time.monotonic()
        time.sleep(seconds)
        percent = 100 * (time.process_time() - cpu) / (time.monotonic() - wall)
        meet()
    return percent


def _needs(name: str) -> Callable[[], str | None]:
    """Why there is no such network here."""
    return needs_veth if name == VETH else lambda: None


WORKLOAD = Workload(
    name="relay",
    title="Channels on another host",
    what=(
        "Two relays, a publisher and a subscriber, each in a process of its own, on this machine: over loopback, and "
        "between two network namespaces that a veth pair joins. Default arguments. The clock runs from the first send "
        "to the last message received, after a tenth as many; the receiver looks at no byte of them. Zenoh: put with "
        f"congestion control BLOCK, and a put of one byte back for each, with at most {WINDOW} messages and "
        f"{label(WINDOW_BYTES)} under way, as a relay has, from the first put to the last of those; Zenoh sends small "
        "ones together, as it does by default; the receiver leaves the payload where Zenoh has put it. "
        "Ray: a call of an actor with an array, one after the other, and 16 at once, on one node, where the actor maps "
        "the caller's object store, and between two nodes, where Ray sends the array over loopback. Idle: relays "
        "of channels with a publisher and a subscriber that do nothing, user and system time of all threads of the "
        "process; the near side has a relay for each, the far one a relay for all. Stalled: another channel over the "
        "same pair of hosts, whose subscriber takes nothing and whose rings are full."
    ),
    heading="bytes",
    cases=(
        *(
            Case(
                row_name(what, nbytes, name), transport, partial(measure, nbytes, name), needs=_needs(name),
                quick=name == LOOPBACK and nbytes in (KIB, 16 * MIB),
            )
            for name in (LOOPBACK, VETH)
            for nbytes in SIZES
            for what, transport, measure in ((OURS, SHMTENSOR, measure_relay), (BARE, ZENOH, measure_zenoh))
        ),
        Case(CALL, RAY, partial(measure_ray, 1, (CALL, CALLS)), quick=False, rounds=1),
        Case(CALL_FAR, RAY, partial(measure_ray, 2, (CALL_FAR, CALLS_FAR)), quick=False, rounds=1),
        Case(ALONE, SHMTENSOR, partial(measure_relay, 64 * KIB, LOOPBACK)),
        Case(BESIDE, SHMTENSOR, partial(measure_relay, 64 * KIB, LOOPBACK, stalled=True)),
        *(Case(idle_name(each, "both"), SHMTENSOR, partial(measure_idle, each)) for each in CHANNELS),
    ),
    rows=(
        *(
            RowSpec(
                row_name(what, nbytes, name), transport.name, row_name(what, nbytes, name), "rate", "messages/s",
                group=f"Messages/s, {name}", line=what, column=label(nbytes), x=nbytes,
                against=None if what == BARE else row_name(BARE, nbytes, name),
            )
            for name in (LOOPBACK, VETH)
            for what, transport in ((OURS, SHMTENSOR), (BARE, ZENOH))
            for nbytes in SIZES
        ),
        *(
            RowSpec(
                row_name(what, nbytes, LOOPBACK), RAY.name, case, f"{what}, {label(nbytes)}", "messages/s",
                group=f"Messages/s, {LOOPBACK}", line=what, column=label(nbytes), x=nbytes,
            )
            for case, names in ((CALL, (CALL, CALLS)), (CALL_FAR, (CALL_FAR, CALLS_FAR)))
            for what in names
            for nbytes in SIZES
        ),
        RowSpec(ALONE, SHMTENSOR.name, ALONE, "rate", "messages/s"),
        RowSpec(BESIDE, SHMTENSOR.name, BESIDE, "rate", "messages/s", against=ALONE),
        *(
            RowSpec(idle_name(each, side), SHMTENSOR.name, idle_name(each, "both"), side, "% of a core")
            for each in CHANNELS
            for side in ("near", "far")
        ),
    ),
)  # fmt: skip
