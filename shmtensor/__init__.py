"""Move tensors between processes on one Linux host at memory speed.

A sender writes the bytes of a tensor once, into a slot of shared memory. A receiver gets a tensor or an array that *is*
this slot, without a copy.

| you want | use |
|---|---|
| every reader gets every message | `Publisher`, `Subscriber` |
| every message goes to one of several workers | `Producer`, `Consumer` |
| an answer to each message | `Client`, `Server`; a pool of servers: `serve`, `WorkerPool` |
| `multiprocessing` queues and `DataLoader` batches without pickling tensors | `Queue`, `get_context` |
| `concurrent.futures.ProcessPoolExecutor` without pickling tensors | `ProcessPoolExecutor` |
| to save a model while training goes on | `CheckpointWriter` |
| to load it | `load_checkpoint`, `load_newest`, `load_into`, `open_checkpoint` |
| a channel of this host on another one | `Relay`; `shmtensor relay` in a shell |
| to save and load by `torch.distributed.checkpoint` | `shmtensor.dcp.StorageWriter`, `StorageReader`, `AsyncStager` |
| channels of a Ray cluster, tensors in its object refs | `shmtensor.ray.relays`, `register` |
| to see what happens on this machine | `inspect`; `shmtensor top` in a shell |

Every error is a `ShmTensorError`. `import shmtensor` imports no torch: that happens when the first tensor is sent or
arrives.
"""

from __future__ import annotations

import errno
import importlib
import sys
from typing import TYPE_CHECKING, Any

from .errors import (
    AccessDenied,
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    ClosedError,
    CudaError,
    DependencyError,
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
    WrongKey,
)
from .statistics import (
    ClientStatistics,
    PoolStatistics,
    ReceiverStatistics,
    RelayStatistics,
    SenderStatistics,
    ServerStatistics,
    WorkerStatistics,
    WriterStatistics,
)

if TYPE_CHECKING or sys.platform == "linux":
    from .endpoints.loan import Loan
    from .endpoints.message import Message, SenderInfo
    from .endpoints.pubsub import Publisher, Subscriber
    from .endpoints.workqueue import Consumer, Producer

if TYPE_CHECKING:
    from .channel.info import ChannelInfo, HeldMessage, Holder, Holding, MemberInfo, RingInfo
    from .channel.inspect import inspect
    from .checkpoint.handle import Durable, Progress, SaveHandle
    from .checkpoint.keys import KeyWrapper, Passphrase
    from .checkpoint.lazy import CheckpointReader, TensorHandle, open_checkpoint
    from .checkpoint.listing import CheckpointInfo, list_checkpoints, load_newest
    from .checkpoint.load import load_arrays, load_checkpoint, load_into
    from .checkpoint.writer import CheckpointWriter
    from .executor.executor import ProcessPoolExecutor
    from .mp.context import get_context
    from .mp.queue import JoinableQueue, Queue, SimpleQueue
    from .relay.relay import Relay
    from .rpc.batching import Batch
    from .rpc.calls import RequestFuture
    from .rpc.client import Client
    from .rpc.pool import WorkerPool, serve
    from .rpc.request import Request
    from .rpc.server import Server
    from .rpc.worker import BatchContext, RequestContext

__version__ = "0.1.0"

__all__ = [
    "AccessDenied",
    "ArgumentError",
    "ArgumentTypeError",
    "Batch",
    "BatchContext",
    "ChannelInfo",
    "CheckpointError",
    "CheckpointInfo",
    "CheckpointReader",
    "CheckpointWriter",
    "Client",
    "ClientStatistics",
    "ClosedError",
    "Consumer",
    "CudaError",
    "DependencyError",
    "Durable",
    "EndOfStream",
    "ForkedError",
    "HeldMessage",
    "Holder",
    "Holding",
    "JoinableQueue",
    "KeyWrapper",
    "Loan",
    "LoopError",
    "MemberInfo",
    "Message",
    "Passphrase",
    "PeerDied",
    "PlatformError",
    "PoolStatistics",
    "ProcessPoolExecutor",
    "Producer",
    "Progress",
    "Publisher",
    "Queue",
    "ReceiverStatistics",
    "ReentrantError",
    "Relay",
    "RelayStatistics",
    "ReleasedError",
    "RemoteError",
    "Request",
    "RequestContext",
    "RequestFuture",
    "ResourceError",
    "RingFull",
    "RingInfo",
    "SaveHandle",
    "SenderInfo",
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
    "WorkerStatistics",
    "WriterStatistics",
    "WrongKey",
    "__version__",
    "get_context",
    "inspect",
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
    "ChannelInfo": "channel.info",
    "BatchContext": "rpc.worker",
    "CheckpointInfo": "checkpoint.listing",
    "CheckpointReader": "checkpoint.lazy",
    "CheckpointWriter": "checkpoint.writer",
    "Client": "rpc.client",
    "Durable": "checkpoint.handle",
    "HeldMessage": "channel.info",
    "Holder": "channel.info",
    "Holding": "channel.info",
    "JoinableQueue": "mp.queue",
    "KeyWrapper": "checkpoint.keys",
    "MemberInfo": "channel.info",
    "Passphrase": "checkpoint.keys",
    "ProcessPoolExecutor": "executor.executor",
    "Progress": "checkpoint.handle",
    "Queue": "mp.queue",
    "Request": "rpc.request",
    "RequestContext": "rpc.worker",
    "Relay": "relay.relay",
    "RequestFuture": "rpc.calls",
    "RingInfo": "channel.info",
    "SaveHandle": "checkpoint.handle",
    "Server": "rpc.server",
    "SimpleQueue": "mp.queue",
    "TensorHandle": "checkpoint.lazy",
    "WorkerPool": "rpc.pool",
    "get_context": "mp.context",
    "inspect": "channel.inspect",
    "list_checkpoints": "checkpoint.listing",
    "load_arrays": "checkpoint.load",
    "load_checkpoint": "checkpoint.load",
    "load_into": "checkpoint.load",
    "load_newest": "checkpoint.listing",
    "open_checkpoint": "checkpoint.lazy",
    "serve": "rpc.pool",
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if sys.platform != "linux" and name in __all__:
        value = globals()[name] = _stand_in(name)
        return value
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{module}", __name__), name)
    return value


def _stand_in(name: str) -> type:
    """What a public class or function is on another platform: a class that raises `PlatformError` when it is called."""

    def refuse(*_: object, **__: object) -> None:
        needs = "shmtensor needs Linux (it relies on OFD locks and /dev/shm)"
        raise PlatformError(errno.ENOSYS, f"{needs}, this is {sys.platform}")

    return type(name, (), {"__new__": refuse, "__module__": __name__})


def __dir__() -> list[str]:
    return __all__.copy()
