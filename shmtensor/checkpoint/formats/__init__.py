"""The formats, one module each. To add one: subclass `Format` in a module here and list it in `FORMATS`, or in `KNOWN`
alone if it is only read."""

from __future__ import annotations

from ...errors import ArgumentError, CheckpointError
from ..locations import Location, open_input
from .base import FileSpec, Format, Layout, Opened, Piece, Stored
from .distcp import Distcp
from .npz import Npz
from .safetensors import Safetensors
from .tensorizer import Tensorizer
from .torch import Torch

__all__ = ["FORMATS", "KNOWN", "FileSpec", "Format", "Layout", "Opened", "Piece", "Stored", "detect", "get_format"]

FORMATS: dict[str, Format] = {each.name: each for each in (Safetensors(), Torch(), Npz(), Distcp())}
KNOWN: dict[str, Format] = {**FORMATS, Tensorizer.name: Tensorizer()}


def get_format(name: str) -> Format:
    """The format with a name. `ArgumentError` if there is none."""
    try:
        return FORMATS[name]
    except KeyError:
        raise ArgumentError(f"format={name!r} is not known: choose one of {', '.join(FORMATS)}") from None


def detect(path: Location) -> Format:
    """The format of an existing file or directory, by its contents. `CheckpointError` if it is none of these."""
    start = b""
    if path.is_file():
        with open_input(path) as file:
            start = file.pread(16, 0)
    if path.suffix == Distcp.suffix and start[:2] == b"PK":  # an archive per tensor, which looks like one of them
        raise CheckpointError(
            f"{path} is a part of what torch.distributed.checkpoint has saved: load that by its load(), with "
            "shmtensor.dcp.StorageReader"
        )
    for each in KNOWN.values():
        if each.recognizes(path, start):
            return each
    if path.is_file():
        raise CheckpointError(f"{path} is no checkpoint: it begins with {start!r}")
    raise CheckpointError(f"{path} is no checkpoint: there is neither a file nor an index of shards")
