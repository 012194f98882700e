"""Deaths that the fault matrix has no point for: inside a copy, inside a loan, of a sweeper, at the interpreter's end.

And stopped processes, which are not dead: what they hold stays theirs, and others go on.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time

import numpy as np
import pytest

import shmtensor
from shmtensor.channel import cleanup, membership
from shmtensor.channel.names import socket_dir

from ..scenes import PAIRS, PATIENCE, Fellow, files, pair_of
from ..waiting import wait_until
from . import build
from .matrix import cases
from .process import crash_servers

pytestmark = pytest.mark.slow

BOTH = pytest.mark.parametrize("names", PAIRS, ids="-".join)
POINTS = "from tests.faults import points; points.arm({point!r}, {action!r}, {nth})\n"
START = "import os, signal, sys, threading, numpy as np, shmtensor; channel = sys.argv[1]\n"

LEAVE = {
    "kill": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "terminate": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "abort": ("os.abort()", -signal.SIGABRT),
    "_exit": ("os._exit(3)", 3),
    "exit": ("sys.exit(4)", 4),
    "exception": ("sys.excepthook = lambda *_: None; raise RuntimeError", 1),
}
"""How a process ends, and its exit code."""


ENDS_OF_AN_INTERPRETER = ("exit", "exception")
"""Those of an interpreter of its own; the others need none, so that their processes are forked."""


@pytest.fixture(scope="module")
def servers():
    """By whether it has the compiled module, a context whose processes have the package's crash points."""
    with crash_servers("numpy") as of:
        yield of


@pytest.fixture
def forks(servers):
    """By the implementation that is in use."""
    return servers(build.POSSIBLE)


def all_of(rx) -> list[int]:
    """Everything until the end of the stream."""
    got = []
    with contextlib.suppress(shmtensor.EndOfStream):
        while True:
            got.append(int(rx.recv(timeout=PATIENCE).value.flat[0]))
    return got


def collect() -> None:
    cleanup.sweep_all(socket_dir(), patience=PATIENCE)


# --- senders

COPIER = (
    START
    + """
data = np.empty({size}, np.uint8)
tx = shmtensor.{make}(channel, slots=1, slot_bytes={size})
print("joined", flush=True)
for number in range(1, 255):
    data.fill(number)
    tx.send(data)
"""
)


@BOTH
def test_killed_in_the_middle_of_a_large_copy(forks, channel, names):
    """Stopped with half of the payload written, then killed: nobody has seen any of it."""
    size = 256 << 20
    with pair_of(names)[1](channel) as rx:
        victim = Fellow(COPIER.format(size=size, make=names[0]), channel, forks=forks)
        victim.listen("joined")
        deadline = time.monotonic() + 2 * PATIENCE
        for number in range(1, 255):
            msg = rx.recv(timeout=PATIENCE)
            slot = np.frombuffer(rx._readers[0].rings[0].buffer, np.uint8)[:size:4096]
            assert (slot == number).all()
            msg.release()
            del msg
            while slot[0] == number and slot[-1] == number and time.monotonic() < deadline:
                os.sched_yield()
            victim.signal(signal.SIGSTOP)
            victim.stopped()
            if (slot == number).any():
                break
            victim.signal(signal.SIGCONT)  # it had been faster
        assert (slot == number + 1).any()
        with pytest.raises(shmtensor.TimedOut):
            rx.recv(timeout=0)
        victim.kill()
        with pytest.raises(shmtensor.EndOfStream):
            rx.recv(timeout=PATIENCE)
        del slot
    assert not files(channel)


LENDER = (
    START
    + """
with shmtensor.{make}(channel, slots=2) as tx:
    tx.{wait}(1, timeout=60)
    tx.send(np.full(1000, 1))
    with tx.loan((1000,), np.int64) as loan:
        loan.array[:500] = 2
        {end}
"""
)


@BOTH
@pytest.mark.parametrize("end", LEAVE)
def test_death_inside_a_loan(forks, channel, names, end):
    with pair_of(names)[1](channel) as rx:
        wait = "wait_for_subscribers" if names[0] == "Publisher" else "wait_for_consumers"
        code = LENDER.format(make=names[0], wait=wait, end=LEAVE[end][0])
        lender = Fellow(code, channel, forks=None if end in ENDS_OF_AN_INTERPRETER else forks)
        assert all_of(rx) == [1]
        lender.end(LEAVE[end][1])
    assert not files(channel)


@BOTH
def test_an_exception_inside_a_loan_is_survived(channel, names):
    make, take = pair_of(names)
    with make(channel, slots=2) as tx, take(channel) as rx:
        for number in range(5):
            with contextlib.suppress(ZeroDivisionError), tx.loan((3,), np.int64, timeout=PATIENCE) as loan:
                loan.array[...] = 1 // 0
            assert loan.seq == 0
            tx.send(np.full(3, number), timeout=PATIENCE)
            assert int(rx.recv(timeout=PATIENCE).value[0]) == number


STOPPED = (
    POINTS + START + "tx = shmtensor.{make}(channel, slots=4)\nfor n in range(1, 6): tx.send(np.array(n))\ntx.close()"
)


@BOTH
@pytest.mark.parametrize(
    ("implementation", "point", "action", "nth"),
    cases(["send.acquired", "publish.record", "publish.ordered", "publish.published"], ["stop"], [3]),
)
def test_a_sender_stopped_while_publishing(servers, channel, names, implementation, point, action, nth):
    """The others' messages go on; its own come, in order, when it does."""
    forks = servers(implementation == "compiled")
    first = 1 if (implementation, point) == ("compiled", "send.acquired") else 0  # in Python: a ring has to be made
    make, take = pair_of(names)
    with take(channel) as rx, make(channel, slots=2) as other:
        code = STOPPED.format(point=point, action=action, nth=nth - first, make=names[0])
        victim = Fellow(code, channel, forks=forks)
        victim.stopped()
        got = []
        for number in range(100, 150):
            other.send(np.array(number), timeout=PATIENCE)
            while not got or got[-1] != number:
                got.append(int(rx.recv(timeout=PATIENCE).value))
        other.close()
        assert set(got) - set(range(100, 150)) == ({1, 2, 3} if point == "publish.published" else {1, 2})
        victim.signal(signal.SIGCONT)
        got += all_of(rx)
        victim.end()
        assert [number for number in got if number < 100] == [1, 2, 3, 4, 5]
    assert not files(channel)


# --- receivers

HOLDER = (
    START
    + """
rx = shmtensor.{take}(channel)
view = rx.recv(timeout=60).value
print("holds", flush=True)
sys.stdin.readline()
{end}
"""
)


@pytest.mark.filterwarnings("ignore:.*that no consumer has finished:ResourceWarning")  # on purpose
@BOTH
@pytest.mark.parametrize("end", LEAVE)
def test_death_with_a_view_alive(forks, channel, names, end):
    """The sender that it holds up goes on; on a work queue its message goes to another."""
    make, take = pair_of(names)
    with make(channel, slots=1) as tx:
        code = HOLDER.format(take=names[1], end=LEAVE[end][0])
        victim = Fellow(code, channel, forks=None if end in ENDS_OF_AN_INTERPRETER else forks)
        tx._wait_for_receivers(1, PATIENCE, "receivers")
        tx.send(np.array(1))
        victim.listen("holds")
        victim.say()
        victim.end(LEAVE[end][1])
        if names[0] == "Producer":
            with take(channel) as rx:
                msg = rx.recv(timeout=PATIENCE)
                assert (int(msg.value), msg.attempt) == (1, 2)
                msg.release()
                del msg
        tx.send(np.array(2), timeout=PATIENCE)
    assert not files(channel)


@BOTH
@pytest.mark.parametrize("close", ["rx.close(); ", ""])
def test_death_of_the_last_receiver_with_views_alive(forks, channel, names, close):
    """Nobody is left who could notice: the next sweep removes everything, not before."""
    tx = pair_of(names)[0](channel, slots=2)
    code = HOLDER.format(take=names[1], end=f"{close}print('closed', flush=True); signal.pause()")
    victim = Fellow(code, channel, forks=forks)
    tx._wait_for_receivers(1, PATIENCE, "receivers")
    tx.send(np.array(1))
    victim.listen("holds")
    victim.say()
    victim.listen("closed")
    tx.close()
    collect()
    assert files(channel)
    victim.kill()
    collect()
    assert not files(channel)


# --- sweepers

SWEEPER = (
    POINTS
    + """
import os, signal, sys
from shmtensor.channel import cleanup
from shmtensor.channel.names import socket_dir
from tests.waiting import wait_for_end

really, alive = cleanup._sweep_locked, [int(pid) for pid in sys.argv[2:]]
def sweep_locked(*args, **options):
    while alive:  # till now, so that nobody else can sweep them
        os.kill(pid := alive.pop(), signal.SIGKILL)
        wait_for_end(pid)
    return really(*args, **options)

cleanup._sweep_locked = sweep_locked
for channel in sys.argv[1], sys.argv[1] + "-dead":
    cleanup.sweep_channel(channel, socket_dir(), patience=60.0)
"""
)
DEAD = START + "ends = {ends}\nprint('joined', flush=True)\nsignal.pause()"


@BOTH
@pytest.mark.parametrize("action", ["kill", "stop"])
@pytest.mark.parametrize(("point", "nth"), [("sweep.names", 1), ("sweep.names", 2), ("sweep.unlinked", 1)])
def test_death_of_a_sweeper(servers, channel, names, point, nth, action, monkeypatch):
    """Others use the channel meanwhile; the next sweep finishes what it had begun."""
    make, take = pair_of(names)
    with make(channel, slots=2) as tx, take(channel) as rx:
        ends = f"shmtensor.{names[1]}(channel), shmtensor.{names[1]}(channel), shmtensor.{names[0]}(channel)"
        forks = servers(False)
        dying = [Fellow(DEAD.format(ends=ends), name, forks=forks) for name in (channel, channel + "-dead")]
        for fellow in dying:
            fellow.listen("joined")

        def exchange() -> None:
            for number in range(20):
                tx.send(np.array(number), timeout=PATIENCE)
                assert int(rx.recv(timeout=PATIENCE).value) == number

        code = SWEEPER.format(point=point, action=action, nth=nth)
        sweeper = Fellow(code, channel, *(fellow.process.pid for fellow in dying), forks=forks)
        for fellow in dying:
            fellow.end(-signal.SIGKILL)
        if action == "stop":
            sweeper.stopped()
            exchange()
            monkeypatch.setattr(membership, "LOCK_TIMEOUT", 0.1)
            wait_until(lambda: sum(joins(take, name) for name in (channel, channel + "-dead")) >= 1)
            monkeypatch.undo()
            sweeper.kill()
        else:
            sweeper.end(-signal.SIGKILL)
        exchange()
        collect()
        assert not files(channel + "-dead")
        assert {entry.uid for entry in tx._member.control.members()} == {tx._member.uid, rx._member.uid}
        exchange()
    assert not files(channel)


def joins(take, channel: str) -> bool:
    try:
        take(channel).close()
    except shmtensor.TimedOut as error:
        return "stopped" not in str(error)
    return True


JOINER = (
    POINTS
    + START
    + """
end = shmtensor.{name}(channel)
print("joined", flush=True)
sys.stdin.readline()
end.close()
"""
)


@BOTH
@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("end_of", ["continue", "kill"])
@pytest.mark.parametrize("point", ["join.opened", "join.locked", "join.owned", "join.prepared", "join.entered"])
def test_sweeping_while_another_joins(servers, channel, names, end, point, end_of):
    """Whoever is stopped in the middle of joining is not swept away for good: it goes on, or it dies and is swept."""
    victim = Fellow(JOINER.format(point=point, action="stop", nth=1, name=names[end]), channel, forks=servers(False))
    victim.stopped()
    cleanup.sweep_all(socket_dir())
    if end_of == "kill":
        victim.kill()
    else:
        victim.signal(signal.SIGCONT)
        victim.listen("joined")
        with pair_of(names)[1 - end](channel) as other:
            assert len(list(other._member.peers())) == 1
            collect()
        victim.say()
        victim.end()
    collect()
    assert not files(channel)


# --- threads and the interpreter's end

WAITS = "wait"
BLOCKED = {
    "recv": "shmtensor.{1}(channel).recv()",
    "recv of a started stream": "rx = shmtensor.{1}(channel); tx.send(np.array(1)); rx.recv(); rx.recv()",
    "send": "[tx.send(np.zeros(9)) for _ in range(9)]",
    WAITS: "tx._wait_for_receivers(9, None, 'receivers')",
    "close": "tx.send(np.zeros(9)); tx.close(linger=None)",
}
THREAD = (
    START
    + """
from shmtensor.channel.control import asleep_word
threading.excepthook = lambda args: print(args.exc_type.__name__, flush=True) if args.exc_value else None
tx, keep = shmtensor.{0}(channel, slots=2), shmtensor.{1}(channel)
def body():
    {2}
thread = threading.Thread(target=body, daemon=True)
thread.start()
words = tx._member.control.words
pause = threading.Event()
while not {3}:
    pause.wait(0.001)
"""
)


@BOTH
@pytest.mark.parametrize("call", BLOCKED)
def test_the_interpreter_ends_while_a_thread_waits(channel, names, call):
    """A daemon thread's waiting call ends, and so does the process, with everything cleaned up."""
    is_asleep = "any(words[asleep_word(index)] & 1 for index in range(9))"
    waits = "tx._recipients.listeners" if call == WAITS else is_asleep  # it has looked, and sleeps without a wake-up
    thread = Fellow(THREAD.format(*names, BLOCKED[call].format(*names), waits), channel)
    said = thread.process.stdout.readline().strip()
    thread.end()
    # the stream ends if its sender is closed first; if its receiver is, a work queue's sender says what nobody gets
    assert said in ("ClosedError", "EndOfStream", "ResourceWarning", "")
    assert not files(channel)


HOLDING_THREAD = (
    START
    + """
def body(receiver, held):
    msg = receiver.recv(timeout=60)
    held.set()
    threading.Event().wait()
made = [lambda: shmtensor.{0}(channel), *(lambda: shmtensor.{1}(channel) for _ in range({2}))]
made = [make() for make in (made if {3} else made[::-1])]
tx = next(one for one in made if hasattr(one, "send"))
for receiver in made:
    if receiver is not tx:
        held = threading.Event()
        threading.Thread(target=body, args=(receiver, held), daemon=True).start()
        tx.send(np.ones(9))
        held.wait(60)
"""
)


@BOTH
@pytest.mark.parametrize("sender_first", [True, False])
@pytest.mark.parametrize("receivers", [1, 2])
def test_the_interpreter_ends_while_a_daemon_thread_holds_a_message(channel, names, receivers, sender_first):
    """Its views never die, in whichever order the endpoints close, and whether or not it is the last member then."""
    Fellow(HOLDING_THREAD.format(*names, receivers, sender_first), channel).end()
    assert not files(channel)


DYING_THREAD = (
    START
    + """
threading.excepthook = lambda args: None
def body():
    tx, rx = shmtensor.{0}(channel), shmtensor.{1}(channel)
    tx.send(np.array(1))
    msg = rx.recv(timeout=60)
    raise RuntimeError("the thread dies")
thread = threading.Thread(target=body)
thread.start()
thread.join()
import gc; gc.collect()
left = [name for name in os.listdir("/dev/shm") if "shmtensor." + channel in name]
print(left or "nothing", flush=True)
"""
)


@BOTH
def test_the_thread_that_holds_the_endpoints_dies(channel, names):
    thread = Fellow(DYING_THREAD.format(*names), channel)
    thread.listen("nothing")
    thread.end()
    gc.collect()


def test_descriptors_of_this_file_are_given_back():
    """`Fellow` leaves no pipe behind."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    Fellow("pass").end()
    assert len(os.listdir("/proc/self/fd")) <= before  # what another thread had open may be closed


def test_a_ring_that_went_when_all_was_done_is_no_damage(channel, implementation, caplog):
    """A consumer that has not mapped it yet finds nothing there, and says nothing."""
    with shmtensor.Consumer(channel) as late, shmtensor.Consumer(channel) as rx:
        tx = shmtensor.Producer(channel, slots=1, full="grow")
        tx.send(np.array(1))
        late._refresh()
        late._readers[0].ring(0)  # the first alone
        tx.send(np.array(2))
        tx.close()
        assert all_of(rx) == [1, 2]
        rx.close()
        with pytest.raises(shmtensor.EndOfStream):
            late.recv(timeout=PATIENCE)
        assert late.statistics().bad_records == 0
        assert not caplog.records
