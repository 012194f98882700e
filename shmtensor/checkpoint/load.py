"""Load states from files: `load_checkpoint` and `load_arrays`, mapped or read, and `load_into`, which fills a module
in place, reading the file straight into its memory. `check` verifies a checkpoint: it reads every region, in little
memory, and compares it with its digest.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import inf
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from ..codec.leaf import overlapping
from ..codec.libraries import import_torch, torch_views
from ..codec.numpy import Array
from ..cuda.runtime import device_of
from ..errors import ArgumentError, ArgumentTypeError, CheckpointError, WrongKey
from ..memory.mapped_file import map_private
from ..options import shown
from .description import Summer, digest
from .devices import Blocks, check_device, move_state
from .envelope import DATA, SEGMENT
from .formats import Opened, Stored
from .formats.base import Place
from .formats.zips import check_crcs
from .keys import Key
from .locations import InputFile, check_same, open_input, stamp_of
from .manifest import MANIFEST, check_others
from .opening import PLAIN, Opener, open_once, persistently
from .plan import Entry, Plan, build_state, check_structure, regions_of, storage_bytes, tensor_numbers
from .reading import CHUNK, MAX_READERS, Damage, Files, damaged, default_readers, private, read_regions
from .selection import Index, Slices, Span, check_slices, children, cut, descend, part_of, read_part, replaced, select
from .threads import in_threads

Verify = bool | Literal["all"]
Path = str | os.PathLike[str]
Progress = Callable[[int, int], object]
OnBytes = Callable[[int], Any]


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
    device: Any = None,
) -> Any:
    """The state of a checkpoint, as it was saved.

    Tensors come back on the CPU or on `device`, detached, in C order; those that shared memory share it again. A file
    of another program is a flat dict (`.safetensors`, `.npz`), or what `torch.load(weights_only=True)` gives. Nothing
    else is unpickled.

    Args:
        path: a file (`.safetensors`, `.pt`, `.npz`), a directory of shards, `latest`, or a directory of checkpoints,
            which means its `latest`, else the newest complete one. Or the URL of one (`s3://`, `https://`, whatever
            fsspec has): it is read by ranges, several at once, into memory. See docs/guide/remote-checkpoints.md.
        map: True: tensors are the file, mapped: no copy, and pages are read when they are touched. Writing to them is
            allowed and never changes the file. False: everything is read into memory now.
        keys: dotted names of what is wanted, such as `["model", "optim.state"]`, or names that `shmtensor checkpoint
            info` shows; lists and tuples come whole.
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
        device: where torch tensors are made: None or `"cpu"`, or a CUDA device (`"cuda"`, `"cuda:1"`, a `torch.device`,
            a number). For a CUDA device nothing is mapped: tensors are read through a few pinned buffers, 16 MiB for
            each reader, so that host memory never has the whole state, and they are complete when this returns. Parts
            (`slices=`) and packed members of an `.npz` are copied from host memory one after the other; sparse,
            quantized and nested tensors, states found by `from_memory=`, and a `.pt` that torch wrote are copied from
            host memory as a whole.

    Raises:
        FileNotFoundError: there is no checkpoint at `path`.
        ResourceError: a server did not answer properly in any of the attempts.
        CudaError: CUDA cannot be used, or the device has not enough memory.
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
        rank=rank, key=key, progress=progress, device=check_device(device),
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
        rank=rank, key=key, progress=progress, device=None,
    )  # fmt: skip


def _load(
    path: Path, *, map: bool, keys: Iterable[str] | str | None, readers: int | None, verify: Verify, from_memory: bool,
    slices: Slices, arrays: bool, rank: int | None, key: Key | None, progress: Progress | None,
    device: int | None,
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
        return _load_staged(path, keys=keys, arrays=arrays, device=device)
    opened, files = open_files(path, Opener(key), rank)
    with files:
        return _load_opened(
            opened, files, map=map, keys=keys, readers=count, verify=verify, slices=slices, arrays=arrays,
            progress=progress, device=device,
        )  # fmt: skip


def open_files(path: Path, opener: Opener = PLAIN, rank: int | None = None) -> tuple[Opened, Files]:
    """Open the checkpoint that a path means, or one rank's part of it, and its files: what is read from these is what
    the description says, whatever a trainer makes of the path meanwhile."""

    def once() -> tuple[Opened, Files]:
        opened = open_once(path, opener, rank)
        return opened, Files.of(opened)

    return persistently(path, once)


def _load_opened(
    opened: Opened, files: Files, *, map: bool, keys: Iterable[str] | str | None, readers: int, verify: Verify,
    slices: Slices, arrays: bool, progress: Progress | None, device: int | None,
) -> Any:  # fmt: skip
    map = map and opened.mappable and device is None
    if verify == "all":
        check_crcs_of_others(opened)
    if opened.state is not None and not arrays:
        state = opened.state(map)
        state = state if keys is None else select(state, keys)
        state = state if slices is None else _with_parts(state, slices, copied=not map)
        return state if device is None else move_state(state, device)
    plan, tree = opened.plan, opened.plan.tree
    if keys is not None or slices is not None:
        check_structure(plan)
    if keys is not None:
        tree = select(tree, keys, plan.tensors)
    parts: dict[int, Span] = {}
    if slices is not None:
        plan, parts = cut(plan, tree, slices, readable(opened, map=map, verify=verify))
    wanted = [region for region in regions_of(plan, tensor_numbers(tree)) if region not in parts]
    add = None if progress is None else _summed(progress, sum(plan.regions[region].nbytes for region in wanted))
    if device is not None:
        return _load_to(
            device, opened, files, plan, tree, wanted, parts, readers=readers, verify=bool(verify), progress=add
        )
    memory: dict[int, Array] = {}
    if parts:
        memory = {region: read_part(files, span, readers) for region, span in parts.items()}
    if opened.places is None:
        for region in wanted:
            memory[region] = opened.plan.regions[region].bytes()
    elif map:
        memory |= map_files(opened, files, wanted)
        if verify:
            now = wanted if verify == "all" else regions_of(opened.plan, tensor_numbers(tree, only_read=True))
            verify_mapped(opened, now, memory, readers)
    else:
        memory |= read(opened, files, wanted, readers=readers, verify=bool(verify), progress=add)
    return build_state(plan, memory.__getitem__, tree=tree, arrays=arrays)


def _load_to(
    device: int, opened: Opened, files: Files, plan: Plan, tree: Any, wanted: Sequence[int],
    parts: Mapping[int, Span], *, readers: int, verify: bool, progress: Callable[[int], None] | None,
) -> Any:  # fmt: skip
    """The state with its torch tensors on a CUDA device. Plain ones are streamed there (`devices.py`)."""
    blocks = Blocks(device)
    there, here = _split(plan, tree)
    streamed = [] if opened.places is None else [region for region in wanted if region in there - here]
    memory: dict[int, Array] = {}

    def keep(region: int, data: Array) -> None:
        if region in there:
            blocks.fill(region, data)
        if region in here:
            memory[region] = data

    for region in streamed:
        blocks.add(region, plan.regions[region].nbytes)
    raise_damage(
        read_regions(
            opened, files, streamed, blocks.__getitem__, readers=readers, verify=verify, progress=progress, device=True
        )
    )
    for region, span in parts.items():
        keep(region, read_part(files, span, readers))
    for region in wanted:
        if opened.places is None:
            keep(region, opened.plan.regions[region].bytes())
        elif region not in blocks:
            keep(region, read(opened, files, [region], readers=readers, verify=verify, progress=progress)[region])
    return build_state(plan, memory.__getitem__, tree=tree, blocks=blocks)


def _split(plan: Plan, tree: Any) -> tuple[set[int], set[int]]:
    """The regions of a tree that its plain torch tensors need, and those that anything else does, which is made in host
    memory: arrays, long `bytes`, composites."""
    check_structure(plan)
    numbers = tensor_numbers(tree)
    plain = {number for number in numbers - tensor_numbers(tree, only_read=True) if plan.tensors[number].torch}
    return set(regions_of(plan, plain)), set(regions_of(plan, numbers - plain))


def check_crcs_of_others(opened: Opened) -> None:
    """Compare the CRCs of archives of other programs, which have no other digests. Raises `CheckpointError`."""
    if opened.digests is None and opened.format != "safetensors":
        check_archive(opened)


def readable(opened: Opened, *, map: bool, verify: Verify) -> list[Stored | None] | None:
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

    def part(name: str, index: Index, tensor: Any) -> Any:
        found = part_of(tensor, name, index)
        # not an expanded one, which would become larger than its file
        return found.clone() if copied and found.nbytes <= found.untyped_storage().nbytes() else found

    return replaced(state, {name: partial(part, name, index) for name, index in check_slices(slices).items()})


def _load_staged(path: Path, *, keys: Iterable[str] | str | None, arrays: bool, device: int | None) -> Any:
    from .staged import open_staged

    staged = open_staged(path)
    tree = staged.plan.tree
    if keys is not None:
        check_structure(staged.plan)
        tree = select(tree, keys, staged.plan.tensors)
    memory = staged.read(regions_of(staged.plan, tensor_numbers(tree)))
    if device is None:
        return build_state(staged.plan, memory.__getitem__, tree=tree, arrays=arrays)
    blocks = Blocks(device)
    there, here = _split(staged.plan, tree)
    for region in there:
        blocks.fill(region, memory[region] if region in here else memory.pop(region))
    return build_state(staged.plan, memory.__getitem__, tree=tree, blocks=blocks)


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


def map_files(opened: Opened, files: Files, regions: Sequence[int]) -> dict[int, Array]:
    """Map some regions; only files that have any of them are mapped."""
    places = opened.places or []
    mapped: dict[int, Array] = {}
    result = {}
    for region in regions:
        file, offset = places[region]
        if file not in mapped:
            mapped[file] = map_private(files.local(file).fd, opened.stamps[file].nbytes)
        result[region] = mapped[file][offset : offset + opened.plan.regions[region].nbytes]
    return result


def read(
    opened: Opened,
    files: Files,
    regions: Sequence[int],
    *,
    readers: int,
    verify: bool,
    progress: Callable[[int], None] | None = None,
) -> dict[int, Array]:
    """Read some regions into fresh memory. Raises `CheckpointError` if any is damaged."""
    places = opened.places or []
    memory = {region: private(opened.plan.regions[region].nbytes, places[region][1]) for region in regions}
    raise_damage(
        read_regions(opened, files, regions, memory.__getitem__, readers=readers, verify=verify, progress=progress)
    )
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
    if opened.digests is None:
        return
    found = in_threads([partial(digest, mapped[region]) for region in regions], readers)
    raise_damage(damaged(opened, dict(zip(regions, found, strict=True))))


def raise_damage(damage: Sequence[Damage]) -> None:
    """`CheckpointError` if there is any."""
    if damage:
        more = f" (and {len(damage) - 1} more)" if len(damage) > 1 else ""
        raise CheckpointError(f"{damage[0]}{more}")


_NO_STATE_DICT: Final = "there is no state dict in the checkpoint: pass key=, the name of the one that is meant"


def load_into(
    module: Any,
    path: Path,
    key: str | None = None,
    strict: bool = True,
    readers: int | None = None,
    verify: Verify = True,
    encryption_key: Key | None = None,
) -> Any:
    """Fill a module's parameters and buffers from a checkpoint; returns what `module.load_state_dict` returns.

    Args:
        path: as for `load_checkpoint`.
        key: dotted name of the module's state in it, such as `"model"`, or what its names begin with, such as
            `"model.encoder"` for a part of the module that was saved; None: the checkpoint is the state dict itself.
        strict: as for `load_state_dict`. A name that the file lacks is not missing if the module ties its weight to one
            that the file has, as with `safetensors.torch.load_model`.
        encryption_key: of an encrypted checkpoint, what `load_checkpoint` takes as `key=`.

    Contiguous tensors in host memory of the same dtype and shape are read from the file into the module's own memory,
    such on a CUDA device through a few pinned buffers (after the work that is queued on the current stream). The others
    (of another dtype, with gaps) are copied once, from the mapped file. `load_state_dict` runs with its
    hooks and checks, and raises its own `RuntimeError`: what hooks that run before, or a module's own
    `load_state_dict` or `_load_from_state_dict`, may change is copied, too. NumPy arrays fill tensors as well. Digests
    are compared on the way: if one is wrong, `CheckpointError` is raised, and the module holds what was read. No second
    copy of the state is made. With `strict`, `ArgumentError` names the `key` to pass if all names of the module, and
    none where it looks, lie one level deeper.

    >>> import os, tempfile, torch, safetensors.torch
    >>> model = torch.nn.Linear(2, 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = os.path.join(folder, "a.safetensors")
    ...     safetensors.torch.save_file({"weight": torch.ones(2, 2), "bias": torch.zeros(2)}, file)
    ...     load_into(model, file)
    <All keys matched successfully>
    >>> model.weight.sum().item()
    4.0
    """
    torch = import_torch()
    if not isinstance(module, torch.nn.Module):
        raise ArgumentTypeError(f"load_into fills an nn.Module, not a {type(module).__name__}: use load_checkpoint")
    count = check_options(readers, verify)
    own = _Own.of(module)
    without = [name for name, tensor in own.state.items() if isinstance(tensor, torch.Tensor) and tensor.is_meta]
    if without:
        raise ArgumentError(
            f"{without[0]} and {len(without) - 1} others of the module are on the device meta, and have no memory to "
            "fill: call module.to_empty(device='cpu') first"
        )
    opened, files = open_files(path, Opener(encryption_key))
    with files:
        state = _state_for(own, opened, files, key=key, readers=count, verify=verify)
        if (other := next((name for name in state if not isinstance(name, str)), None)) is not None:
            raise ArgumentError(f"{_NO_STATE_DICT}: the one that was found has the key {shown(other)}")
        if strict and not own.hooked:
            _check_place(own, state, key)
        return module.load_state_dict(_with_tied(_with_tensors(state, own), own), strict=strict)


class _Own(NamedTuple):
    """The tensors of a module that are to be filled.

    state:  its tensors by the names that it gives them
    direct: those that `load_state_dict` fills with what is loaded under their names, whatever else the module does with
            a state: parameters and buffers outside of `hooked`
    hooked: the names of modules, "" for all of it, that may change a state before they are filled: by hooks, or methods
            that are not torch's; and of those below them
    """

    state: dict[str, Any]
    direct: dict[str, Any]
    hooked: set[str]

    @classmethod
    def of(cls, module: Any) -> _Own:
        state = module.state_dict(keep_vars=True)
        direct, hooked = dict[str, Any](), set[str]()
        if not _is_of_torch(module.load_state_dict):
            hooked.add("")
        of_torch = import_torch().nn.Module  # whose methods a class may have overridden
        for name, each in of_torch.named_modules(module, remove_duplicate=False):
            above = name.rpartition(".")[0]
            if above in hooked or each._load_state_dict_pre_hooks or not _is_of_torch(each._load_from_state_dict):
                hooked.add(name)
                continue
            start = f"{name}." if name else ""
            for members in (of_torch.named_parameters, of_torch.named_buffers):
                for own_name, tensor in members(each, recurse=False, remove_duplicate=False):
                    if state.get(start + own_name) is tensor:
                        direct[start + own_name] = tensor
        return cls(state, direct, hooked)


def _is_of_torch(method: Any) -> bool:
    """Whether a method of a module is one of `torch.nn`'s classes."""
    return f"{getattr(method, '__globals__', {}).get('__name__')}.".startswith("torch.nn.")


def _state_for(
    own: _Own, opened: Opened, files: Files, *, key: str | None, readers: int, verify: Verify
) -> dict[str, Any]:
    """The state dict in a checkpoint. Tensors that allow it are read into the module's own memory; the state has the
    module's tensors then."""
    if opened.state is not None:
        found = opened.state(True)
        if verify == "all":
            check_archive(opened)
        if key is not None:
            found = descend(found, key, objects=True)
        if not isinstance(found, dict):
            raise ArgumentError(_NO_STATE_DICT)
        return found
    check_structure(opened.plan)
    tree = opened.plan.tree if key is None else descend(opened.plan.tree, key)
    if not isinstance(tree, dict) or not tree.keys() & {"d", "o", "k"}:
        raise ArgumentError(_NO_STATE_DICT)
    regions = regions_of(opened.plan, tensor_numbers(tree))
    if opened.places is None:
        made: dict[str, Any] = build_state(opened.plan, lambda region: opened.plan.regions[region].bytes(), tree=tree)
        return made
    targets = _targets(opened.plan, tree, own, is_mapped=opened.mappable)
    filled = {target.region for target in targets}
    others = [region for region in regions if region not in filled]
    if not opened.mappable:
        memory = read(opened, files, others, readers=readers, verify=bool(verify))
    else:
        memory = map_files(opened, files, regions)
    for on_device in (False, True):
        direct = _memory_of(targets, on_device)
        raise_damage(
            read_regions(
                opened, files, list(direct), direct.__getitem__, readers=readers, verify=bool(verify), device=on_device
            )
        )
    if verify and opened.mappable:
        verify_mapped(opened, others, memory, readers)
    for target in targets:
        if target.region not in memory:  # of one on a device: address space, which nothing reads
            memory[target.region] = np.empty(target.memory.nbytes, np.uint8) if target.on_device else target.memory
    state: dict[str, Any] = build_state(opened.plan, memory.__getitem__, tree=tree)
    for target in targets:
        state[target.name] = target.tensor  # which load_state_dict copies onto itself: that costs nothing
    return state


def _check_place(own: _Own, state: dict[str, Any], key: str | None) -> None:
    """Raise `ArgumentError` if the state has no name of the module at this level, and all of them one level deeper."""
    if not own.state.keys() or own.state.keys() & state.keys():
        return
    there = [
        repr(name if key is None else f"{key}.{name}")
        for name, value in state.items()
        if isinstance(name, str) and len(name) < 80 and isinstance(value, dict) and own.state.keys() <= value.keys()
    ]
    if there:
        raise ArgumentError(f"the module's state lies one level deeper: pass key={' or key='.join(there[:3])}")


def _with_tensors(state: dict[str, Any], own: _Own) -> dict[str, Any]:
    """The state with tensors in place of the NumPy arrays and numbers that are for tensors of the module."""
    torch = import_torch()
    for name, value in state.items():
        mine = own.state.get(name) if isinstance(name, str) else None
        if not isinstance(value, (np.ndarray, np.generic)) or not (mine is None or isinstance(mine, torch.Tensor)):
            continue
        array = np.asarray(value)
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        try:
            state[name] = torch.from_numpy(array if array.flags.writeable else array.copy())
        except TypeError:
            if mine is not None:
                raise ArgumentError(
                    f"{name!r:.80} is an array of {array.dtype!s:.80}, a type that torch lacks: it cannot fill the "
                    f"module's tensor of {mine.dtype}"
                ) from None
    return state


def _with_tied(state: dict[str, Any], own: _Own) -> dict[str, Any]:
    """The state with those of the module's tensors added that it lacks and that share the memory of one that it has:
    other programs write only one name of tied weights."""
    if own.state.keys() <= state.keys():
        return state
    of = {name: memory for name, tensor in own.state.items() if (memory := _Memory.of(tensor)) is not None}
    missing = {name: memory for name, memory in of.items() if name not in state}
    without_gaps = {name: memory for name, memory in of.items() if memory.end - memory.start == memory.nbytes}
    whole = {name: memory for name, memory in without_gaps.items() if name in state}
    present = sorted(whole.values())
    ends = list(accumulate([(memory.device, memory.end) for memory in present], max))
    views = {_view(memory, own.state[name]): name for name, memory in whole.items()}
    for name, memory in missing.items():
        if name in own.direct:
            before = bisect_right(present, (memory.device, memory.start, inf, 0))
            if before and ends[before - 1] >= (memory.device, memory.end):
                state[name] = own.state[name].detach()  # copied onto itself, which changes nothing
        elif (other := views.get(_view(memory, own.state[name]))) is not None:
            state[name] = state[other]  # which the module may change: its own memory is not filled yet
    return state


def _view(memory: _Memory, tensor: Any) -> tuple[Any, ...]:
    """A key that is equal for tensors that are the same elements of the same memory."""
    return memory, tensor.dtype, tensor.shape, tensor.stride()


class _Memory(NamedTuple):
    """The address range of a tensor."""

    device: str
    start: int
    end: int
    nbytes: int

    @classmethod
    def of(cls, tensor: Any) -> _Memory | None:
        """The range of a tensor; None if it has no bytes, or is no strided tensor in memory."""
        import torch

        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_nested:
            return None
        try:
            start = tensor.data_ptr()
        except RuntimeError:  # a subclass without memory of its own
            return None
        if not tensor.numel() or not start:
            return None
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        return cls(str(tensor.device), start, start + (last + 1) * tensor.element_size(), tensor.nbytes)


class _Target(NamedTuple):
    """A tensor of the module that a region can be read into. Its memory is an array, or on a device a tensor."""

    name: str
    region: int
    tensor: Any
    memory: Any
    on_device: bool


def _memory_of(targets: list[_Target], on_device: bool) -> dict[int, Any]:
    return {target.region: target.memory for target in targets if target.on_device == on_device}


def _targets(plan: Plan, tree: Any, own: _Own, *, is_mapped: bool) -> list[_Target]:
    """The tensors of the module that are filled from the file.

    Not those of which `load_state_dict` decides the value: outside of `own.direct`, and where tensors of the module
    share memory and those of the file do not. Not where the module may change other names that have the same bytes, if
    these are not mapped: that would change the tensor. Not on a device, if other names in the file have the same bytes
    and need them in host memory.
    """
    nodes = dict(children(tree))
    read = [] if is_mapped else [node for name, node in nodes.items() if name not in own.direct]
    elsewhere = {plan.tensors[number].region for number in tensor_numbers(read) if 0 <= number < len(plan.tensors)}
    found: dict[int | str, _Target] = {}
    claims: dict[tuple[_Memory, int | str], None] = {}  # who fills a stretch of the module's memory: a region, or other
    for name, tensor in own.state.items():
        node = nodes.get(name)
        number = node.get("x") if isinstance(node, dict) else None
        entry = plan.tensors[number] if type(number) is int and 0 <= number < len(plan.tensors) else None
        region, memory = -1, _Memory.of(tensor)
        if entry is not None and name in own.direct and entry.region not in elsewhere:
            region = _region_of(plan, entry, tensor, is_mapped)
        if memory is not None and (name in nodes or name not in own.direct):
            claims[memory, name if region < 0 else region] = None
        if region >= 0 and region not in found:
            filled = storage_bytes(tensor, tensor.data_ptr(), plan.regions[region].nbytes)
            found[region] = _Target(name, region, tensor, filled, not tensor.is_cpu)
    ordered = list(claims)
    for group in overlapping([(memory.device, memory.start, memory.end - memory.start) for memory, _ in ordered]):
        for index in group if len(group) > 1 else ():
            found.pop(ordered[index][1], None)
    return sorted(found.values(), key=lambda target: target.tensor.data_ptr())


def _region_of(plan: Plan, entry: Entry, tensor: Any, is_mapped: bool) -> int:
    """The region that is, byte for byte, what a tensor of the module should have; -1 if none is."""
    torch, types = import_torch(), torch_views().known_types
    fits = (
        type(tensor) in types
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and str(tensor.dtype) == f"torch.{entry.dtype}"
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.shape == entry.shape
        and entry.region >= 0
        and (tensor.is_cpu or (device_of(tensor) >= 0 and (is_mapped or len(plan.members[entry.region]) == 1)))
        and entry.strides is None
        and entry.nbytes == plan.regions[entry.region].nbytes
    )
    return entry.region if fits else -1


def check(opened: Opened, *, readers: int, progress: OnBytes | None = None) -> list[Damage]:
    """Returns the damaged regions. `progress` is called with the number of bytes of each piece, from any reader.

    Files without digests cannot be verified, except for the CRC-32 of members of a zip archive: a wrong one raises
    `CheckpointError`, as does a file that ends early, and a segment of an encrypted file that is not authentic: every
    byte of such a file is decrypted. `.metadata` for DCP is compared with the digest in the manifest.
    """
    digests, places = opened.digests, opened.places
    if opened.locked:
        raise WrongKey(f"{opened.main} is encrypted: pass key=, what it was saved with")
    with Files.of(opened) as files:
        if opened.files[-1].name == MANIFEST:
            check_others(opened.files[-1].parent)
        _check_rest(opened, files, all_of_it=places is None or digests is None)
        if places is not None and digests is not None:
            return _check_regions(opened, files, places, readers=readers, progress=progress)
    if opened.format != "safetensors":
        check_archive(opened, progress)
    return []


def _check_regions(
    opened: Opened, files: Files, places: Sequence[Place], *, readers: int, progress: OnBytes | None
) -> list[Damage]:
    own = threading.local()

    def digest_of(region: int) -> int:
        if not hasattr(own, "buffer"):
            own.buffer = np.empty(CHUNK, np.uint8)
        file, offset = places[region]
        nbytes = opened.plan.regions[region].nbytes
        summer = Summer()
        for at in range(0, nbytes, CHUNK):
            view = own.buffer[: min(CHUNK, nbytes - at)]
            files.fill(view, file, offset + at, opened.plan.names(region))
            summer.update(view)
            if progress is not None:
                progress(view.nbytes)
        return summer.digest

    order = sorted(range(len(places)), key=places.__getitem__)
    found = in_threads([partial(digest_of, region) for region in order], readers)
    return damaged(opened, dict(zip(order, found, strict=True)))


def _check_rest(opened: Opened, files: Files, *, all_of_it: bool) -> None:
    """Decrypt the segments of encrypted files in which no region is; or all of them."""
    regions = [] if all_of_it else zip(opened.places or (), opened.plan.regions, strict=True)
    read: set[tuple[int, int]] = set()
    for (file, offset), region in regions:
        read.update((file, number) for number in range(offset // SEGMENT, -(-(offset + region.nbytes) // SEGMENT)))
    for file, sealed in enumerate(opened.sealed):
        if sealed is None:
            continue
        memory = np.empty(SEGMENT, np.uint8)
        for number in range(sealed.envelope.count(DATA)):
            if (file, number) not in read:
                nbytes = min(SEGMENT, sealed.envelope.nbytes - number * SEGMENT)
                files.fill(memory[:nbytes], file, number * SEGMENT, "none")


def check_archive(opened: Opened, progress: OnBytes | None = None) -> None:
    """Compare the members of zip archives with their CRC-32; `CheckpointError` names one that is damaged."""
    for path, before in zip(opened.files, opened.stamps, strict=True):
        with open_input(path) as file:
            check_same(path, before, stamp_of(file))
            zipped = _is_zipped(file)
        if zipped:
            check_crcs(path, progress)


def is_archive(opened: Opened) -> bool:
    """Whether every file of it is a zip archive."""
    for path in opened.files:
        with open_input(path) as file:
            if not _is_zipped(file):
                return False
    return True


def _is_zipped(file: InputFile) -> bool:
    return file.pread(2, 0) == b"PK"
