"""A Ray actor: the driver calls it with a tensor, and gets one back through Ray's object store, or its node's."""

from __future__ import annotations

import os
from collections import deque
from typing import Any

from .base import Link, LinkSettings, Transport

STORE_BYTES = 2 << 30


class RayPeer:
    """A cluster of this machine alone with one actor, which keeps its own tensor-returning method warm.

    Args:
        nodes: 2: the actor is on a second node, with an object store of its own: what it is called with goes there
            through sockets, over loopback.
    """

    def __init__(self, nodes: int = 1) -> None:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray

        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        self._cluster: Any = None
        if nodes == 1:
            ray.init(num_cpus=1, include_dashboard=False, object_store_memory=STORE_BYTES, **quiet)
        else:
            from ray.cluster_utils import Cluster

            node: dict[str, Any] = {"object_store_memory": STORE_BYTES, "include_dashboard": False}
            self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **node})
            self._cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
            ray.init(address=self._cluster.address, **quiet)

        class Echo:
            def echo(self, value: Any) -> Any:
                return value

            def take(self, value: Any) -> int:
                return value.nbytes

        self._ray = ray
        self._actor = ray.remote(Echo).remote()

    def trip(self, payload: Any) -> Any:
        """There and back."""
        return self._ray.get(self._actor.echo.remote(payload))

    def push(self, payload: Any, count: int, in_flight: int) -> None:
        """Send it `count` times, so many calls at once at most, and wait until all have run."""
        calls: deque[Any] = deque()
        take, get = self._actor.take, self._ray.get
        for _ in range(count):
            if len(calls) == in_flight:
                get(calls.popleft())
            calls.append(take.remote(payload))
        get(list(calls))

    def close(self) -> None:
        self._ray.shutdown()
        if self._cluster is not None:
            self._cluster.shutdown()


class RayActor(Transport):
    name = "Ray actor"
    package = "ray"
    work = "serialize into the object store, call the actor; it maps the object as a torch tensor"
    own_processes = True

    def link(self, settings: LinkSettings) -> Link:
        raise NotImplementedError("Ray starts the other process itself: use peer()")

    def peer(self, nodes: int = 1) -> RayPeer:
        return RayPeer(nodes)
