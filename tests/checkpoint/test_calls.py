"""Calls of a `CheckpointWriter` that something comes between: callbacks that block and call, handlers, exceptions at
every boundary at which the interpreter can deliver one."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import logging
import os
import signal
import threading
import weakref

import numpy as np
import pytest

import shmtensor
from shmtensor import CheckpointWriter, load_arrays
from shmtensor.checkpoint import names, slots
from shmtensor.checkpoint.handle import Durable, Outcome, SaveHandle
from shmtensor.shielded import Call, CallQueue, Flag

from ..conftest import descriptors, shared_files
from ..faults.interrupts import each_boundary, interrupted, interrupted_at_random, random_count, random_signals, stride
from ..waiting import wait_until

PATIENCE = 120.0

pytestmark = pytest.mark.usefixtures("own_channels")


@pytest.fixture
def own_channels(monkeypatch, channel):
    """Channel names that the leak check knows as this run's own."""
    monkeypatch.setattr(names, "PREFIX", channel)


def state_of(number: int, elements: int = 20_000) -> dict:
    return {"w": np.full(elements, number), "step": number}


def is_whole(path) -> bool:
    state = load_arrays(path, verify="all")
    return bool((state["w"] == state["step"]).all())


@contextlib.contextmanager
def nothing_written(writer):
    """Within it no save becomes durable: a callback that is added here is called later, by the thread for callbacks.
    (One that is added to a future that is done is called at once, by whoever adds it.)"""
    writer.start(timeout=PATIENCE)
    pid = writer.statistics().pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


# --- callbacks


def test_a_callback_that_blocks_holds_up_no_save(tmp_path):
    go, entered = threading.Event(), threading.Event()

    def upload(future):
        entered.set()
        assert go.wait(PATIENCE)

    with CheckpointWriter(tmp_path, memory="4MiB") as writer:
        with nothing_written(writer):
            first = writer.save(state_of(1))
            first.durable.add_done_callback(upload)
        assert first.durable.result(PATIENCE)
        assert entered.wait(PATIENCE)
        for number in (2, 3, 4, 5):  # more than there is room for: they are taken and written meanwhile
            assert writer.save(state_of(number, 100_000)).durable.result(PATIENCE)
        assert writer.statistics().durable == 5
        with pytest.raises(shmtensor.TimedOut):  # everything is written, but a callback is not over
            writer.close(timeout=0.05)
        go.set()


def test_a_callback_that_saves_while_the_writer_closes(tmp_path, caplog):
    """It is refused, which the log says; nothing hangs, and what was saved before is complete."""
    refused = []
    writer = CheckpointWriter(tmp_path, memory="4MiB")

    def save_more(future):
        wait_until(lambda: writer._closed)
        try:
            writer.save(state_of(2))
        except shmtensor.ClosedError as error:
            refused.append(str(error))
            raise

    with nothing_written(writer):
        handle = writer.save(state_of(1))
        handle.durable.add_done_callback(save_more)
    writer.close(PATIENCE)
    assert len(refused) == 1
    assert "is closed" in refused[0]
    assert "a callback of" in caplog.text
    assert is_whole(handle.path)
    assert [name for name in os.listdir(tmp_path) if name.startswith(("step", "save"))] == [handle.name]


@pytest.mark.parametrize("call", ["provide", "fits", "has_room", "pin"])
def test_a_close_in_the_middle_of_a_call_of_the_slots(channel, call, monkeypatch):
    """What a handler or a finalizer does there: the call in progress ends, and then it is closed."""
    stager = slots.Stager(channel, 4 << 20)
    stager.provide(0, 1 << 20)

    def closes(self, *_):
        stager.close()
        assert not stager.closed
        return 0

    where = {"provide": "free_chunks", "fits": "chunks", "has_room": "free_chunks"}.get(call)
    if where is None:
        monkeypatch.setattr(slots.Stager, "_pin_inside", closes)
    else:
        monkeypatch.setattr(slots.ChunkPool, where, closes)
    calls = {"provide": (0, 0), "fits": (1,), "has_room": (1,), "pin": (["cuda:0"],)}
    thread = threading.Thread(target=getattr(stager, call), args=calls[call], daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert stager.closed


def test_callbacks_are_called_in_order_in_one_thread_without_a_lock(tmp_path):
    seen = []

    def note(future):
        writer.statistics(), repr(writer), future.result(0)
        seen.append((threading.current_thread().name, future.result(0).path))

    with CheckpointWriter(tmp_path, memory="8MiB") as writer, nothing_written(writer):
        handles = [writer.save(state_of(number)) for number in range(4)]
        for handle in handles:
            handle.durable.add_done_callback(note)
            handle.durable.add_done_callback(note)
    assert seen == [("shmtensor callbacks", handle.path) for handle in handles for _ in range(2)]  # close waited
    handles[0].durable.add_done_callback(note)  # it is done: here and now, as always
    assert seen[-1] == (threading.current_thread().name, handles[0].path)


def test_a_callback_has_the_result_at_once():
    """Also if the thread for callbacks is faster than the one that has set the result."""

    class Fast:
        def put(self, call):
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()

    seen = []
    for outcome in (Outcome(Fast()), Outcome(Fast())):
        outcome.add_done_callback(lambda future: seen.append((future.result(0), future.exception(0))))
        outcome.set_result("durable")
    assert seen == [("durable", None)] * 2


def test_a_callback_that_saves_and_closes(tmp_path):
    over = threading.Event()

    def go_on(future):
        assert writer.save(state_of(2)).durable.result(PATIENCE)
        writer.close()
        writer.close(timeout=PATIENCE)
        over.set()

    writer = CheckpointWriter(tmp_path)
    with nothing_written(writer):
        writer.save(state_of(1)).durable.add_done_callback(go_on)
    assert over.wait(PATIENCE)
    assert "closed" in repr(writer)
    writer.close(timeout=PATIENCE)
    assert is_whole(tmp_path / "step-00000002")


def test_a_callback_that_saves_while_another_thread_closes(tmp_path):
    """It may or may not come before: it is taken or told, and nobody waits for the other for ever."""
    closing, ended = threading.Event(), []

    def save_again(future):
        assert closing.wait(PATIENCE)
        try:
            ended.append(writer.save(state_of(2), timeout=PATIENCE))
        except shmtensor.ClosedError as error:
            ended.append(error)

    writer = CheckpointWriter(tmp_path)
    with nothing_written(writer):
        writer.save(state_of(1)).durable.add_done_callback(save_again)
    closer = threading.Thread(target=writer.close)
    closer.start()
    closing.set()
    closer.join(PATIENCE)
    assert not closer.is_alive()
    assert len(ended) == 1
    if isinstance(ended[0], SaveHandle):
        assert ended[0].durable.result(PATIENCE)
        assert is_whole(tmp_path / "step-00000002")


def test_a_callback_that_closes_while_another_thread_does(tmp_path):
    ended = threading.Event()
    writer = CheckpointWriter(tmp_path)

    def close_too(future):
        writer.close()
        ended.set()

    with nothing_written(writer):
        writer.save(state_of(1)).durable.add_done_callback(close_too)
    writer.close()
    assert ended.is_set()  # who closes waits for callbacks as well


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_callback_that_raises_is_logged_and_the_others_are_called(tmp_path, caplog, error):
    called = threading.Event()

    def fail(future):
        raise error("no upload today")

    with CheckpointWriter(tmp_path) as writer:
        with nothing_written(writer):
            handle = writer.save(state_of(1))
            handle.durable.add_done_callback(fail)
            handle.durable.add_done_callback(lambda future: called.set())
        assert called.wait(PATIENCE)
        assert writer.save(state_of(2)).durable.result(PATIENCE)
    assert "no upload today" in caplog.text


def test_several_wait_and_the_standard_library_does(tmp_path):
    with CheckpointWriter(tmp_path, memory="8MiB") as writer:
        writer.start(timeout=PATIENCE)
        handles = [writer.save(state_of(number)) for number in range(3)]
        futures = [handle.durable for handle in handles]
        waiters = [threading.Thread(target=futures[0].result, args=(PATIENCE,)) for _ in range(3)]
        for waiter in waiters:
            waiter.start()
        assert concurrent.futures.wait(futures, PATIENCE).not_done == set()
        assert set(concurrent.futures.as_completed(futures, PATIENCE)) == set(futures)
        for waiter in waiters:
            waiter.join(PATIENCE)
            assert not waiter.is_alive()
        with pytest.raises(concurrent.futures.TimeoutError):
            Outcome().result(0)


def test_slots_of_saves_that_stream_come_back_without_the_garbage_collector(tmp_path):
    """Who waited for room kept the error, whose frames kept views of slots: each save lost one of them."""
    gc.collect()
    gc.disable()
    try:
        with CheckpointWriter(tmp_path, memory="1MiB") as writer:
            for number in range(8):
                handle = writer.save(state_of(number, 200_000), timeout=PATIENCE)
            assert handle.durable.result(PATIENCE)
    finally:
        gc.enable()


# --- handlers and finalizers


@pytest.mark.parametrize("what", ["save", "close", "start"])
def test_a_signal_handler_calls_in_the_middle_of_a_save(tmp_path, monkeypatch, what):
    """As a trainer's that is to be preempted does. No call waits for what its own thread holds."""
    handles, errors = [], []

    def on_signal(number, frame):
        try:
            if what == "save":
                handles.append(writer.save(state_of(99)))
            elif what == "start":
                writer.start(timeout=PATIENCE)
            else:
                writer.close()
        except BaseException as error:
            errors.append(error)

    def copy_disturbed(moves, owners):
        if len(disturbed) < 2:
            disturbed.append(len(disturbed))
            if len(disturbed) == 2:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR2)
                wait_until(lambda: len(writer._calls._calls) > 1)  # the handler's call waits for this one
        move_all(moves, owners)

    disturbed, move_all = [], slots.move_all
    monkeypatch.setattr(slots, "move_all", copy_disturbed)
    before = signal.signal(signal.SIGUSR2, on_signal)
    writer = CheckpointWriter(tmp_path, memory="4MiB")
    try:
        handles.extend([writer.save(state_of(1)), writer.save(state_of(2))])
    finally:
        signal.signal(signal.SIGUSR2, before)
        writer.close()
    assert errors == []
    assert len(disturbed) == 2
    assert len(handles) == 3 if what == "save" else 2
    assert [handle.durable.result(0).path for handle in handles] == [handle.path for handle in handles]
    assert all(is_whole(handle.path) for handle in handles)


def test_a_finalizer_in_the_writer_s_own_thread_closes(tmp_path):
    writer = CheckpointWriter(tmp_path)
    handle = writer.save(state_of(1))
    refused = []

    class Finalized:
        def __del__(self):
            try:
                writer.save(state_of(2))
            except shmtensor.ResourceError as error:
                refused.append(error)
            writer.close()

    holder = [Finalized()]
    writer._calls.put(holder.clear)
    writer.close(timeout=PATIENCE)
    assert "own threads" in str(refused[0])
    assert handle.durable.result(0)


def test_a_writer_that_was_never_used_and_is_dropped_lets_go_of_its_directory(tmp_path):
    writer = CheckpointWriter(tmp_path)
    dropped = weakref.ref(writer)
    del writer
    gc.collect()
    assert dropped() is None
    CheckpointWriter(tmp_path).close()


# --- the pieces


def test_a_call_s_error_and_result_arrive_and_its_thread_ends():
    queue = CallQueue("test calls")
    with pytest.raises(ZeroDivisionError):
        run(queue, lambda call: 1 / 0)
    assert run(queue, lambda call: threading.current_thread().name) == "test calls"
    assert not queue.is_here
    assert run(queue, lambda call: queue.is_here)
    queue.stop()
    wait_until(lambda: queue.is_idle)
    assert run(queue, lambda call: 7) == 7  # there is another one
    queue.stop()
    wait_until(lambda: queue.is_idle)


def run(queue, function, deadline=None):
    call = Call(function)
    try:
        queue.put(call)
        return call.wait(deadline, lambda: "busy", queue)
    except BaseException:
        call.abandon()
        raise


def test_a_call_behind_another_one_times_out_and_is_not_made(monkeypatch):
    queue, go, made = CallQueue("test calls"), threading.Event(), []
    queue.put(go.wait)
    with pytest.raises(shmtensor.TimedOut, match="busy"):
        run(queue, lambda call: made.append(1), deadline=0.0)
    go.set()
    assert run(queue, lambda call: 7) == 7
    assert made == []
    for _ in range(100):  # nothing is before it: its thread may take as long as it likes to begin
        assert run(queue, lambda call: 8, deadline=0.0) == 8
    queue.stop()
    wait_until(lambda: queue.is_idle)


def test_every_boundary_of_a_call():
    """Made once or not at all, and the queue goes on."""
    queue, made = CallQueue("test calls"), []
    for attempt in each_boundary(lambda: run(queue, lambda call: made.append(1))):
        assert run(queue, lambda call: len(made)) in (0, 1)
        assert attempt.reached or made == [1]
        made.clear()
    queue.stop()
    wait_until(lambda: queue.is_idle)
    assert attempt.at > 10


@pytest.mark.parametrize("failed", [False, True])
def test_every_boundary_of_a_wait_on_a_future(failed):
    """Another thread can end it, and others can wait for it; an error counts as told only if it was raised."""

    def wait_for():
        try:
            return future.result(PATIENCE)
        except OSError as error:
            return error

    at, reached = 0, True
    while reached:
        at += 1
        future = Outcome(None)
        error = OSError(5, "disk")
        ender = threading.Thread(target=end, args=(future, error if failed else None))
        ender.start()
        attempt = interrupted(wait_for, at)
        ender.join(PATIENCE)
        assert not ender.is_alive()
        if not attempt.raised:
            assert attempt.result is error if failed else isinstance(attempt.result, Durable)
        elif failed:
            assert not (future.error_seen and attempt.result is None and not in_handler(attempt))
        assert future.exception(0) is (error if failed else None)
        assert concurrent.futures.wait([future], PATIENCE).done == {future}
        reached = attempt.reached
    assert at > 5


def in_handler(attempt) -> bool:
    """The harness raises in the test's own `except` clause as well, after the error has arrived there."""
    return attempt.raised


def end(future, error):
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(Durable("p", 1, 1.0, ""))


def test_a_flag_is_set_cleared_and_waited_for():
    flag = Flag()
    assert not flag.wait(0)
    assert not flag.wait(0.001)
    flag.set()
    assert flag.wait(0)
    flag.clear()
    setter = threading.Timer(0.01, flag.set)
    setter.start()
    assert flag.wait(PATIENCE)
    setter.join()


# --- an exception at every boundary of the public calls


def test_every_boundary_of_the_constructor(tmp_path):
    """The directory is free at once, and nothing is left."""
    before = descriptors()
    for attempt in each_boundary(lambda: CheckpointWriter(tmp_path / "a" / "b")):
        attempt.result = None
        gc.collect()
        assert descriptors() == before
        CheckpointWriter(tmp_path / "a" / "b").close()
    assert attempt.at > 100


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_boundary_of_save(tmp_path):
    """The next save is taken; each file is whole; a save that was reported is durable; nothing is left."""
    with CheckpointWriter(tmp_path, memory="4MiB", keep_last=3) as writer:
        writer.start(timeout=PATIENCE)
        state, handles, count = state_of(0), [], 0

        def save():
            handles.append(writer.save(state))

        for attempt in each_boundary(save):
            count += 1
            state["w"][:] = state["step"] = attempt.at  # whatever was not taken yet must not reach a file
            if attempt.at % 10 == 1 or not attempt.reached:
                assert is_whole(writer.save(state, timeout=PATIENCE).durable.result(PATIENCE).path)
        for handle in handles:
            handle.durable.exception(PATIENCE)
            assert handle.status == "durable"
        assert count > 100
    counts = writer.statistics()
    assert counts.failed == 0
    assert counts.restarts == 0
    for path in tmp_path.glob("step-*"):
        assert is_whole(path)
    assert not [name for name in os.listdir(tmp_path) if name.endswith((".tmp", ".log"))]
    assert shared_files() == set()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_boundary_of_a_first_save_and_of_close(tmp_path):
    """Each of them is followed by a save or a close that works: never two processes, never a lost slot."""

    def first_save():
        writer.save(state_of(1))

    def close():
        writer.close()

    for number, (call, step) in enumerate([(first_save, stride(43)), (close, stride(7))]):
        at, reached = 1 + number, True
        while reached:
            path = tmp_path / f"{call.__name__}-{at}"
            writer = CheckpointWriter(path, memory="2MiB")
            if call is close:
                handle = writer.save(state_of(1))
            attempt = interrupted(call, at)
            reached = attempt.reached
            if call is close:
                assert attempt.raised or not attempt.reached
                writer.close(timeout=PATIENCE)
                assert handle.durable.result(0)
            else:
                assert is_whole(writer.save(state_of(2), timeout=PATIENCE).durable.result(PATIENCE).path)
                writer.close(timeout=PATIENCE)
            assert writer.statistics().failed == 0
            assert shared_files() == set()
            assert not [name for name in os.listdir(path) if name.endswith((".tmp", ".log"))]
            at += step
        assert at > 3 * step


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_boundary_of_start(tmp_path):
    writer = CheckpointWriter(tmp_path, memory="2MiB")
    may_leave = ("socket", "anon_inode", "deleted", "/memfd")  # once the writing process is there: a pidfd, log, orders
    for _ in each_boundary(lambda: writer.start(state_of(0), timeout=PATIENCE), may_leave=may_leave):
        pass
    assert is_whole(writer.save(state_of(1)).durable.result(PATIENCE).path)
    assert writer.statistics().restarts == 0
    writer.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_random_signals_in_saves(tmp_path):
    """What was reported is durable; what was not is whole or not there."""
    count = random_count(300)
    reported, raised = [], 0
    with CheckpointWriter(tmp_path, memory="8MiB", keep_last=4) as writer, random_signals(7, 2e-3) as arm:
        writer.start(timeout=PATIENCE)
        for number in range(1, count + 1):
            state = state_of(number, 2000)

            def save(state=state):
                reported.append(writer.save(state, timeout=PATIENCE))

            if number % 3:
                raised += interrupted_at_random(arm, save)[0]
            else:
                save()
            state["w"][:] = -1  # must not reach a file
        for handle in reported:
            handle.durable.exception(PATIENCE)
    assert {handle.status for handle in reported} <= {"durable"}
    assert raised > 0
    assert len(reported) >= count // 3
    assert writer.statistics().failed == 0
    for path in tmp_path.glob("step-*"):
        assert is_whole(path)


def test_an_error_that_nobody_was_told_is_not_lost_with_the_call_that_would_have_told_it(tmp_path, monkeypatch):
    """It is raised by exactly one of the saves after it, and nothing is saved by that."""
    logging.getLogger("shmtensor")
    at, reached = 1, True
    with CheckpointWriter(tmp_path / "a") as writer:
        writer.start(timeout=PATIENCE)
        while reached:
            (tmp_path / "a").rename(tmp_path / "gone")
            failing = writer.save(state_of(at))
            writer._saves.wait(None)
            assert failing.status == "failed"
            (tmp_path / "gone").rename(tmp_path / "a")
            told = []

            def save(told=told, number=at):
                try:
                    writer.save(state_of(number))
                except OSError as error:
                    told.append(error)

            attempt = interrupted(save, at)
            reached = attempt.reached
            if not told:
                assert attempt.raised
                if not failing.durable.error_seen:
                    with pytest.raises(OSError, match="No such file"):
                        writer.save(state_of(at))
            at += stride(11)
        assert writer.save(state_of(at)).durable.result(PATIENCE)


def test_a_time_out_of_0_saves_where_there_is_room(tmp_path):
    state = {"x": np.ones(100), "step": 1}
    with CheckpointWriter(tmp_path, memory="8MiB") as writer:
        handles = [writer.save(state, timeout=0) for _ in range(10)]
        assert [handle.durable.result(PATIENCE).nbytes > 800 for handle in handles] == [True] * 10
        writer.start(timeout=0)
        writer.close(timeout=0)
