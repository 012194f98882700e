"""The protocols of docs/internals/protocols.md hold in every interleaving, and each of their steps is needed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from shmtensor import native
from shmtensor.checkpoint import snapshot
from shmtensor.ring.states import State as Slot

from . import MODELS, ClaimsConsumerDeath, FanoutDeath, FanoutLeave, GroupsPoison
from .explorer import END, WAIT, Model, Process, Violation, explore
from .streamed import Writer

MUTATIONS = [(model, broken) for model in MODELS for broken in model.MUTATIONS]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_holds(model):
    assert explore(model()) > 50


@pytest.mark.parametrize(("model", "broken"), MUTATIONS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_a_wrong_variant_is_found(model, broken):
    with pytest.raises(Violation) as found:
        explore(model(broken))
    assert found.value.trace


@pytest.mark.parametrize(
    ("model", "source", "target"),
    [
        (FanoutLeave, Slot.WRITING, Slot.RELEASED),  # one that closes is no recipient of what comes then
        (FanoutDeath, Slot.LEASED, Slot.RELEASED),
        (ClaimsConsumerDeath, Slot.LEASED, Slot.PUBLISHED),
        (ClaimsConsumerDeath, Slot.RELEASED, Slot.WRITING),
        (GroupsPoison, Slot.LEASED, Slot.RELEASED),  # delivered too often
    ],
)
def test_a_change_of_a_slot_that_the_table_lacks_is_found(model, source, target):
    made = model()
    made.changes -= {(source, target)}
    with pytest.raises(Violation, match=f"goes from {source} to {target}"):
        explore(made)


def test_what_a_model_names_in_c_is_there():
    """Whoever moves a step in C is led to the model that says why it is where it is."""
    named = 0
    for module in {model.__module__ for model in MODELS}:
        said = re.search(r"^In C: (.*?)\.\n", sys.modules[module].__doc__ + "\n", re.MULTILINE | re.DOTALL)
        for path, functions in re.findall(r"([a-z/]+\.c) \((.*?)\)", said[1] if said else "", re.DOTALL):
            text = (Path(native.__file__).parent / path).read_text()
            for function in functions.replace("\n", " ").split(", "):
                assert re.search(rf"\b{function.strip()}\(", text), f"{module}: {function} is not in {path}"
                named += 1
    assert named > 20


def test_each_crash_point_of_a_save_without_a_local_copy_is_a_step_of_its_model():
    points = re.findall(r"# crash: direct\.(\w+)", Path(snapshot.__file__).read_text())
    assert len(points) > 5
    assert [point for point in points if point not in vars(Writer)] == []


class Step(Process):
    """Two stores and a load, or a lock: for the tests of the explorer itself."""

    def store(self, mem, me):
        mem[self.mine] = 1
        return "load" if self.broken != "barrier" else "barrier"

    def barrier(self, mem, me):
        mem.barrier()
        return "load"

    def load(self, mem, me):
        mem.ghost[self.mine] = mem[self.other]
        return END

    def lock(self, mem, me):
        return "lock_2" if mem.try_lock(self.mine) else WAIT

    def lock_2(self, mem, me):
        return END if mem.try_lock(self.other) else WAIT

    def twice(self, mem, me):
        mem["x"] = mem["y"]
        return END

    def spin(self, mem, me):
        return "spin" if mem["x"] == 0 else END


class Two(Model):
    def __init__(self, start, broken=None, **settings):
        super().__init__()
        self.__dict__.update(settings)
        self.words, self.ghost = {"x": 0, "y": 0}, {"x": None, "y": None}
        self.processes = [
            Step("A", broken, start=start, mine="x", other="y", killable=True),
            Step("B", broken, start=start, mine="y", other="x"),
        ]

    def final(self, s):
        if s.ghost["x"] == s.ghost["y"] == 0:
            return "both loaded 0"
        return None if s.over("A") and s.over("B") else "stuck"


def test_store_buffers_reorder_a_store_and_a_load():
    explore(Two("store"))
    with pytest.raises(Violation, match="both loaded 0"):
        explore(Two("store", tso=True))
    explore(Two("store", "barrier", tso=True))


def test_a_deadlock_is_found_with_a_readable_trace():
    with pytest.raises(Violation, match="nothing can move, and stuck") as found:
        explore(Two("lock"))
    assert [re.sub(" +", " ", line) for line in found.value.trace] == ["A lock lock(x)", "B lock lock(y)"]


def test_a_death_drops_locks_but_is_no_way_out():
    with pytest.raises(Violation, match="stuck"):
        explore(Two("lock", crashes=1))


def test_a_livelock_is_found():
    with pytest.raises(Violation, match="no good end"):
        explore(Two("spin"))


def test_a_step_with_two_accesses_is_refused():
    with pytest.raises(AssertionError, match="a second shared access"):
        explore(Two("twice"))
