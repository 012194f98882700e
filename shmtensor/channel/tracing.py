"""A member's end of a trace: whether there is a tracer, and where the member writes its events then.

A tracer joins the channel as a member (observe/trace.py). So the members read the table again, as for any newcomer, and
find it there; as a dead member's, its file and its entry are removed by whoever sweeps next, and they find that, too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..errors import ResourceError, WireError
from ..ring.events import EventLog
from .control import TRACER, Entry
from .names import sequence_table_name

if TYPE_CHECKING:
    from .membership import Member

log = logging.getLogger("shmtensor.channel")


class Tracing:
    """What one member knows of the tracer of its channel."""

    __slots__ = ("_log", "_tracer")

    def __init__(self) -> None:
        self._tracer = 0
        self._log: EventLog | None = None

    def follow(self, member: Member, entries: Iterable[Entry]) -> EventLog | None:
        """The log of this member, for the tracer among all members; None: there is no tracer, or it cannot be used."""
        tracer = next((entry.uid for entry in entries if entry.role == TRACER), 0)
        if tracer != self._tracer:
            self._log = self._attach(member, tracer) if tracer else None
            # crash: trace.attached
            self._tracer = tracer
        return self._log

    @staticmethod
    def _attach(member: Member, tracer: int) -> EventLog | None:
        try:
            return EventLog.attach(sequence_table_name(member.channel, tracer), tracer, member.index, member.uid)
        except FileNotFoundError:
            return None  # it is just ending
        except (ResourceError, WireError) as error:
            log.warning('channel "%s" is traced, but for this member: %s', member.channel, str(error))
            return None
