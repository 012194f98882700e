"""The fault matrix: point of death x way of dying x pattern -> what survivors see, and what is left (nothing).

Each scenario has one victim, which dies (or raises) at a named point, and survivors in processes of their own. The
fork server is preloaded with the package compiled with its crash points (`tests/faults/points.py`); the package
itself has none.

Points that the compiled module has as well are run over both implementations, the others once.
"""

from __future__ import annotations

import ctypes

import pytest

import shmtensor
from shmtensor import native
from shmtensor.observe.trace import Tracer
from shmtensor.ring import events as ev

from ..conftest import left_files
from ..containers.test_deaths import CLIENT_POINTS, RESTARTED, SERVER_POINTS
from ..cuda.test_deaths import POINTS as COPY_POINTS
from ..cuda.test_ipc import POINTS as DEVICE_POINTS
from ..mp.test_faults import POINTS as DROPIN_POINTS
from . import build, points
from .matrix import UNBUILT, matrix
from .process import Process, crash_servers

COUNT = 12

# point -> the roles that come by it; a scenario in which its victim does not reach its point is a failure
SENDER_POINTS = [
    "join.opened", "join.locked", "join.initialised", "join.owned", "join.sequences", "semaphore.created",
    "semaphore.written", "join.prepared", "join.entered", "join.done", "refresh.started", "grow.before", "grow.created",
    "grow.published", "send.described", "send.acquired", "send.copied", "publish.record", "publish.ordered",
    "publish.published", "publish.notified", "wait.asleep", "wait.made", "close.said",
    "close.leaving", "close.done", "leave.locked", "leave.unlinked", "leave.cleared", "sweep.names",
]  # fmt: skip
RECEIVER_POINTS = [
    "join.opened", "join.locked", "join.owned", "join.inbox", "join.prepared", "join.entered", "join.done",
    "attach.done", "take.delivered", "sleep.asleep", "sleep.awake", "release.ended", "release.stored", "close.said",
    "leave.said", "close.done", "leave.locked", "leave.unlinked", "leave.cleared", "sweep.names",
]  # fmt: skip
FAN_OUT_ONLY = ["take.found", "take.leased"]
CLAIMS_ONLY = ["claim.found", "claim.locked", "claim.stored", "done.before", "done.stored"]
GROUP_ONLY = ["join.grouped"]
SENDER_SPECIAL = ["takeback.cleared", "sweep.unlinked", "sweep.channel"]
RECEIVER_SPECIAL = ["take.shared", "drain.finished"]

RPC_SERVER = [
    "join.inbox", "join.entered", "attach.done", "claim.locked", "claim.stored", "take.delivered", "request.taken",
    "reply.opened", "publish.noted", "publish.record", "publish.ordered", "publish.published", "reply.sent",
    "done.before", "done.stored", "release.ended", "release.stored",
]  # fmt: skip
RPC_CLIENT = [
    "join.sequences", "join.entered", "publish.noted", "publish.ordered", "publish.published", "request.posted",
    "cancel.noted", "withdraw.locked", "withdraw.done", "take.leased", "release.ended", "release.stored",
]  # fmt: skip
RPC_SPECIAL = ["verdict.stored"]

TRACED = ["trace.attached", "trace.stored"]
TRACER = [
    "join.opened", "join.owned", "trace.made", "join.entered", "join.done", "trace.over", "leave.locked",
    "leave.unlinked", "leave.cleared", "sweep.names",
]  # fmt: skip

REPLACED = [
    "ring/writer.py",
    "ring/reader.py",
    "ring/reference.py",
    "ring/reference.py",
    "ring/events.py",
]
"""The modules that the compiled one stands in for; it does what `Sender.send` does besides."""


def test_the_compiled_module_has_the_points_of_the_reference():
    of_send = {name for name in points.names("endpoints/sender.py") if name.split(".")[0] in ("send", "publish")}
    assert points.native_names() == of_send | {name for module in REPLACED for name in points.names(module)}


@UNBUILT
def test_a_point_costs_nothing_in_the_module_that_is_shipped():
    assert hasattr(ctypes.CDLL(build.module_path()), "crash_point")
    assert not hasattr(ctypes.CDLL(native.module.__file__), "crash_point")


def test_every_point_is_in_the_matrix():
    """Those of the drop-ins are in `mp/test_faults.py`, of CUDA in `cuda/test_ipc.py` and `cuda/test_deaths.py`."""
    everywhere = (
        SENDER_POINTS, RECEIVER_POINTS, FAN_OUT_ONLY, CLAIMS_ONLY, GROUP_ONLY, SENDER_SPECIAL, RECEIVER_SPECIAL,
        RPC_SERVER, RPC_CLIENT, RPC_SPECIAL, TRACED, TRACER,
    )  # fmt: skip
    covered = {point for points_of_role in everywhere for point in points_of_role}
    of_checkpoints = set(points.names("checkpoint"))  # checkpoint/test_deaths.py
    assert not covered & of_checkpoints
    of_relays = set(points.names("relay"))  # relay/test_deaths.py
    assert not covered & of_relays
    of_cuda = {*DEVICE_POINTS, *COPY_POINTS}
    of_segments = {*SERVER_POINTS, *RESTARTED, *CLIENT_POINTS}  # containers/test_deaths.py
    others = DROPIN_POINTS | of_cuda | of_checkpoints | of_relays | of_segments
    assert covered | others == set(points.names())


@pytest.fixture(scope="module")
def servers():
    with crash_servers() as of:
        yield of


@pytest.fixture
def server(request, servers):
    return servers(request.param == "compiled")


def check_nothing_left(pattern: str, channel: str) -> None:
    """The next user of the channel starts, and then nothing of the dead is left."""
    make = shmtensor.Producer if pattern == "work-queue" else shmtensor.Publisher
    make(channel).close()
    left = left_files()
    assert not left, left


def options_for(point: str) -> dict:
    if point.startswith("grow"):
        return {"full": "grow", "slots": 2}
    if point.startswith("wait."):
        return {"slots": 1, "awaits": point == "wait.made"}
    if point == "takeback.cleared":
        return {"history": 1}
    return {}


PATTERNS = ["fan-out", "work-queue", "group"]
ELSEWHERE = {
    "fan-out": [*CLAIMS_ONLY, *GROUP_ONLY],
    "work-queue": [*FAN_OUT_ONLY, *GROUP_ONLY, "take.shared"],
    "group": [*FAN_OUT_ONLY, "take.shared"],
}


@pytest.mark.parametrize("pattern", PATTERNS)
@matrix(SENDER_POINTS + SENDER_SPECIAL)
def test_sender_dies(server, channel, pattern, point, action, nth):
    """What `send` returned for is received, by every subscriber or by one that shares, and then the stream ends."""
    if point == "takeback.cleared" and pattern != "fan-out":
        pytest.skip("this pattern does not come by")
    first = point in ("join.initialised", "sweep.channel")
    survivors = [] if first else [Process(server, "receiver", pattern, channel, None, None) for _ in range(2)]
    for survivor in survivors:
        survivor.listen("joined")
    other = None
    if not first:  # a second sender, so that the stream of the survivors has an end whatever becomes of the victim
        other = Process(server, "sender", pattern, channel, None, 2, 2, {"first": 1001})
        other.listen("joined")
    count = 0 if first else COUNT  # alone: nobody would take anything
    options, prey = options_for(point), None
    if point == "sweep.unlinked":  # the victim sweeps when it joins: somebody dies then
        prey = Process(server, "receiver", pattern, channel, None, None)
        prey.listen("joined")
        options["prey"] = prey.process.pid
    victim = Process(server, "sender", pattern, channel, (point, action, nth), count, len(survivors), options)
    victim.listen("joined")
    if prey:
        prey.finish()
    victim.go()
    victim.finish()
    if other:
        other.go()
        other.finish()
    for survivor in survivors:
        survivor.finish()
        assert not survivor.died, survivor.told
    if nth == 1 and not point.startswith("wait."):
        assert victim.died or victim.all("raised") or action != "raise", victim.told[-3:]
        if action != "raise":
            assert victim.died, f"never came by {point}"
    sent = victim.all("sent")
    mine = [[number for number, _ in survivor.all("got")] for survivor in survivors]
    if pattern == "fan-out":
        for got in mine:
            assert [number for number in got if number > 1000] == [1001, 1002]
            ours = [number for number in got if number <= 1000]
            assert is_subsequence(sent, ours), (sent, ours)
            assert len(ours) <= len(sent) + 1
    elif survivors:
        assert set(sent) <= {number for got in mine for number in got}
    check_nothing_left(pattern, channel)


@pytest.mark.parametrize("pattern", PATTERNS)
@matrix(RECEIVER_POINTS + FAN_OUT_ONLY + CLAIMS_ONLY + GROUP_ONLY + RECEIVER_SPECIAL)
def test_receiver_dies(server, channel, pattern, point, action, nth):
    """The sender and the other receiver go on; where messages are shared, the victim's are delivered again."""
    if point in ELSEWHERE[pattern]:
        pytest.skip("this pattern does not come by")
    tx = Process(server, "sender", pattern, channel, None, 4 * COUNT, 1, {})
    tx.listen("joined")

    def survive() -> Process:
        survivor = Process(server, "receiver", pattern, channel, None, None, 0, True)
        survivor.listen("joined")
        return survivor

    survivor = None if point in GROUP_ONLY else survive()
    victim_options = {"delivery": "latest", "depth": nth} if point == "take.shared" else {}
    stop_after = None if point in RECEIVER_SPECIAL else COUNT
    victim = Process(server, "receiver", pattern, channel, (point, action, nth), stop_after, 2, **victim_options)
    victim.listen("joined")
    survivor = survivor or survive()  # the victim makes the group
    if point.startswith("sleep."):
        victim.listen("raised")  # or its death: with nothing to receive it is sure to sleep
    tx.go()
    if pattern != "fan-out" or point == "take.shared":
        victim.listen("got")  # or its death: the survivor takes nothing before
    survivor.go()
    for process in (victim, tx, survivor):
        process.finish()
    assert not tx.died
    assert not survivor.died, survivor.told[-3:]
    assert tx.all("sent") == list(range(1, 4 * COUNT + 1))
    got = survivor.all("got")
    if pattern == "fan-out":
        assert [number for number, _ in got] == tx.all("sent")
    else:
        theirs = {number for number, _ in victim.all("got")}
        assert {number for number, _ in got} | theirs >= set(tx.all("sent"))
        numbers = [number for number, attempt in got if attempt == 1]
        assert len(numbers) == len(set(numbers)), "delivered twice without being marked"
    if nth == 1 and action != "raise":
        assert victim.died, f"never came by {point}"
    check_nothing_left(pattern, channel)


@pytest.mark.slow
@matrix(RPC_SERVER)
def test_server_dies(server, channel, point, action, nth):
    """Every request of the client gets its one reply, from the victim or from the server that survives."""
    asker = Process(server, "client", channel, None, COUNT)
    asker.listen("joined")
    victim = Process(server, "server", channel, (point, action, nth))
    victim.listen("joined")
    asker.go()
    survivor = None
    if victim.over:
        survivor = Process(server, "server", channel, None)
    elif action != "raise":
        if nth == 1:  # it is alone until it dies; a later time may never come
            victim.listen()
        survivor = Process(server, "server", channel, None)
    asker.listen("end")
    for answerer in (victim, survivor):
        if answerer is not None:
            answerer.go()
    for process in (asker, victim, survivor):
        if process is not None:
            process.finish()
    assert not asker.died
    assert asker.all("got") == [(number, 2 * number) for number in range(1, COUNT + 1)]
    lost = action == "raise" and point.startswith("release.")  # what raises where a view dies
    too_late = point.startswith("withdraw.")  # perhaps: a server may have taken what the victim gives up
    if nth == 1 and not lost and not too_late:
        assert victim.died if action != "raise" else victim.all("raised"), f"never came by {point}"
    check_nothing_left("work-queue", channel)


@pytest.mark.slow
@matrix(RPC_SPECIAL, ["kill", "exit"])
def test_server_dies_while_it_drops_a_request(server, channel, point, action, nth):
    """It is not done yet: the request goes to another server."""
    asker = Process(server, "client", channel, None, COUNT)
    asker.listen("joined")
    victim = Process(server, "server", channel, (point, action, nth), drop=True)
    victim.listen("joined")
    asker.go()
    victim.listen()
    survivor = Process(server, "server", channel, None)
    asker.listen("end")
    survivor.go()
    for process in (asker, victim, survivor):
        process.finish()
    assert victim.died
    assert not asker.died
    assert asker.all("got") == [(number, 2 * number) for number in range(1, COUNT + 1)]
    assert survivor.all("took")[0] == (1, 2)
    check_nothing_left("work-queue", channel)


@pytest.mark.slow
@matrix(RPC_CLIENT)
def test_client_dies(server, channel, point, action, nth):
    """Another client's requests are answered; the victim's replies are right as far as it got any."""
    answerer = Process(server, "server", channel, None)
    answerer.listen("joined")
    other = Process(server, "client", channel, None, COUNT)
    other.listen("joined")
    victim = Process(server, "client", channel, (point, action, nth), COUNT)
    victim.listen("joined")
    victim.go()
    other.go()
    other.listen("end")
    victim.listen("end")
    answerer.go()
    for process in (victim, other, answerer):
        process.finish()
    assert not other.died
    assert not answerer.died
    wanted = [(number, 2 * number) for number in range(1, COUNT + 1)]
    assert other.all("got") == wanted
    got = victim.all("got")
    assert got == wanted[: len(got)]
    lost = action == "raise" and point.startswith("release.")  # what raises where a view dies
    too_late = point.startswith("withdraw.")  # perhaps: a server may have taken what the victim gives up
    if nth == 1 and not lost and not too_late:
        assert victim.died if action != "raise" else victim.all("raised"), f"never came by {point}"
    check_nothing_left("work-queue", channel)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("role", ["sender", "receiver"])
@matrix(TRACED)
def test_a_traced_member_dies(server, channel, role, pattern, point, action, nth):
    """All that it had written is seen, and the others go on, traced."""
    other = Process(server, "receiver", pattern, channel, None, None, 0, True)
    other.listen("joined")
    with Tracer(channel, size=1024) as tracer:
        plans = {"sender": None, "receiver": None} | {role: (point, action, nth)}
        rx = Process(server, "receiver", pattern, channel, plans["receiver"], COUNT, 0, role == "sender")
        rx.listen("joined")
        tx = Process(server, "sender", pattern, channel, plans["sender"], COUNT, 1, {})
        tx.listen("joined")
        tx.go()
        if role == "receiver":  # the other one takes nothing before
            rx.listen("got")
        rx.go()
        other.go()
        for process in (rx, tx, other):
            while not process.over:  # as the command does, which lets the members go on
                tracer.poll()
                if process.pipe.poll(0.02):
                    process.listen_once()
            process.finish()
        victim = rx if role == "receiver" else tx
        assert not other.died, other.told[-3:]
        assert action == "raise" or victim.died, f"never came by {point}"
        tracer.poll()
        of_other = [row for row in tracer.trace.events().tolist() if row[ev.E_PID] == other.pid]
        taken = [row[ev.E_WHAT] >> 8 for row in of_other if row[ev.E_WHAT] & 0xFF == ev.TAKE]
        assert len(taken) == len(other.all("got"))
        assert tracer.trace.lost == 0
    check_nothing_left(pattern, channel)


@matrix(TRACER)
def test_a_tracer_dies(server, channel, point, action, nth):
    """The members lose nothing, and go on without it."""
    rx = Process(server, "receiver", "fan-out", channel, None, None)
    rx.listen("joined")
    tx = Process(server, "sender", "fan-out", channel, None, COUNT, 1, {})
    tx.listen("joined")
    victim = Process(server, "tracer", channel, (point, action, nth))
    victim.listen("traces")  # or its death
    tx.go()
    victim.go()
    for process in (victim, tx, rx):
        process.finish()
    assert [number for number, _ in rx.all("got")] == tx.all("sent") == list(range(1, COUNT + 1))
    assert victim.died if action != "raise" else victim.all("raised"), f"never came by {point}"
    check_nothing_left("fan-out", channel)


def is_subsequence(wanted: list, within: list) -> bool:
    rest = iter(within)
    return all(item in rest for item in wanted)
