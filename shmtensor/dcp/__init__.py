"""A plug-in for torch's distributed checkpoint (DCP): `save`, `async_save` and `load` through this library's writers.

| module | what it does |
|---|---|
| `writer` | `StorageWriter`: DCP's save plan of a rank becomes this rank's part of a checkpoint |
| `stager` | `AsyncStager`: copies a state into shared memory while the trainer waits, before DCP's own thread begins |
| `reader` | `StorageReader`: DCP's load plan, from one of the two sources below |
| `stored_parts` | checkpoints of `StorageWriter`: reads the bytes that a plan asks for |
| `filesystem` | checkpoints of DCP's `FileSystemWriter` |
| `part_writer` | the `CheckpointWriter` of a rank, which is opened with the first save |
| `description` | what a rank's part says of its items, as JSON |
| `metadata` | DCP's metadata, from what either source says it has |
| `metadata_pickle`, `archives` | DCP's own metadata and archives, read without running what they ask for |
"""

from __future__ import annotations

from .reader import StorageReader
from .stager import AsyncStager
from .writer import StorageWriter

__all__ = ["AsyncStager", "StorageReader", "StorageWriter"]
