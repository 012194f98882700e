"""Whoever writes to a read-only mapping is told which channel and message, before the process ends for it.

The compiled module does it (`native/faults.c`); where there is none, the segmentation fault says nothing by itself.
"""

from __future__ import annotations

import weakref
from typing import Any

from .. import native
from .segment import Mapping


def guard(data: Mapping, head: Mapping, records: int, slots: int, slot_bytes: int, channel: str) -> None:
    """Name the channel, and the message, to whoever writes to `data`: the slots of a ring, mapped read-only.

    `records` is where the records lie in `head`, which from now on stays mapped as long as `data`.
    """
    module = native.module
    if module is None:
        return
    whole: Any = data.buffer.obj
    whole.head = head.map  # the handler reads it
    number = module.guard(data.address, data.nbytes, head.address + records, slots, slot_bytes, channel)
    weakref.finalize(whole, module.unguard, number).atexit = False
