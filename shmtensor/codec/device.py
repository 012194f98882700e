"""Copies between a payload and tensors on a CUDA device. Every copy is one of plain bytes, put into a stream.

Imported only when a CUDA tensor is first sent or requested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

from ..cuda.runtime import device_of, runtime
from ..errors import ArgumentTypeError
from ..wire.spec import GROUP_ALIGNMENT
from .leaf import is_dense, map_leaves, overlapping
from .numpy import Array

Parts = Callable[[int, int], Sequence[tuple[memoryview, int, int]] | None]
"""A function that cuts a range of host memory into the pieces to copy from or to: see `Pinning.parts` in
`cuda/copies.py`; it returns None if the range lies in no ring."""


class DeviceJob:
    """A copy of bytes from a CUDA tensor to `offset` of a payload.

    `at` is their offset in the tensor's storage; None: the elements must be put in C order first.
    """

    __slots__ = ("at", "nbytes", "offset", "source")

    def __init__(self, source: torch.Tensor, offset: int, nbytes: int, at: int | None) -> None:
        self.source, self.offset, self.nbytes, self.at = source, offset, nbytes, at

    @property
    def device(self) -> int:
        return device_of(self.source)

    def __call__(self, payload: Array) -> None:
        """Copy, and wait until it is done."""
        cuda = runtime()
        stream = cuda.current_stream(self.device)
        base = int(payload.__array_interface__["data"][0])
        with cuda.on(stream):
            held = self.start(base, lambda address, nbytes: [(payload.data, address - base, nbytes)])
        cuda.synchronize(stream)
        del held

    def start(self, base: int, parts: Parts) -> Any:
        """Start the copy on the thread's stream. Returns what must live until it is done.

        base: the payload's address
        """
        cuda = runtime()
        source, at = self.source, self.at
        if at is None:
            source = cuda.dense(source)
            at = source.data_ptr() - source.untyped_storage().data_ptr()
        run, found = cuda.run(source, at, self.nbytes), parts(base + self.offset, self.nbytes) or ()
        for part, (buffer, offset, nbytes) in zip(_cut(run, found), found, strict=True):
            cuda.copy(_host(buffer, offset, nbytes), part)
        return source, run


def job_of(source: torch.Tensor, offset: int, nbytes: int, at: int | None = None) -> DeviceJob:
    """The copy of a whole tensor, or with `at` of a run of its storage."""
    if at is None and (source.is_contiguous() or is_dense(source.shape, source.stride(), 1)):
        at = source.data_ptr() - source.untyped_storage().data_ptr()
    return DeviceJob(source, offset, nbytes, at)


def copy_out(value: object, device: int, parts: Parts, held: list[Any]) -> tuple[object, list[torch.Tensor]]:
    """The value with its tensors on a device, and the new memory there, which was allocated on the thread's stream.

    The copies are started on that stream; objects that must live until they are done are appended to `held`, also if a
    later copy fails. Tensors that share memory share it there as well. NumPy arrays stay unchanged.
    """
    cuda = runtime()
    blocks: list[torch.Tensor] = []
    moved: dict[int, Any] = {}  # by id of the leaf
    plain: list[torch.Tensor] = []
    others: list[Any] = []

    def sort(leaf: Any) -> None:
        if isinstance(leaf, np.ndarray):
            moved[id(leaf)] = leaf
        elif not _is_plain(leaf) or device_of(leaf) >= 0:
            others.append(leaf)
        elif leaf.numel():
            plain.append(leaf)
        else:
            moved[id(leaf)] = cuda.empty(tuple(leaf.shape), leaf.dtype, device)

    map_leaves(sort, value)
    held += plain
    held += others
    ranges = [("", leaf.data_ptr(), _extent(leaf)) for leaf in plain]
    for group in [[0]] if len(plain) == 1 else overlapping(ranges):
        low = ranges[group[0]][1]
        high = max([start + nbytes for _, start, nbytes in map(ranges.__getitem__, group)])
        if len(group) > 1:  # rounded down as the group's storage is, so that every member stays aligned
            low -= low % GROUP_ALIGNMENT
        block = _copied(plain[group[0]], low, high - low, device, parts)
        blocks.append(block)
        for number in group:
            leaf, at = plain[number], ranges[number][1] - low
            moved[id(leaf)] = cuda.view(block, at, leaf.dtype, tuple(leaf.shape), leaf.stride())
    for leaf in others:
        moved[id(leaf)] = there = cuda.move(leaf, device)
        if there is not leaf:
            blocks.extend(_parts_of(there))
    return map_leaves(lambda leaf: moved[id(leaf)], value), blocks


def _copied(leaf: torch.Tensor, start: int, nbytes: int, device: int, parts: Parts) -> Any:
    """New memory on a device, into which `nbytes` from address `start` of the leaf's storage on are copied."""
    cuda = runtime()
    block = cuda.empty((nbytes,), torch.uint8, device)
    found = parts(start, nbytes)
    if found is None:  # private memory
        storage = leaf.untyped_storage()
        cuda.copy(block, torch.empty(0, dtype=torch.uint8).set_(storage, start - storage.data_ptr(), (nbytes,), (1,)))
    else:
        for part, (buffer, offset, count) in zip(_cut(block, found), found, strict=True):
            cuda.copy(part, _host(buffer, offset, count))
    return block


def _cut(run: torch.Tensor, parts: Sequence[tuple[memoryview, int, int]]) -> list[torch.Tensor]:
    """A run of bytes, cut where these parts of it meet."""
    return list(torch.split(run, [nbytes for _, _, nbytes in parts])) if len(parts) > 1 else [run][: len(parts)]


def _extent(leaf: torch.Tensor) -> int:
    """Bytes from a leaf's first element to the end of its last one."""
    if leaf.is_contiguous():
        return leaf.numel() * leaf.element_size()
    last = sum((n - 1) * s for n, s in zip(leaf.shape, leaf.stride(), strict=True))
    return (last + 1) * leaf.element_size()


def _is_plain(leaf: Any) -> bool:
    return type(leaf) is torch.Tensor and leaf.layout is torch.strided and not leaf.is_quantized and not leaf.is_nested


_PARTS: Final = {
    "sparse_coo": ("_indices", "_values"), "jagged": ("values", "offsets", "lengths"),
    "sparse_csr": ("crow_indices", "col_indices", "values"), "sparse_bsr": ("crow_indices", "col_indices", "values"),
    "sparse_csc": ("ccol_indices", "row_indices", "values"), "sparse_bsc": ("ccol_indices", "row_indices", "values"),
}  # fmt: skip


_PER_CHANNEL: Final = (torch.per_channel_affine, torch.per_channel_affine_float_qparams)


def _parts_of(leaf: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that hold a tensor's memory: `record_stream` of torch works on these only."""
    names = _PARTS.get(str(leaf.layout).removeprefix("torch."))
    if names is not None:
        parts = [getattr(leaf, name)() for name in names]
        return [part for part in parts if part is not None]  # a jagged one may have no lengths
    if not leaf.is_quantized and not leaf.is_nested:
        return [leaf]
    block = runtime().run(leaf, 0, leaf.untyped_storage().nbytes())
    if not leaf.is_quantized or leaf.qscheme() not in _PER_CHANNEL:
        return [block]
    scales = leaf.q_per_channel_scales(), leaf.q_per_channel_zero_points()
    return [block, *(part for part in scales if device_of(part) >= 0)]


def _host(buffer: Any, offset: int, nbytes: int) -> torch.Tensor:
    return torch.from_numpy(np.ndarray((nbytes,), np.uint8, buffer, offset))


def is_cuda(device: Any) -> bool:
    """Whether this names a CUDA device. Raises `ArgumentTypeError` if it names no device."""
    if torch.version.hip is not None:
        return False  # ROCm: torch's own copies are used, which wait
    if isinstance(device, int):
        return True
    try:
        return torch.device(device).type == "cuda"
    except (RuntimeError, TypeError) as error:
        raise ArgumentTypeError(f"device={device!r}: {error}") from None
