"""The runtime without a device, and the stand-in that the other tests put in its place."""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import weakref

import numpy as np
import pytest
import torch

import shmtensor
from shmtensor.cuda import runtime as cuda
from shmtensor.cuda.copies import Pending
from shmtensor.memory import segment as shm

from ..package.test_layers import run_isolated
from .standin import GARBAGE, DeviceTensor, StandIn, installed

PAGE = os.sysconf("SC_PAGESIZE")


def mapped(channel, *, writable=True):
    """Four pages that have no name any more."""
    name = f"/shmtensor.{channel}"
    with shm.create(name, 4 * PAGE, "") as segment:
        shm.unlink(name)
        return segment.map(writable=writable)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_what_is_missing_is_said():
    with pytest.raises(shmtensor.CudaError, match=r"built without CUDA|no usable CUDA device") as raised:
        cuda.runtime()
    assert isinstance(raised.value, shmtensor.ResourceError)


def test_no_torch_is_said():
    source = (
        "import sys; sys.modules['torch'] = None\n"
        "from shmtensor.cuda import runtime\n"
        "try: runtime.runtime()\n"
        "except OSError as error: print(error)"
    )
    assert "pip install '.[torch]'" in run_isolated(source)


def test_looking_where_a_tensor_lies_starts_nothing():
    assert cuda.device_of(torch.ones(1)) == -1
    assert cuda._found is None or torch.cuda.is_available()


def test_the_stand_in_does_what_the_runtime_does():
    for name, method in vars(cuda.Runtime).items():
        if not name.startswith("_"):
            parameters = list(inspect.signature(method).parameters)
            assert list(inspect.signature(getattr(StandIn, name)).parameters) == parameters, name


def test_copies_run_late_and_in_order(lazy, channel):
    mapping = mapped(channel)
    lazy.register_host(mapping.address, mapping.nbytes, 0)
    host = torch.from_numpy(np.ndarray(PAGE, np.uint8, mapping.buffer)).fill_(7)
    stream, event = lazy.new_stream(0), lazy.new_event(0)
    with lazy.on(stream):
        target = lazy.empty((PAGE,), torch.uint8, 0)
        lazy.copy(target, host)
    lazy.record(event, stream)
    assert not lazy.is_done(event)
    assert int(lazy.host(target)[0]) == GARBAGE
    host.fill_(9)  # too early: seen on the device
    lazy.wait(event)
    assert int(lazy.host(target)[0]) == 9
    assert lazy.is_done(event)
    lazy.unregister_host(mapping.address, 0)
    assert (lazy.pinned_copies, lazy.pageable_copies) == (1, 0)


def test_streams_wait_for_events_and_for_nothing_else(lazy):
    done = []
    first, second = lazy.new_stream(0), lazy.new_stream(0)
    event = lazy.new_event(0)
    lazy.enqueue(lambda: done.append("first"), first)
    lazy.record(event, first)
    lazy.enqueue(lambda: done.append("later"), first)
    lazy.stream_waits(second, event)
    lazy.enqueue(lambda: done.append("second"), second)
    lazy.synchronize(second)
    assert done == ["first", "second"]
    lazy.run_all()
    assert done == ["first", "second", "later"]


def test_an_event_happens_after_enough_looks(standin):
    stream, event = standin.new_stream(0), standin.new_event(0)
    standin.enqueue(lambda: None, stream)
    standin.record(event, stream)
    assert [standin.is_done(event) for _ in range(4)] == [False, False, True, True]


def test_registrations_are_checked(standin, channel):
    mapping = mapped(channel)
    standin.register_host(mapping.address, 2 * PAGE, 0)
    for address, nbytes, number in ((mapping.address + PAGE, PAGE, 712), (mapping.address + 1, PAGE, 1)):
        with pytest.raises(shmtensor.CudaError, match=f"CUDA error {number} ") as raised:
            standin.register_host(address, nbytes, 0)
        assert raised.value.number == number
    over_the_end = torch.from_numpy(np.ndarray(2 * PAGE, np.uint8, mapping.buffer, PAGE))
    with pytest.raises(shmtensor.CudaError, match="leaves a registered range"):
        standin.copy(standin.tensor(torch.zeros(2 * PAGE, dtype=torch.uint8)), over_the_end)
    standin.unregister_host(mapping.address, 0)
    with pytest.raises(shmtensor.CudaError, match="713"):
        standin.unregister_host(mapping.address, 0)


def test_read_only_mappings_are_refused_as_by_cuda(standin, channel):
    mapping = mapped(channel, writable=False)
    for read_only, number in ((False, 1), (True, 801)):
        with pytest.raises(shmtensor.CudaError, match=str(number)):
            standin.register_host(mapping.address, PAGE, 0, read_only=read_only)
    standin.read_only = True
    standin.register_host(mapping.address, PAGE, 0, read_only=True)
    standin.unregister_host(mapping.address, 0)


def test_unregistering_under_a_copy_is_a_violation(channel):
    mapping = mapped(channel)
    with installed(polls=None) as stand_in:
        stand_in.register_host(mapping.address, PAGE, 0)
        host = torch.from_numpy(np.ndarray(8, np.uint8, mapping.buffer))
        stand_in.copy(stand_in.tensor(torch.zeros(8, dtype=torch.uint8)), host)
        stand_in.unregister_host(mapping.address, 0)
        with pytest.raises(AssertionError, match="while a copy was on its way"):
            stand_in.check()


def test_a_failed_copy_is_told_by_its_event(lazy, channel):
    mapping = mapped(channel)
    lazy.fail_copies = 700
    stream, event = lazy.new_stream(0), lazy.new_event(0)
    target = lazy.tensor(torch.zeros(8, dtype=torch.uint8))
    with lazy.on(stream):
        lazy.copy(target, torch.from_numpy(np.ndarray(8, np.uint8, mapping.buffer)))
    lazy.record(event, stream)
    with pytest.raises(shmtensor.CudaError, match="cudaErrorIllegalAddress"):
        lazy.wait(event)


def test_device_memory_is_shared_with_other_processes_only(standin):
    address = standin.allocate(64, 0)
    handle = standin.memory_handle(address, 0)
    with pytest.raises(shmtensor.CudaError, match="201"):
        standin.open_memory(handle, 0)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with installed() as other:
            at = other.open_memory(handle, 0)
            other.tensor_at(at, 64, 0, None).fill_(5)
            try:
                other.open_memory(handle, 0)
            except shmtensor.CudaError as error:
                os.write(writing, str(error.number).encode())
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 10) == b"208"
    os.close(reading)
    os.waitpid(child, 0)
    tensor = standin.tensor_at(address, 64, 0, None)
    assert isinstance(tensor, DeviceTensor)
    assert tensor.device.type == "cuda"
    assert standin.host(tensor).eq(5).all()
    del tensor
    standin.free(address, 0)


def test_events_are_shared_with_other_processes(standin):
    event, stream = standin.new_event(0, interprocess=True), standin.new_stream(0)
    standin.record(event, stream)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        other = StandIn()
        seen = other.open_event(standin.event_handle(event), 0)
        os.write(writing, b"yes" if other.is_done(seen) else b"no")
        other.wait(seen)
        os.write(writing, b"done")
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 10) == b"no"
    standin.wait(event)
    assert os.read(reading, 10) == b"done"
    os.close(reading)
    os.waitpid(child, 0)


def test_a_forked_child_has_no_cuda(standin):
    child = os.fork()
    if not child:
        try:
            standin.new_stream(0)
        except shmtensor.CudaError as error:
            os._exit(error.number)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_pending_copies_hold_until_their_event(standin):
    class Held:
        pass

    stream, event, held, told = standin.new_stream(0), standin.new_event(0), Held(), []
    standin.record(event, stream)
    pending = Pending()
    pending.add(event, held, lambda: told.append(1))
    assert [pending.poll(), pending.poll(), told] == [1, 1, []]
    assert pending.poll() == 0
    assert told == [1]


def add_at(cuda, at):
    """Let a copy be added by another thread, so to speak, at a step of letting go of the last one. Whether there was
    such a step; and whether the owner lived as long as the copy, and no longer."""

    class Owner:
        pass

    def event():
        made = cuda.new_event(0)
        cuda.record(made, stream)
        return made

    def trace(frame, *_):
        if frame.f_code is Pending.let_go.__code__ and next(steps) == at:
            pending.add(late, None)
        return trace

    owner, stream, steps = Owner(), cuda.new_stream(0), itertools.count()
    pending, seen = Pending(owner), weakref.ref(owner)
    pending.add(event(), None)
    cuda.run_all()
    late, before = event(), sys.gettrace()
    sys.settrace(trace)
    try:
        pending.poll()
    finally:
        sys.settrace(before)
    added = len(pending) == 1
    del owner
    lived = seen() is not None
    cuda.run_all()
    Pending().poll()  # some other owner's
    return added, (lived, len(pending), seen())


def test_a_copy_that_is_added_while_the_last_one_goes_keeps_its_owner(lazy):
    for at in itertools.count():
        added, found = add_at(lazy, at)
        if not added:
            break
        assert found == (True, 0, None), f"step {at}"
    assert at > 5


def test_finishing_waits(lazy):
    stream, event = lazy.new_stream(0), lazy.new_event(0)
    lazy.record(event, stream)
    pending = Pending()
    pending.add(event, None)
    assert pending.poll() == 1
    pending.finish()
    assert len(pending) == 0
    assert lazy.host_waits == 1
