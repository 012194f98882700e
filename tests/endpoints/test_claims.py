"""Receivers that share messages: a work queue's consumers, and the members of a group of subscribers.

Each message goes to one of them, is done when it is acknowledged, and goes to another if its receiver dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

import shmtensor
from shmtensor import native
from shmtensor.endpoints.base import lingering

from ..implementations import only
from ..scenes import unswept
from ..waiting import PATIENCE, stop, wait_until


class Kind:
    """What makes senders and receivers, here and in other processes."""

    def __init__(self, sender: str, receiver: str, waits: str, **options: str) -> None:
        self._sender, self._receiver, self._waits, self._options = sender, receiver, waits, options

    def sender(self, channel: str, **options: Any) -> Any:
        return getattr(shmtensor, self._sender)(channel, **options)

    def receiver(self, channel: str, **options: Any) -> Any:
        return getattr(shmtensor, self._receiver)(channel, **self._options, **options)

    def wait_for(self, sender: Any, count: int) -> None:
        getattr(sender, self._waits)(count, timeout=PATIENCE)

    def child(self, channel: str, body: str) -> subprocess.Popen[str]:
        """A process with a receiver `rx`."""
        made = f"rx = shmtensor.{self._receiver}(sys.argv[1], **{self._options})"
        return subprocess.Popen(
            [sys.executable, "-c", f"import sys, os, numpy as np, shmtensor\n{made}\n{body}", channel],
            stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True,
        )  # fmt: skip


KINDS = {
    "queue": Kind("Producer", "Consumer", "wait_for_consumers"),
    "group": Kind("Publisher", "Subscriber", "wait_for_subscribers", group="them"),
}


@pytest.fixture(params=list(KINDS))
def kind(request):
    return KINDS[request.param]


def end(process: subprocess.Popen[str], code: int = 0) -> None:
    process.communicate(timeout=PATIENCE)
    assert process.returncode == code


def test_each_message_goes_to_exactly_one_receiver(kind, channel):
    with kind.sender(channel, slots=64) as tx, kind.receiver(channel) as one, kind.receiver(channel) as two:
        for number in range(50):
            tx.send(np.array(number))
        got = []
        for rx in (one, two) * 25:
            got.append(int(rx.recv(timeout=PATIENCE).value))
        assert sorted(got) == list(range(50))
        for rx in (one, two):
            with pytest.raises(shmtensor.TimedOut):
                rx.recv(timeout=0)


def test_slots_come_back_and_views_keep_theirs(kind, channel):
    with kind.sender(channel, slots=3) as tx, kind.receiver(channel) as rx:
        kept = []
        for number in range(40):
            tx.send(np.full(4, number), timeout=PATIENCE)
            msg = rx.recv(timeout=PATIENCE)
            if number in (5, 17):
                kept.append(msg.value)
            msg.release()
        assert [int(value[0]) for value in kept] == [5, 17]


def test_asking_for_the_next_acknowledges_the_one_before(kind, channel):
    """A consumer that dies gives back only what it had not asked past."""
    with kind.sender(channel) as tx, kind.receiver(channel) as rx:
        process = kind.child(channel, "rx.recv(); rx.recv(); m = rx.recv(); print('got', flush=True); sys.stdin.read()")
        kind.wait_for(tx, 2)
        for number in range(4):
            tx.send(np.array(number))
        assert process.stdout.readline() == "got\n"
        process.kill()
        end(process, -9)
        got = [(int(msg.value), msg.attempt) for msg in (rx.recv(timeout=PATIENCE) for _ in range(2))]
        assert sorted(got) == [(2, 2), (3, 1)]


def test_release_acknowledges_and_with_rejects_on_an_exception(kind, channel):
    with kind.sender(channel) as tx, kind.receiver(channel, acknowledge="release") as rx:
        for number in range(3):
            tx.send(np.array(number))
        rx.recv(timeout=PATIENCE).release()
        with pytest.raises(KeyError), rx.recv(timeout=PATIENCE) as msg:
            assert int(msg.value) == 1
            raise KeyError
        del msg
        assert int(rx.recv(timeout=PATIENCE).value) == 2  # dropped unacknowledged: comes again as well
        again = [rx.recv(timeout=PATIENCE) for _ in range(2)]
        assert sorted((int(msg.value), msg.attempt) for msg in again) == [(1, 2), (2, 2)]
        for msg in again:
            msg.release()
        assert rx.statistics().redelivered == 2


@pytest.mark.parametrize("keeper", ["itself", "another"])
def test_what_is_given_back_comes_oldest_first_behind_many_that_are_kept(kind, channel, keeper):
    count, kept = 300, 150
    with (
        kind.sender(channel, slots=count) as tx,
        kind.receiver(channel, acknowledge="release") as one,
        kind.receiver(channel, acknowledge="release") as two,
    ):
        for number in range(count):
            tx.send(np.array(number))
        held = [one.recv(timeout=PATIENCE) for _ in range(count)]
        rx = one if keeper == "itself" else two
        while len(held) > kept:
            held.pop()
        again = [rx.recv(timeout=PATIENCE) for _ in range(count - kept)]
        assert [(int(message.value), message.attempt) for message in again] == [(it, 2) for it in range(kept, count)]
        for message in (*held, *again):
            message.release()


def test_a_rejected_message_is_not_delivered_again_while_a_view_of_it_lives(kind, channel):
    with kind.sender(channel) as tx, kind.receiver(channel) as one, kind.receiver(channel) as two:
        tx.send(np.array([7]))
        with pytest.raises(KeyError), one.recv(timeout=PATIENCE) as msg:
            view = msg.value
            raise KeyError
        with pytest.raises(shmtensor.TimedOut):
            two.recv(timeout=0.6)
        del view
        again = two.recv(timeout=PATIENCE)
        assert (again.value.tolist(), again.attempt) == ([7], 2)


def test_poison_is_dropped_after_max_attempts(kind, channel, caplog):
    with kind.sender(channel) as tx, kind.receiver(channel, max_attempts=2, acknowledge="release") as rx:
        tx.send(np.array(666))
        tx.send(np.array(1))
        got = []
        for _ in range(3):
            msg = rx.recv(timeout=PATIENCE)
            got.append((int(msg.value), msg.attempt))
            if msg.value == 1:
                msg.release()
            del msg
        assert sorted(got) == [(1, 1), (666, 1), (666, 2)]
        with pytest.raises(shmtensor.TimedOut):
            rx.recv(timeout=0.6)
        assert rx.statistics().abandoned == 1
        assert "dropped after 2 attempts" in caplog.text


def test_a_view_of_a_done_message_keeps_its_bytes(kind, channel):
    with kind.sender(channel, slots=3) as tx, kind.receiver(channel) as rx:
        tx.send(np.arange(4))
        kept = rx.recv(timeout=PATIENCE).value
        for number in range(20):
            tx.send(np.full(4, -number), timeout=PATIENCE)
            rx.recv(timeout=PATIENCE)
        assert kept.tolist() == [0, 1, 2, 3]


def test_copy_keeps_the_claim(kind, channel):
    with kind.sender(channel) as tx, kind.receiver(channel) as one, kind.receiver(channel) as two:
        tx.send(np.arange(3))
        value = one.recv(timeout=PATIENCE, copy=True).value
        with pytest.raises(shmtensor.TimedOut):
            two.recv(timeout=0.6)
        value[0] = 9
        assert value.tolist() == [9, 1, 2]


def test_iteration_ends_when_all_is_done(kind, channel):
    with kind.receiver(channel) as rx:
        with kind.sender(channel) as tx:
            for number in range(5):
                tx.send(np.array(number))
        assert [int(msg.value) for msg in rx] == list(range(5))
        with pytest.raises(shmtensor.EndOfStream):
            rx.recv()


def test_the_end_waits_for_what_others_have_not_finished(kind, channel):
    """B has nothing left to claim, but A holds the last message: when A dies, B gets it."""
    tx = kind.sender(channel)
    process = kind.child(channel, "m = rx.recv(); print('got', flush=True); sys.stdin.read()")
    kind.wait_for(tx, 1)
    tx.send(np.array(1))
    assert process.stdout.readline() == "got\n"
    with kind.receiver(channel) as rx:
        tx.close()
        with pytest.raises(shmtensor.TimedOut):
            rx.recv(timeout=0.3)
        process.kill()
        end(process, -9)
        msg = rx.recv(timeout=PATIENCE)
        assert (int(msg.value), msg.attempt) == (1, 2)
        with pytest.raises(shmtensor.EndOfStream):
            rx.recv(timeout=PATIENCE)


@pytest.mark.filterwarnings("ignore:.*that no consumer has finished:ResourceWarning")  # on purpose
def test_a_stopped_receiver_is_not_dead(kind, channel):
    with kind.sender(channel) as tx, kind.receiver(channel) as rx:
        process = kind.child(
            channel, "m = rx.recv(); print('got', flush=True); sys.stdin.readline(); print(m.attempt, flush=True)"
        )
        kind.wait_for(tx, 2)
        tx.send(np.array(1))
        rung = None
        try:
            rung = rx.recv(timeout=1)  # one of the two has it
            rung.release()
            tx.send(np.array(1))
        except shmtensor.TimedOut:
            pass
        while True:
            try:
                rx.recv(timeout=0.6).release()
                tx.send(np.array(1))
            except shmtensor.TimedOut:
                break
        assert process.stdout.readline() == "got\n"
        os.kill(process.pid, signal.SIGSTOP)
        for number in range(30):
            tx.send(np.array(number))
            assert int(rx.recv(timeout=PATIENCE).value) == number
        with pytest.raises(shmtensor.TimedOut):
            rx.recv(timeout=0.6)
        os.kill(process.pid, signal.SIGCONT)
        out, _ = process.communicate("\n", timeout=PATIENCE)
        assert out == "1\n"


def test_a_receiver_that_is_never_idle_notices_that_another_died_asleep(kind, channel):
    """Else it would look as if it slept for ever, and each message be taken as if there were somebody to wake."""
    with kind.sender(channel) as tx, kind.receiver(channel) as rx:
        process = kind.child(channel, "rx.recv()")
        kind.wait_for(tx, 2)
        with pytest.raises(shmtensor.TimedOut):
            rx.recv(timeout=0)
        (sibling,) = rx._claims.siblings.values()
        words = rx._control_words
        while True:
            wait_until(lambda: words[sibling.asleep] & 1)
            stop(process.pid)
            if words[sibling.asleep] & 1:  # it was not awake for a look at who lives
                break
            os.kill(process.pid, signal.SIGCONT)
        process.kill()
        end(process, -9)

        def receive():
            tx.send(np.array(1))
            rx.recv(timeout=PATIENCE).release()

        wait_until(lambda: receive() or not rx._claims.siblings)


@pytest.mark.filterwarnings("ignore:.*that no consumer has finished:ResourceWarning")  # on purpose
def test_a_sender_is_woken_by_the_death_of_the_receiver_that_holds_it_up(kind, channel):
    with kind.sender(channel, slots=1) as tx:
        process = kind.child(
            channel, "m = rx.recv(); v = m.value; m.release(); print('got', flush=True); sys.stdin.read()"
        )
        kind.wait_for(tx, 1)
        tx.send(np.array(1))
        assert process.stdout.readline() == "got\n"
        thread = threading.Thread(target=tx.send, args=(np.array(2),), kwargs={"timeout": PATIENCE})
        thread.start()
        wait_until(lambda: tx.statistics().waits)
        with unswept(channel):  # whoever sweeps notices the death as well
            process.kill()
            end(process, -9)
            thread.join(PATIENCE)
        assert not thread.is_alive()
        assert tx.statistics().sent == 2
        if not tx.statistics().dead_receivers:  # of the locks of the dead, that on the message has gone first
            kind.wait_for(tx, 0)
        assert tx.statistics().dead_receivers == 1


def test_linger_waits_until_everything_is_done(kind, channel):
    tx, rx = kind.sender(channel), kind.receiver(channel)
    tx.send(np.array(1))
    msg = rx.recv(timeout=PATIENCE)
    thread = threading.Thread(target=tx.close, kwargs={"linger": PATIENCE})
    thread.start()
    assert thread.is_alive()
    msg.release()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    rx.close()


@pytest.mark.slow
def test_many_to_many_with_kills(kind, channel):
    """Every message is received at least once, whatever consumers are killed; the unmarked ones exactly once."""
    count, ended, sent = 600, threading.Event(), []
    body = (
        "for m in rx:\n"
        "    sys.stdout.write(f'{int(m.value[0])} {m.attempt}\\n'); sys.stdout.flush()\n"
        "    assert (m.value == m.value[0]).all()\n"
    )
    consumers = [kind.child(channel, body) for _ in range(3)]
    senders = [kind.sender(channel, slots=8) for _ in range(2)]
    kind.wait_for(senders[0], 3)

    def produce(tx, start):
        """`count` messages, and more while one that is to be killed may not have had its share."""
        for number in itertools.count(start, len(senders)):
            if number >= count * len(senders) and ended.wait(1e-3):
                return
            tx.send(np.full(100, number), timeout=PATIENCE)
            sent.append(number)

    threads = [threading.Thread(target=produce, args=(tx, index)) for index, tx in enumerate(senders)]
    for thread in threads:
        thread.start()
    killed = []
    for _ in range(3):
        victim = consumers.pop(0)
        for _ in range(20):
            killed.append(victim.stdout.readline())
        victim.kill()
        killed += victim.stdout.read().splitlines()
        end(victim, -9)
        consumers.append(kind.child(channel, body))
        with kind.sender(channel) as watching:
            kind.wait_for(watching, 3)  # a group without a member ends
    ended.set()
    for thread in threads:
        thread.join(PATIENCE)
    # one that joins after the last sender has left would wait for another
    kind.wait_for(senders[0], 3)
    for tx in senders:
        tx.close()
    lines = [line for process in consumers for line in process.communicate(timeout=PATIENCE)[0].splitlines()]
    for thread in threads:
        thread.join(PATIENCE)
    got = [tuple(map(int, line.split())) for line in (*killed, *lines) if len(line.split()) == 2]
    assert {number for number, _ in got} == set(sent)
    first = [number for number, attempt in got if attempt == 1]
    assert len(first) == len(set(first))


def test_a_message_that_the_caller_never_got_is_not_acknowledged(kind, channel, monkeypatch):
    from shmtensor.endpoints import message

    with kind.sender(channel) as tx, kind.receiver(channel) as rx:
        tx.send(np.array(1))

        def fail(value):
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(message, "copy_value", fail)
            with pytest.raises(MemoryError):
                rx.recv(timeout=PATIENCE, copy=True)
        again = rx.recv(timeout=PATIENCE)
        assert (int(again.value), again.attempt) == (1, 1)  # it was never out of this consumer's hands


def test_a_stream_until_closed_does_not_end_while_a_message_is_held(kind, channel):
    with kind.receiver(channel, until="closed", acknowledge="release") as rx:
        with kind.sender(channel) as tx:
            tx.send(np.array(1))
            message = rx.recv(timeout=PATIENCE)
        with pytest.raises(shmtensor.TimedOut):
            rx.recv(timeout=0)
        message.release()


def test_the_end_of_the_stream_is_not_final_while_something_may_come_back(kind, channel):
    """The last message is rejected while a view lives: an end for now; once the view is gone it comes again."""
    with kind.receiver(channel) as rx:
        with kind.sender(channel) as tx:
            tx.send(np.array([5]))
        with pytest.raises(KeyError), rx.recv(timeout=PATIENCE) as msg:
            view = msg.value
            raise KeyError
        del msg
        with pytest.raises(shmtensor.EndOfStream):
            rx.recv(timeout=PATIENCE)
        del view
        again = rx.recv(timeout=PATIENCE)
        assert (again.value.tolist(), again.attempt) == ([5], 2)
        again.release()
        with pytest.raises(shmtensor.EndOfStream):
            rx.recv(timeout=PATIENCE)


def test_threads_that_share_a_receiver_have_their_own_message_in_hand(kind, channel):
    """One thread's `recv` says nothing about what another one works on."""
    with kind.sender(channel) as tx, kind.receiver(channel) as rx, kind.receiver(channel) as other:
        for number in range(3):
            tx.send(np.array(number))
        holds, release = threading.Event(), threading.Event()
        got = []

        def hold_one():
            got.append(int(rx.recv(timeout=PATIENCE).value))  # dropped, but in hand: not done, and not given away
            holds.set()
            release.wait(PATIENCE)

        thread = threading.Thread(target=hold_one)
        thread.start()
        assert holds.wait(PATIENCE)
        for _ in range(2):
            got.append(int(rx.recv(timeout=PATIENCE).value))
        with pytest.raises(shmtensor.TimedOut):
            rx.recv(timeout=0)  # both of ours are done
        assert got == [0, 1, 2]
        assert rx.statistics().leases == 1
        release.set()
        thread.join(PATIENCE)  # it ends, and had not said that its message was done
        with other.recv(timeout=PATIENCE) as message:
            assert (int(message.value), message.attempt) == (0, 2)


def test_a_coroutine_that_no_task_runs(kind, channel):
    """What receives so is the thread: its next message says that this one is done. Tasks go on as before."""
    with kind.sender(channel) as tx, kind.receiver(channel) as rx:
        for number in range(4):
            tx.send(np.array(number))

        def received_by_hand():
            receiving = rx.arecv(timeout=PATIENCE)
            with pytest.raises(StopIteration) as stopped:
                while True:
                    receiving.send(None)
            return int(stopped.value.value.value)

        async def main():
            received = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(lambda: received.set_result(received_by_hand()))
            got = [await received]
            got += [int((await rx.arecv(timeout=PATIENCE)).value) for _ in range(2)]
            return got

        assert asyncio.run(main()) == [0, 1, 2]
        assert received_by_hand() == 3  # in no loop
        with pytest.raises(shmtensor.TimedOut):
            rx.recv(timeout=0)  # the thread's are done; the task has ended, and so are its
        gc.collect()
        assert rx.statistics().leases <= 1


def test_a_message_that_another_thread_releases(kind, channel):
    with kind.sender(channel) as tx, kind.receiver(channel) as rx:
        tx.send(np.array(1))
        received = []
        thread = threading.Thread(target=lambda: received.append(rx.recv(timeout=PATIENCE)))
        thread.start()
        thread.join(PATIENCE)
        message = received.pop()
        message.release()
        assert rx.statistics().leases == 0
        tx.send(np.array(2))
        with rx.recv(timeout=PATIENCE) as message:
            assert int(message.value) == 2


def test_close_says_that_the_closing_thread_s_message_is_done_and_no_other(kind, channel):
    with kind.sender(channel) as tx, kind.receiver(channel) as other:
        rx = kind.receiver(channel)
        for number in range(2):
            tx.send(np.array(number))
        holds, release = threading.Event(), threading.Event()

        def hold_one():
            rx.recv(timeout=PATIENCE)
            holds.set()
            release.wait(PATIENCE)

        thread = threading.Thread(target=hold_one)
        thread.start()
        assert holds.wait(PATIENCE)
        assert int(rx.recv(timeout=PATIENCE).value) == 1
        rx.close()
        with other.recv(timeout=PATIENCE) as message:
            assert (int(message.value), message.attempt) == (0, 2)
        with pytest.raises(shmtensor.TimedOut):
            other.recv(timeout=0)
        release.set()
        thread.join(PATIENCE)


def test_tasks_that_share_a_receiver_have_their_own_message_in_hand(kind, channel):
    async def main():
        with kind.sender(channel) as tx, kind.receiver(channel) as rx:
            for number in range(3):
                tx.send(np.array(number))
            holds, release = asyncio.Event(), asyncio.Event()

            async def hold_one():
                with await rx.arecv(timeout=PATIENCE) as message:
                    holds.set()
                    await release.wait()
                    return int(message.value), message.attempt

            task = asyncio.create_task(hold_one())
            await holds.wait()
            assert int((await rx.arecv(timeout=PATIENCE)).value) == 1
            assert int((await rx.arecv(timeout=PATIENCE)).value) == 2
            with pytest.raises(shmtensor.TimedOut):
                await rx.arecv(timeout=0)
            assert rx.statistics().leases == 1
            release.set()
            assert await task == (0, 1)
            assert rx.statistics().leases == 0

    asyncio.run(main())


@pytest.mark.parametrize("how", ["a task", "wait_for", "anext", "a thread"])
def test_a_message_belongs_to_who_called_and_not_to_the_task_that_ran_the_call(kind, channel, how):
    """`asyncio.wait_for` makes a task up to Python 3.11. Others' calls say nothing about its message."""

    async def main():
        with kind.sender(channel) as tx, kind.receiver(channel) as other:
            rx = kind.receiver(channel)
            for number in range(3):
                tx.send(np.array(number))
            loop, holds, release = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

            def receive_in_a_thread():
                receiving = asyncio.run_coroutine_threadsafe(rx.arecv(timeout=PATIENCE), loop)
                assert int(receiving.result(PATIENCE).value) == 0
                del receiving
                loop.call_soon_threadsafe(holds.set)
                release.wait(PATIENCE)

            async def hold_one():
                if how == "a task":
                    message = await asyncio.create_task(rx.arecv(timeout=PATIENCE))
                elif how == "anext":
                    message = await asyncio.ensure_future(rx.__anext__())
                else:
                    message = await asyncio.wait_for(rx.arecv(), PATIENCE)
                assert int(message.value) == 0
                del message
                holds.set()
                await asyncio.to_thread(release.wait, PATIENCE)

            holding = asyncio.create_task(hold_one() if how != "a thread" else asyncio.to_thread(receive_in_a_thread))
            await asyncio.wait_for(holds.wait(), PATIENCE)
            for number in (1, 2):
                assert int((await rx.arecv(timeout=PATIENCE)).value) == number
            await rx.aclose()
            with other.recv(timeout=PATIENCE) as message:
                assert (int(message.value), message.attempt) == (0, 2)
            with pytest.raises(shmtensor.TimedOut):
                other.recv(timeout=0)  # the other task's are done
            release.set()
            await holding

    asyncio.run(main())


def test_a_task_that_receives_several_at_once_has_them_all_in_hand(kind, channel):
    async def main():
        with kind.sender(channel) as tx, kind.receiver(channel) as rx:
            for number in range(7):
                tx.send(np.array(number))
            for start in (0, 3):
                got = await asyncio.gather(*(rx.arecv(timeout=PATIENCE) for _ in range(3)))
                assert [(int(message.value), message.attempt) for message in got] == [
                    (start + each, 1) for each in range(3)
                ]
                assert rx.statistics().leases == 3  # what is in hand is not given back with the last reference
                got.pop(1).release()
                del got[:]
                assert rx.statistics().leases == 2
            assert int((await rx.arecv(timeout=PATIENCE)).value) == 6
            with pytest.raises(shmtensor.TimedOut):
                await rx.arecv(timeout=0)
            await asyncio.sleep(0)  # the loop has the last tasks until here
            assert rx.statistics().leases == 0

    asyncio.run(main())


def test_a_task_that_ends_has_finished_though_the_others_only_wait(kind, channel):
    """The loop tells when it ends. Nobody has to ask for another message first."""

    async def main():
        tx, rx = kind.sender(channel), kind.receiver(channel)

        async def one():
            return int((await rx.arecv(timeout=PATIENCE)).value)

        ending, waiting = asyncio.create_task(one()), asyncio.create_task(one())
        for _ in range(5):  # turns of the loop, until both wait
            await asyncio.sleep(0)
        tx.send(np.array(1))
        assert await ending == 1
        await asyncio.wait_for(tx.aclose(linger=None), PATIENCE)
        with pytest.raises(shmtensor.EndOfStream):
            await waiting
        await rx.aclose()

    asyncio.run(main())


def test_what_ended_tasks_received_is_done_at_a_close(kind, channel):
    async def main():
        with kind.sender(channel) as tx, kind.receiver(channel) as other:
            rx = kind.receiver(channel)
            for number in range(4):
                tx.send(np.array(number))

            async def one():
                return int((await rx.arecv(timeout=PATIENCE)).value)

            assert await asyncio.gather(one(), one(), one()) == [0, 1, 2]
            assert await asyncio.create_task(one()) == 3
            rx.close()  # before the last task's callbacks have run
            with pytest.raises(shmtensor.TimedOut):
                other.recv(timeout=0)

    asyncio.run(main())


@pytest.mark.parametrize("end", ["failed", "cancelled"])
def test_a_task_that_fails_gives_its_message_back_though_somebody_keeps_it(kind, channel, end):
    """A `Task` keeps its exception, and with it the variables. Another task, which only waits, gets the message."""

    async def main():
        with kind.sender(channel) as tx, kind.receiver(channel) as rx:
            holds = asyncio.Event()

            async def fail():
                message = await rx.arecv(timeout=PATIENCE)
                assert message.attempt == 1
                holds.set()
                await asyncio.sleep(0 if end == "failed" else PATIENCE)
                raise KeyError(message)

            failing = asyncio.create_task(fail())
            await asyncio.sleep(0)
            waiting = asyncio.create_task(rx.arecv(timeout=PATIENCE))
            tx.send(np.array(5))
            await asyncio.wait_for(holds.wait(), PATIENCE)
            if end == "cancelled":
                failing.cancel()
            with await waiting as message:
                assert (int(message.value), message.attempt) == (5, 2)
            with pytest.raises(KeyError if end == "failed" else asyncio.CancelledError):
                await failing

    asyncio.run(main())


def test_what_an_ended_task_passed_on_is_done_when_nobody_refers_to_it(kind, channel):
    async def main():
        with kind.sender(channel) as tx, kind.receiver(channel) as rx:
            for number in range(2):
                tx.send(np.full(3, number))

            async def receive():
                return await rx.arecv(timeout=PATIENCE)

            with pytest.raises(KeyError), await asyncio.create_task(receive()) as message:
                await asyncio.create_task(receive())  # says nothing about the first one, which is being worked on
                raise KeyError
            again = await asyncio.create_task(receive())
            assert (again.value.tolist(), again.attempt) == ([0, 0, 0], 2)
            view = again.value
            del message, again
            await asyncio.sleep(0)  # the loop has the last task until here
            assert rx.statistics().leases == 1
            del view
            with pytest.raises(shmtensor.TimedOut):
                await rx.arecv(timeout=0.6)
            assert rx.statistics().leases == 0

    asyncio.run(main())


def test_a_task_for_each_arecv(kind, channel):
    """`asyncio.wait_for` makes one up to Python 3.11: the next `arecv` says that what it had received is done."""

    async def main():
        with kind.sender(channel) as tx, kind.receiver(channel, max_attempts=2) as rx:
            for number in range(5):
                tx.send(np.array(number))
            for number in range(5):
                message = await asyncio.create_task(rx.arecv(timeout=PATIENCE))
                assert (int(message.value), message.attempt) == (number, 1)
                del message
            with pytest.raises(shmtensor.TimedOut):
                await rx.arecv(timeout=0)
            await asyncio.sleep(0)  # the loop has the last task until here
            assert rx.statistics().leases == 0

            async def fail():
                await rx.arecv(timeout=PATIENCE)
                raise KeyError

            tx.send(np.array(5))
            with pytest.raises(KeyError):
                await asyncio.create_task(fail())
            await asyncio.sleep(0)
            gc.collect()
            with await rx.arecv(timeout=PATIENCE) as message:
                assert (int(message.value), message.attempt) == (5, 2)

    asyncio.run(main())


def test_contexts_are_entered_by_their_class(kind, channel):
    with kind.sender(channel) as tx, kind.receiver(channel) as rx:
        tx.send(np.array(1))
        with contextlib.ExitStack() as stack:
            message = stack.enter_context(rx.recv(timeout=PATIENCE))
            assert int(message.value) == 1
        with pytest.raises(shmtensor.ReleasedError):
            _ = message.value


def test_what_others_took_is_passed_by_though_its_slot_is_used_again(kind, channel):
    value = np.zeros(64)
    with kind.sender(channel, slots=8) as out, kind.receiver(channel) as one, kind.receiver(channel) as other:
        for _ in range(4):
            for into in (one, other):
                out.send(value)
                into.recv(timeout=PATIENCE).release()
        for _ in range(20):
            for _ in range(5):
                out.send(value)
                one.recv(timeout=PATIENCE).release()
            out.send(value)
            other.recv(timeout=PATIENCE).release()


def test_what_others_took_of_a_sender_that_has_left_is_no_damage(kind, channel, caplog):
    """The last one that needed its ring has removed it: one that never mapped it finds nothing there."""
    with kind.receiver(channel) as one, kind.receiver(channel) as other:
        with kind.sender(channel) as tx:
            for receiver in (one, other):  # both attach to it
                with pytest.raises(shmtensor.TimedOut):
                    receiver.recv(timeout=0)
            for _ in range(3):
                tx.send(np.arange(3))
                one.recv(timeout=PATIENCE).release()
        for receiver in (one, other):
            with pytest.raises(shmtensor.EndOfStream):
                receiver.recv(timeout=PATIENCE)
        assert (other.statistics().bad_records, caplog.text) == (0, "")


def test_the_end_of_the_stream_says_what_failed_and_is_still_referred_to(kind, channel, caplog):
    """A worker's loop that catches the error of its last message: a variable, or a traceback, keeps the value."""
    with kind.receiver(channel) as rx:
        with kind.sender(channel) as tx:
            tx.send(np.array(1))
            with contextlib.suppress(KeyError), rx.recv(timeout=PATIENCE) as message:
                value = message.value
                raise KeyError
            tx.close()
        with pytest.raises(shmtensor.EndOfStream, match="1 that are here are not done"):
            rx.recv(timeout=PATIENCE)
        assert "1 that are here are not done" in caplog.text
        del value
        assert [message.attempt for message in rx] == [2]
        with pytest.raises(shmtensor.EndOfStream, match=r"is received$"):
            rx.recv(timeout=PATIENCE)


class Decoding:
    """What happens while a value is decoded: a leaf that is made in Python, sent as `VALUE`."""

    VALUE = torch.eye(3).to_sparse()

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.act: Any = None
        """Called in there, once."""
        make = torch.sparse_coo_tensor

        def acting(*args: Any, **options: Any) -> Any:
            act, self.act = self.act, None
            if act is not None:
                act()
            return make(*args, **options)

        monkeypatch.setattr(torch, "sparse_coo_tensor", acting)


@pytest.fixture
def decoding(monkeypatch):
    return Decoding(monkeypatch)


def receive_without_the_mutex(tx, rx, decoding):
    """Receive until a message is decoded without the mutex, as most are; the reference has no such way."""
    while native.module is not None:
        found = []
        tx.send(decoding.VALUE)
        decoding.act = lambda: found.append(rx._mutex.locked())  # noqa: B023 - called before the next round
        rx.recv(timeout=PATIENCE).release()
        if found == [False]:
            break


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("acknowledge", ["next", "release"])
@pytest.mark.parametrize("who", ["itself", "another"])
def test_a_close_while_a_message_is_decoded_leaves_it_to_another(kind, channel, decoding, who, acknowledge, copy):
    """By a handler that interrupts the call, or by another thread: nobody has it in hand, for ever."""
    with kind.sender(channel) as tx, kind.receiver(channel) as other:
        rx = kind.receiver(channel, acknowledge=acknowledge)
        kind.wait_for(tx, 2)
        receive_without_the_mutex(tx, rx, decoding)
        tx.send(decoding.VALUE)
        threads, had_mutex, returned = [], [], []

        def close_meanwhile():
            had_mutex.append(rx._mutex.locked())
            threads.append(threading.Thread(target=rx.close))
            threads[0].start()
            if had_mutex[0]:  # it closes when this call ends
                wait_until(lambda: rx._stop)
            else:
                threads[0].join(PATIENCE)

        decoding.act = rx.close if who == "itself" else close_meanwhile
        with contextlib.suppress(shmtensor.ClosedError):
            returned.append(rx.recv(timeout=PATIENCE, copy=copy).seq)
        assert not returned or had_mutex == [True]  # then the call may end before the other one begins
        for thread in threads:
            thread.join(PATIENCE)
        assert (rx.closed, rx._leases(), rx in lingering) == (True, 0, False)
        with other.recv(timeout=PATIENCE) as message:
            assert message.value.to_dense().tolist() == torch.eye(3).tolist()


@only("compiled", "the reference decodes with the mutex, which `close` waits for")
def test_a_message_that_is_decoded_just_when_a_close_empties_the_hands(kind, channel, decoding, monkeypatch):
    with kind.sender(channel) as tx, kind.receiver(channel) as other:
        rx = kind.receiver(channel)
        kind.wait_for(tx, 2)
        entered, go, ends = threading.Event(), threading.Event(), []

        def receive():
            with contextlib.suppress(shmtensor.ClosedError):
                while not entered.is_set():  # until one is decoded without the mutex, as most are
                    tx.send(decoding.VALUE)
                    decoding.act = lambda: rx._mutex.locked() or (entered.set(), go.wait(PATIENCE))
                    rx.recv(timeout=PATIENCE)
            ends.append(rx._hands.hand.last)

        close = rx._claims.close

        def close_and_let_go(**how):
            close(**how)
            go.set()
            wait_until(lambda: not rx._direct and (ends or not rx._leases()))

        monkeypatch.setattr(rx._claims, "close", close_and_let_go)
        thread = threading.Thread(target=receive)
        thread.start()
        assert entered.wait(PATIENCE)
        rx.close()
        thread.join(PATIENCE)
        assert ends == [None]
        assert (rx._leases(), rx in lingering) == (0, False)
        with other.recv(timeout=PATIENCE) as message:
            assert message.value.to_dense().tolist() == torch.eye(3).tolist()
