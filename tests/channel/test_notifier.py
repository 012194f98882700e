"""Several sleepers at once: rung by a thread of the compiled module, by lines that may break or be closed meanwhile."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import shmtensor
from shmtensor import native
from shmtensor.channel.wakeup import Doorbells, Inbox
from shmtensor.channel.zmtp import frame_head
from shmtensor.endpoints import receiver

from ..implementations import only
from ..scenes import Fellow, address_space, limited, play
from ..waiting import PATIENCE, wait_until

needs_native = only("compiled", "without it ZeroMQ's thread notifies")
UIDS = range(1, 5)
BODY = bytes(range(256)) + bytes(16)
NAME = "shmtensor-ring"


def ringers() -> list[Path]:
    """Where the kernel tells of this process's threads that ring."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            if (task / "comm").read_text().strip() == NAME:
                found.append(task)
    return found


def framed(body: bytes) -> bytes:
    return frame_head(len(body)) + body


class Floor:
    """Inboxes, and peers that can be rung there."""

    def __init__(self, directory: str, uids=UIDS) -> None:
        self.inboxes = {uid: Inbox(directory, uid) for uid in uids}
        self.directory = directory

    def peers(self, bells: Doorbells):
        """With a line each: who is rung first is rung by the thread that rings."""
        peers = [SimpleNamespace(uid=uid, connection=None) for uid in self.inboxes]
        bells.notify_all(peers, b"first")
        return peers

    def heard(self, uid: int, count: int) -> list[bytes]:
        """So many doorbells, however long that takes."""
        bodies = []
        while len(bodies) < count:
            body = self.inboxes[uid].wait(PATIENCE)
            assert body is not None, f"{len(bodies)} of {count}"
            bodies.append(body)
        return bodies

    def close(self) -> None:
        for inbox in self.inboxes.values():
            inbox.close()


@pytest.fixture
def floor(tmp_path):
    made = Floor(str(tmp_path))
    yield made
    made.close()


@pytest.fixture
def bells(floor):
    made = Doorbells(floor.directory)
    yield made
    made.close()


def rung_by_thread(peers, body: bytes) -> bool:
    return native.module.notify(peers, framed(body))


# --- one doorbell


def test_whoever_closes_a_line_that_is_being_closed_waits_for_what_was_given_too(floor, bells, monkeypatch):
    line = bells.notify(1, BODY)
    fd, settled = line.fd, []

    def wait_written(number):
        settled.append(number)
        if len(settled) == 1:  # while the first one waits, without the interpreter lock
            line.close()
            assert settled == [fd, fd]

    monkeypatch.setattr(native, "module", SimpleNamespace(wait_written=wait_written))
    line.close()
    assert (settled, line.fd) == ([fd, fd], -1)
    assert floor.heard(1, 1) == [BODY]


@needs_native
def test_each_is_rung_by_another_thread_that_takes_no_signal(floor, bells):
    peers = floor.peers(bells)
    assert rung_by_thread(peers, BODY)
    for uid in UIDS:
        assert floor.heard(uid, 2) == [b"first", BODY]
    (task,) = ringers()
    status = dict(line.split(":\t") for line in (task / "status").read_text().splitlines() if ":\t" in line)
    blocked = int(status["SigBlk"], 16)
    theirs = set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}
    assert [each.name for each in theirs if not blocked >> each - 1 & 1] == []


@needs_native
def test_whoever_has_no_line_yet_is_rung_with_the_others_at_once(floor, bells):
    peers = floor.peers(bells)
    peers[2].connection = None
    bells.forget(peers[2].uid)
    assert not rung_by_thread(peers, BODY)
    bells.notify_all(peers, BODY)
    for uid in UIDS:
        assert floor.heard(uid, 2) == [b"first", BODY]
    assert rung_by_thread(peers, b"again")
    for uid in UIDS:
        assert floor.heard(uid, 1) == [b"again"]


@needs_native
def test_a_full_inbox_holds_nobody_up_and_breaks_no_line(floor, bells):
    """As that of a process that is stopped: its line takes nothing more for now, and is the same line afterwards."""
    peers = floor.peers(bells)
    lines = [peer.connection for peer in peers]
    while lines[0].send(BODY):
        pass
    for number in range(20):
        bells.notify_all(peers, bytes([number]))
        for uid in UIDS[1:]:
            assert floor.heard(uid, 1 + (not number))[-1] == bytes([number])
    while floor.inboxes[UIDS[0]].drain():
        pass
    assert rung_by_thread(peers, BODY)
    assert floor.heard(UIDS[0], 1) == [BODY]
    assert [peer.connection for peer in peers] == lines


@needs_native
def test_a_line_that_broke_is_made_again_at_the_next_doorbell(floor, bells):
    peers = floor.peers(bells)
    broken, others = peers[1].connection, [peer.connection for peer in (peers[0], *peers[2:])]
    broken._socket.shutdown(socket.SHUT_RDWR)
    assert rung_by_thread(peers, b"lost by one")
    native.module.wait_written(-1)
    assert not rung_by_thread(peers, BODY)
    bells.notify_all(peers, BODY)
    assert peers[1].connection is not broken
    assert broken.fd == -1
    assert [peer.connection for peer in (peers[0], *peers[2:])] == others
    assert rung_by_thread(peers, b"again")
    for uid in UIDS:
        lost = uid == peers[1].uid
        assert floor.heard(uid, 3 if lost else 4)[-2:] == [BODY, b"again"]


@needs_native
def test_nothing_follows_on_a_line_that_failed_for_whatever_reason(floor, bells):
    """As it must not where half a frame was written. Here somebody refused one, and would take the next."""
    peers = floor.peers(bells)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        refused = SimpleNamespace(uid=0, connection=SimpleNamespace(fd=ours.fileno()))
        theirs.close()
        assert rung_by_thread([refused, *peers], BODY)
        native.module.wait_written(-1)
        with pytest.raises(BrokenPipeError):
            ours.send(BODY, socket.MSG_NOSIGNAL)
        assert not rung_by_thread([*peers, refused], BODY)
        native.module.wait_written(ours.fileno())
    for uid in UIDS:
        assert floor.heard(uid, 2) == [b"first", BODY]


@needs_native
@pytest.mark.parametrize("end", ["close", "forget", "drop"])
def test_no_doorbell_goes_to_who_gets_the_descriptor_of_a_line_that_was_closed(tmp_path, end):
    """A doorbell that was given is written first, so that it arrives; and then no other of that line's is left."""
    uids = range(1, 17)
    floor = Floor(str(tmp_path), uids)
    try:
        for number in range(30):
            bells = Doorbells(floor.directory)
            peers = floor.peers(bells)
            numbers = {peer.connection.fd for peer in peers}
            body = bytes([number])
            assert rung_by_thread(peers, body)
            if end == "drop":
                bells = peers = None  # what a line's last reference does
            elif end == "close":
                bells.close()
            else:
                for uid in uids:
                    bells.forget(uid)
            with contextlib.ExitStack() as opened:
                pairs = [socket.socketpair() for _ in uids]
                for each in (each for pair in pairs for each in pair):
                    opened.enter_context(each)
                assert numbers <= {each.fileno() for pair in pairs for each in pair}
                for uid in uids:
                    assert floor.heard(uid, 2) == [b"first", body]
                for each in (each for pair in pairs for each in pair):
                    each.setblocking(False)
                    with pytest.raises(BlockingIOError):
                        each.recv(1)
            if bells is not None:
                bells.close()
    finally:
        floor.close()


@needs_native
def test_senders_in_many_threads_share_the_thread(floor):
    """Where it has too much to do they ring by themselves."""
    rounds = 60

    def ring(number):
        bells = Doorbells(floor.directory)
        peers = floor.peers(bells)
        for count in range(rounds):
            bells.notify_all(peers, bytes([number, count]))
        bells.close()

    threads = [threading.Thread(target=ring, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for uid in UIDS:
        heard = floor.heard(uid, len(threads) * (rounds + 1))
        assert sorted(heard) == sorted([b"first"] * 6 + [bytes([n, c]) for n in range(6) for c in range(rounds)])
    for thread in threads:
        thread.join()
    assert len(ringers()) == 1


def ringing_without_a_thread(directory: str) -> None:
    """No address space for its stack: whoever rings does it alone, and the next time it is tried again."""
    floor = Floor(directory)
    bells = Doorbells(directory)
    peers = floor.peers(bells)
    with limited(resource.RLIMIT_AS, address_space()):
        by_thread = rung_by_thread(peers, BODY)
        bells.notify_all(peers, BODY)
    assert not by_thread
    assert not ringers()
    assert rung_by_thread(peers, b"again")
    for uid in UIDS:
        assert floor.heard(uid, 3) == [b"first", BODY, b"again"]
    assert len(ringers()) == 1
    bells.close()
    floor.close()


@needs_native
@pytest.mark.slow
def test_where_no_thread_can_be_started_the_sender_rings(tmp_path):
    play(ringing_without_a_thread, str(tmp_path))


def ringing_and_forking(directory: str) -> None:
    """Children of a process that rings all the time: each has a thread of its own, and none waits for ever."""
    warnings.simplefilter("ignore", DeprecationWarning)  # a process with threads forks: that is what is tried
    floor = Floor(directory)
    stop = threading.Event()

    def ring():
        while not stop.is_set():
            bells = Doorbells(directory)
            peers = floor.peers(bells)
            for _ in range(20):
                bells.notify_all(peers, BODY)
            bells.close()
            for inbox in floor.inboxes.values():
                while inbox.drain():
                    pass

    thread = threading.Thread(target=ring)
    thread.start()
    wait_until(ringers)
    for number in range(20):
        child = os.fork()
        if not child:
            code = 1
            with contextlib.suppress(BaseException):
                signal.alarm(int(PATIENCE))
                assert not ringers()
                own = Floor(directory, [1000 + number, 2000 + number])
                bells = Doorbells(directory)
                peers = own.peers(bells)
                assert rung_by_thread(peers, BODY)
                bells.close()
                for uid in own.inboxes:
                    assert own.heard(uid, 2) == [b"first", BODY]
                assert len(ringers()) == 1  # not before it has written: it gives itself its name
                code = 0
            os._exit(code)
        status = os.waitpid(child, 0)[1]
        if status:
            stop.set()
        assert not status, (number, status)
    stop.set()
    thread.join()
    floor.close()


@needs_native
@pytest.mark.slow
def test_a_forked_child_rings_by_a_thread_of_its_own(tmp_path):
    play(ringing_and_forking, str(tmp_path))


# --- publishers and subscribers


def asleep(pub) -> bool:
    """Whether all its subscribers sleep, and have not been rung since."""
    words = [pub._control_words[peer.asleep] for peer in pub._recipients.listeners]
    return all(word & 1 and word != peer.notified for word, peer in zip(words, pub._recipients.listeners, strict=True))


def send_to_sleepers(pub, value) -> None:
    wait_until(lambda: asleep(pub))
    pub.send(value)


class Sleepers:
    """Subscribers, a thread each. By default they never look around: one that is not woken is never woken."""

    def __init__(self, monkeypatch, channel: str, count: int, messages: int, tick: float = 10 * PATIENCE) -> None:
        monkeypatch.setattr(receiver, "LIVENESS_INTERVAL", tick)
        self.subs = [shmtensor.Subscriber(channel, spin=0) for _ in range(count)]
        self.got = [[] for _ in range(count)]
        self.threads = [
            threading.Thread(target=self._receive, args=(sub, got, messages), daemon=True)
            for sub, got in zip(self.subs, self.got, strict=True)
        ]
        for thread in self.threads:
            thread.start()

    @staticmethod
    def _receive(sub, got, messages) -> None:
        for _ in range(messages):
            got.append(int(sub.recv(timeout=PATIENCE).value[0]))

    def close(self) -> None:
        for thread in self.threads:
            thread.join(PATIENCE)
        for sub in self.subs:
            sub.close()


@pytest.mark.parametrize("make", [torch.tensor, np.array], ids=["compiled", "python"])
def test_several_sleepers_are_all_woken(channel, monkeypatch, make):
    messages = 30
    with shmtensor.Publisher(channel) as pub:
        sleepers = Sleepers(monkeypatch, channel, 4, messages)
        pub.wait_for_subscribers(4)
        for number in range(messages):
            send_to_sleepers(pub, make([number]))
        sleepers.close()
        assert sleepers.got == [list(range(messages))] * 4
        assert pub.statistics().doorbells == 4 * messages
        assert [sub.statistics().late for sub in sleepers.subs] == [0] * 4


@needs_native
def test_the_compiled_sender_has_several_rung_by_itself(channel, monkeypatch):
    with shmtensor.Publisher(channel) as pub:
        sleepers = Sleepers(monkeypatch, channel, 3, 10)
        pub.wait_for_subscribers(3)
        for number in range(10):
            send_to_sleepers(pub, torch.tensor([number]))
        sleepers.close()
        assert pub._writer.notified >= 3 * 7  # but for the first messages
        assert ringers()


@needs_native
def test_a_line_that_broke_under_the_compiled_sender_is_made_again(channel, monkeypatch):
    """The first message after that wakes one sleeper at its tick only."""
    with shmtensor.Publisher(channel) as pub:
        sleepers = Sleepers(monkeypatch, channel, 3, 12, tick=receiver.LIVENESS_INTERVAL)
        pub.wait_for_subscribers(3)
        for number in range(12):
            wait_until(lambda: asleep(pub))
            if number == 6:
                broken = pub._recipients.listeners[1].connection
                broken._socket.shutdown(socket.SHUT_RDWR)
            pub.send(torch.tensor([number]))
        sleepers.close()
        assert sleepers.got == [list(range(12))] * 3
        assert broken.fd == -1
        assert pub._recipients.listeners[1].connection.fd >= 0


def test_what_was_sent_just_before_the_end_wakes_its_sleepers(channel, monkeypatch):
    with shmtensor.Publisher(channel) as pub:
        sleepers = Sleepers(monkeypatch, channel, 4, 3)
        pub.wait_for_subscribers(4)
        for number in range(3):
            send_to_sleepers(pub, torch.tensor([number]))
    sleepers.close()
    assert sleepers.got == [[0, 1, 2]] * 4


LAST_WORDS = """
import os, signal, sys, torch, shmtensor
pub = shmtensor.Publisher(sys.argv[1])
pub.wait_for_subscribers(4)
print("open", flush=True)
for number in range(3):
    while True:
        words = [pub._control_words[peer.asleep] for peer in pub._recipients.listeners]
        if all(word & 1 and word != peer.notified for word, peer in zip(words, pub._recipients.listeners)):
            break
    pub.send(torch.tensor([number]))
os.kill(os.getpid(), signal.SIGKILL)
"""


@needs_native
@pytest.mark.slow
@pytest.mark.parametrize("_", range(3))
def test_what_was_sent_by_who_was_killed_in_the_next_moment_reaches_all_its_sleepers(channel, monkeypatch, _):
    """Its thread may not have rung yet: then they find the message at their tick."""
    sleepers = Sleepers(monkeypatch, channel, 4, 3, tick=receiver.LIVENESS_INTERVAL)
    publisher = Fellow(LAST_WORDS, channel)
    publisher.listen("open")
    publisher.end(-signal.SIGKILL)  # before the last of the others leaves, who removes what it left
    sleepers.close()
    assert sleepers.got == [[0, 1, 2]] * 4


LISTENER = """
import sys, shmtensor
from shmtensor.endpoints import receiver
receiver.LIVENESS_INTERVAL = 600
sub = shmtensor.Subscriber(sys.argv[1], spin=0)
print("ready", flush=True)
for message in sub:
    print(int(message.value[0]), flush=True)
    del message
"""


@needs_native
@pytest.mark.slow
def test_a_stopped_sleeper_with_a_full_inbox_and_a_dead_one_hold_nobody_up(channel):
    with shmtensor.Publisher(channel, slots=64) as pub:
        stopped, killed, *others = fellows = [Fellow(LISTENER, channel) for _ in range(4)]
        for fellow in fellows:
            fellow.listen("ready")
        pub.wait_for_subscribers(4)

        def send(number, listeners):
            here = {fellow.process.pid for fellow in listeners}

            def all_sleep():
                peers = [peer for peer in pub._recipients.listeners if peer.entry.pid in here]
                words = [pub._control_words[peer.asleep] for peer in peers]
                return all(word & 1 and word != peer.notified for word, peer in zip(words, peers, strict=True))

            wait_until(all_sleep)
            pub.send(np.array([number]))
            for fellow in listeners:
                fellow.listen(str(number))

        for number in range(4):
            send(number, fellows)
        (line,) = (peer.connection for peer in pub._recipients.listeners if peer.entry.pid == stopped.process.pid)
        wait_until(lambda: asleep(pub))
        stopped.signal(signal.SIGSTOP)
        stopped.stopped()
        full = pub._recipients._bell(pub._rings[0], 0)
        while line.send(full):
            pass
        killed.kill()
        for number in range(4, 30):
            send(number, others)
        stopped.signal(signal.SIGCONT)
        for number in range(4, 30):
            stopped.listen(str(number))
        alive = [stopped, *others]
        for number in range(30, 34):
            send(number, alive)
        pub.wait_for_subscribers(3)
        assert pub.statistics().receivers == 3
    for fellow in alive:
        fellow.end()


PURE = """
import sys, threading, numpy, shmtensor
from shmtensor import native
from shmtensor.channel import wakeup
from shmtensor.endpoints import receiver
assert native.module is None
receiver.LIVENESS_INTERVAL = 600
pub = shmtensor.Publisher(sys.argv[1])
subs = [shmtensor.Subscriber(sys.argv[1], spin=0) for _ in range(3)]
got = [[] for _ in subs]
take = lambda sub, got: [got.append(int(sub.recv(timeout=60).value[0])) for _ in range(10)]
threads = [threading.Thread(target=take, args=each) for each in zip(subs, got)]
for thread in threads:
    thread.start()
for number in range(10):
    while not all(pub._control_words[sub._asleep] & 1 for sub in subs) or any(len(each) < number for each in got):
        assert all(thread.is_alive() for thread in threads)
    pub.send(numpy.array([number]))
for thread in threads:
    thread.join()
assert got == [list(range(10))] * 3, got
assert wakeup._context is not None
pub.close()
for sub in subs:
    sub.close()
"""


@pytest.mark.slow
@only("pure", "with the compiled module its thread notifies")
def test_without_the_compiled_module_zeromq_rings(channel):
    subprocess.run([sys.executable, "-c", PURE, channel], check=True, timeout=2 * PATIENCE)
