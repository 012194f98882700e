"""Move tensors between processes on one host at memory speed.

A producer writes tensor bytes once into a ring of shared-memory slots; consumers get tensors that *are* these slots.
Importing this package imports no torch; torch is imported when the first tensor arrives. The drop-ins for the standard
library's queues, contexts and executors, and the checkpoints, are imported when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .endpoints.loan import Loan
from .endpoints.message import Message
from .endpoints.pubsub import Publisher, Subscriber
from .endpoints.workqueue import Consumer, Producer
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    ClosedError,
    EndOfStream,
    ForkedError,
    PeerDied,
    PlatformError,
    ReleasedError,
    ResourceError,
    RingFull,
    ShmTensorError,
    TimedOut,
    WireError,
)
from .statistics import ReceiverStatistics, SenderStatistics

if TYPE_CHECKING:
    from .checkpoint.filling import load_into
    from .checkpoint.loader import load_arrays, load_checkpoint
    from .checkpoint.writer import CheckpointWriter
    from .dropins.context import get_context
    from .dropins.executor import ProcessPoolExecutor
    from .dropins.joinable import JoinableQueue
    from .dropins.queues import Queue, SimpleQueue

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "CheckpointError",
    "CheckpointWriter",
    "ClosedError",
    "Consumer",
    "EndOfStream",
    "ForkedError",
    "JoinableQueue",
    "Loan",
    "Message",
    "PeerDied",
    "PlatformError",
    "ProcessPoolExecutor",
    "Producer",
    "Publisher",
    "Queue",
    "ReceiverStatistics",
    "ReleasedError",
    "ResourceError",
    "RingFull",
    "SenderStatistics",
    "ShmTensorError",
    "SimpleQueue",
    "Subscriber",
    "TimedOut",
    "WireError",
    "__version__",
    "get_context",
    "load_arrays",
    "load_checkpoint",
    "load_into",
]

_LAZY = {
    "CheckpointWriter": "checkpoint.writer",
    "JoinableQueue": "dropins.joinable",
    "ProcessPoolExecutor": "dropins.executor",
    "Queue": "dropins.queues",
    "SimpleQueue": "dropins.queues",
    "get_context": "dropins.context",
    "load_arrays": "checkpoint.loader",
    "load_checkpoint": "checkpoint.loader",
    "load_into": "checkpoint.filling",
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{module}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
