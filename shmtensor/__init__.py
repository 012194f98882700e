"""Move tensors between processes on one host at memory speed.

A producer writes tensor bytes once into a ring of shared-memory slots; consumers get tensors that *are* these slots.
Importing this package imports no torch; torch is imported when the first tensor arrives. The drop-ins for the standard
library's queues, contexts and executors, request and reply, and the checkpoints, are imported when they are first
asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .endpoints.consumer import Consumer
from .endpoints.loan import Loan
from .endpoints.message import Message
from .endpoints.producer import Producer
from .endpoints.pubsub import Publisher, Subscriber
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    ClosedError,
    CudaError,
    EndOfStream,
    ForkedError,
    LoopError,
    PeerDied,
    PlatformError,
    ReentrantError,
    ReleasedError,
    RemoteError,
    ResourceError,
    RingFull,
    ShmTensorError,
    TimedOut,
    WireError,
)
from .statistics import ClientStatistics, ReceiverStatistics, SenderStatistics, ServerStatistics

if TYPE_CHECKING:
    from .checkpoint.filling import load_into
    from .checkpoint.lazy import CheckpointReader, TensorHandle, open_checkpoint
    from .checkpoint.listing import CheckpointInfo, list_checkpoints, load_newest
    from .checkpoint.loader import load_arrays, load_checkpoint
    from .checkpoint.writer import CheckpointWriter
    from .dropins.context import get_context
    from .dropins.executor import ProcessPoolExecutor
    from .dropins.joinable import JoinableQueue
    from .dropins.queues import Queue, SimpleQueue
    from .rpc.batching import Batch
    from .rpc.call import RequestFuture
    from .rpc.client import Client
    from .rpc.request import Request
    from .rpc.server import Server
    from .rpc.workers import WorkerPool, serve

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "Batch",
    "CheckpointError",
    "CheckpointInfo",
    "CheckpointReader",
    "CheckpointWriter",
    "Client",
    "ClientStatistics",
    "ClosedError",
    "Consumer",
    "CudaError",
    "EndOfStream",
    "ForkedError",
    "JoinableQueue",
    "Loan",
    "LoopError",
    "Message",
    "PeerDied",
    "PlatformError",
    "ProcessPoolExecutor",
    "Producer",
    "Publisher",
    "Queue",
    "ReceiverStatistics",
    "ReentrantError",
    "ReleasedError",
    "RemoteError",
    "Request",
    "RequestFuture",
    "ResourceError",
    "RingFull",
    "SenderStatistics",
    "Server",
    "ServerStatistics",
    "ShmTensorError",
    "SimpleQueue",
    "Subscriber",
    "TensorHandle",
    "TimedOut",
    "WireError",
    "WorkerPool",
    "__version__",
    "get_context",
    "list_checkpoints",
    "load_arrays",
    "load_checkpoint",
    "load_into",
    "load_newest",
    "open_checkpoint",
    "serve",
]

_LAZY = {
    "Batch": "rpc.batching",
    "CheckpointInfo": "checkpoint.listing",
    "CheckpointReader": "checkpoint.lazy",
    "CheckpointWriter": "checkpoint.writer",
    "Client": "rpc.client",
    "JoinableQueue": "dropins.joinable",
    "ProcessPoolExecutor": "dropins.executor",
    "Queue": "dropins.queues",
    "Request": "rpc.request",
    "RequestFuture": "rpc.call",
    "Server": "rpc.server",
    "SimpleQueue": "dropins.queues",
    "TensorHandle": "checkpoint.lazy",
    "WorkerPool": "rpc.workers",
    "get_context": "dropins.context",
    "list_checkpoints": "checkpoint.listing",
    "load_arrays": "checkpoint.loader",
    "load_checkpoint": "checkpoint.loader",
    "load_into": "checkpoint.filling",
    "load_newest": "checkpoint.listing",
    "open_checkpoint": "checkpoint.lazy",
    "serve": "rpc.workers",
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{module}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
