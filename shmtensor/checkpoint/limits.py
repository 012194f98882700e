"""What a checkpoint may be at most: the reader believes nothing beyond, so the planner makes nothing beyond."""

from __future__ import annotations

from typing import Final

VERSION: Final = 1
MAX_DESCRIPTION: Final = 48 << 20  # bytes of JSON: it must fit into a safetensors header, which others bound at 100 MB
MAX_TENSORS: Final = 1_000_000
MAX_DEPTH: Final = 64
MAX_NAME: Final = 400  # characters of a tensor's name in a file
PAGE: Final = 4096  # bytes; data areas begin at a multiple, so that they can be written past the page cache
LINE: Final = 64  # bytes of a cache line
PIECE: Final = 1 << 20  # bytes that are read at once of what is not trusted yet
