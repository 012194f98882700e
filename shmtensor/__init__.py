"""Move tensors between processes on one host at memory speed.

A producer writes tensor bytes once into a ring of shared-memory slots; consumers get tensors that *are* these slots.
Importing this package imports no torch; torch is imported when the first tensor arrives.
"""

from __future__ import annotations

from .endpoints.loan import Loan
from .endpoints.message import Message
from .endpoints.pubsub import Publisher, Subscriber
from .endpoints.workqueue import Consumer, Producer
from .errors import (
    ArgumentError,
    ArgumentTypeError,
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

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "ClosedError",
    "Consumer",
    "EndOfStream",
    "ForkedError",
    "Loan",
    "Message",
    "PeerDied",
    "PlatformError",
    "Producer",
    "Publisher",
    "ReceiverStatistics",
    "ReleasedError",
    "ResourceError",
    "RingFull",
    "SenderStatistics",
    "ShmTensorError",
    "Subscriber",
    "TimedOut",
    "WireError",
    "__version__",
]
