"""Read JSON of files, as a whole, or piece by piece, so that memory is used only for the values that are wanted."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

from ..errors import CheckpointError
from .structure import MAX_DEPTH

MOST: Final = 1 << 17
"""Most characters of a name, and of a value that is parsed into an object."""
_PIECE: Final = 1 << 18  # bytes
_SPACE: Final = re.compile(r"[ \t\n\r]*")
_END_QUOTE: Final = re.compile(r'(?<!\\)(?:\\\\)*"')  # after an even number of backslashes
_HALF_ESCAPE: Final = re.compile(r"u[0-9a-fA-F]{0,3}\Z")
_HIGH_SURROGATE: Final = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")
_LOW_SURROGATE: Final = re.compile(r"\\u[dD][c-fC-F]")
_LONGEST: Final = 12  # characters of what stands for one: two escapes, as \ud83d\ude00
_decode = json.JSONDecoder(object_pairs_hook=lambda pairs: _object(pairs)).raw_decode


class Source(Protocol):
    """A file that is read by position, such as an `InputFile`."""

    def pread(self, nbytes: int, offset: int) -> bytes: ...


class JsonPieces:
    """A range of an open file that is one JSON text.

    It is read once, in order: `entries` yields the keys of an object, `items` before each value of an array, and the
    caller reads each value by `value`, `text`, `skip`, `entries` or `items`. Invalid JSON raises `CheckpointError`.
    """

    def __init__(self, file: Source, offset: int, nbytes: int, label: str) -> None:
        self._file, self._at, self._end, self._label = file, offset, offset + nbytes, label
        self._nbytes = nbytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._text, self._pos = "", 0

    def bad(self, why: object) -> CheckpointError:
        """The error to raise."""
        return CheckpointError(f"{self._label}: invalid JSON of {self._nbytes} bytes: {why}, before offset {self._at}")

    def _more(self) -> bool:
        """Read more text; False at the end."""
        if self._at >= self._end:
            return False
        data = self._file.pread(min(_PIECE, self._end - self._at), self._at)
        if not data:
            raise self.bad("the file ends early")
        self._at += len(data)
        try:
            text = self._utf8.decode(data, self._at >= self._end)
        except UnicodeDecodeError as error:
            raise self.bad(error) from None
        self._text, self._pos = self._text[self._pos :] + text, 0
        return True

    def peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            match = _SPACE.match(self._text, self._pos)
            self._pos = self._pos if match is None else match.end()
            if self._pos < len(self._text):
                return self._text[self._pos]
            if not self._more():
                return ""

    def _take(self, expected: str) -> None:
        found = self.peek()
        if found != expected:
            raise self.bad(f"{found!r} where {expected!r} was expected")
        self._pos += 1

    def finish(self) -> None:
        """Check that only white space follows."""
        if self.peek():
            raise self.bad("something comes after its end")

    def entries(self) -> Iterator[str]:
        """The keys of the next object."""
        self._take("{")
        if self.peek() == "}":
            self._pos += 1
            return
        while True:
            if self.peek() != '"':
                raise self.bad("a name was expected")
            key: str = self.value()
            self._take(":")
            yield key
            if self.peek() != ",":
                return self._take("}")
            self._pos += 1

    def items(self) -> Iterator[None]:
        """Yields before each value of the next array, which the caller reads."""
        self._take("[")
        if self.peek() == "]":
            self._pos += 1
            return
        while True:
            yield
            if self.peek() != ",":
                return self._take("]")
            self._pos += 1

    def value(self) -> Any:
        """The next value, of at most `MOST` characters."""
        self.peek()
        while len(self._text) - self._pos <= MOST and self._more():
            pass
        try:
            value, end = _decode(self._text, self._pos)
        except (ValueError, RecursionError) as error:
            raise self.bad(error) from None
        if end - self._pos > MOST:
            raise self.bad(f"a name or value of more than {MOST} characters")
        self._pos = end
        return value

    def text(self, sink: Callable[[str], object]) -> None:
        """Pass the next string, of any length, to `sink` in pieces."""
        self._take('"')
        while True:
            # nothing before `_pos` is a part of the string: a piece ends with what is cut off below
            end = self._text.find('"', self._pos)
            if end > self._pos and self._text[end - 1] == "\\":
                match = _END_QUOTE.search(self._text, self._pos)
                end = -1 if match is None else match.end() - 1
            cut = end if end >= 0 else self._whole(len(self._text))
            if cut > self._pos:
                try:
                    sink(json.loads(f'"{self._text[self._pos : cut]}"'))
                except ValueError as error:
                    raise self.bad(error) from None
                self._pos = cut
            if end >= 0:
                self._pos += 1
                return
            if not self._more():
                raise self.bad("a string without an end")

    def _whole(self, end: int) -> int:
        """Where a piece of a string may end without splitting an escape, or a pair of them."""
        for cut in range(end, max(self._pos, end - 2 * _LONGEST), -1):
            half = _HALF_ESCAPE.search(self._text, max(self._pos, cut - 4), cut)
            before = cut if half is None else half.start()
            if self._is_escaped(cut) or (half is not None and self._is_escaped(before)):
                continue
            is_high = _HIGH_SURROGATE.search(self._text, max(self._pos, cut - 6), cut)
            if is_high is None or (cut < end - 6 and _LOW_SURROGATE.match(self._text, cut) is None):
                return cut
        return self._pos

    def _is_escaped(self, at: int) -> bool:
        """Whether the character at this position of the string is escaped by a backslash."""
        before = self._text[self._pos : at]
        return (len(before) - len(before.rstrip("\\"))) % 2 == 1

    def skip(self, depth: int = 0) -> None:
        """Skip the next value, of any length."""
        if depth > MAX_DEPTH:
            raise self.bad(f"it is nested more than {MAX_DEPTH} deep")
        start = self.peek()
        if start == '"':
            self.text(lambda piece: None)
        elif start == "{":
            for _ in self.entries():
                self.skip(depth + 1)
        elif start == "[":
            for _ in self.items():
                self.skip(depth + 1)
        else:
            self.value()


def parse_object(data: bytes, label: str) -> dict[str, Any]:
    """The dict of a JSON text. `CheckpointError` if it is no dict, or has a key twice."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_object)
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{label}: invalid JSON of {len(data)} bytes: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{label}: its header is no JSON object")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key appears twice")
    return value
