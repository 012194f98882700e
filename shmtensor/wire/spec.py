"""The description of a message: its structure, its scalars, its meta, and where each leaf lies in the payload.

One run of bytes without padding, little-endian, written in one pass and read in one pass:

| bytes | field | meaning |
|---|---|---|
| 1 | version | 2 |
| 3 | reserved | 0 |
| 4 | count | number of shared storages |
| 16 x count | *storages* | of each: u64 offset in the payload, a multiple of 16; u64 bytes |
| | value | a node |
| | meta | a node: None, or a dict that JSON can express |

A node is a tag, one byte, and its data; a container's values follow in preorder:

| tag | value | followed by |
|---|---|---|
| 0 | None | |
| 1, 2 | False, True | |
| 3 | int of 64 bits | i64 |
| 4 | any other int | u32 n, then n bytes: two's complement |
| 5 | float | f64 |
| 6 | str | u32 n, then n bytes: UTF-8, in which a lone surrogate is encoded as well |
| 7, 8 | list, tuple | u32 n, then n nodes |
| 9 | dict | u32 n, then n pairs of nodes: key (tag 0 to 6), value |
| 10 | tensor or array | a leaf, below |
| 11 | composite | u8 kind, u8 p, u8 n, i64 x p parameters, n nodes: its leaves, then its scalars |

A leaf, its tag included:

| bytes | field | meaning |
|---|---|---|
| 1 | tag | 10 |
| 1 | code | of `shmtensor.wire.dtypes`, 255: described by the node behind the leaf |
| 1 | flags | bit 0: torch tensor (else NumPy array); bit 1: strides follow |
| 1 | ndim | 0..64 |
| 4 | storage | torch: number of its shared storage, from 1; 0: none |
| 8 | offset | bytes from the start of the payload |
| 8 x ndim | shape | elements |
| 8 x ndim | strides | bytes, only with flag bit 1; else the leaf is dense in C order |

One contiguous `float32` tensor of 3 dimensions takes 8 + 16 + 3 x 8 + 1 = 49 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct
from struct import error as StructError
from typing import Any, Final, NamedTuple

from ..errors import ArgumentError, ArgumentTypeError, WireError
from .dtypes import BY_CODE, DESCRIBED, DType

VERSION: Final = 2
ALIGNMENT: Final = 64  # bytes; every leaf starts at a multiple, so that any vector load is aligned
GROUP_ALIGNMENT: Final = 16  # bytes; a shared storage starts at a multiple, so that any item size divides it
MAX_DESCRIPTION: Final = 16 << 20
MAX_META: Final = 64 << 10
MAX_LEAVES: Final = 1_000_000
MAX_DEPTH: Final = 64
MAX_NDIM: Final = 64
MAX_EQUAL_HASHES: Final = 64  # among a dict's keys that `BigKeys` counts: such collisions are easy to construct
MAX_BYTES: Final = 1 << 62  # no shape or stride may exceed it, so that no C integer overflows

NONE, FALSE, TRUE, INT, BIG_INT, FLOAT, STR, LIST, TUPLE, DICT, LEAF, COMPOSITE = range(12)
TORCH, STRIDES = 1, 2

_HEADER = Struct("<B3xI")
_STORAGE = Struct("<QQ")
_COUNT = Struct("<BI")
_INT = Struct("<Bq")
_FLOAT = Struct("<Bd")
_LEAF = Struct("<BBBBIQ")
_COMPOSITE = Struct("<BBBB")
_WORDS = [Struct(f"<{n}Q") for n in range(2 * MAX_NDIM + 1)]


class Composite(NamedTuple):
    """How many leaves, scalars and int parameters one kind of composite has."""

    code: int
    leaves: int
    scalars: int
    parameters: int  # their number, or its minimum if `sized`
    sized: bool = False  # the remaining parameters are the shape


COMPOSITES: Final[dict[str, Composite]] = {
    "generic": Composite(1, 1, 0, 0),  # NumPy scalar: its 0-d array
    "bytes": Composite(2, 1, 0, 0),  # numpy.bytes_: its bytes
    "str": Composite(3, 0, 1, 0),  # numpy.str_: its text
    "data": Composite(4, 1, 0, 0),  # bytes: a uint8 array of them
    "coo": Composite(10, 2, 0, 1, True),  # is_coalesced, size...; indices, values
    "csr": Composite(11, 3, 0, 0, True),  # size...; compressed indices, plain indices, values
    "csc": Composite(12, 3, 0, 0, True),
    "bsr": Composite(13, 3, 0, 0, True),
    "bsc": Composite(14, 3, 0, 0, True),
    "quantized": Composite(20, 1, 2, 0),  # integers; scale, zero point
    "quantized_channels": Composite(21, 3, 0, 1),  # axis; integers, scales, zero points
    "quantized_packed": Composite(22, 3, 0, 1, True),  # axis, size...; packed bytes, scales, zero points
    "nested": Composite(30, 2, 0, 0),  # flat buffer, int64 sizes [n, ndim]
    "jagged": Composite(31, 2, 0, 3),  # ragged dimension, min and max length or -1; values, offsets
    "jagged_lengths": Composite(32, 3, 0, 3),  # the same and lengths
}
COMPOSITE_OF: Final = {row.code: kind for kind, row in COMPOSITES.items()}
OF_ARRAYS: Final = frozenset({"generic", "bytes", "str", "data"})
"""Composites without torch tensors; the leaves of all others are tensors."""


class LeafSpec(NamedTuple):
    """One leaf.

    `dtype` is None for a described leaf. `shape` counts elements, `strides` bytes (None: dense, C order), `offset`
    bytes from the start of the payload. `storage` is the number of its shared storage, or 0.
    """

    dtype: DType | None
    torch: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    offset: int
    storage: int = 0


# --- writing


def header(storages: Sequence[tuple[int, int]] = ()) -> bytes:
    """The start of a description; `storages` are (offset, bytes)."""
    return _HEADER.pack(VERSION, len(storages)) + b"".join([_STORAGE.pack(*storage) for storage in storages])


def scalar(value: Any) -> bytes:
    """The node of None, a bool, an int, a float or a str; subclasses lose their class."""
    if value is None:
        return b"\0"
    if isinstance(value, bool):
        return b"\2" if value else b"\1"
    if isinstance(value, int):
        try:
            return _INT.pack(INT, value)
        except StructError:
            size = int.bit_length(value) // 8 + 1
            return _COUNT.pack(BIG_INT, size) + int.to_bytes(value, size, "little", signed=True)
    if isinstance(value, float):
        return _FLOAT.pack(FLOAT, value)
    text = str.encode(value, "utf-8", "surrogatepass")
    return _COUNT.pack(STR, len(text)) + text


def container(tag: int, count: int) -> bytes:
    """The head of a list, a tuple or a dict of `count` values."""
    return _COUNT.pack(tag, count)


def key(value: object) -> bytes:
    """The node of a dict's key. Raises `ArgumentTypeError` for a type of key that cannot be sent."""
    if value is None or isinstance(value, (str, int, float)):
        return scalar(value)
    raise ArgumentTypeError(f"dict key of type {type(value).__name__}: keys are str, int, float, bool or None")


class Keys:
    """The keys of one dict as they arrive, without their classes: those that differ only by these would be one."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: set[object] = set()

    def add(self, key: object) -> None:
        """Note the next key, of a type that can be sent. Raises `ArgumentError` if another one arrives as the same."""
        bare = key
        if isinstance(key, str):
            bare = str.__str__(key)
        elif isinstance(key, int):
            bare = int.__int__(key)
        elif isinstance(key, float):
            bare = float.__mul__(key, 1.0)  # always another object: NaN is no other NaN
        if bare in self._found:
            raise ArgumentError(f"dict has two keys that arrive as {bare!r:.40}: keys lose their class")
        self._found.add(bare)


class BigKeys:
    """Counts the hashes of a dict's or set's ints of more than 64 bits, tuples and the like: many equal ones would make
    lookups take minutes.

    Other keys need no check: the hash of a str is salted per process, and few shorter ints and floats share a hash.
    """

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def add(self, key: object) -> bool:
        """Note the next key. False if `MAX_EQUAL_HASHES` keys before it have the same hash."""
        if isinstance(key, int):
            if int.bit_length(key) < 64 or int.__eq__(key, -(1 << 63)):
                return True
            found = int.__hash__(key)
        elif key is None or isinstance(key, (str, bytes, float)):
            return True
        else:
            found = hash(key)
        count = self._counts[found] = self._counts.get(found, 0) + 1
        return count <= MAX_EQUAL_HASHES


def leaf(entry: LeafSpec) -> bytes:
    """The node of a leaf, without the node that describes its dtype, if it has one."""
    flags = (TORCH if entry.torch else 0) | (0 if entry.strides is None else STRIDES)
    code = DESCRIBED if entry.dtype is None else entry.dtype.code
    words = entry.shape if entry.strides is None else entry.shape + entry.strides
    head = _LEAF.pack(LEAF, code, flags, len(entry.shape), entry.storage, entry.offset)
    return head + _WORDS[len(words)].pack(*words)


def composite(kind: str, parameters: Sequence[int]) -> bytes:
    """The head of a composite; its leaves and scalars follow."""
    row = COMPOSITES[kind]
    head = _COMPOSITE.pack(COMPOSITE, row.code, len(parameters), row.leaves + row.scalars)
    return head + Struct(f"<{len(parameters)}q").pack(*parameters)


def plain(value: object, depth: int = 0) -> bytes:
    """The node of a value that JSON can express; a tuple becomes a list.

    Raises `ArgumentTypeError` or `ArgumentError`.
    """
    if value is None or isinstance(value, (str, int, float)):
        return scalar(value)
    if depth >= MAX_DEPTH and isinstance(value, (dict, list, tuple)):
        raise ArgumentError(f"it is nested more than {MAX_DEPTH} deep, or contains itself")
    if isinstance(value, (list, tuple)):
        values = tuple(value)
        return container(LIST, len(values)) + b"".join([plain(child, depth + 1) for child in values])
    if not isinstance(value, dict):
        kind = type(value)
        raise ArgumentTypeError(
            f"{kind.__module__}.{kind.__qualname__} is not a type of JSON: convert it, or leave it out"
        )
    items, keys = tuple(value.items()), Keys()
    parts = [container(DICT, len(items))]
    for name, child in items:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"it has the key {name!r:.40}: only str keys are allowed there")
        keys.add(name)
        parts += scalar(name), plain(child, depth + 1)
    return b"".join(parts)


def _first_refused(value: object) -> str:
    """Where in a meta the first value is that `plain` refuses, as an expression."""
    place = "meta"
    for _ in range(4):
        children = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
        )
        for key, child in tuple(children):
            try:
                plain(child)
            except (ArgumentTypeError, ArgumentError):
                place, value = f"{place}[{key!r:.40}]", child
                break
        else:
            break
    return place


def meta_node(meta: object) -> bytes:
    """The node of a meta.

    Raises `ArgumentTypeError` or `ArgumentError` unless it is None, or a dict that JSON can express, of 64 KiB at most.
    """
    if meta is None:
        return b"\0"
    if not isinstance(meta, dict):
        hint = " (a time-out is passed as timeout=)" if isinstance(meta, (int, float)) else ""
        raise ArgumentTypeError(
            f"meta is of type {type(meta).__name__}: a dict that JSON can express, or None, is allowed{hint}"
        )
    try:
        node = plain(meta)
    except (ArgumentTypeError, ArgumentError) as error:
        raise type(error)(f"{_first_refused(meta)}: {error}") from None
    if len(node) > MAX_META:
        raise ArgumentError(
            f"meta takes {len(node)} bytes, at most {MAX_META} are allowed: send large things in the value"
        )
    return node


# --- reading


class Cursor:
    """Reads a description from its start. Every method raises `WireError` on anything invalid."""

    __slots__ = ("at", "data", "storages")

    def __init__(self, data: bytes) -> None:
        """Reads the header: `storages` are (offset, bytes)."""
        if len(data) > MAX_DESCRIPTION:
            raise WireError(f"description of {len(data)} bytes, at most {MAX_DESCRIPTION} are allowed")
        self.data, self.at = data, 0
        self.storages: list[tuple[int, int]] = []
        version, count = self._unpack(_HEADER)
        if version != VERSION or any(data[1:4]):
            raise WireError(f"description of version {version}, this library reads version {VERSION}")
        if count * _STORAGE.size > len(data):
            raise WireError(f"description of {len(data)} bytes has {count} shared storages")
        for _ in range(count):
            offset, nbytes = self._unpack(_STORAGE)
            if offset % GROUP_ALIGNMENT or not nbytes or max(offset, nbytes) > MAX_BYTES:
                raise WireError(f"shared storage of {nbytes} bytes at {offset}")
            self.storages.append((offset, nbytes))

    def _unpack(self, fields: Struct) -> tuple[Any, ...]:
        try:
            found = fields.unpack_from(self.data, self.at)
        except StructError:
            raise WireError(f"description ends early, after {len(self.data)} bytes") from None
        self.at += fields.size
        return found

    def _take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise WireError(f"description ends early, after {len(self.data)} bytes")
        self.at += count
        return self.data[self.at - count : self.at]

    def tag(self) -> int:
        """Read the next tag."""
        return self._take(1)[0]

    def end(self) -> None:
        """Raise `WireError` unless the whole description was read."""
        if self.at != len(self.data):
            raise WireError(f"description has {len(self.data) - self.at} bytes left over")

    def scalar(self, tag: int) -> Any:
        """Read a scalar whose tag was read."""
        if tag <= TRUE:
            return (None, False, True)[tag]
        if tag == INT:
            return self._unpack(_WORD)[0]
        if tag == FLOAT:
            return self._unpack(_DOUBLE)[0]
        if tag == BIG_INT:
            return int.from_bytes(self._take(self._unpack(_LENGTH)[0]), "little", signed=True)
        if tag == STR:
            try:
                return self._take(self._unpack(_LENGTH)[0]).decode("utf-8", "surrogatepass")
            except UnicodeDecodeError:
                raise WireError("str is not UTF-8") from None
        raise WireError(f"unknown tag {tag}")

    def count(self, depth: int) -> int:
        """Read the count of a container at this depth."""
        if depth >= MAX_DEPTH:
            raise WireError(f"containers are nested more than {MAX_DEPTH} deep")
        count: int = self._unpack(_LENGTH)[0]
        if count > len(self.data) - self.at:
            raise WireError(f"container of {count} values, {len(self.data) - self.at} bytes are left")
        return count

    def key(self) -> Any:
        """Read a dict's key."""
        return self.scalar(self.tag())

    def leaf(self) -> LeafSpec:
        """Read a leaf whose tag was read. The extent of a described one is not checked: NumPy knows its item size."""
        self.at -= 1
        _, code, flags, ndim, storage, offset = self._unpack(_LEAF)
        if flags & ~(TORCH | STRIDES) or ndim > MAX_NDIM:
            raise WireError(f"leaf has flags {flags:#x} and {ndim} dimensions")
        is_torch = bool(flags & TORCH)
        row = BY_CODE.get(code)
        if row is None:
            if code != DESCRIBED or is_torch:
                raise WireError(f"leaf has unknown dtype code {code}")
        elif not (row.torch if is_torch else row.numpy):
            raise WireError(f"leaf has dtype {row.name}, which {'torch' if is_torch else 'NumPy'} lacks")
        if storage > (len(self.storages) if is_torch else 0):
            raise WireError(f"leaf in shared storage {storage} of {len(self.storages)}")
        shape = self._unpack(_WORDS[ndim])
        strides = self._unpack(_WORDS[ndim]) if flags & STRIDES else None
        return LeafSpec(row, is_torch, shape, strides, offset, storage)

    def composite(self) -> tuple[str, tuple[int, ...]]:
        """Read the kind and the parameters of a composite whose tag was read."""
        self.at -= 1
        _, code, parameters, children = self._unpack(_COMPOSITE)
        kind = COMPOSITE_OF.get(code)
        row = COMPOSITES[kind] if kind is not None else None
        if kind is None or row is None or children != row.leaves + row.scalars:
            raise WireError(f"unknown composite {code} of {children} parts")
        if parameters < row.parameters or parameters > (_MAX_PARAMETERS if row.sized else row.parameters):
            raise WireError(f"composite {kind!r} has {parameters} parameters")
        found = self._unpack(Struct(f"<{parameters}q"))
        if not all(-1 <= number < MAX_BYTES for number in found):
            raise WireError(f"composite {kind!r} has invalid parameters")
        return kind, found

    def plain(self, depth: int = 0) -> Any:
        """Read a value that JSON can express."""
        tag = self.tag()
        if tag == LIST:
            return [self.plain(depth + 1) for _ in range(self.count(depth))]
        if tag != DICT:
            return self.scalar(tag)
        count = self.count(depth)
        found = {}
        for _ in range(count):
            name = self.key()
            if type(name) is not str:
                raise WireError("dict as JSON has them with a key that is no str")
            found[name] = self.plain(depth + 1)
        if len(found) != count:
            raise WireError("dict has a key twice")
        return found

    def meta(self) -> Any:
        """Read the meta; nothing may follow it."""
        start = self.at
        found = self.plain()
        if not (found is None or isinstance(found, dict)) or self.at - start > MAX_META:
            raise WireError("meta is neither a dict nor None, or too large")
        self.end()
        return found


_MAX_PARAMETERS: Final = 80
_WORD, _DOUBLE, _LENGTH = Struct("<q"), Struct("<d"), Struct("<I")


def check_extent(leaf: LeafSpec, itemsize: int) -> int:
    """Bytes from the leaf's offset to its end. Raises `WireError` if its shape, strides or offset are impossible."""
    size = itemsize
    for length in leaf.shape:
        size *= max(length, 1)  # a dimension of 0 must not hide an absurd other one
        if size > MAX_BYTES:
            raise WireError(f"leaf has shape {leaf.shape}, more than {MAX_BYTES} bytes")
    if leaf.offset > MAX_BYTES:
        raise WireError(f"leaf has offset {leaf.offset}")
    if leaf.torch and leaf.offset % itemsize:
        raise WireError(f"leaf of item size {itemsize} has offset {leaf.offset}")
    if leaf.strides is not None:
        for length, stride in zip(leaf.shape, leaf.strides, strict=True):
            if stride > MAX_BYTES or (length > 1 and not stride) or (leaf.torch and stride % itemsize):
                raise WireError(f"leaf of item size {itemsize} and shape {leaf.shape} has strides {leaf.strides}")
    return extent(leaf.shape, leaf.strides, itemsize)


def extent(shape: Iterable[int], strides: Sequence[int] | None, itemsize: int) -> int:
    """Bytes from the first byte of the first element to the last byte of the last; strides are not negative."""
    shape = tuple(shape)
    size = itemsize
    if strides is None:
        for length in shape:
            size *= length
        return size
    if 0 in shape or not itemsize:
        return 0
    for length, stride in zip(shape, strides, strict=True):
        size += (length - 1) * stride
    return size
