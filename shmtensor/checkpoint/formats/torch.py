"""torch: the zip archive of `torch.save`, which `torch.load(path, weights_only=True)` opens with the right structure.

| member | what |
|---|---|
| `archive/data.pkl` | the structure, see `shmtensor.checkpoint.formats.torch_pickle` |
| `archive/.format_version`, `.storage_alignment`, `byteorder`, `version` | as torch writes them |
| `archive/data/<region>` | one region each, at a multiple of 64 |
| `archive/data/empty<tensor>` | nothing: the storage of a tensor without bytes |
| `archive/.data/shmtensor.json` | the description, with the digests |

This library reads the description, never the pickle. An archive without one is left to `torch.load`, with
`weights_only=True`. What torch alone sees differently: NumPy arrays are tensors (of bytes, where torch lacks the
type), NumPy scalars are plain numbers or text, ints beyond 255 bytes are hexadecimal text, and a sparse, quantized or
nested tensor is a tuple of its kind, parameters, scalars and parts.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from ...errors import ArgumentError, CheckpointError
from ..plan import Plan, plan
from ..texts import Described
from .base import Format, Layout, Opened
from .torch_pickle import Pickler
from .zip_directory import locate, read_directory
from .zips import ALIGNMENT, Archive

_DESCRIPTION = "archive/.data/shmtensor.json"


class Torch(Format):
    """Files for `torch.load`."""

    name = "torch"
    suffix = ".pt"

    def layout(self, plan: Plan, max_shard: int | None = None) -> Layout:
        if max_shard is not None:
            raise ArgumentError('max_shard= is for format="safetensors": a .pt is one file')
        archive = Archive(plan)
        archive.add("archive/data.pkl", Pickler(plan).dump())
        archive.add("archive/.format_version", b"1")
        archive.add("archive/.storage_alignment", str(ALIGNMENT).encode())
        archive.add("archive/byteorder", b"little")
        for number, entry in enumerate(plan.tensors):
            if entry.region < 0:
                archive.add(f"archive/data/empty{number}", b"")
        names = [f"archive/data/{region}" for region in range(len(plan.regions))]
        for region, name in enumerate(names):
            archive.add_region(name, region)
        archive.add("archive/version", b"3\n")
        return archive.layout(Described(plan.describe(), names), _DESCRIPTION)

    def recognizes(self, path: Path, start: bytes) -> bool:
        if start[:4] != b"PK\x03\x04":
            return path.suffix in (".pt", ".pth", ".bin") and start[:1] == b"\x80"
        return any(name.endswith("/data.pkl") for name in read_directory(path).members)

    def open(self, path: Path) -> Opened:
        with path.open("rb") as file:
            zipped = file.read(4) == b"PK\x03\x04"
        if zipped:
            directory = read_directory(path)
            member = directory.members.get(_DESCRIPTION)
            if member is not None:
                described, places = locate(path, directory, member)
                return Opened(
                    self.name, described.plan, [path], [directory.file_bytes], places, described.digests, native=True
                )
        state = _load(path, mmap=zipped)
        return Opened(self.name, plan(state), [path], [path.stat().st_size], None, None, native=False)


def _load(path: Path, *, mmap: bool) -> Any:
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except (
        pickle.UnpicklingError, RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError,
        AssertionError, EOFError, UnicodeDecodeError, OverflowError, MemoryError,
    ) as error:  # fmt: skip
        text = " ".join(str(error).split())
        raise CheckpointError(f"{path}: torch.load(weights_only=True) does not open it: {text:.300}") from None
