"""By which call bytes are copied, and `native/copies.c`, past the caches: every byte, and none beside them."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shmtensor import CheckpointWriter, Publisher, Subscriber, load_checkpoint, native
from shmtensor.checkpoint import names
from shmtensor.codec import copies
from shmtensor.codec.numpy import address_of

from ..implementations import only

compiled = only("compiled", "the reference copies with memmove")

VECTOR = 32
ROOM = 8192
NOISE = np.random.default_rng(0).integers(1, 256, ROOM + 2 * VECTOR, np.uint8)


def check(copy, to: int, source: int, nbytes: int) -> None:
    """Copy into zeros, and compare the bytes on both sides as well."""
    memory = np.zeros(ROOM + 4 * VECTOR, np.uint8)
    start = -address_of(memory) % VECTOR + VECTOR + to
    begin = -address_of(NOISE) % VECTOR + source
    copy(address_of(memory) + start, address_of(NOISE) + begin, nbytes)
    expected = np.zeros_like(memory)
    expected[start : start + nbytes] = NOISE[begin : begin + nbytes]
    assert np.array_equal(memory, expected), (to, source, nbytes)


@compiled
@pytest.mark.parametrize("nbytes", [0, 1, 31, 32, 33, 127, 128, 129, 160, 256, 257, 4097])
def test_every_alignment(nbytes):
    stream = native.module.stream
    for to in range(VECTOR):
        for source in range(VECTOR):
            check(stream, to, source, nbytes)


@compiled
@given(st.integers(0, VECTOR - 1), st.integers(0, VECTOR - 1), st.integers(0, ROOM - VECTOR))
@settings(max_examples=200, deadline=None)
def test_every_size(to, source, nbytes):
    check(native.module.stream, to, source, nbytes)


@compiled
def test_several_threads_at_once():
    """The interpreter lock is not held: each thread has its own part."""
    stream, size, count = native.module.stream, (4 << 20) + 12345, 4
    source = np.random.default_rng(1).integers(0, 256, size * count, np.uint8)
    target = np.zeros(size * count, np.uint8)

    def part(index: int) -> None:
        stream(address_of(target) + index * size, address_of(source) + index * size, size)

    threads = [threading.Thread(target=part, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert np.array_equal(target, source)


@compiled
@pytest.mark.parametrize("arguments", [(), (0, 0), (0, 0, 0, 0), (0, None, 0), (0, 0, -1), (0, 0, 1 << 65)])
def test_wrong_arguments(arguments):
    with pytest.raises((TypeError, OverflowError)):
        native.module.stream(*arguments)


def test_what_is_small_is_copied_the_usual_way():
    assert copies.mover(0) is copies.move
    assert copies.mover(copies.FAR - 1) is copies.move


@compiled
def test_what_is_large_goes_past_the_caches():
    assert 1 << 20 <= copies.FAR <= native.module.CACHE_BYTES
    assert copies.mover(copies.FAR) == native.module.stream


@only("pure", "the compiled module copies past the caches")
def test_without_the_compiled_module_everything_is_copied_the_usual_way():
    code = "from shmtensor.codec import copies; print(copies.mover(1 << 40) is copies.move)"
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("True", "")


@pytest.fixture
def counted(monkeypatch):
    """How many bytes each copy past the caches had; it begins where a test can afford it."""
    sizes: list[int] = []
    real = copies.move_far

    def counting(to, source, nbytes):
        sizes.append(nbytes)
        real(to, source, nbytes)

    monkeypatch.setattr(copies, "move_far", counting)
    monkeypatch.setattr(copies, "FAR", 65 << 10)
    monkeypatch.setattr(copies, "LARGE", 66 << 10)
    return sizes


SIZE = 300_003  # more than what is copied at once


def bytes_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)


VALUES = {
    "tensor": lambda: torch.from_numpy(bytes_of(0)),
    "parameter": lambda: torch.nn.Parameter(torch.from_numpy(bytes_of(0)), requires_grad=False),
    "array": lambda: bytes_of(0),
    "read-only array": lambda: np.frombuffer(bytes_of(0).tobytes(), np.uint8),
    "structured array": lambda: bytes_of(0)[: SIZE // 3 * 3].view([("a", ">u2"), ("b", "u1")]),
    "dict": lambda: {"a": torch.from_numpy(bytes_of(0)), "b": torch.ones(3), "c": torch.from_numpy(bytes_of(1))},
    "mixed": lambda: [bytes_of(0), 7, {"x": torch.from_numpy(bytes_of(1))[1:]}],
}


@pytest.fixture
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("name", VALUES)
def test_sent_values_are_the_same(channel, counted, name):
    with Publisher(channel, slots=4) as pub, Subscriber(channel) as sub:
        for _ in range(3):  # described anew, and as one seen before
            pub.send(VALUES[name]())
            with sub.recv(timeout=60) as msg:
                assert leaves(msg.value) == leaves(VALUES[name]())
    assert len(counted) >= 3


def leaves(value) -> list:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [each for child in value for each in leaves(child)]
    if isinstance(value, torch.Tensor):
        value = value.detach().numpy()
    return [value.tobytes() if isinstance(value, np.ndarray) else value]


def test_torch_s_threads_keep_what_they_share(channel, counted, monkeypatch):
    monkeypatch.setattr(copies, "_torch_threads", lambda: 3)
    with Publisher(channel, slots=4) as pub, Subscriber(channel) as sub:
        for name in ("tensor", "dict"):
            pub.send(VALUES[name]())
            with sub.recv(timeout=60) as msg:
                assert leaves(msg.value) == leaves(VALUES[name]())
    assert counted == []
    assert copies.goes_by_threads(copies.LARGE)
    assert not copies.goes_by_threads(copies.LARGE - 1)
    monkeypatch.setattr(copies, "_torch_threads", lambda: 2)
    assert not copies.goes_by_threads(copies.LARGE)


def test_saved_values_are_the_same(tmp_path, channel, counted, monkeypatch):
    monkeypatch.setattr(names, "PREFIX", channel)
    state = {"a": torch.from_numpy(bytes_of(0)), "b": [bytes_of(1), 7], "c": torch.from_numpy(bytes_of(2))[1:]}
    with CheckpointWriter(tmp_path, memory="8MiB") as writer:
        path = writer.save(state).durable.result(120).path
    assert leaves(load_checkpoint(path, verify="all")) == leaves(state)
    assert sum(counted) >= 3 * SIZE - 1
