"""Explain a write to a read-only mapping: name the channel and the message before the segmentation fault.

The compiled module does it (`native/faults.c`); without it, the segmentation fault comes without an explanation.
"""

from __future__ import annotations

import weakref
from typing import Any

from .. import native
from .segment import Mapping


def guard(data: Mapping, head: Mapping, records: int, slots: int, slot_bytes: int, channel: str) -> None:
    """Explain writes to `data`, the slots of a ring, which are mapped read-only.

    `records` is the offset of the records in `head`, which from now on stays mapped as long as `data`.
    """
    module = native.module
    if module is None:
        return
    whole: Any = data.buffer.obj
    whole.head = head.map  # keeps it mapped: the handler reads it
    number = module.guard(data.address, data.nbytes, head.address + records, slots, slot_bytes, channel)
    weakref.finalize(whole, module.unguard, number).atexit = False
