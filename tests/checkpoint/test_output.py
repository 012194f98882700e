"""The files of one save while they are written: by several threads, past the page cache or not."""

from __future__ import annotations

import errno
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import shmtensor
from shmtensor.checkpoint import names, output
from shmtensor.checkpoint.convert import convert
from shmtensor.checkpoint.formats import get_format
from shmtensor.checkpoint.locations import PAGE
from shmtensor.checkpoint.output import Output
from shmtensor.memory.mapped_file import fresh

from ..waiting import PATIENCE

PIECE = 16 * PAGE
COUNT = 20
NBYTES = PIECE * COUNT - 5  # what lies beyond is cut off


def write_all(target: Output, memory: np.ndarray) -> None:
    with ThreadPoolExecutor(4) as pool:
        view = memoryview(memory)
        for done in [
            pool.submit(target.write, 0, at, view[at : at + PIECE]) for at in reversed(range(0, COUNT * PIECE, PIECE))
        ]:
            done.result()


@pytest.fixture
def memory() -> np.ndarray:
    memory = fresh(COUNT * PIECE)
    memory[:] = np.random.default_rng(0).integers(0, 256, len(memory), np.uint8)
    return memory


def finished(target: Output, path: Path) -> bytes:
    target.patch(0, 3, b"patched")
    assert target.finish() == [("", NBYTES, os.stat(path).st_mtime_ns)]
    target.close()
    target.close()
    return path.read_bytes()


def patched(memory: np.ndarray) -> bytes:
    data = memory.tobytes()[:NBYTES]
    return data[:3] + b"patched" + data[10:]


def test_pieces_in_any_order_by_several_threads(tmp_path, memory):
    target = Output(str(tmp_path / "a"), [("", NBYTES)])
    write_all(target, memory)
    assert finished(target, tmp_path / "a") == patched(memory)


@pytest.mark.parametrize("after", [0, 7])
def test_a_file_system_that_refuses_direct_writes(tmp_path, memory, monkeypatch, after):
    """At once or in the middle: the other threads go on with the descriptor, and nothing of it is lost."""
    target = Output(str(tmp_path / "a"), [("", NBYTES)])
    with target._using(0) as file:
        direct = {file.direct.fd} if file.direct is not None else set()
    real, refused = output.write_all, []

    def refuse(fd: int, view: memoryview, offset: int) -> None:
        if fd in direct:
            refused.append(offset)
            if len(refused) > after:
                raise OSError(errno.EINVAL, "as some file systems do")
        real(fd, view, offset)

    monkeypatch.setattr(output, "write_all", refuse)
    write_all(target, memory)
    assert not direct or after < len(refused) < COUNT  # the rest was not even tried
    assert finished(target, tmp_path / "a") == patched(memory)


def test_an_error_is_no_refusal(tmp_path, memory, monkeypatch):
    def full(fd: int, view: memoryview, offset: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    target = Output(str(tmp_path / "a"), [("", NBYTES)])
    monkeypatch.setattr(output, "write_all", full)
    with pytest.raises(OSError, match="no space"):
        write_all(target, memory)
    target.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_truncated_is_not_gone_on_with(tmp_path, memory):
    """Zeros in the place of what was written before would be summed up as if they were the state."""
    path = tmp_path / "a"
    first = Output(str(path), [("", NBYTES)])
    first.write(0, 0, memoryview(memory)[:PIECE])
    first.close()
    os.truncate(path, PIECE // 2)
    with pytest.raises(OSError, match=f"truncated by somebody, from {NBYTES} bytes to {PIECE // 2}"):
        Output(str(path), [("", NBYTES)], resume=True)
    os.truncate(path, NBYTES)  # as `finish` leaves it, who may die before the save is in the list
    Output(str(path), [("", NBYTES)], resume=True).close()


def test_what_was_written_is_there_when_it_goes_on(tmp_path, memory):
    first = Output(str(tmp_path / "a"), [("", NBYTES)])
    first.write(0, 0, memoryview(memory)[:PIECE])
    first.close()
    second = Output(str(tmp_path / "a"), [("", NBYTES)], resume=True)
    back = bytearray(PIECE)
    second.read(0, 0, memoryview(back))
    assert bytes(back) == memory[:PIECE].tobytes()
    write_all(second, memory)
    assert finished(second, tmp_path / "a") == patched(memory)


def test_more_files_than_may_be_open(tmp_path, memory, monkeypatch):
    """Each is complete on disk before it is closed, and again if it was changed after that."""
    monkeypatch.setattr(output, "MOST_OPEN", 3)
    files = [(f"{number}", PIECE - number) for number in range(9)]
    synced, sync, inode_of = set(), os.fsync, lambda fd: os.fstat(fd).st_ino

    def fsync(fd: int) -> None:
        sync(fd)
        synced.add(inode_of(fd))

    def write(fd: int, view: memoryview, offset: int) -> None:
        synced.discard(inode_of(fd))
        real(fd, view, offset)

    real = output.write_all
    monkeypatch.setattr(output, "write_all", write)
    monkeypatch.setattr(os, "fsync", fsync)
    target = Output(str(tmp_path / "a"), files)
    with ThreadPoolExecutor(4) as pool:
        view = memoryview(memory)[:PIECE]
        assert list(pool.map(target.write, range(9), [0] * 9, [view] * 9)) == [None] * 9
    assert len(target._open) <= 3 + 3  # one that is being written is not closed
    target.patch(2, 3, b"patched")
    found = target.finish()
    assert synced >= {(tmp_path / "a" / name).stat().st_ino for name, _ in files}
    target.close()
    expected = [memory[:nbytes].tobytes() for _, nbytes in files]
    expected[2] = expected[2][:3] + b"patched" + expected[2][10:]
    assert [(tmp_path / "a" / name).read_bytes() for name, _ in files] == expected
    assert found == [(name, nbytes, (tmp_path / "a" / name).stat().st_mtime_ns) for name, nbytes in files]


@pytest.mark.parametrize("key", [None, bytes(32)], ids=["plain", "encrypted"])
def test_a_checkpoint_of_more_files_than_a_process_may_open(tmp_path, monkeypatch, channel, key):
    monkeypatch.setattr(names, "PREFIX", channel)  # which the leak check knows
    state = {f"w{number}": np.full(1024, number, np.float32) for number in range(300)}
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    with shmtensor.CheckpointWriter(tmp_path / "one", memory="8MiB") as writer:
        one = writer.save(state).durable.result(PATIENCE).path
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, usual[1]))
    try:
        with shmtensor.CheckpointWriter(tmp_path / "many", memory="8MiB", max_shard=4096, key=key) as writer:
            many = writer.save(state).durable.result(PATIENCE).path
        convert(get_format("safetensors").open(Path(one)), tmp_path / "converted", max_shard=4096)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    for path, more in ((many, {"key": key}), (tmp_path / "converted", {})):
        assert len(os.listdir(path)) == 301
        found = shmtensor.load_checkpoint(path, map=False, **more)
        assert all(np.array_equal(found[name], state[name]) for name in state)


def test_too_few_open_files_are_named(tmp_path):
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = [os.open("/", os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(opened) + 1, usual[1]))
    try:
        with pytest.raises(shmtensor.ResourceError, match=r"cannot open .*raise ulimit -n"):
            for _ in range(max(opened) + 2):
                Output(str(tmp_path / "a"), [("", NBYTES)])
                opened.append(os.dup(opened[0]))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        for fd in opened:
            os.close(fd)
