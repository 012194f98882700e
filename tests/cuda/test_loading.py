"""States straight to a device: file -> pinned buffers -> device. Against the stand-in for CUDA."""

from __future__ import annotations

import collections
import copy
import ctypes
import gc
import os
import threading

import numpy as np
import pytest
import torch

import shmtensor
from shmtensor import ArgumentError, ArgumentTypeError, CheckpointError, CudaError, ResourceError, load_checkpoint
from shmtensor.checkpoint import devices, reading, remote
from shmtensor.checkpoint.convert import encrypt_file
from shmtensor.checkpoint.keys import MasterKey

from ..checkpoint.servers import Server
from ..checkpoint.state_files import SUFFIX, mixed_state, same, save
from .standin import DeviceTensor

MIB = 1 << 20
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantize:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantize:DeprecationWarning"),
]


@pytest.fixture
def small_pieces(monkeypatch):
    """Buffers that are used many times even for small files."""
    monkeypatch.setattr(devices, "PIECE", 1 << 16)
    monkeypatch.setattr(reading, "PIECE", 1 << 16)


def on_host(value):
    """The same state in host memory, where the device has done all that was asked of it: nothing is waited for."""
    if isinstance(value, DeviceTensor):
        return value.as_subclass(torch.Tensor)
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, child in value.items():
            made[key] = on_host(child)
        return made
    if type(value) in (list, tuple):
        return type(value)(map(on_host, value))
    return value


def plain(count: int = 6, rows: int = 300) -> dict:
    generator = torch.Generator().manual_seed(1)
    return {
        "w": [torch.randn(rows, 257, generator=generator) for _ in range(count)],
        "small": [torch.randn(3, generator=generator).to(torch.bfloat16) for _ in range(40)],
        "step": 7,
    }


@pytest.mark.parametrize("format", ["safetensors", "torch", "npz"])
def test_every_kind_of_value_comes_as_it_does_to_the_host(tmp_path, standin, small_pieces, format):
    state = mixed_state() | {"big": torch.arange(100_000).reshape(500, 200)}
    path = save(state, tmp_path / f"a{SUFFIX[format]}", format)
    expected = load_checkpoint(path)
    found = load_checkpoint(path, device="cuda")
    assert isinstance(found["big"], DeviceTensor)
    assert same(on_host(found), expected)


def test_nothing_is_copied_late_overwritten_or_left_pinned(tmp_path, standin, small_pieces):
    standin.polls = None  # copies run when the host waits for them, at the last moment
    path = save(plain(), tmp_path / "a.safetensors")
    for readers in (1, 3, 8):
        found = load_checkpoint(path, device="cuda:0", readers=readers)
        assert same(on_host(found), plain())
        assert not standin.registered
        assert not standin.flying
    assert standin.pinned_copies > 3 * 6 * 300 * 257 * 4 // (1 << 16)
    assert not standin.pageable_copies


def test_host_memory_is_bounded_by_the_buffers(tmp_path, standin):
    nbytes, readers = 160 * MIB, 2
    path = save({"a": torch.ones(nbytes // 8), "b": torch.ones(nbytes // 8)}, tmp_path / "a.safetensors")

    def peak(function) -> int:
        """Bytes by which a call raises the memory of this process at its highest."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # else what was freed before is there, and can be used without being seen
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # the highest becomes the present one
        before = high_water()
        function()
        return high_water() - before

    load_checkpoint(path, device="cuda", keys="b", readers=readers)  # imports
    # the stand-in's device memory is host memory as well
    assert peak(lambda: load_checkpoint(path, device="cuda", readers=readers)) < nbytes + 60 * MIB
    assert peak(lambda: [tensor.clone() for tensor in load_checkpoint(path, map=False).values()]) > 1.9 * nbytes


def high_water() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


def test_tensors_that_shared_memory_share_it_on_the_device(tmp_path, standin):
    weight = torch.arange(24.0).reshape(4, 6)
    path = save({"w": weight, "tied": weight, "rows": weight[1:3], "array": np.ones(3)}, tmp_path / "a.safetensors")
    found = load_checkpoint(path, device="cuda")
    found["w"][1] = 9
    assert found["tied"].data_ptr() == found["w"].data_ptr()
    assert standin.host(found["rows"])[0].tolist() == [9.0] * 6
    assert type(found["array"]) is np.ndarray


@pytest.mark.parametrize("format", ["safetensors", "torch", "npz"])
def test_keys_slices_and_progress(tmp_path, standin, small_pieces, format):
    path = save({"model": plain(), "x": torch.ones(5)}, tmp_path / f"a{SUFFIX[format]}", format)
    seen: list[tuple[int, int]] = []
    lock = threading.Lock()

    def progress(done, total):
        with lock:
            seen.append((done, total))

    slices = {"model.w.0": np.s_[10:20], "model.w.1": np.s_[:, 3]}
    found = load_checkpoint(path, device="cuda", keys="model", slices=slices, progress=progress)
    expected = load_checkpoint(path, keys="model", slices=slices)
    assert same(on_host(found), expected)
    assert isinstance(found["model"]["w"][0], DeviceTensor)
    assert max(seen) == (4 * 300 * 257 * 4 + 40 * 6, 4 * 300 * 257 * 4 + 40 * 6)
    whole = load_checkpoint(path, device="cuda", slices=slices, verify="all")
    assert same(on_host(whole["model"]), expected["model"])


def test_encrypted_files_urls_and_handles(tmp_path, standin, small_pieces):
    path = save(plain(), tmp_path / "a.safetensors")
    sealed = encrypt_file(path, None, MasterKey.of(b"k" * 32))
    assert same(on_host(load_checkpoint(sealed, key=b"k" * 32, device="cuda")), plain())
    import fsspec

    fsspec.filesystem("memory").pipe("/devices/a.safetensors", path.read_bytes())
    try:
        assert same(on_host(load_checkpoint("memory://devices/a.safetensors", device="cuda")), plain())
    finally:
        fsspec.filesystem("memory").rm("/devices", recursive=True)
    with shmtensor.open_checkpoint(path, device="cuda") as checkpoint:
        for index in (np.s_[...], np.s_[5:9], np.s_[:, 1], np.s_[5:5]):
            part = checkpoint["w.1"].read(index)
            assert isinstance(part, DeviceTensor)
            assert torch.equal(on_host(part), plain()["w"][1][index])
    with pytest.raises(ArgumentError, match="arrays=True"):
        shmtensor.open_checkpoint(path, arrays=True, device="cuda")


def test_a_file_of_torchs_own(tmp_path, standin):
    weight = torch.randn(40, 50)
    state = {"w": weight, "tied": weight[2:], "p": torch.nn.Parameter(torch.ones(3)), "n": [1, (torch.ones(2), "x")]}
    torch.save(state, tmp_path / "a.pt")
    found = load_checkpoint(tmp_path / "a.pt", device="cuda")
    assert same(on_host({"w": found["w"], "tied": found["tied"], "n": found["n"]}), {
        "w": weight, "tied": weight[2:], "n": [1, (torch.ones(2), "x")]})  # fmt: skip
    assert found["tied"].data_ptr() == found["w"][2:].data_ptr()
    assert isinstance(found["p"], torch.nn.Parameter)


Pair = collections.namedtuple("Pair", "first second")


def test_containers_of_a_file_of_torchs_own(tmp_path, standin):
    """Those that were one object are one, and are made once; tensors are found in every kind of container."""
    one = torch.ones(2)
    state = {"a": [one], "d": collections.OrderedDict(x=(one,)), "p": Pair(one, [torch.zeros(1)]), "s": {one}}
    state |= {"b": state["a"], "e": state["d"], "q": state["p"], "size": torch.Size([3])}
    deep = [torch.ones(2)]
    for _ in range(60):
        deep = [deep, deep]
    torch.save(state | {"deep": deep}, tmp_path / "a.pt")
    with torch.serialization.safe_globals([Pair]):
        found = load_checkpoint(tmp_path / "a.pt", device="cuda")
    for name, other in ("ab", "de", "pq"):
        assert found[name] is found[other]
    assert type(found["p"]) is Pair
    tensors = [found["a"][0], found["d"]["x"][0], found["p"].first, *found["s"]]
    assert isinstance(tensors[0], DeviceTensor)
    assert all(tensor is tensors[0] for tensor in tensors)
    assert isinstance(found["p"].second[0], DeviceTensor)
    assert found["size"] == torch.Size([3])
    inner = found["deep"]
    for _ in range(60):
        assert inner[0] is inner[1]
        inner = inner[0]
    assert isinstance(inner[0], DeviceTensor)


def test_a_module_on_the_device_is_filled_where_it_is_after_the_work_on_it(tmp_path, standin, small_pieces):
    expected = torch.nn.Linear(300, 257)
    path = save(expected.state_dict(), tmp_path / "a.safetensors")
    model = torch.nn.Linear(300, 257)
    for name in ("weight", "bias"):
        before = standin.tensor(getattr(model, name).detach())
        delattr(model, name)
        model.register_buffer(name, before)
    old, seen = standin.host(model.weight), []
    address = model.weight.data_ptr()
    standin.enqueue(lambda: seen.append(standin.host(model.weight)))  # a step that is not over
    shmtensor.load_into(model, path)
    assert torch.equal(seen[0], old)
    assert model.weight.data_ptr() == address
    assert torch.equal(standin.host(model.weight), expected.weight)
    assert torch.equal(standin.host(model.bias), expected.bias)
    assert standin.pinned_copies >= 5
    assert not standin.pageable_copies


def test_what_fails_is_an_error_and_leaves_nothing_pinned(tmp_path, standin, small_pieces):
    path = save(plain(), tmp_path / "a.safetensors")
    standin.fail_copies = 700
    with pytest.raises(CudaError, match="700"):
        load_checkpoint(path, device="cuda", readers=3)
    assert not standin.registered
    standin.fail_copies = 0
    standin.refuse_memory = 2
    with pytest.raises(CudaError, match="allocate"):
        load_checkpoint(path, device="cuda")
    with pytest.raises(CudaError, match="allocate"):  # no older checkpoint is taken for it
        shmtensor.load_newest(tmp_path, device="cuda")
    standin.refuse_memory = 0
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    for readers in (1, 3, 8):
        with pytest.raises(CheckpointError, match="damaged"):
            load_checkpoint(path, device="cuda", readers=readers)
    assert same(on_host(load_checkpoint(path, device="cuda", verify=False)["step"]), 7)
    assert not standin.registered


@pytest.mark.parametrize("readers", [1, 4])
@pytest.mark.parametrize("after", [1, 5])
def test_ctrl_c_between_reads_and_copies_leaves_nothing_pinned(tmp_path, standin, small_pieces, readers, after):
    path = save(plain(), tmp_path / "a.safetensors")
    reports = []

    def interrupt(done, total):
        reports.append(done)
        if len(reports) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_checkpoint(path, device="cuda", readers=readers, progress=interrupt)
    assert not standin.registered
    assert same(on_host(load_checkpoint(path, device="cuda", readers=readers)), plain())


def test_a_server_that_fails_while_a_device_is_filled(tmp_path, standin, small_pieces, monkeypatch):
    """A fault that passes is not seen, one that stays is an error and leaves nothing pinned."""
    monkeypatch.setattr(remote, "_PAUSE", 0.001)
    state = {"w": torch.randn(1000, 700), "step": 7}
    save(state, tmp_path / "a.safetensors")
    left = [2]

    def fault(handler, _path, start, data):
        if handler.command == "HEAD" or not left[0] or start < 10_000:
            return data
        left[0] -= 1
        return handler.send_error(503)

    with Server(tmp_path) as server:
        server.fault = fault
        assert same(on_host(load_checkpoint(f"{server.url}/a.safetensors", device="cuda")), state)
        assert left == [0]
        left[0] = 1 << 30
        with pytest.raises(ResourceError, match="tried 5 times"):
            load_checkpoint(f"{server.url}/a.safetensors", device="cuda")
    assert not standin.registered


def test_a_reader_that_fails_ends_those_that_wait_for_its_chunk(tmp_path, standin, small_pieces, monkeypatch):
    path = save({"w": torch.ones(1 << 20)}, tmp_path / "a.safetensors")  # one tensor, which all readers share
    fill = reading.Files.fill

    def fail(self, memory, file, offset, names):
        if offset > 1 << 20:
            raise CheckpointError("there is nothing")
        return fill(self, memory, file, offset, names)

    monkeypatch.setattr(reading.Files, "fill", fail)
    with pytest.raises(CheckpointError, match="there is nothing"):
        load_checkpoint(path, device="cuda", readers=8)
    assert not standin.registered


def test_memory_that_cannot_be_pinned_is_copied_all_the_same(tmp_path, standin, small_pieces):
    standin.refuse_registration = 2
    path = save(plain(), tmp_path / "a.safetensors")
    assert same(on_host(load_checkpoint(path, device="cuda")), plain())
    assert standin.pageable_copies


def test_what_was_in_memory_after_a_crash_goes_to_the_device(tmp_path, standin, monkeypatch):
    from shmtensor.checkpoint import staged
    from shmtensor.checkpoint.plan import plan

    made = plan(plain() | {"array": np.arange(4)})

    class Found:
        plan = made

        @staticmethod
        def read(regions):
            return {region: np.array(made.regions[region].bytes()) for region in regions}

    monkeypatch.setattr(staged, "open_staged", lambda path: Found)
    found = load_checkpoint(tmp_path, from_memory=True, device="cuda")
    assert same(on_host(found), plain() | {"array": np.arange(4)})


@pytest.mark.parametrize(
    ("device", "error", "text"),
    [
        ("meta", ArgumentError, "CUDA device"),
        ("mps", ArgumentError, "CUDA device"),
        ("nonsense", ArgumentError, "nonsense"),
        ("cuda:7", ArgumentError, "there are 1 CUDA devices"),
        (7, ArgumentError, "there are 1 CUDA devices"),
        (True, ArgumentTypeError, "pass"),
        (1.5, ArgumentTypeError, "pass"),
    ],
)
def test_a_wrong_device_is_a_clear_error(tmp_path, standin, device, error, text):
    path = save(plain(), tmp_path / "a.safetensors")
    for function in (load_checkpoint, shmtensor.open_checkpoint, lambda path, device: shmtensor.load_newest(
        tmp_path, device=device)):  # fmt: skip
        with pytest.raises(error, match=text):
            function(path, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_cuda_the_error_says_what_is_missing(tmp_path):
    path = save(plain(), tmp_path / "a.safetensors")
    with pytest.raises(CudaError, match="CUDA"):
        load_checkpoint(path, device="cuda")


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_the_cpu_is_a_device_as_well(tmp_path, device):
    path = save(plain(), tmp_path / "a.safetensors")
    for mapped in (True, False):
        assert same(load_checkpoint(path, map=mapped, device=device), plain())
    os.rename(path, tmp_path / "b.safetensors")
    with shmtensor.open_checkpoint(tmp_path / "b.safetensors", device=device) as checkpoint:
        assert torch.equal(checkpoint["w.0"].read(), plain()["w"][0])
