"""Frames that no good relay sends, into relays at work: counted, in no ring, and the good ones go on."""

from __future__ import annotations

import contextlib
import random
import struct
import threading
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("zenoh", reason="a relay needs the extra `relay`")

import shmtensor
from shmtensor.codec import raw
from shmtensor.codec.encode import encode
from shmtensor.relay import frames as fr
from shmtensor.relay import session
from shmtensor.relay.keys import Keys, user_name
from shmtensor.relay.session import Session
from shmtensor.wire import spec

from ..waiting import PATIENCE, wait_until
from .hosts import endpoint, is_open, state_of
from .test_frames import signed


class Scene:
    """A far relay, a near one, and a peer of both that hears what they say to each other."""

    def __init__(self, channel, stack, pattern="fan-out", **far):
        there, self.where = f"{channel}-far", endpoint()
        where = self.where
        make, take = {
            "fan-out": (shmtensor.Publisher, shmtensor.Subscriber),
            "work-queue": (shmtensor.Producer, shmtensor.Consumer),
            "service": (shmtensor.Client, shmtensor.Server),
        }[pattern]
        self.tx = stack.enter_context(make(channel))
        self.rx = stack.enter_context(take(there))
        self.far = stack.enter_context(shmtensor.Relay(there, listen=where, **far))
        to_near = endpoint()  # peers are not told what others say: it is heard in this process, and said to each
        self.peer = Session(to=[where], listen=[to_near], scout=False, config=None)
        stack.callback(self.peer.close)
        self.keys = Keys(there)
        self.heard = []
        self.senders = {}
        say, answer = session.Sender.send, Session.answer

        def send(sender, head, body=b""):
            self.heard.append((head, bytes(body)))
            say(sender, head, body)

        def heard_answer(peer, key, head, body=b""):
            self.heard.append((head, bytes(body)))
            answer(peer, key, head, body)

        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(session.Sender, "send", send)
        patch.setattr(Session, "answer", heard_answer)
        self.near = stack.enter_context(shmtensor.Relay(channel, to=[where, to_near], remote=there, pattern=pattern))
        self.near.wait(PATIENCE)
        wait_until(lambda: state_of(self.far).state == "open")
        tokens = []
        self.peer.watch(self.keys.alive_far("*"), lambda key, _: tokens.append(key))
        self.peer.watch(self.keys.alive_near("*"), lambda key, _: tokens.append(key))
        wait_until(lambda: len(tokens) == 2)  # it is connected to both
        welcome = fr.parse(*self.kinds(fr.WELCOME)[0])
        self.ids = welcome.near, welcome.far, welcome.attempt
        self.to_far, self.to_near = self.keys.far(welcome.far), self.keys.near(welcome.near)
        self.sent = 0

    def pass_on(self, count, size=50):
        """Send messages, and receive these and no others."""
        for number in range(self.sent, self.sent + count):
            self.tx.send(np.full(size, number))
        for number in range(self.sent, self.sent + count):
            with self.rx.recv(timeout=PATIENCE) as message:
                assert (message.value == number).all()
                assert len(message.value) == size
        self.sent += count
        wait_until(lambda: state_of(self.near).in_flight == 0)

    def ask(self, count, size=50):
        """Of a service: send requests, and get their replies."""
        futures = [self.tx.submit(np.full(size, number), timeout=PATIENCE) for number in range(count)]
        for number in range(count):
            with self.rx.recv(timeout=PATIENCE) as request:
                assert (request.value == number).all()
                request.reply(request.value + 1)
        for number, future in enumerate(futures):
            assert (future.result() == number + 1).all()
        wait_until(lambda: state_of(self.near).in_flight == 0)

    def say(self, key, head, body=b""):
        """As the peer."""
        if key not in self.senders:
            self.senders[key] = self.peer.sender(key)
        self.senders[key].send(head, body)

    def kinds(self, kind):
        return [it for it in list(self.heard) if len(it[0]) > 13 and it[0][13] == kind]

    def wait_for_bad(self, count, relay=None):
        wait_until(lambda: state_of(relay or self.far).bad_frames >= count)
        assert state_of(relay or self.far).bad_frames == count


@pytest.fixture(params=["fan-out", "work-queue"])
def scene(request, channel):
    with contextlib.ExitStack() as stack:
        made = Scene(channel, stack, request.param)
        yield made
        assert is_open(made.near)
        with pytest.raises(shmtensor.TimedOut):
            made.rx.recv(timeout=0.3)  # nothing else is in the ring
    vars(made).clear()  # pytest keeps it longer than its check of what is left


def test_noise_at_every_key(scene):
    scene.pass_on(10)
    noise = random.Random(1)
    near = state_of(scene.near).connections
    for number in range(200):
        key = scene.keys.hello if number % 2 else scene.to_far
        scene.say(key, noise.randbytes(noise.choice([0, 3, 8, 40, 200])), noise.randbytes(noise.choice([0, 100])))
    scene.wait_for_bad(200)
    scene.pass_on(10)
    assert state_of(scene.near).connections == near


def test_changed_frames_of_the_good_relay(scene):
    """Each frame that was heard, with a bit changed, cut, longer; and with fields changed and the digest of that."""
    scene.pass_on(3)
    scene.pass_on(1, 200_000)
    wait_until(lambda: scene.kinds(fr.ITEMS) and scene.kinds(fr.PART) and scene.kinds(fr.STATUS))
    noise, bad = random.Random(2), 0
    for kind in (fr.ITEMS, fr.PART, fr.STATUS):
        head, body = scene.kinds(kind)[-1]
        for at in range(0, len(head), 5):
            changed = bytearray(head)
            changed[at] ^= 1 << noise.randrange(8)
            if changed[16:24] != head[16:24]:  # it goes to nobody's stream
                continue
            scene.say(scene.to_far, bytes(changed), body)
            bad += 1
        for changed in (head[:-1], head + b"\0", head[:40]):
            scene.say(scene.to_far, changed, body)
            bad += 1
        scene.say(scene.to_far, head, body + b"\0")
        for at, value in ((8, b"SHMX"), (12, b"\x02"), (13, b"\x0b"), (14, b"\x01\0"), (24, struct.pack("<Q", 5))):
            rest = bytearray(head)
            rest[at : at + len(value)] = value
            scene.say(scene.to_far, signed(bytes(rest[8:]), body), body)
        bad += 6
    scene.wait_for_bad(bad)
    scene.pass_on(10)


def test_a_replay_of_everything(scene):
    """Every frame once more, in the attempt in which it was sent: no message comes twice, no credit is made of it."""
    scene.pass_on(20)
    scene.pass_on(2, 200_000)
    replayed = scene.kinds(fr.HELLO) + scene.kinds(fr.ITEMS) + scene.kinds(fr.PART) + scene.kinds(fr.STATUS)
    connections = state_of(scene.near).connections
    for _ in range(3):
        for head, body in replayed:
            scene.say(scene.keys.hello if head[13] == fr.HELLO else scene.to_far, head, body)
    kinds = [head[13] for head, _ in replayed]
    items, statuses = (3 * sum(kind in which for kind in kinds) for which in ((fr.ITEMS, fr.PART), (fr.STATUS,)))
    wait_until(lambda: state_of(scene.far).bad_frames >= items)
    scene.pass_on(20)
    scene.pass_on(2, 200_000)
    assert state_of(scene.near).connections == connections
    assert state_of(scene.near).bad_frames == 0
    assert items <= state_of(scene.far).bad_frames <= items + statuses  # of several STATUS in a row, one is looked at


def test_what_the_near_relay_hears(scene):
    """Noise, and statements that cannot be true."""
    scene.pass_on(5)
    ids, to_near = scene.ids, scene.to_near
    for made in (
        fr.State(*ids, 1000, 1000, 10, False, fr.LOSSLESS),  # more than was sent
        fr.State(*ids, 3, 3, 1 << 40, False, fr.LOSSLESS),
        fr.Items(*ids, 0, [fr.Item(1, 1, b"d", b"")]),
    ):
        scene.say(to_near, made.head(b"d" if isinstance(made, fr.Items) else b""), b"d" * isinstance(made, fr.Items))
    scene.say(to_near, b"noise" * 20)
    scene.wait_for_bad(4, scene.near)
    attempts = ids[0], ids[1], ids[2] + 7
    for made in (
        fr.State(*attempts, 5, 5, 10, True, fr.NOBODY),
        fr.Welcome(*attempts, 1, 1, 0, False, 1),
        fr.Bye(*attempts, True),
        fr.Refuse(ids[0], 5, ids[2], "go away"),
    ):
        body = b"go away" if isinstance(made, fr.Refuse) else b""
        scene.say(to_near, made.head(body), body)
    scene.pass_on(10)
    assert state_of(scene.near).connections == 1


def test_items_that_no_receiver_could_read(channel):
    """A peer that speaks the protocol well, but whose descriptions are noise, or claim more than there is."""
    with contextlib.ExitStack() as stack:
        scene = Scene(channel, stack)
        scene.pass_on(3)
        head, body = scene.kinds(fr.ITEMS)[-1]
        item = fr.parse(head, body).items[0]
        raw.check(item.description, len(item.payload))
        hello = fr.Hello(99, 0, 1, fr.FAN_OUT, user_name(), 1, 1)
        welcomed = threading.Event()
        scene.peer.receive(scene.keys.near(99), lambda *_: welcomed.set())
        scene.say(scene.keys.hello, hello.head())
        assert welcomed.wait(PATIENCE)
        noise, bad = random.Random(3), 0
        for number in range(1, 60):
            description = bytearray(item.description)
            if number % 3:
                description[noise.randrange(len(description))] ^= 1 << noise.randrange(8)
            payload = bytes(item.payload)[: -1 - noise.randrange(100)]
            try:
                raw.check(bytes(description), len(payload))
            except shmtensor.WireError:
                bad += 1
            else:
                continue
            made = fr.Items(99, scene.ids[1], 1, 0, [fr.Item(number, 5, bytes(description), payload)])
            scene.say(scene.to_far, made.head(made.body()), made.body())
        assert bad > 20
        scene.wait_for_bad(bad)
        part = fr.Part(99, scene.ids[1], 1, 0, 1000, 5, 0, 1 << 43, item.description, b"x" * 100)
        scene.say(scene.to_far, part.head(item.description + b"x" * 100), item.description + b"x" * 100)
        scene.wait_for_bad(bad + 1)  # no message of this description is so large
        scene.pass_on(10)
        with pytest.raises(shmtensor.TimedOut):
            scene.rx.recv(timeout=0.3)


def test_peers_that_only_say_hello_do_not_keep_the_good_one_out(channel, caplog):
    """As many as are taken, of which none has a token: they leave as relays do that cannot be reached."""
    with contextlib.ExitStack() as stack:
        scene = Scene(channel, stack, away=2.0)
        scene.pass_on(3)
        for number in range(1000, 1400):
            hello = fr.Hello(number, 0, 1, fr.FAN_OUT, user_name(), 1, 1)
            scene.say(scene.keys.hello, hello.head())
        wait_until(lambda: state_of(scene.far).refused == 400 - 255)
        assert "the far relay has 256 near ones" in caplog.text
        scene.pass_on(5)
        with shmtensor.Publisher(f"{channel}-2") as tx, shmtensor.Relay(
            f"{channel}-2", to=scene.where, remote=f"{channel}-far"
        ) as second:  # fmt: skip
            wait_until(lambda: is_open(second))
            tx.send(np.array(77))
            with scene.rx.recv(timeout=PATIENCE) as message:
                assert message.value == 77
        scene.pass_on(5)


def test_a_payload_is_as_large_as_its_description_says():
    """A frame of some bytes takes no slot of a gigabyte."""
    for value in (np.zeros(3), {"a": np.zeros((5, 7)), "b": b"abc"}, None):
        encoded = encode(value, None)
        description = bytes(encoded.description)
        raw.check(description, encoded.nbytes)
        with pytest.raises(shmtensor.WireError, match="only"):
            raw.check(description, 60_000_000)


def test_a_sender_that_nobody_has_announced_gets_no_ring(channel):
    """So a peer makes no more senders here than one STATUS can name."""
    with contextlib.ExitStack() as stack:
        scene = Scene(channel, stack)
        scene.pass_on(3)
        item = fr.parse(*scene.kinds(fr.ITEMS)[-1]).items[0]
        welcomed = threading.Event()
        scene.peer.receive(scene.keys.near(99), lambda *_: welcomed.set())
        scene.say(scene.keys.hello, fr.Hello(99, 0, 1, fr.FAN_OUT, user_name(), 1, 1).head())
        assert welcomed.wait(PATIENCE)

        def say_items(number, sender):
            made = fr.Items(99, scene.ids[1], 1, number - 1, [fr.Item(number, sender, item.description, item.payload)])
            scene.say(scene.to_far, made.head(made.body()), made.body())

        say_items(1, 5)
        scene.wait_for_bad(1)
        assert len(shmtensor.inspect(f"{channel}-far").senders) == 1
        scene.say(scene.to_far, fr.Status(99, scene.ids[1], 1, 1, 0, 0, [fr.Sender(5, 1, "x")]).head())
        say_items(2, 5)  # the first one was not received: these begin behind it
        wait_until(lambda: len(shmtensor.inspect(f"{channel}-far").senders) == 2)
        scene.pass_on(3)


def test_a_number_far_ahead_of_what_is_not_done(channel):
    """STATE says how far ahead of what is acknowledged consumers are, as far as it has room for that."""
    with contextlib.ExitStack() as stack:
        scene = Scene(channel, stack, "work-queue")
        scene.pass_on(3)
        other = stack.enter_context(shmtensor.Consumer(f"{channel}-far"))
        item = fr.parse(*scene.kinds(fr.ITEMS)[-1]).items[0]
        heard = []
        scene.peer.receive(scene.keys.near(99), lambda head, body: heard.append(fr.parse(head, body.to_bytes())))
        scene.say(scene.keys.hello, fr.Hello(99, 0, 1, fr.WORK_QUEUE, user_name(), 1, 1).head())
        wait_until(lambda: heard)
        scene.say(scene.to_far, fr.Status(99, scene.ids[1], 1, 1, 0, 0, [fr.Sender(5, 1, "x")]).head())
        for after, number in ((0, 1), (1, 1 << 40)):
            made = fr.Items(99, scene.ids[1], 1, after, [item._replace(number=number, sender=5)])
            scene.say(scene.to_far, made.head(made.body()), made.body())
        with scene.rx.recv(timeout=PATIENCE), other.recv(timeout=PATIENCE):
            wait_until(lambda: heard[-1].credit == fr.MOST_CREDIT if isinstance(heard[-1], fr.State) else None)
        scene.pass_on(3)


def test_a_message_that_zenoh_would_have_to_keep_for_long_is_not_put_together(channel):
    """Zenoh drops what is larger than any frame of a relay, before it comes here."""
    with contextlib.ExitStack() as stack:
        scene = Scene(channel, stack)
        scene.pass_on(3)
        scene.say(scene.to_far, b"noise" * 20, bytes(fr.MOST_FRAME + (1 << 20)))
        scene.say(scene.to_far, b"noise" * 20, bytes(spec.MAX_DESCRIPTION))  # behind it, and as large as frames may be
        scene.wait_for_bad(1)
        scene.pass_on(3)


def test_a_relay_that_sends_is_not_away(channel):
    """Its token is withdrawn, as by a connection that ends late, while the far relay waits for a slot: it stays."""
    with contextlib.ExitStack() as stack:
        scene = Scene(channel, stack, away=2.0, slots=2)
        scene.pass_on(3)
        (inbound,) = scene.far._channels
        inbound._on_token(scene.keys.alive_near(scene.ids[0]), False)
        for number in range(8):
            scene.tx.send(np.full(50, number))
        before = len(scene.kinds(fr.STATUS))
        wait_until(lambda: len(scene.kinds(fr.STATUS)) >= before + 4)  # one a second, and each says that it is there
        for number in range(8):
            with scene.rx.recv(timeout=PATIENCE) as message:
                assert (message.value == number).all()
        assert state_of(scene.near).connections == 1


@pytest.fixture
def served(channel):
    """The same scene, of a service."""
    with contextlib.ExitStack() as stack:
        made = Scene(channel, stack, "service")
        made.ask(5)
        yield made
        made.ask(10)
        assert is_open(made.near)
        assert state_of(made.near).connections == 1
        with pytest.raises(shmtensor.TimedOut):
            made.rx.recv(timeout=0.3)  # no other request came
        assert made.tx.statistics().duplicates == 0
    vars(made).clear()


def test_an_old_status_is_no_news_of_the_senders(scene):
    """The counts are those of now, so that only its number tells that it is a replay."""

    def told():
        return [fr.parse(*it) for it in scene.kinds(fr.STATUS)]

    scene.pass_on(3)
    wait_until(told)
    number = told()[-1].number
    scene.pass_on(1)  # behind that one, so the far relay has it
    wait_until(lambda: told()[-1].sent == 4)
    replayed = replace(told()[-1], number=number, senders=[])

    def is_refused():  # right behind another STATUS, an older one is not even looked at
        scene.say(scene.to_far, replayed.head())
        return state_of(scene.far).bad_frames

    wait_until(is_refused)
    scene.pass_on(3)
    assert state_of(scene.near).connections == 1


def test_what_a_far_relay_hears_of_requests(served):
    """Everything again, cancellations of what there is not, confirmations of what was not sent."""
    for head, body in [it for it in list(served.heard) if it[0][13] in (fr.ITEMS, fr.STATE, fr.STATUS)]:
        served.say(served.to_far, head, body)
    for made in (
        fr.State(*served.ids, 1000, 1000, 10, False, fr.NOBODY),
        fr.State(*served.ids, 1, 1, 1 << 40, False, fr.NOBODY),
        fr.Cancel(*served.ids, range(6)),
        fr.Cancel(*served.ids, [(1 << 64) - 1]),
    ):
        served.say(served.to_far, made.head())
    wait_until(lambda: state_of(served.far).bad_frames >= 2)


def test_requests_that_no_server_could_read(served):
    """Notes that are none, and descriptions of more than there is: passed over, and their clients learn it."""
    welcomed = threading.Event()
    served.peer.receive(served.keys.near(99), lambda *_: welcomed.set())
    served.say(served.keys.hello, fr.Hello(99, 0, 1, fr.SERVICE, user_name(), 1, 1).head())
    assert welcomed.wait(PATIENCE)
    status = fr.Status(99, served.ids[1], 1, 1, 0, 0, [fr.Sender(5, 1, "x")])
    served.say(served.to_far, status.head())
    good = bytes(encode(np.zeros(9), None).description)
    bad = [b"x", bytes(fr.NOTE), b"\xff" * fr.NOTE + good, fr.RequestNote(0, 0, 0).pack() + good[:-1]]
    for number, description in enumerate(bad, 1):
        made = fr.Items(99, served.ids[1], 1, number - 1, [fr.Item(number, 5, description, bytes(72))])
        served.say(served.to_far, made.head(made.body()), made.body())
    served.wait_for_bad(len(bad))


def test_what_a_near_relay_hears_of_replies(served):
    """Replies again, to requests that are no more, out of order, and such as cannot be read."""
    future = served.tx.submit(np.zeros(3), timeout=PATIENCE)
    request = served.rx.recv(timeout=PATIENCE)
    replies = [it for it in served.kinds(fr.ITEMS) if fr.parse(*it).items[0].sender < 1000]
    assert len(replies) >= 1
    for head, body in replies:
        served.say(served.to_near, head, body)
    served.wait_for_bad(len(replies), served.near)
    request.reply(np.ones(3))
    assert (future.result() == 1).all()


def test_a_reply_that_its_client_could_not_read(channel):
    """The request ends with an error. The far relay's own reply has that number, and nothing that it hears of replies
    can be true any more: so it begins anew."""
    with contextlib.ExitStack() as stack:
        scene = Scene(channel, stack, "service")
        future = scene.tx.submit(np.zeros(50), timeout=PATIENCE)
        request = scene.rx.recv(timeout=PATIENCE)
        description = fr.ReplyNote(fr.REPLY, 0).pack() + b"noise" * 1000
        made = fr.Items(*scene.ids, 0, [fr.Item(1, 1, description, b"abc")])
        scene.say(scene.to_near, made.head(made.body()), made.body())
        with pytest.raises(shmtensor.RemoteError, match="without an answer"):
            future.result()
        request.reply(1)
        scene.ask(5)
        assert state_of(scene.near).connections == 2
