"""The counters of a pool's workers, in memory that the pool reads also while a worker is busy, stuck or dead.

A file in memory without a name, whose descriptor a worker inherits: nothing of it is left after any death. Each process
of a worker has a row of 512 bytes, which it alone writes while it lives:

    0    busy      CLOCK_MONOTONIC, ns: when the request that it works on was begun; 0: none
    8    handled   requests that were answered
    16   errors    of these, with an error
    24   failed    CLOCK_MONOTONIC, ns: when the last error was noted
    32   version   of the error's text: odd while it is written
    40   length    of the text, bytes
    64   text      UTF-8, cut to 448 bytes
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from multiprocessing import reduction
from time import monotonic_ns
from typing import Any, Final

from ..memory import shortage
from ..memory.descriptors import OpenFile
from ..memory.segment import Mapping
from ..memory.words import store

_BUSY, _HANDLED, _ERRORS, _FAILED, _VERSION, _LENGTH, _TEXT = 0, 1, 2, 3, 4, 5, 8
_ROW: Final = 512
_WORDS: Final = _ROW // 8
_MOST_TEXT: Final = _ROW - 8 * _TEXT
_TRIES: Final = 100


@dataclass(frozen=True)
class Counts:
    """A row, as it was read. `busy_ns` and `failed_ns` are on CLOCK_MONOTONIC; 0: not busy, no error."""

    busy_ns: int = 0
    handled: int = 0
    errors: int = 0
    failed_ns: int = 0
    error: str = ""


class Row:
    """A row of the board, passed to the process that writes it."""

    def __init__(self, file: OpenFile, index: int) -> None:
        self._file, self.index = file, index

    def open(self) -> Counting:
        """In the process that writes it."""
        mapping = Mapping(self._file.fd, 0, os.fstat(self._file.fd).st_size, writable=True)
        self._file.close()
        return Counting(mapping, self.index)

    def __reduce__(self) -> Any:
        return _row, (reduction.DupFd(self._file.fd), self.index)


def _row(descriptor: Any, index: int) -> Row:
    file = OpenFile()
    file.open(_itself, descriptor.detach())
    return Row(file, index)


def _itself(fd: int) -> int:
    return fd


class Counting:
    """A row, as its process writes it."""

    def __init__(self, mapping: Mapping, index: int) -> None:
        at = index * _WORDS
        self._words = mapping.words[at : at + _WORDS]
        self._text = mapping.view[8 * (at + _TEXT) : _ROW * (index + 1)]
        self._handled = self._errors = 0

    def begin(self) -> None:
        """A request is begun."""
        store(self._words, _BUSY, monotonic_ns())

    def end(self, count: int, error: str | None) -> None:
        """As many requests were answered, with an error if there is one."""
        words = self._words
        self._handled += count
        store(words, _HANDLED, self._handled)
        if error is not None:
            self._errors += count
            store(words, _ERRORS, self._errors)
            self._note(error)
        store(words, _BUSY, 0)

    def _note(self, error: str) -> None:
        words, data = self._words, error.encode(errors="replace")[:_MOST_TEXT]
        store(words, _VERSION, words[_VERSION] + 1)
        self._text[: len(data)] = data
        store(words, _LENGTH, len(data))
        store(words, _FAILED, monotonic_ns())
        store(words, _VERSION, words[_VERSION] + 1)


class Board:
    """The rows, as the pool sees them."""

    def __init__(self, rows: int) -> None:
        self._file = OpenFile()
        try:
            self._file.open(os.memfd_create, "shmtensor.pool", os.MFD_CLOEXEC)
            os.posix_fallocate(self._file.fd, 0, rows * _ROW)
        except OSError as error:
            self._file.close()
            raise shortage.explain(error, "cannot make the memory of a pool's counters") from None
        self._mapping: Mapping | None = Mapping(self._file.fd, 0, rows * _ROW, writable=True)
        self._free = list(range(rows))

    def take(self) -> Row:
        """A row that no process has, cleared."""
        index = self._free.pop(0)
        if self._mapping is not None:
            for at in range(index * _WORDS, index * _WORDS + _TEXT):
                store(self._mapping.words, at, 0)
        return Row(self._file, index)

    def give_back(self, row: Row) -> None:
        """Its process has ended."""
        self._free.append(row.index)

    def read(self, row: Row) -> Counts:
        """What the row's process has written so far."""
        if self._mapping is None:
            return Counts()
        at, words = row.index * _WORDS, self._mapping.words
        text = b""
        for _ in range(_TRIES):  # else the process is stopped, or died, in the midst of writing it
            version = words[at + _VERSION]
            start = 8 * (at + _TEXT)
            text = bytes(self._mapping.view[start : start + min(words[at + _LENGTH], _MOST_TEXT)])
            if not version & 1 and words[at + _VERSION] == version:
                break
        error = text.decode(errors="ignore")
        return Counts(words[at + _BUSY], words[at + _HANDLED], words[at + _ERRORS], words[at + _FAILED], error)

    def close(self) -> None:
        """Give the memory back."""
        self._mapping = None
        self._file.close()
