"""Where and with what a run was made."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
import time

from .gpu import GPU
from .transports import TRANSPORTS

FURTHER = ("numpy", "msgpack", "pyarrow", "safetensors", "spdl_io")
"""What else is measured, beside the transports' own packages."""


def describe_machine(*, gpu: bool = False) -> dict[str, object]:
    """CPU, cores, kernel, and how busy it is before the run; the GPU if it is asked for."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "cores_allowed": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "load_average": os.getloadavg(),
        "two_at_once": two_at_once() if len(os.sched_getaffinity(0)) > 1 else None,
        "gpu": GPU.describe() if gpu else None,
    }


_COUNTER = """
import sys, time
start, end, count = float(sys.argv[1]), float(sys.argv[2]), 0
while time.monotonic() < start: pass
while time.monotonic() < end: count += 1
print(count)
"""


def two_at_once(rounds: int = 5, seconds: float = 0.2) -> float:
    """How much two processes do at once, of what one does alone in the same time; the median of some rounds.

    2 where each has a core. Near 1 where the two cores are threads of one, as virtual machines may have them, or where
    something else runs: then both ends of a channel take their time from each other.
    """

    def counts(processes: int) -> int:
        start = time.monotonic() + 0.1
        command = [sys.executable, "-S", "-c", _COUNTER, str(start), str(start + seconds)]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
        return sum(int(process.communicate()[0]) for process in running)

    return statistics.median(counts(2) / max(1, counts(1)) for _ in range(rounds))


def describe_versions() -> dict[str, str | None]:
    """Python and every package that is measured; None: not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for transport in TRANSPORTS:
        if transport.package is not None:
            name = transport.distribution or transport.package
            versions[name] = None if transport.skip_reason() else transport.version()
    for name in FURTHER:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
