"""The relays of one node, in an actor on it: one that listens, and one to each other node.

The driver repeatedly sends the table of nodes (`NodeRelays.update`), and each node creates and ends relays to match it:
so a lost call, a node that joins late and a restarted actor need no special handling.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import xxhash

from ..errors import ResourceError
from ..relay.keys import host_id
from ..relay.outbound import OPEN, SEEKING
from ..relay.relay import AWAY, Relay
from ..statistics import RelayStatistics

log = logging.getLogger("shmtensor.ray")

_MOST_PORTS: Final = 64
"""Ports that are tried: those in use are others'."""
_AGAIN_S: Final = 5.0
_DOUBLED: Final = 6
"""Seconds after which a relay that has failed is made again, and how often at most this is doubled, as it fails again
and again."""
_LINGER_S: Final = 1.0
"""Seconds that the other channels of a relay have, when it ends because one has failed."""


@dataclass(frozen=True)
class Settings:
    """The settings that each node gets once. For the fields that are not described here see `relays`.

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
    """A text that is equal for nodes that share a `/dev/shm`; empty before the node has reported."""
    starts: int
    """How often its actor was started."""
    received: dict[str, RelayStatistics] = field(default_factory=dict)
    """Counters of the messages that came from other nodes, by channel."""
    sent: dict[str, dict[str, RelayStatistics]] = field(default_factory=dict)
    """Counters of the messages sent to other nodes, by the other node's ID, then by channel."""


@dataclass(frozen=True)
class Report:
    """The answer of a node: the fields of `NodeStatistics` that it knows itself."""

    host: str
    address: str
    problem: str
    received: dict[str, RelayStatistics]
    sent: dict[str, dict[str, RelayStatistics]]


@dataclass
class _Near:
    """The relay to another node.

    relay:      None while there is none, as it has failed
    problem:    why
    failures:   how often in a row; it is well when it has been there for as long as the next pause
    begin_due:  when to make it
    begun:      when it was made
    lost_since: since when it looks for its peer, which it was connected to; None: it does not
    """

    address: str
    relay: Relay | None = None
    problem: str = ""
    failures: int = 0
    begin_due: float = 0.0
    begun: float = 0.0
    lost_since: float | None = None


class NodeRelays:
    """The actor's class. One call at a time."""

    def __init__(self, node: str, ip: str, settings: Settings) -> None:
        self._node, self._ip, self._settings = node, ip, settings
        self._host = host_id()
        self._far: Relay | None = None
        self._address = self._problem = ""
        self._away = AWAY if settings.away is None else settings.away
        self._near: dict[str, _Near] = {}

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
            for node in [node for node, near in self._near.items() if others.get(node) != near.address]:
                _end([self._near.pop(node)], 0)
            for node, address in others.items() if self._far is not None else ():
                near = self._near.setdefault(node, _Near(address))
                self._look_after(near)
                problem = problem or near.problem
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem and problem != self._problem:
            log.error("node %s: %s", self._node, problem)
        self._problem = problem
        return Report(
            self._host, self._address, problem, {} if self._far is None else self._far.statistics(),
            {node: near.relay.statistics() for node, near in self._near.items() if near.relay is not None},
        )  # fmt: skip

    def _look_after(self, near: _Near) -> None:
        """Make the relay to a node, or make it again if it has failed, or has not found the node for too long."""
        now, pause = time.monotonic(), _AGAIN_S * 2 ** min(near.failures, _DOUBLED)
        try:
            if near.relay is None:
                if now < near.begin_due:
                    return
                near.relay, near.begun = self._connect(near.address), now
            near.relay.check()
        except Exception as error:
            near.problem = f"to {near.address}: {error}"
            near.begin_due = now + pause
            near.failures += 1
            _end([near], _LINGER_S)
            return
        channels = near.relay.statistics().values()
        if all(it.state == OPEN for it in channels):
            near.problem = ""
            near.failures = near.failures if now - near.begun < pause else 0
        if not any(it.state == SEEKING and it.connections for it in channels):
            near.lost_since = None
            return
        near.lost_since = near.lost_since or now
        if now - near.lost_since > self._away:
            log.warning(
                "node %s: %s has not been reached for %g s: what was under way there is given up, and its relay is "
                "made again", self._node, near.address, self._away,
            )  # fmt: skip
            _end([near], 0)

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
        ended = list(self._near.values())
        self._near.clear()
        _end(ended, linger)

    def close(self, linger: float) -> None:
        """End all relays of this node. Idempotent."""
        self.drain(linger)
        far, self._far, self._address = self._far, None, ""
        if far is not None:
            far.close(linger)


def _end(ended: list[_Near], linger: float) -> None:
    """Close relays, all at once: one whose peer is stuck takes no time from the others."""
    relays = [near.relay for near in ended if near.relay is not None]
    for near in ended:
        near.relay = near.lost_since = None
    if relays:
        with ThreadPoolExecutor(len(relays)) as threads:
            list(threads.map(lambda relay: relay.close(linger), relays))
