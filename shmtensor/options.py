"""What several interfaces share: checks of arguments, sizes such as `"64MiB"`, `multiprocessing` contexts, extras."""

from __future__ import annotations

import multiprocessing
import os
import re
from typing import Any

from .errors import ArgumentError, ArgumentTypeError

_FACTORS = {
    "": 1, "b": 1,
    "k": 1 << 10, "kib": 1 << 10, "kb": 10**3,
    "m": 1 << 20, "mib": 1 << 20, "mb": 10**6,
    "g": 1 << 30, "gib": 1 << 30, "gb": 10**9,
    "t": 1 << 40, "tib": 1 << 40, "tb": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d{1,300})(?:\.(\d{1,300}))?\s*([a-z]*)\s*", re.IGNORECASE)


def how_to_install(extra: str) -> str:
    """How to install an extra of the package, which no package index has.

    >>> how_to_install("torch")
    "pip install '.[torch]' in a checkout of shmtensor"
    """
    return f"pip install '.[{extra}]' in a checkout of shmtensor"


def parse_bytes(size: int | str, name: str = "size") -> int:
    """Bytes from an int or a string such as `"64MiB"`, `"1.5GB"` or `"4096"`.

    >>> parse_bytes("64MiB")
    67108864
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise ArgumentTypeError(f'{name} must be an int (bytes) or a string like "64MiB", not {type(size).__name__}')
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        factor = _FACTORS.get(match[3].lower()) if match else None
        if match is None or factor is None:
            raise ArgumentError(f'{name}={size!r:.60} is not a size: write an int (bytes) or a string like "64MiB"')
        decimals = match[2] or ""
        scale: int = 10 ** len(decimals)
        size = int(match[1] + decimals) * factor // scale
    if size <= 0:
        raise ArgumentError(f"{name} must be positive, not {size}")
    return size


def format_bytes(nbytes: float) -> str:
    """A size as text.

    >>> format_bytes(64 << 20)
    '64.0 MiB'
    """
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024 or unit == "TiB":
            return f"{nbytes:.0f} {unit}" if unit == "bytes" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError("unreachable")


def reason(error: BaseException) -> str:
    """The text of an error for people, without the number that precedes that of an `OSError`.

    >>> reason(PermissionError(13, "Permission denied", "runs/a"))
    'runs/a: Permission denied'
    """
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return error.strerror if error.filename is None else f"{os.fsdecode(error.filename)}: {error.strerror}"


def shown(value: object, most: int = 80) -> str:
    """The beginning of a value that a stranger wrote, for errors, in at most so many characters. Its `repr` may be too
    deep, an int of too many digits, or lists that are shared so often that it never ends.

    >>> shown([1, ["text", {"a": 2}]]), shown("text", 3), shown([[[[[[[[[[]]]]]]]]]])
    ("[1, ['text', {'a': 2}]]", "'te", '[[[[[[[[[...]]]]]]]]]')
    """
    return _shown(value, most, 8)[:most]


def _shown(value: object, most: int, depth: int) -> str:
    if isinstance(value, (str, bytes)):
        return repr(value[:most])
    if isinstance(value, int) and value.bit_length() > 1024:
        return hex(value)
    if value is None or isinstance(value, (int, float)):
        return repr(value)
    if not isinstance(value, (list, tuple, dict)):
        return f"<{type(value).__name__}>"
    pairs = isinstance(value, dict)
    text = "" if depth or not value else "..."
    for each in (value.items() if isinstance(value, dict) else value) if depth else ():
        if len(text) >= most:
            break
        parts = [_shown(part, most, depth - 1) for part in (each if pairs else (each,))]
        text += f"{', ' if text else ''}{': '.join(parts)}"
    start, end = "{}" if pairs else "[]" if isinstance(value, list) else "()"
    return f"{start}{text}{',' if end == ')' and len(value) == 1 else ''}{end}"


def printable(text: str) -> str:
    """A text without control characters: those that cannot be printed are written as in Python's source.

    >>> printable("a name" + chr(27)) == "a name" + chr(92) + "x1b"
    True
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def context_of(ctx: Any, option: str) -> Any:
    """The `multiprocessing` context of an option: the default one, that of a start method, or the one that was passed.

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


def check_timeout(timeout: Any, name: str = "timeout") -> None:
    """Check that a timeout is None, or seconds that are not negative. `name`: of the parameter."""
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise ArgumentTypeError(f"{name} is in seconds (int or float) or None, not {type(timeout).__name__}")
    if not timeout >= 0:
        raise ArgumentError(f"{name} must be 0 or more seconds, or None, not {timeout!r}")
    try:
        float(timeout)
    except OverflowError:
        raise ArgumentError(f"{name} is more seconds than a float can be: pass None to wait for ever") from None


def waits(timeout: float) -> bool:
    """Check a time-out; return whether it allows waiting."""
    check_timeout(timeout)
    return timeout > 0


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Check that an option is one of a few words."""
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}")


def check_count(name: str, value: object, least: int, most: int) -> None:
    """Check that an option is an int within bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name} must be an int, not {type(value).__name__}")
    if not least <= value <= most:
        raise ArgumentError(f"{name} must be between {least} and {most}, not {value}")
