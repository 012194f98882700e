"""`load_into`: fill a module in place, reading the file straight into its memory."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, pairwise
from math import inf
from typing import Any, Final, NamedTuple

from ..codec.libraries import import_torch
from ..codec.numpy import Array
from ..errors import ArgumentError, ArgumentTypeError
from .build import build_state, check_structure, regions_of, tensor_numbers
from .files import Files
from .keys import Key
from .load import Path, Verify, check_options, map_files, raise_damage, read, verify_mapped
from .opening import Opener
from .plan import Plan
from .reading import read_regions
from .regions import storage_bytes
from .resolving import open_path
from .selection import children, descend
from .verify import check_archive

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
        key: dotted name of the module's state in it, such as `"model"`; None: the checkpoint is the state dict itself.
        strict: as for `load_state_dict`. A name that the file lacks is not missing if the module ties its weight to one
            that the file has, as with `safetensors.torch.load_model`.
        encryption_key: of an encrypted checkpoint, what `load_checkpoint` takes as `key=`.

    Contiguous tensors in host memory of the same dtype and shape are read from the file into the module's own memory;
    the others (on a device, of another dtype) are copied once, from the mapped file. `load_state_dict` runs with its
    hooks and checks, and raises its own `RuntimeError`. Digests are compared on the way: if one is wrong,
    `CheckpointError` is raised, and the module holds what was read. No second copy of the state is made.

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
    own = module.state_dict(keep_vars=True)
    without = [name for name, tensor in own.items() if isinstance(tensor, torch.Tensor) and tensor.is_meta]
    if without:
        raise ArgumentError(
            f"{without[0]} and {len(without) - 1} others of the module are on the device meta, and have no memory to "
            "fill: call module.to_empty(device='cpu') first"
        )
    opened = open_path(path, Opener(encryption_key))
    if opened.state is not None:
        found = opened.state(True)
        if verify == "all":
            check_archive(opened)
        if key is not None:
            found = descend(found, key, objects=True)
        if not isinstance(found, dict):
            raise ArgumentError(_NO_STATE_DICT)
        return module.load_state_dict(_with_tied(found, own), strict=strict)
    check_structure(opened.plan)
    tree = opened.plan.tree if key is None else descend(opened.plan.tree, key)
    if not isinstance(tree, dict) or not tree.keys() & {"d", "o", "k"}:
        raise ArgumentError(_NO_STATE_DICT)
    regions = regions_of(opened.plan, tensor_numbers(tree))
    if opened.places is None:
        state = build_state(opened.plan, lambda region: opened.plan.regions[region].bytes(), tree=tree)
        return module.load_state_dict(_with_tied(state, own), strict=strict)
    targets = _targets(opened.plan, tree, own)
    direct = {target.region: target for target in targets}
    others = [region for region in regions if region not in direct]
    if not opened.mappable:
        memory = read(opened, others, readers=count, verify=bool(verify))
    else:
        memory = map_files(opened, regions)
    with Files(opened.files, opened.sizes, opened.sealed) as files:
        raise_damage(
            read_regions(
                opened, files, list(direct), lambda region: direct[region].memory, readers=count, verify=bool(verify)
            )
        )
    if verify and opened.mappable:
        verify_mapped(opened, others, memory, count)
    memory |= {region: target.memory for region, target in direct.items() if region not in memory}
    state = build_state(opened.plan, memory.__getitem__, tree=tree)
    for target in targets:
        state[target.name] = target.tensor  # which load_state_dict copies onto itself: that costs nothing
    return module.load_state_dict(_with_tied(state, own), strict=strict)


def _with_tied(state: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The state with those of the module's tensors added that it lacks and that share the memory of one that it has:
    other programs write only one name of tied weights."""
    missing = {name: memory for name in own if name not in state and (memory := _Memory.of(own[name])) is not None}
    if not missing:
        return state
    present = [memory for name in own if name in state and (memory := _Memory.of(own[name])) is not None]
    present = sorted(memory for memory in present if memory.end - memory.start == memory.nbytes)  # without gaps
    ends = list(accumulate([(memory.device, memory.end) for memory in present], max))
    for name, memory in missing.items():
        before = bisect_right(present, (memory.device, memory.start, inf, 0))
        if before and ends[before - 1] >= (memory.device, memory.end):
            state[name] = own[name].detach()  # copied onto itself, which changes nothing
    return state


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
    """A tensor of the module that a region can be read into."""

    name: str
    region: int
    tensor: Any
    memory: Array


def _targets(plan: Plan, tree: Any, own: dict[str, Any]) -> list[_Target]:
    import torch

    found: dict[int, _Target] = {}
    for name, node in children(tree):
        number = node.get("x") if isinstance(node, dict) else None
        tensor: Any = own.get(name) if isinstance(name, str) else None
        if type(number) is not int or not 0 <= number < len(plan.tensors):
            continue
        entry = plan.tensors[number]
        if (
            type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and tensor.is_cpu
            and tensor.layout == torch.strided
            and tensor.is_contiguous()
            and str(tensor.dtype) == f"torch.{entry.dtype}"
            and not tensor.is_quantized
            and tensor.shape == entry.shape
            and entry.region >= 0
            and entry.region not in found
            and entry.strides is None
            and entry.nbytes == plan.regions[entry.region].nbytes
        ):
            memory = storage_bytes(tensor, tensor.data_ptr(), entry.nbytes)
            found[entry.region] = _Target(name, entry.region, tensor, memory)
    # If tensors of the module share memory and those of the file do not, load_state_dict decides which value wins.
    ordered = sorted(found.values(), key=lambda target: target.tensor.data_ptr())
    shared = set()
    for before, after in pairwise(ordered):
        if before.tensor.data_ptr() + before.memory.nbytes > after.tensor.data_ptr():
            shared |= {before.region, after.region}
    return [target for target in ordered if target.region not in shared]
