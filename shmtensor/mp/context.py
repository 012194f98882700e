"""`get_context`: a `multiprocessing` context whose queues, pipes and pools go through shared memory.

In worker processes of such a context, `torch.utils.data.default_collate` stacks batches into reused buffers. By
itself it allocates new shared memory for each batch, because the standard queue can pass that on without a copy; the
kernel then zeroes every page, which costs more than the stacking. Our queue copies a batch into a slot and needs no
shared memory, so a few buffers serve all batches: one is reused when no tensor uses it any more.
"""

from __future__ import annotations

import math
import multiprocessing
import sys
import weakref
from multiprocessing import context, process
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .connection import pipe
from .pickling import number_of
from .queue import JoinableQueue, Queue, SimpleQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .connection import Connection
    from .pool import Pool


_LEAST: Final = 64 << 10
"""Batches of fewer bytes get ordinary memory; buffers of others are kept."""

_KEPT: Final = 8
"""Spare buffers at most."""

_spare: dict[int, Any] = {}
"""Spare buffers by identity. Taking one out is atomic, so that no two threads get the same."""

_uses: dict[int, weakref.ref[Any]] = {}
"""Arrays that tensors of living batches are views of, by identity."""


def _reuse_batch_memory() -> None:
    """Stack into reused buffers from now on, if this process has imported torch's data loading."""
    collate: Any = sys.modules.get("torch.utils.data._utils.collate")
    if collate is not None:  # a documented table that users may change
        collate.default_collate_fn_map[sys.modules["torch"].Tensor] = _collate


def _collate(batch: Any, *, collate_fn_map: Any = None) -> Any:
    torch: Any = sys.modules["torch"]
    first = batch[0]
    plain = type(first) is torch.Tensor and first.is_cpu and first.layout is torch.strided and not first.is_nested
    if not plain or torch.utils.data.get_worker_info() is None:
        return sys.modules["torch.utils.data._utils.collate"].collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
    shape = (len(batch), *first.shape)
    nbytes = math.prod(shape) * first.element_size()
    if nbytes < _LEAST or any(tensor.requires_grad for tensor in batch):
        return torch.stack(batch)
    return torch.stack(batch, out=torch.from_numpy(_buffer(nbytes)).view(first.dtype).view(shape))


def _buffer(nbytes: int) -> Any:
    """A uint8 array [nbytes] with any contents, over a reused buffer if one fits."""
    buffer = _take_spare(nbytes)
    if buffer is None:
        torch: Any = sys.modules["torch"]
        buffer = torch.empty(nbytes, dtype=torch.uint8).numpy()  # 64-byte aligned
    array = np.ndarray((nbytes,), np.uint8, memoryview(buffer))

    def spare(use: weakref.ref[Any], key: int = id(array)) -> None:
        del _uses[key]
        _spare[id(buffer)] = buffer
        if len(_spare) > _KEPT:
            _spare.pop(next(iter(_spare), 0), None)

    _uses[id(array)] = weakref.ref(array, spare)
    return array


def _take_spare(nbytes: int) -> Any:
    for key, buffer in list(_spare.items()):
        if nbytes <= buffer.nbytes <= 2 * nbytes and _spare.pop(key, None) is not None:
            return buffer
    return None


_PIPES: Final = ("concurrent.futures.process", "multiprocessing.pool")
"""Modules that use the pipes of their context's queues directly."""


class _Queues(context.BaseContext):
    """The methods in which these contexts differ from `multiprocessing`'s."""

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

    def Pipe(self, duplex: bool = True, *, max_bytes: int | str | None = None) -> tuple[Connection, Connection]:
        """`multiprocessing.Pipe`, its two `Connection`s, with tensors and arrays through shared memory.

        Args:
            duplex: whether both ends send and receive; else the first one receives, and the second one sends.
            max_bytes: shared memory that each process may use for what it sends, in bytes or like `"4GiB"`; None for
                half of `/dev/shm`.

        >>> import numpy as np, shmtensor
        >>> one, other = shmtensor.get_context().Pipe()
        >>> one.send({"x": np.arange(3), "name": "a"})
        >>> other.recv()
        {'x': array([0, 1, 2]), 'name': 'a'}
        >>> one.close(); other.close()
        """
        return pipe(duplex, max_bytes)

    def Pool(
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        maxtasksperchild: int | None = None,
        *,
        max_bytes: int | str | None = None,
        retry_on_death: int = 0,
    ) -> Pool:
        """A `shmtensor.mp.pool.Pool` of processes of this context."""
        from .pool import Pool

        return Pool(
            processes, initializer, initargs, maxtasksperchild, self,
            max_bytes=max_bytes, retry_on_death=retry_on_death,
        )  # fmt: skip

    def get_context(self, method: str | None = None) -> Any:
        """This context, or the one of another start method with the same device."""
        return self if method is None else get_context(method, device=self.device)


class _Worker(process.BaseProcess):
    """A process of this context. It stacks batches for our queues."""

    def run(self) -> None:
        _reuse_batch_memory()
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
    """A `multiprocessing` context whose `Queue`, `JoinableQueue`, `SimpleQueue`, `Pipe` and `Pool` are this library's.

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
