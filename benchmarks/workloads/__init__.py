"""The workloads, one file each. Add one here: README.md shows how."""

from __future__ import annotations

from . import (
    asleep,
    cold,
    cuda_copies,
    cuda_handover,
    cuda_prefetch,
    cuda_saving,
    dataloader,
    default_arguments,
    executor,
    fan_in,
    fan_out,
    idle,
    large,
    loading,
    loan,
    memory,
    messages,
    mixed_dict,
    newest,
    observing,
    pipeline,
    pools,
    queue,
    queue_items,
    reading,
    relay,
    remote,
    request_reply,
    round_trip,
    saving,
    serialize_array,
    serialize_tensor,
    throughput,
    work_queue,
)
from .base import SCALES, Case, Effort, Scale, Workload

WORKLOADS: tuple[Workload, ...] = tuple(
    module.WORKLOAD
    for module in (
        round_trip, asleep, throughput, default_arguments, messages, large, mixed_dict,
        fan_out, newest, fan_in, work_queue, request_reply, loan, reading,
        cold, idle, observing, memory, queue, queue_items, pools, dataloader, executor, saving, loading, remote, relay,
        serialize_tensor, serialize_array, pipeline,
        cuda_copies, cuda_handover, cuda_prefetch, cuda_saving,
    )
)  # fmt: skip

__all__ = ["SCALES", "WORKLOADS", "Case", "Effort", "Scale", "Workload"]
