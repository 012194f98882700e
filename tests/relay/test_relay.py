"""A relay of a fan-out or a work queue, both ends on this machine."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

zenoh = pytest.importorskip("zenoh", reason="a relay needs the extra `relay`")

import shmtensor  # noqa: E402
from shmtensor.channel import control  # noqa: E402
from shmtensor.codec.encode import encode  # noqa: E402
from shmtensor.relay import endpoints, frames, inbound, near_requests, outbound, refusal, sending, stream, window  # noqa: E402
from shmtensor.relay.keys import Keys, path_hash  # noqa: E402
from shmtensor.relay.session import Session, why_silent  # noqa: E402
from shmtensor.relay.stream import Stream  # noqa: E402
from shmtensor.wire import record  # noqa: E402

from ..scenes import HIDDEN  # noqa: E402
from ..waiting import PATIENCE, once, wait_until  # noqa: E402
from .hosts import endpoint, is_open, listening_ports, mesh, pair, state_of  # noqa: E402

MAKERS = {
    "fan-out": (shmtensor.Publisher, shmtensor.Subscriber),
    "work-queue": (shmtensor.Producer, shmtensor.Consumer),
}


class BroughtProducer(shmtensor.Producer):
    """One of a relay: its label says which way its messages came."""

    _flags = control.RELAY


class BroughtPublisher(shmtensor.Publisher):
    """The same of a fan-out."""

    _flags = control.RELAY


def is_equal(left, right) -> bool:
    """Whether two values are the same, with types, dtypes, shapes and strides."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(is_equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(is_equal, left, right))
    if isinstance(left, torch.Tensor):
        if left.layout != torch.strided:
            return left.layout == right.layout and torch.equal(left.to_dense(), right.to_dense())
        return left.dtype == right.dtype and left.stride() == right.stride() and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.strides == right.strides and bool((left == right).all())
    return bool(left == right)


def values():
    weight = torch.arange(24.0).reshape(4, 6)
    return [
        (torch.arange(6).reshape(2, 3), None),
        ({"image": torch.zeros(48, 64, 3, dtype=torch.uint8), "id": 7, "name": "left"}, {"ts": 1.5, "tags": ["a"]}),
        ([weight, weight[1:].T, weight[::2, ::3]], None),
        (torch.eye(3).to(torch.bfloat16), {"req": "r-123"}),
        (torch.eye(4).to_sparse(), None),
        (np.asfortranarray(np.arange(12.0).reshape(3, 4)), None),
        (np.zeros(3, dtype=[("a", "<i4"), ("b", "f8", 2)]), None),
        (np.array(["2026-01-01"], "datetime64[D]"), None),
        (b"some bytes", None),
        ({str(number): np.full(number, number) for number in range(60)}, {"spills": "the description"}),
        ({"big": np.arange(700_000), "more": torch.ones(300_000)}, {"parts": True}),
        ((None, True, -(1 << 80), 2.5, "text", [], {}), None),
        ("x" * 700_000, None),
        ({"x": np.arange(10), "text": "x" * 700_000}, None),
        ({"x": np.arange(300_000), "text": "x" * 600_000}, {"more": "x" * 60_000}),
    ]  # fmt: skip


@pytest.mark.parametrize("pattern", ["fan-out", "work-queue"])
def test_values_arrive_as_they_do_locally(channel, pattern):
    make, take = (
        (shmtensor.Publisher, shmtensor.Subscriber)
        if pattern == "fan-out"
        else (shmtensor.Producer, shmtensor.Consumer)
    )
    with make(channel, label="left camera") as tx, take(f"{channel}-far") as rx, pair(channel, pattern) as (near, far):
        local = shmtensor.Subscriber(channel) if pattern == "fan-out" else None
        for value, meta in values():
            tx.send(value, meta)
            with rx.recv(timeout=PATIENCE) as message:
                assert is_equal(message.value, value), (message.value, value)
                assert message.meta == meta
                assert message.sender.name == f"left camera via {path_hash(channel):08x}"
                if local is not None:
                    with local.recv(timeout=PATIENCE) as here:
                        assert is_equal(message.value, here.value)
                        assert message.nbytes == here.nbytes
        if local is not None:
            local.close()
        wait_until(lambda: state_of(near).in_flight == 0)
        count = len(values())
        assert state_of(near).messages == state_of(near).acknowledged == count
        assert state_of(far).messages == state_of(far).acknowledged == count
        assert state_of(far).bad_frames == state_of(near).bad_frames == 0


def test_order_and_the_end_of_the_stream(channel):
    with shmtensor.Subscriber(f"{channel}-far") as rx, pair(channel) as (near, _):
        senders = [shmtensor.Publisher(channel, label=str(number)) for number in range(3)]
        for number in range(60):
            for index, tx in enumerate(senders):
                tx.send({"from": index, "number": number, "data": np.zeros(number)})
        for tx in senders:
            tx.close()
        seen = {0: [], 1: [], 2: []}
        for message in rx:  # ends when the senders there have left, here
            seen[message.value["from"]].append(message.value["number"])
            assert message.sender.name.startswith(f"{message.value['from']} via ")
            del message
        assert seen == {index: list(range(60)) for index in range(3)}
        assert is_open(near)


def test_a_queue_message_is_done_here_when_it_is_done_there(channel):
    with (
        shmtensor.Producer(channel) as tx,
        shmtensor.Consumer(f"{channel}-far", acknowledge="release") as rx,
        pair(channel, "work-queue") as (near, _),
    ):
        for number in range(6):
            tx.send(np.full(4, number))
        messages = [rx.recv(timeout=PATIENCE) for _ in range(6)]
        wait_until(lambda: state_of(near).in_flight == 6)
        assert tx.statistics().slots_busy == 6
        for index in (4, 2, 0):  # in any order
            messages[index].release()
        wait_until(lambda: state_of(near).in_flight == 3)
        messages[1].release()
        wait_until(lambda: state_of(near).acknowledged == 4)
        for message in messages:
            message.release()
        del messages, message
        wait_until(lambda: state_of(near).in_flight == 0)


def test_a_stalled_far_subscriber_holds_its_channel_back_and_no_other(channel):
    """Ring there, window, ring here are full: the sender waits by its own rule. The other channel goes on."""
    names, where = [f"{channel}-a", f"{channel}-b"], endpoint()
    with contextlib.ExitStack() as stack:
        stalled_tx = stack.enter_context(shmtensor.Publisher(names[0], full="error", slots=4, slot_bytes=10_000))
        tx = stack.enter_context(shmtensor.Publisher(names[1]))
        far = stack.enter_context(shmtensor.Relay([f"{channel}-fa", f"{channel}-fb"], listen=where, window=8, slots=4))
        near = [stack.enter_context(shmtensor.Relay(name, to=where, remote=f"{channel}-f{name[-1]}")) for name in names]
        stalled = stack.enter_context(shmtensor.Subscriber(f"{channel}-fa"))
        rx = stack.enter_context(shmtensor.Subscriber(f"{channel}-fb"))
        for each in near:
            each.wait(PATIENCE)
        sent = 0

        def fills() -> bool:
            nonlocal sent
            try:
                while True:
                    stalled_tx.send(np.full(1000, sent))
                    sent += 1
            except shmtensor.RingFull:
                held = state_of(near[0]).in_flight  # every slot here, and every slot there
                return held == far.statistics()[f"{channel}-fa"].messages == 4 and sent == 8

        wait_until(fills)
        for number in range(300):
            tx.send(np.full(1000, number))
            with rx.recv(timeout=PATIENCE) as message:
                assert message.value[0] == number
        assert [int(stalled.recv(timeout=PATIENCE).value[0]) for _ in range(sent)] == list(range(sent))


def test_bytes_that_wait_for_a_slot_are_bounded(channel):
    """A message larger than the whole window flows through it, part by part."""
    with (
        shmtensor.Publisher(channel) as tx,
        shmtensor.Subscriber(f"{channel}-far") as rx,
        pair(channel, far={"window_bytes": "1MiB"}) as (near, _),
    ):
        data = np.random.default_rng(1).integers(0, 255, 20 << 20, np.uint8)
        thread = threading.Thread(target=lambda: [tx.send(data) for _ in range(3)])
        thread.start()
        for _ in range(3):
            with rx.recv(timeout=PATIENCE) as message:
                assert (message.value == data).all()
        thread.join()
        wait_until(lambda: state_of(near).in_flight == 0)


@pytest.mark.parametrize("nbytes", range(sending.PART - 70, sending.PART + 70, 20))
def test_a_description_as_large_as_a_part(nbytes, channel):
    """Whatever room it leaves for the payload in the first part, the rest follows."""
    with shmtensor.Publisher(channel) as tx, shmtensor.Subscriber(f"{channel}-far") as rx, pair(channel) as (near, _):
        tx.send({"text": "x" * nbytes, "data": np.arange(100)})
        with rx.recv(timeout=PATIENCE) as message:
            assert (message.value["data"] == np.arange(100)).all()
            assert len(message.value["text"]) == nbytes
        assert state_of(near).connections == 1


@pytest.mark.parametrize("pattern", ["fan-out", "work-queue", "service"])
@pytest.mark.parametrize(("lost", "window_bytes"), [(1, "600KB"), (1, "32MiB"), (70, "32MiB")])
def test_lost_frames_are_noticed(channel, pattern, lost, window_bytes, monkeypatch):
    """Though there is no credit left for another one, which would show the gap; of replies as well."""
    feed, replies = Stream.feed, near_requests.Replying.feed
    left = {"requests": lost, "replies": lost}

    def losing_feed(stream, head, body):
        is_part = len(head) > 13 and head[13] == frames.PART
        if left["requests"] and is_part and frames.parse(head, body.to_bytes()).offset:
            left["requests"] -= 1
        else:
            feed(stream, head, body)

    def losing_replies(replying, frame, nbytes):
        if left["replies"] and isinstance(frame, frames.Part) and frame.offset:
            left["replies"] -= 1
        else:
            replies(replying, frame, nbytes)

    monkeypatch.setattr(Stream, "feed", losing_feed)
    monkeypatch.setattr(near_requests.Replying, "feed", losing_replies)
    make, take = {
        "fan-out": (shmtensor.Publisher, shmtensor.Subscriber),
        "work-queue": (shmtensor.Producer, shmtensor.Consumer),
        "service": (shmtensor.Client, shmtensor.Server),
    }[pattern]
    data = np.arange(5 << 20)
    with (
        make(channel) as tx, take(f"{channel}-far") as rx,
        pair(channel, pattern, far={"window_bytes": window_bytes}) as (near, _),
    ):  # fmt: skip
        future = tx.submit(data) if pattern == "service" else tx.send(data)
        with rx.recv(timeout=PATIENCE) as message:
            assert (message.value == data).all()
            if pattern == "service":
                message.reply(message.value)
        if pattern == "service":
            assert (future.result(PATIENCE) == data).all()
            assert left["replies"] < lost
            future = None
        assert left["requests"] < lost
        wait_until(lambda: state_of(near).in_flight == 0)
        assert state_of(near).connections > 1


@pytest.mark.parametrize("pattern", ["fan-out", "work-queue"])
def test_what_was_not_sent_for_want_of_credit_is_not_passed_over(channel, pattern, monkeypatch):
    """The far relay is found silent while a message waits for credit; and then it says something, before that is looked
    at again."""
    found, claim = [], outbound.Outbound._claim

    def late(relay, nbytes):
        with relay._changed:
            is_full = not relay._window.may_send(nbytes)
        if not is_full or found:
            return claim(relay, nbytes)
        relay._heard -= 10
        with monkeypatch.context() as patch:  # it does not come while it waits, but then
            patch.setattr(relay._changed, "wait", lambda _: None)
            found.append(claim(relay, nbytes))
        relay._heard = outbound.time.monotonic()
        return found[0]

    monkeypatch.setattr(outbound.Outbound, "_claim", late)
    make, take = (
        (shmtensor.Publisher, shmtensor.Subscriber)
        if pattern == "fan-out"
        else (shmtensor.Producer, shmtensor.Consumer)
    )
    with (
        make(channel, slots=64) as tx,
        take(f"{channel}-far") as rx,
        pair(channel, pattern, far={"window_bytes": "100KB", "slots": 2}),
    ):
        thread = threading.Thread(target=lambda: [tx.send(np.full(5000, number)) for number in range(40)])
        thread.start()
        wait_until(lambda: found)
        for number in range(40):
            with rx.recv(timeout=PATIENCE) as message:
                assert (message.value == number).all()
        thread.join()
        assert found == [False]


def test_a_partition_longer_than_away(channel, monkeypatch):
    """The far relay gives the near one up, whose senders leave; what it had published is not published again."""
    cut, on_frame, feed, hello = set(), outbound.Outbound._on_frame, Stream.feed, inbound.Inbound._on_hello
    monkeypatch.setattr(outbound.Outbound, "_on_frame", lambda *it: None if "to near" in cut else on_frame(*it))
    monkeypatch.setattr(Stream, "feed", lambda *it: None if "to far" in cut else feed(*it))
    monkeypatch.setattr(inbound.Inbound, "_on_hello", lambda *it: None if "to far" in cut else hello(*it))
    with (
        shmtensor.Publisher(channel) as tx,
        shmtensor.Subscriber(f"{channel}-far", until="closed") as rx,
        pair(channel, far={"away": 0.5}) as (near, far),
    ):
        tx.send(np.array(0))
        assert rx.recv(timeout=PATIENCE).value == 0
        wait_until(lambda: state_of(near).in_flight == 0)
        cut.add("to near")
        for number in range(1, 4):
            tx.send(np.array(number))
            assert rx.recv(timeout=PATIENCE).value == number
        cut.add("to far")
        (stream,) = far._channels[0]._streams.values()
        stream.note_presence(False)
        wait_until(lambda: state_of(far).state == "listening")
        wait_until(lambda: not is_open(near))
        cut.clear()
        tx.send(np.array(4))
        assert rx.recv(timeout=PATIENCE).value == 4
        wait_until(lambda: state_of(near).in_flight == 0)
        with pytest.raises(shmtensor.TimedOut):
            rx.recv(timeout=0.3)


def test_a_far_relay_that_ends_says_what_it_has(channel):
    """So its successor gets nothing twice."""
    where, stop = endpoint(), threading.Event()
    with (
        shmtensor.Publisher(channel) as tx,
        shmtensor.Subscriber(f"{channel}-far", until="closed") as rx,
        shmtensor.Relay(channel, to=where, remote=f"{channel}-far") as near,
    ):
        sent, got = [], []

        def send() -> None:
            while not stop.is_set():
                tx.send(np.array(len(sent)))
                sent.append(len(sent))

        def receive() -> None:
            while not stop.is_set() or len(got) < len(sent):
                with contextlib.suppress(shmtensor.TimedOut):
                    got.append(int(rx.recv(timeout=0.1).value))

        threads = [threading.Thread(target=it) for it in (send, receive)]
        try:
            for number in range(1, 4):
                with shmtensor.Relay(f"{channel}-far", listen=where):
                    near.wait(PATIENCE)
                    for it in threads if number == 1 else ():
                        it.start()
                    wait_until(lambda number=number: len(got) > 200 * number)
                wait_until(lambda: not is_open(near))
        finally:
            far = shmtensor.Relay(f"{channel}-far", listen=where)
            stop.set()
            for it in threads:
                it.join()
            far.close()
        assert sorted(got) == sent


@pytest.mark.parametrize("pattern", ["fan-out", "work-queue"])
def test_the_end_of_a_token_overtakes_what_a_far_relay_says_last(channel, pattern, monkeypatch):
    """Zenoh calls for tokens and for frames in different threads: what comes late is believed nevertheless."""
    on_frame, holds, held = outbound.Outbound._on_frame, threading.Event(), []

    def late(*it):
        if holds.is_set():
            held.append(it)
        else:
            on_frame(*it)

    def parsed(those):
        return [frames.parse(head, body.to_bytes()) for _, head, body in list(those)]

    monkeypatch.setattr(outbound.Outbound, "_on_frame", late)
    make, take = MAKERS[pattern]
    where, there = endpoint(), f"{channel}-far"
    with (
        make(channel) as tx,
        take(there, until="closed") as rx,
        shmtensor.Relay(channel, to=where, remote=there, pattern=pattern) as near,
    ):
        with shmtensor.Relay(there, listen=where):
            near.wait(PATIENCE)
            wait_until(lambda: near._channels[0]._audience == frames.LOSSLESS)
            holds.set()
            for number in range(3):
                tx.send(np.array(number))
            for number in range(3):
                with rx.recv(timeout=PATIENCE) as message:
                    assert message.value == number
            wait_until(lambda: any(getattr(it, "acknowledged", 0) == 3 for it in parsed(held)))
        wait_until(lambda: not is_open(near))
        assert state_of(near).in_flight == 3
        holds.clear()
        for it in held:
            on_frame(*it)
        assert state_of(near).in_flight == 0
        with shmtensor.Relay(there, listen=where):
            near.wait(PATIENCE)
            tx.send(np.array(3))
            with rx.recv(timeout=PATIENCE) as message:
                assert message.value == 3
            wait_until(lambda: state_of(near).in_flight == 0)
        assert state_of(near).resent == 0


def test_a_relay_that_looks_for_its_peer_reads_its_window_under_the_lock(channel, monkeypatch):
    """A STATE that comes late changes it, in Zenoh's thread."""
    oldest, seek, seen, relays = window.Outgoing.oldest.fget, outbound.Outbound._seek, [], []
    monkeypatch.setattr(
        window.Outgoing, "oldest", property(lambda it: (seen.append(relays[-1]._changed._is_owned()), oldest(it))[1])
    )
    monkeypatch.setattr(outbound.Outbound, "_seek", lambda it: (relays.append(it), seek(it)))
    with shmtensor.Relay(channel, to=endpoint(), pattern="fan-out"):
        wait_until(lambda: seen)
    assert all(seen)


def test_what_is_done_as_a_far_relay_ends_is_acknowledged(channel, monkeypatch):
    """It was done after the far relay had looked for the last time."""
    step, holds, held, goes_on = stream.Stream._step, threading.Event(), threading.Event(), threading.Event()

    def held_up(it):
        step(it)
        if holds.is_set():
            held.set()
            assert goes_on.wait(PATIENCE)

    monkeypatch.setattr(stream.Stream, "_step", held_up)
    with (
        shmtensor.Producer(channel) as tx,
        shmtensor.Consumer(f"{channel}-far", until="closed") as rx,
        pair(channel, "work-queue") as (near, far),
    ):
        tx.send(np.array(0))
        with rx.recv(timeout=PATIENCE):
            holds.set()
            assert held.wait(PATIENCE)
        closing = threading.Thread(target=far.close)
        closing.start()
        (looks,) = far._channels[0]._streams.values()
        wait_until(lambda: looks._stop)
        goes_on.set()
        closing.join()
        wait_until(lambda: state_of(near).in_flight == 0)


def test_senders_that_one_status_cannot_name(channel, monkeypatch):
    """Many that left at once, with all of their messages under way: those of more wait."""
    monkeypatch.setattr(outbound, "_MOST_ANNOUNCED", 3)
    with (
        shmtensor.Consumer(f"{channel}-far", acknowledge="release", until="closed") as rx,
        shmtensor.Consumer(channel, until="closed") as keeps,
        pair(channel, "work-queue") as (near, _),
    ):
        keeps.close()  # the relay keeps the channel from here on
        for number in range(8):
            with shmtensor.Producer(channel) as tx:
                tx.send(np.array(number))
        messages = [rx.recv(timeout=PATIENCE) for _ in range(3)]
        wait_until(lambda: state_of(near).in_flight == 3)
        with pytest.raises(shmtensor.TimedOut):
            rx.recv(timeout=0.3)
        for message in messages:
            message.release()
        for _ in range(5):
            messages.append(rx.recv(timeout=PATIENCE))
            messages[-1].release()
        wait_until(lambda: state_of(near).acknowledged == 8)
        del messages[:], message


def test_a_relay_that_ends_lingers_while_it_looks_for_its_peer(channel):
    """What is under way is acknowledged by the far relay that comes meanwhile."""
    where = endpoint()
    with shmtensor.Publisher(channel, slots=4) as tx, shmtensor.Subscriber(f"{channel}-far", until="closed") as rx:
        near = shmtensor.Relay(channel, to=where, remote=f"{channel}-far")
        with shmtensor.Relay(f"{channel}-far", listen=where, slots=1):
            near.wait(PATIENCE)
            for number in range(4):
                tx.send(np.array(number))
            wait_until(lambda: state_of(near).in_flight == 3)  # the first one is all that there is room for
            assert rx.recv(timeout=PATIENCE).value == 0
        wait_until(lambda: not is_open(near))
        closing = threading.Thread(target=near.close, kwargs={"linger": PATIENCE})
        closing.start()
        with shmtensor.Relay(f"{channel}-far", listen=where):
            for number in range(1, 4):
                assert rx.recv(timeout=PATIENCE).value == number
            closing.join()


def test_latest_subscribers_there_drop_here(channel):
    """While all of them are latest, this relay is; when a lossless one comes, it is lossless again."""
    with (
        shmtensor.Publisher(channel, slots=32, label="x") as tx,
        shmtensor.Subscriber(f"{channel}-far", delivery="latest") as viewer,
        pair(channel) as (near, _),
    ):
        tx.send(np.array(-1))
        assert viewer.recv(timeout=PATIENCE).value == -1

        def is_latest() -> bool:
            relays = [it for it in shmtensor.inspect(channel).receivers if it.alive and not it.leaving]
            return {it.delivery for it in relays} == {"latest"}  # there are two while it joins anew

        wait_until(is_latest)
        for number in range(2000):
            tx.send(np.array(number))
        wait_until(lambda: viewer.recv(timeout=PATIENCE).value == 1999)
        assert tx.statistics().waits == 0
        recorder = shmtensor.Subscriber(f"{channel}-far")
        wait_until(lambda: not is_latest())
        for number in range(500):
            tx.send(np.array(number))
        assert [int(recorder.recv(timeout=PATIENCE).value) for _ in range(500)] == list(range(500))
        recorder.close()
        assert is_open(near)


def test_a_lossless_subscriber_is_noticed_while_messages_keep_coming(channel):
    """However busy the far relay is with what comes, it looks who is there."""
    stop = threading.Event()
    with (
        shmtensor.Publisher(channel, slots=8) as tx,
        shmtensor.Subscriber(f"{channel}-far", delivery="latest") as viewer,
        pair(channel) as (near, _),
    ):
        tx.send(np.array(0))
        assert viewer.recv(timeout=PATIENCE).value == 0

        def send() -> None:
            while not stop.wait(0.002):
                tx.send(np.array(1))

        def is_latest() -> bool:
            relays = [it for it in shmtensor.inspect(channel).receivers if it.alive and not it.leaving]
            return {it.delivery for it in relays} == {"latest"}  # there are two while it joins anew

        wait_until(is_latest)
        thread = threading.Thread(target=send)
        thread.start()
        try:
            with shmtensor.Subscriber(f"{channel}-far") as recorder:
                wait_until(lambda: recorder.recv(timeout=PATIENCE) and not is_latest())
        finally:
            stop.set()
            thread.join()
        assert is_open(near)


def test_the_far_side_comes_later(channel, caplog):
    """No sender waits for a far side that was never there. When it is lost later, the relay is a subscriber that takes
    nothing, and the sender waits."""
    where = endpoint()
    with (
        shmtensor.Publisher(channel, full="error") as tx,
        shmtensor.Relay(channel, to=where, remote=f"{channel}-far") as near,
    ):
        with pytest.raises(shmtensor.TimedOut, match="no far relay has answered"):
            near.wait(0.3)
        for _ in range(2000):
            tx.send(np.array(-1))
        with shmtensor.Subscriber(f"{channel}-far") as rx, shmtensor.Relay(f"{channel}-far", listen=where) as far:
            near.wait(PATIENCE)
            for number in range(10):
                tx.send(np.array(number))
            assert [int(rx.recv(timeout=PATIENCE).value) for _ in range(10)] == list(range(10))
            far.wait(PATIENCE)
        wait_until(lambda: not is_open(near))
        for number in range(10, 16):
            tx.send(np.array(number))
        with shmtensor.Subscriber(f"{channel}-far") as rx, shmtensor.Relay(f"{channel}-far", listen=where):
            assert [int(rx.recv(timeout=PATIENCE).value) for _ in range(6)] == list(range(10, 16))
    assert "looks for its peer: the far relay has left" in caplog.text


def test_why_nobody_answers_is_said(channel, caplog, monkeypatch):
    """Once for each attempt, in the log, by `wait`, and in the statistics."""
    monkeypatch.setattr(outbound, "_EXPLAIN_S", 0.1)
    caplog.set_level(logging.INFO)
    where = endpoint()
    with shmtensor.Relay(channel, to=where, pattern="fan-out", remote=f"{channel}-far") as near:
        wait_until(lambda: "nothing listens there" in state_of(near).reason)
        with pytest.raises(shmtensor.TimedOut, match=f"no far relay has answered: {where}: nothing listens there"):
            near.wait(0)
        with shmtensor.Relay(f"{channel}-far", listen=where):
            near.wait(PATIENCE)
            assert state_of(near).reason == ""
        wait_until(lambda: "nothing listens there" in state_of(near).reason)
    assert caplog.text.count("goes on trying: no far relay has answered: ") == 2
    found = [it.getMessage() for it in caplog.records if "near relay" in it.getMessage()]
    assert [it.split()[-1] for it in found] == ["come", "left"]


def test_a_relay_from_a_channel_to_itself(channel):
    where = endpoint()
    with (
        shmtensor.Relay(channel, listen=where) as far,
        shmtensor.Relay(channel, to=where, pattern="fan-out") as near,
        pytest.raises(shmtensor.WireError, match="to itself: name another one there, by remote="),
    ):
        near.wait(PATIENCE)
    assert state_of(far).connections == 0


def test_why_an_endpoint_is_silent(monkeypatch):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        assert "something listens there, and is no relay" in why_silent(f"tcp/127.0.0.1:{listening.getsockname()[1]}")
    assert why_silent("udp/127.0.0.1:7447") == "nothing has come from udp/127.0.0.1:7447"

    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unknown)
    assert why_silent("tls/camera.invalid:7447") == "tls/camera.invalid:7447: the name of this host is not known"

    def far_away(address, timeout):
        assert address == ("2001:db8::7", 7447)
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", far_away)
    assert why_silent("tcp/[2001:db8::7]:7447") == "tcp/[2001:db8::7]:7447 cannot be reached: timed out"


def test_a_certificate_that_is_not_there(channel, tmp_path):
    config = tmp_path / "near.json5"
    config.write_text('{ transport: { link: { tls: { root_ca_certificate: "/nowhere/ca.pem" } } } }')
    with pytest.raises(shmtensor.ResourceError, match=r"root_ca_certificate names '/nowhere/ca.pem', which cannot be"):
        shmtensor.Relay(channel, to=endpoint().replace("tcp/", "tls/"), config=config, pattern="fan-out")


def test_two_directions_do_not_go_round(channel):
    """a -> b and b -> a: what came from there does not go back."""
    a, b, one, two = f"{channel}-a", f"{channel}-b", endpoint(), endpoint()
    with contextlib.ExitStack() as stack:
        tx_a, tx_b = (stack.enter_context(shmtensor.Publisher(name, label=name[-1])) for name in (a, b))
        stack.enter_context(shmtensor.Relay(b, listen=one))
        stack.enter_context(shmtensor.Relay(a, listen=two))
        there = stack.enter_context(shmtensor.Relay(a, to=one, remote=b))
        back = stack.enter_context(shmtensor.Relay(b, to=two, remote=a))
        rx_a, rx_b = (stack.enter_context(shmtensor.Subscriber(name)) for name in (a, b))
        there.wait(PATIENCE)
        back.wait(PATIENCE)
        for number in range(50):
            tx_a.send(np.array(number))
            tx_b.send(np.array(1000 + number))
        expected = sorted([*range(50), *range(1000, 1050)])
        for rx in (rx_a, rx_b):
            assert sorted(int(rx.recv(timeout=PATIENCE).value) for _ in range(100)) == expected
            with pytest.raises(shmtensor.TimedOut):
                rx.recv(timeout=0.5)
        assert state_of(there).messages == state_of(back).messages == 50


@pytest.mark.parametrize("transit", [True, False])
def test_what_comes_does_not_wait_for_the_way_back(channel, transit):
    """While the relay back takes nothing, since its peer cannot be reached (or its window is full), it holds no slot of
    what it does not relay."""
    a, b, one, two = f"{channel}-a", f"{channel}-b", endpoint(), endpoint()
    with contextlib.ExitStack() as stack:
        tx_a, tx_b = (stack.enter_context(shmtensor.Publisher(name, full="error")) for name in (a, b))
        far = stack.enter_context(shmtensor.Relay(b, listen=one))
        stack.enter_context(shmtensor.Relay(a, listen=two, slots=4))
        there = stack.enter_context(shmtensor.Relay(a, to=one, remote=b, transit=transit))
        back = stack.enter_context(shmtensor.Relay(b, to=two, remote=a, transit=transit))
        for relay in (there, back):
            relay.wait(PATIENCE)
        rx = stack.enter_context(shmtensor.Subscriber(a))
        far.close()
        wait_until(lambda: not is_open(there))
        for number in range(100):
            tx_b.send(np.array(number))
            with rx.recv(timeout=PATIENCE) as message:
                assert message.value == number
        for number in range(16):
            tx_a.send(np.array(number))
            rx.recv(timeout=PATIENCE).release()
        with pytest.raises(shmtensor.RingFull):  # it is a recipient of these
            for _ in range(2000):
                tx_a.send(np.array(number))
                rx.recv(timeout=PATIENCE).release()


@pytest.mark.parametrize(
    ("avoided", "transit", "waits"), [(7, True, False), (8, True, True), (8, False, False), (7, False, False)]
)
def test_senders_do_not_wait_for_a_relay_that_leads_back(channel, avoided, transit, waits):
    """They came through channels 5 and 7."""
    out = encode(np.arange(3))
    item = frames.Item(1, 1, out.description, memoryview(bytes(out.nbytes)))
    label = endpoints.relayed_label(endpoints.relayed_label("x", 7), 5)
    with (
        endpoints.NearSubscriber(channel, avoided, transit, until="closed") as near,
        shmtensor.Subscriber(channel) as rx,
        endpoints.FarPublisher(channel, label=label, slots=4, max_bytes=None) as tx,
    ):
        assert tx.audience() == frames.LOSSLESS
        for _ in range(4):
            tx.forward(item, 0)
            rx.recv(timeout=PATIENCE).release()
        if waits:
            with pytest.raises(shmtensor.RingFull):
                tx.forward(item, 0)
            for _ in range(4):
                near.recv(timeout=PATIENCE).release()
        else:
            assert near.next(0) is None
        for _ in range(20):
            tx.forward(item, 0)
            rx.recv(timeout=PATIENCE).release()
            assert (near.next(0) is None) == (not waits)


def test_a_queue_message_that_came_from_there_is_left_to_a_consumer_here(channel):
    """Also if the relay has begun to read its sender before it knows where it is connected to."""
    label = endpoints.relayed_label("left", path_hash(f"{channel}-far"))
    with (
        BroughtProducer(channel, label=label) as tx,
        shmtensor.Producer(channel) as other,
        pair(channel, "work-queue"),
        shmtensor.Consumer(f"{channel}-far", until="closed") as there,
    ):
        for number in range(3):
            tx.send({"back": number})
        other.send({"on": 1})
        with there.recv(timeout=PATIENCE) as message:
            assert message.value == {"on": 1}
        with shmtensor.Consumer(channel) as here:
            for number in range(3):
                with here.recv(timeout=PATIENCE) as message:
                    assert message.value == {"back": number}


def test_what_is_taken_back_was_not_delivered(channel, monkeypatch):
    """When the last consumer there has left, others get what it had not begun with, as if it had not been sent; and
    those that come there later do not get it as well. What it had begun with counts as an attempt."""
    monkeypatch.setattr(outbound, "_RECALL_S", PATIENCE)  # nothing is recalled because a busy machine is slow
    with (
        shmtensor.Producer(channel) as tx,
        shmtensor.Producer(f"{channel}-far"),  # a member: the channel stays
        pair(channel, "work-queue", far={"window": 6}) as (near, far),
    ):
        for number in range(10):
            tx.send(np.array(number))
        attempts = dict.fromkeys(range(10), 1)

        def sent_and_begun() -> tuple[int, int]:
            """How many messages are on their way or there, and how many of these a consumer there has begun with."""
            queue = near._channels[0]
            with queue._changed:
                numbers = [number for number, _ in queue._window.numbered()]
                return len(numbers), sum(number <= queue._begun for number in numbers)

        for _ in range(3):
            with shmtensor.Consumer(f"{channel}-far", acknowledge="release", until="closed") as there:
                begun = [there.recv(timeout=PATIENCE) for _ in range(2)]
                for message in begun:
                    attempts[int(message.value)] += 1
                wait_until(lambda: sent_and_begun() == (6, 2), lambda: str(sent_and_begun()))
                del begun, message
            with monkeypatch.context() as patch:
                patch.setattr(outbound, "_RECALL_S", 0.1)
                # there as well: else the next consumer there could take what is about to be withdrawn
                wait_until(lambda: state_of(near).in_flight == state_of(far).in_flight == 0)
        near.close(linger=0)
        with shmtensor.Consumer(f"{channel}-far") as there, pytest.raises(shmtensor.TimedOut):
            there.recv(timeout=0.3)
        with shmtensor.Consumer(channel) as here:
            found = {}
            for _ in range(10):
                with here.recv(timeout=PATIENCE) as message:
                    found[int(message.value)] = message.attempt
            assert found == attempts


def test_what_is_taken_back_is_not_done_by_what_the_far_relay_answers(channel, monkeypatch):
    """It acknowledges what CANCEL ends there, and N hears that before it has given anything back."""
    monkeypatch.setattr(outbound, "_RECALL_S", 0.1)
    cancel, on_frame, answered = outbound.Outbound._cancel, outbound.Outbound._on_frame, threading.Event()

    def heard(near, head, body):
        on_frame(near, head, body)
        if getattr(frames.parse(head, body.to_bytes()), "acknowledged", 0) == 3:
            answered.set()

    def slow(near, far, attempt, numbers):
        cancel(near, far, attempt, numbers)
        assert not numbers or answered.wait(PATIENCE)

    monkeypatch.setattr(outbound.Outbound, "_on_frame", heard)
    monkeypatch.setattr(outbound.Outbound, "_cancel", slow)
    with (
        shmtensor.Producer(channel) as tx,
        shmtensor.Producer(f"{channel}-far"),
        pair(channel, "work-queue") as (near, _),
    ):
        with shmtensor.Consumer(f"{channel}-far", acknowledge="release", until="closed"):
            for number in range(3):
                tx.send(np.array(number))
            wait_until(lambda: near._channels[0]._credit[1] == 3)
        with shmtensor.Consumer(channel) as here:
            found = []
            for _ in range(3):
                with here.recv(timeout=PATIENCE) as message:
                    found.append(int(message.value))
        assert sorted(found) == [0, 1, 2]


@pytest.mark.parametrize("begins", [False, True])
def test_a_relay_that_ends_was_no_attempt(channel, begins):
    """But for messages that a consumer there has begun with."""
    with shmtensor.Producer(channel) as tx, shmtensor.Consumer(f"{channel}-far", acknowledge="release") as there:
        with pair(channel, "work-queue") as (near, _):
            for number in range(4):
                tx.send(np.array(number))
            wait_until(lambda: state_of(near).in_flight == 4)
            begun = there.recv(timeout=PATIENCE) if begins else None
            wait_until(lambda: near._channels[0]._begun == begins)
            near.close(linger=0)
            del begun
        with shmtensor.Consumer(channel) as here:
            attempts = {}
            for _ in range(4):
                with here.recv(timeout=PATIENCE) as message:
                    attempts[int(message.value)] = message.attempt
            assert attempts == {0: 1 + begins, 1: 1, 2: 1, 3: 1}


def test_a_queue_of_a_chain_goes_where_consumers_are(channel):
    """Of the relays on the way, each is somebody who takes messages as long as there is a consumer behind it."""
    names, where = [f"{channel}-{it}" for it in "abc"], endpoint()
    with contextlib.ExitStack() as stack:
        tx = stack.enter_context(shmtensor.Producer(names[0], slots=64))
        far = stack.enter_context(shmtensor.Relay(names[1:], listen=where))
        first, second = (
            stack.enter_context(shmtensor.Relay(name, to=where, remote=remote, pattern="work-queue"))
            for name, remote in itertools.pairwise(names)
        )
        for relay in (first, second):
            relay.wait(PATIENCE)

        def takes(name):
            with shmtensor.Consumer(name, until="closed") as rx:
                return int(rx.recv(timeout=PATIENCE, copy=True).value)

        (stream,) = far._channels[0]._streams.values()
        wait_until(lambda: stream._senders)
        for _ in range(3):  # it has looked who is there
            due = stream._audience_due
            wait_until(lambda due=due: stream._audience_due > due)
        for number in range(10):
            tx.send(np.array(number))
        assert [takes(names[0]) for _ in range(3)] == [0, 1, 2]
        assert state_of(first).messages == 0
        found = {takes(names[2])}  # now there is one behind both
        assert state_of(second).messages > 0
        wait_until(lambda: state_of(first).in_flight == state_of(second).in_flight == 0)  # and it has left
        with shmtensor.Consumer(names[0], until="closed") as rx:
            while found != set(range(3, 10)):
                with rx.recv(timeout=PATIENCE) as message:
                    found.add(int(message.value))


def test_what_a_relay_has_may_be_passed_on_yet(channel):
    """While it holds something, what was sent to it is not taken back for a while, though it takes no more."""
    label = endpoints.relayed_label("x", 5)
    item = frames.Item(1, 1, encode(1).description, b"")
    with (
        endpoints.FarProducer(channel, label=label, slots=4, max_bytes=None) as tx,
        endpoints.NearConsumer(channel, 1, True, acknowledge="release", until="closed") as near,
    ):
        assert tx.audience() == frames.NOBODY
        near.show_onward(True)
        assert tx.audience() == frames.LOSSLESS
        tx.done_word(tx.forward(item, 0))
        message = near.next(PATIENCE)
        near.show_onward(False)
        assert tx.audience() == frames.HELD
        message.release()
        assert tx.audience() == frames.NOBODY
        with shmtensor.Consumer(channel):
            assert tx.audience() == frames.LOSSLESS


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_far_host_that_fails_for_good(channel, comes_back, monkeypatch, caplog):
    """After half a minute, others get a queue's messages; and if it comes back, consumers there get none of those that
    they had not begun with."""
    cut, on_frame, hello = [], outbound.Outbound._on_frame, inbound.Inbound._on_hello
    monkeypatch.setattr(outbound.Outbound, "_on_frame", lambda *it: None if cut else on_frame(*it))
    monkeypatch.setattr(inbound.Inbound, "_on_hello", lambda *it: None if cut else hello(*it))
    with (
        shmtensor.Producer(channel) as tx,
        shmtensor.Consumer(f"{channel}-far", acknowledge="release", until="closed") as there,
        pair(channel, "work-queue") as (near, far),
        shmtensor.Consumer(channel, until="closed") as here,
    ):
        for number in range(1, 9):
            tx.send(np.array(number))
        found = {}
        begun = there.recv(timeout=PATIENCE)
        wait_until(lambda: near._channels[0]._begun > 0)
        taken = state_of(near).in_flight
        assert taken > 0
        cut.append("both ways")
        monkeypatch.setattr(outbound, "_LOST_S", 0.1)
        while len(found) < 8:
            with here.recv(timeout=PATIENCE) as message:
                found[int(message.value)] = message.attempt
        assert found == {number: 1 + (number == int(begun.value)) for number in range(1, 9)}
        assert state_of(near).in_flight == 0
        assert not is_open(near)
        if comes_back:
            here.close()
            monkeypatch.setattr(outbound, "_LOST_S", PATIENCE)
            cut.clear()
            wait_until(lambda: is_open(near) and state_of(far).in_flight == 1)  # what was begun with
            tx.send(np.array(9))
            with there.recv(timeout=PATIENCE) as message:
                assert message.value == 9
        del begun
    assert "messages go to consumers here" in caplog.text


def test_a_history_comes_once(channel):
    """Though the relay joins again, as the subscribers there are latest now, or are not any more."""
    with shmtensor.Publisher(channel, history=5) as tx:
        for number in range(3):
            tx.send(np.array(number))
        with shmtensor.Subscriber(f"{channel}-far", until="closed") as rx, pair(channel) as (near, _):
            queue = near._channels[0]
            for number in range(8):  # the first three are its history
                if number >= 3:
                    tx.send(np.array(number))
                with rx.recv(timeout=PATIENCE) as message:
                    assert message.value == number
            joined = queue._endpoint
            with shmtensor.Subscriber(f"{channel}-far", delivery="latest", until="closed") as viewer:
                rx.close()
                wait_until(lambda: queue._is_latest)
                with shmtensor.Subscriber(f"{channel}-far", until="closed") as rx:
                    wait_until(lambda: not queue._is_latest)
                    assert queue._endpoint is not joined
                    tx.send(np.array(8))
                    for each in (rx, viewer):
                        with each.recv(timeout=PATIENCE) as message:
                            assert message.value == 8
            assert state_of(near).messages == 9


def test_a_ring_of_more_hosts_than_a_label_names(channel, monkeypatch, caplog):
    """A message goes over six relays at most, so not round for ever."""
    names, where = [f"{channel}-{it}" for it in range(8)], endpoint()
    with contextlib.ExitStack() as stack:
        far = stack.enter_context(shmtensor.Relay(names, listen=where))
        nears = [
            stack.enter_context(shmtensor.Relay(name, to=where, remote=remote, pattern="fan-out"))
            for name, remote in zip(names, [*names[1:], names[0]], strict=True)
        ]
        for near in nears:
            near.wait(PATIENCE)
        rx, tx = stack.enter_context(shmtensor.Subscriber(names[6])), stack.enter_context(shmtensor.Publisher(names[0]))
        tx.send(np.array(0))
        with rx.recv(timeout=PATIENCE) as message:
            assert len(endpoints.path_of(message.sender.name)) == endpoints.MOST_HOPS
        wait_until(lambda: "it goes no further" in caplog.text)
        tx.send(np.array(1))
        with rx.recv(timeout=PATIENCE) as message:
            assert message.value == 1
        assert [it.messages for it in far.statistics().values()] == [0, 2, 2, 2, 2, 2, 2, 0]


def test_a_relay_that_may_start_no_thread_goes_on(channel, monkeypatch):
    """It only wants to say why nobody answers."""
    start, refused = threading.Thread.start, []

    def starts(thread):
        if thread.name.endswith(", why"):
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(outbound, "_EXPLAIN_S", 0.1)
    monkeypatch.setattr(threading.Thread, "start", starts)
    where = endpoint()
    with shmtensor.Relay(channel, to=where, remote=f"{channel}-far", pattern="work-queue") as near:
        wait_until(lambda: refused)
        with shmtensor.Relay(f"{channel}-far", listen=where):
            near.wait(PATIENCE)


def test_a_mesh_without_transit(channel):
    """Each host has a relay to each other one: a message comes to each of them once, by the direct way."""
    with contextlib.ExitStack() as stack:
        names, relays = stack.enter_context(mesh(channel, "fan-out"))
        senders = [stack.enter_context(shmtensor.Publisher(name, label=name[-1])) for name in names]
        receivers = [stack.enter_context(shmtensor.Subscriber(name)) for name in names]
        for receiver in receivers:
            receiver.wait_for_publishers(3, timeout=PATIENCE)
        for number in range(30):
            for first, sender in zip((0, 100, 200), senders, strict=True):
                sender.send(np.array(first + number))
        expected = [first + number for first in (0, 100, 200) for number in range(30)]
        for receiver in receivers:
            assert sorted(int(receiver.recv(timeout=PATIENCE).value) for _ in range(90)) == expected
            with pytest.raises(shmtensor.TimedOut):
                receiver.recv(timeout=0.5)
        assert {state_of(relay).messages for relay in relays.values()} == {30}


def test_a_latest_subscriber_of_a_mesh(channel):
    """That the relays there are lossless subscribers does not make them an audience."""
    with (
        mesh(channel, "fan-out") as (names, _),
        shmtensor.Publisher(names[0]) as tx,
        shmtensor.Subscriber(names[1], delivery="latest") as rx,
    ):
        rx.wait_for_publishers(1, timeout=PATIENCE)
        relays_here = [("all", False), ("latest", False)]  # to c, and to b
        wait_until(
            lambda: (
                relays_here
                == sorted((it.delivery, it.leaving) for it in shmtensor.inspect(names[0]).receivers if it.alive)
            )
        )
        tx.send(np.array(1))
        assert int(rx.recv(timeout=PATIENCE).value) == 1


@pytest.mark.parametrize(("size", "least", "far"), [(1, 20, {}), (100_000, 2, {"slots": 3, "window_bytes": 200_000})])
def test_a_queue_of_a_mesh_goes_where_consumers_are(channel, size, least, far):
    """Hosts without consumers take nothing; what waits where the last one has left goes to others, also if the ring
    there and the window are full."""
    with mesh(channel, "work-queue", **far) as (names, relays), shmtensor.Producer(names[0], slots=64) as tx:
        for number in range(40):
            tx.send(np.full(size, number))
        with shmtensor.Consumer(names[2], until="closed") as rx:
            found = [int(rx.recv(timeout=PATIENCE, copy=True).value[0]) for _ in range(10)]
            wait_until(lambda: state_of(relays[0, 2]).in_flight > least)
        assert state_of(relays[0, 1]).messages == 0
        with shmtensor.Consumer(names[1], until="closed") as rx:
            while len(set(found)) < 40:
                found.append(int(rx.recv(timeout=PATIENCE).value[0]))
        wait_until(lambda: state_of(relays[0, 1]).in_flight == state_of(relays[0, 2]).in_flight == 0)


@pytest.mark.parametrize("pattern", ["fan-out", "work-queue"])
def test_another_far_host_gets_what_the_first_one_sent(channel, pattern):
    """Given two, a near relay turns to the other one when the first has ended: what came from there goes to it at
    once."""
    wheres, names = [endpoint(), endpoint()], [f"{channel}-1", f"{channel}-2"]
    make, take = (
        (shmtensor.Publisher, shmtensor.Subscriber)
        if pattern == "fan-out"
        else (shmtensor.Producer, shmtensor.Consumer)
    )

    class Moved(Keys):
        """Both far hosts have the channel under one name; here, where they share a `/dev/shm`, under two."""

        def __init__(self, name: str) -> None:
            super().__init__(f"{channel}-far" if name in names else name)

    label = endpoints.relayed_label("back", path_hash(names[0]))
    brings = BroughtPublisher if pattern == "fan-out" else BroughtProducer
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(inbound, "Keys", Moved)
        own, back = stack.enter_context(make(channel, label="own")), stack.enter_context(brings(channel, label=label))
        first = stack.enter_context(shmtensor.Relay(names[0], listen=wheres[0]))
        near = stack.enter_context(shmtensor.Relay(channel, to=wheres, remote=f"{channel}-far", pattern=pattern))
        there = stack.enter_context(take(names[0], until="closed"))
        near.wait(PATIENCE)
        own.send(np.array(1))
        with there.recv(timeout=PATIENCE) as message:
            assert message.value == 1
        wait_until(lambda: state_of(near).in_flight == 0)
        first.close()
        rx = stack.enter_context(take(names[1], until="closed"))
        stack.enter_context(shmtensor.Relay(names[1], listen=wheres[1]))
        wait_until(lambda: is_open(near) and state_of(near).connections == 2)
        back.send(np.array(2))
        with rx.recv(timeout=PATIENCE) as message:
            assert message.value == 2
            assert path_hash(names[0]) in endpoints.path_of(message.sender.name)
        wait_until(lambda: state_of(near).in_flight == 0)


def test_another_far_host_gets_what_was_sent_before_it_was_found(channel):
    """In order, and once: what the subscriber of the way to the first host has not taken, and what comes after."""
    with shmtensor.Publisher(channel, label="tx") as tx, shmtensor.Publisher(channel, label="quiet") as quiet:
        first = endpoints.NearSubscriber(channel, 1, True, until="closed")
        for number in range(5):
            tx.send(np.array(number))
        quiet.send(np.array(100))
        taken = [first.next(PATIENCE)]
        second = endpoints.NearSubscriber(channel, 2, True, first, until="closed")
        for number in range(5, 10):
            tx.send(np.array(number))
        taken += [second.next(PATIENCE) for _ in range(10)]
        assert second.next(0) is None
        assert [it.seq for it in taken if it.sender.name == "tx"] == list(range(1, 11))
        assert [it.seq for it in taken if it.sender.name == "quiet"] == [1]
        assert len([it for it in shmtensor.inspect(channel).receivers if not it.leaving]) == 2  # `quiet` does not know
        quiet.send(np.array(101))
        assert second.next(PATIENCE).seq == 2
        assert second.next(0) is None
        assert len([it for it in shmtensor.inspect(channel).receivers if not it.leaving]) == 1
        del taken
        second.close()


def test_labels():
    label = "left camera"
    for hop in range(1, 9):
        label = endpoints.relayed_label(label, hop)
        assert len(label.encode()) <= 64
    assert endpoints.path_of(label) == (3, 4, 5, 6, 7, 8)
    assert endpoints.relayed_label("é" * 40, 1).endswith(" via 00000001")
    assert endpoints.path_of("a via nowhere") == endpoints.path_of("") == ()
    for own in ("", "camera via 2", "camera via 00000002 3", "a via " + "f" * 56, "a via 0000000A", "x" * 64, "é" * 32):
        label = endpoints.relayed_label(own, 5)
        assert len(label.encode()) <= 64
        assert endpoints.path_of(label) == (5,)
        assert endpoints.own_label(own) == own
    for own in ("a via 00000001", " via 00000001 00000002", "x" * 51 + " via 00000001"):
        assert endpoints.path_of(own)
        own = endpoints.own_label(own)
        assert not endpoints.path_of(own)
        assert endpoints.path_of(endpoints.relayed_label(own, 5)) == (5,)


@pytest.mark.parametrize("transit", [True, False])
@pytest.mark.parametrize("pattern", ["fan-out", "work-queue"])
def test_labels_that_look_like_those_of_relays(channel, pattern, transit):
    """They are names: what such members send is relayed, and such receivers are what they are."""
    make, take = MAKERS[pattern]
    back = endpoints.relay_label(path_hash(channel), False)
    with take(f"{channel}-far", label=back) as rx, pair(channel, pattern, near={"transit": transit}):
        labels = ["cam via 2", "cam via 00000002", "a via " + "f" * 56, f"b via {path_hash(f'{channel}-far'):08x}"]
        for label in labels:
            with make(channel, label=label) as tx:
                tx.send(label)
                with rx.recv(timeout=PATIENCE) as message:
                    assert message.value == label
                    assert message.sender.name.endswith(f" via {path_hash(channel):08x}")


# --- refusals


def test_other_users_are_refused(channel, caplog):
    where = endpoint()
    with (
        shmtensor.Publisher(channel),
        shmtensor.Relay(f"{channel}-far", listen=where, user="them") as far,
        shmtensor.Relay(channel, to=where, remote=f"{channel}-far", user="us") as near,
    ):
        with pytest.raises(
            shmtensor.WireError, match=r"near relay is of user 'us', the far one of 'them': pass the same user="
        ):
            near.wait(PATIENCE)
        assert state_of(near).state == "refused"
        assert state_of(far).refused >= 1
    assert "is refused, and will ask again" in caplog.text


@pytest.mark.parametrize("field", ["record", "description", "protocol"])
def test_other_versions_are_refused(channel, field):
    """A near relay of another version asks; the answer says both."""
    where, keys = endpoint(), Keys(channel)
    answers, got = [], threading.Event()
    hello = frames.Hello(77, 0, 3, frames.FAN_OUT, shmtensor.relay.keys.user_name(), 1, 1)
    head = frames.Hello(**{**vars(hello), field: 9}).head() if field != "protocol" else None
    if head is None:
        rest = bytearray(hello.head()[8:])
        rest[4] = 9
        head = resigned(bytes(rest))
    with shmtensor.Relay(channel, listen=where) as far:
        session = Session(to=[where], listen=[], scout=False, config=None)
        try:
            session.receive(keys.near(77), lambda *it: (answers.append(it), got.set()))
            session.watch(keys.alive_far("*"), lambda key, there: session.answer(keys.hello, head))
            assert got.wait(PATIENCE)
            frame = frames.parse(answers[0][0], answers[0][1].to_bytes())
        finally:
            session.close()
        assert isinstance(frame, frames.Refuse)
        assert frame.attempt == 3
        assert "9" in frame.why
        assert f"{record.VERSION if field != 'protocol' else frames.PROTOCOL}" in frame.why
        assert state_of(far).state == "listening"


def resigned(rest: bytes, body: bytes = b"") -> bytes:
    import xxhash

    return xxhash.xxh3_64(rest + body).intdigest().to_bytes(8, "little") + rest


def test_a_channel_of_another_pattern_there_is_refused(channel):
    where = endpoint()
    with (
        shmtensor.Publisher(channel) as tx,
        shmtensor.Producer(f"{channel}-far"),
        shmtensor.Relay(f"{channel}-far", listen=where),
        shmtensor.Relay(channel, to=where, remote=f"{channel}-far") as near,
    ):
        tx.send(np.zeros(3))
        wait_until(lambda: state_of(near).state == "refused")
        with pytest.raises(shmtensor.WireError, match="work queue"):
            near.wait(0)


# --- shortages


@pytest.mark.parametrize("pattern", ["fan-out", "work-queue"])
@pytest.mark.parametrize("numbered", [0, 1], ids=["first", "behind another"])
def test_what_cannot_be_taken_for_want_of_something_is_taken_later(channel, pattern, numbered, monkeypatch, caplog):
    """Open files are short as the relay looks for the next message, perhaps when it has just numbered one."""
    short, lock, numbers = threading.Event(), threading.RLock(), []

    def limited(take):
        def refused(*arguments):
            with lock:
                if short.is_set() and len(numbers) >= numbered:
                    raise shmtensor.ResourceError(errno.EMFILE, "too many open files")
                found = take(*arguments)
                if short.is_set() and found is not None:
                    numbers.append(found.seq)
                return found

        return refused

    make, take = MAKERS[pattern]
    own = {} if pattern == "fan-out" else {"acknowledge": "release"}
    with make(channel, slots=64) as tx, take(f"{channel}-far", **own) as rx, pair(channel, pattern) as (near, _):
        tx.send(np.array(0))
        with rx.recv(timeout=PATIENCE) as message:
            assert message.value == 0
        wait_until(lambda: state_of(near).in_flight == 0)
        with lock:  # it takes nothing now: then there are some at once
            short.set()
            for name in ("next", "at_once"):
                monkeypatch.setattr(endpoints._NearEnd, name, limited(getattr(endpoints._NearEnd, name)))
            for number in range(1, 20):
                tx.send(np.array(number))
        wait_until(lambda: "too many open files" in state_of(near).reason)
        near.check()
        assert state_of(near).state == "open"
        short.clear()
        for number in range(1, 20):
            with rx.recv(timeout=PATIENCE) as message:
                assert message.value == number
        wait_until(lambda: state_of(near).in_flight == 0)
        assert not state_of(near).reason
        assert state_of(near).connections == 1
    assert sum("is held up" in it.message for it in caplog.records) == 1


@pytest.mark.parametrize("pattern", ["fan-out", "work-queue"])
def test_a_channel_that_cannot_be_joined_is_joined_later(channel, pattern, monkeypatch):
    """With the first WELCOME, which is answered to the next HELLO as well."""
    short, join = [True], outbound.Outbound._join

    def refused(relay, avoided, *before, **options):
        if avoided and short:
            raise shmtensor.TimedOut("the segment server does not answer")
        return join(relay, avoided, *before, **options)

    monkeypatch.setattr(outbound.Outbound, "_join", refused)
    make, take = MAKERS[pattern]
    own = {} if pattern == "fan-out" else {"acknowledge": "release"}
    where = endpoint()
    with (
        make(channel) as tx,
        take(f"{channel}-far", **own) as rx,
        shmtensor.Relay(f"{channel}-far", listen=where),
        shmtensor.Relay(channel, to=where, remote=f"{channel}-far", pattern=pattern) as near,
    ):
        wait_until(lambda: "does not answer" in state_of(near).reason)
        short.clear()
        near.wait(PATIENCE)
        tx.send(np.array(1))
        with rx.recv(timeout=PATIENCE) as message:
            assert message.value == 1
        wait_until(lambda: state_of(near).in_flight == 0)


@pytest.fixture
def short(monkeypatch):
    """While it is set, the far host has no room for what comes; a near relay that is refused asks again soon."""
    monkeypatch.setattr(outbound, "_HELLO_REFUSED_S", 0.05)
    event, asked = threading.Event(), []

    def limited(may):
        def refused(end, *arguments):
            if event.is_set():
                asked.append(arguments)
                raise shmtensor.ResourceError(errno.ENOSPC, f"{len(asked)} bytes are free")
            return may(end, *arguments)

        return refused

    for name in ("forward", "fill"):
        monkeypatch.setattr(endpoints._FarEnd, name, limited(getattr(endpoints._FarEnd, name)))
    event.asked = asked
    return event


@pytest.mark.parametrize("size", [10, 300_000], ids=["whole", "in parts"])
@pytest.mark.parametrize("pattern", ["fan-out", "work-queue"])
def test_what_the_far_host_has_no_room_for_stands_still(channel, pattern, size, short, monkeypatch, caplog):
    """The near relay is told, and asks again and again. What was published there before stays, and comes once; the
    senders there are the same ones throughout."""
    monkeypatch.setattr(stream, "_PATIENCE_S", 0.0)
    make, take = MAKERS[pattern]
    own = {} if pattern == "fan-out" else {"acknowledge": "release"}
    with (
        caplog.at_level(logging.WARNING),
        make(channel, slots=64) as tx,
        take(f"{channel}-far", **own) as rx,
        pair(channel, pattern) as (near, far),
    ):
        for number in range(5):
            tx.send(np.full(10, number))
        first = rx.recv(timeout=PATIENCE)
        wait_until(lambda: state_of(far).messages == 5)
        senders = shmtensor.inspect(f"{channel}-far").senders
        short.set()
        for number in range(5, 8):
            tx.send(np.full(size, number))
        wait_until(lambda: state_of(near).connections > 5)
        wait_until(lambda: "bytes are free" in state_of(near).reason)
        assert [it.uid for it in shmtensor.inspect(f"{channel}-far").senders] == [it.uid for it in senders]
        assert state_of(far).messages == 5
        short.clear()
        assert int(first.value[0]) == 0
        first.release()
        for number in range(1, 8):
            with rx.recv(timeout=PATIENCE) as message:
                assert (message.value == number).all()
        wait_until(lambda: state_of(near).in_flight == 0)
        with pytest.raises(shmtensor.TimedOut):
            rx.recv(timeout=0.3)
        wait_until(lambda: is_open(near))
        assert state_of(far).messages == 8
    said = [it.getMessage() for it in caplog.records]
    assert sum("is refused, and will ask again" in it for it in said) == 1, said
    assert sum("holds up near relay" in it or "refuses near relay" in it for it in said) == 1, said
    assert not any("looks for its peer" in it for it in said), said


@pytest.mark.parametrize("size", [10, 300_000], ids=["whole", "in parts"])
@pytest.mark.parametrize("pattern", ["fan-out", "work-queue"])
def test_a_short_lack_of_room_there_is_waited_for(channel, pattern, size, short, caplog):
    """The connection stays, and to receivers there no sender has left."""
    make, take = MAKERS[pattern]
    with take(f"{channel}-far") as rx, pair(channel, pattern) as (near, _):
        with make(channel) as tx:
            tx.send(np.full(10, 0))
            with rx.recv(timeout=PATIENCE) as message:
                assert (message.value == 0).all()
            short.set()
            tx.send(np.full(size, 1))
            wait_until(lambda: len(short.asked) > 3)
            short.clear()
            tx.send(np.full(size, 2))
            numbers = []
            for message in rx:
                numbers.append(int(message.value[0]))
                message.release()
                if numbers == [1, 2]:
                    break
            assert numbers == [1, 2]
        assert state_of(near).connections == 1
    assert sum("holds up near relay" in it.getMessage() for it in caplog.records) == 1


@pytest.fixture
def full(monkeypatch):
    """While it is set, the far channel has no place for another sender; a near relay asks again soon."""
    monkeypatch.setattr(outbound, "_HELLO_REFUSED_S", 0.05)
    event, join, tries = threading.Event(), endpoints._Onward.__init__, []

    def refused(end, *arguments, **options):
        if event.is_set():
            tries.append(arguments)
            raise shmtensor.ResourceError(errno.EMFILE, f"the channel has 256 members, try {len(tries)}")
        join(end, *arguments, **options)

    monkeypatch.setattr(endpoints._Onward, "__init__", refused)
    event.tries = tries
    return event


@pytest.mark.parametrize("pattern", ["fan-out", "work-queue"])
def test_a_sender_for_which_there_is_no_room_holds_up_no_other_one(channel, pattern, full, caplog):
    """Until it sends something. When there is room, it is there as well."""
    make, take = MAKERS[pattern]

    def pass_on(tx, number):
        tx.send(np.array(number))
        with rx.recv(timeout=PATIENCE) as message:
            assert message.value == number

    with take(f"{channel}-far", until="closed") as rx, make(channel) as tx, pair(channel, pattern) as (near, _):
        pass_on(tx, 0)
        full.set()
        with make(channel) as newcomer:
            wait_until(lambda: len(full.tries) > 2)  # it is tried again with each STATUS
            for number in range(1, 20):
                pass_on(tx, number)
            assert state_of(near).connections == 1
            full.clear()
            wait_until(lambda: len(shmtensor.inspect(f"{channel}-far").senders) == 2)
            pass_on(newcomer, 20)
            pass_on(tx, 21)
        assert state_of(near).connections == 1
    assert sum("cannot join yet" in it.getMessage() for it in caplog.records) == 1


def test_no_room_for_any_sender_is_said(channel, full, caplog):
    """Once, whatever changes in the text meanwhile; and that it is over."""
    caplog.set_level(logging.INFO)
    with pair(channel, "work-queue") as (near, _), shmtensor.Consumer(f"{channel}-far") as rx:
        full.set()
        with shmtensor.Producer(channel) as tx:
            wait_until(lambda: "256 members" in state_of(near).reason)
            wait_until(lambda: len(full.tries) > 4)
            assert "goes on" not in caplog.text
            full.clear()
            wait_until(lambda: "is not refused any more" in caplog.text)
            tx.send(np.array(1))
            with rx.recv(timeout=PATIENCE) as message:
                assert message.value == 1
    said = [it.getMessage() for it in caplog.records]
    for line in ("is refused, and will ask again", "refuses near relay", "is not refused any more", "goes on"):
        assert sum(line in it for it in said) == 1, said


def test_closing_a_refused_relay_waits_for_room(channel, short, monkeypatch):
    """It asks at once then, and what it has comes there."""
    monkeypatch.setattr(stream, "_PATIENCE_S", 0.0)
    with (
        shmtensor.Publisher(channel) as tx,
        shmtensor.Subscriber(f"{channel}-far", until="closed") as rx,
        pair(channel) as (near, _),
    ):
        monkeypatch.setattr(outbound, "_HELLO_REFUSED_S", 2 * PATIENCE)
        short.set()
        for number in range(3):
            tx.send(np.array(number))
        wait_until(lambda: state_of(near).state == "refused")
        with once(lambda: near._channels[0]._is_draining, short.clear):
            near.close(linger=PATIENCE)
        for number in range(3):
            with rx.recv(timeout=PATIENCE) as message:
                assert message.value == number


@pytest.mark.parametrize("leaves", [True, False])
def test_what_is_refused_for_long_goes_to_consumers_here(channel, leaves, short, monkeypatch):
    """A queue's messages that the far host has not received: soon if no consumer is left there, else after a while. No
    consumer there gets them as well, and they were no attempt. It is tried with one message at a time whether there is
    room."""
    monkeypatch.setattr(stream, "_PATIENCE_S", 0.0)
    if not leaves:
        monkeypatch.setattr(refusal, "_LOST_S", 0.1)
    with (
        shmtensor.Producer(channel) as tx,
        shmtensor.Producer(f"{channel}-far"),  # a member: the channel stays
        pair(channel, "work-queue") as (near, far),
        contextlib.ExitStack() as stack,
    ):
        there = stack.enter_context(shmtensor.Consumer(f"{channel}-far", acknowledge="release", until="closed"))
        tx.send(np.array(0))
        begun = there.recv(timeout=PATIENCE)
        short.set()
        for number in range(1, 9):
            tx.send(np.array(number))
        wait_until(lambda: state_of(near).state == "refused")
        if leaves:
            begun.release()
            stack.close()
        found = {}
        with shmtensor.Consumer(channel, until="closed") as here:
            while len(found) < 8:
                with here.recv(timeout=PATIENCE) as message:
                    assert int(message.value) not in found
                    found[int(message.value)] = message.attempt
            assert found == dict.fromkeys(range(1, 9), 1)
            if not leaves:
                assert state_of(near).in_flight == 1
                begun.release()
            wait_until(lambda: state_of(near).in_flight == state_of(far).in_flight == 0)
        short.clear()
        if leaves:
            there = stack.enter_context(shmtensor.Consumer(f"{channel}-far", until="closed"))
        tx.send(np.array(9))
        with there.recv(timeout=PATIENCE) as message:
            assert message.value == 9


@pytest.mark.parametrize("size", [10, 300_000], ids=["whole", "in parts"])
@pytest.mark.parametrize("pattern", ["fan-out", "work-queue"])
def test_a_broken_sender_there_is_replaced(channel, pattern, size, monkeypatch):
    """What it has sent stays, and what it could not send comes by another one."""
    monkeypatch.setattr(outbound, "_HELLO_REFUSED_S", 0.05)
    make, take = MAKERS[pattern]
    own = {} if pattern == "fan-out" else {"acknowledge": "release"}
    broken = []

    def breaks(may):
        def send(end, *arguments):
            if not broken or end in broken:
                broken.append(end)
                raise shmtensor.WireError("its ring is damaged")
            return may(end, *arguments)

        return send

    with (
        take(f"{channel}-far", until="closed", **own) as rx,
        make(channel) as tx,
        pair(channel, pattern) as (near, _),
    ):
        tx.send(np.full(size, 0))
        first = rx.recv(timeout=PATIENCE)
        for name in ("forward", "fill"):
            monkeypatch.setattr(endpoints._FarEnd, name, breaks(getattr(endpoints._FarEnd, name)))
        for number in range(1, 4):
            tx.send(np.full(size, number))
        for number in range(1, 4):
            with rx.recv(timeout=PATIENCE) as message:
                assert (message.value == number).all()
        assert (first.value == 0).all()
        first.release()
        del first
        wait_until(lambda: state_of(near).in_flight == 0)
        wait_until(lambda: len(shmtensor.inspect(f"{channel}-far").senders) == 1)
    assert len(broken) == 1


def test_a_refusal_that_is_lost_is_said_again(channel, short, monkeypatch):
    monkeypatch.setattr(stream, "_PATIENCE_S", 0.0)
    answer, lost = Session.answer, []

    def lossy(session, key, head, body=b""):
        if isinstance(frames.parse(head, bytes(body)), frames.Refuse) and len(lost) < 2:
            lost.append(key)
        else:
            answer(session, key, head, body)

    monkeypatch.setattr(Session, "answer", lossy)
    with shmtensor.Publisher(channel) as tx, shmtensor.Subscriber(f"{channel}-far") as rx, pair(channel) as (near, _):
        short.set()
        tx.send(np.array(1))
        wait_until(lambda: len(lost) == 2)
        wait_until(lambda: state_of(near).connections > 2)
        short.clear()
        with rx.recv(timeout=PATIENCE) as message:
            assert message.value == 1


def test_a_refused_relay_that_ends_takes_its_senders_along(channel, short, monkeypatch):
    monkeypatch.setattr(stream, "_PATIENCE_S", 0.0)
    with (
        shmtensor.Publisher(channel) as tx,
        shmtensor.Subscriber(f"{channel}-far") as rx,
        pair(channel, far={"away": 10 * PATIENCE}) as (near, _),
    ):
        monkeypatch.setattr(outbound, "_HELLO_REFUSED_S", 2 * PATIENCE)
        short.set()
        tx.send(np.array(1))
        wait_until(lambda: state_of(near).state == "refused")
        near.close(linger=0)
        with pytest.raises(shmtensor.EndOfStream):
            rx.recv(timeout=PATIENCE)


def test_an_error_of_the_far_relay_ends_no_stream_there(channel, monkeypatch, caplog):
    monkeypatch.setattr(outbound, "_HELLO_REFUSED_S", 0.05)
    collect, broken = Stream._collect, threading.Event()

    def failing(it):
        if broken.is_set():
            raise ZeroDivisionError("a mistake")
        collect(it)

    monkeypatch.setattr(Stream, "_collect", failing)
    with shmtensor.Publisher(channel) as tx, shmtensor.Subscriber(f"{channel}-far") as rx, pair(channel) as (near, _):
        tx.send(np.array(0))
        with rx.recv(timeout=PATIENCE) as message:
            assert message.value == 0
        broken.set()
        wait_until(lambda: state_of(near).connections > 3)
        broken.clear()
        tx.send(np.array(1))
        with rx.recv(timeout=PATIENCE) as message:
            assert message.value == 1
    assert sum(it.exc_info is not None for it in caplog.records) == 1


def test_an_error_behind_what_was_published_keeps_nothing_for_ever(channel, monkeypatch, caplog):
    """The far relay does not know where it will be said that it is done: it is sent again, and acknowledged."""
    monkeypatch.setattr(outbound, "_HELLO_REFUSED_S", 0.05)
    monkeypatch.setattr(stream, "_SHORT_S", 0.01)
    found, errors = endpoints.FarProducer.done_word, [MemoryError("no memory")]

    def failing(it, seq):
        if errors:
            raise errors.pop()
        return found(it, seq)

    monkeypatch.setattr(endpoints.FarProducer, "done_word", failing)
    with (
        shmtensor.Producer(channel) as tx,
        shmtensor.Consumer(f"{channel}-far", acknowledge="release") as rx,
        pair(channel, "work-queue") as (near, _),
    ):
        tx.send(np.array(5))
        for _ in range(2):  # at least once
            with rx.recv(timeout=PATIENCE) as message:
                assert message.value == 5
        wait_until(lambda: state_of(near).in_flight == 0)
    caplog.clear()  # its traceback keeps the sender


@pytest.mark.parametrize("pattern", ["fan-out", "service"])
def test_a_far_relay_without_threads_refuses(channel, pattern, monkeypatch):
    """And keeps nothing of what it could not begin."""
    monkeypatch.setattr(outbound, "_HELLO_REFUSED_S", 0.05)
    start, short, refused = threading.Thread.start, [True], []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: limited(thread))

    def limited(thread):
        if short and thread.name == f"shmtensor relay {channel}-far":
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    where = endpoint()
    make = shmtensor.Client if pattern == "service" else shmtensor.Publisher
    with (
        make(channel),
        shmtensor.Relay(f"{channel}-far", listen=where) as far,
        shmtensor.Relay(channel, to=where, remote=f"{channel}-far", pattern=pattern) as near,
    ):
        wait_until(lambda: len(refused) > 3)
        names = [it.name for it in threading.enumerate()]
        assert not any(it.startswith(f"shmtensor relay {channel}-far") for it in names), names
        wait_until(lambda: "can't start new thread" in state_of(near).reason)
        short.clear()
        wait_until(lambda: is_open(near))
        assert state_of(far).connections == 1


# --- bad input


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"to": "192.0.2.7:7447"}, "PROTOCOL/ADDRESS"),
        ({"to": "tcp/192.0.2.7"}, "needs a host and a port"),
        ({"to": "tcp/192.0.2.7:99999"}, "port from 1 to 65535"),
        ({"listen": "tcp/:7447"}, "needs a host and a port"),
        ({"to": []}, "names no endpoint"),
        ({}, "needs to="),
        ({"to": "tcp/127.0.0.1:1", "listen": "tcp/127.0.0.1:2"}, "one of the two"),
        ({"to": "tcp/127.0.0.1:1", "slots": 4}, "for the far relay"),
        ({"listen": "tcp/127.0.0.1:1", "slots": 0}, "slots must be between"),
        ({"listen": "tcp/127.0.0.1:1", "slots": "x"}, "slots must be"),
        ({"listen": "tcp/127.0.0.1:1", "max_bytes": "banana"}, "max_bytes='banana' is not a size"),
        ({"to": "tcp/127.0.0.1:1", "pattern": "work-queue", "delivery": "latest"}, "is for a fan-out"),
        ({"to": "tcp/127.0.0.1:1", "pattern": "work-queue", "delivery": "all"}, "is for a fan-out"),
        ({"to": "tcp/127.0.0.1:1", "pattern": "service", "delivery": "all"}, "is for a fan-out"),
        ({"listen": "tcp/127.0.0.1:1", "delivery": "latest"}, "for the near relay"),
        ({"listen": "tcp/127.0.0.1:1", "transit": False}, "for the near relay"),
        ({"to": "tcp/127.0.0.1:1", "pattern": "rpc"}, "choose one of"),
        ({"to": "tcp/127.0.0.1:1", "pattern": "fan-out", "user": "x" * 70_000}, "at most 256 printable characters"),
        ({"listen": "tcp/127.0.0.1:1", "user": "a\x1b[31m"}, "at most 256 printable characters"),
        ({"listen": "tcp/127.0.0.1:1", "window_bytes": "99999999TiB"}, "window_bytes must be between"),
        ({"to": "tcp/127.0.0.1:1"}, "does not exist yet"),
        ({"to": "tcp/127.0.0.1:1", "pattern": "fan-out", "remote": "a/b"}, "channel name"),
        ({"listen": "nonsense/127.0.0.1:1"}, "nonsense"),
    ],
)
def test_bad_arguments(channel, options, text):
    with pytest.raises((shmtensor.ArgumentError, shmtensor.ArgumentTypeError, shmtensor.ResourceError), match=text):
        shmtensor.Relay(channel, **options)


def test_an_address_that_cannot_be_had(channel, tmp_path):
    where = endpoint()
    taken = shmtensor.Relay(channel, listen=where)
    with taken, pytest.raises(shmtensor.ResourceError, match="is the address this host's, and free"):
        shmtensor.Relay(f"{channel}-2", listen=where)
    with pytest.raises(shmtensor.ResourceError, match="no such file"):
        shmtensor.Relay(channel, listen=where, config=tmp_path / "missing.json5")
    bad = tmp_path / "bad.json5"
    for text, says in (("{mode: 12}", "mode|JSON"), ("{ not json", "1:1 expected ")):
        bad.write_text(text)
        with pytest.raises(shmtensor.ArgumentError, match=f"is no Zenoh configuration: .*({says})"):
            shmtensor.Relay(channel, listen=where, config=bad)


def test_a_configuration_is_passed_through(channel, tmp_path):
    """Endpoints of a file; and an access list that lets nothing in."""
    where = endpoint()
    file = tmp_path / "far.json5"
    file.write_text(
        '{access_control: {enabled: true, default_permission: "deny", rules: [], subjects: [], policies: []}}'
    )
    with (
        shmtensor.Publisher(channel),
        shmtensor.Relay(f"{channel}-far", listen=where, config=file),
        shmtensor.Relay(channel, to=where, remote=f"{channel}-far") as near,
        pytest.raises(shmtensor.TimedOut),
    ):
        near.wait(1)


@pytest.mark.parametrize("scout", [False, True])
@pytest.mark.parametrize("text", [None, "{}", "{listen: {endpoints: []}}", '{listen: {endpoints: ["WHERE"]}}'])
def test_a_near_relay_listens_nowhere(channel, tmp_path, text, scout):
    """Zenoh's default is any port of every interface, without TLS. What the file itself names is listened at."""
    named, file = endpoint(), tmp_path / "near.json5"
    if text is not None:
        file.write_text(text.replace("WHERE", named))
    before, expected = listening_ports(), set()
    if text is not None and "WHERE" in text:
        expected.add(int(named.rpartition(":")[2]))
    config = None if text is None else file
    with shmtensor.Relay(channel, to=endpoint(), pattern="fan-out", scout=scout, config=config):
        assert listening_ports() - before == expected


def test_a_channel_in_device_memory_ends_its_relay(channel, standin, caplog):
    with shmtensor.Publisher(channel, device="cuda"), pair(channel) as (near, _):
        wait_until(lambda: state_of(near).state == "failed")
        with pytest.raises(shmtensor.WireError, match="publishes in device memory"):
            near.check()
    assert "publishes in device memory" in caplog.text


def test_without_zenoh(channel):
    """Importing imports no Zenoh; the error says what to install."""
    done = subprocess.run(
        [sys.executable, "-c", "import shmtensor, sys; assert 'zenoh' not in sys.modules; import tests.commands; "
         "assert 'zenoh' not in sys.modules"],
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    source = HIDDEN.format(name="zenoh") + (
        "import shmtensor\ntry:\n    shmtensor.Relay('a', listen='tcp/127.0.0.1:1')\n"
        "except shmtensor.DependencyError as error:\n    print(error.name, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout.startswith("zenoh a relay needs Zenoh: pip install '.[relay]'"), done.stderr


def test_repr_and_close(channel):
    with shmtensor.Publisher(channel), pair(channel) as (near, far):
        assert repr(near) == f"<Relay near {channel}: open>"
        wait_until(lambda: repr(far) == f"<Relay far {channel}-far: open>")
        near.close()
        near.close()
        assert repr(near) == "<Relay near closed>"
        with pytest.raises(shmtensor.ClosedError):
            near.wait(0)
        with pytest.raises(shmtensor.ArgumentTypeError, match="make a Relay of its own"):
            import pickle

            pickle.dumps(far)


def test_logging_is_quiet_while_all_is_well(channel, caplog):
    with caplog.at_level(logging.WARNING), shmtensor.Publisher(channel) as tx, pair(channel):
        for number in range(20):
            tx.send(np.array(number))
    assert "shmtensor.relay" not in {it.name for it in caplog.records}
