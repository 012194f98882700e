"""The reference changes the state of a slot as the tables of `ring/states.py` allow, and in no other way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shmtensor
from shmtensor.memory import words
from shmtensor.ring import layout, reader, reference, states, writer
from shmtensor.ring.layout import L_PUBLISHED, R_RECORDS, RECORD_WORDS, RELEASED
from shmtensor.ring.states import State

from ..implementations import only

PATIENCE = 30
PURE = only("pure", "it looks at each store, of which the compiled one makes many in one call")


class Watch:
    """Looks at every slot after each store of the reference, and notes the changes."""

    def __init__(self, tx: Any, rx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tx, self.rx = tx, rx
        self.before: dict[tuple[int, int], State] = {}
        self.changes: list[tuple[State, State]] = []
        for module in (writer, reader, reference):
            monkeypatch.setattr(module, "store", self.store)

    def store(self, memory: memoryview, index: int, value: int) -> None:
        words.store(memory, index, value)
        self.look()

    def look(self) -> None:
        sequences = self.tx._sequences
        for ring in self.tx._writer.rings:
            for slot in range(ring.slots):
                seq = ring.words[R_RECORDS + slot * RECORD_WORDS]
                published = 0 < seq <= sequences.words[L_PUBLISHED]
                now = self.state(sequences, ring, slot, seq) if published else State.WRITING
                before = self.before.setdefault((ring.index, slot), State.WRITING)
                if now is not before:
                    self.changes.append((before, now))
                self.before[ring.index, slot] = now

    def state(self, sequences: Any, ring: Any, slot: int, seq: int) -> State:
        recipient, _ = self.rx._member.recipient
        locks, group = sequences.locks, self.rx._member.group is not None
        if not isinstance(self.rx, shmtensor.Consumer) and not group:
            return states.of_recipient(ring.words[ring.state + recipient * ring.row + slot], seq)
        if group:
            found = states.of_recipient(ring.words[ring.state + recipient * ring.row + slot], seq)
            claimed = any(each.has_lease(ring.index, slot, seq) or each.taking for each in self.rx._readers)
            return State.PUBLISHED if found is State.LEASED and not claimed else found
        at = layout.state_word(ring, slot)
        if ring.words[at + RELEASED] == seq:
            return State.RELEASED
        found, claimed = states.of_queue(ring.words, at, seq), locks.held_by_other(seq)
        if found is State.DONE and not claimed:
            return State.RELEASED
        return State.PUBLISHED if found is State.LEASED and not claimed else found


def fan_out(channel):
    return shmtensor.Publisher(channel, slots=2), shmtensor.Subscriber(channel)


def group(channel):
    return shmtensor.Publisher(channel, slots=2), shmtensor.Subscriber(channel, group="g")


def work_queue(channel):
    return shmtensor.Producer(channel, slots=2), shmtensor.Consumer(channel)


KINDS = {
    "fan-out": (fan_out, (states.FAN_OUT,)),
    "group": (group, (states.FAN_OUT, states.GROUP)),
    "work queue": (work_queue, (states.WORK_QUEUE,)),
}


@PURE
@pytest.mark.parametrize("kind", KINDS)
def test_only_legal_changes(channel, monkeypatch, kind):
    make, tables = KINDS[kind]
    tx, rx = make(channel)
    with tx, rx:
        tx.send(np.zeros(3))  # makes the ring
        with rx.recv(timeout=PATIENCE):
            pass
        watch = Watch(tx, rx, monkeypatch)
        watch.look()
        watch.changes.clear()
        for number in range(5):
            tx.send(np.full(3, number))
            message = rx.recv(timeout=PATIENCE)
            kept = message.value
            message.release()
            assert int(kept[0]) == number
            del message, kept
        tx.send(np.ones(3))
        monkeypatch.setattr(type(rx._readers[0]), "hold", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rx.recv(timeout=PATIENCE)
        monkeypatch.undo()
        with rx.recv(timeout=PATIENCE) as message:
            assert message.value.tolist() == [1, 1, 1]
    legal = states.visible(*tables)
    assert set(watch.changes) <= legal
    assert (State.PUBLISHED, State.LEASED) in watch.changes
    assert (State.LEASED, State.PUBLISHED) in watch.changes
    assert (State.RELEASED, State.WRITING) in watch.changes
    assert ((State.LEASED, State.DONE) in watch.changes) is (kind != "fan-out")


def interrupt(self, lease):
    raise KeyboardInterrupt
