"""How many processors this process may use: its affinity, and the CPU quotas of its control groups."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from .descriptors import OpenFile

_GROUPS: Final = Path("/sys/fs/cgroup")
_OWN: Final = Path("/proc/self/cgroup")


def usable() -> int:
    """How many processors the calling thread may use at the same time, at least 1.

    That is the smaller of its affinity and, rounded down, the quota of the process's control group and its parents.
    """
    allowed = len(os.sched_getaffinity(0))
    return allowed if allowed == 1 else max(1, int(min(allowed, quota())))


def quota(own: Path = _OWN, groups: Path = _GROUPS) -> float:
    """Seconds of processor time that the control groups grant per second; infinity if there is no known limit."""
    try:
        lines = _text_of(own).splitlines()
    except OSError:
        return float("inf")
    least = float("inf")
    for line in lines:  # "0::/path" of version 2, "4:cpu,cpuacct:/path" of version 1
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            least = min(least, _least(groups, path, _quota_2))
        elif "cpu" in controllers.split(","):
            for mount in {controllers, "cpu"}:
                least = min(least, _least(groups / mount, path, _quota_1))
    return least


def _least(root: Path, path: str, read: Callable[[Path], float]) -> float:
    """The smallest quota of a group and its parents.

    In a container the path may be the host's: then only the root, which is the container's own group, can be read.
    """
    group = root / path.lstrip("/")
    least = read(root)
    while group != root and root in group.parents:
        least = min(least, read(group))
        group = group.parent
    return least


def _quota_2(group: Path) -> float:
    try:
        limit, period = _text_of(group / "cpu.max").split()[:2]
        return float("inf") if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return float("inf")


def _quota_1(group: Path) -> float:
    try:
        limit = int(_text_of(group / "cpu.cfs_quota_us"))
        return float("inf") if limit < 0 else limit / int(_text_of(group / "cpu.cfs_period_us"))
    except (OSError, ValueError, ZeroDivisionError):
        return float("inf")


def _text_of(path: Path) -> str:
    """Read a short file of the kernel. It is closed even if an exception of a signal handler interrupts this."""
    file = OpenFile()
    try:
        file.open(os.open, str(path), os.O_RDONLY | os.O_CLOEXEC)
        return os.read(file.fd, 1 << 16).decode()
    finally:
        file.close()
