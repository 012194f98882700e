"""Writers that are open when their process ends: what was staged is written before."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import TYPE_CHECKING

from ..memory import forks

if TYPE_CHECKING:
    from .writer import CheckpointWriter

_open: set[CheckpointWriter] = set()
_lock = threading.Lock()
_hooked = 0


def add(writer: CheckpointWriter) -> None:
    """Close this writer at the end of the process at the latest."""
    global _hooked
    with _lock:
        _open.add(writer)
        util = sys.modules.get("multiprocessing.util")
        if util is not None and _hooked != os.getpid():  # such children end without `atexit`
            _hooked = os.getpid()
            util.Finalize(None, close_all, exitpriority=10)  # before the endpoints leave


def discard(writer: CheckpointWriter) -> None:
    """It is closed."""
    with _lock:
        _open.discard(writer)


@atexit.register
def close_all() -> None:
    """Close every writer, telling errors as warnings."""
    for writer in list(_open):
        with contextlib.suppress(Exception):
            writer._close(None, quietly=True)


def _forget() -> None:
    """A forked child: the writers are its parent's."""
    global _lock
    _lock = threading.Lock()
    for writer in _open:
        writer._closed = True
    _open.clear()


forks.call_in_child(_forget)
