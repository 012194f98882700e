"""On a CUDA device that is there: what arrives, what is saved, what the benchmarks do. docs/internals/cuda-verified.md

`python -m tests.cuda.session` runs all tests that need one.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader, TensorDataset

import shmtensor
from benchmarks.gpu import GPU
from benchmarks.runner import run_workload
from benchmarks.workloads import WORKLOADS
from shmtensor.checkpoint import names
from shmtensor.checkpoint.load import load_checkpoint
from shmtensor.checkpoint.writer import CheckpointWriter
from shmtensor.dcp import AsyncStager, StorageReader, StorageWriter

LACKS = GPU.lacks()
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(LACKS is not None, reason=f"no CUDA device: {LACKS}"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is.*:UserWarning"),
]

LONG = 120.0
ELEMENTS = 1 << 20


@pytest.fixture
def own_channels(monkeypatch, channel):
    monkeypatch.setattr(names, "PREFIX", channel)


def test_a_queue_on_the_device():
    queue = shmtensor.Queue(ctx=multiprocessing.get_context("fork"), device="cuda")
    sparse = torch.eye(4).to_sparse()
    sent = {"x": torch.randn(ELEMENTS), "bool": torch.tensor([True, False]), "sparse": sparse, "n": 3}
    for _ in range(5):
        queue.put(sent)
        got = queue.get(timeout=LONG)
        assert got["x"].is_cuda
        assert torch.equal(got["x"].cpu(), sent["x"])
        assert torch.equal(got["bool"].cpu(), sent["bool"])
        assert torch.equal(got["sparse"].to_dense().cpu(), torch.eye(4))
    queue.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_batches_on_the_device(method):
    data = TensorDataset(torch.arange(64.0).view(64, 1).expand(64, 10_000).contiguous(), torch.arange(64))
    context = shmtensor.get_context(method, device="cuda")
    seen = []
    for points, labels in DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context=context, timeout=LONG):
        assert points.is_cuda
        assert (points == labels[:, None]).all()
        seen += labels.tolist()
    assert seen == list(range(64))


def _make(number: float) -> dict:
    return {"x": torch.full((ELEMENTS,), number), "cuda": torch.cuda.is_initialized()}


def test_results_on_the_device():
    with shmtensor.ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"), device="cuda") as pool:
        futures = [pool.submit(_make, float(number)) for number in range(8)]
        for number, future in enumerate(futures):
            with torch.cuda.stream(torch.cuda.Stream()):
                result = future.result(LONG)
                assert result["x"].is_cuda
                assert (result["x"] == number).all()
            assert not result["cuda"]  # the worker has no context


def test_a_state_on_the_device_is_saved_as_it_was_and_tied_tensors_once(tmp_path, own_channels):
    weight = torch.randint(-1000, 1000, (4, ELEMENTS), device="cuda").float()  # exact, also after +1 -1
    state = {"w": weight, "tied": weight, "row": weight[1], "turned": weight[:, :100].t(), "host": torch.ones(5)}
    expected = {name: tensor.cpu().clone() for name, tensor in state.items()}
    with CheckpointWriter(tmp_path / "a") as writer:
        writer.start(state, timeout=LONG)
        for _ in range(3):
            handle = writer.save(state)
            weight.add_(1)  # after the copies, on the current stream
            assert handle.staged.result(LONG) < 5 * weight.nbytes // 4 + 1000
            weight.sub_(1)
        back = load_checkpoint(handle.durable.result(LONG).path, verify="all")
        for name, tensor in expected.items():
            assert torch.equal(back[name], tensor), name
        assert back["tied"].data_ptr() == back["w"].data_ptr()
        maps = Path(f"/proc/{writer.statistics().pid}/maps").read_text()
        assert "libcuda" not in maps
        assert "/dev/nvidia" not in maps


def test_what_is_computed_beside_the_copies_waits_when_it_is_told_to(tmp_path, own_channels):
    weight = torch.zeros(64 * ELEMENTS, device="cuda")
    with CheckpointWriter(tmp_path / "a") as writer:
        handle = writer.save({"w": weight}, ordered=False)
        handle.wait_stream()
        weight.fill_(7)
        assert not load_checkpoint(handle.durable.result(LONG).path)["w"].any()


def test_a_checkpoint_is_loaded_straight_to_the_device(tmp_path, own_channels):
    weight = torch.randn(40 * ELEMENTS)
    state = {
        "w": weight,
        "tied": weight[8:],
        "half": torch.ones(5, dtype=torch.bfloat16),
        "sparse": torch.eye(4).to_sparse(),
    }
    with CheckpointWriter(tmp_path / "a") as writer:
        path = writer.save(state).durable.result(LONG).path
    found = load_checkpoint(path, device="cuda")
    assert all(tensor.is_cuda for tensor in found.values())
    assert torch.equal(found["w"].cpu(), weight)
    assert found["tied"].data_ptr() == found["w"][8:].data_ptr()
    assert torch.equal(found["half"].cpu(), state["half"])
    assert torch.equal(found["sparse"].to_dense().cpu(), torch.eye(4))
    torch.save({"w": weight}, tmp_path / "b.pt")
    assert torch.equal(load_checkpoint(tmp_path / "b.pt", device="cuda")["w"].cpu(), weight)
    with shmtensor.open_checkpoint(path, device="cuda") as checkpoint:
        assert torch.equal(checkpoint["w"].read(slice(5, 9)).cpu(), weight[5:9])
    module = torch.nn.Linear(ELEMENTS, 4, device="cuda")
    with CheckpointWriter(tmp_path / "c") as writer:
        saved = {name: torch.randn(tensor.shape) for name, tensor in module.state_dict().items()}
        path = writer.save(saved).durable.result(LONG).path
    shmtensor.load_into(module, path)
    assert all(torch.equal(module.state_dict()[name].cpu(), tensor) for name, tensor in saved.items())


def test_a_state_on_the_device_goes_through_dcp(tmp_path, own_channels):
    """Staged in stream order, by one stager save after save, and loaded to the device again."""
    weight = torch.zeros(4 * ELEMENTS, device="cuda")
    state = {"w": weight, "row": weight.view(4, -1)[1], "host": torch.ones(5), "step": 0}
    with StorageWriter(tmp_path / "a") as writer:
        stager, done = AsyncStager(writer), []
        for step in range(1, 4):
            torch.cuda._sleep(100_000_000)  # what comes next on the stream is late
            weight.fill_(step)
            state["step"] = step
            done.append(dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True))
            weight.fill_(-1)
        for future in done:
            future.result(LONG)
        stager.close()
    for step in range(1, 4):
        found = {"w": torch.zeros_like(weight), "row": torch.zeros(ELEMENTS, device="cuda"), "step": 0}
        dcp.load(found, storage_reader=StorageReader(tmp_path / "a"), checkpoint_id=f"step-{step:08}", no_dist=True)
        assert found["w"].eq(step).all()
        assert found["row"].eq(step).all()
        assert found["step"] == step


CUDA = [workload for workload in WORKLOADS if workload.name.startswith("cuda-")]


@pytest.mark.slow
@pytest.mark.parametrize("workload", CUDA, ids=lambda workload: workload.name)
def test_the_workloads_run(workload):
    _, outcomes = run_workload(workload, "tiny", rounds=1)
    assert not {case: outcome.failed for case, outcome in outcomes.items() if outcome.failed}
