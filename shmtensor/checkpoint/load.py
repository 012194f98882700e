"""`load_checkpoint`, `load_arrays`: load states from files, mapped or read."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from ..codec.numpy import Array
from ..errors import ArgumentError, ArgumentTypeError, CheckpointError
from ..memory.mapped_file import map_private
from .build import build_state, check_structure, regions_of, tensor_numbers
from .files import Files
from .formats import Opened, Stored
from .keys import Key
from .opening import Opener
from .reading import MAX_READERS, Damage, default_readers, private, read_regions
from .resolving import open_path, open_rank
from .selection import replaced, select
from .slicing import Index, Slices, Span, check_slices, cut, part_of, read_part
from .verify import check_archive

Verify = bool | Literal["all"]
Path = str | os.PathLike[str]
Progress = Callable[[int, int], object]


def load_checkpoint(
    path: Path,
    map: bool = True,
    keys: Iterable[str] | str | None = None,
    readers: int | None = None,
    verify: Verify = True,
    from_memory: bool = False,
    slices: Mapping[str, Index] | None = None,
    rank: int | None = None,
    key: Key | None = None,
    progress: Progress | None = None,
) -> Any:
    """The state of a checkpoint, as it was saved.

    Tensors come back on the CPU, detached, in C order; those that shared memory share it again. A file of another
    program is a flat dict (`.safetensors`, `.npz`), or what `torch.load(weights_only=True)` gives. Nothing else is
    unpickled.

    Args:
        path: a file (`.safetensors`, `.pt`, `.npz`), a directory of shards, `latest`, or a directory of checkpoints,
            which means its `latest`, else the newest complete one. Or the URL of one (`s3://`, `https://`, whatever
            fsspec has): it is read by ranges, several at once, into memory. See docs/guide/remote-checkpoints.md.
        map: True: tensors are the file, mapped: no copy, and pages are read when they are touched. Writing to them is
            allowed and never changes the file. False: everything is read into memory now.
        keys: dotted names of what is wanted, such as `["model", "optim.state"]`; lists and tuples come whole.
        readers: threads that read, with `map=False`; None: one per core, 4 to 8.
        verify: compare what is read with the digests in the file. The description, places and sizes are checked in any
            case. With `map=True` almost nothing is read now, so nothing is compared: pass `"all"` to read and compare
            all that is mapped. False: no digests.
        from_memory: instead of a file, after the crash of a trainer: the newest state that `CheckpointWriter.save` had
            copied completely and that is not on disk yet, copied out of shared memory. `path` is the writer's
            directory. If there is none, `FileNotFoundError` says why and names what is on disk; a file is never loaded
            instead. There are no digests yet: `readers=` and `verify="all"` are refused.
        slices: the part that is wanted of some tensors, by the names that `shmtensor checkpoint info` shows, such as
            `{"model.weight": numpy.s_[0:1024, ::2]}`: integers, slices with positive steps, `...`. Mapped, a part is a
            view. With `map=False` only the bytes of the part are read, and small gaps between them; packed members of
            an `.npz`, and a `.pt` of torch's own, are read whole. A digest is of a whole tensor: parts are compared
            only with `verify="all"`, which reads all of the tensor.
        rank: of a checkpoint that several ranks saved together, this rank's part. None: a dict of all parts by rank.
        key: of an encrypted checkpoint, what its writer was given: 32 bytes, a passphrase (`str`), or an object with
            `wrap` and `unwrap`. It is always read into memory, as with `map=False`: what is encrypted cannot be
            mapped. With `key=`, a checkpoint that is not encrypted is a `CheckpointError`.
            See docs/guide/encryption.md.
        progress: called with the bytes that were read so far and all that are read, from any reading thread; not for
            what is mapped, nor for `slices=`.

    Raises:
        FileNotFoundError: there is no checkpoint at `path`.
        ResourceError: a server did not answer properly, for as often as it was asked.
        DependencyError: of a URL, fsspec or its package for this kind of URL is not installed.
        CheckpointError: it is damaged or truncated, and the message names the tensor and the offset; or `key=` is
            missing or not the right one.
        ArgumentError: an argument, a name or an index is wrong.

    >>> import os, tempfile
    >>> import numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(os.path.join(folder, "a.npz"), x=np.arange(3))
    ...     load_checkpoint(os.path.join(folder, "a.npz"))
    {'x': array([0, 1, 2])}
    """
    return _load(
        path, map=map, keys=keys, readers=readers, verify=verify, from_memory=from_memory, slices=slices, arrays=False,
        rank=rank, key=key, progress=progress,
    )  # fmt: skip


def load_arrays(
    path: Path,
    map: bool = True,
    keys: Iterable[str] | str | None = None,
    readers: int | None = None,
    verify: Verify = True,
    from_memory: bool = False,
    slices: Mapping[str, Index] | None = None,
    rank: int | None = None,
    key: Key | None = None,
    progress: Progress | None = None,
) -> Any:
    """The same as `load_checkpoint` with every tensor as NumPy array; does not import torch (except for a `.pt` of
    torch's own).

    Types that NumPy lacks come as those of `ml_dtypes` if it is installed. A `torch.Size` is a tuple, a `torch.dtype`
    or `torch.device` a string. Sparse, quantized and nested tensors raise `CheckpointError`.
    """
    return _load(
        path, map=map, keys=keys, readers=readers, verify=verify, from_memory=from_memory, slices=slices, arrays=True,
        rank=rank, key=key, progress=progress,
    )  # fmt: skip


def _load(
    path: Path, *, map: bool, keys: Iterable[str] | str | None, readers: int | None, verify: Verify, from_memory: bool,
    slices: Slices, arrays: bool, rank: int | None, key: Key | None, progress: Progress | None,
) -> Any:  # fmt: skip
    count = check_options(readers, verify)
    if from_memory:
        if readers is not None or verify == "all":
            raise ArgumentError(
                "from_memory= copies out of shared memory, where no digests are yet: leave out readers= and "
                'verify="all"'
            )
        for option, value, why in (
            ("slices", slices, "whole tensors"), ("rank", rank, "what one process has saved"),
            ("key", key, "out of shared memory, which is not encrypted"),
        ):  # fmt: skip
            if value is not None:
                raise ArgumentError(f"from_memory= copies {why}: leave out {option}=, or from_memory= to load a file")
        return _load_staged(path, keys=keys, arrays=arrays)
    opener = Opener(key)
    opened = open_path(path, opener) if rank is None else open_rank(path, rank, opener)
    map = map and opened.mappable
    if verify == "all" and opened.digests is None and opened.format != "safetensors":
        check_archive(opened)  # of another program: the CRCs are the only digests
    if opened.state is not None and not arrays:
        state = opened.state(map)
        state = state if keys is None else select(state, keys, objects=True)
        return state if slices is None else _with_parts(state, slices, copied=not map)
    plan, tree = opened.plan, opened.plan.tree
    if keys is not None or slices is not None:
        check_structure(plan)
    if keys is not None:
        tree = select(tree, keys)
    parts: dict[int, Span] = {}
    if slices is not None:
        plan, parts = cut(plan, tree, slices, _readable(opened, map=map, verify=verify))
    wanted = regions_of(plan, tensor_numbers(tree))
    wanted = [region for region in wanted if region not in parts]
    memory: dict[int, Array] = {}
    if parts:
        with Files(opened.files, opened.sizes, opened.sealed) as files:
            memory = {region: read_part(files, span, count) for region, span in parts.items()}
    if opened.places is None:
        for region in wanted:
            memory[region] = opened.plan.regions[region].bytes()
    elif map:
        memory |= map_files(opened, wanted)
        if verify:
            now = wanted if verify == "all" else regions_of(opened.plan, tensor_numbers(tree, only_read=True))
            verify_mapped(opened, now, memory, count)
    else:
        memory |= read(opened, wanted, readers=count, verify=bool(verify), progress=progress)
    return build_state(plan, memory.__getitem__, tree=tree, arrays=arrays)


def _readable(opened: Opened, *, map: bool, verify: Verify) -> list[Stored | None] | None:
    """Per region where a part of it is to be read; None for those that are read whole or mapped."""
    if verify == "all" and opened.digests is not None:
        return None
    if not map or opened.places is None:
        return opened.stored
    # mapped tensors are views; but a tensor that is not aligned in the file would be copied whole
    regions = opened.plan.regions
    return [
        each if each is not None and each.offset % region.align else None
        for region, each in zip(regions, opened.stored, strict=True)
    ]


def _with_parts(state: Any, slices: Mapping[str, Index], *, copied: bool) -> Any:
    """A state as torch gives it, with parts in place of some of its tensors."""
    for name, index in check_slices(slices).items():

        def part(tensor: Any, name: str = name, index: Index = index) -> Any:
            found = part_of(tensor, name, index)
            # not an expanded one, which would become larger than its file
            return found.clone() if copied and found.nbytes <= found.untyped_storage().nbytes() else found

        state = replaced(state, name, part)
    return state


def _load_staged(path: Path, *, keys: Iterable[str] | str | None, arrays: bool) -> Any:
    from .staged import open_staged

    staged = open_staged(path)
    tree = staged.plan.tree
    if keys is not None:
        check_structure(staged.plan)
        tree = select(tree, keys)
    memory = staged.read(regions_of(staged.plan, tensor_numbers(tree)))
    return build_state(staged.plan, memory.__getitem__, tree=tree, arrays=arrays)


def check_options(readers: int | None, verify: Verify) -> int:
    """Check the options; returns the number of readers."""
    if verify not in (True, False, "all"):
        raise ArgumentError(f'verify={verify!r}: pass True, False or "all"')
    if readers is None:
        return default_readers()
    if isinstance(readers, bool) or not isinstance(readers, int):
        raise ArgumentTypeError(f"readers must be an int, not {type(readers).__name__}")
    if not 1 <= readers <= MAX_READERS:
        raise ArgumentError(f"readers={readers}: pass 1 to {MAX_READERS}")
    return readers


def map_files(opened: Opened, regions: Sequence[int]) -> dict[int, Array]:
    """Map some regions; only files that have any of them are mapped."""
    places = opened.places or []
    with Files(opened.files, opened.sizes, opened.sealed) as files:
        mapped: dict[int, Array] = {}
        result = {}
        for region in regions:
            file, offset = places[region]
            if file not in mapped:
                mapped[file] = map_private(files.fd(file), opened.sizes[file])
            result[region] = mapped[file][offset : offset + opened.plan.regions[region].nbytes]
        return result


def read(
    opened: Opened, regions: Sequence[int], *, readers: int, verify: bool, progress: Progress | None = None
) -> dict[int, Array]:
    """Read some regions into fresh memory. Raises `CheckpointError` if any is damaged."""
    places = opened.places or []
    memory = {region: private(opened.plan.regions[region].nbytes, places[region][1]) for region in regions}
    with Files(opened.files, opened.sizes, opened.sealed) as files:
        raise_damage(
            read_regions(
                opened, files, regions, memory.__getitem__, readers=readers, verify=verify,
                progress=None if progress is None else _summed(progress, sum(map(len, memory.values()))),
            )
        )  # fmt: skip
    return memory


def _summed(progress: Progress, total: int) -> Callable[[int], None]:
    """Call `progress(bytes so far, total)` for each number of bytes that are read."""
    lock, done = threading.Lock(), 0

    def add(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            progress(done, total)

    return add


def verify_mapped(opened: Opened, regions: Sequence[int], mapped: dict[int, Array], readers: int) -> None:
    """Compare mapped regions with their digests. Raises `CheckpointError`."""
    from concurrent.futures import ThreadPoolExecutor

    from .digests import digest

    digests = opened.digests
    places = opened.places
    if digests is None or places is None:
        return
    with ThreadPoolExecutor(readers, thread_name_prefix="shmtensor-verify") as pool:
        found = list(pool.map(digest, [mapped[region] for region in regions]))
    raise_damage(
        [
            Damage(region, opened.plan.names(region), opened.files[places[region][0]], places[region][1],
                   digests[region], value)
            for region, value in zip(regions, found, strict=True)
            if value != digests[region]
        ]
    )  # fmt: skip


def raise_damage(damage: Sequence[Damage]) -> None:
    """`CheckpointError` if there is any."""
    if damage:
        more = f" (and {len(damage) - 1} more)" if len(damage) > 1 else ""
        raise CheckpointError(f"{damage[0]}{more}")
