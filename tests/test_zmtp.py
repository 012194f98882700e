"""The sender's own end of a ZeroMQ connection, against real `zmq.PULL` sockets and against what is none."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import subprocess
import sys
import threading

import pytest
import torch
import zmq

import shmtensor
from shmtensor import hot
from shmtensor.channel import zmtp
from shmtensor.channel.doorbells import Doorbells
from shmtensor.errors import WireError

from .waiting import PATIENCE, wait_until

BODY = bytes(range(256)) + bytes(16)


@pytest.fixture
def pull(tmp_path):
    """A bound PULL socket and its path."""
    context = zmq.Context()
    inbox = context.socket(zmq.PULL)
    inbox.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1000))
    path = str(tmp_path / "inbox")
    inbox.bind(f"ipc://{path}")
    yield inbox, path
    context.destroy(linger=0)


@contextlib.contextmanager
def listener(tmp_path, says: bytes):
    """Something else that listens: it says so much, and nothing more."""
    with socket.socket(socket.AF_UNIX) as ours:
        path = str(tmp_path / "other")
        ours.bind(path)
        ours.listen()
        push = zmtp.Push(path)
        theirs, _ = ours.accept()
        with theirs:
            theirs.sendall(says)
            yield push, theirs
            push.close()


def test_messages_arrive_whole_and_in_order(pull):
    inbox, path = pull
    push = zmtp.Push(path)
    bodies = [BODY, b"", b"x" * 255, b"y" * 4096] + [bytes([count]) * count for count in range(100)]
    for body in bodies:
        assert push.send(body, PATIENCE)
        assert inbox.recv() == body
    push.close()


def test_what_was_sent_arrives_after_the_sender_has_closed(pull):
    inbox, path = pull
    push = zmtp.Push(path)
    for _ in range(3):
        assert push.send(BODY, PATIENCE)
    push.close()
    push.close()
    assert [inbox.recv() for _ in range(3)] == [BODY] * 3


def test_a_full_inbox_refuses_and_never_cuts_a_message(tmp_path):
    context = zmq.Context()
    inbox = context.socket(zmq.PULL)
    inbox.setsockopt(zmq.RCVHWM, 10)
    inbox.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1000))
    path = str(tmp_path / "inbox")
    inbox.bind(f"ipc://{path}")
    push = zmtp.Push(path)
    sent = 0
    while push.send(BODY, PATIENCE):
        sent += 1
    assert sent >= 10
    assert [inbox.recv() for _ in range(sent)] == [BODY] * sent
    assert push.send(b"another", PATIENCE)
    assert inbox.recv() == b"another"
    push.close()
    context.destroy(linger=0)


def test_nobody_listens(tmp_path, pull):
    with pytest.raises(FileNotFoundError):
        zmtp.Push(str(tmp_path / "nobody"))
    inbox, path = pull
    push = zmtp.Push(path)
    assert push.send(BODY, PATIENCE)
    inbox.close()
    with pytest.raises(OSError):  # ZeroMQ's thread closes the connection some time later
        wait_until(lambda: not push.send(BODY, PATIENCE))
    push.close()


def test_a_socket_that_wants_authentication_is_refused(tmp_path):
    context = zmq.Context()
    inbox = context.socket(zmq.PULL)
    inbox.setsockopt(zmq.PLAIN_SERVER, 1)
    path = str(tmp_path / "inbox")
    inbox.bind(f"ipc://{path}")
    push = zmtp.Push(path)
    with pytest.raises((WireError, ConnectionResetError)):
        push.send(BODY, PATIENCE)
    push.close()
    context.destroy(linger=0)


@pytest.mark.parametrize(
    ("says", "error"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no ZMTP 3 greeting"),
        (b"\xff" + bytes(8) + b"\x7f\x01", "no ZMTP 3 greeting"),
        (zmtp._GREETING.replace(b"NULL", b"EVIL") + zmtp._HELLO[64:], "without security"),
        (zmtp._GREETING + b"\x00\x05hello", "without security"),
        (zmtp._GREETING + b"\x04\x06\x05ERROR", "not ready"),
    ],
)
def test_another_protocol_is_refused(tmp_path, says, error):
    with listener(tmp_path, says) as (push, _), pytest.raises(WireError, match=error):
        push.send(BODY, PATIENCE)


def test_a_greeting_in_pieces_is_waited_for_again(tmp_path):
    hello = zmtp._GREETING + b"\x04\x06\x05READY"
    with listener(tmp_path, b"") as (push, theirs):
        for at in range(len(hello)):
            assert not push.send(BODY, 0.001)
            assert push.fd == -1
            theirs.sendall(hello[at : at + 1])
        assert push.send(BODY, PATIENCE)
        assert push.fd >= 0
        wanted = zmtp._HELLO + zmtp.frame_head(len(BODY)) + BODY
        heard = b""
        while len(heard) < len(wanted):
            heard += theirs.recv(4096)
        assert heard == wanted


def test_the_other_side_hangs_up(tmp_path):
    with listener(tmp_path, zmtp._GREETING[:20]) as (push, theirs):
        theirs.shutdown(socket.SHUT_RDWR)
        with pytest.raises(ConnectionResetError):
            push.send(BODY, PATIENCE)


def test_a_doorbell_to_nobody_is_lost_in_silence(tmp_path):
    bells = Doorbells(str(tmp_path))
    assert bells.ring(1, BODY) is None
    bells.forget(1)
    bells.close()


@pytest.mark.skipif(not hot.BUILT, reason="needs the compiled module")
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
        (peer,) = pub._listeners
        assert peer.line.fd >= 0
        assert pub._outbox.doorbells >= 10
        assert pub.statistics().doorbells >= 30


@pytest.mark.skipif(not hot.BUILT, reason="needs the compiled module")
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
        (peer,) = pub._listeners
        broken = peer.line
        broken._socket.shutdown(socket.SHUT_RDWR)
        for number in range(5, 10):
            exchange(number)
        assert received == list(range(10))
        assert broken.fd == -1
        assert peer.line is not broken


def _send(channel, pipe):
    import numpy as np

    from shmtensor.channel import inbox

    with shmtensor.Publisher(channel) as pub:
        pub.wait_for_subscribers(1, timeout=PATIENCE)
        (peer,) = pub._listeners
        wait_until(lambda: pub._control_words[peer.asleep] & 1)
        for number in range(20):
            pub.send(np.array([number]))
        pipe.send((inbox._context is None, pub.statistics().doorbells))
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
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
