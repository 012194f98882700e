"""The core in C, optional, and not used with `SHMTENSOR_PURE=1`: docs/internals/core.md.

`views/implementation.py` and `ring/implementation.py` use it where it was built.

| file | what it is |
|---|---|
| `native.h` | what the others share: the constants of the wire format, `Codec`, `Encoded` |
| `encode.c` | a value and its meta to a description and the copies to make |
| `encoded.c` | these, and the copies |
| `decode.c` | a description and the payload to a value and its meta |
| `tensors.c`, `dlpack.h` | torch's tensors, through its DLPack exchange interface, or by their methods |
| `writer.c` | the sending end: slots, records, publication |
| `reader.c` | the receiving end: feeds, leases, the base of messages |
| `notify.c` | doorbells: who sleeps is woken |
| `copies.c` | large copies, past the caches |
| `faults.c` | who writes to what was received is told so, before its segmentation fault |
| `protocol/` | the protocol itself, C11 without Python |
| `module.c` | the module, and how Python makes a `Codec` |
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import Any


def _load() -> tuple[Any, str]:
    """The compiled module, or None and why it is not used."""
    if os.environ.get("SHMTENSOR_PURE", "") not in ("", "0"):
        return None, "switched off by SHMTENSOR_PURE"
    if "t" in sys.abiflags:  # it would not compile, and importing one would switch the lock on for the whole process
        reason = "this Python has no global interpreter lock (free-threaded), which keeps its threads apart"
        logging.getLogger("shmtensor").warning("the compiled codec is not used, Python code does the work: %s", reason)
        return None, reason
    try:
        return importlib.import_module("._codec", __name__), ""
    except ImportError as error:
        return None, f"not built: {error}"


module, why_not = _load()
"""The compiled module; None where it was not built or is not wanted, and then why."""
