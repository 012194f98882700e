"""Parts of a state: `keys=`, by dotted names, and `slices=`, the bytes that an index selects of a tensor.

    file   ...|--row 0--|--row 1--|--row 2--|...     w[0:2]        one run
                 ^^^       ^^^       ^^^             w[:, 3:6]     a block of each row

The tensor's dimensions are sorted by their strides, which is the order of the file. The inner ones, as long as they are
dense, are one *block*. Blocks are read one by one; if the gap between two is not larger than a block, they are read
together with the gap, so that at most twice the requested bytes are read. From a URL each read is a request, of which
several are made at once, and gaps of up to `BLOCK` are read as well: they take less time than another request.
"""

from __future__ import annotations

import copy
import difflib
import itertools
import math
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from ..codec.leaf import c_strides
from ..codec.numpy import Array
from ..errors import ArgumentError, ArgumentTypeError
from ..wire.spec import extent
from .devices import sequence_of
from .formats import Stored
from .plan import Entry, Plan, Region, tensor_numbers
from .reading import CHUNK, REQUEST_MIN, private
from .remote import BLOCK
from .structure import key_of
from .threads import at_once, in_threads, stopped

_MOST_COMPARED: Final = 2000
_LONG: Final = 200
"""Names that an error compares with one that is not there, at most, and their most characters: a comparison takes up to
their product."""


def select(tree: Any, keys: Iterable[str] | str, tensors: Sequence[Entry] | None = None) -> Any:
    """The part of a tree that keys name; without `tensors`, those of its plan, of a state of dicts instead of a tree.

    A key is the dotted name of anything inside dicts, such as `"model"` or `"model.layer1.weight"`, and selects all
    below it. It also matches dict keys that have dots themselves (state dicts): `"model.layer1"` selects
    `layer1.weight` and `layer1.bias` of the dict `model`. It may be the name of a tensor in its plan as well, which
    differs if the dotted one is long, not printable or another tensor's. Lists and tuples are selected whole. Raises
    `ArgumentError` for a key that names nothing.
    """
    wanted = [keys] if isinstance(keys, str) else list(keys)
    if not all(isinstance(key, str) for key in wanted):
        raise ArgumentTypeError("keys= takes dotted names, such as keys=['model', 'optim.state']")
    found = _Wanted(wanted)
    shown = {number: entry.name for number, entry in enumerate(tensors or ()) if entry.name in found.names}
    used: set[str] = set()
    names: list[str] = []
    entries = _object_entries if tensors is None else _entries
    result = _Selection(found, shown, used, names, entries).select(tree, "")
    for key in wanted:
        if key not in used:
            raise unknown(key, names)
    return ({} if tensors is None else {"d": {}}) if result is None else result


class _Wanted:
    """Dotted names, indexed so that a path in a state is looked up at once, however many names there are.

    names: themselves
    above: what they begin with, up to each dot
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = set(names)
        self.above = {name[:at] for name in self.names for at in _dots(name, 0, len(name))}
        self._longest = max(map(len, self.names), default=0)

    def of(self, path: str, start: int) -> set[str]:
        """The names that a path is, or begins with and goes on after a dot at `start` or behind it."""
        found = {path[:at] for at in _dots(path, start, self._longest + 1)} & self.names
        return found | {path} if path in self.names else found


def _dots(text: str, start: int, end: int) -> Iterator[int]:
    at = text.find(".", start, end)
    while at >= 0:
        yield at
        at = text.find(".", at + 1, end)


def descend(tree: Any, key: str, *, objects: bool = False) -> Any:
    """The value under one dotted name, or the part of a dict whose names begin with it, such as `"0"` for those of
    `{"0.weight": w, "0.bias": b}`, under what is left of them. Raises `ArgumentError` if there is neither."""
    names: list[str] = []
    found = _descend(tree, "", key, names, _of_dict if objects else children)
    if found is None:
        raise unknown(key, names)
    value, begun = found
    if begun:
        return begun if objects else {"d": begun}
    return value


def unknown(key: str, names: list[str]) -> ArgumentError:
    """The error for a name that the checkpoint does not have; it suggests similar ones."""
    near = difflib.get_close_matches(key, [name for name in names if len(name) <= _LONG][:_MOST_COMPARED], 3)
    hint = (
        f"did you mean {', '.join(near)}?"
        if near
        else f"it has {', '.join(name[:80] for name in names[:5]) or 'no names'}"
    )
    return ArgumentError(f"the checkpoint has nothing named {key!r:.80}: {hint}")


def replaced(state: Any, functions: Mapping[str, Callable[[Any], Any]]) -> Any:
    """A state with `function(value)` in place of the value under each dotted name, the first of that name; the dicts,
    lists and tuples around it are copied. Raises `ArgumentError` for a name that nothing has."""
    names: list[str] = []
    left = dict(functions)
    made = _replaced(state, "", left, _Wanted(left).above, names)
    for name in left:
        raise unknown(name, names)
    return made


def _replaced(value: Any, name: str, left: dict[str, Callable[[Any], Any]], above: set[str], names: list[str]) -> Any:
    """As `replaced`. Functions that were called are taken out of `left`."""
    make = None if isinstance(value, dict) else sequence_of(type(value))
    changed: dict[Any, Any] = {}
    for key, child in enumerate(value) if make is not None else _of_dict(value):
        path = f"{name}.{key}" if name else str(key)
        names.append(path)
        if path in left:
            changed[key] = left.pop(path)(child)
        elif path in above:
            made = _replaced(child, path, left, above, names)
            if made is not child:
                changed[key] = made
    if not changed:
        return value
    if make is not None:
        return make([changed.get(number, child) for number, child in enumerate(value)])
    copied = copy.copy(value)
    for key, child in changed.items():
        copied[key] = child
    return copied


def children(node: Any) -> list[tuple[Any, Any]]:
    """Keys and nodes of a dict's node; empty for other nodes."""
    if isinstance(node, dict):
        for tag in ("d", "k", "o", "c"):
            if tag in node:
                return list(node["d"].items()) if tag == "d" else [(key_of(key), child) for key, child in node[tag]]
    return []


def _of_dict(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


_Children = Callable[[Any], list[tuple[Any, Any]]]


def _descend(
    node: Any, name: str, key: str, names: list[str], children_of: _Children
) -> tuple[Any, dict[str, Any]] | None:
    """What has the name, or else the entries whose names begin with it."""
    begun = {}
    for text, child in children_of(node):
        path = f"{name}.{text}" if name else str(text)
        names.append(path)
        if path == key:
            return child, {}
        if path.startswith(f"{key}."):
            begun[path[len(key) + 1 :]] = child
        found = _descend(child, path, key, names, children_of) if key.startswith(f"{path}.") else None
        if found is not None:
            return found
    return (None, begun) if begun else None


class _Entries(NamedTuple):
    """The entries of a dict or its node, (token or key, its text, child), and how to make one of fewer pairs."""

    found: list[tuple[Any, str, Any]]
    smaller: Callable[[list[tuple[Any, Any]]], Any]


def _entries(node: Any) -> _Entries | None:
    tags = [tag for tag in ("d", "k", "o", "c") if tag in node] if isinstance(node, dict) else []
    if not tags:
        return None
    tag, rest = tags[0], {key: value for key, value in node.items() if key == "m"}
    if tag == "d":
        return _Entries([(key, key, child) for key, child in node[tag].items()], lambda kept: {tag: dict(kept)})
    return _Entries(
        [(token, str(key_of(token)), child) for token, child in node[tag]],
        lambda kept: {tag: [list(pair) for pair in kept], **rest},
    )


def _object_entries(value: Any) -> _Entries | None:
    if not isinstance(value, dict):
        return None

    def smaller(kept: list[tuple[Any, Any]]) -> Any:
        made = copy.copy(value)  # a dict of the same class, with torch's `_metadata`
        made.clear()
        made.update(dict(kept))
        return made

    return _Entries([(key, str(key), child) for key, child in value.items()], smaller)


class _Selection(NamedTuple):
    """One selection.

    wanted: the keys
    shown:  those of them that are names of tensors in the plan, by number
    used:   collects the keys that were found
    names:  collects the names that were visited
    """

    wanted: _Wanted
    shown: dict[int, str]
    used: set[str]
    names: list[str]
    entries: Callable[[Any], _Entries | None]

    def select(self, node: Any, name: str) -> Any:
        entries = self.entries(node)
        if entries is None:
            return None
        kept: list[tuple[Any, Any]] = []
        start = len(name) + 1 if name else 0
        for token, text, child in entries.found:
            path = f"{name}.{text}" if name else text
            self.names.append(path)
            hits = self.wanted.of(path, start)
            if self.shown and (shown := self.shown.get(_number(child))) is not None:
                hits.add(shown)
            self.used.update(hits)
            # of what is kept whole: other keys may name a part of it
            part = self.select(child, path) if self.shown or path in self.wanted.above else None
            if hits:
                kept.append((token, child))
            elif part is not None:
                kept.append((token, part))
        return entries.smaller(kept) if kept else None


def _number(node: Any) -> int:
    """The number of the tensor, array or long `bytes` that a node is; -1 for others."""
    if not isinstance(node, dict):
        return -1
    found = node.get("a", node)
    number: int = found.get("x", found.get("B", -1))
    return number


Index = int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]
"""Which elements: what `numpy.s_[...]` gives for integers, slices with positive steps, and one `...`."""
Slices = Mapping[str, Index] | None

_SEVERAL: Final = 8 << 20  # bytes; for more, several threads read
_STARTS: Final = 1 << 18  # blocks whose places are computed together
_BATCH: Final = 64  # requests that are made together
_LARGE: Final = 64 << 10  # bytes of a block; for less, threads only wait for each other


def narrow(entry: Entry, index: Index) -> Entry:
    """The entry of the part that an index selects, in the same region. Raises `ArgumentError`, `ArgumentTypeError`."""
    strides = c_strides(entry.shape, entry.itemsize) if entry.strides is None else entry.strides
    offset, shape, kept = entry.offset, [], []
    for (start, count, step), stride in zip(_ranges(entry.name, entry.shape, index), strides, strict=True):
        offset += start * stride
        if count >= 0:
            shape.append(count)
            kept.append(step * stride)
    if entry.region < 0 or 0 in shape:
        return entry._replace(shape=tuple(shape), strides=None, region=-1, offset=0)
    plain = tuple(kept) == c_strides(shape, entry.itemsize)
    return entry._replace(shape=tuple(shape), strides=None if plain else tuple(kept), offset=offset)


def part_of(tensor: Any, name: str, index: Index) -> Any:
    """The part of a torch tensor that an index selects, as a view. Raises as `narrow` does."""
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_nested:
        raise ArgumentError(f"slices= has {name!r:.80}, which is no tensor that can be cut: it comes whole")
    found = [
        start if count < 0 else slice(start, start + count * step, step)
        for start, count, step in _ranges(name, tensor.shape, index)
    ]
    return tensor.detach()[tuple(found)]


def _ranges(name: str, shape: Sequence[int], index: Index) -> list[tuple[int, int, int]]:
    """First element, number of elements (-1 for an integer, whose dimension is left out) and step, per dimension."""
    label = f"tensor {name!r:.80} of shape {list(shape)!r:.80}"
    items: list[Any] = list(index) if isinstance(index, tuple) else [index]
    dots = [at for at, item in enumerate(items) if item is Ellipsis]
    missing = len(shape) - len(items) + len(dots)
    if len(dots) > 1 or missing < 0:
        raise ArgumentError(f"{label}: {len(items) - len(dots)} indices and {len(dots)} times ... are too many")
    at = dots[0] if dots else len(items)
    items[at : at + 1] = [slice(None)] * missing
    return [
        _range(item, length, f"{label}, dimension {axis}")
        for axis, (item, length) in enumerate(zip(items, shape, strict=True))
    ]


def _range(item: Any, length: int, label: str) -> tuple[int, int, int]:
    try:
        if isinstance(item, slice):
            found = range(*item.indices(length))
            if found.step < 0:
                raise ArgumentError(f"{label}: step {found.step}: pass a positive one, and turn around what is read")
            return (found.start if found else 0), len(found), (found.step if len(found) > 1 else 1)
        # arrays and tensors of one element are integers to Python, and masks or lists of indices to NumPy and torch
        if isinstance(item, bool) or getattr(item, "ndim", 0) != 0 or str(getattr(item, "dtype", "")).endswith("bool"):
            raise TypeError
        at = operator.index(item)
    except TypeError:
        raise ArgumentTypeError(
            f"{label}: index {item!r:.80}: integers, slices of integers and ... are allowed, as numpy.s_[0:1024, 3] "
            "gives them"
        ) from None
    except ArgumentError:
        raise
    except ValueError as error:  # a step of 0
        raise ArgumentError(f"{label}: {error}") from None
    if not -length <= at < length:
        raise ArgumentError(f"{label}: index {at} is out of range")
    return at % length, -1, 1


def stored_nbytes(entry: Entry) -> int:
    """Bytes that the elements of an entry take in a file; repeated and overlapping ones count once."""
    if entry.region < 0:
        return 0
    kept = [n if entry.strides is None or entry.strides[axis] else 1 for axis, n in enumerate(entry.shape)]
    return min(math.prod(kept) * entry.itemsize, extent(entry.shape, entry.strides, entry.itemsize))


class Source(Protocol):
    """A source of bytes: `Files` or `InMemory`."""

    def fill(self, memory: Array, file: int, offset: int, names: str, *, alone: bool = False) -> None:
        """Fill uint8 memory with the bytes at `offset`. alone: what lies around it is not read soon."""

    def is_remote(self, file: int) -> bool:
        """Whether each read is a request through the network."""

    def check(self, file: int) -> None:
        """Raise `CheckpointError` if a file has become another one since it was opened."""


class InMemory:
    """Bytes in memory, in place of a file."""

    def __init__(self, data: Array) -> None:
        self._data = data

    def is_remote(self, file: int) -> bool:
        """False: the bytes are in memory."""
        return False

    def fill(self, memory: Array, file: int, offset: int, names: str, *, alone: bool = False) -> None:
        """Fill uint8 memory with the bytes at `offset`."""
        memory[:] = self._data[offset : offset + len(memory)]

    def check(self, file: int) -> None:
        """Do nothing: memory is not replaced."""


class Span(NamedTuple):
    """Where a part is: `entry` describes it in the bytes of a file from `start` on."""

    file: int
    start: int
    entry: Entry


def packed(entry: Entry) -> Entry:
    """The entry for the memory that `read_part` returns: dense in the order of the file, or overlapping as before."""
    if stored_nbytes(entry) == extent(entry.shape, entry.strides, entry.itemsize):
        return entry._replace(offset=0)
    found, nbytes = [0] * len(entry.shape), entry.itemsize
    for axis, length, _ in reversed(_axes(entry)):
        found[axis] = nbytes
        nbytes *= length
    return entry._replace(offset=0, strides=tuple(found))


def read_part(files: Source, span: Span, readers: int, gap: int = BLOCK) -> Array:
    """Read the bytes of a part into fresh memory. Raises `CheckpointError` if a file ends early, or is another one.

    gap: bytes between two blocks of a file at a URL that one request brings as well
    """
    memory = _read_part(files, span, readers, gap)
    files.check(span.file)
    return memory


def _read_part(files: Source, span: Span, readers: int, gap: int) -> Array:
    entry, label = span.entry, f'"{span.entry.name}"'
    start, nbytes = span.start + entry.offset, stored_nbytes(entry)
    memory = private(nbytes, start)
    if nbytes == extent(entry.shape, entry.strides, entry.itemsize):
        jobs = ((memory[at : at + CHUNK], start + at) for at in range(0, nbytes, CHUNK))
        _run(files, span.file, jobs, label, readers if nbytes >= _SEVERAL else 1)
        return memory
    axes, block = [(length, stride) for _, length, stride in _axes(entry)], entry.itemsize
    while axes[-1][1] == block:
        block *= axes.pop()[0]
    if files.is_remote(span.file) and _is_in_order(axes, block):
        _request_blocks(files, span.file, start, axes, memory.reshape(-1, block), label, gap)
        return memory
    count, step = axes.pop()
    starts = (
        start + sum(at * stride for at, (_, stride) in zip(where, axes, strict=True))
        for where in itertools.product(*(range(length) for length, _ in axes))
    )
    if block <= step <= 2 * block:
        for number, first in enumerate(starts):
            target = memory[number * count * block :][: count * block].reshape(count, block)
            _read_with_gaps(files, span.file, first, target, step, label)
    else:
        runs = (first + at * step for first in starts for at in range(count))
        jobs = ((memory[at * block : (at + 1) * block], offset) for at, offset in enumerate(runs))
        _run(files, span.file, jobs, label, readers if nbytes >= _SEVERAL and block >= _LARGE else 1)
    return memory


def _axes(entry: Entry) -> list[tuple[int, int, int]]:
    """(index, length, stride) of each dimension with a stride and more than one element, the largest stride first."""
    strides = c_strides(entry.shape, entry.itemsize) if entry.strides is None else entry.strides
    moving = [(axis, n, s) for axis, (n, s) in enumerate(zip(entry.shape, strides, strict=True)) if n > 1 and s]
    return sorted(moving, key=lambda axis: -axis[2])


def _request_blocks(
    files: Source, file: int, start: int, axes: list[tuple[int, int]], target: Array, label: str, gap: int
) -> None:
    """Fill the rows of the target with the blocks of a file at a URL, several requests at once. Blocks with gaps of at
    most `gap` bytes come by one request, with the gaps.

    axes: (length, stride) of the dimensions outside of a block
    """
    block = target.shape[1]

    def fetch(request: tuple[int, Array]) -> None:
        begin, starts = request
        rows, first = target[begin : begin + len(starts)], int(starts[0])
        nbytes = int(starts[-1]) + block - first
        if nbytes == rows.nbytes:  # without gaps
            files.fill(rows.reshape(-1), file, first, label, alone=True)
            return
        piece = np.empty(nbytes, np.uint8)
        files.fill(piece, file, first, label, alone=True)
        rows[:] = np.lib.stride_tricks.sliding_window_view(piece, block)[starts - first]

    requests = _requests(start, axes, block, gap)
    while batch := list(itertools.islice(requests, _BATCH)):
        at_once(fetch, batch)


def _requests(start: int, axes: list[tuple[int, int]], block: int, gap: int) -> Iterator[tuple[int, Array]]:
    """The number of the first block of each request, and where its blocks start."""
    number, pending = 0, np.empty(0, np.int64)
    for starts in _starts(start, axes):
        found = np.concatenate([pending, starts])
        ends = [*(np.flatnonzero(np.diff(found) > block + gap) + 1).tolist(), len(found)]
        begin = 0
        for end in ends:
            while begin < end:
                count = int(np.searchsorted(found[begin:end], found[begin] + REQUEST_MIN, side="right"))
                if begin + count == len(found):  # more may follow
                    break
                yield number, found[begin : begin + count]
                number, begin = number + count, begin + count
        pending = found[begin:]
    yield number, pending


def _starts(start: int, axes: list[tuple[int, int]]) -> Iterator[Array]:
    """Where blocks start, in order, some thousand at a time."""
    shape = [length for length, _ in axes]
    total = math.prod(shape)
    for at in range(0, total, _STARTS):
        numbers = np.arange(at, min(at + _STARTS, total))
        starts = np.full(len(numbers), start, np.int64)
        for index, (_, stride) in zip(np.unravel_index(numbers, shape), axes, strict=True):
            starts += index * stride
        yield starts


def _is_in_order(axes: list[tuple[int, int]], block: int) -> bool:
    """Whether no two blocks overlap, and those of a later index lie behind: not so of some views of `as_strided`."""
    extent = block
    for length, stride in reversed(axes):
        if stride < extent:
            return False
        extent += (length - 1) * stride
    return True


def _read_with_gaps(files: Source, file: int, start: int, target: Array, step: int, label: str) -> None:
    """Read blocks (rows of the target) together with the gaps between them, some MiB at a time."""
    count, block = target.shape
    together = max(1, CHUNK // step)
    buffer = np.empty(min(count, together) * step, np.uint8)
    for at in range(0, count, together):
        number = min(together, count - at)
        part = buffer[: (number - 1) * step + block]
        files.fill(part, file, start + at * step, label)
        target[at : at + number] = np.lib.stride_tricks.as_strided(part, (number, block), (step, 1))


def _run(files: Source, file: int, jobs: Iterator[tuple[Array, int]], label: str, readers: int) -> None:
    """Fill memory from the file, with several threads."""
    lock = threading.Lock()

    def take() -> tuple[Array, int] | None:
        with lock:
            return None if stopped() else next(jobs, None)

    def work() -> None:
        while (job := take()) is not None:
            files.fill(job[0], file, job[1], label)

    in_threads([work] * readers, readers)


# --- parts of the tensors of a state


class Cut(NamedTuple):
    """A plan in which some tensors are parts, and what to read for each region of a single part."""

    plan: Plan
    reads: dict[int, Span]


def check_slices(slices: Slices) -> Mapping[str, Index]:
    """Check `slices=`; `ArgumentTypeError` if it is no dict by names."""
    if not isinstance(slices, Mapping) or not all(isinstance(name, str) for name in slices):
        raise ArgumentTypeError("slices= takes a dict by names, such as slices={'model.weight': numpy.s_[0:1024]}")
    return slices


def cut(plan: Plan, tree: Any, slices: Mapping[str, Index], stored: Sequence[Stored | None] | None) -> Cut:
    """The plan of a state with parts of some tensors.

    tree:   the part of the state that is wanted
    stored: per region its place in the files, None if it can only be read whole; None for all: regions are mapped, and
            a part is a view
    """
    numbers = {entry.name: number for number, entry in enumerate(plan.tensors)}
    wanted = tensor_numbers(tree)
    apart = wanted - tensor_numbers(tree, only_read=True)
    parts: dict[int, Index] = {}
    for name, index in check_slices(slices).items():
        if name not in numbers:
            raise unknown(name, list(numbers))
        number = numbers[name]
        if number not in wanted:
            raise ArgumentError(f"slices= has {name!r:.80}, which is not in what keys= names")
        if number not in apart:
            raise ArgumentError(
                f"slices= has {name!r:.80}, which is a part of a sparse, quantized or nested tensor, or long bytes: "
                "these come whole"
            )
        parts[number] = index
    whole = {plan.tensors[number].region for number in wanted - parts.keys() if number < len(plan.tensors)}
    tensors, regions, reads = list(plan.tensors), list(plan.regions), {}
    for number, index in parts.items():
        entry = plan.tensors[number]
        tensors[number] = narrow(entry, index)
        if entry.region in whole:
            continue
        span = span_of(plan, number, index, stored)
        if span is not None:
            reads[len(regions)] = span
            tensors[number] = packed(span.entry)._replace(region=len(regions))
            regions.append(Region(stored_nbytes(span.entry), plan.regions[entry.region].align))
    return Cut(Plan(plan.tree, tensors, regions, plan.meta), reads)


def span_of(plan: Plan, number: int, index: Index, stored: Sequence[Stored | None] | None) -> Span | None:
    """Where to read a part; None if its region is read whole, because all of it is needed or there is no other way."""
    entry = plan.tensors[number]
    part = narrow(entry, index)
    place = stored[part.region] if stored is not None and part.region >= 0 else None
    if place is None or stored_nbytes(part) == plan.regions[part.region].nbytes:
        return None
    if place.strides is not None:  # the file has the tensor in another order
        part = narrow(entry._replace(strides=place.strides), index)
    return Span(place.file, place.offset, part)
