"""The plug-in for torch's distributed checkpoint: any number of ranks reads what any number saved; who may die when."""

from __future__ import annotations

import contextlib
import dataclasses
import doctest
import faulthandler
import importlib
import os
import pickle
import re
import signal
import tempfile
import threading
import traceback
from collections import OrderedDict
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import shmtensor
from shmtensor.checkpoint import names
from shmtensor.checkpoint.formats import distcp
from shmtensor.checkpoint.formats.distcp import KEY
from shmtensor.checkpoint.plan import Entry
from shmtensor.checkpoint.writer import CheckpointWriter

from ..forkservers import preloaded
from ..waiting import PATIENCE, stop, wait_for_end, wait_until
from . import servers
from .dcp_parts import dcp_part, save_part
from .servers import s3  # noqa: F401
from .test_deaths import names_in, own_channels  # noqa: F401
from .test_ranks import close_all, dies, open_writers, trainers  # noqa: F401

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

import torch.distributed as dist  # noqa: E402
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: E402
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys as load_all  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402

from shmtensor.dcp import AsyncStager, StorageReader, StorageWriter  # noqa: E402
from shmtensor.dcp.metadata import Items  # noqa: E402
from shmtensor.dcp.reader import _rows  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("own_channels"),
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)"),
]

TALL = (3000, 1024)
"""Its rows are distributed. Large enough that the descriptions of 8 parts are little beside it."""
WIDE = (256, 8192)
"""Its columns are distributed: each of 8 ranks has runs of 4 KiB."""


# --- processes that save and load together

LOADED_LATER = ("torch._dynamo", "torch.utils.serialization", "numpy.ma", "numpy.random")
"""What a process imports when it makes its first DTensor, or saves: 0.5 s."""


@pytest.fixture(scope="module")
def forks():
    with preloaded(__name__, *LOADED_LATER, "tests.faults.loaded") as forks:
        yield forks


class Ranks:
    """Processes of one group: each calls `scene(rank, count, *args)`, and sends what it returns."""

    def __init__(self, forks, folder: Path, count: int, scene, *args) -> None:
        store = tempfile.mkdtemp(dir=folder)  # gloo's file there is removed by its last process, at some time
        self.ends, self.processes = [], []
        for rank in range(count):
            here, there = forks.Pipe(duplex=False)
            process = forks.Process(
                target=_play, args=(there, names.PREFIX, f"{store}/group", rank, count, scene, args)
            )
            process.start()
            there.close()
            self.ends.append(here)
            self.processes.append(process)

    def results(self) -> list:
        found = []
        for rank, end in enumerate(self.ends):
            if not end.poll(PATIENCE):
                for process in self.processes:
                    os.kill(process.pid, signal.SIGABRT)  # which prints where it is
                self.join()
                raise AssertionError(f"rank {rank} does not answer")
            fine, value = end.recv()
            assert fine, f"rank {rank}: {value}"
            found.append(value)
        self.join()
        return found

    def join(self) -> None:
        for process, end in zip(self.processes, self.ends, strict=True):
            process.join(PATIENCE)
            assert process.exitcode is not None
            end.close()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        self.join()


def _play(end, prefix, store, rank, count, scene, args) -> None:
    faulthandler.enable()
    names.PREFIX = prefix
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # whatever the host's name means, and whichever networks other tests make
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    try:
        end.send((True, scene(rank, count, *args)))
    except BaseException:
        end.send((False, traceback.format_exc()))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


@pytest.fixture
def play(forks, tmp_path):
    """`play(count, scene, *args)`: what a scene returns, by rank."""
    return lambda count, scene, *args: Ranks(forks, tmp_path, count, scene, *args).results()


# --- states


def whole(seed: int) -> dict:
    """The tensors of a state, not distributed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "rows": torch.randn(TALL, generator=generator),
        "uneven": torch.randn(5, 3, generator=generator, dtype=torch.float64),
        "wide": torch.randn(WIDE, generator=generator),
        "narrow": torch.randint(0, 100, (64, 48), generator=generator, dtype=torch.int16),
        "both": torch.randn(64, 256, generator=generator).to(torch.bfloat16),
        "replica": torch.randn(17, generator=generator),
    }


def local(tensor, mesh, placements):
    """The part of this rank as a DTensor."""
    part = tensor
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            parts = part.chunk(mesh.size(axis), placement.dim)
            at = mesh.get_coordinate()[axis]
            empty = part.narrow(placement.dim, 0, 0)
            part = parts[at] if at < len(parts) else empty
    return DTensor.from_local(
        part.clone(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def distributed(count: int, seed: int) -> dict:
    """A state of this rank: distributed by rows, by columns, by both; plain tensors and objects in lists."""
    tensors = whole(seed)
    line = init_device_mesh("cpu", (count,))
    plane = init_device_mesh("cpu", (count // 2, 2) if count % 2 == 0 else (count, 1))
    return {
        "model": {
            "rows": local(tensors["rows"], line, [Shard(0)]),
            "uneven": local(tensors["uneven"], line, [Shard(0)]),
            "wide": local(tensors["wide"], line, [Shard(1)]),
            "narrow": local(tensors["narrow"], line, [Shard(1)]),
            "both": local(tensors["both"], plane, [Shard(0), Shard(1)]),
            "replica": local(tensors["replica"], line, [Replicate()]),
        },
        "plain": [torch.full((3,), float(seed)), {"empty": torch.empty(0, 4), "scalar": torch.tensor(seed)}],
        "groups": [{"lr": 0.1 * seed, "betas": (0.9, 0.99)}, None],
        "step": seed,
    }


def leaves(state, path="") -> dict:
    if isinstance(state, dict):
        return {name: leaf for key in state for name, leaf in leaves(state[key], f"{path}.{key}").items()}
    if isinstance(state, list):
        return {name: leaf for key, each in enumerate(state) for name, leaf in leaves(each, f"{path}[{key}]").items()}
    return {path: state}


def differences(state, expected) -> list[str]:
    """Names of the leaves that are not the same, bit for bit."""
    found, wanted = leaves(state), leaves(expected)
    return [*(found.keys() ^ wanted.keys()), *(name for name in found if not _same(found[name], wanted[name]))]


def _same(value, expected) -> bool:
    if not isinstance(expected, torch.Tensor):
        return type(value) is type(expected) and value == expected
    if isinstance(expected, DTensor):
        value, expected = value.to_local(), expected.to_local()
    if (value.dtype, value.shape) != (expected.dtype, expected.shape):
        return False
    own = [tensor.resolve_conj().resolve_neg().contiguous().flatten() for tensor in (value, expected)]
    return not value.numel() or torch.equal(*(tensor.view(torch.uint8) for tensor in own))


def bytes_read() -> int:
    """Bytes that this process has asked the kernel for."""
    with open("/proc/self/io") as lines:
        return int(next(lines).split()[1])


# --- scenes, each of one rank


def saving(rank, count, path, seeds, options=None):
    with StorageWriter(path, **(options or {})) as writer:
        for seed in seeds:
            dcp.save(distributed(count, seed), storage_writer=writer)


def loading_by_torch(rank, count, path, seed):
    """Whether torch's own reader finds the state of the seed."""
    state = distributed(count, seed + 1)
    dcp.load(state, checkpoint_id=path)
    return differences(state, distributed(count, seed))


def loading(rank, count, path, seed):
    """Whether it is the state of the seed; and how many bytes were read for one that is needed."""
    expected = distributed(count, seed)
    for _ in range(2):  # the second time, modules are imported
        state = distributed(count, seed + 1)
        before = bytes_read()
        dcp.load(state, storage_reader=StorageReader(path))
        read = bytes_read() - before
    tensors = [leaf for leaf in leaves(expected).values() if isinstance(leaf, torch.Tensor)]
    needed = sum((leaf.to_local() if isinstance(leaf, DTensor) else leaf).nbytes for leaf in tensors)
    return differences(state, expected), read / needed


# --- any number of ranks


@pytest.mark.parametrize(("savers", "loaders"), [(8, 4), (4, 8), (1, 3)])
def test_any_number_of_ranks_reads_what_it_needs(play, tmp_path, savers, loaders):
    path = str(tmp_path / "runs")
    play(savers, saving, path, [7])
    assert os.readlink(f"{path}/latest") == "step-00000007"
    for different, ratio in play(loaders, loading, path, 7):
        assert different == []
        assert ratio <= 1.1
    assert names_in(tmp_path / "runs") == {"step-00000007"}


def test_parts_of_one_process(tmp_path):
    """Without a process group, as a notebook does."""
    state = {"w": torch.arange(6.0).reshape(2, 3), "tied": None, "expanded": torch.ones(1).expand(4), "step": 3}
    state["tied"] = state["w"]
    with StorageWriter(tmp_path) as writer:
        dcp.save(state, storage_writer=writer)
        dcp.save(state, storage_writer=writer, checkpoint_id="named-12")
        dcp.save(state, storage_writer=writer, checkpoint_id=tmp_path / "path")
        dcp.save(state, storage_writer=writer, checkpoint_id=f"{tmp_path}/folder/")
    assert names_in(tmp_path) == {"step-00000003", "named-12", "path", "folder"}
    assert {each.name: each.step for each in shmtensor.list_checkpoints(tmp_path)}["named-12"] == 12
    for name in ("", "named-12", "path"):
        found = load_all(storage_reader=StorageReader(tmp_path / name))
        assert differences(found, {**state, "expanded": torch.ones(4)}) == []
    reader = StorageReader(tmp_path)
    assert load_all("step", storage_reader=reader, checkpoint_id="named-12") == {"step": 3}
    assert reader.checkpoint_id == str(tmp_path / "named-12")


def test_every_part_of_a_tensor(tmp_path):
    """Any range of any dimension, through each way of reading."""
    from shmtensor.dcp.reader import Stored, StoredParts

    tensors = [torch.randn(7, 5, 300), torch.randn(9, 40, dtype=torch.float64), torch.arange(11, dtype=torch.int8)]
    with StorageWriter(tmp_path) as writer:
        dcp.save({"t": tensors, "step": 1}, storage_writer=writer)
    parts = StoredParts(tmp_path / "step-00000001", verify=True)
    generator = np.random.default_rng(1)
    for number, tensor in enumerate(tensors):
        for _ in range(40):
            offsets = tuple(int(generator.integers(0, length)) for length in tensor.shape)
            lengths = tuple(int(generator.integers(0, n - at + 1)) for n, at in zip(tensor.shape, offsets, strict=True))
            expected = tensor[tuple(slice(at, at + n) for at, n in zip(offsets, lengths, strict=True))]
            assert torch.equal(parts.read_tensor(Stored(0, number, 0, tensor.nbytes), offsets, lengths), expected)
    parts.close()


# --- at URLs


def loading_at_url(rank, count, path, seed):
    state = distributed(count, seed + 1)
    dcp.load(state, storage_reader=StorageReader(path))
    return differences(state, distributed(count, seed))


def test_ranks_load_from_a_server(play, tmp_path):
    """What other ranks saved, with this library and by `FileSystemWriter`; parts come by ranges."""
    play(4, saving, str(tmp_path / "runs"), [7, 8])
    theirs = {"w": torch.arange(6.0).reshape(2, 3), "o": [1, "x"], "step": 3}
    dcp.save(theirs, checkpoint_id=tmp_path / "torch", no_dist=True)
    (tmp_path / "served").mkdir()
    servers.copy(tmp_path / "runs", tmp_path / "served" / "runs")
    servers.copy(tmp_path / "torch", tmp_path / "served" / "torch")
    with servers.Server(tmp_path / "served") as server:
        for count, path, seed in [(3, "runs/", 8), (2, "runs/step-00000007/", 7)]:
            assert play(count, loading_at_url, f"{server.url}/{path}", seed) == [[]] * count
        assert differences(load_all(storage_reader=StorageReader(f"{server.url}/torch/")), theirs) == []
        reader = StorageReader(f"{server.url}/runs/")
        assert load_all("step", storage_reader=reader, checkpoint_id="step-00000007") == {"step": 7}
        url = f"{server.url}/runs/step-00000007/"
        assert load_all("step", storage_reader=reader, checkpoint_id=url) == {"step": 7}
        assert reader.checkpoint_id == url.rstrip("/")
        for missing in ("nothing", f"{server.url}/nothing/"):
            with pytest.raises(dist.checkpoint.api.CheckpointException, match="no such"):
                load_all("step", storage_reader=StorageReader(f"{server.url}/runs/"), checkpoint_id=missing)


@pytest.mark.parametrize(("gap", "most"), [(0, 1 << 20), (1 << 13, 1 << 20), (1 << 13, 3000)])
def test_every_part_of_a_tensor_at_a_url(tmp_path, monkeypatch, gap, most):
    import fsspec

    from shmtensor.checkpoint import selection
    from shmtensor.checkpoint.locations import location
    from shmtensor.dcp import reader

    monkeypatch.setattr(reader, "GAP", gap)
    monkeypatch.setattr(selection, "REQUEST_MIN", most)
    tensors = [torch.randn(7, 5, 300), torch.randn(9, 40, dtype=torch.float64), torch.arange(11, dtype=torch.int8)]
    with StorageWriter(tmp_path) as writer:
        dcp.save({"t": tensors, "step": 1}, storage_writer=writer)
    fs = fsspec.filesystem("memory")
    servers.put(tmp_path / "step-00000001", fs, "/parts")
    try:
        parts = reader.StoredParts(location("memory://parts"), verify=True)
        generator = np.random.default_rng(1)
        for number, tensor in enumerate(tensors):
            for _ in range(40):
                offsets = tuple(int(generator.integers(0, length)) for length in tensor.shape)
                lengths = tuple(
                    int(generator.integers(0, n - at + 1)) for n, at in zip(tensor.shape, offsets, strict=True)
                )
                expected = tensor[tuple(slice(at, at + n) for at, n in zip(offsets, lengths, strict=True))]
                found = parts.read_tensor(reader.Stored(0, number, 0, tensor.nbytes), offsets, lengths)
                assert torch.equal(found, expected)
        parts.close()
    finally:
        fs.rm("/parts", recursive=True)


def test_what_is_saved_is_uploaded(s3, tmp_path):  # noqa: F811
    url = f"s3://bucket/{tmp_path.name}"
    state = {"w": torch.arange(6.0).reshape(2, 3), "o": [1, "x"]}
    with StorageWriter(tmp_path, upload=url, upload_keep_last=1) as writer:
        for step in (1, 2):
            dcp.save({**state, "step": step}, storage_writer=writer)
    assert [each.step for each in shmtensor.list_checkpoints(url)] == [2]
    assert differences(load_all(storage_reader=StorageReader(url)), {**state, "step": 2}) == []
    s3.fs.get(f"{url.removeprefix('s3://')}/step-00000002/", f"{tmp_path}/back/", recursive=True)
    assert differences(load_all(checkpoint_id=tmp_path / "back"), {**state, "step": 2}) == []  # by torch's own reader
    with pytest.raises(shmtensor.ArgumentError, match="upload"):
        StorageWriter(tmp_path, upload="nowhere")


# --- who may die


def staging(rank, count, path, mode):
    """Save once; then copy another state while the writing process is stopped, note that, and wait to be killed."""
    writer = StorageWriter(path)
    dcp.save(distributed(count, 1), storage_writer=writer)
    process = writer._parts._writer.statistics().pid
    Path(f"{path}-writer-{rank}").write_text(str(process))
    stop(process)
    if mode == "async":
        stager = AsyncStager(writer)
        state = distributed(count, 2)
        dcp.async_save(state, storage_writer=writer, async_stager=stager)
        for leaf in leaves(state).values():
            if isinstance(leaf, DTensor):
                leaf.to_local().zero_()  # does not reach the file
        Path(f"{path}-staged-{rank}").touch()
    else:
        save = CheckpointWriter.save

        def save_and_note(*args, **more):
            handle = save(*args, **more)
            handle.staged.result()
            Path(f"{path}-staged-{rank}").touch()
            return handle

        CheckpointWriter.save = save_and_note

        dcp.save(distributed(count, 2), storage_writer=writer)
    threading.Event().wait()


@pytest.mark.parametrize("mode", ["save", "async"])
def test_what_is_staged_becomes_durable_although_every_trainer_is_killed(forks, play, tmp_path, mode):
    path = tmp_path / "runs"
    ranks = Ranks(forks, tmp_path, 2, staging, str(path), mode)
    wait_until(lambda: all(Path(f"{path}-staged-{rank}").exists() for rank in range(2)), lambda: os.listdir(tmp_path))
    ranks.kill()
    writers = [int(Path(f"{path}-writer-{rank}").read_text()) for rank in range(2)]
    assert os.readlink(path / "latest") == "step-00000001"
    for pid in writers:
        os.kill(pid, signal.SIGCONT)
    for pid in writers:
        wait_for_end(pid)
    assert os.readlink(path / "latest") == "step-00000002"
    assert names_in(path) == {"step-00000001", "step-00000002"}
    assert [different for different, _ in play(2, loading, str(path), 2)] == [[], []]
    found = load_all("model", checkpoint_id=path / "step-00000002")["model"]  # by torch's own reader
    assert differences(found, whole(2)) == []


class Fails:
    """An object that cannot be pickled."""

    def __reduce__(self):
        raise ValueError("not this one")


class Dies:
    """An object whose process dies when it is pickled: in `write_data`, when the plans are made."""

    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)


def failing(rank, count, path, kind):
    """A save that rank 1 fails, or does not survive, between two that succeed."""
    with StorageWriter(path) as writer:
        dcp.save(distributed(count, 1), storage_writer=writer)
        state = {**distributed(count, 2), f"own of {rank}": kind() if rank == 1 else 5}
        try:
            dcp.save(state, storage_writer=writer)
        except BaseException as error:
            failed = str(error)
        left = sorted(names_in(Path(path)))
        if kind is Fails:
            dcp.save(distributed(count, 3), storage_writer=writer)
        return failed, left


def test_a_rank_that_fails_fails_the_checkpoint_and_not_the_next(play, tmp_path):
    path = tmp_path / "runs"
    for failed, _ in play(2, failing, str(path), Fails):
        assert "not this one" in failed
    assert os.readlink(path / "latest") == "step-00000003"
    assert names_in(path) == {"step-00000001", "step-00000003"}
    assert [different for different, _ in play(2, loading, str(path), 3)] == [[], []]


def failing_ahead(rank, count, path):
    """`async_save`s of which rank 1 cannot plan, or copy, its part, and others: what each rank is told."""
    told = []
    with StorageWriter(path) as writer:
        for seed, planner, item in ((1, Refuses, 5), (2, dcp.DefaultSavePlanner, Fails()), (3, Refuses, 5)):
            stager = AsyncStager(writer, planner=planner if rank == 1 and seed < 3 else dcp.DefaultSavePlanner)
            state = {**distributed(count, seed), f"own of {rank}": item if rank == 1 else 5}
            try:
                dcp.async_save(state, storage_writer=writer, async_stager=stager).result(PATIENCE)
            except (ValueError, shmtensor.ResourceError) as error:
                told.append(str(error))
            stager.close()
        dcp.save(distributed(count, 4), storage_writer=writer)
    return told


def test_a_rank_that_fails_in_async_save_fails_it_on_all(play, tmp_path):
    path = tmp_path / "runs"
    for told in play(2, failing_ahead, str(path)):
        assert len(told) == 2
        assert "no plan" in told[0]
        assert "not this one" in told[1]
    assert names_in(path) == {"step-00000003", "step-00000004"}


def refused(rank, count, path):
    """Saves while rank 1 cannot open its writer, and afterwards: what each rank is told, and no rank waits."""
    other = CheckpointWriter(path, rank=1, world_size=count) if rank == 1 else None
    dist.barrier()
    told = []
    with StorageWriter(path) as writer:
        stager = AsyncStager(writer)
        try:
            dcp.save(distributed(count, 1), storage_writer=writer)
        except BaseException as error:
            told.append(str(error))
        try:
            dcp.async_save(distributed(count, 2), storage_writer=writer, async_stager=stager)
        except shmtensor.ResourceError as error:
            told.append(str(error))
        if other is not None:
            other.close()
        dist.barrier()
        dcp.async_save(distributed(count, 3), storage_writer=writer, async_stager=stager).result(PATIENCE)
        stager.close()
    return told


def test_a_rank_that_cannot_open_its_writer_keeps_no_other_waiting(play, tmp_path):
    path = tmp_path / "runs"
    for told in play(2, refused, str(path)):
        assert len(told) == 2
        assert all("another CheckpointWriter of rank 1 is open" in text for text in told)
    assert names_in(path) == {"step-00000003"}


def test_a_rank_that_dies_leaves_the_checkpoint_before(forks, play, tmp_path):
    path = tmp_path / "runs"
    ranks = Ranks(forks, tmp_path, 2, failing, str(path), Dies)
    assert ranks.ends[0].poll(PATIENCE)
    fine, (failed, _) = ranks.ends[0].recv()
    assert fine
    assert failed
    ranks.join()
    assert ranks.processes[1].exitcode == -signal.SIGKILL
    assert os.readlink(path / "latest") == "step-00000001"
    play(2, saving, str(path), [5])
    assert names_in(path) == {"step-00000001", "step-00000005"}
    assert os.readlink(path / "latest") == "step-00000005"


# --- async_save


def staged(rank, count, path):
    """Saves with the same plan, with another one, and under a name; then with a name that comes too late."""
    with StorageWriter(path) as writer:
        stager = AsyncStager(writer)
        for seed in (1, 2):
            state = distributed(count, seed)
            future = dcp.async_save(state, storage_writer=writer, async_stager=stager)
            for leaf in leaves(state).values():
                if isinstance(leaf, torch.Tensor):
                    (leaf.to_local() if isinstance(leaf, DTensor) else leaf).zero_()
            future.result(PATIENCE)
        writer.reset("named")
        dcp.async_save(
            {**distributed(count, 3), f"own of {rank}": torch.full((2,), rank)}, storage_writer=writer,
            async_stager=stager,
        ).result(PATIENCE)  # fmt: skip
        late = dcp.async_save(
            distributed(count, 4), storage_writer=writer, async_stager=stager, checkpoint_id="too-late"
        )
        error = str(late.exception(PATIENCE))
        stager.close()
    return error


def test_async_save_waits_for_one_copy(play, tmp_path):
    path = tmp_path / "runs"
    for error in play(2, staged, str(path)):
        assert "writer.reset(name)" in error
    assert names_in(path) == {"step-00000001", "step-00000002", "named", "step-00000004"}
    for name, seed in (("step-00000001", 1), ("step-00000002", 2), ("step-00000004", 4)):
        assert [different for different, _ in play(3, loading, str(path / name), seed)] == [[]] * 3
    found = load_all(storage_reader=StorageReader(path / "named"))
    assert [found[f"own of {rank}"].tolist() for rank in range(2)] == [[0, 0], [1, 1]]
    sizes = [part.stat().st_size for part in (path / "step-00000001").glob("rank-*")]
    assert sum(sizes) < 1.1 * sum(tensor.nbytes for tensor in whole(1).values())  # replicas are stored once


def test_a_state_that_is_where_it_was_is_planned_from_memory(tmp_path):
    """Also with items that are no tensors, which are other bytes each time."""
    weight, saved = torch.zeros(100), []
    with StorageWriter(tmp_path / "runs") as writer:
        stager = AsyncStager(writer)
        for step in (7, 8, 9):
            weight.fill_(step)
            state = {"w": weight, "step": step, "note": "x" * step}
            saved.append(dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True))
        for future in saved:
            future.result(PATIENCE)
        opened = writer._parts._writer
        assert opened is not None
        stager.close()
        before = opened._plan_cache.hits
        dcp.save({"w": weight, "step": 9, "note": "y" * 9}, storage_writer=writer, checkpoint_id="again", no_dist=True)
        assert opened._plan_cache.hits == before + 1
    for name, step, note in (("step-00000007", 7, "x"), ("step-00000009", 9, "x"), ("again", 9, "y")):
        found = load_all(storage_reader=StorageReader(tmp_path / "runs" / name))
        assert found["w"].eq(step).all()
        assert (found["step"], found["note"]) == (step, note * step)


def in_groups(rank, count, path):
    """Saves of ranks 0 and 1, by two stagers, and of 1 and 2: so ranks are in different numbers of groups. And what a
    forked child of a rank does with a stager."""
    saved = []
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2])]
    for number, group in enumerate((groups[0], *groups)):
        if dist.get_rank(group) < 0:  # not in it
            continue
        with StorageWriter(f"{path}/{number}", process_group=group) as writer:
            stager = AsyncStager(writer, process_group=group)
            state = {"mine": {f"of {rank}": torch.full((3,), rank)}, "step": 1}
            dcp.async_save(state, storage_writer=writer, async_stager=stager, process_group=group).result(PATIENCE)
            if (child := os.fork()) == 0:
                with contextlib.suppress(BaseException):
                    stager.close()
                    try:
                        stager.stage(state)
                    except shmtensor.ForkedError:
                        os._exit(7)
                os._exit(1)
            stager.close()
            wait_for_end(child)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            reader = StorageReader(f"{path}/{number}")
            saved.append(sorted(load_all(storage_reader=reader, process_group=group)["mine"]))
    return saved


def test_ranks_of_several_groups(play, tmp_path):
    """A group of some ranks, as of one replica of the model, and stagers one after the other."""
    first, second = ["of 0", "of 1"], ["of 1", "of 2"]
    assert play(3, in_groups, str(tmp_path)) == [[first, first], [first, first, second], [second]]


def plannable() -> dict:
    return {
        "model": {"w": torch.arange(24.0).reshape(4, 6), "b": torch.ones(6)}, "list": [torch.zeros(3), {"lr": 0.1}],
        "t": torch.full((3,), 7.0), "n": 1,
    }  # fmt: skip


def swap(state, key: str, other: str) -> None:
    """Each of two values comes under the name of the other."""
    state[key], state[other] = state[other], state[key]


PLANNED = {
    "shape": lambda s: s["model"].update(w=torch.arange(24.0).reshape(6, 4)),
    "larger": lambda s: s["model"].update(w=torch.randn(5, 6)),
    "scalar": lambda s: s["model"].update(b=torch.tensor(3.0)),
    "dtype": lambda s: s["model"].update(w=torch.arange(24, dtype=torch.int32).reshape(4, 6)),
    "swapped": lambda s: swap(s["model"], "w", "b"),
    "a tensor and a number swapped": lambda s: swap(s, "t", "n"),
    "renamed": lambda s: s["model"].update(v=s["model"].pop("w")),
    "removed": lambda s: s["model"].pop("b"),
    "added": lambda s: s["model"].update(more=torch.randn(2)),
    "other order": lambda s: s.update(model=dict(reversed(s["model"].items()))),
    "other path of the same name": lambda s: s.update({"model.b": s["model"].pop("b")}),
    "a key in place of an index": lambda s: s.update(list={"0": s["list"][0], "1": s["list"][1]}),
    "a tensor becomes a number": lambda s: s["model"].update(b=7),
    "a number becomes a tensor": lambda s: s.update(n=torch.tensor(5)),
}
NOT_PLANNED = {
    "values": lambda s: s["model"]["w"].zero_(),
    "memory": lambda s: s["model"].update(w=torch.randn(4, 6)),
    "strides": lambda s: s["model"].update(w=torch.randn(6, 4).t()),
    "expanded": lambda s: s["model"].update(w=torch.randn(1, 6).expand(4, 6)),
    "part of other memory": lambda s: s["model"].update(w=torch.randn(5, 6)[1:]),
    "number": lambda s: s.update(n=2),
    "longer object": lambda s: s["list"].__setitem__(1, {"lr": "x" * 5000}),
    "kind of an object": lambda s: s.update(n=True),
}
CHANGES = {**PLANNED, **NOT_PLANNED}


class Own(dcp.DefaultSavePlanner):
    """A planner of which nothing is known."""


@pytest.mark.parametrize("planner", [dcp.DefaultSavePlanner, Own])
def test_a_change_between_two_async_saves_is_noticed(tmp_path, planner):
    """Of each kind: saved as it was, again with the plan of the first time, and changed. By one writer for all."""
    states = {}
    with StorageWriter(tmp_path / "runs") as writer:
        stager = AsyncStager(writer, planner=planner)

        def save(name: str, state: dict):
            writer.reset(name)
            dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True).result(PATIENCE)
            return stager._last

        for number, (change, apply) in enumerate(CHANGES.items()):
            state = states[number] = plannable()
            first = save(f"first{number}", state)
            apply(state)
            assert (save(f"changed{number}", state) is not first) == (change in PLANNED), change
            states[number] = state
        stager.close()
    for number, change in enumerate(CHANGES):
        for name, expected in ((f"first{number}", plannable()), (f"changed{number}", states[number])):
            found = load_all(storage_reader=StorageReader(tmp_path / "runs" / name))
            assert differences(found, expected) == [], change


def strided(tensor, mesh):
    """As tensor parallelism and FSDP2 distribute rows: over the second dimension of the mesh first."""
    outer, inner = mesh.get_local_rank(1), mesh.get_local_rank(0)
    part = tensor.chunk(mesh.size(1))[outer].chunk(mesh.size(0))[inner].clone()
    placements = [_StridedShard(0, split_factor=mesh.size(1)), Shard(0)]
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def moving(rank, count, path):
    """The same rows, distributed in another way each time: with other offsets, but most parts of the same shape.
    Returns in which steps they were not planned anew."""
    # so in torch 2.5
    _StridedShard.__eq__ = lambda self, other: isinstance(other, (Shard, _StridedShard)) and self.dim == other.dim
    rows = torch.arange(64.0).reshape(8, 8)
    line, back = init_device_mesh("cpu", (4,)), DeviceMesh("cpu", [3, 2, 1, 0])
    plane = init_device_mesh("cpu", (2, 2))
    ways = [
        (rows, plane, [Shard(0), Shard(1)]), (rows, plane, [Shard(1), Shard(0)]), (rows, line, [Shard(0)]),
        (rows, back, [Shard(0)]), (rows[:7], back, [Shard(0)]), (rows[:7].int(), back, [Shard(0)]),
        (rows, line, [Replicate()]), (rows, plane, [Shard(0), Replicate()]), (rows, plane, [Replicate(), Shard(0)]),
        (rows, plane, [Shard(0), Shard(0)]),
    ]  # fmt: skip
    states = [*(local(*way) for way in ways), strided(rows, plane)]
    last, kept = None, []
    with StorageWriter(path) as writer:
        stager = AsyncStager(writer)
        for step, tensor in enumerate(states):
            state = {"w": tensor, "step": step}
            dcp.async_save(state, storage_writer=writer, async_stager=stager).result(PATIENCE)
            if stager._last is last:
                kept.append(step)
            last = stager._last
        stager.close()
    return len(states), kept


def test_a_tensor_that_is_distributed_in_another_way_is_planned_anew(play, tmp_path):
    (count, kept), *_ = play(4, moving, str(tmp_path))
    assert kept == []
    for step in range(count):
        found = load_all(storage_reader=StorageReader(tmp_path / f"step-{step:08}"))["w"]
        assert torch.equal(found, torch.arange(64.0).reshape(8, 8)[: len(found)]), step
        assert len(found) == (7 if step in (4, 5) else 8)


def of_one_rank(rank, count, path):
    """Replicas, of which each rank writes some. One rank no longer has those that it wrote, or has one more."""
    with StorageWriter(path) as writer:
        stager = AsyncStager(writer)
        for step in range(4):
            state = {f"t{n}": torch.full((50 + n,), step + 0.5) for n in range(6)} | {"step": step}
            if (step, rank) == (1, 1):
                state["more"] = torch.ones(3)
            if (step, rank) in ((2, 0), (3, 1)):
                for item in stager._last.plan.items:
                    if item.index.fqn in state and item.index.fqn != "step":
                        del state[item.index.fqn]
            dcp.async_save(state, storage_writer=writer, async_stager=stager).result(PATIENCE)
        stager.close()


def test_a_change_on_one_rank_is_planned_anew_on_all(play, tmp_path):
    play(2, of_one_rank, str(tmp_path))
    for step in range(4):
        found = load_all(storage_reader=StorageReader(tmp_path / f"step-{step:08}"))
        expected = {f"t{n}": torch.full((50 + n,), step + 0.5) for n in range(6)} | {"step": step}
        assert differences(found, {**expected, "more": torch.ones(3)} if step == 1 else expected) == []


def test_a_change_of_names_alone_is_noticed(tmp_path):
    """By a planner that says nothing of paths."""
    with StorageWriter(tmp_path) as writer:
        stager = AsyncStager(writer, planner=partial(dcp.DefaultSavePlanner, flatten_state_dict=False))
        for step, name in enumerate(("a.w", "b.w")):
            state = {name: torch.full((3,), step), "step": step}
            dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True).result(PATIENCE)
            assert differences(load_all(storage_reader=StorageReader(tmp_path)), state) == []
        stager.close()


class Reuses(dcp.DefaultSavePlanner):
    """A planner that finishes always the same plan, with other items."""

    kept = None

    def finish_plan(self, new_plan):
        self.kept = self.kept or new_plan
        self.kept.items[:] = new_plan.items
        return super().finish_plan(self.kept)


def test_a_plan_whose_items_have_changed_is_another_one(tmp_path):
    planner = Reuses(flatten_state_dict=False)
    with StorageWriter(tmp_path) as writer:
        for name in ("a", "b"):
            state = {name: torch.ones(3)}
            dcp.save(state, storage_writer=writer, checkpoint_id=name, planner=planner, no_dist=True)
            assert differences(load_all(storage_reader=StorageReader(tmp_path / name)), state) == []


def test_threads_that_stage_two_states_take_each_its_own_plan(tmp_path):
    """One is about to use the plan of its last save when the other one plans."""
    planned, go_on = threading.Event(), threading.Event()

    class Waits(StorageWriter):
        def open(self, place) -> None:
            super().open(place)
            if threading.current_thread() is thread:
                planned.set()
                assert go_on.wait(PATIENCE)

    large, small = {"x": torch.ones(3), "y": torch.ones(4)}, {"x": torch.zeros(3)}
    with Waits(tmp_path) as writer:
        stager = AsyncStager(writer)
        thread = threading.Thread(target=lambda: stager.stage(large | {"step": 2}))
        stager.stage(large | {"step": 1})
        thread.start()
        try:
            assert planned.wait(PATIENCE)
            stager.stage(small | {"step": 3})
        finally:
            go_on.set()
            thread.join()
        stager.close()
    for state in (large | {"step": 1}, large | {"step": 2}, small | {"step": 3}):
        found = load_all(storage_reader=StorageReader(tmp_path / f"step-{state['step']:08}"))
        assert differences(found, state) == []


class Refuses(dcp.DefaultSavePlanner):
    """A planner that makes no plan."""

    def create_local_plan(self):
        raise ValueError("no plan")


def test_a_save_after_an_async_save_that_failed_saves_its_own_state(tmp_path):
    with StorageWriter(tmp_path) as writer:
        stager = AsyncStager(writer)
        more = {"storage_writer": writer, "async_stager": stager}
        failed = dcp.async_save({"w": torch.ones(3), "step": 1}, planner=Refuses(), **more)
        assert "no plan" in str(failed.exception(PATIENCE))
        dcp.save({"w": torch.full((3,), 2.0), "step": 2}, storage_writer=writer)
        dcp.async_save({}, **more).result(PATIENCE)
        stager.close()
    assert load_all(storage_reader=StorageReader(tmp_path / "step-00000002"))["w"].tolist() == [2.0] * 3
    assert {"step-00000001", "step-00000002"} < names_in(tmp_path)  # what was staged is durable all the same


# --- torch's own reader


DTYPES = (
    "float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "int64", "int32", "int16", "int8", "uint64", "uint32",
    "uint16", "uint8", "bool",
)  # fmt: skip


def everything() -> dict:
    """Each dtype, each kind of view, and names of any kind."""
    bits = torch.randint(0, 2, (24, 16), dtype=torch.uint8)
    weight = torch.randn(40, 30)
    return {
        "dtypes": {name: bits.clone().view(getattr(torch, name)) for name in DTYPES},
        "scalar": torch.tensor(3.5),
        "empty": [torch.empty(0), torch.empty(0, 4, dtype=torch.bfloat16), torch.empty(0, 4, dtype=torch.bfloat16)],
        "aliased": {"a": weight, "b": weight, "rows": weight[3:9], "bits": weight.view(torch.int32), "t": weight.t()},
        "transposed": torch.randn(20, 30).t(),
        "gaps": torch.randn(20, 20)[::2, ::3],
        "expanded": torch.ones(1, 3).expand(5, 3),
        "conjugated": torch.randn(7, dtype=torch.complex64).conj(),
        "negative": torch.randn(7, dtype=torch.complex64).conj().imag,
        "large": torch.randn(700, 900),
        "objects": [{"betas": (0.9, 0.99), "none": None}, "text", 7, 0.1, OrderedDict(a=1)],
        "step": 5,
        "odd.\u00e4 \n\"'\\[0]/\u2028\U0001f600\ud800": torch.ones(3),
        "x" * 3000: torch.zeros(2),
        "x" * 3001: 7,
    }


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_torch_reads_every_kind_of_item(tmp_path):
    state, path = everything(), tmp_path / "runs" / "step-00000005"
    with StorageWriter(tmp_path / "runs") as writer:
        dcp.save(state, storage_writer=writer)
    dcp_to_torch_save(path, tmp_path / "all.pt")
    assert differences(torch.load(tmp_path / "all.pt"), state) == []
    target = {
        name: each.new_zeros(each.shape) if isinstance(each, torch.Tensor) else each for name, each in state.items()
    }
    dcp.load(target, checkpoint_id=tmp_path / "runs" / "latest")
    assert differences(target, state) == []
    assert differences(load_all(storage_reader=StorageReader(tmp_path / "runs")), state) == []
    (info,) = shmtensor.list_checkpoints(tmp_path / "runs")
    assert info.error is None
    assert info.nbytes == sum(file.stat().st_size for file in path.iterdir())


def test_torch_reads_what_several_ranks_have_saved(play, tmp_path):
    path = str(tmp_path / "runs")
    play(2, saving, path, [7])
    assert differences(load_all(checkpoint_id=f"{path}/latest")["model"], whole(7)) == []
    assert play(3, loading_by_torch, f"{path}/step-00000007", 7) == [[]] * 3


def test_metadata_is_what_torch_writes(tmp_path):
    """But for the places in the files, and for what this library leaves out."""
    state = everything()
    with StorageWriter(tmp_path / "ours") as writer:
        dcp.save(state, storage_writer=writer)
    dcp.save(state, checkpoint_id=tmp_path / "theirs")
    ours, theirs = (dcp.FileSystemReader(tmp_path / name).read_metadata() for name in ("ours/step-00000005", "theirs"))
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    assert ours.version == theirs.version


def test_other_formats_have_no_metadata(tmp_path):
    for format in ("safetensors", "torch", "npz"):
        with StorageWriter(tmp_path / format, format=format) as writer:
            dcp.save({"w": torch.ones(5), "step": 1}, storage_writer=writer)
        assert not (tmp_path / format / "step-00000001" / ".metadata").exists()
        assert load_all(storage_reader=StorageReader(tmp_path / format))["w"].tolist() == [1.0] * 5


def test_a_planner_without_paths(tmp_path):
    state = {"a": {"w": torch.ones(3)}, "o": 1}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    with StorageWriter(tmp_path) as writer:
        dcp.save({"a.w": state["a"]["w"], "o": 1}, storage_writer=writer, planner=planner, checkpoint_id="flat")
    assert dcp.FileSystemReader(tmp_path / "flat").read_metadata().planner_data is None
    assert load_all(checkpoint_id=tmp_path / "flat")["a.w"].tolist() == [1.0] * 3


def test_damaged_metadata_is_found_by_verify_and_not_read(tmp_path):
    from shmtensor.checkpoint.load import check
    from shmtensor.checkpoint.opening import open_path

    with StorageWriter(tmp_path, keep_last=1) as writer:
        for step in (1, 2):
            dcp.save({"w": torch.ones(5), "step": step}, storage_writer=writer)
    assert names_in(tmp_path) == {"step-00000002"}  # the first one was removed with its `.metadata`
    path = tmp_path / "step-00000002" / ".metadata"
    assert check(open_path(tmp_path), readers=1) == []
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(shmtensor.CheckpointError, match="metadata is damaged"):
        check(open_path(tmp_path), readers=1)
    path.unlink()
    with pytest.raises(shmtensor.CheckpointError, match="No such file"):
        check(open_path(tmp_path), readers=1)
    assert load_all(storage_reader=StorageReader(tmp_path))["w"].tolist() == [1.0] * 5


# --- `.metadata`, when processes die


def check_dcp(path: Path, step: int) -> None:
    """`.metadata` is whole, and so is what it names."""
    reader = dcp.FileSystemReader(path)
    found = reader.read_metadata()
    assert found.planner_data == {
        "w": ("w",), "object": ("object",), **{f"{key}{rank}": (key, rank) for key in ("own", "o") for rank in (0, 1)},
    }  # fmt: skip
    state = {"w": torch.zeros(10_000, dtype=torch.float64)}
    dcp.load(state, storage_reader=reader)
    assert state["w"].unique_consecutive().tolist() == [10.0 * step, 10.0 * step + 1]
    for fqn, data in (("object", b"same"), ("o0", b"own"), ("o1", b"own")):
        where = found.storage_data[dcp.metadata.MetadataIndex(fqn)]
        assert (path / where.relative_path).read_bytes()[where.offset :][: where.length] == data


POINTS = ["ranks.counted", "ranks.metadata", "ranks.manifest", "ranks.decided", "ranks.cleared", "ranks.renamed"]


@pytest.mark.parametrize("point", POINTS)
def test_a_writing_process_dies_at_the_metadata(dies, tmp_path, point):  # noqa: F811
    path = tmp_path / "runs"
    dies(point)
    writers = open_writers(path, 2, format="distcp", keep_last=2)
    for step in (1, 2, 3):
        for handle in [save_part(writer, rank, step) for rank, writer in enumerate(writers)]:
            handle.durable.result(PATIENCE)
    assert sum(writer.statistics().restarts for writer in writers) == 1
    close_all(writers)
    assert names_in(path) == {"step-00000002", "step-00000003"}
    for step in (2, 3):
        check_dcp(path / f"step-{step:08d}", step)


@pytest.mark.parametrize("point", POINTS)
def test_every_process_dies_at_the_metadata(tmp_path, point):
    """What has a name has a whole `.metadata`; the next run completes what was left."""
    path = tmp_path / "runs"
    die = (
        "from tests.faults import points; points.install('shmtensor.checkpoint')\n"
        f"import os, signal, sys, json; points.arm({point!r}, 'kill')\n"
    )
    end = f"""
from tests.checkpoint.dcp_parts import save_part
for w in writers: w.close()
process_handle.LAUNCH = {die!r} + process_handle.LAUNCH
writers = [CheckpointWriter(path, rank=rank, world_size=2, format="distcp") for rank in range(2)]
for w in writers: w.start()
pids = [w.statistics().pid for w in writers]
for pid in pids: stop(pid)
for rank, w in enumerate(writers): save_part(w, rank, 2)
print(*pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    pids = trainers(path, end)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    for pid in pids:
        wait_for_end(pid)
    made = path / "step-00000002"
    if POINTS.index(point) < POINTS.index("ranks.decided"):  # later the process of the other rank may go on
        assert not made.exists()
    if made.exists():
        check_dcp(made, 2)
    writers = open_writers(path, 2, format="distcp")
    for rank, writer in enumerate(writers):
        save_part(writer, rank, 5)
    close_all(writers)
    check_dcp(made, 2)
    check_dcp(path / "step-00000005", 5)


def test_parts_that_do_not_agree_make_no_checkpoint(tmp_path):
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(writer) for writer in open_writers(tmp_path, 2, format="distcp")]
        for change in ("size", "kind"):
            handles = []
            for rank, writer in enumerate(writers):
                state, meta = dcp_part(rank, 1)
                if rank and change == "size":
                    meta[KEY]["tensors"][0][2] = [20_000]
                elif rank:
                    meta[KEY]["objects"][0][0] = "w"
                handles.append(writer.save(state, meta=meta))
            for handle in handles:
                assert re.search("two sizes|an object on one", str(handle.durable.exception(PATIENCE)))
        for handle in [save_part(writer, rank, 3) for rank, writer in enumerate(writers)]:
            handle.durable.result(PATIENCE)
    assert names_in(tmp_path) == {"step-00000003"}
    check_dcp(tmp_path / "step-00000003", 3)


def test_a_checkpoint_without_its_manifest_is_read_by_its_metadata(tmp_path):
    """A checkpoint whose manifest was lost is still one for DCP's readers."""
    with StorageWriter(tmp_path) as writer:
        dcp.save({"w": torch.arange(5), "empty": torch.empty(0), "step": 1}, storage_writer=writer)
    made = tmp_path / "step-00000001"
    assert distcp.metadata_of(str(made), ["rank-00000.distcp"]) == (made / ".metadata").read_bytes()
    (made / "shmtensor.ranks.json").unlink()
    assert load_all(storage_reader=StorageReader(made))["w"].tolist() == [0, 1, 2, 3, 4]


# --- checkpoints of FileSystemWriter


def saving_by_torch(rank, count, path):
    dcp.save(distributed(count, 7), checkpoint_id=path)


def test_checkpoints_of_torch_are_read(play, tmp_path):
    path = str(tmp_path / "theirs")
    play(2, saving_by_torch, path)
    assert [different for different, _ in play(3, loading, path, 7)] == [[]] * 3


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_chunks_that_are_all_of_a_tensor_or_overlap(ndim):
    """Random cuts of cuts; then one chunk is moved, or another one has its place."""
    generator = np.random.default_rng(ndim)
    size = tuple(int(n) for n in generator.integers(2, 9, ndim))

    def metadata_of(chunks):
        items = Items("a file")
        for offsets, shape in chunks:
            items.add_tensor("w", size, offsets, shape, torch.float32, None, None)
        return items.metadata()

    for _ in range(40):
        chunks = [((0,) * ndim, size)]
        for _ in range(6):
            at, axis = int(generator.integers(len(chunks))), int(generator.integers(ndim))
            offsets, shape = chunks[at]
            if shape[axis] > 1:
                cut = int(generator.integers(1, shape[axis]))
                behind = tuple(o + cut * (i == axis) for i, o in enumerate(offsets))
                sizes = [tuple(n if i == axis else s for i, s in enumerate(shape)) for n in (cut, shape[axis] - cut)]
                chunks[at : at + 1] = [(offsets, sizes[0]), (behind, sizes[1])]
        assert len(metadata_of(chunks).state_dict_metadata["w"].chunks) == len(chunks)
        covered = np.zeros(size, int)
        offsets, shape = chunks[int(generator.integers(len(chunks)))]
        moved = tuple(int(generator.integers(0, n - m + 1)) for n, m in zip(size, shape, strict=True))
        chunks[chunks.index((offsets, shape))] = (moved, shape)
        for at, each in chunks:
            covered[tuple(slice(a, a + n) for a, n in zip(at, each, strict=True))] += 1
        if (covered != 1).any() and len({at for at, _ in chunks}) == len(chunks):
            with pytest.raises(shmtensor.CheckpointError, match="overlap"):
                metadata_of(chunks)


def test_chunks_that_lie_beside_each_other_along_every_axis():
    """A comparison of all that share a line would take minutes."""
    items, count = Items("a file"), 2000
    for n in range(count):
        items.add_tensor("w", (count, count), (n, 0), (1, n + 1), torch.int8, None, None)
        items.add_tensor("w", (count, count), (0, n), (n, 1), torch.int8, None, None)
    assert len(items.metadata().storage_data) == 2 * count - 1


def own_metadata(path, change) -> None:
    """Write `.metadata` again, changed, as an attacker could."""
    with open(path / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    with open(path / ".metadata", "wb") as file:
        pickle.dump(metadata, file)


def first_range(metadata):
    return next(iter(metadata.storage_data.values()))


def larger(metadata) -> None:
    metadata.state_dict_metadata["w"].size = torch.Size([1 << 40])


def larger_chunk(metadata) -> None:
    larger(metadata)
    metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size([1 << 40])


def shared_lists() -> list:
    """Lists that are shared so often that their `repr` never ends."""
    made: list = []
    for _ in range(60):
        made = [made, made]
    return made


def shifted_chunk(metadata) -> None:
    """Of two halves, the second lies over the first: as many elements, and the last ones are nowhere."""
    metadata.state_dict_metadata["w"].size = torch.Size([200])
    chunks = metadata.state_dict_metadata["w"].chunks
    (index,) = (it for it in metadata.storage_data if it.fqn == "w")
    chunks.append(dataclasses.replace(chunks[0], offsets=torch.Size([50])))
    metadata.storage_data[dataclasses.replace(index, offset=torch.Size([50]))] = metadata.storage_data[index]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (larger, "its chunks have"),
        (shifted_chunk, "overlap"),
        (larger_chunk, "in a range of"),
        (lambda metadata: setattr(first_range(metadata), "length", 1 << 50), "truncated|overlap"),
        (lambda metadata: setattr(first_range(metadata), "offset", -1), "in place of a number"),
        (lambda metadata: setattr(first_range(metadata), "relative_path", "../other"), "no name of a file"),
        (lambda metadata: setattr(first_range(metadata), "relative_path", "ü" * 200), "no name of a file"),
        (lambda metadata: setattr(first_range(metadata), "transform_descriptors", ["zip"]), "extensions"),
        (lambda metadata: metadata.storage_data.clear(), "in no file"),
        (lambda metadata: setattr(metadata, "planner_data", {"w": [("a",)] * 3}), "path"),
        (lambda metadata: setattr(metadata, "planner_data", {"w": ("a", 1 << 40), "step": ("b",)}), "lists of"),
        (lambda metadata: setattr(metadata, "planner_data", {"w": ("a",) * 65}), "path"),
        (lambda metadata: setattr(metadata, "state_dict_metadata", {"w": shared_lists()}), "in place of a"),
        (lambda metadata: setattr(metadata, "state_dict_metadata", shared_lists()), "in place of a dict"),
        (lambda metadata: setattr(metadata, "state_dict_metadata", {"w": Path("/")}), "in place of a"),
    ],
)
def test_hostile_metadata_of_torch_is_refused(tmp_path, change, error):
    dcp.save({"w": torch.ones(100), "step": 1}, checkpoint_id=tmp_path)
    own_metadata(tmp_path, change)
    with pytest.raises(shmtensor.CheckpointError, match=error):
        StorageReader(tmp_path).read_metadata()


def test_a_part_of_short_rows_is_not_written_out_row_by_row():
    entry = Entry("w", True, "float32", (1 << 40, 2), None, 0, 0)
    assert _rows(entry, (slice(0, 1 << 40), slice(0, 1))) is None
    assert _rows(entry._replace(shape=(4, 1024)), (slice(1, 3), slice(0, 512))).starts == [4096, 8192]


def test_no_code_of_a_metadata_runs(tmp_path):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    dcp.save({"w": torch.ones(100)}, checkpoint_id=tmp_path)
    for value in (Attack(), {"version": Attack()}):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(value))
        with pytest.raises(shmtensor.CheckpointError, match="no metadata"):
            StorageReader(tmp_path).read_metadata()
    assert not (tmp_path / "ran").exists()


def test_damaged_pickles_are_refused(tmp_path):
    dcp.save({"w": torch.ones(100), "step": 1}, checkpoint_id=tmp_path)
    path = tmp_path / ".metadata"
    data = path.read_bytes()
    generator = np.random.default_rng(1)
    for _ in range(300):
        damaged = bytearray(data[: generator.integers(1, len(data) + 1)])
        damaged[generator.integers(0, len(damaged))] = generator.integers(0, 256)
        path.write_bytes(damaged)
        with contextlib.suppress(shmtensor.CheckpointError):
            StorageReader(tmp_path).read_metadata()


# --- objects


class Custom:
    pass


def test_objects_that_are_not_plain_are_refused(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    with StorageWriter(ours) as writer:
        dcp.save({"a": Custom(), "b": [1, "x", None, 2.5, (3, 4)]}, storage_writer=writer)
    dcp.save({"a": Custom()}, checkpoint_id=theirs)
    for path in (ours, theirs):
        with pytest.raises(dist.checkpoint.api.CheckpointException, match="add_safe_globals"):
            dcp.load({"a": None}, storage_reader=StorageReader(path))
        state = {"a": None}
        dcp.load(state, storage_reader=StorageReader(path, weights_only=False))
        assert type(state["a"]) is Custom
    assert load_all("b", storage_reader=StorageReader(ours)) == {"b": [1, "x", None, 2.5, (3, 4)]}


# --- what a part says of its items


def part(tmp_path, tensors, objects=(), *, state=None) -> None:
    """A checkpoint of one rank with a description of any kind."""
    meta = {KEY: {"version": 1, "tensors": tensors, "objects": list(objects)}}
    with CheckpointWriter(tmp_path, rank=0, world_size=1) as writer:
        writer.save({"tensors": {"w": torch.ones(4)}} if state is None else state, meta=meta)


@pytest.mark.parametrize(
    ("tensors", "objects", "error"),
    [
        ([["w", ["w"], [8], [0]]], [], "its chunks have"),
        ([["w", ["w"], [4], [1]]], [], "has a chunk"),
        ([["w", ["w"], [4], [-1]]], [], "offsets"),
        ([["w", ["w"], [1 << 62], [0]]], [], "offsets|more than"),
        ([["w", ["w"], [4, 1], [0, 0]]], [], "offsets"),
        ([["w", [None], [4], [0]]], [], "path"),
        ([["w", ["w"] * 1000, [4], [0]]], [], "path"),
        ([["w" * 5000, None, [4], [0]]], [], "path"),
        ([], [], "0 of 1 tensors"),
        ([], [["w", ["w"], 16]], "the objects are in"),
        (None, [], "no lists"),
        ([7], [], "invalid item"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(tmp_path, tensors, objects, error):
    part(tmp_path, tensors, objects)
    with pytest.raises(shmtensor.CheckpointError, match=error):
        StorageReader(tmp_path).read_metadata()


def test_tensors_that_repeat_a_few_bytes_are_refused(tmp_path):
    few = torch.ones(4)
    part(tmp_path, [["w", ["w"], [1000], [0]]], state={"w": few[:1].expand(1000)})
    with pytest.raises(shmtensor.CheckpointError, match="no dense tensor"):
        StorageReader(tmp_path).read_metadata()
    part(tmp_path, [[f"w{n}", None, [4], [0]] for n in range(100)], state=[few] * 100)
    with pytest.raises(shmtensor.CheckpointError, match="times as large"):
        StorageReader(tmp_path).read_metadata()


def test_checkpoints_of_others_are_told_apart(tmp_path):
    with CheckpointWriter(tmp_path / "one") as writer:
        writer.save({"w": torch.ones(4)})
    with pytest.raises(shmtensor.CheckpointError, match="neither by"):
        StorageReader(tmp_path / "one").read_metadata()
    with CheckpointWriter(tmp_path / "two", rank=0, world_size=1) as writer:
        writer.save({"w": torch.ones(4)})
    with pytest.raises(shmtensor.CheckpointError, match=r"not saved by shmtensor\.dcp"):
        StorageReader(tmp_path / "two").read_metadata()
    with pytest.raises(FileNotFoundError):
        StorageReader(tmp_path / "none").read_metadata()


def test_damage_is_found(tmp_path):
    state = {"w": torch.ones(5000), "step": 1}
    with StorageWriter(tmp_path) as writer:
        dcp.save(state, storage_writer=writer)
    file = tmp_path / "step-00000001" / "rank-00000.distcp"
    data = bytearray(file.read_bytes())
    data[data.index(torch.ones(5000).numpy().tobytes()) + 40] ^= 1
    file.write_bytes(data)
    with pytest.raises(dist.checkpoint.api.CheckpointException, match="damaged"):
        dcp.load(state, storage_reader=StorageReader(tmp_path))
    dcp.load(state, storage_reader=StorageReader(tmp_path, verify=False))
    assert int((state["w"] != 1).sum()) == 1


def test_ranks_must_find_the_same_checkpoint(tmp_path):
    reader = StorageReader(tmp_path)
    plans = [dcp.LoadPlan([], storage_data=f"/runs/step-{step}") for step in (1, 2)]
    with pytest.raises(shmtensor.CheckpointError, match="rank 1 'step-2'"):
        reader.prepare_global_plan(plans)


def test_arguments_are_checked(tmp_path):
    with StorageWriter(tmp_path / "a") as writer:
        with pytest.raises(shmtensor.ArgumentError, match="is not in"):
            writer.reset(tmp_path / "b" / "name")
        with pytest.raises(shmtensor.ArgumentError, match="use 1 to 200"):
            writer.reset("-")
        with pytest.raises(shmtensor.ArgumentError, match="use_collectives"):
            writer.set_up_storage_writer(True, rank=0, use_collectives=False)
        with pytest.raises(dist.checkpoint.api.CheckpointException, match="no dense tensor"):
            dcp.save({"w": torch.ones(3).to_sparse()}, storage_writer=writer)
        dcp.save({"w": torch.ones(3)}, storage_writer=writer, checkpoint_id="a")
        with pytest.raises(dist.checkpoint.api.CheckpointException, match="exists"):
            dcp.save({"w": torch.ones(3)}, storage_writer=writer, checkpoint_id="a")
        dcp.save({"w": torch.ones(3)}, storage_writer=writer, checkpoint_id="b")
    assert names_in(tmp_path / "a") == {"a", "b"}
    with pytest.raises(shmtensor.ArgumentError, match="URL"):
        StorageWriter("s3://bucket/runs")
    assert StorageWriter.validate_checkpoint_id("runs/a/")
    assert not StorageWriter.validate_checkpoint_id("s3://runs/a")
    assert StorageReader.validate_checkpoint_id("s3://runs/a")


# --- what trainings have


def sharded_training(count: int):
    """FSDP2 over all ranks, with an optimizer that has a state."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (count,))
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 7, bias=False))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh), torch.optim.AdamW(model.parameters(), lr=0.5)


def of_training(rank, count, path, action):
    """Save a training, or load it and say which values are others."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = sharded_training(count)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    distributed = {name: leaf for name, leaf in leaves(states).items() if isinstance(leaf, DTensor)}
    assert len(distributed) == 9
    expected = {
        name: torch.arange(leaf.numel(), dtype=leaf.dtype).reshape(leaf.shape) + number
        for number, (name, leaf) in enumerate(distributed.items())
    }
    if action == "save":
        for name, leaf in distributed.items():
            leaf.to_local().copy_(local(expected[name], leaf.device_mesh, leaf.placements).to_local())
        with StorageWriter(path) as writer:
            dcp.save(states, storage_writer=writer, planner=dcp.DefaultSavePlanner(enable_plan_caching=True))
            dcp.save(states, storage_writer=writer, planner=dcp.DefaultSavePlanner(enable_plan_caching=True))
        return []
    dcp.load(states, storage_reader=StorageReader(path))
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    again = leaves(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)))
    return [name for name, tensor in expected.items() if not torch.equal(again[name].full_tensor(), tensor)]


def test_a_training_goes_on_with_another_number_of_ranks(play, tmp_path):
    path = tmp_path / "runs"
    play(3, of_training, str(path), "save")
    assert names_in(path) == {"save-00000001", "save-00000002"}
    assert play(2, of_training, str(path), "load") == [[], []]


def plain_layers(seed: int):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 5))


def of_tensor_parallel(rank, count, path, action, width):
    """Save layers that are split over `width` ranks each, and over the rest by FSDP2; or load them and say which
    values are others, and which placements there were."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = plain_layers(0 if action == "save" else rank + 1)
    mesh = init_device_mesh("cpu", (count // width, width), mesh_dim_names=("data", "tensor"))
    if width > 1:
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if count > width:
        fully_shard(model, mesh=mesh["data"])
    state = {"model": model.state_dict()}
    if action == "save":
        with StorageWriter(path) as writer:
            dcp.save(state, storage_writer=writer)
    else:
        dcp.load(state, storage_reader=StorageReader(path))
    wrong, placements = [], set()
    for name, tensor in plain_layers(0).state_dict().items():
        leaf = state["model"][name]
        if isinstance(leaf, DTensor):
            placements.add(str(leaf.placements))
            leaf = leaf.full_tensor()
        if not torch.equal(leaf, tensor):
            wrong.append(name)
    return wrong, sorted(placements)


def test_tensor_parallel_layers_go_on_in_another_layout(play, tmp_path):
    """Four ranks save two halves of each layer, which FSDP2 shards again: so pieces of one dimension are strided."""
    path = str(tmp_path / "runs")
    saved = play(4, of_tensor_parallel, path, "save", 2)
    assert all(wrong == [] and any("StridedShard" in each for each in placements) for wrong, placements in saved)
    for count, width in ((2, 2), (4, 4), (3, 1), (6, 2), (1, 1)):
        for wrong, _ in play(count, of_tensor_parallel, path, "load", width):
            assert wrong == [], (count, width)


def test_a_writer_stays_in_its_process(tmp_path):
    with StorageWriter(tmp_path) as writer, pytest.raises(shmtensor.ArgumentTypeError, match="THREAD"):
        pickle.dumps(writer)


@pytest.mark.parametrize("module", ["writer", "reader"])
def test_the_examples_run(module):
    found = doctest.testmod(importlib.import_module(f"shmtensor.dcp.{module}"))
    assert found.attempted
    assert not found.failed
