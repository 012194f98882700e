"""One tensor to bytes and back: the rows of a public gist, beside this library's way of doing the same job."""

from __future__ import annotations

import ctypes
import io
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ..measure import RowSpec, Samples
from ..processes import Role, fresh_name, run_roles
from ..sizes import MIB
from ..transports import SHMTENSOR, TORCH_DESCRIPTOR
from .base import Case, Effort, Workload

SHAPES = ((100,), (1000,), (100, 100), (1000, 1000), (5000, 5000))
WARM = 100
COLD_BYTES = 256 * MIB
"""Tensors of so many bytes together take turns in the cold rows: more than any cache holds."""
MOST_TENSORS = 4096


class Technique(NamedTuple):
    """How a tensor becomes a buffer and back."""

    serialize: Callable[[Any], Any]
    deserialize: Callable[[Any, Any], Any]
    """Of the buffer and the original, of which it may look at what the buffer does not say."""
    published: tuple[tuple[float, float], ...]
    """MB/s of both directions for each of `SHAPES`, on the gist's machine."""
    keeps: str
    safe: str
    bfloat16: str


def _tobytes(tensor: Any) -> bytes:
    return tensor.numpy().tobytes()


def _frombuffer_copy(buffer: bytes, like: Any) -> Any:
    import numpy as np
    import torch

    return torch.from_numpy(np.frombuffer(buffer, like.numpy().dtype).copy()).view(like.shape)


def _string_at(tensor: Any) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _frombuffer_bytearray(buffer: bytes, like: Any) -> Any:
    import torch

    return torch.frombuffer(bytearray(buffer), dtype=like.dtype).view(like.shape)


def _torch_save(tensor: Any) -> bytes:
    import torch

    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def _torch_load(buffer: bytes, like: Any) -> Any:
    import torch

    return torch.load(io.BytesIO(buffer), weights_only=True)


TECHNIQUES = {
    "tobytes / frombuffer().copy()": Technique(
        _tobytes, _frombuffer_copy,
        ((724.3, 470.9), (6582.6, 4526.6), (42424.0, 31161.4), (21479.6, 22117.4), (20446.0, 19679.6)),
        "no", "yes", "no",
    ),
    "data_ptr + string_at / torch.frombuffer(bytearray)": Technique(
        _string_at, _frombuffer_bytearray,
        ((1305.5, 444.4), (10595.4, 4340.6), (59640.4, 30357.5), (21910.3, 21879.9), (20163.4, 19293.1)),
        "no", "yes", "yes",
    ),
    "torch.save / torch.load": Technique(
        _torch_save, _torch_load,
        ((18.8, 15.9), (178.9, 157.8), (1315.9, 1531.3), (3972.7, 19125.0), (3865.6, 17649.9)),
        "yes", "with weights_only", "yes",
    ),
}  # fmt: skip
OURS = "shmtensor send / recv"
OURS_COPY = "shmtensor send / recv(copy=True)"


def _tensors(shape: tuple[int, ...], cold: bool) -> list[Any]:
    import torch

    torch.manual_seed(0)
    first = torch.randn(shape)
    count = max(2, min(MOST_TENSORS, COLD_BYTES // first.nbytes)) if cold else 1
    return [first, *(torch.randn(shape) for _ in range(count - 1))]


def measure(technique: str, shape: tuple[int, ...], cold: bool, effort: Effort) -> Samples:
    """Seconds of each direction; bytes of the buffer; the largest absolute difference, which must be 0."""
    return run_roles([Role(_measure, (technique, shape, cold, effort, fresh_name()))])[0]


def _measure(
    meet: Callable[[], object], technique: str, shape: tuple[int, ...], cold: bool, effort: Effort, name: str
) -> Samples:
    tensors = _tensors(shape, cold)
    if technique in TECHNIQUES:
        serialize, deserialize = TECHNIQUES[technique][:2]
        return _loop(tensors, serialize, deserialize, effort)
    import shmtensor

    private = technique == OURS_COPY
    nbytes = tensors[0].nbytes
    with shmtensor.Publisher(name, slots=4, slot_bytes=nbytes) as pub, shmtensor.Subscriber(name) as sub:
        return _loop(tensors, pub.send, lambda seq, like: sub.recv(copy=private).value, effort, nbytes)


def _loop(
    tensors: list[Any], serialize: Callable[[Any], Any], deserialize: Callable[[Any, Any], Any], effort: Effort,
    nbytes: int | None = None,
) -> Samples:  # fmt: skip
    clock = time.perf_counter
    there: list[float] = []
    back: list[float] = []
    worst, spent, number = 0.0, 0.0, 0
    warm = WARM if tensors[0].nbytes < MIB else 3
    while len(there) < effort.least or (spent < effort.seconds and len(there) < effort.most):
        tensor = tensors[number % len(tensors)]
        start = clock()
        buffer = serialize(tensor)
        middle = clock()
        value = deserialize(buffer, tensor)
        end = clock()
        if number in (0, warm):
            worst = max(worst, float((value - tensor).abs().max()))
            if value.shape != tensor.shape or value.dtype != tensor.dtype:
                raise AssertionError("another shape or dtype came back")
        if number >= warm:
            there.append(middle - start)
            back.append(end - middle)
            spent += end - start
        number += 1
        del value
    if worst:
        raise AssertionError(f"values differ by up to {worst}")
    size = nbytes if nbytes is not None else len(buffer)
    return {"serialize": there, "deserialize": back, "size": [size], "difference": [worst]}


def _shape_label(shape: tuple[int, ...]) -> str:
    return "×".join(str(length) for length in shape)


def _nbytes(shape: tuple[int, ...]) -> int:
    count = 4
    for length in shape:
        count *= length
    return count


def _cases() -> list[tuple[str, tuple[int, ...], bool]]:
    return [
        (technique, shape, cold)
        for cold in (False, True)
        for shape in SHAPES
        for technique in (*TECHNIQUES, OURS, OURS_COPY)
    ]


def _name(technique: str, shape: tuple[int, ...], cold: bool) -> str:
    return f"{technique}, {_shape_label(shape)}{', cold' if cold else ''}"


def _speed_rows() -> tuple[RowSpec, ...]:
    rows = []
    for direction, index in (("serialize", 0), ("deserialize", 1)):
        for technique, shape, cold in _cases():
            known = TECHNIQUES.get(technique)
            rows.append(
                RowSpec(
                    f"{direction}: {_name(technique, shape, cold)}",
                    SHMTENSOR.name if known is None else technique, _name(technique, shape, cold),
                    direction, "ms", 1e3, group=f"ms to {direction}{' (cold)' if cold else ''}",
                    line=technique, column=_shape_label(shape), x=_nbytes(shape),
                    published=None if known is None or cold
                    else _nbytes(shape) / MIB / known.published[SHAPES.index(shape)][index] * 1e3,
                    notes={} if known is None else {
                        "keeps dtype and shape": known.keeps,
                        "safe on untrusted input": known.safe,
                        "bfloat16": known.bfloat16,
                    },
                )
            )  # fmt: skip
    return tuple(rows)


def _size_rows() -> tuple[RowSpec, ...]:
    return tuple(
        RowSpec(
            f"{line}: {_name(technique, shape, cold)}", SHMTENSOR.name if technique not in TECHNIQUES else technique,
            _name(technique, shape, cold), metric, unit, factor, group=line, line=technique,
            column=_shape_label(shape), x=_nbytes(shape),
        )
        for line, metric, unit, factor in (
            ("buffer, KB", "size", "KB", 1 / 1024), ("largest difference", "difference", "", 1.0),
        )
        for technique, shape, cold in _cases() if not cold
    )  # fmt: skip


WORKLOAD = Workload(
    name="serialize-tensor",
    title="Serialization of one float32 tensor, as in a public gist",
    what=(
        "One process, one thread; randn; after a warm-up of 100 (3 from 1 MiB on). MB/s in the generated page "
        "is MiB of tensor per second. shmtensor's rows do more: the receiver may be in another process, and "
        "recv gives a view of the slot (copies nothing) or, with copy=True, private memory; its buffer is the "
        "slot, dtype and shape stand in the slot's record. Cold: tensors of 256 MiB together (but at most "
        "4096) take turns, so that the source is in no cache. torch.load is given weights_only=True. NumPy's "
        "reader takes the dtype from the tensor, where the gist has float32."
    ),
    cases=tuple(
        Case(
            _name(technique, shape, cold), TORCH_DESCRIPTOR if technique in TECHNIQUES else SHMTENSOR,
            partial(measure, technique, shape, cold),
            quick=not cold and shape == (1000, 1000), rounds=1,
        )
        for technique, shape, cold in _cases()
    ),
    rows=(*_speed_rows(), *_size_rows()),
    rounds={"full": 1},
    heading="shape",
)  # fmt: skip
