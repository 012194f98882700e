"""Asynchronous exceptions, at every boundary at which CPython can deliver one.

The interpreter looks for signals, and for exceptions that another thread has set, at a function's entry, at the end of
a call and at a jump back. Here it does the looking itself: a signal is pending at each of them, its handler is a C
function that counts, and at the n-th it raises. So the enumeration is what this interpreter really does, in the
library's code and in the standard library's, and in C functions that look for signals themselves.

    for attempt in each_boundary(call):     # call() is run again and again, interrupted at boundary 1, 2, 3, ...
        ...                                 # after each: whatever must hold

With `each_boundary(call, act=act)` nothing is raised there: the handler calls `act()`, and `call` goes on.

An exception that is raised in a finalizer or a weak reference's callback is swallowed by the interpreter, as always;
`attempt.swallowed` tells.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import shmtensor.endpoints.wait_queue  # noqa: F401  # here, as an interrupted import leaves files open: importlib's matter
from shmtensor import native

SOAK = bool(os.environ.get("SHMTENSOR_SOAK"))
SIGNAL = signal.SIGUSR1
_SOURCE = """
extern int PyErr_SetInterruptEx(int);
extern void PyErr_SetNone(void *);
extern void *PyObject_CallObject(void *, void *);
extern void Py_DecRef(void *);
long counted, target, stopped;
void *exception, *act;
void on_signal(int number, void *frame) {
    (void)frame;
    if (stopped) return;
    if (++counted == target) {
        if (act) Py_DecRef(PyObject_CallObject(act, 0)); /* what it raises goes on */
        else PyErr_SetNone(exception);
    } else PyErr_SetInterruptEx(number); /* at the next boundary again */
}
"""


class Interrupt(BaseException):
    """What is raised: nobody's `except Exception` catches it."""


@dataclass
class Attempt:
    """One run of a call that was interrupted at boundary `at`."""

    at: int
    reached: bool
    """Whether there is such a boundary; the last attempt's call ran to its end."""
    raised: bool
    """Whether the exception came out of the call."""
    swallowed: bool
    """Whether it was raised where the interpreter swallows it: in a finalizer, in the callback of a weak reference."""
    result: Any


@functools.cache
def _helper() -> Any:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler: boundaries cannot be enumerated")
    with tempfile.TemporaryDirectory() as directory:
        source, library = Path(directory, "interrupts.c"), Path(directory, "interrupts.so")
        source.write_text(_SOURCE)
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        helper = ctypes.PyDLL(str(library))
    helper.on_signal.argtypes, helper.on_signal.restype = (ctypes.c_int, ctypes.py_object), None
    ctypes.c_void_p.in_dll(helper, "exception").value = id(Interrupt)
    return helper


def interrupted(call: Callable[[], Any], at: int, act: Callable[[], object] | None = None) -> Attempt:
    """Run `call`, in the main thread, with an `Interrupt`, or a call of `act`, at its `at`-th boundary."""
    helper = _helper()
    counted, target, stopped = (ctypes.c_long.in_dll(helper, name) for name in ("counted", "target", "stopped"))
    attempt = Attempt(at, False, False, False, None)

    def unraisable(what: Any) -> None:
        if isinstance(what.exc_value, Interrupt):
            attempt.swallowed = True
        else:
            strange.append(f"{what.err_msg or 'ignored in'} {what.object!r}: {what.exc_value!r}")

    strange: list[str] = []
    before, hook = signal.signal(SIGNAL, helper.on_signal), sys.unraisablehook
    sys.unraisablehook = unraisable
    target.value, stopped.value = -1, 0
    ctypes.c_void_p.in_dll(helper, "act").value = None if act is None else id(act)
    try:
        try:
            ctypes.pythonapi.PyErr_SetInterruptEx(int(SIGNAL))
            counted.value, target.value = 0, at
            attempt.result = call()
        finally:  # no call, no boundary
            stopped.value = 1
            attempt.reached = counted.value >= at
    except Interrupt as error:
        attempt.raised = True
        error.__traceback__ = None  # its frames keep what they refer to alive
    finally:
        sys.unraisablehook = hook
        signal.signal(SIGNAL, before)
    assert not strange, strange
    return attempt


@functools.cache
def skips_handlers() -> bool:
    """Whether an exception that arrives where another one is passing may leave out a `finally` or the end of a `with`.

    CPython 3.10 looks for signals before the first instruction of a handler, where that handler is entered already. A
    lock may stay locked then, the standard library's own as well.
    """
    lock = threading.Lock()

    def fail() -> None:
        with contextlib.suppress(ValueError), lock:
            int("no number")

    return any(attempt.raised and lock.locked() for attempt in each_boundary(fail))


@functools.cache
def loses_results() -> bool:
    """Whether an exception may arrive between a function's return and what its caller does with the result.

    So it is in CPython 3.10. A message that an interrupted `recv` returned counts as received then.
    """
    state = {"box": 1}

    def give() -> int:
        found = state["box"]
        del state["box"]
        return found

    def take() -> None:
        state["kept"] = give()

    lost = False
    for _ in each_boundary(take):
        lost |= not state
        state.clear()
        state["box"] = 1
    return lost


def stride(usual: int) -> int:
    """From one boundary that is tried to the next: a usual run tries each `usual`-th, the soak run every one."""
    return 1 if SOAK else usual


def random_count(usual: int) -> int:
    """How many signals at random moments interrupt a call: 10,000 in the soak run."""
    return 10_000 if SOAK else usual


def each_boundary(
    call: Callable[[], Any],
    *,
    first: int = 1,
    step: int = 1,
    may_leave: tuple[str, ...] = ("socket",),
    act: Callable[[], object] | None = None,
) -> Iterator[Attempt]:
    """`call` again and again, each time interrupted one boundary later, until one runs to its end.

    With `act` it is interrupted by a call of that, otherwise by an `Interrupt`.

    Checks that no attempt has left a file open, but for kinds in `may_leave`: ZeroMQ keeps pairs of sockets, and the
    standard library's own functions can be interrupted, too. (The library's segments are checked after each test.)
    """
    gc.collect()
    at, before = first, open_files()
    while True:
        attempt = interrupted(call, at, act)
        yield attempt
        if not attempt.reached:
            break
        at += step
    gc.collect()
    left = {what: more for what, more in (open_files() - before).items() if what not in may_leave}
    assert not left, left


def open_files() -> collections.Counter[str]:
    """How many descriptors of this process lead to each file, or to pipes or sockets; but not to its segments."""
    found: collections.Counter[str] = collections.Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}").partition(":")[0]
            if target.endswith(" (deleted)") and "/shmtensor." not in target:
                target = "deleted"  # a temporary file
            if "/shmtensor." not in target and "/fd" not in target:
                found[target] += 1
    return found


counts: dict[str, dict[str, int]] = {}
"""Of each call how many boundaries it has: by implementation."""


def note(call: str, attempt: Attempt) -> None:
    """How many boundaries a call has had: see `write_counts` in `tests/conftest.py`."""
    of_call = counts.setdefault(call, {})
    implementation = "compiled" if native.module is not None else "Python"
    of_call[implementation] = max(of_call.get(implementation, 0), attempt.at - 1)


def interrupted_at_random(arm: Callable[..., bool], call: Callable[[], Any]) -> tuple[bool, Any]:
    """Run `call` with an alarm of `random_signals` on its way: whether that came out of it, and what it returned."""
    result = None
    try:
        try:
            arm()
            result = call()
        finally:
            arm(False)
    except Interrupt:
        return True, result
    return False, result


@contextlib.contextmanager
def random_signals(seed: int, longest: float = 200e-6) -> Iterator[Callable[[], bool]]:
    """In the block, what `arm()` arms is one alarm within `longest` seconds, whose handler raises `Interrupt`.

    `arm(False)` disarms; whatever arrives late is dropped. One that a finalizer swallows is followed by another: what
    is to be interrupted may go on for ever else.
    """
    dice, armed, wanted = random.Random(seed), False, False

    def on_alarm(number: int, frame: Any) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise Interrupt

    def arm(on: bool = True) -> bool:
        nonlocal armed, wanted
        wanted = on
        was, armed = armed, on
        signal.setitimer(signal.ITIMER_REAL, dice.uniform(1e-6, longest) if on else 0)
        return was

    def unraisable(what: Any) -> None:
        if not isinstance(what.exc_value, Interrupt):  # in a finalizer it is swallowed, as always
            sys.__unraisablehook__(what)
        elif wanted:
            arm()

    before, hook = signal.signal(signal.SIGALRM, on_alarm), sys.unraisablehook
    sys.unraisablehook = unraisable
    try:
        yield arm
    finally:
        armed = False
        sys.unraisablehook = hook
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
