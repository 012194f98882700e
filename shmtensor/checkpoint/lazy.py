"""`open_checkpoint`: a checkpoint as a mapping of names to handles, which read tensors or parts of them."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from ..codec.libraries import torch_views
from ..endpoints.base import Local
from ..errors import ArgumentError, ClosedError
from ..memory.lifecycle import track
from .devices import Blocks, check_device
from .formats import Opened
from .keys import Key
from .load import Path, Verify, check_crcs_of_others, check_options, open_files, raise_damage, read, readable
from .opening import Opener
from .plan import Entry, Plan, array_dtype, build_tensor, check_structure
from .reading import Files, read_regions
from .selection import Index, InMemory, Span, narrow, packed, read_part, select, span_of, stored_nbytes, unknown


def open_checkpoint(
    path: Path,
    *,
    arrays: bool = False,
    readers: int | None = None,
    verify: Verify = True,
    key: Key | None = None,
    device: Any = None,
) -> CheckpointReader:
    """Open a checkpoint without reading its tensors: a mapping of their names to handles.

    The description of the tensors is read and checked now, as by `load_checkpoint`, with the same errors.

    Args:
        path: as for `load_checkpoint`; files of other programs as well.
        arrays: handles give NumPy arrays, as `load_arrays` does, and torch is not imported.
        readers: threads that read large parts; None: one per core, 4 to 8.
        verify: compare a tensor that is read whole with its digest, if the file has one. `"all"`: read each tensor of
            which a part is wanted whole, and compare it; archives of other programs are compared with their CRCs when
            they are opened, which reads all of them. False: compare nothing.
        key: of an encrypted checkpoint, as for `load_checkpoint`. To read a part, the segments of 64 KiB around it are
            decrypted; changed bytes are an error, whatever `verify` is.
        device: where handles make torch tensors, as for `load_checkpoint`. On a CUDA device whole tensors are read
            through pinned buffers; a part is read into host memory, and copied.

    >>> import os, tempfile, numpy as np, shmtensor
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = os.path.join(folder, "a.npz")
    ...     np.savez(file, weight=np.arange(12).reshape(4, 3))
    ...     with shmtensor.open_checkpoint(file) as checkpoint:
    ...         weight = checkpoint["weight"]
    ...         weight.shape, weight.read(np.s_[1:3, 0])
    ((4, 3), array([3, 6]))
    """
    count = check_options(readers, verify)
    if arrays and device is not None:
        raise ArgumentError(f"device={device!r:.80} is for torch tensors: leave it out, or arrays=True")
    number = check_device(device)
    opened, files = open_files(path, Opener(key))
    if verify == "all":
        with contextlib.ExitStack() as failed:
            failed.callback(files.close)
            check_crcs_of_others(opened)
            failed.pop_all()
    return CheckpointReader(opened, files, arrays=arrays, readers=count, verify=verify, device=number)


class CheckpointReader(Local, Mapping[str, "TensorHandle"]):
    """An open checkpoint: made by `open_checkpoint`. Thread-safe.

    Its names are those that `shmtensor checkpoint info` shows: dotted paths; the parts of sparse, quantized and nested
    tensors, and long `bytes`, are tensors of their own. That of a quantized tensor with its values gives the integers
    that are stored, such as `torch.int8` for `torch.qint8`. Its files stay open until it is closed, so that they may be
    renamed or deleted meanwhile; of more than 256, those that were read last. Tensors that were read have memory of
    their own, and stay valid.

    >>> import numpy as np, shmtensor, tempfile
    >>> with tempfile.TemporaryDirectory() as path:
    ...     with shmtensor.CheckpointWriter(path) as writer:
    ...         handle = writer.save({"model": {"w": np.ones(1000)}, "step": 7}, meta={"run": "a"})
    ...     with shmtensor.open_checkpoint(path) as checkpoint:
    ...         list(checkpoint), checkpoint.meta, checkpoint["model.w"].read(np.s_[:3])
    (['model.w'], {'run': 'a'}, array([1., 1., 1.]))
    """

    def __init__(
        self, opened: Opened, files: Files, *, arrays: bool, readers: int, verify: Verify, device: int | None
    ) -> None:
        opened = replace(opened, made=_with_integers(opened.plan))
        self._opened: Opened | None = opened
        self._arrays, self._readers, self._verify, self._device = arrays, readers, bool(verify), device
        self.format = opened.format
        """`"safetensors"`, `"torch"` or `"npz"`."""
        self.path = str(opened.main)
        """Path of its file, or of the directory of its files."""
        plan = opened.plan
        self.meta: dict[str, Any] | None = plan.meta
        """The dict that `save` was given."""
        self._stored = readable(opened, map=False, verify=verify)
        self._entries = plan.tensors
        self._plan = plan if opened.state is None else None  # of a state of torch's own it has no structure
        self._numbers = {entry.name: number for number, entry in enumerate(plan.tensors)}
        self._files = files
        self._lock = threading.Lock()
        self._reading = 0
        self._finalizer = weakref.finalize(self, self._files.close)
        track(self, CheckpointReader._renew)

    def _renew(self) -> None:
        """In a forked child: threads of the parent may have held the lock, and do not read here."""
        self._lock, self._reading = threading.Lock(), 0
        if self._opened is None:
            self._finalizer()

    def __getitem__(self, name: str) -> TensorHandle:
        number = self._numbers.get(name)
        if number is None:
            raise KeyError(self._why_not(name))
        return TensorHandle(self, number)

    def get(self, name: str, default: Any = None) -> Any:  # that of `Mapping` would look for similar names
        """The handle of a tensor, or the default."""
        return self[name] if name in self._numbers else default

    def _why_not(self, name: str) -> str:
        """Why there is no handle of that name, as text for the error."""
        plan = self._plan
        if plan is None or not isinstance(name, str):
            return str(unknown(str(name), list(self._numbers)))
        check_structure(plan)
        try:
            select(plan.tree, name, plan.tensors)
        except ArgumentError as error:
            return str(error)
        return f"{name!r:.80} is not the name of one tensor: load_checkpoint(path, keys={name!r:.80}) loads it"

    __eq__, __hash__ = object.__eq__, object.__hash__  # that of `Mapping` would compare handles

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def close(self) -> None:
        """Close the files, once reads of other threads have ended. Idempotent."""
        with self._lock:
            self._opened = None
            if not self._reading:
                self._finalizer()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _instead(self) -> str:
        return "pass its path"

    def __repr__(self) -> str:
        state = "closed" if self._opened is None else f"{len(self)} tensors"
        return f"<CheckpointReader {self.path!r} {self.format}, {state}>"

    # --- for handles

    def _read(self, number: int, index: Index) -> Any:
        with self._lock:
            opened = self._opened
            if opened is None:
                raise ClosedError(f"checkpoint {self.path} is closed: read before close(), or open it again")
            self._reading += 1
        try:
            return self._read_now(opened, number, index)
        finally:
            with self._lock:
                self._reading -= 1
                if self._opened is None and not self._reading:
                    self._finalizer()

    def _read_now(self, opened: Opened, number: int, index: Index) -> Any:
        plan = opened.plan
        part = narrow(plan.tensors[number], index)
        blocks = Blocks(self._device) if self._device is not None and part.torch else None
        if part.region < 0:
            return build_tensor(part, arrays=self._arrays, blocks=blocks)
        region = plan.regions[part.region]
        span = span_of(plan, number, index, self._stored)
        if span is not None:
            memory, part = read_part(self._files, span, self._readers), packed(span.entry)
        elif opened.places is not None:
            memory = self._read_region(opened, part.region, blocks)
        else:
            memory = region.bytes()
            if opened.state is not None or stored_nbytes(part) != region.nbytes:
                memory, part = read_part(InMemory(memory), Span(0, 0, part), 1), packed(part)
        if blocks is not None and 0 not in blocks:
            blocks.fill(0, memory)
        return build_tensor(part, memory, region.align, arrays=self._arrays, blocks=blocks)

    def _read_region(self, opened: Opened, region: int, blocks: Blocks | None) -> Any:
        """A region as a whole; with `blocks`, as number 0 there."""
        if blocks is None:
            return read(opened, self._files, [region], readers=self._readers, verify=self._verify)[region]
        blocks.add(0, opened.plan.regions[region].nbytes)
        memory = blocks[0]
        raise_damage(
            read_regions(
                opened, self._files, [region], lambda _: memory, readers=self._readers, verify=self._verify, device=True
            )
        )
        return memory


_INTEGERS: Final = {"qint8": "int8", "quint8": "uint8", "qint32": "int32", "quint4x2": "uint8", "quint2x4": "uint8"}


def _with_integers(plan: Plan) -> Plan:
    """The same plan, and quantized values are the integers that they are stored as: scale and zero point are other
    tensors, or in the structure."""
    if not any(entry.dtype in _INTEGERS for entry in plan.tensors if isinstance(entry.dtype, str)):
        return plan
    tensors = [
        entry._replace(dtype=_INTEGERS.get(entry.dtype, entry.dtype)) if isinstance(entry.dtype, str) else entry
        for entry in plan.tensors
    ]
    return Plan(plan.tree, tensors, plan.regions, plan.meta)


class TensorHandle(Local):
    """One tensor of an open checkpoint.

    `read` gives a tensor, or an array where an array was saved or `open_checkpoint` was asked for arrays.
    """

    __slots__ = ("_number", "_reader")

    def __init__(self, reader: CheckpointReader, number: int) -> None:
        self._reader, self._number = reader, number

    @property
    def name(self) -> str:
        """Its name in the checkpoint."""
        return self._entry.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements of each dimension."""
        return self._entry.shape

    @property
    def nbytes(self) -> int:
        """Bytes of all elements; repeated ones count each time."""
        return self._entry.nbytes

    @property
    def dtype(self) -> Any:
        """The torch or NumPy dtype of what `read` gives."""
        entry = self._entry
        if self._reader._arrays or not entry.torch:
            return array_dtype(entry)
        row: Any = entry.row
        return torch_views().DTYPE[row.code]

    def read(self, index: Index = ...) -> Any:
        """Read all of it, or the part that an index names, into memory of its own.

        Args:
            index: integers, slices with positive steps and one `...`, as `numpy.s_[0:1024, ::2]` gives them.

        Of a part, only its bytes are read, and small gaps between them: at most twice the part. A digest covers a whole
        tensor, so that a part is not compared; neither is a tensor that shares a larger range of memory with others.
        Packed members of an `.npz`, and tensors of torch's own `.pt` that are not contiguous there, are read whole.

        Raises `CheckpointError` for what is damaged or truncated, `ArgumentError` or `ArgumentTypeError` for an index
        that the tensor does not have, `ClosedError`.
        """
        return self._reader._read(self._number, index)

    @property
    def _entry(self) -> Entry:
        return self._reader._entries[self._number]

    def _instead(self) -> str:
        return "pass the path of its checkpoint, and its name"

    def __repr__(self) -> str:
        entry = self._entry
        kind = entry.dtype if isinstance(entry.dtype, str) else str(entry.numpy)
        return f"<TensorHandle {entry.name!r} {kind} {list(entry.shape)}>"
