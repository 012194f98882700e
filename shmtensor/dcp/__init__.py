"""A plug-in for torch's distributed checkpoint (DCP): `save`, `async_save` and `load` through this library's writers.

| module | what it does |
|---|---|
| `writer` | `StorageWriter`: DCP's save plan of a rank becomes this rank's part, through its `CheckpointWriter` |
| | `AsyncStager`: copies a state into shared memory while the trainer waits, before DCP's own thread begins |
| `reader` | `StorageReader`: DCP's load plan, from checkpoints of `StorageWriter` or of DCP's `FileSystemWriter` |
| `metadata` | DCP's metadata, from what files say of their items: the parts of ranks in JSON, those of |
| | `FileSystemWriter` in a pickle, `.metadata`, which is read without running anything |
"""

from __future__ import annotations

from .reader import StorageReader
from .writer import AsyncStager, StorageWriter

__all__ = ["AsyncStager", "StorageReader", "StorageWriter"]
