"""Reading the segments of a channel again and again: what was found by reading is kept with what was read."""

from __future__ import annotations

import os
import resource
import stat
import struct
from collections.abc import Callable, Iterable
from typing import Any, Final, Generic, TypeVar

from ..errors import WireError
from ..memory import locks
from ..memory import segment as shm
from ..memory.placement import Place
from ..memory.segment import Glance

_MOST: Final = 256 << 10
"""Bytes that are kept of what was read for one `Kept`. For what takes more, such as a ring with thousands of messages
that wait, all is read anew each time."""
_MOST_KEPT: Final = 256
"""Control segments and sequence tables that are kept open from one reading to the next, or a quarter of the files that
this process may open. Rings never are: of a channel that has ended meanwhile, they would keep the memory."""

_T = TypeVar("_T")
_NOTHING: Final = memoryview(b"").cast("Q")


class Segments:
    """Opens the segments of one channel, which has files of these names."""

    def __init__(self, kept: dict[str, Glance], names: Iterable[str], place: Place) -> None:
        self.kept, self.place = kept, place
        self.files = {name: place.status(name) for name in names}
        """Their status; None of one that is gone."""

    def open(self, name: str, stays: bool, closed: dict[str, Glance]) -> Glance:
        """Open one of them. `stays`: it is small, and stays open for the next reading. `closed`: see `Reads`."""
        info = self.files.get(name[1:])
        kept = self.kept.get(name) if stays else None
        if kept is not None:
            old = kept.info
            if kept.fd >= 0 and info is not None and info.st_ino == old.st_ino and info.st_dev == old.st_dev:
                kept.info, kept.nbytes = info, info.st_size
                return kept
            del self.kept[name]
            kept.close()
        is_regular = info is not None and stat.S_ISREG(info.st_mode)
        found = shm.look_at(name, place=self.place, is_regular=is_regular, closed=closed.pop(name, None))
        if stays and len(self.kept) < min(_MOST_KEPT, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4):
            self.kept[name] = found
        return found

    def close(self, opened: Iterable[Glance], closed: dict[str, Glance]) -> None:
        """Close those of them that do not stay open. Idempotent."""
        for segment in opened:
            if self.kept.get(segment.name) is not segment:
                segment.close()
                closed[segment.name] = segment


_Read = tuple[int, Callable[[int, int, Any], bytes], int, Any, bytes]
"""The number of a segment, in the order in which they were opened; what to call with its descriptor and two arguments;
the answer. It is a C function: a Python function would take as long as the question itself."""


class Reads:
    """What one function has read from the segments of a channel, in order: each question, and the answer.

    The result of such a function, and the questions that it asks, depend only on its arguments and on the answers. So
    if each question, asked again in the same order, has the same answer as before, the result would be the same. This
    assumes nothing about the meaning of a word, or about its writer; locks are asked about each time, too. If an answer
    differs, the questions before it would be the same: the function goes on from that answer.
    """

    def __init__(
        self,
        segments: Segments,
        closed: dict[str, Glance],
        opened: Iterable[Glance] = (),
        known: Iterable[_Read] = (),
    ) -> None:
        """`known`: what was asked already of those that were `opened`, the last first. `closed`: by name, those that
        can be opened again, and where they are left for the next reading."""
        self._segments, self._closed = segments, closed
        self._names: list[tuple[str, bool, int]] = []
        """Of those that were opened: the name, whether it stays open, and how many bytes it had."""
        self._opened, self._known = [*opened], [*known]
        self._read: list[_Read] = []
        self._nbytes = 0
        self._are_kept = True

    def open(self, name: str, *, stays: bool) -> Source:
        """Open a segment, to read it: see `Segments.open`. One that does not stay is closed by `close`."""
        number = len(self._names)
        if number == len(self._opened):
            self._opened.append(self._segments.open(name, stays, self._closed))
        if stays and name not in self._segments.kept:
            self.drop()  # there are too many to keep more of each
        segment = self._opened[number]
        self._names.append((name, stays, segment.nbytes))
        return Source(self, number, segment)

    def ask(self, number: int, question: Callable[[int, int, Any], bytes], what: int, where: Any) -> bytes:
        """Ask a segment something: see `_Read`."""
        if self._known:
            read = self._known.pop()
        else:
            read = number, question, what, where, question(self._opened[number].fd, what, where)
        if self._are_kept:
            self._read.append(read)
            self._nbytes += len(read[4])
            if self._nbytes > _MOST:
                self.drop()
        return read[4]

    def drop(self) -> None:
        """Keep nothing: there was too much, or the result depends on more than these answers."""
        self._are_kept = False
        self._read.clear()

    def again(self, segments: Segments) -> Reads | None:
        """Ask all questions again. None if the answers are the same; else the answers up to the first difference, from
        which the function goes on."""
        if not self._are_kept:
            return Reads(segments, self._closed)
        opened: list[Glance] = []
        changed: list[_Read] = []
        at = 0
        try:
            for number, question, what, where, before in self._read:
                if number == len(opened):
                    name, stays, nbytes = self._names[number]
                    opened.append(segments.open(name, stays, self._closed))
                    if opened[number].nbytes != nbytes:
                        break
                answer = question(opened[number].fd, what, where)
                if answer != before:
                    changed.append((number, question, what, where, answer))
                    break
                at += 1
            else:
                segments.close(opened, self._closed)
                return None
        except (OSError, WireError):
            pass  # the function finds out why
        return Reads(segments, self._closed, opened, changed + self._read[:at][::-1])

    def close(self) -> None:
        """Close what does not stay open. Idempotent."""
        self._segments.close(self._opened, self._closed)
        self._opened.clear()


class Kept(Generic[_T]):
    """The result of a function that reads segments, and what it has read.

    The function is called again if it is given something else, or if anything that it has read has changed since.
    """

    def __init__(self, find: Callable[..., _T]) -> None:
        """`find` is called with a `Reads` and what it is given."""
        self._find = find
        self._last: tuple[tuple[Any, ...], Reads, _T] | None = None

    def found(self, segments: Segments, *given: Any) -> _T:
        """The current result of the function; the same object if nothing has changed."""
        reads: Reads | None = None
        if self._last is not None and self._last[0] == given:
            reads = self._last[1].again(segments)
            if reads is None:
                return self._last[2]
        reads = Reads(segments, {}) if reads is None else reads
        try:
            found = self._find(reads, *given)
        finally:
            reads.close()
        self._last = given, reads, found
        return found


class Source:
    """One of the segments that are read."""

    __slots__ = ("_data", "_head", "_number", "_reads", "segment")

    def __init__(self, reads: Reads, number: int, segment: Glance) -> None:
        self._reads, self._number, self.segment = reads, number, segment
        self._data, self._head = b"", _NOTHING

    @property
    def name(self) -> str:
        return self.segment.name

    @property
    def nbytes(self) -> int:
        return self.segment.nbytes

    def read_head(self, count: int) -> memoryview:
        """Read the first `count` words, or all there are, at once: `read` returns them from now on.

        For what is read in many pieces: each system call costs more than these words.
        """
        self._data = self._reads.ask(self._number, os.pread, 8 * count, 0)
        data = memoryview(self._data)
        self._head = data.cast("Q") if len(data) == 8 * count else data[: len(data) & -8].cast("Q")
        return self._head

    def read(self, start: int, count: int) -> memoryview:
        """Read `count` words from word `start` on. Raises `WireError` if there are fewer."""
        words = self._head[start : start + count]
        if len(words) == count:
            return words
        return self.read_anew(start, count)

    def unpack(self, form: struct.Struct, first: int, step: int, which: Iterable[int]) -> list[tuple[Any, ...]]:
        """These elements of an array, in this form, that begins with word `first` and has one every `step` words: as
        `read`, but many at once."""
        unpack, data, most, found = form.unpack_from, self._data, len(self._data) - form.size, []
        for index in which:
            start = first + step * index
            found.append(unpack(data, 8 * start) if 8 * start <= most else unpack(self.read(start, form.size // 8)))
        return found

    def read_anew(self, start: int, count: int) -> memoryview:
        """The same, as they are now: not as `read_head` has found them."""
        data = self._reads.ask(self._number, os.pread, 8 * count, 8 * start)
        return self.segment.words(data, start, count)

    def is_locked(self, byte: int, length: int = 1) -> bool:
        """Whether any process holds a lock within `[byte, byte + length)`."""
        return locks.says_locked(self._reads.ask(self._number, *locks.question(byte, length)))
