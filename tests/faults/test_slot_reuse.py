"""Receivers and a sender are killed at random while slots are used again at once: every byte of every value is checked.

A sender takes slot 0 of its ring again as soon as it was given back (`ring/ring.py`), so that a message of long ago and
the newest one may stand in the same slot within microseconds, and whoever is late, or is told wrongly what is free,
reads or writes the wrong one. Two senders send at once; receivers are killed in the middle of it and others come; one
of the senders is killed as well. Each receiver keeps a few views of messages that are done, and notes what it received
in a file of its own before it says that it is done: what is noted there outlives it.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

import shmtensor
from shmtensor import native

from ..forkservers import stop_forkserver
from ..waiting import wait_until

pytestmark = pytest.mark.slow

PATIENCE = 100.0
RECEIVERS, SENDERS = 3, 2
SLOTS, MOST_HELD = 12, 3  # all receivers together hold fewer slots than there are
SOAK = bool(os.environ.get("SHMTENSOR_SOAK"))

LIMIT, CLOSING, BEGUN, RETURNED, BOARD = 0, 1, 2, 4, 6
"""Words of the board: up to which number to send, whether to close then, and per sender what its `send` came to."""
JOINED, MISSED, DUE, NOTES, NOTED = 0, 1, 3, 5, 1 << 18
"""Words of a receiver's notes: whether it is there; per sender, the last number that it need not get, as it was sent
before it came, and the last that it may miss, as its `send` had begun by then; from `NOTES` on, what it received."""


class Note(NamedTuple):
    """A message as a receiver has seen it."""

    sender: int
    number: int
    attempt: int


def words(path: Path, mode: str = "r+") -> np.ndarray:
    return np.memmap(path, np.int64, mode)


def check(value: torch.Tensor, number: int, when: str) -> None:
    wrong = (value != number).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise AssertionError(f"{number:#x} {when}: {len(wrong)} words are wrong, from {at} on: {int(value[at]):#x}")


def send(fan_out: bool, channel: str, compiled: bool, board_path: Path, sender: int, items: int) -> None:
    """Send numbers from 1 on, up to the limit on the board, until that says so."""
    assert compiled == (native.module is not None)
    torch.set_num_threads(1)
    board = words(board_path)
    with (shmtensor.Publisher if fan_out else shmtensor.Producer)(channel, slots=SLOTS) as tx:
        for number in itertools.count(1):
            while number > board[LIMIT] and not board[CLOSING]:
                time.sleep(0.0005)
            if number > board[LIMIT]:
                break
            board[BEGUN + sender] = number
            tx.send(torch.full((items,), sender << 32 | number), timeout=PATIENCE)
            board[RETURNED + sender] = number
        tx.close(linger=PATIENCE)


def receive(fan_out: bool, channel: str, compiled: bool, board_path: Path, notes_path: Path, seed: int) -> None:
    """Note what comes, keep some of it for a while, and see that it stays what it was."""
    assert compiled == (native.module is not None)
    torch.set_num_threads(1)
    chance, board, notes = random.Random(seed), words(board_path), words(notes_path)
    held: list[tuple[int, torch.Tensor]] = []
    at = NOTES
    notes[MISSED : MISSED + SENDERS] = board[RETURNED : RETURNED + SENDERS]
    make = shmtensor.Subscriber if fan_out else shmtensor.Consumer
    with make(channel, **{} if fan_out else {"acknowledge": "release", "max_attempts": 250}) as rx:
        notes[DUE : DUE + SENDERS] = board[BEGUN : BEGUN + SENDERS]
        notes[JOINED] = 1
        for msg in rx:
            value = msg.value
            number = int(value[0])
            check(value, number, f"as received, attempt {msg.attempt}")
            notes[at] = number << 8 | msg.attempt
            at += 1
            msg.release()
            held.append((number, value))
            del msg, value
            for _ in range(chance.choice([0, 1, 1, 1, 2]) if len(held) <= MOST_HELD else 2):
                if held:
                    number, value = held.pop(chance.randrange(len(held)))
                    check(value, number, "as kept")
                    del value
        while held:
            number, value = held.pop()
            check(value, number, "as kept until the end")
            del value


class Receiver:
    """A receiver's process and its notes."""

    def __init__(self, context, folder: Path, number: int, *args) -> None:
        self.path = folder / f"notes-{number}"
        with self.path.open("wb") as file:
            file.truncate(NOTED * 8)
        self.notes = words(self.path)
        self.process = context.Process(target=receive, args=(*args, self.path, number))
        self.process.start()
        self.killed = False

    def kill(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE)
        assert self.process.exitcode == -signal.SIGKILL, "it had ended by itself"
        self.killed = True

    def has_joined(self) -> bool:
        assert self.process.is_alive(), "it has ended by itself"
        return bool(self.notes[JOINED])

    def found(self) -> list[Note]:
        filled = self.notes[NOTES:]
        found = filled[: np.count_nonzero(filled)].tolist()
        return [Note(word >> 40, word >> 8 & 0xFFFFFFFF, word & 0xFF) for word in found]


@pytest.fixture(scope="module", params=["compiled", "pure"])
def nursery(request) -> Iterator[tuple[object, bool]]:
    """A fork server whose children have the package loaded, with the compiled module or without."""
    compiled = request.param == "compiled"
    if compiled and native.module is None:
        pytest.skip("not compiled, or SHMTENSOR_PURE is set")
    context = get_context("forkserver")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHMTENSOR_PURE", "0" if compiled else "1")
        stop_forkserver()  # one that another test has left running has preloaded something else
        context.set_forkserver_preload([__name__, "tests.faults.loaded"])
        yield context, compiled
        stop_forkserver()
        context.set_forkserver_preload(["__main__"])


LONG = [pytest.mark.soak, pytest.mark.skipif(not SOAK, reason="SHMTENSOR_SOAK is not set"), pytest.mark.timeout(900)]


@pytest.mark.parametrize("kills", [6, pytest.param(200, marks=LONG)])
@pytest.mark.parametrize(
    ("nbytes", "step"), [(1 << 10, 600), (300 << 10, 100), (2 << 20, 30)], ids=["1KiB", "300KiB", "2MiB"]
)
@pytest.mark.parametrize("pattern", ["fan-out", "work-queue"])
def test_nothing_is_lost_or_overwritten(nursery, channel, tmp_path, pattern, nbytes, step, kills):
    context, compiled = nursery
    fan_out = pattern == "fan-out"
    chance = random.Random(nbytes + kills)
    board_path = tmp_path / "board"
    board_path.write_bytes(bytes(BOARD * 8))
    board = words(board_path)
    common = fan_out, channel, compiled, board_path
    receivers: list[Receiver] = []

    def start() -> Receiver:
        receivers.append(Receiver(context, tmp_path, len(receivers), *common))
        return receivers[-1]

    living = [start() for _ in range(RECEIVERS)]
    senders = [context.Process(target=send, args=(*common, number, nbytes // 8)) for number in range(SENDERS)]
    try:
        for process in senders:
            process.start()
        wait_until(lambda: all(receiver.has_joined() for receiver in living))
        for turn in range(kills):
            board[LIMIT] += step
            threshold = board[LIMIT] - chance.randrange(step)
            wait_until(lambda threshold=threshold: board[RETURNED + 1] >= threshold or not senders[1].is_alive())
            if turn == kills // 2:
                senders[0].kill()
            victim = chance.randrange(RECEIVERS)
            living[victim].kill()
            living[victim] = start()
        wait_until(lambda: all(receiver.has_joined() for receiver in living))
        board[LIMIT] += step
        board[CLOSING] = 1
        for process in senders + [receiver.process for receiver in living]:
            process.join(PATIENCE)
        assert [process.exitcode for process in senders] == [-signal.SIGKILL, 0]
        assert [receiver.process.exitcode for receiver in living] == [0] * RECEIVERS
    finally:
        for process in senders + [receiver.process for receiver in receivers]:
            process.kill()
            process.join(PATIENCE)
    sent = [int(board[RETURNED + sender]) for sender in range(SENDERS)]
    assert sent[1] == board[LIMIT]
    assert 0 < sent[0] <= board[BEGUN] <= sent[0] + 1
    (check_fan_out if fan_out else check_work_queue)(receivers, sent)
    with (shmtensor.Publisher if fan_out else shmtensor.Producer)(channel):
        pass  # whoever comes next removes what the dead have left


def check_fan_out(receivers: list[Receiver], sent: list[int]) -> None:
    """Each got every message since it came, in order, once; one that was killed, up to some point."""
    for receiver in receivers:
        notes = receiver.found()
        assert all(note.attempt == 1 for note in notes)
        for sender in range(SENDERS):
            got = [note.number for note in notes if note.sender == sender]
            first = got[0] if got else int(receiver.notes[DUE + sender]) + 1
            assert got == list(range(first, first + len(got)))
            if receiver.notes[JOINED]:
                assert receiver.notes[MISSED + sender] < first <= receiver.notes[DUE + sender] + 1
                assert receiver.killed or first + len(got) > sent[sender]


def check_work_queue(receivers: list[Receiver], sent: list[int]) -> None:
    """Each message was received; again only if who had it was killed with it, and then the attempt says so.

    First deliveries are in order, but for a message whose consumer was killed when it had locked it and had not yet
    counted that: the kernel ends a process on its way out of a system call.
    """
    attempts: dict[tuple[int, int], dict[int, bool]] = defaultdict(dict)
    late = 0
    for receiver in receivers:
        notes = receiver.found()
        for sender in range(SENDERS):
            first = [note.number for note in notes if note.sender == sender and note.attempt == 1]
            late += sum(number < before for number, before in zip(first, itertools.accumulate(first, max), strict=True))
        for note in notes:
            seen = attempts[note.sender, note.number]
            assert note.attempt not in seen, f"{note}: twice"
            seen[note.attempt] = receiver.killed and note is notes[-1]  # whether it may not have been done
    for (sender, number), seen in attempts.items():
        last = max(seen)
        early = [attempt for attempt, unfinished in seen.items() if attempt < last and not unfinished]
        assert not early, f"message {number} of sender {sender} was done at attempt {early}, and came again: {seen}"
    for sender, count in enumerate(sent):
        lost = set(range(1, count + 1)) - {number for of, number in attempts if of == sender}
        assert not lost, f"of sender {sender}, {len(lost)} of {count} messages: {sorted(lost)[:10]}"
    deaths = sum(receiver.killed for receiver in receivers)
    again = sum(max(seen) - 1 for seen in attempts.values())
    assert again + late <= deaths, f"{again} attempts more and {late} messages late, by {deaths} deaths"
