"""Kill soak: processes that send and receive are killed at random, again and again, and every byte is checked.

    python -m tests.faults.soak --kills 10000 --seconds 3600

runs a fifth of the kills over each of fan-out, group, work queue, request and reply, and `Queue` (plain and joinable
by turns): half of them by SIGKILL at a random moment, of processes with the package as it is installed, half in
processes with a test build (`tests/faults/build.py`), each of which is to die at a crash point of its choice, in C or
in Python, and is killed at a random moment if it does not come by. In each episode two processes live, and several
others die and are replaced all the time, on both sides. What is checked: values are whole and what they should be;
what `send`, `put` or `request` returned for has arrived, in order and once, or as often as its `attempt` says; at the
end of each episode nothing is left in `/dev/shm` and the socket directory. One line at the end says what was done.

This process makes no endpoint while it has children: it forks them, so that a kill costs milliseconds. What they see
they note in memory that is shared with it, before they go on: so it outlives them.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable

PATIENCE = 120.0
PATTERNS = ("fan-out", "group", "work-queue", "rpc", "queue")
VICTIMS = 5
"""How many processes wait for their deaths at a time."""
PER_EPISODE = 125
LIFE_S, EXTRA_S = 0.06, 0.2
"""Seconds that a victim lives on average, its start included, and one more that is to come by a crash point."""
MOST = 1 << 11
"""Processes of an episode."""
NOTED, WITNESSED = 1 << 13, 1 << 21
"""How many messages a victim, and a witness, can note."""
STOP, OVER, WORDS = 0, 1, 8
"""Words of the board: whether to end, whether all senders have; then `begun`, `returned` and `seen` of each process."""
SIZES = (1, 100, 3000, 40000)
AHEAD = 300
"""Items that may wait in a queue."""


def shared(count: int) -> np.ndarray:
    """Words that this process shares with its children."""
    return np.frombuffer(mmap.mmap(-1, 8 * count), np.int64)


def value_of(sender: int, number: int):
    """What `sender` sends as its message `number`: an array, alone or among others, and the meta."""
    array = np.full(SIZES[number * 7 % len(SIZES)], sender << 32 | number)
    return [array, {"data": array, "number": number}, [array, array[:5], "text"]][number % 3], {"sender": sender}


def check(value, meta) -> tuple[int, int]:
    """The sender and the number of a message, all of whose bytes are right."""
    array = value["data"] if isinstance(value, dict) else value[0] if isinstance(value, list) else value
    sender, number = int(array[0]) >> 32, int(array[0]) & 0xFFFFFFFF
    wanted, wanted_meta = value_of(sender, number)
    wanted_meta = wanted_meta if meta is not None else None
    assert type(value) is type(wanted), (sender, number)
    assert meta == wanted_meta, (sender, number)
    pairs = {
        dict: lambda: [(value["data"], wanted["data"])],
        list: lambda: list(zip(value[:2], wanted[:2], strict=True)),
    }
    for found, right in pairs.get(type(value), lambda: [(value, wanted)])():
        assert found.dtype == right.dtype, (sender, number)
        assert np.array_equal(found, right), f"message {number} of {sender} is damaged"
    if isinstance(value, dict):
        assert value["number"] == number
    return sender, number


class Notes:
    """What a process has received: sender, number and attempt."""

    def __init__(self, most: int) -> None:
        self._words = shared(most + 1)

    def add(self, sender: int, number: int, attempt: int = 1) -> None:
        count = int(self._words[0])
        self._words[count + 1] = sender << 40 | number << 8 | attempt
        self._words[0] = count + 1

    def full(self) -> bool:
        return int(self._words[0]) + 2 >= len(self._words)

    def all(self) -> list[tuple[int, int, int]]:
        found = self._words[1 : 1 + int(self._words[0])].tolist()
        return [(word >> 40, word >> 8 & 0xFFFFFFFF, word & 0xFF) for word in found]


class Episode:
    """The state of one: what all of its processes know."""

    def __init__(self, pattern: str, name: str, chance: random.Random, joinable: bool) -> None:
        self.pattern, self.name, self.chance = pattern, name, chance
        self.board = shared(WORDS)
        self.begun, self.returned, self.seen = shared(MOST), shared(MOST), shared(MOST)
        self.queue = None
        if pattern == "queue":
            self.queue = (shmtensor.JoinableQueue if joinable else shmtensor.Queue)(ctx="fork")
        self.joinable = joinable
        self.notes: dict[int, Notes] = {}
        self.killed: set[int] = set()
        self.receivers: set[int] = set()
        self.pids: list[int] = []
        self.count = 0

    # --- what its processes do

    def _numbers(self, me: int):
        number = 0
        while not self.board[STOP]:
            if self.queue is not None and self.returned.sum() - self.seen.sum() > AHEAD:
                time.sleep(0.001)
                continue
            number += 1
            self.begun[me] = number
            yield number
            self.returned[me] = number

    def send(self, me: int) -> None:
        make = shmtensor.Producer if self.pattern == "work-queue" else shmtensor.Publisher
        with make(self.name, slots=6) as tx:
            for number in self._numbers(me):
                tx.send(*value_of(me, number), timeout=PATIENCE)
            tx.close(linger=PATIENCE)

    def subscribe(self, me: int) -> None:
        last: dict[int, int] = {}
        with shmtensor.Subscriber(self.name) as rx:
            self.seen[0] = self.seen[0] or me == 0
            for msg in rx:
                sender, number = check(msg.value, msg.meta)
                assert number == last.get(sender, number - 1 if me else 0) + 1, f"{number} after {last.get(sender)}"
                last[sender] = number
                if me == 0:
                    self.seen[sender] = number

    def consume(self, me: int) -> None:
        notes = self.notes[me]
        if self.pattern == "group":
            made = shmtensor.Subscriber(self.name, group="them", max_attempts=100)
        else:
            made = shmtensor.Consumer(self.name, max_attempts=250)
        with made as rx:
            self.seen[0] = self.seen[0] or me == 0
            for msg in rx:
                sender, number = check(msg.value, msg.meta)
                notes.add(sender, number, msg.attempt)
                msg.release()
                del msg
                if notes.full():
                    signal.pause()

    def ask(self, me: int) -> None:
        with shmtensor.Client(self.name, slots=8) as client:
            for number in self._numbers(me):
                asked = [np.full(SIZES[(number + i) % 3], me << 32 | number << 4 | i) for i in range(3)]
                futures = [client.submit(value, timeout=PATIENCE) for value in asked]
                for value, future in zip(asked, futures, strict=True):
                    assert np.array_equal(future.result(PATIENCE), value * 2), "a wrong reply"
                    self.seen[me] += 1

    def serve(self, me: int) -> None:
        with shmtensor.Server(self.name, max_attempts=250) as server:
            while not self.board[OVER]:
                with contextlib.suppress(shmtensor.TimedOut):
                    request = server.recv(timeout=0.1)
                    assert (request.value == request.value[0]).all(), "a torn request"
                    request.reply(2 * request.value)
                    del request

    def put(self, me: int) -> None:
        for number in self._numbers(me):
            self.queue.put(value_of(me, number)[0])

    def get(self, me: int) -> None:
        notes, queue = self.notes[me], self.queue
        while not (self.board[OVER] and queue.empty()):
            with contextlib.suppress(Empty):
                item = queue.get(timeout=0.1)
                notes.add(*check(item, None))
                self.seen[me] += 1
                if self.joinable:
                    with contextlib.suppress(ValueError):  # a getter has died between the counter and its item
                        queue.task_done()
                del item
            if notes.full():
                signal.pause()

    def roles(self) -> tuple[Callable[[int], None], Callable[[int], None]]:
        """Who receives, who sends."""
        return {
            "fan-out": (self.subscribe, self.send), "group": (self.consume, self.send),
            "work-queue": (self.consume, self.send),
            "rpc": (self.serve, self.ask), "queue": (self.get, self.put),
        }[self.pattern]  # fmt: skip

    # --- its processes

    def start(self, receives: bool, plan: tuple[str, int] | None = None, witness: bool = False) -> tuple[int, int]:
        """A child that plays a role: its number and pid."""
        me, self.count = self.count, self.count + 1
        if receives:
            self.receivers.add(me)
            self.notes[me] = Notes(WITNESSED if witness else NOTED)
        role = self.roles()[0 if receives else 1]
        pid = os.fork()
        if pid:
            self.pids.append(pid)
            return me, pid
        code = 1
        try:
            if plan is not None:
                points.arm(plan[0], "kill", plan[1])
            role(me)
            if self.queue is not None:
                self.queue.close()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def run(self, kills: int, until: float, plans: tuple[list[str], list[str]] | None) -> tuple[int, int]:
        """Kill so many; how many there were, and how many died at a crash point of those for senders and receivers."""
        try:
            return self._run(kills, until, plans)
        except BaseException:  # none of its processes may go on: they have the output that its caller reads
            for pid in self.pids:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    if os.waitpid(pid, os.WNOHANG) == (0, 0):
                        os.kill(pid, signal.SIGKILL)
                        os.waitpid(pid, 0)
            raise

    def _run(self, kills: int, until: float, plans: tuple[list[str], list[str]] | None) -> tuple[int, int]:
        chance = self.chance
        witness = self.start(True, witness=True)
        if self.pattern in ("fan-out", "group"):  # of what is sent before there is one, nobody is a recipient
            wait_until(lambda: self.seen[0])
        living = [witness, self.start(False)]
        wait_until(lambda: self.begun[1])  # else a victim might be the only sender, and its end that of the stream
        victims: dict[int, tuple[int, float]] = {}
        done = at_points = 0
        while (done < kills and time.monotonic() < until) or victims:
            while done + len(victims) < kills and len(victims) < VICTIMS and time.monotonic() < until:
                receives = chance.random() < 0.6
                plan = (chance.choice(plans[receives]), chance.choice((1, 1, 2, 3, 5, 9))) if plans else None
                me, pid = self.start(receives, plan)
                life = chance.expovariate(1 / LIFE_S) + (EXTRA_S if plan else 0)
                victims[pid] = me, time.monotonic() + life
            for pid, (me, death) in list(victims.items()):
                early, status = os.waitpid(pid, os.WNOHANG)
                if not early and time.monotonic() >= death:
                    os.kill(pid, signal.SIGKILL)
                    _, status = os.waitpid(pid, 0)
                elif not early:
                    continue
                assert status == signal.SIGKILL, f"it ended by itself, with status {status}"
                del victims[pid]
                self.killed.add(me)
                done += 1
                at_points += bool(early)
            for _, pid in living:
                assert not os.waitpid(pid, os.WNOHANG)[0], "a witness has ended"
            time.sleep(0.0005)
        self.board[STOP] = 1
        ended(living[1][1])
        self.board[OVER] = 1
        ended(living[0][1])
        return done, at_points

    # --- what must hold

    def check(self) -> tuple[int, int]:
        """How many messages were sent, and how many of those a getter had taken for good when it was killed."""
        sent = int(self.returned.sum())
        if self.pattern == "rpc":
            complete = self.seen[1]
            assert complete == 3 * self.returned[1], "a reply is missing"
            return int(self.seen.sum()), 0
        if self.pattern == "fan-out":
            self.seen[0] = 0
            wrong = np.flatnonzero((self.seen < self.returned) | (self.seen > self.begun))
            assert not len(wrong), f"of {wrong}: {self.returned[wrong]} sent, {self.seen[wrong]} received"
            return sent, 0
        times: dict[tuple[int, int], list[tuple[int, bool]]] = collections.defaultdict(list)
        for me, notes in self.notes.items():
            found = notes.all()
            for at, (sender, number, attempt) in enumerate(found, 1):
                times[sender, number].append((attempt, me in self.killed and at == len(found)))
        for (sender, number), seen in times.items():
            assert 0 < number <= self.begun[sender], "never sent"
            seen.sort()
            again = self.pattern in ("work-queue", "group") or self.joinable
            assert len(seen) == 1 or (again and sum(not unfinished for _, unfinished in seen) <= 1), (
                f"{number} of {sender} came again: {seen}"
            )
        lost = [
            (int(sender), number)
            for sender in np.flatnonzero(self.returned)
            for number in range(1, int(self.returned[sender]) + 1)
            if (int(sender), number) not in times
        ]
        taken = len(self.killed & self.receivers) if self.queue is not None and not self.joinable else 0
        assert len(lost) <= taken, f"{len(lost)} of {sent} are lost: {lost[:10]}"
        return sent, len(lost)


def wait_until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.001)


def ended(pid: int) -> None:
    """Wait for the good end of a child."""
    status = None

    def over() -> bool:
        nonlocal status
        found, status = os.waitpid(pid, os.WNOHANG)
        return bool(found)

    wait_until(over)
    assert status == 0, f"a witness ended with status {status}"


def left(names: str) -> list[str]:
    """What the dead have left, once somebody has come by."""
    cleanup.sweep_all(socket_dir(), patience=PATIENCE)
    sockets = os.listdir(socket_dir())
    return [name for name in os.listdir("/dev/shm") if names in name or f"queue-{os.getpid()}-" in name] + sockets


def plans_of(pattern: str) -> tuple[list[str], list[str]]:
    """Crash points that senders, and receivers, of a pattern may come by."""
    python = {"join.opened", "join.locked", "join.owned", "join.prepared", "join.entered", "join.done"}
    of_take = {name for name in points.native_names() if name.split(".")[0] in ("take", "claim", "done", "release")}
    of_send = set(points.native_names()) - of_take - ({"takeback.cleared"} if pattern != "fan-out" else set())
    if pattern == "rpc":
        of_rpc = set(points.names("rpc"))
        of_take |= of_send | of_rpc
        of_send = of_take
    else:
        of_send -= {"publish.noted"}
        of_take -= {
            name for name in of_take if name.split(".")[0] in {"fan-out": ("claim", "done")}.get(pattern, ("take",))
        }
    return sorted(of_send | python | {"grow.created"}), sorted(of_take | python | {"attach.done", "sleep.asleep"})


def phase(pattern: str, kills: int, seconds: float, seed: int, compiled_points: bool) -> dict[str, float]:
    """One pattern with one build, in this process."""
    chance, until, began = random.Random(seed), time.monotonic() + seconds, time.monotonic()
    plans = plans_of(pattern) if compiled_points else None
    total = collections.Counter()
    names = f"soak-{os.getpid()}-"
    while total["kills"] < kills and time.monotonic() < until:
        episode = Episode(pattern, f"{names}{total['episodes']}", chance, joinable=total["episodes"] % 2 == 0)
        done, at_points = episode.run(min(PER_EPISODE, kills - total["kills"]), until, plans)
        if episode.queue is not None:
            episode.queue.close()
        messages, taken = episode.check()
        leftover = left(names)
        assert not leftover, f"left: {leftover}"
        total.update(kills=done, at_points=at_points, messages=messages, taken=taken, episodes=1)
    return {**total, "seconds": round(time.monotonic() - began)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10000, help="how many processes to kill, of all patterns")
    parser.add_argument("--seconds", type=float, default=3600, help="end after so many, with fewer kills")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=PATTERNS)
    options = parser.parse_args()
    sums: collections.Counter[str] = collections.Counter()
    deadline = time.monotonic() + options.seconds
    phases = [(pattern, chosen) for pattern in options.patterns for chosen in (False, True)]
    for number, (pattern, chosen) in enumerate(phases):
        remaining = len(phases) - number
        kills = options.kills * (number + 1) // len(phases) - options.kills * number // len(phases)
        seconds = (deadline - time.monotonic()) / remaining
        with tempfile.TemporaryDirectory(prefix="shmt-") as directory:
            environment = {**os.environ, "SHMTENSOR_DIR": directory, "OPENBLAS_NUM_THREADS": "1", points.BUILD: ""}
            if chosen:
                environment[points.BUILD] = build.module_path()
            arguments = (pattern, kills, seconds, options.seed + number, chosen)
            command = [sys.executable, "-c", f"from tests.faults import soak; soak.play(*{arguments!r})"]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"{pattern}, {'test build' if chosen else 'as installed'}, seed {options.seed}: failed")
        figures = json.loads(done.stdout)
        print(f"{pattern}, {'crash points' if chosen else 'random moments'}: {figures}", flush=True)
        sums.update(figures)
    print(dict(sums))


def play(pattern: str, kills: int, seconds: float, seed: int, chosen: bool) -> None:
    """A phase as a program; see `main`."""
    assert not chosen or native.module.__file__ == os.environ[points.BUILD]
    assert native.module is not None, "there is no compiled module"
    print(json.dumps(phase(pattern, kills, seconds, seed, chosen)))


from . import points  # noqa: E402

if os.environ.get(points.BUILD):
    points.install()

from queue import Empty  # noqa: E402

import numpy as np  # noqa: E402

import shmtensor  # noqa: E402
from shmtensor import native  # noqa: E402
from shmtensor.channel import cleanup  # noqa: E402
from shmtensor.channel.names import socket_dir  # noqa: E402

if __name__ == "__main__":
    from . import build

    main()
