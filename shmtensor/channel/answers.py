"""What the segments of a channel have answered while they were read, so that a later reading can ask the same again."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Callable
from typing import Any, Final

from ..errors import WireError
from ..memory import segment as shm
from ..memory.segment import Glance

_MOST: Final = 256 << 10
"""Bytes of answers that are kept of a channel. What answers more, such as a ring with thousands of messages that wait,
is read anew each time."""
_MOST_KEPT: Final = 256
"""Control segments and sequence tables that are kept open from one reading to the next, or a quarter of the files that
this process may open. Rings never are: of a channel that has ended meanwhile, they would keep the memory."""

Files = dict[str, "os.stat_result | None"]
"""By name: those of a channel."""


class Segments:
    """Opens the segments of one channel, which has these files."""

    def __init__(self, kept: dict[str, Glance], files: Files) -> None:
        self.kept, self._files = kept, files

    def open(self, name: str, stays: bool) -> Glance:
        """Open one of them. `stays`: it is small, and stays open for the next reading."""
        info = self._files.get(name[1:])
        kept = self.kept.get(name) if stays else None
        if kept is not None:
            if kept.fd >= 0 and info is not None and os.path.samestat(info, kept.info):
                kept.info, kept.nbytes = info, info.st_size
                return kept
            del self.kept[name]
            kept.close()
        found = shm.look_at(name, is_regular=info is not None and stat.S_ISREG(info.st_mode))
        if stays and len(self.kept) < min(_MOST_KEPT, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4):
            self.kept[name] = found
        return found


_Asked = tuple[int, Callable[[Glance, int, int], Any], int, int, Any]
"""The number of a segment, in the order in which they were opened; a question, about what; the answer."""


class Answers:
    """The questions that one look at a channel asks its segments, in order, and the answers.

    What such a look finds follows from the answers, and they alone say what it asks next. So if each question, asked
    again in the same order, is answered as before, another look would find the same. Nothing is concluded from what a
    word means or from who writes it; locks are asked about each time, too. And up to the first answer that differs,
    another look asks the same: it goes on from there.
    """

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._names: list[tuple[str, bool]] = []
        self._opened: list[Glance] = []
        self._asked: list[_Asked] = []
        self._known: list[_Asked] = []
        """Those that were asked already, the last first."""
        self._nbytes = 0
        self._are_kept = True

    def open(self, name: str, *, stays: bool) -> Source:
        """Open a segment, to ask it: see `Segments.open`. One that does not stay is closed by the caller."""
        number = len(self._names)
        if number == len(self._opened):
            self._opened.append(self._segments.open(name, stays))
        if stays and name not in self._segments.kept:
            self.drop()  # there are too many to keep more of each
        self._names.append((name, stays))
        return Source(self, number, self._opened[number])

    def ask(self, number: int, question: Callable[[Glance, int, int], Any], at: int, count: int) -> Any:
        """Ask a segment about `count` bytes or locks from `at` on."""
        if self._known:
            asked = self._known.pop()
        else:
            asked = number, question, at, count, question(self._opened[number], at, count)
        if self._are_kept:
            self._asked.append(asked)
            self._nbytes += count if question is Glance.peek else 1
            if self._nbytes > _MOST:
                self.drop()
        return asked[4]

    def drop(self) -> None:
        """Keep none: there are many, or what was found follows from more than them."""
        self._are_kept = False
        self._asked.clear()

    def again(self, segments: Segments) -> Answers | None:
        """Ask all again. None: the answers are the same; else those so far, from which another look goes on."""
        found = Answers(segments)
        try:
            if self._are_kept and self._is_answered_again(found):
                found.close()
                return None
        except (OSError, WireError):
            pass  # whoever looks again finds out why
        found._known.reverse()
        return found

    def _is_answered_again(self, found: Answers) -> bool:
        opened, known = found._opened, found._known
        for asked in self._asked:
            number, question, at, count, before = asked
            if number == len(opened):
                opened.append(found._segments.open(*self._names[number]))
            answer = question(opened[number], at, count)
            if answer != before:
                known.append((number, question, at, count, answer))
                return False
            known.append(asked)
        return True

    def close(self) -> None:
        """Close what does not stay open. Idempotent."""
        for segment in self._opened:
            if self._segments.kept.get(segment.name) is not segment:
                segment.close()
        self._opened.clear()


class Source:
    """One of the segments that a look asks."""

    __slots__ = ("_answers", "_head", "_number", "segment")

    def __init__(self, answers: Answers, number: int, segment: Glance) -> None:
        self._answers, self._number, self.segment = answers, number, segment
        self._head = memoryview(b"").cast("Q")

    @property
    def name(self) -> str:
        return self.segment.name

    @property
    def nbytes(self) -> int:
        found: int = self._answers.ask(self._number, _nbytes, 0, 0)
        return found

    def read_head(self, count: int) -> memoryview:
        """Read the first `count` words, or all there are, at once: `read` returns them from now on.

        For what is read in many pieces: each system call costs more than these words.
        """
        data = self._answers.ask(self._number, Glance.peek, 0, 8 * count)
        self._head = memoryview(data)[: len(data) & -8].cast("Q")
        return self._head

    def read(self, start: int, count: int) -> memoryview:
        """Read `count` words from word `start` on. Raises `WireError` if there are fewer."""
        words = self._head[start : start + count]
        if len(words) == count:
            return words
        return self.read_anew(start, count)

    def read_anew(self, start: int, count: int) -> memoryview:
        """The same, as they are now: not as `read_head` has found them."""
        data = self._answers.ask(self._number, Glance.peek, 8 * start, 8 * count)
        return self.segment.words(data, start, count)

    def is_locked(self, byte: int, length: int = 1) -> bool:
        """Whether any process holds a lock within `[byte, byte + length)`."""
        return bool(self._answers.ask(self._number, Glance.is_locked, byte, length))


def _nbytes(segment: Glance, at: int, count: int) -> int:
    return segment.nbytes
