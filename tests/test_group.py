"""Flat containers of tensors that are sent again: the same bytes and the same description as by the walk."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shmtensor import Publisher, Subscriber, hot
from shmtensor.views import group, moves
from shmtensor.views.pack import Packed, Unpacker, pack

from .test_hot import DTYPES, noise, same

pytestmark = pytest.mark.skipif(not hot.BUILT, reason="shmtensor.hot._hot is not built, or SHMTENSOR_PURE is set")
PATIENCE = 60


@pytest.fixture(autouse=True)
def nothing_known():
    pack(torch.ones(1))  # before the first tensor of a process, nothing is known to be one
    group._groups.clear()


def payload_of(packed) -> np.ndarray:
    payload = np.zeros(packed.nbytes + 64, np.uint8)
    start = -payload.ctypes.data % 64
    payload = payload[start : start + packed.nbytes]
    packed.copy_into(payload)
    return payload


def by_walk(value):
    """Packed without what is known."""
    known = dict(group._groups)
    group._groups.clear()
    packed = pack(value)
    group._groups.clear()
    group._groups.update(known)
    assert type(packed) is Packed
    return packed


def check(value, *, known: bool) -> None:
    packed, wanted = pack(value), by_walk(value)
    assert (type(packed) is group.PackedGroup) is known
    assert (packed.static, packed.dynamic, packed.nbytes) == (wanted.static, wanted.dynamic, wanted.nbytes)
    assert bytes(payload_of(packed)) == bytes(payload_of(wanted))


PLAIN = [dtype for dtype in DTYPES if not dtype.is_complex]


@pytest.mark.parametrize("make", [dict, list, tuple], ids=["dict", "list", "tuple"])
def test_every_dtype_and_container(make):
    def value(seed: int):
        tensors = [noise((3, 4 + index % 3), dtype, seed + index) for index, dtype in enumerate(PLAIN)]
        return {str(index): tensor for index, tensor in enumerate(tensors)} if make is dict else make(tensors)

    check(value(0), known=False)
    for seed in (100, 200):
        check(value(seed), known=True)


def test_no_two_dtypes_look_the_same():
    for dtype in PLAIN:
        group._groups.clear()
        pack([noise((4,), dtype, 1), noise((4,), dtype, 2)])
        for other in DTYPES:
            check([noise((4,), other, 3), noise((4,), other, 4)], known=other == dtype)
            group._groups[list, 2] = group._groups[list, 2][:1]


def test_what_differs_goes_by_the_walk():
    def value():
        return {"a": torch.rand(4, 6), "b": torch.rand(5), "c": torch.ones(2, dtype=torch.int32)}

    check(value(), known=False)
    check(value(), known=True)

    class Other(torch.Tensor):
        pass

    base = torch.rand(64)
    for what, name in (
        (torch.rand(6, 4), "a"), (torch.rand(6, 4).t(), "a"), (torch.rand(4, 12)[:, ::2], "a"),
        (torch.rand(4, 6).half(), "a"), (np.zeros((4, 6), "f4"), "a"), (1.5, "b"),
        (torch.empty(0), "b"), (torch.rand(5).to_sparse(), "b"),
        (torch.rand(1).expand(5), "b"),
        (torch.complex(torch.rand(5), torch.rand(5)).conj().imag, "b"),
        (torch.complex(torch.rand(4, 6), torch.rand(4, 6)).conj(), "a"),
    ):  # fmt: skip
        check({**value(), name: what}, known=False)
        group._groups[next(iter(group._groups))] = next(iter(group._groups.values()))[:1]
    tied = {**value(), "a": base[:24].view(4, 6), "b": base[20:25]}
    check(tied, known=False)
    check({**value(), "a": base[:24].view(4, 6), "b": base[24:29]}, known=True)  # side by side is not tied
    check({**value(), "b": torch.rand(5, requires_grad=True)}, known=True)
    check({"b": torch.rand(5), "a": torch.rand(4, 6), "c": torch.ones(2, dtype=torch.int32)}, known=False)
    with pytest.raises(TypeError):
        pack({**value(), "a": torch.rand(4, 6).as_subclass(Other)})
    check({**value(), "a": torch.nn.Parameter(torch.rand(4, 6))}, known=False)
    check(value(), known=True)


def test_large_and_small_together():
    def value():
        sizes = (7, moves.SMALL // 4, moves.SMALL // 4 + 1, moves.LARGE, 3, 1 << 20)
        return [torch.rand(size) for size in sizes]

    check(value(), known=False)
    check(value(), known=True)


def test_many_looks_of_the_same_keys():
    for _ in range(3):
        for size in range(1, 10):
            value = {"x": torch.rand(size), "y": torch.rand(size + 1)}
            packed = pack(value)
            got = Unpacker(packed.static)(payload_of(packed), b"", readonly=False)[0]
            assert all(same(got[name], value[name]) for name in value)
    assert sum(map(len, group._groups.values())) == group._MOST_LOOKS


def test_a_group_checks_what_it_is_given():
    tensors = [torch.rand(4), torch.rand(5)]
    made = hot.module().Group(tensors, [0, 64], 1 << 16)
    addresses = made.match(tensors)
    assert np.frombuffer(addresses, "u8").tolist() == [tensor.data_ptr() for tensor in tensors]
    with pytest.raises(ValueError, match="too small"):
        made.copy(addresses, np.zeros(83, np.uint8))
    with pytest.raises(ValueError, match="other tensors"):
        made.copy(addresses[:-8], np.zeros(84, np.uint8))
    made.copy(addresses, np.zeros(84, np.uint8))
    assert made.match(tensors[:1]) is None
    assert made.match([tensors[0], tensors[0]]) is None
    for wrong in ([[torch.rand(2)], [0, 1]], [[torch.rand(2, 2).t()], [0]], [[1], [0]], [[torch.rand(2)], [-1]]):
        with pytest.raises(ValueError):
            hot.module().Group(*wrong, 1 << 16)
    with pytest.raises(TypeError):
        made.match(tuple(tensors))


def test_between_endpoints(channel):
    with Publisher(channel, slots=3) as pub, Subscriber(channel) as sub:
        kept = []
        for step in range(12):
            value = {f"layer.{index}": torch.full((index % 5 + 1, 3), step + index / 100) for index in range(60)}
            pub.send(value)
            got = sub.recv(timeout=PATIENCE).value
            assert all(same(got[name], value[name]) for name in value)
            kept = [*kept[-1:], (got, value)]
            assert all(same(old[name], was[name]) for old, was in kept for name in was)
