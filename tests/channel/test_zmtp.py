"""Both ends of a doorbell's connection: against each other, real `zmq.PUSH` sockets, and what speaks no ZeroMQ."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import multiprocessing
import socket
import subprocess
import sys
import threading

import pytest
import torch
import zmq

import shmtensor
from shmtensor.channel import zmtp
from shmtensor.channel.wakeup import Doorbells, Inbox
from shmtensor.endpoints.asyncio import wait_queue_of

from ..implementations import only
from ..scenes import few_files
from ..waiting import PATIENCE, complaints, wait_until

BODY = bytes(range(256)) + bytes(16)


HELLO = zmtp._PUSH_HELLO
FRAME = zmtp.frame_head(len(BODY)) + BODY


@pytest.fixture
def inbox(tmp_path):
    made = Inbox(str(tmp_path), 7)
    yield made
    made.close()


@contextlib.contextmanager
def zmq_push(inbox, **options: int):
    """A real PUSH socket that calls on the inbox."""
    context = zmq.Context()
    try:
        push = context.socket(zmq.PUSH)
        for name, value in options.items():
            push.setsockopt(getattr(zmq, name), value)
        push.connect(f"ipc://{inbox.path}")
        yield push
    finally:
        context.destroy(linger=0)


@contextlib.contextmanager
def caller(inbox):
    """Something that calls on the inbox and may say anything."""
    with socket.socket(socket.AF_UNIX) as ours:
        ours.connect(inbox.path)
        yield ours


def wait_for(inbox, count: int) -> list[bytes]:
    """So many messages, and then nothing more."""
    heard = []
    while len(heard) < count:
        body = inbox.wait(PATIENCE)
        assert body is not None, f"{len(heard)} of {count}"
        heard.append(body)
    assert inbox.drain() == []
    return heard


def serve(inbox) -> None:
    """Let the inbox deal with what has arrived, which is no message."""
    assert inbox.wait(0.01) is None


BODIES = [BODY, b"", b"x" * 255, b"y" * 256, b"z" * zmtp.MOST] + [bytes([count]) * count for count in range(100)]


def test_messages_arrive_whole_and_in_order(inbox):
    push = zmtp.Push(inbox.path)
    for body in BODIES:
        assert push.send(body)
        assert inbox.wait(PATIENCE) == body
    push.close()


def test_messages_of_a_zeromq_socket_arrive_whole_and_in_order(inbox):
    with zmq_push(inbox) as push:
        for body in BODIES:
            push.send(body)
        assert wait_for(inbox, len(BODIES)) == BODIES


def test_many_callers_of_both_kinds(inbox):
    with contextlib.ExitStack() as opened:
        pushes = [opened.enter_context(zmq_push(inbox)) for _ in range(5)]
        lines = [zmtp.Push(inbox.path) for _ in range(20)]
        for line in lines:
            opened.callback(line.close)
        for number, push in enumerate([*pushes, *lines]):
            for count in range(3):
                push.send(bytes([number, count]))
        heard = wait_for(inbox, 75)
        assert sorted(heard) == sorted(bytes([number, count]) for number in range(25) for count in range(3))
        for number in range(25):
            assert [body[1] for body in heard if body[0] == number] == [0, 1, 2]


@pytest.mark.parametrize("greeting_waits", [False, True])
def test_what_was_sent_arrives_after_the_sender_has_closed(inbox, greeting_waits):
    push = zmtp.Push(inbox.path)
    if greeting_waits:
        serve(inbox)
    for _ in range(3):
        assert push.send(BODY)
    push.close()
    push.close()
    assert wait_for(inbox, 3) == [BODY] * 3
    assert not inbox._connections


def test_a_full_inbox_refuses_and_never_cuts_a_message(inbox):
    push = zmtp.Push(inbox.path)
    sent = 0
    while push.send(BODY):
        sent += 1
    assert sent >= 10
    assert wait_for(inbox, sent) == [BODY] * sent
    assert push.send(b"another")
    assert inbox.wait(PATIENCE) == b"another"
    push.close()


def test_nobody_listens(tmp_path, inbox):
    with pytest.raises(FileNotFoundError):
        zmtp.Push(str(tmp_path / "nobody"))
    push, late = zmtp.Push(inbox.path), zmtp.Push(inbox.path)
    assert push.send(BODY)
    assert inbox.wait(PATIENCE) == BODY
    inbox.close()
    inbox.close()
    for line in (push, late):
        with pytest.raises(OSError):
            line.send(BODY)
        line.close()
    with pytest.raises(ConnectionRefusedError):
        zmtp.Push(inbox.path)


@pytest.mark.parametrize(
    "says",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\xff" + bytes(8) + b"\x7f\x01",
        HELLO.replace(b"NULL", b"EVIL") + FRAME,
        HELLO + zmtp.frame_head(zmtp.MOST + 1) + bytes(zmtp.MOST + 1),
        HELLO + zmtp.frame_head(2**64 - 1),
    ],
    ids=["http", "version 1", "security", "too long", "endless"],
)
def test_whoever_speaks_another_protocol_is_hung_up_on(inbox, says):
    with caller(inbox) as bad:
        bad.sendall(says)
        assert inbox.drain() == inbox.drain() == []
        assert not inbox._connections
        bad.settimeout(PATIENCE)
        with contextlib.suppress(ConnectionResetError):
            assert bad.recv(4096).startswith(zmtp._GREETING)
            assert bad.recv(4096) == b""
    good = zmtp.Push(inbox.path)
    good.send(BODY)
    assert wait_for(inbox, 1) == [BODY]
    good.close()


def test_a_zeromq_socket_that_wants_authentication_is_hung_up_on(inbox):
    with zmq_push(inbox, PLAIN_SERVER=1) as push, zmq_push(inbox) as good:
        push.send(b"never")
        good.send(BODY)
        assert wait_for(inbox, 1) == [BODY]


def test_a_message_in_pieces_is_put_together(inbox):
    with caller(inbox) as slow:
        says = HELLO + FRAME + b"\x00\x03abc" + b"\x04\x05\x04PING" + FRAME
        heard = []
        for at in range(len(says)):
            slow.sendall(says[at : at + 1])
            heard += inbox.drain()
            heard += inbox.drain()
        assert heard == [BODY, b"abc", BODY]
        assert slow.recv(4096) == zmtp._PULL_HELLO


def test_the_other_side_hangs_up_in_the_middle(inbox):
    for cut in (0, 20, len(zmtp._GREETING), len(HELLO), len(HELLO) + 5, len(HELLO) + len(FRAME) - 1):
        with caller(inbox) as short:
            short.sendall((HELLO + FRAME)[:cut])
            serve(inbox)
        serve(inbox)
        assert not inbox._connections


def test_a_wait_ends_in_time_though_somebody_talks(inbox):
    stop = threading.Event()

    def talk():
        with caller(inbox) as talker, contextlib.suppress(OSError):
            talker.sendall(HELLO)
            while not stop.is_set():
                talker.sendall(b"\x04\x05\x04PING")

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        assert inbox.wait(0.2) is None
    finally:
        stop.set()
        inbox.close()
        thread.join()


def test_a_doorbell_to_nobody_is_lost_in_silence(tmp_path):
    bells = Doorbells(str(tmp_path))
    assert bells.notify(1, BODY) is None
    bells.notify_by_zeromq(1, BODY)
    bells.forget(1)
    bells.close()


def test_a_line_that_broke_is_made_again_at_once(tmp_path, inbox):
    bells = Doorbells(str(tmp_path))
    line = bells.notify(7, BODY)
    assert inbox.wait(PATIENCE) == BODY
    line._socket.shutdown(socket.SHUT_RDWR)
    other = bells.notify(7, b"again")
    assert other is not line
    assert (line.fd, other.fd) == (-1, other._socket.fileno())
    assert wait_for(inbox, 1) == [b"again"]
    bells.close()


@pytest.mark.parametrize("by_socket", [False, True])
def test_the_first_doorbell_does_not_wait_for_who_does_not_answer(tmp_path, inbox, by_socket):
    bells = Doorbells(str(tmp_path))
    ring = bells.notify_by_zeromq if by_socket else bells.notify
    for number in range(3):
        ring(7, bytes([number]))  # the inbox is not served meanwhile
    assert wait_for(inbox, 3) == [b"\0", b"\1", b"\2"]
    bells.close()


@pytest.mark.parametrize("left", [0, 1])
def test_who_cannot_be_accepted_is_accepted_later(inbox, left):
    lines = [zmtp.Push(inbox.path) for _ in range(3)]
    for number, line in enumerate(lines):
        line.send(bytes([number]))
    with few_files(left):
        heard = list(iter(lambda: inbox.wait(PATIENCE), None))
        assert len(heard) == left
        assert inbox._paused_until  # for 10 ms, which may be over by now
        wait_until(inbox.can_accept)
        assert inbox.wait(PATIENCE) is None  # the next in line wakes it, in vain
    wait_until(inbox.can_accept)
    assert sorted(heard + wait_for(inbox, 3 - left)) == [b"\0", b"\1", b"\2"]
    for line in lines:
        line.close()


class FailingPoll:
    """An epoll that cannot take one more descriptor, once."""

    def __init__(self, poll):
        self._poll, self.left = poll, 1

    def register(self, *args):
        if self.left:
            self.left -= 1
            raise OSError(errno.ENOSPC, "max_user_watches")
        self._poll.register(*args)

    def __getattr__(self, name):
        return getattr(self._poll, name)


def test_a_caller_that_cannot_be_watched_calls_again(tmp_path, inbox):
    inbox._poll = FailingPoll(inbox._poll)
    bells = Doorbells(str(tmp_path))
    line = bells.notify(7, b"lost")
    assert inbox.wait(PATIENCE) is None
    assert not inbox._connections
    wait_until(inbox.can_accept)
    assert bells.notify(7, BODY) is not line
    assert wait_for(inbox, 1) == [BODY]
    bells.close()


def test_no_descriptor_for_a_line_is_one_error(inbox):
    with few_files(0), pytest.raises(OSError):
        zmtp.Push(inbox.path)
    gc.collect()  # what complains about half a line that goes is an error


def test_tasks_do_not_say_that_they_sleep_while_nobody_can_ring(channel):
    async def go():
        with shmtensor.Subscriber(channel) as sub:
            wait_queue = wait_queue_of(sub)
            line = zmtp.Push(sub._inbox.path)
            with few_files(0):
                assert wait_queue._fall_asleep(lambda: False)
                assert not sub._control_words[sub._asleep] & 1
            line.close()

    asyncio.run(go())


@only("compiled", "the reference notifies in Python")
def test_the_compiled_sender_rings_by_itself_once_it_has_a_line(channel):
    with shmtensor.Publisher(channel) as pub, shmtensor.Subscriber(channel, spin=0) as sub:
        received = []

        def receive():
            for _ in range(30):
                received.append(int(sub.recv(timeout=PATIENCE).value[0]))

        thread = threading.Thread(target=receive, daemon=True)
        thread.start()
        slept = set()
        for number in range(30):
            wait_until(lambda: pub._control_words[sub._asleep] & 1 and pub._control_words[sub._asleep] not in slept)
            slept.add(pub._control_words[sub._asleep])
            pub.send(torch.tensor([number]))
        thread.join()
        assert received == list(range(30))
        (peer,) = pub._recipients.listeners
        assert peer.connection.fd >= 0
        assert pub._writer.notified >= 10
        assert pub.statistics().doorbells >= 30


@only("compiled", "the reference notifies in Python")
def test_a_line_that_broke_under_the_compiled_sender_is_made_again(channel):
    with shmtensor.Publisher(channel) as pub, shmtensor.Subscriber(channel, spin=0) as sub:

        def exchange(number):
            thread = threading.Thread(target=lambda: received.append(int(sub.recv(timeout=PATIENCE).value[0])))
            thread.start()
            wait_until(lambda: pub._control_words[sub._asleep] & 1)
            pub.send(torch.tensor([number]))
            thread.join()

        received = []
        for number in range(5):
            exchange(number)
        (peer,) = pub._recipients.listeners
        broken = peer.connection
        broken._socket.shutdown(socket.SHUT_RDWR)
        for number in range(5, 10):
            exchange(number)
        assert received == list(range(10))
        assert broken.fd == -1
        assert peer.connection is not broken


def _send(channel, pipe):
    import numpy as np

    from shmtensor.channel import wakeup

    with shmtensor.Publisher(channel) as pub:
        pub.wait_for_subscribers(1, timeout=PATIENCE)
        (peer,) = pub._recipients.listeners
        wait_until(lambda: pub._control_words[peer.asleep] & 1)
        for number in range(20):
            pub.send(np.array([number]))
        pipe.send((wakeup._context is None, pub.statistics().doorbells))
        pipe.recv()


def test_a_process_that_only_sends_has_no_thread_of_zeromq(channel):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send, args=(channel, theirs))
    with shmtensor.Subscriber(channel, spin=0) as sub:
        process.start()
        theirs.close()
        assert [int(sub.recv(timeout=PATIENCE).value[0]) for _ in range(20)] == list(range(20))
        without_thread, doorbells = ours.recv()
        assert without_thread
        assert doorbells
        ours.send("go")
        process.join(PATIENCE)
        assert process.exitcode == 0
    ours.close()


def test_a_forked_child_lets_go_of_lines_without_a_warning(channel):
    program = f"""
import gc, os, threading, torch, shmtensor
pub, sub = shmtensor.Publisher("{channel}"), shmtensor.Subscriber("{channel}", spin=0)
thread = threading.Thread(target=lambda: [sub.recv(timeout={PATIENCE}) for _ in range(3)])
thread.start()
for number in range(3):
    while not pub._control_words[sub._asleep] & 1 and thread.is_alive():
        os.sched_yield()
    pub.send(torch.tensor([number]))
thread.join()
child = os.fork()
if not child:
    del pub
    gc.collect()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
pub.close()
sub.close()
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=400)
    assert (done.returncode, complaints(done.stderr)) == (0, "")
