"""The life cycle of a slot, as data: its states, the legal changes between them, and what its words say of them.

Each transition names the process that makes it and the store (or lock) that makes it visible. These tables are used in
three ways: the reference reads the words of a slot by them, tests check that the models in `tests/models` and the
reference's own stores make no other change, and a test compares `docs/internals/slots.md` with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple

from .layout import ATTEMPT_SHIFT, CLAIMED, DONE, GROUP_DONE, LEASE


class State(Enum):
    """The states of a slot, as they are visible in shared memory."""

    FREE = "free"
    WRITING = "writing"
    PUBLISHED = "published"
    LEASED = "leased"
    DONE = "done"
    RELEASED = "released"


class Transition(NamedTuple):
    """One legal change of a slot's state."""

    source: State
    target: State
    who: str
    by: str
    when: str


FAN_OUT: Final = (
    Transition(State.FREE, State.WRITING, "publisher", "record.seq := 0", "send or loan takes the slot"),
    Transition(
        State.WRITING, State.FREE, "publisher", "nothing was published", "an exception, a discarded loan, or death"
    ),
    Transition(State.WRITING, State.PUBLISHED, "publisher", "published := seq", "send returns"),
    Transition(
        State.WRITING, State.RELEASED, "publisher", "published := seq", "send returns; r takes no more messages"
    ),
    Transition(State.PUBLISHED, State.LEASED, "receiver r", "lease[r] := 2*seq", "recv takes it"),
    Transition(State.LEASED, State.PUBLISHED, "receiver r", "lease[r] := 0", "recv was interrupted and undoes it"),
    Transition(State.LEASED, State.RELEASED, "receiver r", "lease[r] := 2*seq+1", "the last view of it dies"),
    Transition(State.PUBLISHED, State.RELEASED, "receiver r", "lease[r] := 2*seq+1", "its record is damaged"),
    Transition(State.PUBLISHED, State.RELEASED, "kernel", "life lock of r dropped", "r left or died before taking it"),
    Transition(State.LEASED, State.RELEASED, "kernel", "life lock of r dropped", "r died holding it"),
    Transition(State.RELEASED, State.FREE, "publisher", "reads every recipient's word", "all recipients have released"),
)
"""The life of a slot as one recipient sees it; a slot with a message without recipients is RELEASED at once."""

GROUP: Final = (
    Transition(State.RELEASED, State.PUBLISHED, "publisher", "published := seq", "send returns"),
    Transition(State.PUBLISHED, State.LEASED, "member", "lock(g, seq), lease[g] := attempt, 2*seq", "recv takes it"),
    Transition(State.LEASED, State.PUBLISHED, "kernel", "lock(g, seq) dropped", "its member died: others may take it"),
    Transition(State.LEASED, State.RELEASED, "member", "lease[g] := 2*seq+1", "damaged, or delivered too often"),
    Transition(
        State.LEASED, State.DONE, "member", "lease[g] := done, 2*seq", "the message is released; views may live on"
    ),
    Transition(State.DONE, State.RELEASED, "member", "lease[g] := 2*seq+1", "the last view of it dies"),
    Transition(
        State.DONE, State.RELEASED, "another member", "lease[g] := 2*seq+1", "its member died after it was done"
    ),
)
"""The life of a slot as a group of subscribers sees it, which is one recipient of a fan-out."""

WORK_QUEUE: Final = (
    Transition(State.FREE, State.WRITING, "producer", "record.seq := 0", "send or loan takes the slot"),
    Transition(
        State.WRITING, State.FREE, "producer", "nothing was published", "an exception, a discarded loan, or death"
    ),
    Transition(State.WRITING, State.PUBLISHED, "producer", "published := seq", "send returns"),
    Transition(State.PUBLISHED, State.LEASED, "consumer", "lock(seq), claimed := seq", "recv takes it"),
    Transition(State.LEASED, State.PUBLISHED, "kernel", "lock(seq) dropped", "its consumer died: others may take it"),
    Transition(State.LEASED, State.DONE, "consumer", "done := seq", "the message is released; views may live on"),
    Transition(State.DONE, State.RELEASED, "consumer", "released := seq", "the last view of it dies"),
    Transition(State.DONE, State.RELEASED, "kernel", "lock(seq) dropped", "its consumer died after it was done"),
    Transition(
        State.RELEASED, State.FREE, "producer", "reads released, or done and no lock", "the next send that needs it"
    ),
)


def visible(*tables: Sequence[Transition]) -> frozenset[tuple[State, State]]:
    """The changes that the words of a slot and its locks may show.

    FREE shows in none of them: a change to it and the next one, from it, are seen as one.
    """
    every = {(it.source, it.target) for table in tables for it in table}
    through = {(source, target) for source, free in every for other, target in every if free is other is State.FREE}
    return frozenset(change for change in every | through if State.FREE not in change)


# --- what the words of a published message say of it. Whether who leased it lives, its lock says.


def of_recipient(word: int, seq: int) -> State:
    """Fan-out: by a recipient's lease word; of a group, by the group's. RELEASED as well if it is a later message's."""
    lease = word & LEASE
    if lease != 2 * seq:
        return State.PUBLISHED if lease < 2 * seq else State.RELEASED
    return State.DONE if word >> ATTEMPT_SHIFT == GROUP_DONE else State.LEASED


def of_queue(words: Sequence[int], at: int, seq: int) -> State:
    """Work queue: by the slot's state words from `at` on. DONE as well if it is given back, RELEASED if it is a later
    message's."""
    done = words[at + DONE]
    if done >= seq:
        return State.DONE if done == seq else State.RELEASED
    return State.LEASED if words[at + CLAIMED] == seq else State.PUBLISHED
