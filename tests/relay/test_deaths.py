"""A relay that is killed at any step: a queue loses nothing, a fan-out nothing when it was the far one, each request
ends once."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from concurrent.futures import TimeoutError as FutureTimeout

import numpy as np
import pytest

pytest.importorskip("zenoh", reason="a relay needs the extra `relay`")

import shmtensor

from ..faults import points
from ..faults.interrupts import SOAK
from ..waiting import PATIENCE, wait_until
from .hosts import Remote, endpoint, pair, state_of

COUNT = 24
NEAR = ["relay.taken", "relay.sent", "relay.parted", "relay.acknowledged"]
FAR = ["relay.received", "relay.filled", "relay.published", "relay.stated"]
QUEUE_ONLY = ["relay.done"]
NEAR_REQUESTS = [*NEAR, "relay.answered", "relay.filled"]
FAR_REQUESTS = [
    *FAR[:2], "relay.posted", "relay.replied", "relay.sent", "relay.parted", "relay.confirmed", "relay.stated"
]  # fmt: skip
REFUSALS = ["relay.refused", "relay.declined", "relay.returned"]
LARGE = ("relay.parted", "relay.filled")


def test_every_point_is_in_the_matrix():
    assert {*NEAR, *FAR, *QUEUE_ONLY, *NEAR_REQUESTS, *FAR_REQUESTS, *REFUSALS} == set(points.names("relay"))


def run(channel, pattern, victim, point, nth):
    """Kill one relay at a point while messages pass, start it again, and return the numbers that arrived, the first
    that must, and how many were sent."""
    where, there = endpoint(), f"{channel}-far"
    options = {
        "near": {"name": channel, "to": where, "remote": there, "pattern": pattern},
        "far": {"name": there, "listen": where},
    }
    make, take = (
        (shmtensor.Publisher, shmtensor.Subscriber)
        if pattern == "fan-out"
        else (shmtensor.Producer, shmtensor.Consumer)
    )
    size = 400_000 if point in LARGE else 10
    arrived: list[int] = []
    with make(channel) as tx, take(there, until="closed") as rx:
        relays = {
            side: Remote("relay", **it, **({"crash": [point, "kill", nth]} if side == victim else {}))
            for side, it in options.items()
        }
        try:
            for it in relays.values():
                it.wait_for("ready")
            while (
                pattern == "fan-out" and relays[victim].process.poll() is None
            ):  # it may die of what it hears at first
                with contextlib.suppress(shmtensor.TimedOut):
                    tx.wait_for_subscribers(1, timeout=0.1)
                    break

            def receive(until: int) -> None:
                while len(set(arrived)) < until:
                    with rx.recv(timeout=PATIENCE) as message:
                        assert (message.value["data"] == message.value["number"]).all()
                        arrived.append(message.value["number"])

            def send_if_there_is_room() -> bool:  # when the victim has died, nobody frees a slot
                try:
                    tx.send({"number": sent, "data": np.full(size, sent)}, timeout=0.2)
                except shmtensor.RingFull:
                    return False
                return True

            def receive_one() -> bool:
                try:
                    message = rx.recv(timeout=0.2)
                except shmtensor.TimedOut:
                    return False
                with message:
                    arrived.append(message.value["number"])
                return True

            sent = 0
            while relays[victim].process.poll() is None and sent < COUNT:
                has_room = send_if_there_is_room()
                sent += has_room
                if relays[victim].process.poll() is None and (not has_room or sent % 4 == 0):
                    receive_one()
            while relays[victim].process.poll() is None:  # it comes by when more is done, or sent
                if not receive_one() and len(set(arrived)) == sent:
                    sent += send_if_there_is_room()
            relays[victim].wait_for_death()
            count = max(sent, COUNT) + 4
            relays[victim] = Remote("relay", **options[victim])
            relays[victim].wait_for("ready")
            if victim == "near" and pattern == "fan-out":
                relays[victim].wait_for("connected")
                first = sent
            else:
                first = 0

            def send_the_rest(begin: int = sent) -> None:
                for number in range(begin, count):
                    tx.send({"number": number, "data": np.full(size, number)}, timeout=PATIENCE)

            rest = threading.Thread(target=send_the_rest)  # a queue's slots are free when this test has received
            rest.start()
            if first:  # what its subscriber had is lost with it: what comes later arrives
                while count - 1 not in arrived:
                    receive(len(set(arrived)) + 1)
                rest.join()
                return arrived, first, count
            receive(count)
            rest.join()
            while pattern == "work-queue" and not tx._recipients.is_settled():  # what comes twice is done, too
                try:
                    message = rx.recv(timeout=0.2)
                except shmtensor.TimedOut:
                    continue
                with message:
                    arrived.append(message.value["number"])
            return arrived, first, count
        finally:
            for it in relays.values():
                it.end()


@pytest.mark.slow
@pytest.mark.parametrize("nth", [1, 3] if SOAK else [3])
@pytest.mark.parametrize(
    ("victim", "point"), [*(("near", it) for it in NEAR), *(("far", it) for it in (*FAR, *QUEUE_ONLY))]
)
def test_a_queue_loses_nothing(channel, victim, point, nth):
    arrived, _, count = run(channel, "work-queue", victim, point, nth)
    assert set(arrived) == set(range(count))


@pytest.mark.slow
@pytest.mark.parametrize("point", FAR)
def test_a_fan_out_loses_nothing_when_its_far_relay_dies(channel, point):
    arrived, _, count = run(channel, "fan-out", "far", point, 2)
    assert set(arrived) == set(range(count))


@pytest.mark.slow
@pytest.mark.parametrize("point", NEAR)
def test_a_fan_out_goes_on_when_its_near_relay_was_killed(channel, point):
    """It is a subscriber that died: what comes after its successor has joined arrives, in order, once."""
    arrived, first, count = run(channel, "fan-out", "near", point, 2)
    later = [number for number in arrived if number >= first]
    assert later == list(range(first, count))


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["fan-out", "work-queue"])
def test_a_far_relay_dies_as_it_refuses(channel, pattern):
    """What it had no room for goes to its successor, which has."""
    where, there = endpoint(), f"{channel}-far"
    make, take = (
        (shmtensor.Publisher, shmtensor.Subscriber)
        if pattern == "fan-out"
        else (shmtensor.Producer, shmtensor.Consumer)
    )
    far = {"name": there, "listen": where}
    with (
        make(channel) as tx,
        take(there, until="closed") as rx,
        Remote("relay", **far, max_bytes="1MiB", crash=["relay.refused", "kill", 1]) as first,
        Remote("relay", name=channel, to=where, remote=there, pattern=pattern) as near,
    ):
        near.wait_for("connected")
        for size in (10, 10, 2 << 20):
            tx.send(np.zeros(size, np.uint8))
        first.wait_for_death()
        with Remote("relay", **far) as second:
            second.wait_for("ready")
            sizes = []
            while 2 << 20 not in sizes:
                with rx.recv(timeout=PATIENCE) as message:
                    sizes.append(len(message.value))
            assert sizes.count(10) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["near", "far"])
def test_a_relay_dies_as_what_was_refused_goes_to_others(channel, victim):
    """Of a queue, behind a refusal: what the near relay gives back is another consumer's here, whoever dies then. What
    the far one has received may come twice."""
    where, there = endpoint(), f"{channel}-far"
    far = {"name": there, "listen": where, "max_bytes": "1MiB"}
    near = {"name": channel, "to": where, "remote": there, "pattern": "work-queue"}
    crash = {"crash": ["relay.returned", "kill", 1]} if victim == "near" else {}
    with (
        shmtensor.Producer(channel) as tx,
        shmtensor.Producer(there),  # a member: the channel stays
        Remote("relay", **far) as second,
        Remote("relay", **near, **crash) as first,
    ):
        second.wait_for("ready")
        with shmtensor.Consumer(there, acknowledge="release", until="closed") as rx:
            first.wait_for("connected")
            tx.send({"number": 0, "data": np.zeros(10)})
            begun = rx.recv(timeout=PATIENCE)
            for number in range(1, 4):
                tx.send({"number": number, "data": np.zeros(300_000)})
            wait_until(lambda: first.statistics()[channel]["state"] == "refused")
            begun.release()
        if victim == "near":  # nobody is there any more: soon it gives them back
            first.wait_for_death()
        arrived = Counter()
        with shmtensor.Consumer(channel, until="closed") as here:
            while set(arrived) < {1, 2, 3}:
                with here.recv(timeout=PATIENCE) as message:
                    arrived[message.value["number"]] += 1
                if victim == "far" and second.process.poll() is None:
                    second.kill()
            assert set(arrived) <= {0, 1, 2, 3}
            assert all(arrived[number] == 1 for number in (1, 2, 3))


# --- requests


def ask(channel, victim, point, nth, retry):
    """Kill one relay at a point while requests pass, start it again. Returns what each request ended with, by its
    number, and how often each was begun with."""
    where, there = endpoint(), f"{channel}-far"
    options = {
        "near": {"name": channel, "to": where, "remote": there, "pattern": "service"},
        "far": {"name": there, "listen": where},
    }
    size, begun = 400_000 if point in LARGE else 10, Counter()
    with shmtensor.Server(there) as server, shmtensor.Client(channel, slots=64) as client:

        def serve():
            for request in server:
                begun[request.value["number"]] += 1
                assert request.attempt == 1 or retry
                request.reply(request.value)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        relays = {
            side: Remote("relay", **it, **({"crash": [point, "kill", nth]} if side == victim else {}))
            for side, it in options.items()
        }
        try:
            futures = []

            def submit():
                number = len(futures)
                futures.append(client.submit({"number": number, "data": np.full(size, number)}, retry=retry))

            while relays[victim].process.poll() is None and len(futures) < 40:
                submit()
                with contextlib.suppress(FutureTimeout, shmtensor.PeerDied):
                    futures[-1].result(0.3)
            relays[victim].wait_for_death()
            relays[victim] = Remote("relay", **options[victim])
            if not retry:  # what is sent to the dead one fails
                wait_until(lambda: relays["near"].statistics()[channel]["connections"] >= (2 if victim == "far" else 1))
            for _ in range(4):
                submit()
            ends = [it.exception(PATIENCE) or it.result() for it in futures]
            for number, end in enumerate(ends):
                if not isinstance(end, shmtensor.PeerDied):
                    assert end["number"] == number
                    assert (end["data"] == number).all()
                    assert len(end["data"]) == size
            return [isinstance(it, shmtensor.PeerDied) for it in ends], begun
        finally:
            server.stop()
            for it in relays.values():
                it.end()
            thread.join()


EITHER = [*(("near", it) for it in NEAR_REQUESTS), *(("far", it) for it in FAR_REQUESTS)]


@pytest.mark.slow
@pytest.mark.parametrize("nth", [1, 3] if SOAK else [1])
@pytest.mark.parametrize(("victim", "point"), EITHER)
def test_each_request_is_answered(channel, victim, point, nth):
    ends, begun = ask(channel, victim, point, nth, retry=True)
    assert not any(ends)
    assert set(begun) == set(range(len(ends)))


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "point"), EITHER)
def test_a_request_that_may_be_tried_once_is_tried_once(channel, victim, point):
    ends, begun = ask(channel, victim, point, 2, retry=False)
    assert set(begun.values()) == {1}
    assert not any(ends[-3:])


@pytest.mark.slow
@pytest.mark.parametrize("retry", [True, False])
def test_a_far_relay_dies_as_it_declines(channel, retry):
    """The request goes to its successor, which has room for it, if it may be tried again."""
    where, there = endpoint(), f"{channel}-far"
    far = {"name": there, "listen": where}
    with (
        shmtensor.Client(channel) as client,
        Remote("serve", channel=there) as server,
        Remote("relay", **far, max_bytes="1MiB", crash=["relay.declined", "kill", 1]) as first,
        Remote("relay", name=channel, to=where, remote=there, pattern="service") as near,
    ):
        for it in (server, near):
            it.wait_for("ready")
        future = client.submit({"number": 1, "data": np.zeros(2 << 20, np.uint8)}, retry=retry, timeout=PATIENCE)
        first.wait_for_death()
        with Remote("relay", **far) as second:
            second.wait_for("ready")
            if retry:
                assert future.result()["number"] == 1
            else:
                with pytest.raises(shmtensor.PeerDied):
                    future.result()
        future = None


@pytest.mark.slow
@pytest.mark.parametrize("retry", [True, False])
@pytest.mark.parametrize("point", ["request.taken", "reply.sent"])
def test_a_server_there_dies(channel, point, retry):
    """Before it has replied, another one there gets the request, if it may be tried again; after, the reply arrives."""
    with pair(channel, "service") as (near, _), shmtensor.Client(channel) as client:
        first = Remote("serve", channel=f"{channel}-far", crash=[point, "kill", 1])
        first.wait_for("ready")
        future = client.submit({"number": 1}, retry=retry, timeout=PATIENCE)
        first.wait_for_death()
        with Remote("serve", channel=f"{channel}-far") as second:
            second.wait_for("ready")
            if point == "request.taken" and not retry:
                with pytest.raises(shmtensor.PeerDied):
                    future.result()
                assert second.all("took") == []
            else:
                assert future.result() == {"number": 1}
            assert client.request({"number": 2}, timeout=PATIENCE) == {"number": 2}
            took = second.wait_for("took")
            if point == "request.taken" and retry:
                assert took[0] == [1, 2]
        wait_until(lambda: state_of(near).in_flight == 0)


@pytest.mark.slow
def test_as_many_servers_die_as_may(channel):
    """Here and there together: then it fails, as it would here."""
    with pair(channel, "service") as (near, _), shmtensor.Client(channel) as client:
        future = client.submit({"number": 1}, timeout=PATIENCE)
        for name in (channel, f"{channel}-far", f"{channel}-far"):
            Remote("serve", channel=name, crash=["request.taken", "kill", 1]).wait_for_death()
        with Remote("serve", channel=f"{channel}-far") as last, pytest.raises(shmtensor.PeerDied, match="3 servers"):
            last.wait_for("ready")
            future.result()
        assert last.all("took") == []
        wait_until(lambda: state_of(near).in_flight == 0)


@pytest.mark.slow
def test_a_client_dies(channel):
    """What it asked for is cancelled there."""
    with pair(channel, "service") as (near, _), shmtensor.Server(f"{channel}-far") as server:
        client = Remote("request", channel=channel)
        request = server.recv(timeout=PATIENCE)
        assert not request.cancelled
        client.kill()
        wait_until(lambda: request.cancelled)
        request.reply(0)
        wait_until(lambda: state_of(near).in_flight == 0)
