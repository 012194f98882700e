"""States on a device: copied on a stream of the writer's, handed over by event. Against the stand-in for CUDA."""

from __future__ import annotations

import os
import threading

import psutil
import pytest
import torch

import shmtensor
from shmtensor import shielded
from shmtensor.checkpoint import names, slots, structure
from shmtensor.checkpoint.load import load_checkpoint
from shmtensor.checkpoint.slots import Stager, chunk_size
from shmtensor.checkpoint.writer import CheckpointWriter

from ..waiting import wait_until
from .standin import DeviceTensor

PATIENCE = 120.0
MIB = 1 << 20
ELEMENTS = 100_000


@pytest.fixture(autouse=True)
def own_channels(monkeypatch, channel):
    """Channel names that the leak check knows as this run's own."""
    monkeypatch.setattr(names, "PREFIX", channel)


@pytest.fixture(autouse=True)
def device_tensors(monkeypatch):
    """The walk over a state takes the stand-in's tensors for plain ones."""
    views, take_apart, known = structure._tensor_tools()
    monkeypatch.setattr(structure, "_tensor_tools", lambda: (views, take_apart, known | {DeviceTensor}))


@pytest.fixture
def writer(tmp_path, standin):
    with CheckpointWriter(tmp_path / "a", memory="8MiB", on_error="warn") as made:
        made.start(timeout=PATIENCE)
        yield made


@pytest.fixture
def held(monkeypatch, standin):
    """Nobody's wait for a copy comes back, and no copy is made, before this event is set."""
    go, wait = threading.Event(), standin.wait

    def wait_longer(event):
        assert go.wait(PATIENCE)
        wait(event)

    standin.polls = None  # asking does not help
    monkeypatch.setattr(standin, "wait", wait_longer)
    return go


@pytest.fixture
def published(monkeypatch):
    """What the trainer publishes, in order: (kind, number of the save); of a chunk, whether it wakes the other side."""
    seen = []
    tell, publish = Stager.send_small, Stager.publish

    def tell_noted(self, kind, number, *args, **more):
        tell(self, kind, number, *args, **more)
        seen.append((kind, number))

    def publish_noted(self, loan, *, wake):
        publish(self, loan, wake=wake)
        seen.append(("chunk", wake))

    monkeypatch.setattr(Stager, "send_small", tell_noted)
    monkeypatch.setattr(Stager, "publish", publish_noted)
    return seen


def state_of(standin, number: int, count: int = 4) -> dict:
    return {"w": [standin.tensor(torch.full((ELEMENTS,), float(number))) for _ in range(count)], "step": number}


def number_in(handle) -> int:
    """The one number that all of a state of `state_of` holds."""
    state = load_checkpoint(handle.durable.result(PATIENCE).path)
    for tensor in state["w"]:
        assert (tensor == state["step"]).all()
    return state["step"]


def test_save_returns_before_the_copies_are_made_and_staged_is_done_by_event(writer, standin, held, published):
    state = state_of(standin, 1)
    handle = writer.save(state)
    assert standin.waiting
    assert not handle.staged.done()
    assert published == [("head", 1)]  # neither a chunk nor the end before its event
    held.set()
    assert handle.staged.result(PATIENCE) == 4 * 4 * ELEMENTS
    assert published[-1] == ("end", 1)
    assert {kind for kind, _ in published[1:-1]} == {"chunk"}
    assert number_in(handle) == 1


def test_what_comes_after_save_on_the_current_stream_comes_after_the_copies(writer, standin, held):
    state = state_of(standin, 1)
    handle = writer.save(state)
    for tensor in state["w"]:
        standin.enqueue(lambda tensor=tensor: tensor.fill_(99.0))
    held.set()
    assert number_in(handle) == 1
    standin.run_all()
    assert standin.host(state["w"][0])[0] == 99


def test_what_came_before_save_on_the_current_stream_is_saved(writer, standin):
    state = state_of(standin, 1)
    for tensor in state["w"]:
        standin.enqueue(lambda tensor=tensor: tensor.fill_(7.0))
    state["step"] = 7
    assert number_in(writer.save(state, ordered=False)) == 7


def test_another_stream_than_the_default_one_is_the_current_one(writer, standin):
    state, stream = state_of(standin, 1), standin.new_stream(0)
    with standin.on(stream):
        for tensor in state["w"]:
            standin.enqueue(lambda tensor=tensor: tensor.fill_(8.0))
        state["step"] = 8
        handle = writer.save(state)
    assert number_in(handle) == 8


def test_with_ordered_false_the_current_stream_does_not_wait_until_it_is_told_to(writer, standin, held):
    state, ran = state_of(standin, 1), []
    current = standin.current_stream(0)
    handle = writer.save(state, ordered=False)
    standin.enqueue(lambda: ran.append("forward"))
    with standin.lock:
        while current.queue:  # nothing that it waits for
            assert standin._step(current)
    assert ran == ["forward"]
    assert not handle.staged.done()
    handle.wait_stream()
    for tensor in state["w"]:
        standin.enqueue(lambda tensor=tensor: tensor.fill_(99.0))
    with standin.lock:
        assert not standin._step(current)  # it waits for the copies
    held.set()
    assert number_in(handle) == 1


def test_a_stream_that_is_named_waits(writer, standin, held):
    state, other = state_of(standin, 1), standin.new_stream(0)
    handle = writer.save(state, ordered=False)
    handle.wait_stream(other)
    standin.enqueue(lambda: state["w"][0].fill_(99.0), other)
    with standin.lock:
        assert not standin._step(other)
    held.set()
    assert number_in(handle) == 1


def test_the_state_lives_until_it_is_copied(writer, standin, held):
    state = state_of(standin, 3)
    handle = writer.save(state, ordered=False)
    del state
    held.set()
    assert number_in(handle) == 3
    assert handle._save.offload._plan is None  # and no longer


def test_a_state_of_host_and_device(writer, standin):
    shared = standin.tensor(torch.arange(1000.0))
    state = {
        "host": torch.arange(5000.0), "device": shared, "tied": shared, "part": shared[100:200],
        "gaps": standin.tensor(torch.arange(60.0).view(6, 10))[:, 2:5], "empty": standin.tensor(torch.empty(0, 3)),
        "turned": standin.tensor(torch.arange(12).view(3, 4)).t(), "half": standin.tensor(torch.ones(5).bfloat16()),
        "wide": standin.tensor(torch.tensor(2.0)).expand(4, 5), "text": "x",
    }  # fmt: skip
    handle = writer.save(state)
    done = handle.durable.result(PATIENCE)
    back = load_checkpoint(done.path, verify="all")
    for name, tensor in state.items():
        if name != "text":
            expected = standin.host(tensor) if name != "host" else tensor
            assert torch.equal(back[name], expected), name
    assert back["tied"].data_ptr() == back["device"].data_ptr()  # stored once
    assert back["part"].data_ptr() == back["device"].data_ptr() + 400
    assert done.nbytes < 30_000


def test_a_module_on_a_device(writer, standin):
    module = torch.nn.Linear(30, 40)
    state = {name: standin.tensor(value) for name, value in module.state_dict().items()}
    back = load_checkpoint(writer.save(state).durable.result(PATIENCE).path)
    for name, value in module.state_dict().items():
        assert torch.equal(back[name], value)


def test_slots_are_pinned_ahead_or_copied_without(tmp_path, standin):
    state = state_of(standin, 1)
    with CheckpointWriter(tmp_path / "a", memory="8MiB") as writer:
        writer.start(state, timeout=PATIENCE)
        made = standin.registrations
        assert made > 0
        assert number_in(writer.save(state)) == 1
        assert standin.registrations == made
        assert standin.pinned_copies > 0
        assert not standin.pageable_copies
    assert not standin.registered
    standin.refuse_registration = 2
    with CheckpointWriter(tmp_path / "b", memory="8MiB") as writer:
        assert number_in(writer.save(state_of(standin, 2))) == 2
        assert standin.pageable_copies > 0


def test_saves_follow_each_other(writer, standin):
    handles = [writer.save(state_of(standin, number)) for number in range(6)]
    assert [number_in(handle) for handle in handles] == list(range(6))


def test_a_state_that_streams_through_little_memory(tmp_path, standin, published):
    with CheckpointWriter(tmp_path / "a", memory="2MiB") as writer:
        handle = writer.save(state_of(standin, 5, count=20))
        assert number_in(handle) == 5
    assert len([kind for kind, _ in published if kind == "chunk"]) > 20


@pytest.mark.parametrize("late", [True, False], ids=["after save", "inside save"])
def test_a_failed_copy_is_never_published(writer, standin, published, late):
    writer.save(state_of(standin, 1)).durable.result(PATIENCE)
    wait_until(lambda: ("end", 1) in published)  # noted after it was sent: it may be durable before
    before = len(published)
    standin.fail_copies, standin.polls = 700, None if late else 0
    if late:
        handle = writer.save(state_of(standin, 2))
        for future in (handle.staged, handle.durable):
            with pytest.raises(shmtensor.CudaError, match="700"):
                future.result(PATIENCE)
        assert handle.status == "failed"
    else:
        with pytest.raises(shmtensor.CudaError, match="700"):
            writer.save(state_of(standin, 2))
    assert [kind for kind, _ in published[before:]] == ["head", "abandon"]
    standin.fail_copies, standin.polls = 0, 2
    for stream in standin.streams:
        stream.error = None
    handle = writer.save(state_of(standin, 3))
    assert number_in(handle) == 3
    assert sorted(name for name in os.listdir(writer.directory) if name.startswith("step")) == [
        "step-00000001.safetensors", "step-00000003.safetensors",
    ]  # fmt: skip


def test_a_copy_that_cannot_be_started_is_raised_by_save(writer, standin, monkeypatch):
    good, calls = standin.copy, []

    def third_fails(*args):
        calls.append(None)  # not what was copied: it keeps the slots
        if len(calls) == 3:
            raise shmtensor.CudaError(5, "cannot start a CUDA copy")
        good(*args)

    monkeypatch.setattr(standin, "copy", third_fails)
    with pytest.raises(shmtensor.CudaError, match="cannot start"):
        writer.save(state_of(standin, 1))
    assert not standin.waiting  # no device writes into a slot that was given back
    assert number_in(writer.save(state_of(standin, 2))) == 2


def test_an_interrupt_waits_for_the_device_before_it_gives_slots_back(writer, standin, monkeypatch):
    monkeypatch.setattr(slots.Offload, "follow", raise_interrupt)
    with pytest.raises(KeyboardInterrupt):
        writer.save(state_of(standin, 1))
    assert not standin.waiting
    monkeypatch.undo()


def raise_interrupt(*_):
    raise KeyboardInterrupt


def test_close_waits_for_copies(tmp_path, standin, held):
    writer = CheckpointWriter(tmp_path / "a")
    handle = writer.save(state_of(standin, 1))
    with pytest.raises(shmtensor.TimedOut, match="copied from the device"):
        writer.close(timeout=0.01)
    held.set()
    writer.close(timeout=PATIENCE)
    assert number_in(handle) == 1
    wait_until(lambda: not [each for each in threading.enumerate() if each.name.startswith("shmtensor save")])


def test_no_thread_can_be_started_that_waits_for_the_copies(tmp_path, standin, monkeypatch):
    """Then `save` itself does."""

    def refuse(*_):
        raise RuntimeError("can't start new thread")

    writer = CheckpointWriter(tmp_path / "a", memory="8MiB")
    writer.start(timeout=PATIENCE)
    writer._calls.stop()
    wait_until(lambda: writer._calls.is_idle)
    monkeypatch.setattr(shielded._thread, "start_new_thread", refuse)
    handle = writer.save(state_of(standin, 1))
    assert handle.staged.done()
    assert number_in(handle) == 1
    assert writer._calls.is_idle
    writer.close()


def test_the_next_save_waits_until_the_one_before_is_staged(writer, standin, held):
    writer.save(state_of(standin, 1))
    with pytest.raises(shmtensor.TimedOut, match="copied from the device"):
        writer.save(state_of(standin, 2), timeout=0.01)
    held.set()
    assert number_in(writer.save(state_of(standin, 2), timeout=PATIENCE)) == 2


def test_nothing_to_wait_for_in_host_memory(tmp_path):
    with CheckpointWriter(tmp_path / "a") as writer:
        handle = writer.save({"w": torch.ones(10)}, ordered=False)
        assert handle.staged.done()
        handle.wait_stream()


def test_the_writing_process_makes_no_context(writer, standin):
    writer.save(state_of(standin, 1)).durable.result(PATIENCE)
    process = psutil.Process(writer.statistics().pid)
    assert process.environ()["CUDA_VISIBLE_DEVICES"] == ""
    assert not [mapped.path for mapped in process.memory_maps() if "torch" in mapped.path or "cuda" in mapped.path]


def test_a_large_state_on_a_device_has_few_chunks():
    """`save` returns when the copies of each are started."""
    gigabyte = 10**9
    for total, memory in ((10 * gigabyte, 24 * gigabyte), (gigabyte, 4 * gigabyte), (gigabyte, gigabyte)):
        size = chunk_size(total, memory, on_device=True)
        assert total / size <= 40
        assert size <= memory // 8 + slots.PAGE
    assert chunk_size(10 * gigabyte, 24 * gigabyte) == 16 << 20
