"""The files of one save while they are written: by several threads, past the page cache or not."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from shmtensor.checkpoint import output
from shmtensor.checkpoint.limits import PAGE
from shmtensor.checkpoint.output import Output
from shmtensor.memory.mapped_file import fresh

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
    real, refused, direct = output._write, [], {each.fd for each in target._direct} - {-1}

    def refuse(fd: int, view: memoryview, offset: int) -> None:
        if fd in direct:
            refused.append(offset)
            if len(refused) > after:
                raise OSError(errno.EINVAL, "as some file systems do")
        real(fd, view, offset)

    monkeypatch.setattr(output, "_write", refuse)
    write_all(target, memory)
    assert not direct or after < len(refused) < COUNT  # the rest was not even tried
    assert finished(target, tmp_path / "a") == patched(memory)


def test_an_error_is_no_refusal(tmp_path, memory, monkeypatch):
    def full(fd: int, view: memoryview, offset: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    target = Output(str(tmp_path / "a"), [("", NBYTES)])
    monkeypatch.setattr(output, "_write", full)
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
