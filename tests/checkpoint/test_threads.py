"""The threads of one call: their results and errors, and who stops whom."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial

import pytest

from shmtensor.checkpoint.threads import Stopped, at_once, in_threads, pause, stopped, waiting

from ..waiting import PATIENCE, wait_until


def alive():
    return [each for each in threading.enumerate() if each.name.startswith("shmtensor checkpoint call")]


@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_results_come_in_order(count):
    assert at_once(lambda number: -number, range(count)) == [-number for number in range(count)]
    assert not alive()


def test_an_error_stops_the_others():
    began, told = threading.Barrier(2), []

    def fails():
        began.wait(PATIENCE)
        raise ZeroDivisionError

    def goes_on():
        began.wait(PATIENCE)
        try:
            pause(PATIENCE)
        finally:
            told.append(stopped())

    never = []
    with pytest.raises(ZeroDivisionError):
        in_threads([fails, goes_on, partial(never.append, 1)], 2)
    assert told == [True]
    assert not never
    assert not stopped()


def test_who_waits_is_left_and_does_nothing_afterwards():
    began, go, after = threading.Event(), threading.Event(), []

    def waits():
        with waiting():
            began.set()
            go.wait(PATIENCE)
        after.append("touches memory")

    def fails():
        began.wait(PATIENCE)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_threads([waits, fails], 2)
    assert not go.is_set()
    go.set()
    wait_until(lambda: not alive())
    assert not after


def test_who_does_not_wait_for_a_server_is_waited_for():
    began, done = threading.Event(), []

    def reads():
        began.set()
        while not stopped():
            pass
        done.append(1)

    def fails():
        began.wait(PATIENCE)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_threads([reads, fails], 2)
    assert done


def test_threads_of_threads_are_stopped_with_them():
    began, told = threading.Barrier(3), []

    def inner():
        began.wait(PATIENCE)
        try:
            pause(PATIENCE)
        except Stopped:
            told.append("inner")
            raise

    def fails():
        began.wait(PATIENCE)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_threads([partial(in_threads, [inner, inner], 2), fails], 2)
    assert told == ["inner", "inner"]


def test_no_thread_can_be_started(monkeypatch):
    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert at_once(lambda number: -number, range(20)) == [-number for number in range(20)]
    with pytest.raises(ZeroDivisionError):
        at_once(lambda number: 1 // number, range(20))
    assert not stopped()


def test_an_error_keeps_nothing_alive():
    class Memory:
        pass

    def call(number):
        if number == 3:
            raise ZeroDivisionError
        return made[number]

    made = [Memory() for _ in range(8)]
    gone = [weakref.ref(each) for each in made]
    gc.disable()
    try:
        with pytest.raises(ZeroDivisionError):
            at_once(call, range(8))
        made.clear()
        wait_until(lambda: not any(each() for each in gone))
    finally:
        gc.enable()
