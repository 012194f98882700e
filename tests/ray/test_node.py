"""What a node does with its relays, and what the thread does that looks after the nodes. Relays, and Ray, are fakes."""

from __future__ import annotations

import dataclasses
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

import shmtensor
from shmtensor.ray import node as node_module
from shmtensor.ray.node import NodeRelays, Report, Settings
from shmtensor.ray.relays import Relays
from shmtensor.relay.frames import ONE_VERSION

from ..waiting import PATIENCE, wait_until
from .cluster import skip_unless_there

relays_module = sys.modules[Relays.__module__]  # `shmtensor.ray.relays` is the function
SETTINGS = Settings(
    names=("frames",), pattern="fan-out", delivery="auto", ports=(20000, 20010), protocol="tcp", config=None,
    window=None, window_bytes=None, away=None, slots=None, max_bytes=None, user="test",
)  # fmt: skip
QUIET = shmtensor.RelayStatistics(
    state="open", messages=0, nbytes=0, acknowledged=0, in_flight=0, resent=0, duplicates=0, connections=1, reason="",
    refused=0, bad_frames=0,
)  # fmt: skip


class FakeRelay:
    """A relay without a network: `channel` is what it says of its only channel."""

    made: list[FakeRelay] = []  # noqa: RUF012
    refusal: Exception | None = None

    def __init__(self, _names: Any, *, to: str = "", **_options: Any) -> None:
        if FakeRelay.refusal is not None and to:
            raise FakeRelay.refusal
        self.to, self.is_closed, self.on_close = to, False, lambda: None
        self.channel = dataclasses.replace(QUIET, state="seeking", connections=0)
        FakeRelay.made.append(self)

    def check(self) -> None:
        if self.channel.state == "failed":
            raise shmtensor.WireError(self.channel.reason)

    def statistics(self) -> dict[str, shmtensor.RelayStatistics]:
        return {"frames": self.channel}

    def set(self, state: str, reason: str = "") -> None:
        connections = self.channel.connections + (state == "open")
        self.channel = dataclasses.replace(self.channel, state=state, reason=reason, connections=connections)

    def close(self, linger: float = 0) -> None:
        self.on_close()
        self.is_closed = True


def living(to: str) -> list[FakeRelay]:
    return [it for it in FakeRelay.made if it.to == to and not it.is_closed]


@pytest.fixture
def clock(monkeypatch):
    """The node's; and its relays are no real ones."""
    now = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(node_module, "time", SimpleNamespace(monotonic=lambda: now.now))
    monkeypatch.setattr(node_module, "Relay", FakeRelay)
    monkeypatch.setattr(FakeRelay, "made", [])
    return now


OTHERS = {"b": "tcp/192.0.2.2:20000", "c": "tcp/192.0.2.3:20000"}


def test_a_relay_that_fails_is_made_again(clock):
    """After some seconds, each time later. The other relays stay."""
    node = NodeRelays("a", "192.0.2.1", SETTINGS)
    assert node.update(True, OTHERS).problem == ""
    (other,) = living(OTHERS["c"])
    (relay,) = living(OTHERS["b"])
    for pause in (5, 10, 20):
        relay.set("failed", "no room")
        for _ in range(2):
            report = node.update(True, OTHERS)
            assert "192.0.2.2" in report.problem
            assert "no room" in report.problem
            assert set(report.sent) == {"c"}
        assert relay.is_closed
        clock.now += pause - 0.5
        node.update(True, OTHERS)
        assert not living(OTHERS["b"])
        clock.now += 1
        node.update(True, OTHERS)
        (relay,) = living(OTHERS["b"])
        assert "no room" in node.update(True, OTHERS).problem  # until it is connected
        relay.set("open")
        assert node.update(True, OTHERS).problem == ""
        assert set(node.update(True, OTHERS).sent) == {"b", "c"}
    clock.now += 41
    node.update(True, OTHERS)  # it was well for so long
    relay.set("failed", "no room")
    node.update(True, OTHERS)
    clock.now += 5
    node.update(True, OTHERS)
    assert len(living(OTHERS["b"])) == 1
    assert living(OTHERS["c"]) == [other]
    node.close(0)
    assert all(it.is_closed for it in FakeRelay.made)


def test_a_relay_that_cannot_be_made_does_not_keep_others_from_being_made(clock, monkeypatch):
    monkeypatch.setattr(FakeRelay, "refusal", shmtensor.ResourceError(1, "no memory"))
    node = NodeRelays("a", "192.0.2.1", SETTINGS)
    assert "no memory" in node.update(True, OTHERS).problem
    monkeypatch.setattr(FakeRelay, "refusal", None)
    clock.now += 6
    node.update(True, OTHERS)
    for relay in FakeRelay.made:
        relay.set("open")
    assert node.update(True, OTHERS).problem == ""
    assert set(node.update(True, OTHERS).sent) == {"b", "c"}
    node.close(0)


def test_a_node_that_is_lost_holds_nobody_back_for_ever(clock):
    """What its relay has taken is given up after `away`; one that was never connected holds nothing."""
    node = NodeRelays("a", "192.0.2.1", dataclasses.replace(SETTINGS, away=30.0))
    node.update(True, OTHERS)
    (lost,), (never,) = living(OTHERS["b"]), living(OTHERS["c"])
    lost.set("open")
    for _ in range(2):  # it is there again in between
        lost.set("seeking")
        node.update(True, OTHERS)
        clock.now += 29
        node.update(True, OTHERS)
        assert not lost.is_closed
        lost.set("open")
        node.update(True, OTHERS)
    lost.set("seeking")
    node.update(True, OTHERS)
    clock.now += 31
    node.update(True, OTHERS)
    assert lost.is_closed
    assert not never.is_closed
    node.update(True, OTHERS)
    assert len(living(OTHERS["b"])) == 1
    node.close(0)


def test_relays_end_at_once(clock):
    """One whose peer is stuck takes no time from the others."""
    node = NodeRelays("a", "192.0.2.1", SETTINGS)
    node.update(True, OTHERS)
    both = threading.Barrier(2)
    for relay in (*living(OTHERS["b"]), *living(OTHERS["c"])):
        relay.on_close = lambda: both.wait(PATIENCE)
    node.drain(5)
    assert not living(OTHERS["b"])
    node.close(0)


# --- the thread that looks after the nodes


A, B, C = ("a" * 56, "b" * 56, "c" * 56)


class Unavailable(Exception):
    pass


class FakeRay:
    """A cluster of two nodes. `answers`: by node, what its actor answers, or raises."""

    exceptions = SimpleNamespace(ActorUnavailableError=Unavailable)

    def __init__(self) -> None:
        self.address, self.problem = "192.0.2.9:6379", ""
        self.started: list[str] = []
        self.killed: list[Any] = []
        self.answers: dict[str, list[Any]] = {A: [], B: []}

    def is_initialized(self) -> bool:
        return True

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address=self.address, get_job_id=lambda: "01000000")

    def nodes(self) -> list[dict[str, Any]]:
        if self.problem:
            raise RuntimeError(self.problem)
        return [{"NodeID": it, "NodeManagerAddress": f"192.0.2.{it[0]}", "Alive": True} for it in self.answers]

    def remote(self, _class: type) -> Any:
        def start(node: str, *_: Any) -> Any:
            self.started.append(node)
            method = SimpleNamespace(remote=lambda *_: node)
            return SimpleNamespace(update=method, drain=method, close=method)

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=start))

    def wait(self, calls: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return calls, []

    def get(self, node: str) -> Any:
        answers = self.answers[node]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self, actor: Any, **_: Any) -> None:
        self.killed.append(actor)


def report_of(node: str, **changes: Any) -> Report:
    other = B if node == A else A
    channel = dataclasses.replace(QUIET, **changes)
    return Report(node, f"tcp/192.0.2.{node}:20000", "", {}, {other: {"frames": channel}})


@pytest.fixture
def fake_ray(monkeypatch):
    skip_unless_there()
    for name in ("_TICK_S", "_IDLE_S", "_START_AGAIN_S"):
        monkeypatch.setattr(relays_module, name, 0.001)
    ray = FakeRay()
    ray.answers = {it: [report_of(it)] for it in (A, B)}
    return ray


def test_a_node_that_does_not_answer_for_a_moment_keeps_its_relay(fake_ray):
    fake_ray.answers[A] = [report_of(A), *[Unavailable("for now")] * 3, report_of(A)]
    with Relays(fake_ray, SETTINGS, None) as relays:
        wait_until(lambda: len(fake_ray.answers[A]) == 1)
        relays.wait(PATIENCE)
        assert sorted(fake_ray.started) == [A, B]
        assert not fake_ray.killed
    assert len(fake_ray.killed) == 2


def test_wait_sees_who_has_joined_just_now(fake_ray, monkeypatch):
    """It does not go by what was there when the thread looked last."""
    monkeypatch.setattr(relays_module, "_IDLE_S", 1000.0)

    def joined(node):
        others = {other: {"frames": QUIET} for other in (A, B, C) if other != node}
        return dataclasses.replace(report_of(node), sent=others)

    fake_ray.answers = {it: [joined(it)] for it in (A, B)}
    with Relays(fake_ray, SETTINGS, None) as relays:
        relays.wait(PATIENCE)
        fake_ray.answers[C] = [joined(C)]
        relays.wait(PATIENCE)
        assert relays.statistics()[C].state == "open"


def test_an_error_does_not_end_the_thread(fake_ray, caplog):
    with Relays(fake_ray, SETTINGS, None) as relays:
        relays.wait(PATIENCE)
        fake_ray.problem = "the head node is being replaced"
        wait_until(lambda: "could not be looked after" in caplog.text)
        fake_ray.answers[C] = [report_of(C)]
        fake_ray.problem = ""
        wait_until(lambda: C in relays.statistics())
    assert caplog.text.count("could not be looked after") == 1


def test_an_actor_that_cannot_start_is_tried_less_and_less_often(fake_ray, monkeypatch):
    monkeypatch.setattr(relays_module, "_START_AGAIN_S", 100.0)
    now = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(relays_module, "time", SimpleNamespace(monotonic=lambda: now.now))
    fake_ray.answers[A] = [OSError("no room")]
    relays = Relays(fake_ray, SETTINGS, None)
    for count in range(1, 6):
        wait_until(lambda count=count: A in relays._nodes and relays._nodes[A].failures == count)
        assert fake_ray.started.count(A) == count
        now.now += 100 * 2 ** (count - 1) - 1
        before = relays._seen
        wait_until(lambda before=before: relays._seen > before + 2)
        assert fake_ray.started.count(A) == count
        now.now += 2
    fake_ray.answers[A] = [report_of(A)]
    now.now += 100 * 2**6
    relays.wait()
    relays.close()


def test_a_signal_handler_that_closes_what_is_being_closed(fake_ray, monkeypatch):
    """It returns at once, and the call that it has interrupted waits no longer for nodes that do not answer."""
    relays, waits, said, wait = Relays(fake_ray, SETTINGS, None), [], [], FakeRay.wait
    relays.wait(PATIENCE)

    def interrupted(ray, calls, **options):
        if threading.current_thread() is not threading.main_thread():
            return wait(ray, calls, **options)
        waits.append(calls)
        if len(waits) == 1:  # a handler runs in the main thread
            relays.close(3600)
            said.append("has ended")
        return [], calls

    monkeypatch.setattr(FakeRay, "wait", interrupted)
    relays.close(3600)
    assert (len(waits), said) == (1, ["has ended"])
    assert len(fake_ray.killed) == 2
    assert repr(relays).endswith("closed>")
    relays.close()


def test_another_cluster_is_another_connection(fake_ray):
    with Relays(fake_ray, SETTINGS, None) as relays:
        relays.wait(PATIENCE)
        fake_ray.address = "192.0.2.8:6379"  # its jobs have the same numbers

        def is_over() -> bool:
            try:
                relays.wait(0)
            except shmtensor.ClosedError as error:
                return "shut down" in str(error)
            return False

        wait_until(is_over)


def test_what_wait_says_of_refusals(fake_ray):
    """Other versions are an error at once; all else may pass, and is named when the time is up."""
    with Relays(fake_ray, SETTINGS, None) as relays:
        relays.wait(PATIENCE)
        fake_ray.answers[A] = [report_of(A, state="refused", reason="message of 2 MiB, max_bytes is 1 MiB")]
        wait_until(lambda: relays.statistics()[A].sent[B]["frames"].state == "refused")
        with pytest.raises(shmtensor.TimedOut, match=r"frames refused \(message of 2 MiB, max_bytes is 1 MiB\)"):
            relays.wait(0)
        fake_ray.answers[A] = [report_of(A, state="refused", reason=f"protocol 2 there: {ONE_VERSION}")]
        with pytest.raises(shmtensor.WireError, match=f"node {B} refuses the relay of node {A}: protocol 2 there"):
            relays.wait(PATIENCE)
        fake_ray.answers[B] = [Exception("No module named 'shmtensor'")]
        wait_until(lambda: relays.statistics()[B].problem)
        with pytest.raises(shmtensor.DependencyError, match=f"node {B}"):  # of whichever node: it may explain all else
            relays.wait(PATIENCE)
