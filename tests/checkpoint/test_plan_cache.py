"""A save that remembers the plan of the one before: only for a state that has the same tensors in the same places."""

from __future__ import annotations

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shmtensor
from shmtensor import ArgumentError, native
from shmtensor.checkpoint import names
from shmtensor.checkpoint import slots as slots_module
from shmtensor.checkpoint.formats import FORMATS, get_format
from shmtensor.checkpoint.plan import Plan, plan
from shmtensor.checkpoint.slots import cut
from shmtensor.checkpoint.staging import PlanCache
from shmtensor.errors import ArgumentTypeError

from .state_files import same

FUZZ = settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
CHUNK = 4096
PATIENCE = 120.0


def base() -> dict:
    """Contiguous, tied, overlapping, permuted and empty tensors, arrays, and values around them."""
    weight, flat = torch.randn(5, 7), torch.randn(40)
    return {
        "model": {"weight": weight, "tied": weight, "head": flat[:24], "tail": flat[16:], "image": torch.ones(2, 3, 4)},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "avg": torch.randn(9000)}}, "groups": [{"lr": 0.1}]},
        "array": np.arange(11), "turned": torch.randn(3, 4).t(), "none": torch.empty(0, 3), "step": 1, "name": "a",
    }  # fmt: skip


def chunks_of(made: Plan, layout) -> list[tuple]:
    """Every chunk of a layout, with its bytes as `Transfer` writes them."""
    pieces = cut(layout, CHUNK)
    slots = [np.full(CHUNK, 0xEE, np.uint8) for _ in pieces]
    slots_module.Transfer(made).fill(pieces, slots)
    return [(each.file, each.offset, slot[: each.nbytes].tobytes()) for each, slot in zip(pieces, slots, strict=True)]


def check(plan_cache: PlanCache, state, form: str, meta=None, max_shard=None) -> None:
    """What was remembered is what a plan of the state alone says, down to each byte of each slot."""
    found, described, geometry = plan_cache.prepare(state, meta)
    expected = plan(state, meta)
    layout = get_format(form).layout(Plan.from_description(expected.describe()), max_shard)
    assert described == found.describe() == expected.describe()
    assert (geometry.single, geometry.nbytes) == (layout.single, layout.nbytes)
    chunks = geometry.chunks(CHUNK)
    assert [(c.file, c.offset, c.nbytes, c.runs) for c in chunks] == [
        (c.file, c.offset, c.nbytes, c.runs) for c in cut(layout, CHUNK)
    ]
    slots = [np.full(CHUNK, 0x11, np.uint8) for _ in chunks]
    slots_module.Transfer(found).fill(chunks, slots)
    bytes_found = [(c.file, c.offset, slot[: c.nbytes].tobytes()) for c, slot in zip(chunks, slots, strict=True)]
    assert bytes_found == chunks_of(expected, layout)
    for region, other in zip(found.regions, expected.regions, strict=True):
        assert bytes(region.bytes()) == bytes(other.bytes())


def other_memory(state) -> None:
    state["model"]["weight"] = state["model"]["weight"].clone()  # and is not tied any more


def other_order(state) -> None:
    state["model"] = dict(reversed(state["model"].items()))


def deleted(state) -> None:
    del state["model"]["tail"]


def renamed(state) -> None:
    state["model"]["wait"] = state["model"].pop("weight")


def swapped(state) -> None:
    model = state["model"]
    model["head"], model["tail"] = model["tail"], model["head"]


def sparse(state) -> None:
    state["model"]["image"] = state["model"]["image"].to_sparse()


def conjugated(state) -> None:
    state["model"]["image"] = torch.randn(2, 6, dtype=torch.complex64).conj()


def reused(state) -> None:
    """Another tensor, with luck where the old one lay."""
    state["optimizer"]["state"][0]["avg"] = None
    gc.collect()
    state["optimizer"]["state"][0]["avg"] = torch.randn(9000)


MUTATORS = {
    "values": lambda s: s["model"]["weight"].normal_(),
    "step": lambda s: s.update(step=s["step"] * 10 + 7),
    "sign": lambda s: s.update(step=-0.0 if str(s["step"]) == "0.0" else 0.0),
    "kind": lambda s: s.update(step=True if type(s["step"]) is int else 1),
    "text": lambda s: s.update(name=s["name"] + '"\\é' * 900),
    "scalar appears": lambda s: s.update(extra=[None, {}, (), float("nan"), 1 << 70]),
    "key of another type": lambda s: s["optimizer"]["state"].update({"0": 5}),
    "a tuple": lambda s: s["optimizer"].update(groups=tuple(s["optimizer"]["groups"])),
    "dtype of the same size": lambda s: s["model"].update(image=s["model"]["image"].view(torch.int32)),
    "dtype": lambda s: s["model"].update(image=torch.ones(2, 3, 4, dtype=torch.float64)),
    "shape": lambda s: s["model"].update(image=s["model"]["image"].reshape(-1)),
    "shape of nothing": lambda s: s.update(none=torch.empty(3, 0)),
    "strides": lambda s: s.update(turned=s["turned"].contiguous()),
    "view": lambda s: s["model"].update(head=s["model"]["head"][:10]),
    "array": lambda s: s.update(array=s["array"].astype(">i4")),
    "array in place": lambda s: s["array"].fill(3),
    "array as tensor": lambda s: s.update(array=torch.from_numpy(np.asarray(s["array"]).astype("i8"))),
    "structured": lambda s: s.update(array=np.zeros(4, [("a", "i2"), ("b", "f8")])),
    "bytes": lambda s: s.update(name=bytes(5000)) if type(s["name"]) is str else s.update(name="b"),
    "parameter": lambda s: s["model"].update(image=torch.nn.Parameter(torch.ones(3))),
    "negative": lambda s: s["model"].update(image=torch._neg_view(torch.randn(4, 4))),
    "expanded": lambda s: s["model"].update(image=torch.randn(1, 4).expand(6, 4)),
    "other memory": other_memory, "other order": other_order, "deleted": deleted, "renamed": renamed,
    "swapped": swapped, "sparse": sparse, "conjugated": conjugated, "reused": reused,
    "tied": lambda s: s["model"].update(more=s["model"]["tail"]),
    "overlapping": lambda s: s["model"].update(more=s["optimizer"]["state"][0]["avg"][5:80]),
}  # fmt: skip


def mutate(state, name: str) -> None:
    try:
        MUTATORS[name](state)
    except (KeyError, RuntimeError, AttributeError, TypeError):
        pass  # an earlier one has left nothing to change


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", MUTATORS)
def test_a_state_that_differs_is_planned_anew(name, form):
    state, plan_cache = base(), PlanCache(get_format(form), None)
    check(plan_cache, state, form)
    check(plan_cache, state, form)
    assert plan_cache.hits == 1
    MUTATORS[name](state)
    check(plan_cache, state, form)
    check(plan_cache, state, form, {"epoch": 3})


@FUZZ
@given(steps=st.lists(st.sampled_from(sorted(MUTATORS)), max_size=8), form=st.sampled_from(sorted(FORMATS)))
def test_any_series_of_changes(steps, form):
    state, plan_cache = base(), PlanCache(get_format(form), None)
    check(plan_cache, state, form)
    for name in steps:
        mutate(state, name)
        check(plan_cache, state, form)
        check(plan_cache, state, form, {"after": name})


@pytest.mark.parametrize("max_shard", [None, 100, 40_000])
def test_what_changes_between_the_steps_of_a_training_is_no_reason_to_plan_anew(max_shard):
    state, plan_cache = base(), PlanCache(get_format("safetensors"), max_shard)
    for step in range(20):
        state["step"], state["optimizer"]["groups"][0]["lr"] = step, 0.1 / (step + 1)
        state["model"]["weight"].normal_()
        state["array"] += 1
        check(plan_cache, state, "safetensors", {"step": step}, max_shard)
    assert plan_cache.hits == 19
    geometry = plan_cache.prepare(state, {"step": 20}).geometry
    assert plan_cache.prepare(state, {"step": 21}).geometry is geometry


@pytest.mark.parametrize("max_shard", [None, 100])
def test_a_description_that_needs_a_longer_header_gets_another_layout(max_shard):
    state, plan_cache = base(), PlanCache(get_format("safetensors"), max_shard)
    sizes = set()
    for length in range(0, 20_000, 500):
        state["name"] = '"' * length
        check(plan_cache, state, "safetensors", max_shard=max_shard)
        sizes.add(plan_cache.prepare(state, None).geometry.nbytes)
    assert len(sizes) >= 5


@pytest.mark.parametrize("max_shard", [None, 1000])
def test_nothing_of_the_state_is_kept_alive(max_shard):
    plan_cache = PlanCache(get_format("safetensors"), max_shard)
    for _ in range(2):
        state = base()
        watched = [weakref.ref(state["model"]["weight"].untyped_storage()), weakref.ref(state["array"])]
        tensors = [weakref.ref(state["optimizer"]["state"][0]["avg"]), weakref.ref(state["turned"])]
        plan_cache.prepare(state, None).geometry.chunks(CHUNK)
        plan_cache.prepare(state, {"again": True}).geometry.chunks(CHUNK)
        del state
        gc.collect()
        assert [ref() for ref in watched + tensors] == [None] * 4


def test_the_plan_keeps_memory_that_the_state_lets_go_of():
    """Another thread may give a parameter other memory while it is copied."""
    state, plan_cache = {"a": torch.full((50_000,), 7.0)}, PlanCache(get_format("safetensors"), None)
    plan_cache.prepare(state, None)
    made, _, geometry = plan_cache.prepare(state, None)
    assert plan_cache.hits == 1
    state["a"].data = torch.zeros(1)
    noise = [torch.full((50_000,), 9.0) for _ in range(4)]
    slots = [np.zeros(CHUNK, np.uint8) for _ in geometry.chunks(CHUNK)]
    slots_module.Transfer(made).fill(geometry.chunks(CHUNK), slots)
    found = np.concatenate(slots)[-geometry.nbytes % CHUNK - 4 * CHUNK :].view(np.float32)
    assert set(found[:1000]) == {7.0}
    assert len(noise) == 4


def test_an_error_is_the_one_of_a_plan():
    state, plan_cache = base(), PlanCache(get_format("safetensors"), None)
    plan_cache.prepare(state, None)
    state["optimizer"]["state"][0]["bad"] = object()
    with pytest.raises(ArgumentTypeError, match=r"optimizer\.state\[0\]\.bad"):
        plan_cache.prepare(state, None)
    with pytest.raises(ArgumentTypeError, match="meta"):
        plan_cache.prepare(base(), {"meta": object()})
    del state["optimizer"]["state"][0]["bad"]
    check(plan_cache, state, "safetensors")


@FUZZ
@given(
    sizes=st.lists(st.integers(0, 300), max_size=30),
    threads=st.integers(1, 5),
    starts=st.randoms(use_true_random=False),
    far=st.booleans(),
)
def test_runs_are_moved_by_any_number_of_threads(sizes, threads, starts, far):
    source = np.random.default_rng(1).integers(0, 256, 10_000, np.uint8)
    target, expected = np.zeros(10_000, np.uint8), np.zeros(10_000, np.uint8)
    moves, at = [], 0
    for size in sizes:
        start = starts.randrange(9_000)
        moves.append((target.ctypes.data + at, source.ctypes.data + start, size))
        expected[at : at + size] = source[start : start + size]
        at += size
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(slots_module, "ALONE", 0)
        patched.setattr(slots_module, "_threads", lambda: threads)
        if far and native.module is not None:  # past the caches
            patched.setattr(slots_module, "mover", lambda total: native.module.stream)
        slots_module.move_all(moves, (source, target))
    assert (target == expected).all()


def test_where_no_thread_can_be_made_the_caller_moves_it_all(monkeypatch):
    class Refusing:
        def __init__(self, **_):
            pass

        def start(self):
            raise RuntimeError("can't start new thread")

    source, target = np.arange(2_000_000), np.zeros(2_000_000, np.int64)
    monkeypatch.setattr(slots_module.threading, "Thread", Refusing)
    monkeypatch.setattr(slots_module, "_threads", lambda: 3)
    slots_module.move_all([(target.ctypes.data, source.ctypes.data, source.nbytes)], None)
    assert (target == source).all()


def test_saves_of_a_training(tmp_path, monkeypatch, channel):
    """Each file holds what the state was, whether the plan was remembered or made anew."""
    monkeypatch.setattr(names, "PREFIX", channel)
    monkeypatch.setattr(slots_module, "ALONE", 1000)
    state, kept = base(), []
    with shmtensor.CheckpointWriter(tmp_path / "a", memory="8MiB") as writer:
        writer.start(state)
        for step, name in enumerate(["values", "step", "other memory", "shape", "values", "renamed", "text", "array"]):
            MUTATORS[name](state)
            kept.append((copy.deepcopy(state), writer.save(state, name=f"{step}")))
        assert writer._plan_cache.hits == 4
    for expected, handle in kept:
        assert same(shmtensor.load_checkpoint(handle.durable.result(PATIENCE).path), expected)


@pytest.mark.parametrize("nbytes", [0, 4096])
@pytest.mark.parametrize("part", [lambda x: x, lambda x: x[:2000], lambda x: x.view(1 << 10, -1).T, lambda x: x[9000:]])
def test_a_tensor_whose_storage_became_smaller_is_refused_also_when_it_was_saved_before(nbytes, part):
    """Its copy would read memory that the process has given back, and end the process."""
    held, plan_cache = torch.randn(1 << 20), PlanCache(get_format("safetensors"), None)
    state = {"part": part(held), "x": held}
    for _ in range(2):
        plan_cache.prepare(state, None)
    assert plan_cache.hits == 1
    held.untyped_storage().resize_(nbytes)
    with pytest.raises(ArgumentError, match=r"(part|x): the tensor has no memory: its storage was"):
        plan_cache.prepare(state, None)
    held.untyped_storage().resize_(1 << 22)
    check(plan_cache, state, "safetensors")
