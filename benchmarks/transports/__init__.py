"""The transports that are measured. Add a rival here: README.md shows how."""

from __future__ import annotations

from .base import Link, LinkSettings, Receiver, Sender, Transport
from .iceoryx2_pubsub import Iceoryx2
from .queues import PickleQueue, TorchQueueDescriptor, TorchQueueFileSystem
from .shmtensor_pubsub import ShmTensor
from .zmq_pair import ZmqBytes

SHMTENSOR = ShmTensor()
ICEORYX2 = Iceoryx2()
TORCH_DESCRIPTOR = TorchQueueDescriptor()
TORCH_FILE_SYSTEM = TorchQueueFileSystem()
PICKLE = PickleQueue()
ZMQ = ZmqBytes()

TRANSPORTS: tuple[Transport, ...] = (SHMTENSOR, ICEORYX2, TORCH_DESCRIPTOR, TORCH_FILE_SYSTEM, PICKLE, ZMQ)

__all__ = [
    "ICEORYX2",
    "PICKLE",
    "SHMTENSOR",
    "TORCH_DESCRIPTOR",
    "TORCH_FILE_SYSTEM",
    "TRANSPORTS",
    "ZMQ",
    "Link",
    "LinkSettings",
    "Receiver",
    "Sender",
    "Transport",
]
