"""`get_context`: a `multiprocessing` context whose queues go through shared memory."""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing import context, process
from typing import TYPE_CHECKING, Any, Final

from . import collate
from .joinable_queue import JoinableQueue
from .queue import Queue, SimpleQueue
from .to_device import number_of

if TYPE_CHECKING:
    from multiprocessing.pool import Pool


_PIPES: Final = ("concurrent.futures.process", "multiprocessing.pool")
"""Modules that use the pipes of their context's queues directly."""


class _Queues(context.BaseContext):
    """What differs from `multiprocessing`'s contexts."""

    _name: str
    device: int | None = None
    """The CUDA device of tensors that this process gets from its queues of this context; None: host memory."""

    def Queue(self, maxsize: int = 0) -> Queue[Any]:  # type: ignore[override]
        """A `shmtensor.Queue` for processes of this context."""
        return Queue(maxsize, ctx=self, device=self.device)

    def JoinableQueue(self, maxsize: int = 0) -> JoinableQueue[Any]:  # type: ignore[override]
        """A `shmtensor.JoinableQueue` for processes of this context."""
        return JoinableQueue(maxsize, ctx=self, device=self.device)

    def SimpleQueue(self) -> Any:
        """A `shmtensor.SimpleQueue` for processes of this context.

        The standard library's own executor and pool wait on the pipes of their queues, and get a standard one.
        """
        if sys._getframe(1).f_globals.get("__name__") in _PIPES:
            return multiprocessing.get_context(self._name).SimpleQueue()
        return SimpleQueue(ctx=self, device=self.device)

    def Pool(self, *args: Any, **kwargs: Any) -> Pool:
        """`multiprocessing`'s own pool, over pipes: it uses internals of its queues."""
        return multiprocessing.get_context(self._name).Pool(*args, **kwargs)

    def get_context(self, method: str | None = None) -> Any:
        """This context, or the one of another start method with the same device."""
        return self if method is None else get_context(method, device=self.device)


class _Worker(process.BaseProcess):
    """A process of this context. It stacks batches for our queues, see `collate.py`."""

    def run(self) -> None:
        collate.install()
        super().run()


class ForkProcess(_Worker, context.ForkProcess):
    """A process that is forked."""


class SpawnProcess(_Worker, context.SpawnProcess):
    """A process that starts a fresh interpreter."""


class ForkServerProcess(_Worker, context.ForkServerProcess):
    """A process that a server forks."""


class ForkContext(_Queues, context.ForkContext):
    """Start method "fork"."""

    Process = ForkProcess


class SpawnContext(_Queues, context.SpawnContext):
    """Start method "spawn"."""

    Process = SpawnProcess


class ForkServerContext(_Queues, context.ForkServerContext):
    """Start method "forkserver"."""

    Process = ForkServerProcess


_KINDS: dict[str, type[_Queues]] = {kind._name: kind for kind in (ForkContext, SpawnContext, ForkServerContext)}
_contexts: dict[tuple[str, int | None], _Queues] = {}


def get_context(method: str | None = None, *, device: Any = None) -> Any:
    """A `multiprocessing` context whose `Queue`, `JoinableQueue` and `SimpleQueue` are this library's.

    Args:
        method: `"fork"`, `"spawn"` or `"forkserver"`; None for the default start method.
        device: (experimental) such as `"cuda"` or `"cuda:1"`: tensors that the process which creates a queue gets from
            it are copied there, as for `Queue`; None: they stay in host memory.

    Returns:
        A subclass of `multiprocessing`'s context of that method; `torch.utils.data.DataLoader` takes it as its
        `multiprocessing_context=`, and then moves batches through shared memory.

    Raises:
        ValueError: there is no such start method, or `device` names no CUDA device.
        ResourceError: CUDA is missing here; the message says what.

    >>> import shmtensor
    >>> ctx = shmtensor.get_context("fork")
    >>> queue = ctx.Queue()
    >>> ctx.get_start_method(), type(queue).__name__
    ('fork', 'Queue')
    >>> queue.close()
    """
    if method is None:
        method = multiprocessing.get_start_method()
    multiprocessing.get_context(method)  # raises for a method that is unknown, or missing here
    key = method, number_of(device)
    if key not in _contexts:
        made = _contexts[key] = _KINDS[method]()
        made.device = key[1]
    return _contexts[key]
