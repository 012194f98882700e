"""Limits of checkpoints: readers refuse what is beyond them, and so the planner does."""

from __future__ import annotations

from typing import Final

VERSION: Final = 1
MAX_DESCRIPTION: Final = 48 << 20  # bytes of JSON: it must fit into a safetensors header, which others limit to 100 MB
MAX_TENSORS: Final = 1_000_000
MAX_DEPTH: Final = 64
MAX_NAME: Final = 400  # characters of a tensor's name in a file
PAGE: Final = 4096  # bytes; data areas begin at a multiple, for direct I/O
LINE: Final = 64  # bytes of a cache line
PIECE: Final = 1 << 20  # bytes of untrusted data that are read at once
DIRECT_MIN: Final = 1 << 20
"""Reads of at least so many bytes use direct I/O: shorter ones would not keep a disk busy."""
