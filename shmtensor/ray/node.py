"""The relays of one node, in an actor on it: one that listens, and one to each other node.

The driver says again and again who is there (`NodeRelays.update`), and each node makes of its relays what the table
says: so a lost call, a node that comes late and an actor that was started again are all the same case.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any, Final

import xxhash

from ..errors import ResourceError
from ..relay.keys import host_id
from ..relay.relay import Relay
from ..statistics import RelayStatistics

log = logging.getLogger("shmtensor.ray")

_MOST_PORTS: Final = 64
"""Ports that are tried: those in use are others'."""


@dataclass(frozen=True)
class Settings:
    """What each node is told once. For the fields that are not here see `relays`.

    user: a word that only the relays of one call of `relays` know: they refuse all others.
    """

    names: tuple[str, ...]
    pattern: str
    delivery: str
    ports: tuple[int, int]
    protocol: str
    config: str | None
    window: int | None
    window_bytes: int | str | None
    away: float | None
    slots: int | None
    max_bytes: int | str | None
    user: str


@dataclass(frozen=True)
class NodeStatistics:
    """The relays of one node of a Ray cluster, as they were when it last reported, at most some seconds ago."""

    node: str
    """The node's ID in Ray, hexadecimal."""
    state: str
    """`"starting"`: its actor has not reported yet, or was started again. `"open"`: it listens. `"shared"`: another
    node has the same `/dev/shm`, and its relays serve this one as well. `"failed"`: see `problem`."""
    problem: str
    """Why it has no relay, or none to some other node; empty if nothing is wrong."""
    address: str
    """The endpoint at which it listens, such as `"tcp/192.0.2.7:21234"`; empty if it does not."""
    host: str
    """What is the same for nodes that share a `/dev/shm`; empty before it has reported."""
    starts: int
    """How often its actor was started."""
    received: dict[str, RelayStatistics] = field(default_factory=dict)
    """By channel: what came from other nodes."""
    sent: dict[str, dict[str, RelayStatistics]] = field(default_factory=dict)
    """By the other node's ID, then by channel: what goes there."""


@dataclass(frozen=True)
class Report:
    """What a node answers: the fields of `NodeStatistics` that it knows itself."""

    host: str
    address: str
    problem: str
    received: dict[str, RelayStatistics]
    sent: dict[str, dict[str, RelayStatistics]]


class NodeRelays:
    """The actor's class. One call at a time."""

    def __init__(self, node: str, ip: str, settings: Settings) -> None:
        self._node, self._ip, self._settings = node, ip, settings
        self._host = host_id()
        self._far: Relay | None = None
        self._address = self._problem = ""
        self._near: dict[str, tuple[str, Relay]] = {}

    def update(self, is_active: bool, others: dict[str, str]) -> Report:
        """Make the relays that the table asks for, end all others, and report.

        Args:
            is_active: whether this node relays, and no other one that has the same `/dev/shm`.
            others: the addresses of the other nodes that do, by their IDs.
        """
        problem = ""
        try:
            if is_active and self._far is None:
                self._listen()
            elif not is_active:
                self.close(0)
            for node in [node for node, (address, _) in self._near.items() if others.get(node) != address]:
                self._near.pop(node)[1].close(linger=0)
            for node, address in others.items() if self._far is not None else ():
                if node not in self._near:
                    self._near[node] = address, self._connect(address)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        for address, relay in self._near.values():
            try:
                relay.check()
            except Exception as error:
                problem = problem or f"to {address}: {error}"
        if problem and problem != self._problem:
            log.error("node %s: %s", self._node, problem)
        self._problem = problem
        return Report(
            self._host, self._address, problem, {} if self._far is None else self._far.statistics(),
            {node: relay.statistics() for node, (_, relay) in self._near.items()},
        )  # fmt: skip

    def _listen(self) -> None:
        """Listen at the first port that is free, in an order that is this node's own: so a relay that is started again
        finds its old one, and the others find it there."""
        settings = self._settings
        first, last = settings.ports
        count = last - first + 1
        start: int = xxhash.xxh32_intdigest(f"{self._node} {' '.join(settings.names)}".encode())
        refusal: ResourceError | None = None
        for number in range(min(count, _MOST_PORTS)):
            ip = f"[{self._ip}]" if ":" in self._ip else self._ip
            address = f"{settings.protocol}/{ip}:{first + (start + number) % count}"
            try:
                self._far = Relay(
                    settings.names, listen=address, config=settings.config, user=settings.user,
                    window=settings.window, window_bytes=settings.window_bytes, away=settings.away,
                    slots=settings.slots, max_bytes=settings.max_bytes,
                )  # fmt: skip
            except ResourceError as error:
                refusal = error
                continue
            self._address = address
            return
        if refusal is not None:
            raise refusal

    def _connect(self, address: str) -> Relay:
        settings: Any = self._settings
        return Relay(
            settings.names, to=address, config=settings.config, user=settings.user, pattern=settings.pattern,
            delivery=settings.delivery, transit=False,
        )  # fmt: skip

    def drain(self, linger: float) -> None:
        """Send nothing more, when what is under way is acknowledged or `linger` seconds are over."""
        deadline = time.monotonic() + linger
        while self._near:
            self._near.popitem()[1][1].close(max(0.0, deadline - time.monotonic()))

    def close(self, linger: float) -> None:
        """End all relays of this node. Idempotent."""
        self.drain(linger)
        far, self._far, self._address = self._far, None, ""
        if far is not None:
            far.close(linger)
