"""A plug-in for torch's distributed checkpoint (DCP): `save`, `async_save` and `load` through this library's writers.

| module | what it does |
|---|---|
| `writer` | `StorageWriter`: DCP's save plan of a rank becomes this rank's part, through its `CheckpointWriter` |
| | `AsyncStager`: copies a state into shared memory while the trainer waits, before DCP's own thread begins |
| `reader` | `StorageReader`: DCP's load plan, from checkpoints of `StorageWriter` or of `FileSystemWriter` |
| `filesystem` | checkpoints of DCP's `FileSystemWriter`: metadata and archives, read without running anything |
| `metadata` | what a rank's part says of its items, as JSON; DCP's metadata, from what either source says it has |
"""

from __future__ import annotations

from .reader import StorageReader
from .writer import AsyncStager, StorageWriter

__all__ = ["AsyncStager", "StorageReader", "StorageWriter"]
