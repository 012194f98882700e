"""Write checkpoints as a writer does, but in one process and without slots; states to write; how to compare them."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import torch

from shmtensor.checkpoint.description import Summer
from shmtensor.checkpoint.formats import get_format
from shmtensor.checkpoint.plan import Plan, plan

SUFFIX = {"safetensors": ".safetensors", "torch": ".pt", "npz": ".npz", "distcp": ".distcp"}


def save(state, path, format="safetensors", *, max_shard=None, meta=None) -> Path:
    """Write a state to `path` (a directory with `max_shard`); every byte comes from `Layout.pieces` and `finish`."""
    made = plan(state, meta)
    layout = get_format(format).layout(Plan.from_description(made.describe()), max_shard)
    summers = [Summer(crc=layout.needs_crc) for _ in made.regions]
    files = []
    for index, file in enumerate(layout.files):
        contents = bytearray()
        for piece in layout.pieces(index):
            assert piece.offset == len(contents)
            if piece.region >= 0:
                data = made.regions[piece.region].bytes().tobytes()[piece.start : piece.start + piece.nbytes]
                summers[piece.region].update(data)
            else:
                data = bytes(piece.nbytes) if piece.data is None else piece.data
            assert len(data) == piece.nbytes
            contents += data
        assert len(contents) == file.nbytes
        files.append(contents)
    for index, offset, data in layout.finish([s.digest for s in summers], [s.crc for s in summers]):
        assert offset + len(data) <= len(files[index])
        files[index][offset : offset + len(data)] = data
    path = Path(path)
    if layout.single:
        path.write_bytes(files[0])
    else:
        path.mkdir()
        for file, contents in zip(layout.files, files, strict=True):
            (path / file.name).write_bytes(contents)
    return path


def same(a, b) -> bool:
    """Equal bit for bit, types of containers included; tensors by dtype, shape and bytes."""
    if isinstance(a, torch.Tensor):
        if not (isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.layout == b.layout):
            return False
        if a.is_nested or b.is_nested:
            return a.is_nested and b.is_nested and all(map(same, a.unbind(), b.unbind()))
        if a.shape != b.shape:
            return False
        if a.is_quantized:
            return torch.equal(a.int_repr(), b.int_repr()) and torch.equal(a.dequantize(), b.dequantize())
        if a.layout != torch.strided:
            return torch.equal(a.to_dense(), b.to_dense())
        return raw(a) == raw(b)
    if isinstance(a, np.ndarray):
        return type(b) is np.ndarray and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return type(a) is type(b) and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return [*map(repr, a)] == [*map(repr, b)] and all(map(same, a.values(), b.values()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor of any dtype, in C order."""
    tensor = tensor.detach()
    if tensor.is_complex() or tensor.is_floating_point():
        tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.numel():
        return b""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    return tensor.view(sizes[tensor.element_size()]).contiguous().numpy().tobytes()


def model() -> torch.nn.Module:
    """Layers with tied weights, buffers of several types, and an empty one."""
    net = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7, bias=False), torch.nn.BatchNorm1d(7))
    net[1].weight = net[0].weight
    net.register_buffer("nothing", torch.empty(0, 3))
    return net


def training_state():
    """Model, optimizer, scheduler and random states as they come, after a step of training."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
    net(torch.arange(7)).sum().backward()
    optimizer.step()
    scheduler.step()
    return {
        "model": net, "optim": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "step": 7,
        "rng": {
            "torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state(),
            "generator": np.random.default_rng(3).bit_generator.state,
        },
    }  # fmt: skip


def mixed_state():
    """A bit of everything."""
    weight = torch.randn(10, 20)
    line = torch.arange(100)
    return {
        "weight": weight, "transposed": weight.t(), "rows": weight[5:], "again": weight,
        "parts": [line[:60], line[40:]], "expanded": torch.ones(3, 1).expand(3, 5), "0-d": torch.tensor(1.5),
        "empty": torch.empty(0, 3), "big": np.arange(5, dtype=">i4"), "complex": torch.randn(3, dtype=torch.complex64),
        "a.b": torch.ones(2), "a": {"b": torch.ones(3, dtype=torch.bfloat16), "c/d": np.float32(3)},
        "scalars": (1, -2.5, float("nan"), float("-inf"), -0.0, None, True, "text \ud800 \n ü", b"\x00\xff", 1 << 2000),
        "long bytes": bytes(range(256)) * 40, "npstr": np.str_("a\0"), "npbytes": np.bytes_(b"b\0"),
        "date": np.datetime64("2026-11-21"), 3: {4: 5, None: 6, True: 7, 1.5: 8},
        "ordered": OrderedDict(x=1, y=[2]), "counted": Counter("abca"),
        "size": torch.Size([1, 2]), "dtype": torch.float16, "device": torch.device("cpu"),
        "sparse": torch.eye(3).to_sparse(), "csr": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 3, torch.qint8),
        "channels": torch.quantize_per_channel(
            torch.randn(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.quint8
        ),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    }  # fmt: skip
