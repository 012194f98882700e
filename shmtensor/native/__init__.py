"""The core in C, optional, and not used with `SHMTENSOR_PURE=1`: docs/internals/core.md.

`codec/implementation.py` and `ring/implementation.py` use it where it was built.

| file | what it is |
|---|---|
| `native.h` | shared by the others: the constants of the wire format, `Codec`, `Encoded` |
| `encode.c` | from a value and its meta to a description and the copies to make |
| `encoded.c` | `Encoded`: the result of `encode`, which makes the copies |
| `decode.c` | from a description and the payload to a value and its meta |
| `tensors.c`, `dlpack.h` | torch's tensors, through its DLPack exchange interface, or by their methods |
| `writer.c` | the sending end: slots, records, publication |
| `reader.c` | the receiving end: readers, leases, the base of messages |
| `notify.c` | doorbells, which wake receivers |
| `trace.c` | the event log of a writer or reader while its channel is traced | | `copies.c` | large copies, with
non-temporal stores |
| `faults.c` | explains a write to a received tensor before the segmentation fault |
| `protocol/` | the protocol itself, C11 without Python |
| `module.c` | the module, and how Python makes a `Codec` |
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import Any, Final

_NAME: Final = f"{__name__}._core"
_AGAIN: Final = (
    "install a wheel of shmtensor, or a C compiler and Python's headers (on Debian and Ubuntu: apt install gcc "
    "python3-dev), then run pip install --force-reinstall --no-deps --no-cache-dir . in a checkout"
)


def switched_off() -> bool:
    """Whether the compiled module is not wanted: `SHMTENSOR_PURE` is set, and not to 0."""
    return os.environ.get("SHMTENSOR_PURE", "") not in ("", "0")


def _load() -> tuple[Any, str, str]:
    """The compiled module, or None, why it is not used, and what to do about that."""
    if switched_off():
        return None, "switched off by SHMTENSOR_PURE", "unset SHMTENSOR_PURE"
    if "t" in sys.abiflags:  # it would not compile, and importing one would switch the lock on for the whole process
        reason = "this Python has no global interpreter lock (free-threaded), which keeps its threads apart"
        return None, reason, "use a Python that has the lock"
    try:
        return importlib.import_module(_NAME), "", ""
    except ModuleNotFoundError as error:
        if error.name != _NAME:
            raise
        return None, "no compiled module was installed", _AGAIN
    except ImportError as error:
        return None, f"it cannot be loaded: {error}", _AGAIN


module, why_not, remedy = _load()
"""The compiled module; None where it is not installed, does not load or is not wanted, then why, and what to do."""

_reported = False


def report_missing() -> None:
    """Log, once per process and its forked children, that the compiled module is not used, unless that was asked for.

    Endpoints call it when they are created. It is a warning, since programs that configure no logging print nothing
    below that level, and users of such programs need to know that messages take many times longer.
    """
    global _reported
    if _reported or not why_not or switched_off():
        return
    _reported = True
    logging.getLogger("shmtensor.native").warning(
        "the compiled core is not used, so that small messages take about forty times longer: %s: %s", why_not, remedy
    )
