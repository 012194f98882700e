"""What idle relays of one channel cost, from which docs/internals/relay.md works out what 100 hosts would.

    python -m benchmarks.relay_scale

Over loopback. Each sender has sent one message. The near relay that is measured is alone in its process.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .processes import NO_TORCH, Role, fresh_name, run_roles

CASES = ((1, 0), (64, 0), (1, 64))
"""Near relays, and senders of each one's channel. The channel there has at most 256 members."""
SECONDS = 10.0
_TOGETHER = 21
"""Near relays in one process, of those that are not measured."""


class Cost(NamedTuple):
    """Of one process, with all its threads. MiB of resident memory: its own, and shared; percent of a core."""

    own: float
    shared: float
    cpu: float
    threads: int

    @classmethod
    def now(cls) -> Cost:
        """Of this process, from now on, when it has come to rest."""
        time.sleep(SECONDS / 2)
        cpu, wall = time.process_time(), time.monotonic()
        time.sleep(SECONDS)
        percent = 100 * (time.process_time() - cpu) / (time.monotonic() - wall)
        said = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        own, files, shared = (int(said[f"Rss{what}"].split()[0]) / 1024 for what in ("Anon", "File", "Shmem"))
        return cls(own + files, shared, percent, int(said["Threads"]))

    def __str__(self) -> str:
        return f"{self.own:3.0f} + {self.shared:3.0f} MiB, {self.cpu:5.2f} %, {self.threads:2} threads"


def _far(meet: Callable[[], object], name: str, address: str) -> Cost:
    import shmtensor

    with shmtensor.Relay(name, listen=address):
        for _ in range(2):
            meet()
        found = Cost.now()
        meet()
    return found


def _near(meet: Callable[[], object], names: list[str], address: str, remote: str) -> Cost:
    import shmtensor

    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(shmtensor.Relay(name, to=address, remote=remote, pattern="fan-out")).wait(60)
        for _ in range(2):
            meet()
        found = Cost.now()
    meet()
    return found


def _send(meet: Callable[[], object], names: list[str], count: int) -> None:
    import shmtensor

    with contextlib.ExitStack() as stack:
        senders = [stack.enter_context(shmtensor.Publisher(name, slots=2)) for name in names for _ in range(count)]
        meet()
        for sender in senders:
            sender.send(0)
        meet()
        meet()


def measure(near: int, senders: int) -> tuple[Cost, Cost]:
    """Of a near relay, and of the far one of so many."""
    from .workloads.relay import LOOPBACK, network  # in this process only: their modules would count there

    remote = fresh_name()
    names = [f"{remote}-{number}" for number in range(near)]
    groups = [names[:1], *(names[first : first + _TOGETHER] for first in range(1, near, _TOGETHER))]
    with network(LOOPBACK) as ends:
        roles = [Role(_near, (group, ends.address, remote), NO_TORCH) for group in groups]
        roles.append(Role(_send, (names, senders), NO_TORCH))
        far, one, *_ = run_roles([Role(_far, (remote, ends.address), NO_TORCH), *roles])
    return one, far


def main() -> None:
    print(f"{'near relays':>11}  {'senders of each':>15}  {'a near relay':>36}  {'the far relay':>36}")
    for near, senders in CASES:
        costs = "".join(f"  {cost!s:>36}" for cost in measure(near, senders))
        print(f"{near:>11}  {senders:>15}{costs}", flush=True)


if __name__ == "__main__":
    main()
