"""`relays`: channels of a Ray cluster, by one name on every node."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from ..channel.names import check_channel
from ..endpoints.base import Local
from ..errors import ArgumentError, ArgumentTypeError, ClosedError, DependencyError, ForkedError, TimedOut, WireError
from ..options import check_choice, check_count, check_timeout, how_to_install, parse_bytes
from ..relay.frames import ONE_VERSION, PATTERNS
from ..relay.session import zenoh_module
from ..relay.threads import Closing
from ..rpc.endpoints import check_service
from ..statistics import RelayStatistics
from .node import NodeRelays, NodeStatistics, Report, Settings

log = logging.getLogger("shmtensor.ray")

PORTS: Final = range(20000, 30000)
"""Outside of Ray's own ports for workers, and of those that the kernel gives to outgoing connections."""
QUEUE_WINDOW: Final = 16
"""Of a work queue: what a node has taken waits for its consumers, while those of other nodes may be idle."""
_TICK_S: Final = 0.1
_IDLE_S: Final = 1.0
"""Seconds between two rounds while nothing changes."""
_START_AGAIN_S: Final = 1.0
_DOUBLED: Final = 6
"""Seconds after which an actor is started again, and how often at most this is doubled, as it fails again and again."""
_LINGER_S: Final = 5.0
_GRACE_S: Final = 5.0
"""Seconds beyond `linger` that `close` waits for nodes that do not answer."""


def ray_module() -> Any:
    """Ray. Raises `DependencyError` if it is missing, `ArgumentError` if this process is not connected to a cluster."""
    try:
        import ray
    except ImportError:
        raise DependencyError(
            f"shmtensor.ray needs Ray: {how_to_install('ray')} (or: pip install ray)", name="ray"
        ) from None
    if not ray.is_initialized():
        raise ArgumentError("this process is not connected to a Ray cluster: call ray.init() first")
    return ray


def relays(
    name: str | Sequence[str],
    *,
    pattern: Literal["fan-out", "work-queue", "service"] = "fan-out",
    nodes: Sequence[str] | None = None,
    ports: range = PORTS,
    delivery: Literal["auto", "all", "latest"] = "auto",
    window: int | None = None,
    window_bytes: int | str | None = None,
    away: float | None = None,
    slots: int | None = None,
    max_bytes: int | str | None = None,
    protocol: Literal["tcp", "tls", "quic"] = "tcp",
    config: str | os.PathLike[str] | None = None,
) -> Relays:
    """Make channels the same on all nodes of the Ray cluster: actors and tasks on any node meet by channel name.

    Experimental. An actor without CPUs is started on each node, with a relay there and a connection to each other node.
    The actors are this process's: they end with `close()`, and with this process. A node that joins gets one, an actor
    that dies is replaced within some seconds, and a node that leaves is forgotten.
    Nodes that share a `/dev/shm` share their channels anyway, and have one relay. Call it once for a channel: over two
    ways, messages arrive twice. docs/guide/ray.md.

    Args:
        name: the channel's name, or several.
        pattern: what the channels are: `"fan-out"`, `"work-queue"` or `"service"`.
        nodes: IDs of the nodes that take part, as `ray.nodes()` names them; None: all, also those that join later.
        ports: where a node's relay listens, at the node's IP: the first free one, in an order of the node's own.
        delivery: of a fan-out: as for `Relay`.
        window, window_bytes, away, slots, max_bytes: as for `Relay`. None: its defaults, but a window of 16 messages
            for a work queue.
        protocol, config: of the endpoints, and the path of a Zenoh configuration file on every node, for TLS.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is not valid, or this process is not connected to a cluster.
        DependencyError: Ray, or Zenoh, is not installed.

    >>> import ray, shmtensor.ray
    >>> with shmtensor.ray.relays("frames") as there:  # doctest: +SKIP
    ...     there.wait(timeout=60)
    """
    names = tuple(check_channel(each) for each in ([name] if isinstance(name, str) else name))
    if not names or len(set(names)) != len(names):
        raise ArgumentError(f"name={name!r}: one channel, or several that differ")
    check_choice("pattern", pattern, tuple(PATTERNS))
    check_choice("delivery", delivery, ("auto", "all", "latest"))
    check_choice("protocol", protocol, ("tcp", "tls", "quic"))
    if pattern == "service":
        for each in names:
            check_service(each)
    if pattern != "fan-out" and delivery != "auto":
        raise ArgumentError(f'delivery={delivery!r} is for a fan-out, pattern is "{pattern}"')
    if not isinstance(ports, range):
        raise ArgumentTypeError(f"ports is a range, such as range(20000, 30000), not {type(ports).__name__}")
    if not ports or ports.step != 1 or not 0 < ports[0] <= ports[-1] < 1 << 16:
        raise ArgumentError(f"ports={ports!r}: a range of ports from 1 to 65535, such as range(20000, 30000)")
    if isinstance(nodes, str) or (nodes is not None and not all(isinstance(each, str) for each in nodes)):
        raise ArgumentTypeError('nodes are IDs, such as [node["NodeID"] for node in ray.nodes()], or None')
    if window is not None:
        check_count("window", window, 1, 1 << 20)
    if slots is not None:
        check_count("slots", slots, 1, 1 << 20)
    check_timeout(away, "away")
    for what, size in (("window_bytes", window_bytes), ("max_bytes", max_bytes)):
        if size is not None:
            parse_bytes(size, what)
    ray = ray_module()
    zenoh_module()
    settings = Settings(
        names=names, pattern=pattern, delivery=delivery, ports=(ports[0], ports[-1]), protocol=protocol,
        config=None if config is None else os.fspath(config),
        window=QUEUE_WINDOW if window is None and pattern == "work-queue" else window, window_bytes=window_bytes,
        away=away, slots=slots, max_bytes=max_bytes, user=f"ray {secrets.token_hex(16)}",
    )  # fmt: skip
    return Relays(ray, settings, None if nodes is None else frozenset(nodes))


@dataclass
class _Node:
    """A node as the thread sees it.

    pending:   the call under way, if there is one
    report:    its last one. While its actor is replaced, the others go on with it: their relays keep what is not
               acknowledged, and find its successor at the same address as a rule
    is_up:     whether it is of the actor that is there now
    failures:  how many actors in a row have ended without a report
    begin_due: when the actor may be started again
    """

    id: str
    ip: str
    actor: Any = None
    pending: Any = None
    report: Report | None = None
    is_up: bool = False
    starts: int = 0
    problem: str = ""
    failures: int = 0
    begin_due: float = 0.0


class Relays(Local):
    """What `relays` returns: the relays of a cluster, until it is closed. A context manager.

    It belongs to one process; other processes do not need it, and use the channels by name. In `statistics()` and
    `wait()`, a node is named by its ID in Ray.
    """

    def __init__(self, ray: Any, settings: Settings, only: frozenset[str] | None) -> None:
        self._ray, self._settings, self._only = ray, settings, only
        self.names = list(settings.names)
        self._pid, self._cluster = os.getpid(), self._connection()
        self._class = ray.remote(NodeRelays)
        self._nodes: dict[str, _Node] = {}
        self._changed = threading.Condition()
        self._stop = False
        self._reason = ""
        self._begun = self._seen = 0  # rounds, numbered from 1: the last one that has begun, and that went well
        self._closing, self._is_hurried = Closing(), False
        self._thread = threading.Thread(target=self._run, name="shmtensor ray relays", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # before Ray's own, which was there first

    # --- the thread

    def _run(self) -> None:
        is_well = True
        while not self._stop:
            with self._changed:
                self._begun += 1
            try:
                if not self._is_connected():
                    with self._changed:
                        self._reason = "Ray was shut down"
                        self._changed.notify_all()
                    return
                pause = _IDLE_S if self._round() else _TICK_S
                is_well = True
            except Exception:
                if is_well and self._is_connected():
                    log.exception("the relays of this Ray cluster could not be looked after, which is tried again")
                is_well, pause = False, _IDLE_S
            with self._changed:
                self._seen = self._begun if is_well else self._seen
                self._changed.notify_all()
                if not self._stop:
                    self._changed.wait(pause)

    def _connection(self) -> tuple[str, str]:
        """What differs between two clusters, and between two connections to one."""
        context = self._ray.get_runtime_context()
        return context.gcs_address, context.get_job_id()

    def _is_connected(self) -> bool:
        """Whether this process is still connected to the cluster that it was connected to."""
        try:
            return bool(self._ray.is_initialized() and self._connection() == self._cluster)
        except Exception as error:  # it is being shut down
            log.debug("no connection to Ray: %s", error)
            return False

    def _round(self) -> bool:
        """List the nodes, send the list to all of them, and take their answers. Returns whether no call is pending."""
        alive = {
            it["NodeID"]: it["NodeManagerAddress"]
            for it in self._ray.nodes()
            if it["Alive"] and (self._only is None or it["NodeID"] in self._only)
        }
        before = self._table()
        for node_id in [node_id for node_id in self._nodes if node_id not in alive]:
            log.warning("node %s has left the Ray cluster", node_id)
            self._drop_actor(self._nodes[node_id])
            with self._changed:
                del self._nodes[node_id]
        now = time.monotonic()
        for node_id, ip in alive.items():
            with self._changed:
                node = self._nodes.setdefault(node_id, _Node(node_id, ip))
            if node.actor is None and now >= node.begin_due:
                self._start(node)
        table = self._table()
        for node in self._nodes.values():
            if node.actor is not None and node.pending is None:
                others = {other: address for other, address in table.items() if other != node.id and address}
                node.pending = node.actor.update.remote(node.id in table, others)
        pending = [node.pending for node in self._nodes.values() if node.pending is not None]
        if pending:
            self._ray.wait(pending, num_returns=len(pending), timeout=_IDLE_S)
            done, _ = self._ray.wait(pending, num_returns=len(pending), timeout=0)
            for node in self._nodes.values():
                if node.pending is not None and node.pending in done:
                    self._take(node)
        return before == self._table() and all(node.is_up for node in self._nodes.values())

    def _table(self) -> dict[str, str]:
        """The nodes that relay, with their addresses, "" before they listen: one of each host, the one that already
        does if one does."""
        chosen: dict[str, tuple[bool, str]] = {}
        for node in self._nodes.values():
            if node.report is not None:
                mine = (not node.report.address, node.id)
                chosen[node.report.host] = min(mine, chosen.get(node.report.host, mine))
        found = {}
        for _, node_id in chosen.values():
            report = self._nodes[node_id].report
            found[node_id] = "" if report is None else report.address
        return found

    def _start(self, node: _Node) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        where = NodeAffinitySchedulingStrategy(node.id, soft=False)
        options = self._class.options(num_cpus=0, scheduling_strategy=where, max_restarts=0)
        node.actor = options.remote(node.id, node.ip, self._settings)
        node.starts += 1

    def _take(self, node: _Node) -> None:
        """Handle the answer of a node: its report, or the death of its actor, which is then replaced."""
        pending, node.pending = node.pending, None
        try:
            report = self._ray.get(pending)
        except self._ray.exceptions.ActorUnavailableError as error:  # it lives, and is asked again
            with self._changed:
                node.problem = _reason_of(error)
            return
        except Exception as error:
            with self._changed:
                node.problem, node.is_up = _reason_of(error), False
            log.warning("the relay of node %s has ended, and is started again: %s", node.id, node.problem)
            self._drop_actor(node)
            node.begin_due = time.monotonic() + _START_AGAIN_S * 2 ** min(node.failures, _DOUBLED)
            node.failures += 1
            return
        with self._changed:
            node.report, node.problem, node.is_up, node.failures = report, report.problem, True, 0

    def _drop_actor(self, node: _Node) -> None:
        actor, node.actor, node.pending = node.actor, None, None
        if actor is not None:
            try:
                self._ray.kill(actor, no_restart=True)
            except Exception as error:  # it is gone with its node
                log.debug("the actor of node %s: %s", node.id, error)

    # --- outside

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every node that is alive has a relay, and each of them is connected to each other one.

        Raises:
            TimedOut: that was not so within `timeout` seconds; the text names what is missing, and why.
            DependencyError: a node has no shmtensor, or no Zenoh.
            WireError: a relay was refused by another one, as the nodes have different versions.
            ClosedError: it is closed, or Ray was shut down.
        """
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            first = 1 if timeout == 0 else self._begun + 1  # the next round sees who has joined just now
            self._changed.notify_all()
            while True:
                self._check()
                missing = self._missing() if self._seen else []
                if self._seen < first:
                    missing.append("the nodes were not looked at yet")
                if not missing:
                    return
                remaining = _IDLE_S if deadline is None else min(_IDLE_S, deadline - time.monotonic())
                if remaining <= 0:
                    raise TimedOut(f"relays of {', '.join(self.names)}: {'; '.join(missing)}")
                self._changed.wait(remaining)

    def _missing(self) -> list[str]:
        """What is still missing. Raises errors that waiting will not solve."""
        table = self._table()
        missing = [] if self._nodes else ["no node is alive" if self._only is None else "none of nodes= is alive"]
        for node in self._nodes.values():
            if "No module named 'shmtensor" in node.problem or "DependencyError" in node.problem:
                raise DependencyError(
                    f"node {node.id} ({node.ip}): {node.problem}: install shmtensor on every node "
                    f"({how_to_install('ray')})",
                    name="shmtensor",
                )
        for node in self._nodes.values():
            if node.report is None or not node.is_up or node.problem:
                missing.append(f"node {node.id} ({node.ip}): {node.problem or 'its actor has not answered yet'}")
            elif node.id in table:
                if not node.report.address:
                    missing.append(f"node {node.id} ({node.ip}) does not listen yet")
                for other in table.keys() - {node.id}:
                    channels = node.report.sent.get(other, {})
                    for it in channels.values():
                        if ONE_VERSION in it.reason:
                            raise WireError(f"node {other} refuses the relay of node {node.id}: {it.reason}")
                    if {it.state for it in channels.values()} != {"open"}:
                        what = ", ".join(f"{name} {_state_of(it)}" for name, it in channels.items())
                        missing.append(f"node {node.id} is not connected to node {other}: {what or 'not tried yet'}")
        return missing

    def statistics(self) -> dict[str, NodeStatistics]:
        """What each node last reported, by its ID."""
        with self._changed:
            table = self._table()
            return {node.id: _statistics(node, node.id in table) for node in self._nodes.values()}

    def close(self, linger: float = _LINGER_S) -> None:
        """End the relays of all nodes. Idempotent.

        Args:
            linger: seconds to wait until what is under way between nodes is acknowledged, as for `Relay.close`. Nodes
                that do not answer take up to 5 s more. Another call of `close` meanwhile, as by a signal handler, ends
                the waiting.
        """
        check_timeout(linger, "linger")
        if self._pid != os.getpid():
            return
        self._is_hurried = self._closing.is_running
        self._closing.run(lambda: self._end(linger))

    def _end(self, linger: float) -> None:
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        self._thread.join()
        if self._is_connected():
            actors = list(filter(None, [node.actor for node in self._nodes.values()]))
            deadline = time.monotonic() + linger + _GRACE_S
            for step, seconds in (("drain", linger), ("close", 0.0)):  # all are drained before any of them is gone
                calls = [getattr(actor, step).remote(seconds) for actor in actors]
                self._await(calls, deadline)
            for node in self._nodes.values():
                self._drop_actor(node)
        atexit.unregister(self.close)

    def _await(self, calls: list[Any], deadline: float) -> None:
        while True:
            remaining = max(0.0, deadline - time.monotonic())
            if not calls or self._is_hurried:
                break
            _, calls = self._ray.wait(calls, num_returns=len(calls), timeout=min(_TICK_S, remaining))
            if not remaining:
                break

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise ForkedError(f"these relays belong to process {self._pid}, which forked this one")
        if self._stop:
            raise ClosedError("these relays are closed")
        if self._reason:
            raise ClosedError(f"these relays have ended: {self._reason}")

    def _instead(self) -> str:
        return "other processes need no relays of their own, they use the channels by name"

    def __enter__(self) -> Relays:
        self._check()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closing.is_over else f"{len(self._nodes)} nodes"
        return f"<Relays {self._settings.pattern} of {', '.join(self.names)}: {state}>"


def _state_of(channel: RelayStatistics) -> str:
    return f"{channel.state} ({channel.reason})" if channel.reason else channel.state


def _reason_of(error: Exception) -> str:
    """What an error of Ray's says, in one line: from the name of the exception on that caused it, if it has one."""
    text = " ".join(str(error).split())
    cause = text.rfind("Error: ")
    at = text.rfind(" ", 0, cause) + 1
    return f"{type(error).__name__}: {text[at:] if cause > 0 else text}"[:500]


def _statistics(node: _Node, is_chosen: bool) -> NodeStatistics:
    report = node.report
    if report is None or not node.is_up:
        return NodeStatistics(
            node.id, "failed" if node.problem and report is None else "starting", node.problem, "", "", node.starts
        )
    state = "shared" if not is_chosen else "open" if report.address else "failed" if report.problem else "starting"
    return NodeStatistics(
        node.id, state, node.problem, report.address, report.host, node.starts, report.received, report.sent
    )
