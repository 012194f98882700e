"""What travels beside a request and beside a reply: words in the ring, so that a plain tensor stays a plain tensor.

A service is a work queue: a request is a message of its client, known by (client's uid, seq). Three words of its slot
that a work queue leaves free belong to it:

    note      seq << 8 | bits     the client: before it publishes the request, and again to cancel it
    deadline  CLOCK_MONOTONIC, ns; 0: none      the client, before `note`
    verdict   seq << 8 | code     who holds lock(seq), before `done`: it is finished and there will be no reply

The replies to a client come on a fan-out channel of its own, `<service>.<client's uid>`, whose only subscriber it is.
In a publisher's ring the row of its own member index belongs to no receiver: it stores there, at the reply's slot and
before it publishes the reply, which request the reply is for.

docs/internals/protocols.md, section 8, says why nothing else is needed.
"""

from __future__ import annotations

from typing import Final

from ..channel.names import check_channel
from ..errors import ArgumentError

ONCE: Final = 1
"""Bit of a note: the request is not tried again after a server died with it."""
CANCELLED: Final = 2
"""Bit of a note: nobody waits for the reply any more."""

DROPPED, DIED, NO_ROOM = 1, 2, 3
"""Codes of a verdict: the server let go of the request; a server died with a request that is tried once; the reply
found no room."""

FAILED: Final = "error"
"""The only key of the meta of a reply that is an error; its value is the dict {type, text, traceback} in the value."""

FOREVER: Final = 1e9
"""Seconds, 32 years, from which on a time-out is none: more fits neither a deadline's word nor a lock's wait."""

BUDGET: Final = 256 << 20
"""Bytes of a ring of requests or replies whose number of slots nobody has asked for; it has 2 at least."""

MAX_NAME: Final = 64 - 17


def check_service(name: object) -> str:
    """The service's name, or a clear error: it leaves room for a client's uid in a channel name."""
    service = check_channel(name)
    if len(service) > MAX_NAME:
        raise ArgumentError(f"service name {service!r} has {len(service)} characters: use at most {MAX_NAME}")
    return service


def reply_channel(service: str, uid: int) -> str:
    """Where the replies to a client go."""
    return f"{service}.{uid:016x}"
