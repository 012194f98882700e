"""Which `multiprocessing` context a user means: the one function for every option that takes one."""

from __future__ import annotations

import multiprocessing
from typing import Any

from .errors import ArgumentError, ArgumentTypeError


def context_of(ctx: Any, option: str) -> Any:
    """A `multiprocessing` context: the default one, that of a start method's name, or the one that was passed.

    `option` is the name of the argument, for errors: `ArgumentError` if there is no such start method,
    `ArgumentTypeError` if it is neither a name nor a context.
    """
    if ctx is None or isinstance(ctx, str):
        try:
            return multiprocessing.get_context(ctx)
        except ValueError as error:
            raise ArgumentError(f"{option}={ctx!r}: {error}") from None
    if not hasattr(ctx, "get_start_method") or not hasattr(ctx, "Process"):
        raise ArgumentTypeError(f"{option} must be a multiprocessing context or a start method's name, not {ctx!r}")
    return ctx
