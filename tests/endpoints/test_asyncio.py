"""`arecv`, `asend`, `async for`: on asyncio's loop and uvloop, woken by descriptors, cancelled at every step."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib.util
import os
import random
import signal
import threading

import numpy as np
import pytest

import shmtensor
from shmtensor.endpoints import asyncio as calls
from shmtensor.endpoints import wait_queue as wait_queues
from shmtensor.endpoints.base import LIVENESS_INTERVAL
from shmtensor.endpoints.wait_queue import SlotWaiters
from shmtensor.memory.semaphores import BY_FIFO

PATIENCE = 100.0
PAIRS = [(shmtensor.Publisher, shmtensor.Subscriber), (shmtensor.Producer, shmtensor.Consumer)]
pairs = pytest.mark.parametrize("pair", PAIRS, ids=["fan-out", "work-queue"])
STEPS = range(7)
"""How many turns of the loop pass between being woken and a cancellation: more than any call here takes."""


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    """Runs a coroutine on one of the two loops, and sees that no task of it is left."""
    if request.param == "uvloop":
        if importlib.util.find_spec("uvloop") is None:
            pytest.skip("uvloop is not installed")
        import uvloop

        factory = uvloop.new_event_loop
    else:
        factory = asyncio.new_event_loop

    def run(coroutine):
        loop = factory()
        failures = []
        loop.set_exception_handler(lambda _, context: failures.append(context))
        try:
            return loop.run_until_complete(asyncio.wait_for(coroutine, PATIENCE))
        finally:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.wait(left))
            loop.close()
            assert failures == []

    return run


@pytest.fixture
def no_liveness_checks(monkeypatch):
    """Nobody looks around: a wake-up that is lost is a hang."""
    monkeypatch.setattr(wait_queues, "LIVENESS_INTERVAL", 10 * PATIENCE)


async def until(condition) -> None:
    """Let the loop run until something is so."""
    while not condition():
        await asyncio.sleep(0.001)


async def turns_of_the_loop(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def turns_after_waking(endpoint, count: int) -> None:
    """None if the count is 0; else until the endpoint has heard that it is rung, and then some."""
    while count and is_asleep(endpoint):
        await asyncio.sleep(0)
    await turns_of_the_loop(count - 1)


def is_asleep(endpoint) -> bool:
    words = endpoint._control_words
    at = endpoint._asleep
    return bool(words[at] & 1)


async def asleep(endpoint) -> None:
    """Until a task waits at the endpoint and the loop has nothing more to do for it."""
    await until(lambda: is_asleep(endpoint))


ONE_RING = {shmtensor.Publisher: "32KiB", shmtensor.Producer: "12KiB"}
"""`max_bytes=` with room for one small ring and no second one, so that a message takes several of its slots."""


def number(value: int) -> np.ndarray:
    return np.full(3, value, np.int64)


def number_of(message) -> int:
    with message:
        return int(message.value[0])


def in_thread(call, *args):
    """A call in a thread of its own; `join()` gives its result."""
    result = []
    thread = threading.Thread(target=lambda: result.append(call(*args)), daemon=True)
    thread.start()

    async def join():
        await until(lambda: not thread.is_alive())
        thread.join()
        return result[0]

    return join


# --- waiting and being woken


@pairs
def test_a_waiting_task_is_woken_by_the_descriptor(run, channel, pair, no_liveness_checks):
    async def main():
        with pair[0](channel) as tx, pair[1](channel) as rx:
            for count in range(20):
                waiting = asyncio.create_task(rx.arecv())
                await asleep(rx)
                tx.send(number(count))
                assert number_of(await waiting) == count
                assert not is_asleep(rx)
            assert tx.statistics().doorbells == rx.statistics().sleeps == 20
            assert (rx.statistics().late, rx.statistics().ticks, rx.statistics().received) == (0, 0, 20)

    run(main())


@pytest.mark.filterwarnings("ignore:.*that no consumer has finished:ResourceWarning")  # on purpose
@pairs
def test_a_task_that_waits_for_a_slot_is_woken_by_the_descriptor(run, channel, pair, no_liveness_checks):
    async def main():
        with pair[0](channel, slots=1) as tx, pair[1](channel) as rx:
            await tx.asend(number(0))
            for count in range(20):
                message = await rx.arecv()
                waiting = asyncio.create_task(tx.asend(number(count + 1), {"count": count}))
                await asleep(tx)
                assert tx._control_words[tx._asleep] & BY_FIFO
                assert not waiting.done()
                assert number_of(message) == count
                del message
                assert await waiting == count + 2
                assert not is_asleep(tx)
            assert tx.statistics().waits == 20

    run(main())


@pairs
def test_the_compiled_code_wakes_a_waiting_sender(run, channel, pair, no_liveness_checks):
    """Small tensors that look alike: where the compiled module is there, the slot is given back by it."""
    import torch

    async def main():
        with pair[0](channel, slots=2) as tx, pair[1](channel) as rx:
            for count in range(30):
                await tx.asend(torch.full((4,), count))
                if count % 2:
                    waiting = asyncio.create_task(tx.asend(torch.full((4,), -1)))
                    await asleep(tx)
                    assert [number_of(await rx.arecv()) for _ in range(3)] == [count - 1, count, -1]
                    await waiting

    run(main())


@pairs
def test_a_waiting_task_costs_nothing(run, channel, pair, no_liveness_checks, monkeypatch):
    """Nobody polls: while tasks wait, the loop's turns call nothing of theirs."""

    async def main():
        with pair[0](channel, slots=1) as tx, pair[1](channel) as rx:
            receiving = [asyncio.create_task(rx.arecv()) for _ in range(3)]
            await asleep(rx)
            looks = []
            monkeypatch.setattr(rx, "_poll", lambda *_: looks.append("recv"))
            monkeypatch.setattr(tx, "_place_at_once", lambda *_: looks.append("send"))
            await turns_of_the_loop(200)
            assert looks == []
            monkeypatch.undo()
            for count in range(3):
                tx.send(number(count), timeout=PATIENCE)
                assert number_of(await receiving[count]) == count
                receiving[count] = None

    run(main())


@pairs
def test_tasks_are_served_in_the_order_in_which_they_came(run, channel, pair, no_liveness_checks):
    async def main():
        options = {} if pair[0] is shmtensor.Publisher else {"acknowledge": "release"}
        with pair[0](channel, slots=2) as tx, pair[1](channel, **options) as rx:
            got, sent = [], []

            async def receive(name):
                got.append((name, number_of(await rx.arecv())))

            async def send(name):
                await tx.asend(number(name))
                sent.append(name)

            receivers = [asyncio.create_task(receive(name)) for name in range(50)]
            await asleep(rx)
            senders = [asyncio.create_task(send(name)) for name in range(50)]
            await asyncio.gather(*receivers, *senders)
            assert got == [(name, name) for name in range(50)]
            assert sent == list(range(50))

    run(main())


@pairs
def test_async_for_ends_with_the_stream(run, channel, pair):
    async def main():
        async with pair[1](channel) as rx:

            async def send():
                async with pair[0](channel, slots=2) as tx:
                    for count in range(20):
                        await tx.asend(number(count))

            sending = asyncio.create_task(send())
            got = []
            async for message in rx:
                got.append(number_of(message))
                del message
            assert got == list(range(20))
            await sending
            with pytest.raises(shmtensor.EndOfStream):
                await rx.arecv()
            with pytest.raises(shmtensor.EndOfStream):
                await rx.arecv(timeout=0)
            many = await asyncio.gather(*(rx.arecv() for _ in range(5)), return_exceptions=True)
            assert [type(each) for each in many] == [shmtensor.EndOfStream] * 5
        assert rx.closed

    run(main())


@pairs
def test_waiting_tasks_end_with_the_stream(run, channel, pair, no_liveness_checks):
    async def main():
        with pair[0](channel) as tx, pair[1](channel) as rx:
            waiting = [asyncio.create_task(rx.arecv()) for _ in range(5)]
            await asleep(rx)
            tx.close()
            ended = await asyncio.gather(*waiting, return_exceptions=True)
            assert [type(each) for each in ended] == [shmtensor.EndOfStream] * 5

    run(main())


@pairs
def test_timeouts(run, channel, pair):
    async def main():
        with pair[0](channel, slots=1) as tx, pair[1](channel) as rx:
            for timeout in (0, 0.01, 2.5 * LIVENESS_INTERVAL if LIVENESS_INTERVAL > 0.1 else 0.3):
                with pytest.raises(shmtensor.TimedOut, match=f"within {timeout:g} s"):
                    await rx.arecv(timeout=timeout)
            tx.send(number(1))
            for timeout in (0, 0.01, 0.3):
                with pytest.raises(shmtensor.RingFull, match="no room for 24 bytes"):
                    await tx.asend(number(2), timeout=timeout)
            assert number_of(await rx.arecv(timeout=0)) == 1
            assert await tx.asend(number(2), timeout=0) == 2
            assert number_of(await rx.arecv(timeout=0)) == 2
            for wrong, error in (
                (-1, shmtensor.ArgumentError), (10**400, shmtensor.ArgumentError), ("1", shmtensor.ArgumentTypeError)
            ):  # fmt: skip
                with pytest.raises(error, match="timeout"):
                    await rx.arecv(timeout=wrong)
                with pytest.raises(error, match="timeout"):
                    await tx.asend(number(0), timeout=wrong)
            assert not is_asleep(tx)
            assert not is_asleep(rx)

    run(main())


@pairs
def test_one_of_several_times_out(run, channel, pair, no_liveness_checks):
    async def main():
        options = {} if pair[0] is shmtensor.Publisher else {"acknowledge": "release"}
        with pair[0](channel, slots=1) as tx, pair[1](channel, **options) as rx:
            tasks = [asyncio.create_task(rx.arecv(timeout=timeout)) for timeout in (PATIENCE, 0.01, PATIENCE)]
            with pytest.raises(shmtensor.TimedOut):
                await tasks[1]
            tx.send(number(1))
            assert number_of(await tasks[0]) == 1
            tasks.pop(0)
            await tx.asend(number(2))
            assert number_of(await tasks.pop()) == 2

    run(main())


@pytest.mark.parametrize(
    ("full", "error"), [("error", shmtensor.RingFull), ("drop", None), ("grow", None), ("block", None)]
)
def test_a_full_ring_is_as_for_send(run, channel, full, error):
    async def main():
        with shmtensor.Publisher(channel, slots=1, full=full) as tx, shmtensor.Subscriber(channel) as rx:
            await tx.asend(number(1))
            if error:
                with pytest.raises(error):
                    await tx.asend(number(2))
            elif full == "drop":
                assert await tx.asend(number(2)) == 0
                assert tx.statistics().dropped == 1
                with pytest.raises(shmtensor.RingFull, match="drop"):
                    await tx.aloan((3,), np.int64)
            elif full == "grow":
                assert await tx.asend(number(2)) == 2
                assert tx.statistics().rings == 2
            else:
                with pytest.raises(shmtensor.RingFull):
                    await tx.asend(number(2), timeout=0)
            assert number_of(await rx.arecv()) == 1

    run(main())


def test_a_message_larger_than_a_slot_waits_for_its_place_in_line(run, channel, no_liveness_checks):
    async def main():
        with (
            shmtensor.Publisher(channel, slots=4, slot_bytes=64, max_bytes=ONE_RING[shmtensor.Publisher]) as tx,
            shmtensor.Subscriber(channel) as rx,
        ):
            for count in range(4):
                tx.send(number(count))
            large = asyncio.create_task(tx.asend(np.arange(32)))  # takes every slot
            await asleep(tx)
            small = asyncio.create_task(tx.asend(number(9)))
            for count in range(4):
                assert not large.done()
                assert number_of(await rx.arecv()) == count
            await large
            assert not small.done()
            with await rx.arecv() as message:
                assert message.value.tolist() == list(range(32))
            del message
            await small
            assert number_of(await rx.arecv()) == 9

    run(main())


@pairs
def test_a_small_message_does_not_wait_for_a_large_one_that_gave_up(run, channel, pair, no_liveness_checks):
    """The first in line needs more room than the second: when it is cancelled, there may be room enough."""

    async def main():
        with pair[0](channel, slots=2, slot_bytes=64, max_bytes=ONE_RING[pair[0]]) as tx, pair[1](channel) as rx:
            tx.send(number(0))
            large = asyncio.create_task(tx.asend(np.arange(16)))
            await asleep(tx)
            small = asyncio.create_task(tx.asend(number(1)))
            await turns_of_the_loop(3)
            assert not small.done()
            large.cancel()
            assert await small == 2
            assert [number_of(await rx.arecv()) for _ in range(2)] == [0, 1]

    run(main())


@pairs
def test_a_loan_waits_for_its_slot(run, channel, pair, no_liveness_checks):
    async def main():
        with pair[0](channel, slots=1) as tx, pair[1](channel) as rx:
            with await tx.aloan((3,), np.int64, {"n": 1}) as loan:
                loan.array[...] = 5
            waiting = asyncio.create_task(tx.aloan((3,), np.int64))
            await asleep(tx)
            message = await rx.arecv()
            assert message.meta == {"n": 1}
            assert number_of(message) == 5
            del message
            (await waiting).discard()
            del waiting
            assert await tx.asend(number(6), timeout=0) == 2
            assert number_of(await rx.arecv()) == 6

    run(main())


@pairs
def test_a_loan_that_is_given_up_wakes_who_waits_for_its_slot(run, channel, pair, no_liveness_checks):
    async def main():
        with pair[0](channel, slots=1) as tx, pair[1](channel) as rx:
            loan = await tx.aloan((3,), np.int64)
            view = loan.array
            sending = asyncio.create_task(tx.asend(number(6)))
            await asleep(tx)
            loan.discard()
            await turns_of_the_loop(5)
            assert not sending.done()
            del view
            assert await asyncio.wait_for(sending, PATIENCE) == 1
            assert number_of(await rx.arecv()) == 6

    run(main())


@pairs
def test_a_private_copy_holds_no_slot(run, channel, pair):
    async def main():
        with pair[0](channel, slots=1) as tx, pair[1](channel) as rx:
            for count in range(5):
                await tx.asend(number(count), timeout=PATIENCE)
                message = await rx.arecv(copy=True)
                value = message.value
                message.release()
                value += 1
                assert value.tolist() == [count + 1] * 3

    run(main())


@pairs
def test_who_always_finds_something_starves_nobody(run, channel, pair):
    async def main():
        with pair[0](channel) as tx, pair[1](channel) as rx:
            over = False

            async def other():
                nonlocal over
                over = True

            task = asyncio.create_task(other())
            while not over:
                await tx.asend(number(1))
                number_of(await rx.arecv())
            await task

    run(main())


def test_what_is_there_needs_no_turn_of_the_loop(run, channel):
    """Nothing is awaited, so that a coroutine that is stepped by hand ends at once."""

    async def main():
        with shmtensor.Publisher(channel) as tx, shmtensor.Subscriber(channel) as rx:
            tx._turn_due = rx._turn_due = calls.clock() + PATIENCE
            for count in range(20):
                with pytest.raises(StopIteration) as sent:
                    tx.asend(number(count)).send(None)
                assert sent.value.value == count + 1
                with pytest.raises(StopIteration) as received:
                    rx.arecv().send(None)
                assert number_of(received.value.value) == count
                del received
            assert tx._wait_queue is rx._wait_queue is None

    run(main())


# --- cancellation


@pairs
@pytest.mark.parametrize("others", [0, 1])
def test_a_cancelled_arecv_loses_nothing(run, channel, pair, no_liveness_checks, others):
    """Cancelled so many turns of the loop after the message was sent: either it has it, or the next one gets it."""

    async def main():
        options = {} if pair[0] is shmtensor.Publisher else {"acknowledge": "release"}
        outcomes = set()
        with pair[0](channel, slots=2) as tx, pair[1](channel, **options) as rx:
            for steps in STEPS:
                task = asyncio.create_task(rx.arecv())
                await asleep(rx)
                waiting = [asyncio.create_task(rx.arecv()) for _ in range(others)]
                await turns_of_the_loop(2)
                tx.send(number(steps), timeout=PATIENCE)
                await turns_after_waking(rx, steps)
                task.cancel()
                try:
                    got = [number_of(await task)]
                except asyncio.CancelledError:
                    got = []
                outcomes.add(bool(got))
                del task
                tx.send(number(steps + 100), timeout=PATIENCE)
                got += [number_of(await each) for each in waiting]
                while len(got) < 2:
                    got.append(number_of(await rx.arecv()))
                waiting.clear()
                assert got == [steps, steps + 100]
            assert rx.statistics().leases == 0
            assert not is_asleep(rx)
        assert outcomes == {True, False}

    run(main())


@pairs
@pytest.mark.parametrize("others", [0, 1])
def test_a_cancelled_asend_holds_no_slot(run, channel, pair, no_liveness_checks, others):
    async def main():
        outcomes = set()
        with pair[0](channel, slots=1) as tx, pair[1](channel) as rx:
            for steps in STEPS:
                tx.send(number(-1), timeout=PATIENCE)
                task = asyncio.create_task(tx.asend(number(steps)))
                await asleep(tx)
                waiting = [asyncio.create_task(tx.asend(number(100))) for _ in range(others)]
                await turns_of_the_loop(2)
                assert number_of(await rx.arecv()) == -1
                await turns_after_waking(tx, steps)
                task.cancel()
                expected = [100] * others
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                    expected.insert(0, steps)
                outcomes.add(len(expected) > others)
                assert [number_of(await rx.arecv()) for _ in expected] == expected
                for each in waiting:
                    await each
                assert not is_asleep(tx)
                with pytest.raises(shmtensor.TimedOut):
                    await rx.arecv(timeout=0)
        assert outcomes == {True, False}

    run(main())


@pytest.mark.parametrize("send", ["asend", "aloan"])
def test_a_cancelled_asend_takes_nothing_from_latest(run, channel, no_liveness_checks, monkeypatch, send):
    """Cancelled when it has seen, as it fell asleep, that it may take back the newest message."""
    held = []
    open_ = SlotWaiters._open

    def release(wait_queue):
        held.clear()
        return open_(wait_queue)

    monkeypatch.setattr(SlotWaiters, "_open", release)

    async def main():
        with (
            shmtensor.Publisher(channel, slots=1) as pub,
            shmtensor.Subscriber(channel, delivery="latest") as sub,
            shmtensor.Subscriber(channel, delivery="latest") as slow,
        ):
            pub.send(number(1))
            held.append(sub.recv(timeout=PATIENCE))
            task = asyncio.create_task(pub.asend(number(2)) if send == "asend" else pub.aloan((3,), np.int64))
            while held:
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            assert number_of(slow.recv(timeout=0)) == 1
            assert await pub.asend(number(3)) == 2
            assert [number_of(await each.arecv(timeout=PATIENCE)) for each in (sub, slow)] == [3, 3]

    run(main())


@pairs
def test_a_cancelled_loan_holds_no_slot(run, channel, pair, no_liveness_checks):
    async def main():
        with pair[0](channel, slots=1) as tx, pair[1](channel) as rx:
            for steps in STEPS:
                tx.send(number(-1), timeout=PATIENCE)
                task = asyncio.create_task(tx.aloan((3,), np.int64))
                await asleep(tx)
                number_of(await rx.arecv())
                await turns_after_waking(tx, steps)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    (await task).discard()
                del task
            assert await tx.asend(number(1), timeout=0) == len(STEPS) + 1
            assert number_of(await rx.arecv()) == 1

    run(main())


async def cancel_at_random(rng: random.Random, tasks: set) -> None:
    """As long as there are tasks: cancel one, now and then."""
    while tasks:
        await turns_of_the_loop(rng.randrange(6))
        if tasks and rng.random() < 0.7:
            rng.choice(sorted(tasks, key=id)).cancel()


@pairs
@pytest.mark.parametrize("seed", range(3))
def test_random_cancellations_lose_nothing(run, channel, pair, no_liveness_checks, seed):
    """Tasks send, receive and keep messages for a while; any of them may be cancelled at any turn of the loop."""
    rng = random.Random(seed)
    count = 400

    async def main():
        options = {} if pair[0] is shmtensor.Publisher else {"acknowledge": "release"}
        with pair[0](channel, slots=3) as tx, pair[1](channel, **options) as rx:
            sent, got, left = [], [], list(range(count, 0, -1))
            receivers, senders = set(), set()

            async def receive():
                while len(got) < count:
                    message = await rx.arecv()
                    value = message.value
                    got.append(int(value[0]))  # received: nothing was awaited since
                    message.release()
                    await turns_of_the_loop(rng.randrange(3))
                    del message, value

            async def send():
                while left:
                    mine = left.pop()
                    try:
                        await tx.asend(number(mine))
                    except asyncio.CancelledError:
                        left.append(mine)
                        raise
                    sent.append(mine)  # sent: nothing was awaited since

            def keep(tasks, make, wanted):
                def gone(task):
                    tasks.discard(task)
                    if task.cancelled() and wanted():
                        start()
                    elif not task.cancelled():
                        task.result()

                def start():
                    task = asyncio.create_task(make())
                    tasks.add(task)
                    task.add_done_callback(gone)

                for _ in range(4):
                    start()

            keep(receivers, receive, lambda: len(got) < count)
            keep(senders, send, lambda: left)
            await asyncio.gather(cancel_at_random(rng, senders), cancel_until(rng, receivers, lambda: len(got) < count))
            for task in receivers:
                task.cancel()
            await until(lambda: not receivers)
            assert sorted(sent) == sorted(got) == list(range(1, count + 1))
            assert got == sent if pair[0] is shmtensor.Publisher else True
            assert rx.statistics().leases == 0
            for _ in range(3):
                tx.send(number(0), timeout=0)  # every slot is free
            assert not is_asleep(tx)
            assert not is_asleep(rx)
            for _ in range(3):
                number_of(rx.recv(timeout=0))

    async def cancel_until(rng, tasks, condition):
        while condition():
            await turns_of_the_loop(rng.randrange(6))
            if tasks and rng.random() < 0.5:
                rng.choice(sorted(tasks, key=id)).cancel()

    run(main())


def test_a_ring_for_a_cancelled_task_goes_to_another_consumer(run, channel, no_liveness_checks):
    """The producer rang us for the message, and nobody here takes it: another sleeping consumer must be rung."""

    async def main():
        with (
            shmtensor.Producer(channel) as tx,
            shmtensor.Consumer(channel) as first,
            shmtensor.Consumer(channel) as other,
        ):
            for steps in STEPS:
                ours = asyncio.create_task(first.arecv())
                await asleep(first)
                theirs = asyncio.create_task(other.arecv())
                await asleep(other)
                tx._recipients._next = 0  # so that the first is rung
                tx.send(number(steps))
                await turns_after_waking(first, steps)
                ours.cancel()
                try:
                    assert number_of(await ours) == steps
                    del ours
                    tx.send(number(steps))
                except asyncio.CancelledError:
                    pass
                assert number_of(await theirs) == steps
                del theirs

    run(main())


# --- threads and other members


@pairs
def test_a_thread_that_sleeps_at_the_same_receiver_disturbs_nobody(run, channel, pair, no_liveness_checks):
    """The thread wakes and takes `asleep` with it: the loop's task must fall asleep again by itself."""

    async def main():
        options = {} if pair[0] is shmtensor.Publisher else {"acknowledge": "release"}
        with pair[0](channel) as tx, pair[1](channel, **options) as rx:
            waiting = asyncio.create_task(rx.arecv())
            await asleep(rx)
            before = rx.statistics().sleeps

            def receive():
                try:
                    return number_of(rx.recv(timeout=0.05))
                except shmtensor.TimedOut:
                    return None

            join = in_thread(receive)
            await until(lambda: rx.statistics().sleeps > before)
            assert await join() is None
            await asleep(rx)
            tx.send(number(1))
            assert number_of(await waiting) == 1

    run(main())


@pairs
def test_a_thread_that_waits_for_a_slot_disturbs_nobody(run, channel, pair, no_liveness_checks):
    async def main():
        with pair[0](channel, slots=1) as tx, pair[1](channel) as rx:
            tx.send(number(0))
            waiting = asyncio.create_task(tx.asend(number(1)))
            await asleep(tx)
            naps = tx._asleep_word.number

            def send():
                with pytest.raises(shmtensor.RingFull):
                    tx.send(number(2), timeout=0.05)

            join = in_thread(send)
            await until(lambda: tx._asleep_word.number > naps)
            await join()
            await asleep(tx)
            assert number_of(await rx.arecv()) == 0
            await waiting
            assert number_of(await rx.arecv()) == 1

    run(main())


@pairs
def test_a_task_waits_for_a_thread_that_is_inside_a_call(run, channel, pair):
    """Nothing of the loop blocks meanwhile."""

    async def main():
        options = {} if pair[0] is shmtensor.Publisher else {"acknowledge": "release"}
        with pair[0](channel, slots=1) as tx, pair[1](channel, **options) as rx:
            join = in_thread(lambda: number_of(rx.recv(timeout=PATIENCE)))
            await asleep(rx)
            waiting = asyncio.create_task(rx.arecv(timeout=PATIENCE))
            with pytest.raises(shmtensor.TimedOut):
                await rx.arecv(timeout=0.02)
            tx.send(number(1))
            assert await join() == 1
            join = in_thread(lambda: [tx.send(number(count), timeout=PATIENCE) for count in (2, 3)])
            assert number_of(await waiting) == 2
            assert await join() == [2, 3]
            del waiting
            join = in_thread(lambda: tx.send(number(4), timeout=PATIENCE))
            await asleep(tx)
            sending = asyncio.create_task(tx.asend(number(5)))
            got = [number_of(await rx.arecv()) for _ in range(3)]
            assert got == [3, 4, 5]
            assert (await join(), await sending) == (4, 5)

    run(main())


@pairs
def test_threads_and_tasks_share_an_endpoint(run, channel, pair):
    async def main():
        options = {} if pair[0] is shmtensor.Publisher else {"acknowledge": "release"}
        with pair[0](channel, slots=4) as tx, pair[1](channel, **options) as rx:
            got = []

            def receive():
                return [number_of(message) for message in rx]

            async def areceive():
                async for message in rx:
                    got.append(number_of(message))
                    del message

            def send(first):
                for count in range(first, first + 100):
                    tx.send(number(count), timeout=PATIENCE)

            async def asend(first):
                for count in range(first, first + 100):
                    await tx.asend(number(count))

            receivers = [asyncio.create_task(areceive()) for _ in range(3)]
            join = in_thread(receive)
            joins = [in_thread(send, first) for first in (0, 100)]
            await asyncio.gather(*(asend(first) for first in (200, 300)))
            for each in joins:
                await each()
            tx.close()
            got += await join()
            await asyncio.gather(*receivers)
            assert sorted(got) == list(range(400))

    run(main())


@pytest.mark.slow
def test_threads_that_take_copies_beside_a_task_that_waits_for_slots(run, channel):
    """A copy gives its slot back at once, and a task is woken by a system call: meanwhile, other threads run."""
    count = 3000

    async def main():
        with shmtensor.Publisher(channel, slots=2) as tx, shmtensor.Subscriber(channel) as rx:

            def receive():
                got = []
                with contextlib.suppress(shmtensor.EndOfStream):
                    while True:
                        got.append(number_of(rx.recv(copy=True)))
                return got

            joins = [in_thread(receive) for _ in range(4)]
            for each in range(count):
                await tx.asend(number(each))
            tx.close()
            assert sorted([each for join in joins for each in await join()]) == list(range(count))

    run(main())


def test_a_consumer_that_leaves_wakes_those_that_wait_for_its_message(run, channel, no_liveness_checks):
    """The last sender has left, and another consumer has the last message: the stream ends when that one is done."""

    async def main():
        tx = shmtensor.Producer(channel)
        async with shmtensor.Consumer(channel) as rx:
            other = shmtensor.Consumer(channel)
            tx.send(number(1))
            message = other.recv(timeout=PATIENCE)
            waiting = asyncio.create_task(rx.arecv())
            await asleep(rx)
            sleeps = rx.statistics().sleeps
            tx.close()
            await until(lambda: rx.statistics().sleeps > sleeps)
            await asleep(rx)
            assert number_of(message) == 1
            other.close()
            with pytest.raises(shmtensor.EndOfStream):
                await waiting

    run(main())


def in_child(body) -> int:
    """A forked child that runs `body` and ends; its process number."""
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it never outlives a test run that is killed
            if os.getppid() != parent:
                os._exit(1)
            body()
            code = 0
        finally:
            os._exit(code)
    return child


async def ended(child: int) -> int:
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        await asyncio.sleep(0.005)


@pytest.mark.slow
@pairs
def test_members_of_other_processes(run, channel, pair, no_liveness_checks):
    """Ordinary and asynchronous members, in processes of their own, with little room."""
    count = 300

    def send():
        with pair[0](channel, slots=2) as tx:
            wait = tx.wait_for_subscribers if hasattr(tx, "wait_for_subscribers") else tx.wait_for_consumers
            wait(2, timeout=PATIENCE)
            for each in range(count):
                tx.send(number(each), timeout=PATIENCE)

    def asend():
        async def main():
            async with pair[0](channel, slots=2) as tx:
                wait = tx.wait_for_subscribers if hasattr(tx, "wait_for_subscribers") else tx.wait_for_consumers
                wait(2, timeout=PATIENCE)
                for each in range(count, 2 * count):
                    await tx.asend(number(each))

        asyncio.run(main())

    def receive(pipe):
        with pair[1](channel) as rx:
            got = [number_of(message) for message in rx]
        os.write(pipe, np.array(got, np.int64).tobytes())

    reading, writing = os.pipe()
    children = [in_child(send), in_child(asend), in_child(lambda: receive(writing))]
    os.close(writing)

    async def main():
        got = []
        async with pair[1](channel) as rx:
            async for message in rx:
                got.append(number_of(message))
                del message
        assert [await ended(child) for child in children] == [0, 0, 0]
        with os.fdopen(reading, "rb") as pipe:
            theirs = np.frombuffer(pipe.read(), np.int64).tolist()
        if pair[0] is shmtensor.Publisher:
            assert sorted(got) == sorted(theirs) == list(range(2 * count))
        else:
            assert sorted(got + theirs) == list(range(2 * count))

    run(main())


# --- deaths


@pairs
def test_the_senders_death_ends_a_waiting_task(run, channel, pair):
    ready, says = os.pipe()

    def send():
        tx = pair[0](channel)
        tx.send(number(1))
        os.write(says, b"!")
        signal.pause()
        tx.close()

    async def main():
        async with pair[1](channel) as rx:
            child = in_child(send)
            assert number_of(await rx.arecv()) == 1
            os.read(ready, 1)
            waiting = [asyncio.create_task(rx.arecv()) for _ in range(3)]
            await asleep(rx)
            os.kill(child, signal.SIGKILL)
            ended_by = await asyncio.gather(*waiting, return_exceptions=True)
            assert [type(each) for each in ended_by] == [shmtensor.EndOfStream] * 3
            assert await ended(child) == -9

    run(main())
    os.close(ready)
    os.close(says)


@pairs
def test_the_receivers_death_frees_the_slot_that_a_task_waits_for(run, channel, pair):
    ready, says = os.pipe()

    def receive():
        rx = pair[1](channel)
        message = rx.recv(timeout=PATIENCE)
        os.write(says, b"!")
        signal.pause()
        del message

    async def main():
        with pair[0](channel, slots=1) as tx:
            child = in_child(receive)
            wait = tx.wait_for_subscribers if hasattr(tx, "wait_for_subscribers") else tx.wait_for_consumers
            wait(1, timeout=PATIENCE)
            await tx.asend(number(1))
            os.read(ready, 1)
            waiting = asyncio.create_task(tx.asend(number(2)))
            await asleep(tx)
            os.kill(child, signal.SIGKILL)
            if pair[0] is shmtensor.Publisher:
                assert await waiting == 2
            else:  # a dead consumer's message goes to another one first
                with shmtensor.Consumer(channel) as rx:
                    message = await rx.arecv()
                    assert (message.attempt, number_of(message)) == (2, 1)
                    del message
                    assert await waiting == 2
                    assert number_of(await rx.arecv()) == 2
            assert await ended(child) == -9

    run(main())
    os.close(ready)
    os.close(says)


# --- the end: of endpoints, processes and loops


@pairs
@pytest.mark.parametrize("how", ["close", "aclose", "thread", "exit"])
def test_closing_ends_waiting_tasks(run, channel, pair, no_liveness_checks, how):
    async def main():
        tx, rx = pair[0](channel, slots=1), pair[1](channel)
        receiving = [asyncio.create_task(rx.arecv()) for _ in range(3)]
        await asleep(rx)
        other = pair[1](channel)
        if how == "aclose":
            await rx.aclose()
        elif how == "thread":
            await in_thread(rx.close)()
        elif how == "exit":
            with pytest.raises(KeyError):
                async with rx:
                    raise KeyError
        else:
            rx.close()
        tx.send(number(1))
        sending = [asyncio.create_task(tx.asend(number(2))) for _ in range(3)]
        await asleep(tx)
        if how == "aclose":
            await tx.aclose()
        elif how == "thread":
            await in_thread(tx.close)()
        elif how == "exit":
            with pytest.raises(KeyError):
                async with tx:
                    raise KeyError
        else:
            tx.close()
        outcomes = await asyncio.gather(*receiving, *sending, return_exceptions=True)
        assert [type(each) for each in outcomes] == [shmtensor.ClosedError] * 6
        for call in (rx.arecv(), tx.asend(number(3)), tx.aloan((1,), np.int8)):
            with pytest.raises(shmtensor.ClosedError):
                await call
        for endpoint in (tx, rx):
            with pytest.raises(shmtensor.ClosedError):
                async with endpoint:
                    pass
        assert number_of(await other.arecv()) == 1
        with pytest.raises(shmtensor.EndOfStream):
            await other.arecv()
        await other.aclose()
        await other.aclose()
        await tx.aclose(linger=None)

    run(main())


@pairs
def test_aclose_lingers_without_blocking(run, channel, pair, no_liveness_checks):
    async def main():
        tx, rx = pair[0](channel, slots=2), pair[1](channel)
        await tx.asend(number(1))
        await tx.asend(number(2))
        waiting = asyncio.create_task(tx.asend(number(3)))
        await asleep(tx)
        closing = asyncio.create_task(tx.aclose(linger=None))
        with pytest.raises(shmtensor.ClosedError):
            await waiting
        await asleep(tx)
        assert repr(tx).startswith(f'<{pair[0].__name__} "{channel}" closing')
        again = asyncio.create_task(tx.aclose(linger=None))
        with pytest.raises(shmtensor.ClosedError):
            await tx.asend(number(3))
        with pytest.raises(shmtensor.ClosedError):
            tx.send(number(3))
        assert number_of(await rx.arecv()) == 1
        assert not closing.done()
        assert not again.done()
        message = await rx.arecv()
        assert number_of(message) == 2
        del message
        for each in (again, closing):
            await each
            assert repr(tx).startswith(f'<{pair[0].__name__} "{channel}" closed')
        with pytest.raises(shmtensor.EndOfStream):
            await rx.arecv()
        rx.close()

    run(main())


@pairs
@pytest.mark.parametrize("end", ["time", "cancel", "close", "aclose", "shorter", "thread"])
def test_lingering_has_an_end(run, channel, pair, end):
    async def main():
        tx, rx = pair[0](channel), pair[1](channel)
        await tx.asend(number(1))
        closing = asyncio.create_task(tx.aclose(linger=0.05 if end == "time" else None))
        await asleep(tx)
        if end == "cancel":
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
        elif end == "close":
            tx.close()
        elif end == "aclose":
            await tx.aclose()
        elif end == "shorter":
            await tx.aclose(linger=0.05)
        elif end == "thread":
            await asyncio.to_thread(tx.close, linger=0.05)
        await asyncio.wait([closing])
        assert repr(tx).startswith(f'<{pair[0].__name__} "{channel}" closed')
        assert number_of(await rx.arecv()) == 1  # what was sent stays readable
        with pytest.raises(shmtensor.EndOfStream):
            await rx.arecv()
        rx.close()

    run(main())


@pairs
@pytest.mark.parametrize("linger", [0, 0.05, None])
def test_aclose_beside_a_thread_that_lingers(run, channel, pair, linger):
    """It ends that, or waits with it, and the loop runs meanwhile; afterwards the sender is closed."""

    async def main():
        tx, rx = pair[0](channel), pair[1](channel)
        await tx.asend(number(1))
        thread = threading.Thread(target=tx.close, args=(None,))
        thread.start()
        await asleep(tx)
        closing = asyncio.create_task(tx.aclose(linger))
        if linger is None:
            await turns_of_the_loop(STEPS.stop)
            assert not closing.done()
            assert number_of(await rx.arecv()) == 1
        await closing
        assert repr(tx).startswith(f'<{pair[0].__name__} "{channel}" closed')
        await asyncio.to_thread(thread.join, PATIENCE)
        assert not thread.is_alive()
        rx.close()

    run(main())


@pairs
def test_a_forked_child_is_told(run, channel, pair):
    """And its parent's loop goes on undisturbed, though the child had the same selector."""

    async def main():
        with pair[0](channel, slots=1) as tx, pair[1](channel) as rx:
            receiving = asyncio.create_task(rx.arecv())
            await asleep(rx)

            def body():
                for call in (rx.arecv(), tx.asend(number(1))):
                    try:
                        call.send(None)
                        call.send(None)
                    except shmtensor.ForkedError:
                        continue
                    raise AssertionError

            assert await ended(in_child(body)) == 0
            tx.send(number(2))
            assert number_of(await receiving) == 2

    run(main())


def test_one_loop_at_a_time(channel):
    with shmtensor.Publisher(channel, slots=1) as tx, shmtensor.Subscriber(channel) as rx:
        first = asyncio.new_event_loop()
        receiving = first.create_task(rx.arecv())
        first.run_until_complete(asleep(rx))
        tx.send(number(1))
        sending = first.create_task(tx.asend(number(2)))
        first.run_until_complete(asyncio.wait_for(receiving, PATIENCE))
        first.run_until_complete(asleep(tx))

        async def second():
            with pytest.raises(shmtensor.LoopError, match="another event loop"):
                await tx.asend(number(3), timeout=PATIENCE)

        asyncio.run(second())
        assert number_of(receiving.result()) == 1
        del receiving
        first.run_until_complete(asyncio.wait_for(sending, PATIENCE))
        first.close()

        async def third():
            receiving = asyncio.create_task(rx.arecv())
            assert number_of(await receiving) == 2
            del receiving
            receiving = asyncio.create_task(rx.arecv())
            await asleep(rx)
            await tx.asend(number(4))
            assert number_of(await receiving) == 4

        for _ in range(3):
            asyncio.run(third())
            tx.send(number(2))
        number_of(rx.recv(timeout=PATIENCE))


def test_the_tasks_of_a_closed_loop_do_not_count(channel):
    with shmtensor.Publisher(channel, slots=1) as tx, shmtensor.Subscriber(channel) as rx:
        loop = asyncio.new_event_loop()
        waiting = loop.create_task(rx.arecv())
        loop.run_until_complete(asleep(rx))
        loop.close()

        async def main():
            receiving = asyncio.create_task(rx.arecv())
            await asyncio.sleep(0)
            await tx.asend(number(1))
            assert number_of(await receiving) == 1

        asyncio.run(main())
        waiting._log_destroy_pending = False
        with contextlib.suppress(RuntimeError):  # its line's next cannot be called
            waiting.get_coro().close()


@pairs
@pytest.mark.parametrize("inside", [False, True], ids=["idle", "inside a call"])
def test_tasks_of_a_closed_loop_may_be_finalized_at_any_time(channel, pair, inside):
    """Also by a collection that comes while the same thread is inside a call of the endpoint."""
    with pair[0](channel, slots=1) as tx, pair[1](channel) as rx:
        tx.send(number(1))
        for endpoint, wait in ((tx, lambda: tx.asend(number(2))), (rx, rx.arecv)):
            if endpoint is rx:
                number_of(rx.recv(timeout=PATIENCE))
            loop = asyncio.new_event_loop()
            waiting = [loop.create_task(wait()) for _ in range(3)]
            loop.run_until_complete(asleep(endpoint))
            loop.run_until_complete(turns_of_the_loop(3))
            loop.close()
            for task in waiting:  # in line before the others, behind them, alone
                task._log_destroy_pending = False
                end = task.get_coro().close
                endpoint._run(end) if inside else end()
            asyncio.run(turns_of_the_loop(1))
        tx.send(number(3), timeout=PATIENCE)
        assert number_of(rx.recv(timeout=PATIENCE)) == 3


def test_outside_of_a_loop_waiting_is_asyncios_own_error(channel):
    with shmtensor.Subscriber(channel) as rx:
        rx._turn_due = calls.clock() + PATIENCE
        with pytest.raises(RuntimeError, match="no running event loop"):
            rx.arecv().send(None)


@pairs
def test_descriptors_are_given_back(run, channel, pair):
    def open_files():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    async def once():
        async with pair[0](channel, slots=1) as tx, pair[1](channel) as rx:
            receiving = asyncio.create_task(rx.arecv())
            await asleep(rx)
            await tx.asend(number(1))
            sending = asyncio.create_task(tx.asend(number(2)))
            await asleep(tx)
            number_of(await receiving)
            del receiving
            await sending
            number_of(await rx.arecv())

    async def main():
        await once()
        before = open_files()
        for _ in range(5):
            await once()
        await until(lambda: open_files() <= before)  # ZeroMQ closes its own in its own time

    run(main())
