"""Checks of the arguments of servers and pools: they raise at once for what could never work."""

from __future__ import annotations

import inspect
from typing import Any

from ..endpoints.base import check_count, check_timeout
from ..errors import ArgumentError, ArgumentTypeError
from ..options import parse_bytes

MOST_SLOTS = 1 << 16


def check_options(
    max_batch: int | None, max_wait: float | None, max_attempts: int, slots: int | None, max_bytes: int | str | None
) -> None:
    """Raise `ArgumentError` or `ArgumentTypeError` for options that no server can have."""
    if max_batch is not None:
        check_count("max_batch", max_batch, 1, 1 << 16)
    elif max_wait is not None:
        raise ArgumentError("max_wait= is how long a batch waits: it needs max_batch=")
    check_timeout(max_wait, "max_wait")
    check_count("max_attempts", max_attempts, 1, 250)
    if slots is not None:
        check_count("slots", slots, 1, MOST_SLOTS)
    if max_bytes is not None:
        parse_bytes(max_bytes, "max_bytes")


def check_handler(handler: Any, what: str = "the handler", arguments: int = 1) -> None:
    """Raise `ArgumentTypeError` unless `handler` is a plain callable or a class of such.

    `arguments`: how many it may need, at most.
    """
    if isinstance(handler, type):
        call = next((vars(base)["__call__"] for base in handler.__mro__ if "__call__" in vars(base)), None)
        if call is None:
            raise ArgumentTypeError(f"{what} is a class whose instances cannot be called: give it a method __call__")
    elif not callable(handler):
        raise ArgumentTypeError(f"{what} is a {type(handler).__name__}, which cannot be called")
    else:
        call = handler
    if inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(vars(type(call)).get("__call__")):
        raise ArgumentTypeError(
            f"{what} is an async function, and servers call plain ones: wrap it in a function that returns "
            "asyncio.run(handler(value))"
        )
    needed = sum(each.default is each.empty for each in _positional(call)) - isinstance(handler, type)  # `self`
    if needed > arguments > 1:
        raise ArgumentTypeError(
            f"{what} needs {needed} arguments, and workers pass the value, and the context to one that takes two: give "
            "the others defaults, or bind them with functools.partial"
        )


def takes_context(handler: Any) -> bool:
    """Whether a handler takes a second argument: one without a default, or called `context`."""
    positional = _positional(handler)
    return len(positional) > 1 and (positional[1].default is inspect.Parameter.empty or positional[1].name == "context")


def takes_argument(function: Any) -> bool:
    """Whether a function takes a first argument that has no default."""
    positional = _positional(function)
    return bool(positional) and positional[0].default is inspect.Parameter.empty


def _positional(function: Any) -> list[inspect.Parameter]:
    """The positional parameters of a function. Of a decorator's `*args`, those of the function that it wraps."""
    try:
        found = inspect.signature(function, follow_wrapped=False)
        if any(each.kind is each.VAR_POSITIONAL for each in found.parameters.values()):
            found = inspect.signature(function)
    except (TypeError, ValueError):  # of a C function that does not say
        return []
    return [
        each for each in found.parameters.values() if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
