"""The events that a member records about its messages while its channel is traced. The reference for native/trace.c.

A tracer makes one sparse file (`/shmtensor.<channel>,<uid of the tracer>`); each member reserves, maps and writes the
area of its own index alone:

    0      magic  version  uid  capacity  size  every     written once, magic last                   tracer
    64     until: on CLOCK_MONOTONIC, ns                  from then on nothing is written              "
    page   areas: capacity x (4096 + 64 x size, in whole pages)
           +0     written  skipped                        events so far; those that could not be      the member
           +4096  events: number k lies at k % size       (see below); the oldest are overwritten      "

    event  what (sequence number << 8 | kind)  sender  begin  middle  end  nbytes  member  pid

Times are CLOCK_MONOTONIC, nanoseconds. `sender` and the number name the message, in every process that sees it.

    SEND     begin: it began to look for slots   middle: when it had them, if it waited; else as begin
             end: published (the record's time)
    TAKE     begin: it began to take a message   middle: the attempt    end: taken and decoded
    RELEASE  begin, end: given back

A newcomer at an index goes on behind what a former member has written there, so that nothing unread is lost: each event
names its member. docs/internals/protocols.md, section 14.
"""

from __future__ import annotations

import os
import threading
from typing import Final

from ..errors import WireError
from ..memory import segment as shm
from ..memory.words import acquire_fence, store
from .layout import MOST_MESSAGES, check_version

MAGIC: Final = int.from_bytes(b"SHMTRACE", "little")
VERSION: Final = 1
SEND, TAKE, RELEASE = range(1, 4)

# word indices in the header of the file
T_MAGIC, T_VERSION, T_UID, T_CAPACITY, T_SIZE, T_EVERY = range(6)
T_UNTIL: Final = 8
# of an area
A_WRITTEN, A_SKIPPED = range(2)
A_EVENTS: Final = 512
# of an event
E_WHAT, E_SENDER, E_BEGIN, E_MIDDLE, E_END, E_NBYTES, E_MEMBER, E_PID = range(8)
EVENT_WORDS: Final = 8
MOST_EVENTS: Final = 1 << 20
"""The most events of one area."""


def area_bytes(size: int) -> int:
    """Bytes of an area of `size` events, a power of two: whole pages, as it is mapped alone."""
    return (8 * (A_EVENTS + EVENT_WORDS * size) + shm.PAGE - 1) & -shm.PAGE


def area_at(index: int, size: int) -> int:
    """Where in the file the area of a member begins."""
    return shm.PAGE + index * area_bytes(size)


class EventLog:
    """The area of one member, which writes it, and the header, which says how long.

    One event is written at a time, and no call waits: if another thread, or an interrupted call of this thread, is just
    writing one, the event is skipped and counted.
    """

    __slots__ = ("_busy", "every", "limits", "member", "pid", "size", "words")

    def __init__(self, limits: memoryview, words: memoryview, size: int, every: int, member: int) -> None:
        self.limits, self.words, self.size, self.every = limits, words, size, every
        self.member, self.pid, self._busy = member, os.getpid(), threading.Lock()

    @classmethod
    def attach(cls, name: str, tracer: int, index: int, member: int) -> EventLog:
        """Map the area of a member. `FileNotFoundError` if the trace has ended, `WireError` if it is none.

        Its pages are reserved first: `ResourceError` if `/dev/shm` has no room for them.
        """
        with shm.attach(name) as segment:
            if segment.nbytes < shm.PAGE:
                raise WireError(f"trace {name} has {segment.nbytes} bytes only")
            limits = segment.map(0, shm.PAGE, writable=False).words
            if limits[T_MAGIC] != MAGIC or limits[T_UID] != tracer:
                raise WireError(f"segment {name} is not the trace of {tracer:016x}")
            acquire_fence()
            check_version(f"trace {name}", limits[T_VERSION], VERSION)
            size, every = limits[T_SIZE], limits[T_EVERY]
            if not 64 <= size <= MOST_EVENTS or size & (size - 1) or not 1 <= every < MOST_MESSAGES:
                raise WireError(f"trace {name} is damaged: {size} events, every {every}")
            at, nbytes = area_at(index, size), area_bytes(size)
            if at + nbytes > segment.nbytes:
                raise WireError(f"trace {name} has no area {index}")
            segment.reserve(nbytes, "end the trace", at)
            return cls(limits, segment.map(at, nbytes, writable=True).words, size, every, member)

    def add(self, kind: int, seq: int, sender: int, begin: int, middle: int, end: int, nbytes: int) -> None:
        """Write an event, unless the trace is over, or leaves this message out."""
        if end >= self.limits[T_UNTIL] or seq % self.every:
            return
        words = self.words
        held: list[bool] = []
        try:
            held.extend(map(self._busy.acquire, (False,)))  # one call takes it and records it
            if not held[0]:
                store(words, A_SKIPPED, words[A_SKIPPED] + 1)
                return
            count = words[A_WRITTEN]
            at = A_EVENTS + EVENT_WORDS * (count & (self.size - 1))
            for value in (seq << 8 | kind, sender, begin, middle, end, nbytes, self.member, self.pid):
                store(words, at, value)
                at += 1
            # crash: trace.stored
            store(words, A_WRITTEN, count + 1)  # pairs with the tracer's two loads of it
        finally:
            if held and held[0]:
                self._busy.release()
