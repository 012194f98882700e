"""What a live view needs of its terminal besides the output: keys, and to be stopped by Ctrl-Z and go on."""

from __future__ import annotations

import contextlib
import enum
import os
import re
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from typing import Final


class Key(enum.Enum):
    """What a key is for."""

    QUIT = enum.auto()
    SORT = enum.auto()
    UP = enum.auto()
    DOWN = enum.auto()
    PAGE_UP = enum.auto()
    PAGE_DOWN = enum.auto()


_KEYS: Final = {
    b"q": Key.QUIT, b"s": Key.SORT, b"\x1b[A": Key.UP, b"\x1bOA": Key.UP, b"\x1b[B": Key.DOWN, b"\x1bOB": Key.DOWN,
    b"\x1b[5~": Key.PAGE_UP, b"\x1b[6~": Key.PAGE_DOWN,
}  # fmt: skip
_TYPED: Final = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)


@contextlib.contextmanager
def keys_at_once() -> Iterator[int | None]:
    """Within, keys come when they are pressed, from this descriptor, and are not echoed. None if there are none: stdin
    or stdout is no terminal. Signals (Ctrl-C, Ctrl-Z) stay."""
    if sys.stdin is None or not sys.stdin.isatty() or not sys.stdout.isatty():
        yield None
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def restore() -> None:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(fd, termios.TCSADRAIN, before)

    with contextlib.ExitStack() as stack:
        stack.callback(restore)
        stack.callback(restore)  # a signal may end one of them
        tty.setcbreak(fd, termios.TCSADRAIN)  # in the background this stops the process until it is in the foreground
        yield fd


def read_keys(fd: int) -> list[Key]:
    """The keys that were pressed; those that mean nothing are left out."""
    try:
        typed = os.read(fd, 1024)
    except OSError:
        typed = b""
    if not typed:  # the terminal is gone
        return [Key.QUIT]
    return [key for each in _TYPED.findall(typed) if (key := _KEYS.get(each)) is not None]


class Stops:
    """Within, Ctrl-Z (SIGTSTP) makes `fd` readable in place of stopping the process, for `stop` to do it in time.

    Where it is ignored, it stays so.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._before = signal.getsignal(signal.SIGTSTP)

    def __enter__(self) -> Stops:
        self._handle()
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTSTP, self._before)
        os.close(self.fd)

    def _handle(self) -> None:
        if self._before != signal.SIG_IGN:
            signal.signal(signal.SIGTSTP, lambda *_: os.eventfd_write(self.fd, 1))

    def stop(self) -> None:
        """Stop as Ctrl-Z does by default; returns when the process goes on."""
        os.eventfd_read(self.fd)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        try:
            signal.raise_signal(signal.SIGTSTP)
        finally:
            self._handle()
