"""A Ray actor: the driver calls it with a tensor, and gets one back through Ray's object store."""

from __future__ import annotations

import os
from collections import deque
from typing import Any

from .base import Link, LinkSettings, Transport

STORE_BYTES = 2 << 30


class RayPeer:
    """A cluster of this machine alone with one actor, which keeps its own tensor-returning method warm."""

    def __init__(self) -> None:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray

        ray.init(
            num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
            object_store_memory=STORE_BYTES,
        )  # fmt: skip

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


class RayActor(Transport):
    name = "Ray actor"
    package = "ray"
    work = "serialize into the object store, call the actor; it maps the object as a torch tensor"
    own_processes = True

    def link(self, settings: LinkSettings) -> Link:
        raise NotImplementedError("Ray starts the other process itself: use peer()")

    def peer(self) -> RayPeer:
        return RayPeer()
