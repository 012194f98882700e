"""Checkpoints at URLs: loading from servers of this machine, and what an upload costs the training beside it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .. import processes, states
from ..measure import RowSpec, Samples
from ..processes import DEFAULT_THREADS, Role, run_roles
from ..servers import BUCKET, Server, http_server, lacks, s3_server
from ..sizes import MIB
from ..transports import SHMTENSOR, TORCH_DESCRIPTOR
from .base import Case, Effort, Workload
from .loading import HeldMemory
from .saving import own_memory

HTTP, S3 = "HTTP", "S3"
GET, LOAD, INTO, TENSORIZER = "fsspec get", "shmtensor load_checkpoint", "shmtensor load_into", "tensorizer"
UPLOAD = "upload to S3, 1024 MiB"
LOADED, UPLOADED, TINY = 1024 * MIB, 1024 * MIB, 1 * MIB
PATIENCE = 900.0
OURS, THEIRS = "a.safetensors", "a.tensors"
STEPS = 10


def _make(folder: Path, nbytes: int) -> dict[str, Any]:
    import shmtensor

    state = states.flat(nbytes)
    with shmtensor.CheckpointWriter(folder, memory=64 * MIB) as writer:
        writer.save(state, name="a")
    return state


def _connect(server: Server) -> None:
    import fsspec

    os.environ.update(server.environment)
    fsspec.config.set_conf_env(fsspec.config.conf)


_folder = partial(tempfile.TemporaryDirectory, ignore_cleanup_errors=True)
"""Nothing stays if a process is killed."""


# --- loading


def _take_turns(
    meet: Callable[[], object], folder: Path, server: Server, nbytes: int, ways: Sequence[str], rounds: int
) -> list[dict[str, float]]:
    """Seconds of each way in each round; the file that `get` writes is in shared memory, as no disk is measured."""
    import fsspec
    import torch

    import shmtensor

    _connect(server)
    state = _make(folder, nbytes)
    url = f"{server.url}/{OURS}"
    fs = fsspec.filesystem("s3" if server.environment else "http")
    if server.environment:
        fs.mkdir(BUCKET)
        fs.put_file(str(folder / OURS), f"{BUCKET}/{OURS}")
    if TENSORIZER in ways:
        from tensorizer import TensorSerializer

        serializer = TensorSerializer(str(folder / THEIRS))
        serializer.write_state_dict(state)
        serializer.close()
        if server.environment:
            fs.put_file(str(folder / THEIRS), f"{BUCKET}/{THEIRS}")
    module = torch.nn.Module()
    module.layer = torch.nn.Module()
    for name, tensor in state.items():
        module.layer.register_buffer(name.rpartition(".")[2], torch.zeros_like(tensor))

    def into() -> dict[str, Any]:
        shmtensor.load_into(module, url)
        return module.state_dict()

    def tensorizer() -> dict[str, Any]:
        from tensorizer import TensorDeserializer
        from tensorizer.stream_io import open_stream

        where = server.environment
        stream = open_stream(
            f"{server.url}/{THEIRS}", s3_access_key_id=where.get("AWS_ACCESS_KEY_ID"),
            s3_secret_access_key=where.get("AWS_SECRET_ACCESS_KEY"), s3_region_name=where.get("AWS_DEFAULT_REGION"),
            s3_endpoint=where.get("FSSPEC_S3_ENDPOINT_URL", "").removeprefix("http://") or None, force_http=True,
        )  # fmt: skip
        with TensorDeserializer(stream, device="cpu") as tensors:
            return dict(tensors.items())

    with tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as room:
        target = os.path.join(room, OURS)
        run: dict[str, Callable[[], Any]] = {
            GET: lambda: fs.get(url, target), LOAD: lambda: shmtensor.load_checkpoint(url), INTO: into,
            TENSORIZER: tensorizer,
        }  # fmt: skip
        found: list[dict[str, float]] = []
        memory = HeldMemory()
        for turn in range(-1, rounds):  # the first one is not counted: imports, connections
            found.append({})
            for way in random.Random(turn).sample(ways, len(ways)):
                memory.hold(nbytes * 5 // 4)
                memory.free()
                start = time.perf_counter()
                back = run[way]()
                found[-1][way] = time.perf_counter() - start
                if way == GET:
                    os.unlink(target)
                elif turn < 0 and not all(torch.equal(back[name], tensor) for name, tensor in state.items()):
                    raise AssertionError(f"{way} loaded other values")
                del back
    return found[1:]


# --- uploading


def _upload(meet: Callable[[], object], folder: Path, server: Server, effort: Effort) -> Samples:
    """Seconds of training steps alone and while a checkpoint is uploaded; bytes that the writing process takes above
    what it took before its first save, while one is uploaded and nothing is computed."""
    import fsspec

    import shmtensor

    _connect(server)
    fsspec.filesystem("s3").mkdir(BUCKET)
    tiny = effort.scale == "tiny"
    training = states.Training(states.TOY if tiny else states.TRAINED, batch=2, length=63)
    state, clock = states.flat(TINY if tiny else UPLOADED), time.perf_counter
    samples: Samples = {"alone": [], "beside": [], "memory": []}

    def steps(name: str, done: Callable[[int], bool]) -> None:
        count = 0
        while not done(count):
            start = clock()
            training.step()
            samples[name].append(clock() - start)
            count += 1

    for _ in range(STEPS):
        training.step()
    with shmtensor.CheckpointWriter(folder, upload=f"{server.url}/run") as writer:
        writer.start(state)
        pid = writer.statistics().pid
        idle = most = own_memory(pid)
        uploaded = writer.save(state).uploaded
        while not uploaded.done():
            most = max(most, own_memory(pid))
            time.sleep(0.005)
        uploaded.result(PATIENCE)
        samples["memory"] = [most - idle]

        steps("alone", lambda count: count == STEPS)
        handle = writer.save(state)
        handle.durable.result(PATIENCE)
        steps("beside", lambda count: count > 0 and handle.uploaded.done())
        handle.uploaded.result(PATIENCE)
        steps("alone", lambda count: count == STEPS)
    return samples


# --- all of it


def measure(effort: Effort, names: Sequence[str], rounds: int) -> Mapping[str, list[Samples]]:
    """Per server a process that loads in each way, one right after the other, in so many rounds; then the upload."""
    found: dict[str, list[Samples]] = {}
    with processes.patience(PATIENCE):
        for kind in (HTTP, S3):
            ways = [CASES[name][1] for name in names if name in CASES and CASES[name][0] == kind]
            if ways:
                nbytes = TINY if effort.scale == "tiny" else LOADED
                with _folder() as folder, _server(kind, Path(folder)) as server:
                    [turns] = run_roles(
                        [Role(_take_turns, (Path(folder), server, nbytes, ways, rounds), DEFAULT_THREADS)]
                    )
                found |= {_name(kind, way): [{"seconds": [turn[way]]} for turn in turns] for way in ways}
        if UPLOAD in names:
            found[UPLOAD] = []
            for _ in range(1 if effort.scale == "tiny" else min(rounds, 3)):
                with _folder() as folder, s3_server(yields=True) as server:
                    found[UPLOAD] += run_roles([Role(_upload, (Path(folder), server, effort), 1)])
    return found


def _server(kind: str, folder: Path) -> contextlib.AbstractContextManager[Server]:
    return http_server(folder) if kind == HTTP else s3_server()


def _needs(kind: str, way: str) -> str | None:
    if way == TENSORIZER and importlib.util.find_spec(TENSORIZER) is None:
        return f"{TENSORIZER} is not installed"
    return lacks(kind)


def _name(kind: str, way: str) -> str:
    return f"{way}, {kind}, {LOADED // MIB} MiB"


def row_name(kind: str, way: str) -> str:
    """The name of the row of a way of loading."""
    return f"load: {_name(kind, way)}"


_PAIRS = [(kind, way) for kind in (HTTP, S3) for way in (GET, LOAD, INTO, TENSORIZER)]
CASES = {_name(kind, way): (kind, way) for kind, way in _PAIRS}
BESIDE, ALONE = "training step beside an upload of 1024 MiB", "training step alone"
MEMORY = "memory that an upload of 1024 MiB adds to the writing process"


def _transport(way: str) -> Any:
    return SHMTENSOR if way.startswith("shmtensor") else TORCH_DESCRIPTOR


WORKLOAD = Workload(
    name="remote",
    title="Checkpoints at URLs of this machine",
    what=(
        "64 float32 tensors in one file. HTTP: aiohttp's static files (sendfile); S3: moto's server, which keeps "
        "objects in memory and reads the whole object for each range that it is asked for; each a process of its own "
        "on the same cores as its client. One process loads in every way, one right after the other, in an order that "
        "differs from round to round; a first round is not counted. fsspec's get writes a file in shared memory, and "
        "compares nothing; load_checkpoint makes the tensors in fresh memory, load_into fills tensors that exist, and "
        "both compare digests. Before each turn memory is held and freed, as in the table of loading. "
        "tensorizer streams a file of its own format, from S3 by a signed URL. Upload: a step of a transformer of 11 "
        "million parameters with one torch thread, alone, and while 1 GiB is uploaded to moto's server, which has the "
        "lowest priority, as it stands for another machine. Memory: the most that the writing process's resident "
        "memory without shared memory (RssAnon + RssFile, looked at every 5 ms) is above what it was before its first "
        "save, during an upload while nothing is computed; s3fs's modules are part of it."
    ),
    cases=(
        *(
            Case(
                name, _transport(way), None, quick=kind == HTTP and way in (GET, LOAD), needs=partial(_needs, kind, way)
            )
            for name, (kind, way) in CASES.items()
        ),
        Case(UPLOAD, SHMTENSOR, None, quick=False, needs=partial(lacks, S3)),
    ),
    rows=(
        *(
            RowSpec(
                row_name(kind, way), _transport(way).name, name, "seconds", "ms", 1e3,
                None if way == GET else row_name(kind, GET),
            )
            for name, (kind, way) in CASES.items()
        ),
        RowSpec(BESIDE, SHMTENSOR.name, UPLOAD, "beside", "ms", 1e3, ALONE),
        RowSpec(ALONE, SHMTENSOR.name, UPLOAD, "alone", "ms", 1e3),
        RowSpec(MEMORY, SHMTENSOR.name, UPLOAD, "memory", "MiB", 1 / MIB),
    ),
    rounds={"full": 5, "quick": 3},
    by_turns=measure,
)  # fmt: skip
