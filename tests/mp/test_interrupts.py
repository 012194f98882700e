"""Exceptions from outside in every call of a queue: at each boundary, then by signals at random moments.

After each the queue works, an item is there once or not at all, and what counts items agrees with them. So it is after
calls that a signal handler makes in the middle of another call, at each of its boundaries.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
from queue import Empty, Full

import numpy as np
import pytest

from shmtensor import JoinableQueue, Queue, SimpleQueue, get_context
from shmtensor.errors import ClosedError, ReentrantError

from ..conftest import left_files
from ..faults.interrupts import each_boundary, interrupted_at_random, note, random_count, random_signals, stride
from ..waiting import wait_until

KINDS = [SimpleQueue, Queue, JoinableQueue]
"""To make a queue has some 900 boundaries, to close one 6,000 to 10,000: every one of them, or every 97th."""
WAIT = 120

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_is_skipped")]


class Slow:
    """Its unpickling runs Python code, where an exception may arrive, too."""

    def __init__(self, number):
        self.number = number

    def __setstate__(self, state):
        self.number = dict(state)["number"]

    def __eq__(self, other):
        return type(other) is Slow and other.number == self.number

    __hash__ = None


ITEMS = {"small": {"n": 1}, "array": np.arange(6), "large": np.zeros(20_000), "class": Slow(3)}


def same(got, item) -> bool:
    return bool(np.array_equal(got, item)) if isinstance(item, np.ndarray) else got == item


def get(q):
    """A `get` that waits. (Not `q.get(**options)`: after such a call the interpreter looks for signals in its caller,
    which has not stored the item yet; no library can help that.)"""
    return (lambda: q.get()) if type(q) is SimpleQueue else (lambda: q.get(timeout=WAIT))


def take(q):
    """The next item, at once; raises `Empty`."""
    if type(q) is SimpleQueue:
        if q.empty():
            raise Empty
        return q.get()
    return q.get_nowait()


def drain(q) -> list:
    found = []
    with contextlib.suppress(Empty):
        while True:
            found.append(take(q))
            if type(q) is JoinableQueue:
                q.task_done()
    return found


def check_counts(q) -> None:
    """Nothing is in the queue, and nothing counts as if it were."""
    assert q.empty()
    if type(q) is SimpleQueue:
        return
    assert q.qsize() == 0
    for number in range(2):
        q.put(number, timeout=WAIT)
    with pytest.raises(Full):
        q.put_nowait(2)
    assert drain(q) == [0, 1]
    if type(q) is JoinableQueue:
        assert q._tasks.unfinished == 0
        assert not q._held._messages
        q.join()


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def q(request):
    kind = request.param
    queue = kind() if kind is SimpleQueue else kind(2)
    for item in ITEMS.values():  # what is made by the first calls, is made; the compiled module knows such items
        for _ in range(3):
            queue.put(item)
            assert same(take(queue), item)
            if kind is JoinableQueue:
                queue.task_done()
    yield queue
    queue.close()
    vars(queue).clear()  # pytest keeps the queue itself for longer, and with it what it had mapped
    gc.collect()
    assert files() == []


def files() -> list[str]:
    return sorted(left_files("queue", "pipe"))


@pytest.mark.parametrize("what", ITEMS)
def test_put(q, what):
    item = ITEMS[what]
    for attempt in each_boundary(lambda: q.put(item)):
        note(f"{type(q).__name__}.put, {what}", attempt)
        found = drain(q)
        assert len(found) == 1 or (attempt.raised and not found), attempt
        assert all(same(each, item) for each in found)
        check_counts(q)


@pytest.mark.parametrize("what", ITEMS)
def test_get(q, what):
    item = ITEMS[what]
    for attempt in attempts_to_get(q, item):
        note(f"{type(q).__name__}.get, {what}", attempt)
        if attempt.raised:
            assert same(take(q), item), attempt
        else:
            assert same(attempt.result, item)
            attempt.result = None
        if type(q) is JoinableQueue:
            q.task_done()
        assert drain(q) == []
        check_counts(q)


def attempts_to_get(q, item):
    """`get`, interrupted one boundary later each time, with one item in the queue."""
    q.put(item)
    for attempt in each_boundary(get(q)):
        yield attempt
        q.put(item)
    drain(q)


@pytest.mark.parametrize("what", ITEMS)
def test_putting_back(q, what):
    """What `close` puts back, as an interrupted `get` has left it, is put back once."""
    if type(q) is JoinableQueue:
        pytest.skip("gives messages back instead")
    item, put_back = ITEMS[what], q._handle._put_back
    q._undelivered.append(item)
    for attempt in each_boundary(put_back):
        note(f"{type(q).__name__}, put back, {what}", attempt)
        put_back()  # by the next close
        found = drain(q)
        assert len(found) == 1, attempt
        assert same(found[0], item)
        check_counts(q)
        q._undelivered.append(item)
    q._undelivered.clear()


def test_get_of_an_empty_queue(q):
    if type(q) is SimpleQueue:
        pytest.skip("waits for ever")

    def call():
        with contextlib.suppress(Empty):
            q.get_nowait()

    for _ in each_boundary(call):
        check_counts(q)


def test_put_into_a_full_queue(q):
    if type(q) is SimpleQueue:
        pytest.skip("has no limit")
    q.put(1)
    q.put(2)

    def call():
        with contextlib.suppress(Full):
            q.put_nowait(3)

    for _ in each_boundary(call):
        assert q.qsize() == 2
    assert drain(q) == [1, 2]
    check_counts(q)


@pytest.mark.parametrize("q", [JoinableQueue], indirect=True)
def test_task_done_and_join(q):
    def prepare():
        q.put({"n": 1})
        assert q.get() == {"n": 1}

    prepare()
    for attempt in each_boundary(q.task_done):
        note("JoinableQueue.task_done", attempt)
        if q._tasks.unfinished:
            assert attempt.raised
            q.task_done()
        check_counts(q)
        prepare()
    q.task_done()
    for attempt in each_boundary(q.join):
        note("JoinableQueue.join", attempt)
        check_counts(q)


@pytest.mark.parametrize("q", [Queue, JoinableQueue], indirect=True)
@pytest.mark.parametrize("call", ["get", "put", "task_done"])
def test_calls_inside_a_call(q, call):
    """A handler gets, puts and marks as done what it can get and put at once; each item comes once."""
    taken, put = [], []

    def done():
        if type(q) is JoinableQueue:
            q.task_done()

    def act():
        q.empty()
        with contextlib.suppress(Empty):
            taken.append(q.get_nowait())
            done()
        with contextlib.suppress(Full):
            q.put_nowait("inside")
            put.append("inside")

    def run():
        if call == "put":
            with contextlib.suppress(Full):
                q.put_nowait("main")
                put.append("main")
        elif call == "get":
            with contextlib.suppress(Empty):
                taken.append(q.get_nowait())
        else:
            done()

    for number in range(2):
        q.put(number)
    taken.append(q.get_nowait())
    for attempt in each_boundary(run, act=act):
        note(f"{type(q).__name__}, calls in {call}", attempt)
        if call == "get" and type(q) is JoinableQueue:  # the handler's and this one, of which one may be done
            with contextlib.suppress(ValueError):
                while q._tasks.unfinished > q.qsize():
                    q.task_done()
        elif call == "put":
            done()
        found = drain(q)
        assert sorted(map(str, [*taken, *found])) == sorted(map(str, [0, 1, *put])), attempt
        if type(q) is JoinableQueue:
            assert q._tasks.unfinished == 0, attempt
            assert not q._held._messages
        check_counts(q)
        taken.clear(), put.clear()
        for number in range(2):
            q.put(number)
        taken.append(q.get_nowait())
    drain(q)
    done()


@pytest.mark.parametrize("call", ["get", "put"])
def test_calls_inside_the_first_call(call):
    """which makes an endpoint: those that do not wait return, or raise `Empty` and `Full`."""
    queues, taken, put = [], [], []

    def act():
        q = queues[-1]
        q.empty()
        with contextlib.suppress(Empty):
            taken.append(q.get_nowait())
        with contextlib.suppress(Empty):
            taken.append(q.get(timeout=0.01))
        with contextlib.suppress(ReentrantError):
            if not q.empty():
                taken.append(q.get())
        with contextlib.suppress(Full):
            q.put_nowait("inside")
            put.append("inside")

    def run():
        if call == "put":
            queues[-1].put("main")
            put.append("main")
        else:
            with contextlib.suppress(Empty):
                taken.append(queues[-1].get_nowait())

    queues.append(Queue())
    for attempt in each_boundary(run, act=act, step=stride(97)):
        note(f"Queue, calls in the first {call}", attempt)
        found = drain(queues[-1])
        assert sorted(taken + found) == sorted(put), attempt
        queues[-1].close()
        queues[:] = [Queue()]
        taken.clear(), put.clear()
    queues.pop().close()
    gc.collect()
    assert files() == []


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("kind", KINDS)
def test_making_one(kind, method):
    kind(ctx=method).close()
    for attempt in each_boundary(lambda: kind(ctx=method), step=stride(97)):
        note(f"{kind.__name__}(ctx={method!r})", attempt)
        if attempt.result is not None:
            attempt.result.close()
            attempt.result = None
        gc.collect()
        with contextlib.closing(kind(ctx=method)) as q:  # which sweeps
            q.put(1)
            assert q.get() == 1
        assert files() == [], attempt


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # of the standard library's Pipe
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("duplex", [True, False])
def test_making_a_pipe(duplex, method):
    make = get_context(method).Pipe
    for attempt in each_boundary(lambda: make(duplex), step=stride(97), may_leave=("socket", "pipe")):
        note(f"Pipe({duplex})", attempt)
        for end in attempt.result or ():
            end.close()
        attempt.result = end = None
        gc.collect()
        reader, writer = make(duplex)  # which sweeps
        writer.send(np.arange(9))
        assert reader.recv().sum() == 36
        reader.close(), writer.close()
        assert files() == [], attempt


@pytest.mark.parametrize("what", ITEMS)
def test_sending_through_a_pipe(what):
    """An object comes whole and once or, if its `send` was interrupted, perhaps not at all; no slot stays taken."""
    item = ITEMS[what]
    reader, writer = get_context("fork").Pipe(False)
    for _ in range(2):
        writer.send(item)
        assert same(reader.recv(), item)

    def rest() -> list:
        writer.send("end")
        found = [reader.recv()]
        while type(found[-1]) is not str:
            found.append(reader.recv())
        return found[:-1]

    for attempt in each_boundary(lambda: writer.send(item)):
        note(f"Connection.send, {what}", attempt)
        found = rest()
        assert len(found) == 1 or (attempt.raised and not found), attempt
        assert all(same(each, item) for each in found)
        del found
    writer.send(item)
    for attempt in each_boundary(lambda: reader.recv()):
        note(f"Connection.recv, {what}", attempt)
        found = rest()
        if attempt.raised:
            assert len(found) == 1, attempt
            assert same(found.pop(), item)
        else:
            assert same(attempt.result, item)
            assert not found
        attempt.result = None
        writer.send(item)
        assert reader.poll()
    rest()

    def is_free() -> bool:
        """A view whose end was interrupted is found by the next liveness check."""
        writer.send(item)
        reader.recv()
        gc.collect()
        sender, receiver = writer._slots.made_putter, reader._slots._getter
        return sender is None or (sender.is_consumed() and receiver._leases() == 0)

    wait_until(is_free)
    reader.close()
    writer.close()
    gc.collect()
    assert files() == []


def used_pipe():
    """A pipe whose slots are in use, too."""
    reader, writer = get_context("fork").Pipe(False)
    for item in ITEMS.values():
        writer.send(item)
        assert same(reader.recv(), item)
    return reader, writer


@pytest.mark.parametrize("inside", ["object", "array", "bytes"])
@pytest.mark.parametrize("what", ITEMS)
def test_sending_inside_a_send(what, inside):
    """Everything arrives once; an array inside a `send` does, or is refused."""
    item, refused = ITEMS[what], []

    def act():
        if inside == "bytes":
            writer.send_bytes(pickle.dumps("inside"))
        elif inside == "object":
            writer.send("inside")
        else:
            try:
                writer.send(np.arange(3))
            except ReentrantError:
                refused.append(True)

    reader, writer = used_pipe()
    with reader, writer:
        for attempt in each_boundary(lambda: writer.send(item), act=act):
            note(f"Connection.send, {inside} in {what}", attempt)
            writer.send("end")
            found, nested = [], 0
            while True:
                got = reader.recv()
                if type(got) is str and got == "end":
                    break
                if np.array_equal(got, np.arange(3) if inside == "array" else "inside"):
                    nested += 1
                else:
                    found.append(got)
            assert nested == (attempt.reached and not refused), attempt
            assert len(found) == 1, attempt
            assert same(found[0], item)
            refused.clear()
            del found, got
    gc.collect()
    assert files() == []


@pytest.mark.parametrize("what", ITEMS)
def test_receiving_inside_a_recv(what):
    """The handler's gets one of the two objects, or is refused; none is lost."""
    item, taken = ITEMS[what], []

    def act():
        with contextlib.suppress(ReentrantError):
            taken.append(reader.recv())

    def send():
        writer.send(item)
        writer.send("second")

    reader, writer = used_pipe()
    with reader, writer:
        send()
        for attempt in each_boundary(lambda: reader.recv(), act=act):
            note(f"Connection.recv in recv, {what}", attempt)
            taken.append(attempt.result)
            if len(taken) == 1:
                taken.append(reader.recv())
            taken.sort(key=lambda got: type(got) is str)
            assert same(taken[0], item), attempt
            assert taken[1] == "second"
            assert not reader.poll()
            attempt.result = None
            taken.clear()
            send()
    gc.collect()
    assert files() == []


@pytest.mark.parametrize("what", ["small", "large"])
def test_closing_inside_a_send(what):
    """The interrupted call ends with an error, or has sent the object whole; nothing stays."""
    ends = []

    def send():
        with contextlib.suppress(OSError, ClosedError):
            ends[1].send(ITEMS[what])

    def make():
        ends[:] = get_context("fork").Pipe(False)
        ends[1].send(ITEMS[what])
        assert same(ends[0].recv(), ITEMS[what])

    make()
    for attempt in each_boundary(send, act=lambda: ends[1].close(), step=stride(7)):
        note(f"Connection.close in send, {what}", attempt)
        ends[1].close()
        try:
            assert same(ends[0].recv(), ITEMS[what])
        except EOFError:
            assert attempt.reached
        ends[0].close()
        ends.clear()
        gc.collect()
        assert files() == [], attempt
        make()
    for end in ends:
        end.close()


@pytest.mark.parametrize("kind", KINDS)
def test_close(kind):
    queues = []

    def make():
        q = kind()
        q.put(1)
        assert q.get() == 1
        queues.append(q)

    make()
    for attempt in each_boundary(lambda: queues[-1].close(), step=stride(97)):
        note(f"{kind.__name__}.close", attempt)
        queues[-1].close()
        with pytest.raises(ValueError, match="closed"):
            queues[-1].put(1)
        queues.clear()
        gc.collect()
        assert files() == [], attempt
        make()
    queues.pop().close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a callback of a weak reference
@pytest.mark.parametrize("kind", KINDS)
def test_signals_at_random(kind):
    """Puts and gets in turns, each with an alarm on its way: every number comes once, in order."""
    with contextlib.closing(kind()) as q, random_signals(1, longest=2e-3) as arm:
        sent = received = interrupted = 0
        q.put("first")  # makes the endpoints, which takes longer than any alarm
        assert q.get() == "first"
        if kind is JoinableQueue:
            q.task_done()
        while interrupted < random_count(150):
            item = [sent, ITEMS["array"]] if sent % 2 else sent
            interrupted += interrupted_at_random(arm, lambda item=item: q.put(item))[0]
            q.put("end")  # what was interrupted is there before it, or not at all
            found = []
            while "end" not in found:
                hit, got = interrupted_at_random(arm, lambda: q.get())
                interrupted += hit
                if got is not None:
                    found.append(got[0] if isinstance(got, list) else got)
                    if kind is JoinableQueue:
                        q.task_done()
            assert found in (["end"], [sent, "end"]), (sent, found)
            received += len(found) - 1
            sent += 1
        assert received > 0
        assert q.empty()
