"""torch: the zip archive of `torch.save`, which `torch.load(path, weights_only=True)` opens with its structure.

| member | what |
|---|---|
| `archive/data.pkl` | the structure, see `shmtensor.checkpoint.formats.pickles` |
| `archive/.format_version`, `.storage_alignment`, `byteorder`, `version` | as torch writes them |
| `archive/data/<region>` | one region each, at a multiple of 64 |
| `archive/data/empty<tensor>` | nothing: the storage of a tensor without bytes |
| `archive/.data/shmtensor.json` | the description, with the digests |

This library reads the description, never the pickle. An archive without one is opened by `torch.load`, with
`weights_only=True`, after a check of what its pickle would cost (`PickleCheck`).

What torch alone loads differs: NumPy arrays are tensors (of bytes, where torch lacks the type), NumPy scalars are plain
numbers or text, ints beyond 255 bytes are hexadecimal text, a `frozenset` is a set, `bytes` and a `bytearray` of more
than 4 KiB are tensors of uint8, and a sparse, quantized or nested tensor is a tuple of its kind, parameters, scalars
and parts.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, BinaryIO, Final

from ...codec.leaf import is_tensor
from ...codec.libraries import import_torch
from ...errors import ArgumentError, ArgumentTypeError, CheckpointError
from ..description import Described
from ..locations import Location, MemoryFile, Stamp, as_stream, check_same, copy_to_memory, open_input, stamp
from ..plan import Plan, plan
from ..remote import RemotePath
from ..structure import MAX_DEPTH
from .base import Format, Layout, Opened, all_of, check_shard_names, is_index, shard_names
from .pickles import PickleCheck, Pickler
from .zips import ALIGNMENT, Archive, has_member, locate, read_directory, read_pieces

_DESCRIPTION: Final = "archive/.data/shmtensor.json"
_SMALL: Final = {"version", "byteorder", ".format_version", ".storage_alignment", "serialization_id"}
_MAX_SMALL: Final = 4096  # bytes of these members, which torch reads whatever the pickle says
_FREELY_UNPACKED: Final = 1 << 20  # bytes of a packed pickle
_SHARED: Final = 1 << 16  # values that shared objects may add when a state is written out
_OLD_LENGTH: Final = 8  # bytes before each storage of a file of torch before 1.6
_OLD_PICKLES: Final = 5  # magic number, version, system, the state, the storages' names


class Torch(Format):
    """Files for `torch.load`."""

    name = "torch"
    suffix = ".pt"

    def layout(self, plan: Plan, max_shard: int | None = None) -> Layout:
        if max_shard is not None:
            raise ArgumentError('max_shard= is for format="safetensors": a .pt is one file')
        archive = Archive(plan)
        archive.add("archive/data.pkl", Pickler(plan).dump())
        archive.add("archive/.format_version", b"1")
        archive.add("archive/.storage_alignment", str(ALIGNMENT).encode())
        archive.add("archive/byteorder", b"little")
        for number, entry in enumerate(plan.tensors):
            if entry.region < 0:
                archive.add(f"archive/data/empty{number}", b"")
        names = [f"archive/data/{region}" for region in range(len(plan.regions))]
        for region, name in enumerate(names):
            archive.add_region(name, region)
        archive.add("archive/version", b"3\n")
        return archive.layout(Described(plan.describe(), names), _DESCRIPTION)

    def recognizes(self, path: Location, start: bytes) -> bool:
        if is_index(path.name):
            return ".safetensors.index" not in path.name
        if start[:4] != b"PK\x03\x04":
            return path.suffix in (".pt", ".pth", ".bin") and start[:1] == b"\x80"
        return has_member(path, lambda name: name.endswith("/data.pkl"))

    def describes(self, path: Location) -> bool:
        return not is_index(path.name) and _is_zip(path) and has_member(path, _DESCRIPTION.__eq__)

    def open(self, path: Location) -> Opened:
        if is_index(path.name):
            return self._open_foreign(check_shard_names(path, shard_names(path)))
        if _is_zip(path):
            member = read_directory(path, _DESCRIPTION.__eq__)
            if _DESCRIPTION in member.members:
                described, places = locate(path, member.members[_DESCRIPTION])
                return Opened(self.name, described.plan, [path], [member.stamp], places, described.digests, native=True)
        return self._open_foreign(all_of(path))

    def _open_foreign(self, files: list[Location]) -> Opened:
        """Open files that torch itself wrote. Several are shards, each a dict of some of the names.

        torch reads files of this machine only: those at URLs are copied into memory, as a whole, after the check.
        """
        stamps = [stamp(file) for file in files]
        for file in files:
            _check(file)
        copies = [copy_to_memory(file) for file in files if isinstance(file, RemotePath)]
        if copies:
            return _renamed(self._open_foreign([copy.path for copy in copies]), files, copies)

        def state(map: bool) -> Any:
            return _joined(files, stamps, mmap=map) if len(files) > 1 else _load(files[0], stamps[0], mmap=map)

        def made() -> Plan:
            found = state(True)
            try:
                return plan(found, most=2 * check_objects(found, str(files[0])) + _SHARED)
            except (ArgumentError, ArgumentTypeError) as error:
                raise CheckpointError(f"{files[0]}: {error}") from None

        return Opened(self.name, made, files, stamps, None, None, native=False, state=state)


def _renamed(opened: Opened, files: list[Location], copies: list[MemoryFile]) -> Opened:
    """What was opened from copies in memory, with the names of the files themselves; errors name them, too."""
    names = {str(copy.path): str(file) for copy, file in zip(copies, files, strict=True)}

    def renamed(function: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            try:
                return function(*args)
            except CheckpointError as error:
                text = functools.reduce(lambda text, name: text.replace(name, names[name]), names, str(error))
                raise CheckpointError(text) from None

        return call

    shown = files[0] if len(files) == 1 else files[0].parent
    return replace(opened, made=renamed(opened.made), state=renamed(opened.state), shown=shown, keeps=copies)


def _is_zip(path: Location) -> bool:
    with open_input(path) as file:
        return file.pread(4, 0) == b"PK\x03\x04"


def _check(path: Location) -> None:
    """`CheckpointError` unless torch can safely open the file: its storages are in it, and its pickle takes no more
    memory than it should."""
    with open_input(path) as file:
        if not _is_zip(path):
            _check_old(path, as_stream(file))
            return
        found = read_directory(  # torch finds members whatever their case is
            path,
            lambda name: name.endswith("/data.pkl") or name.lower().rpartition("/")[2] in _SMALL,
            any_case=True,
        )
        pickles = [member for name, member in found.members.items() if name.endswith("/data.pkl")]
        small = [member for name, member in found.members.items() if not name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise CheckpointError(f"{path}: it has {len(pickles)} members named data.pkl")
        for member in small:
            if member.nbytes > _MAX_SMALL:
                raise CheckpointError(f"{path}: member {member.name!r:.80} has {member.nbytes} bytes")
        member = pickles[0]
        if member.offset is None and member.nbytes > _FREELY_UNPACKED + 20 * member.packed:
            raise CheckpointError(
                f"{path}: member {member.name!r:.80} unpacks from {member.packed} to {member.nbytes} bytes: store it"
            )
        asked: dict[str, int] = {}

        def ask(key: str, nbytes: int) -> None:
            asked[key] = max(nbytes, asked.get(key, 0))

        if member.offset is None:
            source: BinaryIO = io.BytesIO(b"".join(read_pieces(file, member, str(path))))
        else:
            source = as_stream(file)
            source.seek(member.offset)
        PickleCheck(source, member.nbytes, ask, str(path)).run()
    prefix = member.name.removesuffix("data.pkl") + "data/"
    members = read_directory(path, lambda name: name.startswith(prefix) and name[len(prefix) :] in asked).members
    for key, nbytes in asked.items():
        there = members.get(prefix + key)
        if there is None or there.nbytes < nbytes:
            has = "which is not there" if there is None else f"which has {there.nbytes}"
            raise CheckpointError(f"{path}: storage {key!r:.40} should have {nbytes} bytes of {prefix}{key:.40}, {has}")


def _check_old(path: Location, file: BinaryIO) -> None:
    """The same for files of torch before 1.6: several pickles, then the storages."""
    size = path.stat().st_size
    asked: dict[str, int] = {}
    total = 0

    def ask(key: str, nbytes: int) -> None:
        nonlocal total
        total += _OLD_LENGTH + nbytes if key not in asked else 0
        asked[key] = nbytes
        check_room(0)

    def check_room(first: int) -> None:
        if first + total > size:
            raise CheckpointError(
                f"{path}: its storages should have {total} bytes at least from offset {first} on, the file has {size}: "
                "it is truncated"
            )

    check = PickleCheck(file, size, ask, str(path), old=True)
    for _ in range(_OLD_PICKLES):
        check.run()
    check_room(file.tell())


def _joined(files: list[Location], stamps: list[Stamp], *, mmap: bool) -> dict[str, Any]:
    """Load several shards into one dict."""
    state: dict[str, Any] = {}
    for file, before in zip(files, stamps, strict=True):
        part = _load(file, before, mmap=mmap)
        if not isinstance(part, dict) or not all(isinstance(key, str) for key in part):
            raise CheckpointError(f"{file} is one of {len(files)} shards, and no dict of names: load it by torch.load")
        both = part.keys() & state.keys()
        if both:
            raise CheckpointError(
                f"{file} is one of {len(files)} shards, and {min(both)!r:.80} is in another one as well: load each by "
                "torch.load"
            )
        state |= part
    return state


def _load(path: Location, before: Stamp, *, mmap: bool) -> Any:
    torch = import_torch()
    zipped = _is_zip(path)
    if mmap and zipped:  # torch would take packed bytes for a tensor's
        members = read_directory(path, lambda name: "/data/" in name).members
        mmap = all(member.offset is not None for member in members.values())
    try:
        with torch.sparse.check_sparse_tensor_invariants():
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and zipped)
    except (
        pickle.UnpicklingError, RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError,
        AssertionError, EOFError, UnicodeDecodeError, OverflowError, MemoryError, NotImplementedError,
    ) as error:  # fmt: skip
        text = " ".join(str(error).rpartition("WeightsUnpickler error: ")[2].split())  # before it: advice, and escapes
        raise CheckpointError(f"{path}: torch.load(weights_only=True) does not open it: {text:.300}") from None
    check_same(path, before, stamp(path))  # torch has opened it by itself
    check_objects(state, str(path))
    return state


_CONTAINERS: Final = (dict, list, tuple, set, frozenset)


def check_objects(state: Any, label: str) -> int:
    """Count the objects in all containers of a state, each shared container once; takes time linear in that.

    `CheckpointError` if a container contains itself, or containers are nested too deep.
    """
    count = 0
    heights: dict[int, int] = {}  # of the containers that are done, and of nested tensors
    open_now: set[int] = set()
    stack: list[tuple[Any, Iterator[Any]]] = []
    tallest: list[int] = [0]
    current: Any = (state,)
    while True:
        if current is not None:
            stack.append((current, _children(current)))
            open_now.add(id(current))
            tallest.append(0)
        owner, children = stack[-1]
        current = None
        for child in children:
            count += 1
            if isinstance(child, _CONTAINERS):
                if id(child) in open_now:
                    raise CheckpointError(f"{label}: a {type(child).__name__} in its state contains itself")
                height = heights.get(id(child))
                if height is None:
                    current = child
                    break
                tallest[-1] = max(tallest[-1], height)
            elif is_tensor(child) and child.is_nested and id(child) not in heights:
                _check_nested(child, label)
                heights[id(child)] = 0
        if current is not None:
            if len(stack) > MAX_DEPTH + 1:
                raise _too_deep(label)
            continue
        stack.pop()
        open_now.discard(id(owner))
        height = tallest.pop() + 1
        heights[id(owner)] = height
        if not stack:
            return count
        tallest[-1] = max(tallest[-1], height)
        if len(stack) + height > MAX_DEPTH + 2:
            raise _too_deep(label)


def _children(value: Any) -> Iterator[Any]:
    return iter(value.values() if isinstance(value, dict) else value)


def _too_deep(label: str) -> CheckpointError:
    return CheckpointError(f"{label}: the containers of its state are nested more than {MAX_DEPTH} deep")


def _check_nested(tensor: Any, label: str) -> None:
    """Check the parts of a nested tensor: torch does not, it trusts the file."""
    import torch

    if tensor.layout != torch.strided:
        return
    sizes, steps = tensor._nested_tensor_size(), tensor._nested_tensor_strides()
    starts = tensor._nested_tensor_storage_offsets()
    room = tensor.untyped_storage().nbytes() // tensor.element_size()
    rows = zip(sizes.tolist(), steps.tolist(), starts.tolist(), strict=True) if sizes.ndim == 2 else ()
    for shape, strides, start in rows:
        last = start + sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
        if min([*shape, *strides, start]) < 0 or (0 not in shape and last >= room):
            raise CheckpointError(f"{label}: a nested tensor in it has a part of shape {shape!r:.80} beyond its buffer")
