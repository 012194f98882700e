"""Others' ways of saving a state: when the call returns, when the files are complete, when they are on the disk."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from .sizes import MIB

Times = dict[str, float]
"""Seconds since the call: `"stall"` until it returned, `"written"` until the files were complete, `"durable"` until
they and their directory were synced."""
Save = Callable[[Any, Path], Times]


def sync(path: Path) -> None:
    """Make a file, or the files of a directory, durable."""
    for each in (*(path.rglob("*") if path.is_dir() else ()), path, path.parent):
        fd = os.open(each, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def dd(folder: Path, nbytes: int) -> float:
    """Seconds that dd takes to write as many zeros, past the page cache where it can be passed."""
    target, block = folder / "dd", min(nbytes, 16 * MIB)
    command = ["dd", "if=/dev/zero", f"of={target}", f"bs={block}", f"count={nbytes // block}"]
    try:
        for flag in ("oflag=direct", "conv=fsync"):
            start = time.perf_counter()
            if subprocess.run([*command, flag], capture_output=True).returncode == 0:
                return (time.perf_counter() - start) * nbytes / (nbytes // block * block)
    finally:
        target.unlink(missing_ok=True)
    raise RuntimeError("dd cannot write here")


def _timed(save: Callable[[Any, Path], Callable[[], object]], state: Any, path: Path) -> Times:
    start = time.perf_counter()
    wait = save(state, path)
    stall = time.perf_counter() - start
    wait()
    written = time.perf_counter() - start
    sync(path)
    return {"stall": stall, "written": written, "durable": time.perf_counter() - start}


def _nothing() -> None:
    pass


def _torch_save(state: Any, path: Path) -> Callable[[], object]:
    import torch

    torch.save(state, path)
    return _nothing


def _safetensors(state: Any, path: Path) -> Callable[[], object]:
    import safetensors.torch

    safetensors.torch.save_file(state, path)
    return _nothing


def _serialize(path: Path, state: Any) -> None:
    from tensorizer import TensorSerializer

    serializer = TensorSerializer(str(path))
    serializer.write_state_dict(state)
    serializer.close()


def _tensorizer(state: Any, path: Path) -> Callable[[], object]:
    _serialize(path, state)
    return _nothing


def _tensorizer_process(state: Any, path: Path) -> Callable[[], object]:
    import torch.multiprocessing

    process = torch.multiprocessing.get_context("spawn").Process(target=_serialize, args=(path, state))
    process.start()

    def wait() -> None:
        process.join()
        if process.exitcode:
            raise RuntimeError(f"tensorizer's process ended with {process.exitcode}")

    return wait


def files(path: Path) -> Any:
    from torch.distributed.checkpoint import FileSystemWriter

    return FileSystemWriter(path, sync_files=False)


def _dcp(state: Any, path: Path) -> Callable[[], object]:
    import torch.distributed.checkpoint as dcp

    dcp.save(state, storage_writer=files(path), no_dist=True)
    return _nothing


def one_rank() -> None:
    """The process group of one rank that DCP's `async_save` asks for."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        os.environ.setdefault("MASTER_ADDR", "localhost")


def make_stager(**options: bool) -> Any:
    """DCP's `DefaultStager` for several saves, with these `StagingOptions`: it copies into memory that it keeps."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    stager = DefaultStager(StagingOptions(**options))
    stager._state_dict_stager.close = lambda: None  # torch 2.11 drops the buffers after a save, and fails at the next
    return stager


def lacks_stager() -> str | None:
    """Why this torch makes none."""
    try:
        from torch.distributed.checkpoint.staging import DefaultStager  # noqa: F401
    except ImportError:
        return "this torch has no DefaultStager"
    return None


_of_process = cache(make_stager)


def _dcp_async(kind: str, state: Any, path: Path, *, keeps: bool = False) -> Callable[[], object]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    one_rank()
    stager = {}
    if keeps:
        stager["async_stager"] = _of_process(
            use_pinned_memory=False, use_shared_memory=kind == "process", use_async_staging=False,
            use_non_blocking_copy=False,
        )  # fmt: skip
    future = dcp.async_save(
        state, storage_writer=files(path), async_checkpointer_type=AsyncCheckpointerType(kind), **stager
    )
    return future.result  # type: ignore[union-attr]


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Nothing reaches standard error, of processes neither that are started meanwhile: DCP's logs each of its saves."""
    before, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)


@dataclass(frozen=True)
class Saver:
    """A rival."""

    save: Save
    module: str
    """What must be installed."""
    background: bool = False
    """Whether the call returns before the files are complete."""
    nested: bool = True
    """Whether it takes states that are more than a flat dict of tensors."""
    judged: bool = False
    """Whether a target names it."""
    needs: Callable[[], str | None] = lambda: None
    """Why what is installed cannot do it; None if it can."""

    def lacks(self) -> str | None:
        return self.needs() if importlib.util.find_spec(self.module) is not None else f"{self.module} is not installed"


THREADS, PROCESS = "DCP async_save, threads", "DCP async_save, process"
_DCP_MODES = {"thread": THREADS, "process": PROCESS}
SAVERS: dict[str, Saver] = {
    "torch.save": Saver(partial(_timed, _torch_save), "torch"),
    "safetensors save_file": Saver(partial(_timed, _safetensors), "safetensors", nested=False),
    "tensorizer": Saver(partial(_timed, _tensorizer), "tensorizer", nested=False),
    "tensorizer, subprocess": Saver(partial(_timed, _tensorizer_process), "tensorizer", background=True, nested=False),
    "DCP save": Saver(partial(_timed, _dcp), "torch"),
    **{
        name: Saver(partial(_timed, partial(_dcp_async, kind)), "torch", background=True, judged=True)
        for kind, name in _DCP_MODES.items()
    },
    **{
        f"{name}, stager kept": Saver(
            partial(_timed, partial(_dcp_async, kind, keeps=True)), "torch", background=True, needs=lacks_stager
        )
        for kind, name in _DCP_MODES.items()
    },
}
