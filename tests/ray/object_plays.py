"""What the driver of `test_objects.py` does, and the actors that it does it with."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import ray
import ray.exceptions
import torch

import shmtensor.ray

from ..waiting import wait_until

MIB = 1 << 20
LARGE = 8 * MIB
MOST = 60 * MIB
"""An object that fits into a node's object store beside a few small ones."""


def tensors() -> dict[str, torch.Tensor]:
    """Of many kinds. The large ones lie in the object store, the small ones go along with the reference."""
    large = torch.arange(LARGE // 4, dtype=torch.int32)
    return {
        "large": large,
        "large slice": large[1000:-1000],
        "large steps": large[::2],
        "channels last": torch.rand(4, 3, 128, 128).to(memory_format=torch.channels_last),
        "transposed": torch.rand(400, 300).T,
        "bfloat16": torch.rand(300_000).to(torch.bfloat16),
        "float8": torch.rand(300_000).to(torch.float8_e4m3fn),
        "complex": torch.rand(100_000, dtype=torch.complex64).conj(),
        "small": torch.arange(6).reshape(2, 3),
        "odd": torch.arange(7, dtype=torch.uint8),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "sparse": torch.eye(300).to_sparse(),
        "csr": torch.eye(300).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.rand(1000), 0.1, 3, torch.qint8),
    }


def pickled() -> dict[str, torch.Tensor]:
    """Those that are no views. They are large enough for the object store."""
    noted = torch.arange(LARGE // 8)
    noted_parameter = torch.nn.Parameter(torch.rand(LARGE // 4))
    noted.note = noted_parameter.note = "text"  # type: ignore[attr-defined]
    return {
        "grad": torch.rand(LARGE // 4, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.rand(1000, LARGE // 4000).T),
        "frozen": torch.nn.Parameter(torch.arange(LARGE // 8), requires_grad=False),
        "noted": noted,
        "noted parameter": noted_parameter,
        "meta": torch.empty(3, device="meta"),
    }


def is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    if (type(left), left.dtype, left.shape, left.layout) != (type(right), right.dtype, right.shape, right.layout):
        return False
    if left.device.type == "meta":
        return right.device.type == "meta"
    if left.layout != torch.strided:
        left, right = left.to_dense(), right.to_dense()
    if left.is_quantized:
        left, right = left.dequantize(), right.dequantize()
    if left.dtype == torch.float8_e4m3fn:
        left, right = left.view(torch.uint8), right.view(torch.uint8)
    return torch.equal(left, right)


def mapping_of(address: int) -> str:
    """The file that is mapped at that address, by its name."""
    with open("/proc/self/maps") as lines:
        for line in lines:
            place, _, _, _, _, *name = line.split()
            first, last = (int(it, 16) for it in place.split("-"))
            if first <= address < last:
                return " ".join(name)
    return ""


def is_view(tensor: torch.Tensor) -> bool:
    """Whether its bytes lie in Ray's object store."""
    return tensor.layout == torch.strided and "plasma" in mapping_of(tensor.data_ptr())


@ray.remote(num_cpus=0)
class Reader:
    """Gets tensors on some node."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def compare(self, found: dict[str, torch.Tensor]) -> dict[str, tuple[bool, bool]]:
        torch.manual_seed(0)
        expected = tensors()
        for name in ("channels last", "transposed"):
            assert found[name].stride() == expected[name].stride()
        return {name: (is_same(found[name], expected[name]), is_view(found[name])) for name in expected}

    def keep(self, tensor: torch.Tensor) -> tuple[bool, int]:
        """Keep a slice, and nothing else."""
        self.kept.append(tensor[-10:])
        return is_view(tensor), int(tensor.sum())

    def look(self) -> list[list[int]]:
        return [tensor.tolist() for tensor in self.kept]

    def drop(self) -> None:
        self.kept.clear()

    def give(self) -> torch.Tensor:
        return torch.full((LARGE,), 7, dtype=torch.uint8)

    def pid(self) -> int:
        return os.getpid()


def has_room() -> bool:
    """Whether the driver's store has room for `MOST`: what has none there goes to a file elsewhere."""
    found = ray.get(ray.put(np.zeros(MOST, np.uint8)))
    return mapping_of(found.ctypes.data).startswith("/dev/shm/")


def objects(nodes: Any) -> None:
    """Values arrive as they were; dense ones are views on their node, and on the other one views of Ray's copy."""
    torch.manual_seed(0)
    shmtensor.ray.register()
    values = ray.put(tensors())
    for node in (nodes.head, nodes.there):
        reader = Reader.options(**nodes.on(node)).remote()
        found = ray.get(reader.compare.remote(values))
        assert all(same for same, _ in found.values()), found
        views = {name for name, (_, is_there) in found.items() if is_there}
        assert {"large", "large slice", "channels last", "transposed", "bfloat16", "float8", "small"} <= views, views
        back = ray.get(reader.give.remote())  # by the hook of the worker's process
        assert is_view(back)
        assert int(back.sum(dtype=torch.int64)) == 7 * LARGE
        ray.kill(reader)
    here = ray.get(ray.put(torch.arange(6)))
    assert here.tolist() == list(range(6))
    for name, tensor in pickled().items():
        got = ray.get(ray.put(tensor))
        assert is_same(tensor, got), name
        assert not is_view(got), name
        assert got.stride() == tensor.stride(), name
        assert got.requires_grad == tensor.requires_grad
        assert getattr(got, "note", "") == getattr(tensor, "note", "")
    a_slice = torch.zeros(32 * LARGE, dtype=torch.uint8)[:MIB]  # its storage would not fit
    assert torch.equal(ray.get(ray.put(a_slice)), a_slice)
    shmtensor.ray.unregister()
    assert not is_view(ray.get(ray.put(torch.zeros(LARGE, dtype=torch.uint8))))


def models(nodes: Any) -> None:
    """Who gets a model has parameters of its own, which stay tied; its buffers are views."""
    shmtensor.ray.register()
    try:
        model = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.BatchNorm1d(LARGE // 8))
        model.tied = model[0].weight
        ref = ray.put(model)
        first, second = ray.get(ref), ray.get(ref)
        assert first.tied is first[0].weight
        for parameter in first.parameters():
            assert not is_view(parameter)
            parameter.grad = torch.ones_like(parameter)
        torch.optim.SGD(first.parameters(), lr=1.0).step()
        for name, parameter in second.named_parameters():
            assert torch.equal(parameter, model.get_parameter(name)), name
            assert not torch.equal(parameter, first.get_parameter(name)), name
        assert is_view(first[1].running_mean)
    finally:
        shmtensor.ray.unregister()


def registers(nodes: Any) -> None:
    """What was registered before is there again afterwards; what was registered since stays."""
    dispatch = ray.cloudpickle.CloudPickler.dispatch
    before = dispatch.get(torch.Tensor)
    kept, value = [], torch.arange(3)

    def noting(tensor: torch.Tensor) -> list[int]:
        kept.append(len(tensor))
        return tensor.tolist()  # type: ignore[no-any-return]

    ray.util.register_serializer(torch.Tensor, serializer=noting, deserializer=torch.tensor)
    for _ in range(2):
        shmtensor.ray.register()
    assert torch.equal(ray.get(ray.put(value)), value)
    assert not kept
    for _ in range(2):
        shmtensor.ray.unregister()
    assert torch.equal(ray.get(ray.put(value)), value)
    assert kept == [3]
    assert torch.nn.Parameter not in dispatch
    shmtensor.ray.register()
    ray.util.register_serializer(torch.Tensor, serializer=noting, deserializer=torch.tensor)
    shmtensor.ray.unregister()
    ray.put(value)
    assert kept == [3, 3]
    ray.util.deregister_serializer(torch.Tensor)
    assert dispatch.get(torch.Tensor) is before is None


def leases(nodes: Any) -> None:
    """A view holds the object when its reference is gone; nothing else does, also if the process is killed."""
    shmtensor.ray.register()
    try:
        wait_until(has_room)
        for way in ("dropped", "killed"):
            reader = Reader.options(**nodes.on(nodes.head)).remote()
            pid = ray.get(reader.pid.remote())
            tensor = torch.full((MOST // 2 // 8,), 3)
            assert ray.get(reader.keep.remote(ray.put(tensor))) == (True, 3 * len(tensor))
            for _ in range(10):  # more than there is room for, one after the other
                ray.put(np.full(MOST // 3, 9, np.uint8))
            assert not has_room()
            assert ray.get(reader.look.remote()) == [[3] * 10]
            if way == "dropped":
                ray.get(reader.drop.remote())
            else:
                os.kill(pid, signal.SIGKILL)
            wait_until(has_room)
            ray.kill(reader)
        own = ray.get(ray.put(torch.full((MOST // 2,), 5, dtype=torch.uint8)))
        part = own[::2].view(2, -1)
        del own
        for _ in range(10):
            ray.put(np.full(MOST // 3, 9, np.uint8))
        assert not has_room()
        assert (int(part.min()), int(part.max())) == (5, 5)
        del part
        wait_until(has_room)
    finally:
        shmtensor.ray.unregister()


def owner_dies(nodes: Any) -> None:
    """A tensor that a task has returned outlives the process that made it."""
    reader, giver = (Reader.options(**nodes.on(nodes.head)).remote() for _ in range(2))
    kept = ray.get(giver.give.remote())
    assert is_view(kept)
    assert ray.get(reader.keep.remote(giver.give.remote())) == (True, 7 * LARGE)
    os.kill(ray.get(giver.pid.remote()), signal.SIGKILL)
    wait_until(lambda: not is_alive(giver))
    assert int(kept.sum(dtype=torch.int64)) == 7 * LARGE
    assert ray.get(reader.look.remote()) == [[7] * 10]
    ray.kill(reader)
    del kept
    wait_until(has_room)


def is_alive(actor: Any) -> bool:
    try:
        ray.get(actor.pid.remote())
    except ray.exceptions.RayActorError:
        return False
    return True
