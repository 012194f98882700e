"""Producer and Consumer: exactly one consumer per message, acknowledgement, redelivery, poison."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

import shmtensor
from shmtensor import Consumer, Producer

from ..waiting import PATIENCE

PROLOGUE = "import sys, os, numpy as np, shmtensor\nrx = shmtensor.Consumer(sys.argv[1])\n"


def child(channel: str, body: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROLOGUE + body, channel], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    return process


def end(process: subprocess.Popen[str], code: int = 0) -> None:
    process.communicate(timeout=PATIENCE)
    assert process.returncode == code


def test_messages_wait_for_a_consumer(channel):
    with Producer(channel) as tx:
        for number in range(10):
            tx.send(np.array(number))
        with Consumer(channel) as rx:
            assert [int(rx.recv(timeout=PATIENCE).value) for _ in range(10)] == list(range(10))


def test_values_are_writable(channel):
    with Producer(channel) as tx, Consumer(channel) as rx:
        tx.send(np.zeros(3))
        msg = rx.recv(timeout=PATIENCE)
        msg.value[1] = 5
        assert msg.value.tolist() == [0, 5, 0]


@pytest.mark.filterwarnings("ignore:.*Sparse CSR tensor support is in beta.*:UserWarning")
def test_what_a_consumer_would_not_make_is_refused_by_send(channel):
    """It would be passed over, and be lost."""
    broken = torch.sparse_csr_tensor(
        torch.tensor([0, 1]), torch.tensor([5]), torch.ones(1), (1, 2), check_invariants=False
    )
    unsorted = torch.sparse_csr_tensor(
        torch.tensor([0, 2]), torch.tensor([1, 0]), torch.tensor([1.0, 2.0]), (1, 2), check_invariants=False
    )
    with Producer(channel) as tx, Consumer(channel) as rx:
        with pytest.raises(shmtensor.ArgumentError, match=r'value\["x"\]: .*not valid'):
            tx.send({"x": broken})
        tx.send({"x": unsorted})
        assert rx.recv(timeout=PATIENCE).value["x"].to_dense().tolist() == [[2, 1]]
        assert rx.statistics().bad_records == 0


def test_order_of_one_consumer_and_many_producers(channel):
    with Consumer(channel) as rx, Producer(channel) as one, Producer(channel) as two:
        for number in range(8):
            one.send(np.array(number))
            two.send(np.array(100 + number))
        got = [int(rx.recv(timeout=PATIENCE).value) for _ in range(16)]
        assert [n for n in got if n < 100] == list(range(8))
        assert [n for n in got if n >= 100] == list(range(100, 108))


@pytest.mark.parametrize("kind", [np.array, torch.tensor], ids=["array", "tensor"])
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "dropped"])
def test_closing_acknowledges_the_message_in_hand(channel, kind, keep):
    """Also if the caller has dropped it by then: the consumer keeps it until it is done."""
    with Producer(channel, slots=2) as tx, Consumer(channel) as rx:
        for number in range(6):  # the later ones by the compiled module, if there is one
            tx.send(kind([number]))
            msg = rx.recv(timeout=PATIENCE)
            assert msg.value.tolist() == [number]
        if not keep:
            del msg
        rx.close()
        with Consumer(channel) as other, pytest.raises(shmtensor.TimedOut):
            other.recv(timeout=0.6)


def test_leaving_a_consumer_by_an_exception_acknowledges_nothing(channel):
    with Producer(channel) as tx:
        tx.send(np.array(3))
        with pytest.raises(KeyError), Consumer(channel) as rx:
            rx.recv(timeout=PATIENCE)
            raise KeyError
        with Consumer(channel) as rx:
            msg = rx.recv(timeout=PATIENCE)
            assert (int(msg.value), msg.attempt) == (3, 2)


def test_an_unhandled_exception_gives_the_message_to_another(channel):
    with Producer(channel) as tx:
        process = child(channel, "import logging\ndef f():\n for m in rx: os.close(2); raise KeyError\nf()")
        tx.wait_for_consumers(1, timeout=PATIENCE)
        tx.send(np.array(3))
        end(process, 1)
        with Consumer(channel) as rx:
            msg = rx.recv(timeout=PATIENCE)
            assert (int(msg.value), msg.attempt) == (3, 2)


@pytest.mark.slow
@pytest.mark.parametrize("pair", [(shmtensor.Publisher, shmtensor.Subscriber), (Producer, Consumer)])
def test_threads_that_share_a_receiver_get_copies_of_their_own(channel, pair):
    """A copy is made before it is known whose the message is: nobody's value changes under it."""
    count = 400
    with pair[0](channel, slots=8) as tx, pair[1](channel) as rx:
        wrong, got = [], []

        def receive():
            try:
                for message in iter(lambda: rx.recv(timeout=PATIENCE, copy=True), None):
                    value = message.value
                    number = int(value[0])
                    got.append(number)
                    value.fill(-1 - number)
                    for _ in range(20):
                        if message.value is not value or int(message.value[-1]) != -1 - number:
                            wrong.append(number)
                    message.release()
            except shmtensor.EndOfStream:
                pass
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=receive) for _ in range(4)]
        for thread in threads:
            thread.start()
        for number in range(count):
            tx.send(np.full(20_000, number), timeout=PATIENCE)
        tx.close(linger=PATIENCE)
        for thread in threads:
            thread.join(PATIENCE)
        assert wrong == []
        assert sorted(got) == list(range(count))
