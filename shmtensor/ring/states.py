"""The life cycle of a slot, as data: a test compares `docs/internals/slots.md` with it.

Each transition names the process that makes it and the store (or lock) that makes it visible.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple


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
    Transition(State.PUBLISHED, State.LEASED, "receiver r", "lease[r] := 2*seq", "recv takes it"),
    Transition(State.LEASED, State.RELEASED, "receiver r", "lease[r] := 2*seq+1", "the last view of it dies"),
    Transition(State.PUBLISHED, State.RELEASED, "kernel", "life lock of r dropped", "r left or died before taking it"),
    Transition(State.LEASED, State.RELEASED, "kernel", "life lock of r dropped", "r died holding it"),
    Transition(State.RELEASED, State.FREE, "publisher", "reads every recipient's word", "all recipients have released"),
)
"""As one recipient sees it; a slot with a message without recipients is RELEASED at once."""

GROUP: Final = (
    Transition(State.RELEASED, State.PUBLISHED, "publisher", "published := seq", "send returns"),
    Transition(State.PUBLISHED, State.LEASED, "member", "lock(g, seq), lease[g] := attempt, 2*seq", "recv takes it"),
    Transition(State.LEASED, State.PUBLISHED, "kernel", "lock(g, seq) dropped", "its member died: others may take it"),
    Transition(
        State.LEASED, State.DONE, "member", "lease[g] := done, 2*seq", "the message is released; views may live on"
    ),
    Transition(State.DONE, State.RELEASED, "member", "lease[g] := 2*seq+1", "the last view of it dies"),
    Transition(
        State.DONE, State.RELEASED, "another member", "lease[g] := 2*seq+1", "its member died after it was done"
    ),
)
"""As a group of subscribers sees it, which is one recipient of a fan-out."""

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
