"""The words in the ring that belong to a request or a reply. The message itself is the value alone.

A service is a work queue: a request is a message of its client, known by (client's uid, seq). Three words of its slot
that a work queue leaves free belong to it:

    note      seq << 8 | bits     the client: before it publishes the request, and again to cancel it
    deadline  CLOCK_MONOTONIC, ns; 0: none      the client, before `note`
    verdict   seq << 8 | code     the holder of lock(seq), before `done`: the request is finished without a reply

The replies to a client come on a fan-out channel of its own, `<service>.<client's uid>`, whose only subscriber it is.
In a publisher's ring the row of its own member index belongs to no receiver. There it stores, at the reply's slot and
before it publishes the reply, the sequence number of the request that the reply is for.

docs/internals/protocols.md, section 8, says why nothing else is needed.
"""

from __future__ import annotations

from typing import Final

from ..channel.names import check_channel
from ..errors import ArgumentError

ONCE: Final = 1
"""Bit of a note: the request is not tried again after a server died with it."""
CANCELLED: Final = 2
"""Bit of a note: the reply is not wanted any more."""

DROPPED, DIED, NO_ROOM = 1, 2, 3
"""Codes of a verdict: the server dropped the request; a server died with a request that is tried once; there was no
room for the reply."""

FAILED: Final = "error"
"""The only key of the meta of an error reply, whose value is a dict of `type`, `text` and `traceback`."""

FOREVER: Final = 1e9
"""Seconds (32 years) from which on a time-out is no limit: more fits neither a deadline's word nor a lock's wait."""

BUDGET: Final = 256 << 20
"""Bytes of a ring of requests or replies for which no `slots=` was given; it has at least 2 slots."""

MAX_NAME: Final = 64 - 17
"""Characters of a service's name: a channel's, less those that `reply_channel` appends."""


def check_service(name: object) -> str:
    """Return a service's name, or raise `ArgumentError` if no channel of replies can be named after it."""
    service = check_channel(name)
    if len(service) > MAX_NAME:
        raise ArgumentError(f"service name {service!r} has {len(service)} characters: use at most {MAX_NAME}")
    return service


def reply_channel(service: str, uid: int) -> str:
    """The name of the channel of the replies to a client."""
    return f"{service}.{uid:016x}"
