"""Asynchronous exceptions at every boundary of every public call of the endpoints: nothing is lost, doubled or left.

One table of calls, over both implementations. After each interrupted call the endpoints must work: the next calls find
what the interrupted one had taken, and only that. `tests/faults/interrupts.py` enumerates the boundaries.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import threading

import numpy as np
import pytest
import torch

import shmtensor

from ..conftest import descriptors
from ..waiting import wait_until
from .interrupts import (
    each_boundary,
    interrupted,
    interrupted_at_random,
    note,
    random_count,
    random_signals,
    stride,
)

PATIENCE = 120.0


pytestmark = pytest.mark.usefixtures("implementation")


def plain(number: int) -> torch.Tensor:
    return torch.full((8,), number)


def mixed(number: int) -> dict:
    return {"x": torch.full((8,), number), "id": number, "more": [np.full(3, number)]}


def unusual(number: int) -> dict:
    """With leaves that the compiled module leaves to Python: there are boundaries while they are decoded."""
    return {"x": torch.full((8,), number), "more": [torch.full((8,), number).to_sparse(), np.full(3, number, "m8[s]")]}


def number_of(value) -> int:
    return int(value["x"][0]) if isinstance(value, dict) else int(value.reshape(-1)[0])


VALUES = {"tensor": plain, "dict": mixed, "unusual": unusual}


class FanOut:
    """A publisher and its subscriber; what was sent comes once, in order."""

    sender, receiver = shmtensor.Publisher, shmtensor.Subscriber
    may_repeat = False

    def __init__(self, channel, value=plain, options=None, **sending):
        self.value = value
        self.tx = self.sender(channel, **sending)
        self.rx = self.receiver(channel, **(options or {}))
        self.next = self.expected = 0

    def send(self):
        self.tx.send(self.value(self.next), timeout=PATIENCE)
        self.next += 1

    def sent(self, before):
        """After a `send` that was interrupted: whether it was sent after all."""
        sequence = self.tx.statistics().sent
        assert sequence in (before, before + 1)
        self.next += sequence - before

    def check(self, message):
        assert number_of(message.value) == self.expected
        self.expected += 1

    def drain(self):
        """Take what is there: exactly what was sent and not received."""
        while self.expected < self.next:
            message = self.rx.recv(timeout=PATIENCE)
            self.check(message)
            message.release()
        with pytest.raises((shmtensor.TimedOut, shmtensor.EndOfStream)):
            self.rx.recv(timeout=0)

    def is_idle(self):
        gc.collect()
        return self.rx.statistics().leases == 0

    def round(self):
        """Everything works, and no slot is lost."""
        for _ in range(3):
            self.send()
            self.drain()
        if not self.is_idle():  # a view's death that an exception kept from being told: at the next look
            with pytest.raises((shmtensor.TimedOut, shmtensor.EndOfStream)):
                self.rx.recv(timeout=0.3)
        assert self.is_idle()

    def close_others(self):
        """No other sender is left."""

    def close(self):
        self.rx.close()
        self.tx.close()
        self.close_others()


class WorkQueue(FanOut):
    sender, receiver = shmtensor.Producer, shmtensor.Consumer


class Group(FanOut):
    """Of a group, and with a second sender, which sends nothing: readers are taken from in turn."""

    receiver = staticmethod(functools.partial(shmtensor.Subscriber, group="them"))

    def __init__(self, channel, *args, **sending):
        self.other = self.sender(channel)
        super().__init__(channel, *args, **sending)

    def close_others(self):
        self.other.close()


PATTERNS = {"fan-out": FanOut, "work-queue": WorkQueue, "group": Group}


@pytest.fixture(params=PATTERNS)
def pattern(request):
    return PATTERNS[request.param]


@pytest.fixture(params=VALUES)
def value(request):
    return VALUES[request.param]


@contextlib.contextmanager
def scene(pattern, channel, *args, **options):
    made = pattern(channel, *args, **options)
    try:
        made.round()
        yield made
        made.round()
    finally:
        made.close()


def test_send(channel, pattern, value):
    with scene(pattern, channel, value) as it:
        state = {}

        def send():
            it.tx.send(state["value"], timeout=PATIENCE)

        def prepare():
            state.update(before=it.tx.statistics().sent, value=it.value(it.next))

        prepare()
        for attempt in each_boundary(send):
            it.sent(state["before"])
            it.drain()
            note("send", attempt)
            prepare()


def test_send_with_meta(channel, pattern):
    with scene(pattern, channel, mixed) as it:
        before = it.tx.statistics().sent
        for _ in each_boundary(lambda: it.tx.send(mixed(it.next), {"ts": 1.5})):
            it.sent(before)
            it.drain()
            before = it.tx.statistics().sent


@pytest.mark.usefixtures("nothing_is_skipped")
def test_recv(channel, pattern, value):
    with scene(pattern, channel, value) as it:
        state = {}

        def recv():
            state["message"] = it.rx.recv(timeout=PATIENCE)

        it.send()
        it.send()
        for attempt in each_boundary(recv):
            if not attempt.raised:
                it.check(state.pop("message"))
            else:
                assert not state
            note("recv", attempt)
            it.drain()
            it.send()
            it.send()


@pytest.mark.usefixtures("nothing_is_skipped")
def test_recv_of_a_message_that_was_taken_by_one_that_was_interrupted(channel, pattern):
    """Interrupted twice, and more: each time the next call has it."""
    with scene(pattern, channel) as it:
        it.send()
        for at in range(1, 30):
            state = {}

            def recv(state=state):
                state["message"] = it.rx.recv(timeout=PATIENCE)

            if not interrupted(recv, at).raised:
                it.check(state.pop("message"))
                it.drain()
                it.send()


@pytest.mark.usefixtures("nothing_is_skipped")
def test_recv_copy(channel, pattern):
    with scene(pattern, channel, mixed) as it:
        state = {}

        def recv():
            state["message"] = it.rx.recv(timeout=PATIENCE, copy=True)

        it.send()
        for attempt in each_boundary(recv):
            if not attempt.raised:
                it.check(state.pop("message"))
            it.drain()
            it.send()


@pytest.mark.usefixtures("nothing_is_skipped")
def test_recv_times_out(channel, pattern):
    """Going to sleep, looking around, giving up."""
    with scene(pattern, channel) as it:

        def recv():
            with contextlib.suppress(shmtensor.TimedOut):
                it.rx.recv(timeout=0.0005)

        for attempt in each_boundary(recv, step=stride(3)):
            it.round()
            note("recv that sleeps", attempt)


@pytest.mark.usefixtures("nothing_is_skipped")
def test_iteration(channel, pattern):
    with scene(pattern, channel) as it:
        state = {}

        def iterate():
            for message in it.rx:
                state["message"] = message
                break

        it.send()
        for attempt in each_boundary(iterate):
            if "message" in state:
                it.check(state.pop("message"))
            else:
                assert attempt.raised
            it.drain()
            it.send()


def test_release(channel, pattern):
    with scene(pattern, channel, mixed) as it:
        it.send()
        message = it.rx.recv(timeout=PATIENCE)
        it.check(message)
        state = {"message": message}
        del message
        for attempt in each_boundary(lambda: state["message"].release()):
            state.pop("message").release()
            note("release", attempt)
            it.round()
            it.send()
            state["message"] = it.rx.recv(timeout=PATIENCE)
            it.check(state["message"])
        state.pop("message").release()


@pytest.mark.usefixtures("nothing_is_skipped")
def test_with_block(channel):
    """Interrupted inside, a message is not done and comes again; interrupted in leaving it, either may be."""
    with scene(WorkQueue, channel, mixed) as it:
        entered = []

        def work():
            with it.rx.recv(timeout=PATIENCE) as message:
                entered.append(number_of(message.value))

        it.send()
        for _ in each_boundary(work):
            assert set(entered) <= {it.expected}
            gc.collect()
            with contextlib.suppress(shmtensor.TimedOut):
                message = it.rx.recv(timeout=0.3)
                assert number_of(message.value) == it.expected
                message.release()
                entered.append(it.expected)
            assert it.expected in entered
            it.expected += 1
            entered.clear()
            it.drain()
            it.send()
        it.drain()


def test_views_die(channel, pattern, value):
    with scene(pattern, channel, value) as it:
        state = {}

        def receive():
            it.send()
            message = it.rx.recv(timeout=PATIENCE)
            it.check(message)
            state["value"] = message.value
            message.release()

        receive()
        for attempt in each_boundary(state.clear):
            state.clear()
            it.round()
            note("end of a lease", attempt)
            receive()
        state.clear()


@pytest.mark.usefixtures("nothing_is_skipped")
def test_latest(channel):
    with scene(FanOut, channel, options={"delivery": "latest"}) as it:
        state = {}

        def recv():
            state["message"] = it.rx.recv(timeout=PATIENCE)

        it.send()
        for attempt in each_boundary(recv):
            if not attempt.raised:
                it.check(state.pop("message"))
            it.drain()
            it.send()
        it.drain()


def test_loan(channel, pattern):
    with scene(pattern, channel) as it:
        before = it.tx.statistics().sent

        def lend():
            with it.tx.loan((8,), torch.int64) as loan:
                loan.tensor.fill_(it.next)

        for attempt in each_boundary(lend):
            gc.collect()
            it.sent(before)
            it.drain()
            before = it.tx.statistics().sent
            note("loan", attempt)


def test_a_loan_that_is_sent_again(channel, pattern):
    """Whoever does not know whether a `send` was carried out repeats it: the loan is sent once."""
    with scene(pattern, channel) as it:
        state = {}

        def lend():
            loan = state["loan"] = it.tx.loan((8,), torch.int64)
            loan.tensor.fill_(it.next)

        lend()
        for attempt in each_boundary(lambda: state["loan"].send()):
            if attempt.raised:
                with contextlib.suppress(shmtensor.ReleasedError):  # it was done to its end
                    state["loan"].send()
            it.next += 1
            state.clear()
            it.drain()
            lend()
        state["loan"].discard()


def test_a_loan_that_is_sent_while_another_thread_waits_for_its_slot(channel):
    """Either thread may publish it; who does not know whether it was sent sends it again: it is sent once."""
    with shmtensor.Subscriber(channel) as rx, shmtensor.Publisher(channel, slots=1) as tx:
        state = {}

        def lend():
            state["loan"] = tx.loan(1, np.int64)
            state["loan"].array[0] = 1
            waiting = state["thread"] = threading.Thread(target=tx.send, args=(np.array([2]),))
            waiting.start()
            wait_until(lambda: tx._control_words[tx._asleep] & 1)

        lend()
        for attempt in each_boundary(lambda: state["loan"].send()):
            if attempt.raised:
                with contextlib.suppress(shmtensor.ReleasedError):  # it was done to its end
                    state["loan"].send()
            for number in (1, 2):
                with rx.recv(timeout=PATIENCE) as message:
                    assert int(message.value[0]) == number
            state["thread"].join(PATIENCE)
            assert not state["thread"].is_alive()
            assert not tx._offers
            lend()
        state["loan"].discard()
        state["thread"].join(PATIENCE)
        rx.recv(timeout=PATIENCE).release()


@pytest.mark.usefixtures("nothing_is_skipped")
@pytest.mark.parametrize("slots", [2, 8], ids=["any slot", "batch"])
def test_full_ring(channel, pattern, slots):
    """Waiting for a slot, and giving up."""
    with scene(pattern, channel, slots=slots) as it:

        def send():
            with contextlib.suppress(shmtensor.RingFull):
                it.tx.send(it.value(it.next), timeout=0.0005)

        for _ in range(slots):
            it.send()
        for attempt in each_boundary(send, step=stride(3)):
            it.drain()
            it.round()
            for _ in range(slots):
                it.send()
            note("send that waits", attempt)
        it.drain()


def test_growth(channel, pattern):
    """A message that needs a ring of its own."""
    for at in range(1, 10_000, stride(61)):
        it = pattern(channel)
        try:
            it.send()
            attempt = interrupted(lambda it=it: it.tx.send(torch.zeros(100_000, dtype=torch.int64)), at)
            with it.rx.recv(timeout=PATIENCE) as message:
                it.check(message)
            if it.tx.statistics().sent == 2:
                with it.rx.recv(timeout=PATIENCE) as message:
                    assert message.nbytes == 800_000
            it.round()
        finally:
            it.close()
        note("send that adds a ring", attempt)
        if not attempt.reached:
            return


def test_members_come(channel, pattern):
    """The send that finds a new receiver: from that message on it gets everything."""
    with scene(pattern, channel) as it:
        for at in range(1, 10_000, stride(23)):
            with pattern.receiver(channel) as other:
                before = it.tx.statistics().sent
                attempt = interrupted(lambda: it.tx.send(it.value(it.next)), at)
                it.sent(before)
                it.send()
                got = []
                while len(got) < it.next - it.expected:
                    message = (other if pattern is FanOut else it.rx).recv(timeout=PATIENCE)
                    got.append(number_of(message.value))
                    message.release()
                assert got == list(range(it.expected, it.next))
                if pattern is not FanOut:
                    it.expected = it.next
                it.drain()
            note("send to a newcomer", attempt)
            if not attempt.reached:
                break


def test_members_leave(channel, pattern):
    with scene(pattern, channel, slots=4) as it:
        for at in range(1, 10_000, stride(23)):
            with pattern.receiver(channel):
                it.round()
            before = it.tx.statistics().sent
            attempt = interrupted(lambda: it.tx.send(it.value(it.next)), at)
            it.sent(before)
            it.drain()
            it.round()
            assert it.tx.statistics().receivers == 1
            note("send after a leave", attempt)
            if not attempt.reached:
                break


def test_senders_come_and_go(channel, pattern):
    """The recv that finds a new sender, and one that has left."""
    with scene(pattern, channel) as it:
        for at in range(1, 10_000, stride(17)):
            with pattern.sender(channel) as other:
                other.send(it.value(it.next))
                it.next += 1
            state = {}

            def recv(state=state):
                state["message"] = it.rx.recv(timeout=PATIENCE)

            attempt = interrupted(recv, at)
            if not attempt.raised:
                it.check(state.pop("message"))
            it.drain()
            note("recv from a newcomer", attempt)
            if not attempt.reached:
                break


@pytest.mark.parametrize("call", ["send", "recv"])
def test_a_call_that_finds_another_thread_inside(channel, pattern, call):
    """The thread that waits, and what it has locked, notice nothing."""
    with scene(pattern, channel, slots=1) as it:
        endpoint = it.tx if call == "send" else it.rx

        def call_shortly():
            with contextlib.suppress(shmtensor.TimedOut):
                it.tx.send(it.value(-1), timeout=0.0005) if call == "send" else it.rx.recv(timeout=0.0005)

        def receive():
            message = it.rx.recv(timeout=PATIENCE)
            it.check(message)
            message.release()

        if call == "send":
            it.send()
        other = threading.Thread(target=it.send if call == "send" else receive)
        other.start()
        words, at = endpoint._control_words, endpoint._asleep
        wait_until(lambda: words[at] & 1)
        for _ in each_boundary(call_shortly, step=stride(3)):
            assert endpoint._inside == other.ident
        receive() if call == "send" else it.send()
        other.join(PATIENCE)
        assert not other.is_alive()
        it.drain()


def test_wait_for_receivers(channel, pattern):
    with scene(pattern, channel) as it:
        wait = it.tx.wait_for_consumers if pattern is WorkQueue else it.tx.wait_for_subscribers

        def wait_shortly():
            with contextlib.suppress(shmtensor.TimedOut):
                wait(2, timeout=0.0005)

        for _ in each_boundary(wait_shortly, step=stride(5)):
            it.round()


class Loop:
    """One event loop for one attempt. An exception may hit the loop itself: it is closed whatever its tasks do."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(lambda loop, context: None)

    def start(self, coroutine):
        self.task = self.loop.create_task(coroutine)
        self.task.add_done_callback(lambda task: task.get_loop().stop())
        self.loop.call_later(0.5, self.loop.stop)  # where the exception has hit the loop's own code

    def run(self):
        self.loop.run_forever()

    def close(self):
        """Cancel what an exception left undone, and let it end."""
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        for _ in range(10):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()
        if self.task.done() and not self.task.cancelled():
            self.task.exception()
        self.loop.close()


never_started = pytest.mark.filterwarnings("ignore:.*never awaited", "ignore:.*coroutine")


@never_started
@pytest.mark.parametrize("waits", [False, True], ids=["at once", "waits"])
def test_arecv(channel, pattern, waits):
    """Interrupted where a message is there, and where the task waits in line and is woken."""
    with scene(pattern, channel, mixed) as it:
        if not waits:
            it.send()
        for at in range(1, 10_000, stride(13)):
            state = {}
            runner = Loop()

            async def arecv(state=state, runner=runner):
                if waits:
                    runner.loop.call_later(0.002, it.send)
                state["message"] = await it.rx.arecv(timeout=PATIENCE)

            sent = it.next
            runner.start(arecv())
            attempt = interrupted(runner.run, at)
            runner.close()
            it.next = it.tx.statistics().sent  # the timer's call of `send` may have been interrupted, too
            if "message" in state:
                it.check(state["message"])
                state.pop("message").release()  # the task that had it in hand has ended
            del arecv, runner
            it.drain()
            note("arecv that waits" if waits else "arecv", attempt)
            if not attempt.reached:
                break
            assert it.next in (sent, sent + 1)
            if not waits:
                it.send()


@never_started
def test_asend(channel, pattern):
    with scene(pattern, channel, mixed) as it:
        for at in range(1, 10_000, stride(7)):
            runner = Loop()
            before = it.tx.statistics().sent
            runner.start(it.tx.asend(it.value(it.next), timeout=PATIENCE))
            attempt = interrupted(runner.run, at)
            runner.close()
            del runner
            it.sent(before)
            it.drain()
            note("asend", attempt)
            if not attempt.reached:
                break


@pytest.mark.filterwarnings("ignore:.*no consumer has finished:ResourceWarning")
@pytest.mark.parametrize("side", ["tx", "rx"])
def test_close(channel, pattern, side):
    for at in range(1, 10_000, stride(109)):
        it = pattern(channel)
        it.round()
        it.send()
        closing = getattr(it, side)
        attempt = interrupted(lambda closing=closing: closing.close(), at)
        closing.close()
        with pytest.raises(shmtensor.ClosedError):
            closing.send(np.zeros(1)) if side == "tx" else closing.recv(timeout=0)
        if side == "tx":
            it.drain()
            it.close_others()
            with pytest.raises(shmtensor.EndOfStream):
                it.rx.recv(timeout=PATIENCE)
        else:
            for _ in range(3):
                it.tx.send(np.zeros(1), timeout=0)  # nobody holds a slot
        it.close()
        assert [name for name in os.listdir("/dev/shm") if channel in name] == [], f"at boundary {at}"
        del it, closing
        gc.collect()
        assert descriptors() == set(), f"at boundary {at}"
        note(f"close of a {'sender' if side == 'tx' else 'receiver'}", attempt)
        if not attempt.reached:
            break


def test_close_with_views_alive(channel, pattern):
    for at in range(1, 10_000, stride(109)):
        it = pattern(channel, mixed)
        it.send()
        message = it.rx.recv(timeout=PATIENCE)
        kept = message.value["x"]
        message.release()
        attempt = interrupted(lambda it=it: it.rx.close(), at)
        it.rx.close()
        assert int(kept[0]) == 0
        for _ in range(20):  # more than there are slots: a work queue keeps what nobody takes
            if pattern is not WorkQueue:
                it.tx.send(np.zeros(1), timeout=PATIENCE)
        del kept, message
        gc.collect()
        it.tx.close()
        it.close()
        assert [name for name in os.listdir("/dev/shm") if channel in name] == [], f"at boundary {at}"
        note("close with views alive", attempt)
        if not attempt.reached:
            break


@pytest.mark.usefixtures("nothing_is_skipped")
@pytest.mark.slow
@pytest.mark.parametrize("side", ["send", "recv"])
def test_random_signals(channel, pattern, value, side):
    """Alarms at random moments, also inside C functions and sleeps."""
    with scene(pattern, channel, value, slots=4) as it:
        hits = 0
        with random_signals(seed=1) as arm:
            while hits < random_count(300):
                before = it.tx.statistics().sent
                if side == "recv":
                    it.send()
                if side == "send":
                    hit, message = interrupted_at_random(arm, lambda: it.tx.send(it.value(it.next), timeout=PATIENCE))
                else:
                    hit, message = interrupted_at_random(arm, lambda: it.rx.recv(timeout=PATIENCE))
                hits += hit
                if side == "send":
                    it.sent(before)
                elif message is not None:
                    it.check(message)
                    message = None
                it.drain()
