"""Which start method's semaphores a queue is made of."""

from __future__ import annotations

import multiprocessing
from typing import Any

from ..errors import ArgumentError, ArgumentTypeError


def context_of(ctx: Any) -> Any:
    """A `multiprocessing` context: the default one, that of a start method's name, or the one that was passed."""
    if ctx is None or isinstance(ctx, str):
        try:
            return multiprocessing.get_context(ctx)
        except ValueError as error:
            raise ArgumentError(f"ctx={ctx!r}: {error}") from None
    if not hasattr(ctx, "BoundedSemaphore"):
        raise ArgumentTypeError(f"ctx must be a multiprocessing context or a start method's name, not {ctx!r}")
    return ctx
