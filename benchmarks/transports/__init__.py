"""The transports that are measured. Add a rival here: README.md shows how."""

from __future__ import annotations

from .base import ANY_OBJECT, FAN_IN, FAN_OUT, PAIR, WORK_QUEUE, Link, LinkSettings, Receiver, Sender, Transport, opened
from .faster_fifo_queue import FasterFifo
from .iceoryx2_pubsub import Iceoryx2
from .pipes import PicklePipe
from .queues import PickleQueue, ShmTensorQueue
from .ray_actor import RayActor
from .shared_memory_pipe import SharedMemoryAndPipe
from .shmtensor_pubsub import ShmTensor
from .spdl_arena import SpdlPool, SpdlRing
from .torch_queues import TorchQueueDescriptor, TorchQueueFileSystem
from .vllm_queue import VllmMessageQueue
from .zenoh_shm import Zenoh
from .zmq_pair import ZmqBytes, ZmqNoCopy

SHMTENSOR = ShmTensor()
ICEORYX2 = Iceoryx2()
TORCH_DESCRIPTOR = TorchQueueDescriptor()
TORCH_FILE_SYSTEM = TorchQueueFileSystem()
PICKLE = PickleQueue()
SHMTENSOR_QUEUE = ShmTensorQueue()
PIPE = PicklePipe()
SHARED_MEMORY = SharedMemoryAndPipe()
ZMQ = ZmqBytes()
ZMQ_NO_COPY = ZmqNoCopy()
FASTER_FIFO = FasterFifo()
ZENOH = Zenoh()
SPDL_POOL = SpdlPool()
SPDL_RING = SpdlRing()
VLLM = VllmMessageQueue()
RAY = RayActor()

TRANSPORTS: tuple[Transport, ...] = (
    SHMTENSOR, SHMTENSOR_QUEUE, ICEORYX2, VLLM, SHARED_MEMORY, ZMQ, ZMQ_NO_COPY, PIPE, PICKLE, FASTER_FIFO,
    TORCH_DESCRIPTOR, TORCH_FILE_SYSTEM, SPDL_POOL, SPDL_RING, ZENOH, RAY,
)  # fmt: skip


def that_can(pattern: str) -> tuple[Transport, ...]:
    """The transports that have links of this pattern."""
    return tuple(each for each in TRANSPORTS if pattern in each.patterns and not each.own_processes)


__all__ = [
    "ANY_OBJECT",
    "FAN_IN",
    "FAN_OUT",
    "FASTER_FIFO",
    "ICEORYX2",
    "PAIR",
    "PICKLE",
    "PIPE",
    "RAY",
    "SHARED_MEMORY",
    "SHMTENSOR",
    "SHMTENSOR_QUEUE",
    "SPDL_POOL",
    "SPDL_RING",
    "TORCH_DESCRIPTOR",
    "TORCH_FILE_SYSTEM",
    "TRANSPORTS",
    "VLLM",
    "WORK_QUEUE",
    "ZENOH",
    "ZMQ",
    "ZMQ_NO_COPY",
    "Link",
    "LinkSettings",
    "Receiver",
    "Sender",
    "Transport",
    "opened",
    "that_can",
]
