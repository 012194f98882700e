"""The workloads, one file each. Add one here: README.md shows how."""

from __future__ import annotations

from . import asleep, fan_out, idle, large, round_trip, throughput
from .base import ROUNDS, Case, Workload

WORKLOADS: tuple[Workload, ...] = (
    round_trip.WORKLOAD,
    asleep.WORKLOAD,
    large.WORKLOAD,
    fan_out.WORKLOAD,
    idle.WORKLOAD,
    throughput.WORKLOAD,
)

__all__ = ["ROUNDS", "WORKLOADS", "Case", "Workload"]
