"""Where and with what a run was made."""

from __future__ import annotations

import importlib.metadata
import os
import platform

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
        "gpu": GPU.describe() if gpu else None,
    }


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
