"""A trace in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

A process is a process, each of its members a thread. What a member did is a slice (`X`): `send`, within it `wait for a
slot` if it had to; `take`; `release`. A flow (`s`, `t`, `f`) leads from the send to each receiver's take and release.
What a receiver holds between these two is an asynchronous slice (`b`, `e`), as many may be held at once. Times are
microseconds on CLOCK_MONOTONIC.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TextIO

from ..channel.info import MemberInfo
from ..ring.events import E_BEGIN, E_END, E_MEMBER, E_MIDDLE, E_NBYTES, E_PID, E_SENDER, E_WHAT, RELEASE, SEND, TAKE
from .trace import Trace


def write(trace: Trace, file: TextIO, version: str) -> int:
    """Write the trace as one JSON object. Returns how many messages it has."""
    other = {
        "channel": trace.channel, "kind": trace.kind, "clock": "CLOCK_MONOTONIC", "shmtensor": version,
        "began": _us(trace.began_ns), "ended": _us(trace.ended_ns), "lost": trace.lost,
    }  # fmt: skip
    lines = _Lines(trace)
    file.write(f'{{"displayTimeUnit":"ns","otherData":{json.dumps(other)},"traceEvents":[')
    comma = "\n"
    for line in lines.all():
        file.write(comma)
        file.write(line)
        comma = ",\n"
    file.write("\n]}\n")
    return len(lines.messages)


def _us(ns: int) -> float:
    return ns / 1e3


def _time(ns: int) -> str:
    """Exact, which a float of microseconds since the start of the machine is not for ever."""
    return f"{ns // 1000}.{ns % 1000:03}"


class _Lines:
    """The JSON objects of a trace, one after another."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._lanes: dict[int, tuple[int, int]] = {}
        self._processes: dict[int, tuple[str, int]] = {}
        """What a process runs, and how many members of it there are."""
        self._sent: dict[tuple[int, int], tuple[tuple[int, int], int]] = {}
        """By message: the lane and a time within the slice of its send."""
        self._held: dict[tuple[int, int, int], tuple[int, int]] = {}
        """By message and receiver: when it was taken, and its payload."""
        self.messages: set[tuple[int, int]] = set()

    def all(self) -> Iterator[str]:
        """What happened; then the names of who did it, and the ends of flows that have no release."""
        events = self._trace.events().tolist()
        for event in events:  # first: a message may be taken in the moment before its send has ended
            if event[E_WHAT] & 0xFF == SEND:
                within = max(event[E_MIDDLE], event[E_END] - 1)
                self._sent[event[E_MEMBER], event[E_WHAT] >> 8] = self._lane(event), within
        for event in events:
            kind, seq = event[E_WHAT] & 0xFF, event[E_WHAT] >> 8
            message = event[E_SENDER], seq
            if kind not in (SEND, TAKE, RELEASE):
                continue
            self.messages.add(message)
            lane = self._lane(event)
            if kind == SEND:
                yield from self._send(event, seq, lane)
            elif kind == TAKE:
                yield from self._take(event, message, lane)
            else:
                yield from self._release(event, message, lane)
        for (sender, seq, receiver), (taken, _) in self._held.items():
            if (sender, seq) in self._sent:  # not given back so far: the flow ends with the take
                yield _flow("f", self._lanes[receiver], taken, _id(sender, seq, receiver))
        yield from self._names()

    def _lane(self, event: list[int]) -> tuple[int, int]:
        """Process and thread of a member."""
        uid = event[E_MEMBER]
        if uid not in self._lanes:
            info = self._trace.members.get(uid)
            pid = (info.host_pid if info is not None else 0) or event[E_PID]
            process = f"{info.process if info is not None else ''} (pid {event[E_PID]})".strip()
            _, count = self._processes.get(pid, ("", 0))
            self._processes[pid] = process, count + 1
            self._lanes[uid] = pid, count + 1
        return self._lanes[uid]

    def _send(self, event: list[int], seq: int, lane: tuple[int, int]) -> Iterator[str]:
        begin, found, end = event[E_BEGIN], event[E_MIDDLE], event[E_END]
        yield _slice("send", lane, begin, end, {"seq": seq, "bytes": event[E_NBYTES], "waited_ns": found - begin})
        if found > begin:
            yield _slice("wait for a slot", lane, begin, found, {})

    def _take(self, event: list[int], message: tuple[int, int], lane: tuple[int, int]) -> Iterator[str]:
        begin, end, receiver = event[E_BEGIN], event[E_END], event[E_MEMBER]
        args = {"seq": message[1], "bytes": event[E_NBYTES], "sender": f"{message[0]:016x}"}
        if event[E_MIDDLE] > 1:
            args["attempt"] = event[E_MIDDLE]
        sent = self._sent.get(message)
        if sent is not None:
            args["after_ns"] = begin - sent[1]
        yield _slice("take", lane, begin, end, args)
        self._held[(*message, receiver)] = begin, event[E_NBYTES]
        if sent is not None:
            yield _flow("s", *sent, _id(*message, receiver))
            yield _flow("t", lane, begin, _id(*message, receiver))

    def _release(self, event: list[int], message: tuple[int, int], lane: tuple[int, int]) -> Iterator[str]:
        at, receiver = event[E_END], event[E_MEMBER]
        name = _id(*message, receiver)
        yield _slice("release", lane, at, at, {"seq": message[1], "sender": f"{message[0]:016x}"})
        taken, nbytes = self._held.pop((*message, receiver), (0, 0))
        if taken:
            for phase, when in (("b", taken), ("e", at)):
                yield _object(
                    "held", phase, lane, when, cat="held", id=name, args={"seq": message[1], "bytes": nbytes}
                )  # fmt: skip
            if message in self._sent:
                yield _flow("f", lane, at, name)

    def _names(self) -> Iterator[str]:
        for pid, (process, _) in self._processes.items():
            yield _meta("process_name", pid, 0, process)
        for uid, (pid, thread) in self._lanes.items():
            yield _meta("thread_name", pid, thread, _name_of(uid, self._trace.members.get(uid)))


def _name_of(uid: int, info: MemberInfo | None) -> str:
    if info is None:
        return f"member {uid:016x}"
    return " ".join(filter(None, (info.role, info.label or f"{uid:016x}")))


def _id(sender: int, seq: int, receiver: int) -> str:
    """Of a flow: one message on its way to one receiver."""
    return f"{sender:016x}.{seq}.{receiver:016x}"


def _object(name: str, phase: str, lane: tuple[int, int], at: int, **more: Any) -> str:
    head = f'{{"name":"{name}","ph":"{phase}","pid":{lane[0]},"tid":{lane[1]},"ts":{_time(at)}'
    return head + "".join(f',"{key}":{json.dumps(value)}' for key, value in more.items()) + "}"


def _slice(name: str, lane: tuple[int, int], begin: int, end: int, args: dict[str, Any]) -> str:
    head = f'{{"name":"{name}","cat":"message","ph":"X","pid":{lane[0]},"tid":{lane[1]},"ts":{_time(begin)}'
    return f'{head},"dur":{_time(max(0, end - begin))},"args":{json.dumps(args)}}}'


def _flow(phase: str, lane: tuple[int, int], at: int, name: str) -> str:
    return _object("message", phase, lane, at, cat="flow", id=name, bp="e")


def _meta(what: str, pid: int, thread: int, name: str) -> str:
    return json.dumps({"name": what, "ph": "M", "pid": pid, "tid": thread, "args": {"name": name}})
