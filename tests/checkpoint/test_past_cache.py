"""Reading checkpoints past the page cache: the right bytes whatever the kernel allows, and what is cached from it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from shmtensor import CheckpointError, load_checkpoint
from shmtensor.checkpoint import reading as module
from shmtensor.checkpoint.locations import DIRECT_MIN, PAGE, stamp
from shmtensor.checkpoint.reading import Files, private
from shmtensor.memory.descriptors import open_file
from shmtensor.memory.mapped_file import fresh

from ..waiting import wait_until
from .state_files import same, save

MIB = 1 << 20
LIBC = ctypes.CDLL(None)


@pytest.fixture
def make(tmp_path):
    """A file of random bytes on the disk, and the bytes."""

    def make(nbytes: int, name: str = "a") -> tuple[Path, np.ndarray]:
        data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
        path = tmp_path / name
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return path, data

    return make


@pytest.fixture
def reads(monkeypatch):
    """The reads past the page cache: file descriptor, offset, bytes that came, address."""
    made, plain = [], os.preadv

    def preadv(fd, buffers, offset):
        count = plain(fd, buffers, offset)
        if fd in past:
            made.append((fd, offset, count, buffers[0].__array_interface__["data"][0]))
        return count

    past = set()
    opened = module._open_direct

    def open_direct(fd):
        found = opened(fd)
        past.add(found.fd)
        return found

    monkeypatch.setattr(module.os, "preadv", preadv)
    monkeypatch.setattr(module, "_open_direct", open_direct)
    return made


@pytest.fixture
def cold(monkeypatch):
    """Nothing seems to be in the page cache, and every file system lets itself be read past it."""
    monkeypatch.setattr(module, "is_cached", lambda fd, offset: False)
    monkeypatch.setattr(module, "_DIRECT", os.O_CLOEXEC)  # a flag that changes nothing


def resident(path: Path) -> set[int]:
    """The pages of a file that the page cache has."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        memory = np.frombuffer(mapped, np.uint8)
        found = np.zeros(-(-len(memory) // mmap.PAGESIZE), np.uint8)
        address = ctypes.c_void_p(memory.ctypes.data)
        assert not LIBC.mincore(address, ctypes.c_size_t(len(memory)), ctypes.c_void_p(found.ctypes.data))
        del memory
        return set(np.flatnonzero(found & 1).tolist())


def forget(path: Path) -> None:
    """Drop a file from the page cache; skip where that, or reading past it, cannot be."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        if not path.read_bytes() or not resident(path):
            pytest.skip("this file system does not keep files in the kernel's page cache")
        for _ in range(50):  # what was written just now is not let go of at once
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if not resident(path):
                break
            time.sleep(0.02)
        else:
            pytest.skip("this file system keeps everything in memory")
        try:
            past = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                os.preadv(past, [fresh(PAGE)], 0)
            finally:
                os.close(past)
        except OSError as error:
            pytest.skip(f"this file system cannot be read past the page cache: {error}")
    finally:
        os.close(fd)


def read_all(path: Path, nbytes: int) -> np.ndarray:
    memory = fresh(nbytes)
    with Files([path], [stamp(path)]) as files:
        files.fill(memory, 0, 0, "x")
    return memory


# --- with the kernel's page cache


def test_what_the_page_cache_has_comes_from_there(make, reads):
    path, data = make(8 * MIB)
    path.read_bytes()
    if not resident(path):
        pytest.skip("this file system does not keep files in the kernel's page cache")
    assert (read_all(path, len(data)) == data).all()
    assert not reads


def test_what_it_has_not_comes_past_it_once_and_through_it_the_next_time(make, reads):
    path, data = make(8 * MIB + 5000)
    forget(path)
    assert (read_all(path, len(data)) == data).all()
    assert sum(count for _, _, count, _ in reads) == len(data) // PAGE * PAGE
    reads.clear()
    wait_until(lambda: len(data) // 2 // mmap.PAGESIZE in resident(path))  # the mark, which nobody has waited for
    assert len(resident(path)) < len(data) // mmap.PAGESIZE // 4
    assert (read_all(path, len(data)) == data).all()
    assert not reads


def test_what_was_written_and_is_not_on_the_disk_yet_is_read(make):
    path, data = make(4 * MIB)
    forget(path)
    with path.open("r+b") as file:
        file.seek(MIB)
        file.write(bytes(MIB))
        file.flush()
        data[MIB : 2 * MIB] = 0
        assert (read_all(path, len(data)) == data).all()


def test_a_checkpoint_that_is_on_the_disk_only(tmp_path, reads):
    state = {
        "step": torch.ones(()),
        "odd": torch.arange(5 * MIB // 4 + 7, dtype=torch.int32),
        "lines": torch.arange(5 * MIB // 4 + 48, dtype=torch.int32),
        "pages": torch.ones(8 * MIB, dtype=torch.uint8),
    }
    path = save(state, tmp_path / "a.safetensors")
    forget(path)
    assert same(load_checkpoint(path, map=False), state)
    assert sum(count for _, _, count, _ in reads) == 13 * MIB  # the odd ones come last, and disturb none


# --- with a stand-in for it


@pytest.mark.parametrize("readers", [1, 3])
def test_checkpoints_of_all_sizes(tmp_path, cold, reads, readers):
    sizes = [DIRECT_MIN, 4 * MIB, 4 * MIB + 64, 9 * MIB - 64, 0, 64, 5 * MIB + 1, 6 * MIB]
    generator = torch.Generator().manual_seed(0)
    state = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]
    path = save(state, tmp_path / "a.safetensors")
    assert same(load_checkpoint(path, map=False, readers=readers), state)
    assert sum(count for _, _, count, _ in reads) > 4 * MIB * 3
    assert all(not value % PAGE for read in reads for value in read[1:])


@pytest.mark.parametrize("length", [DIRECT_MIN - 1, DIRECT_MIN, DIRECT_MIN + 1, 3 * MIB + 5])
@pytest.mark.parametrize("offset", [0, 1, 64, PAGE - 1, PAGE, 3 * PAGE + 64])
def test_whole_pages_come_past_the_cache_and_the_rest_through_it(make, cold, reads, offset, length):
    path, data = make(5 * MIB)
    with Files([path], [stamp(path)]) as files:
        alike = fresh(length + PAGE)[offset % PAGE :][:length]
        files.fill(alike, 0, offset, "x")
        lead = -offset % PAGE
        whole = (length - lead) // PAGE * PAGE if length - lead >= DIRECT_MIN else 0
        assert [(at, count) for _, at, count, _ in reads] == [(offset + lead, whole)] * bool(whole)
        reads.clear()
        other = fresh(length + PAGE)[offset % PAGE + 1 :][:length]
        files.fill(other, 0, offset, "x")
        assert not reads
    assert (alike == data[offset : offset + length]).all()
    assert (other == alike).all()


def test_stretches_are_looked_at_once_each(make, reads, monkeypatch):
    path, data = make(7 * MIB)
    looked = []

    def is_cached(fd, offset):
        looked.append(offset)
        return bool(offset // (2 * MIB) % 2)

    monkeypatch.setattr(module, "STRETCH", 2 * MIB)
    monkeypatch.setattr(module, "is_cached", is_cached)
    monkeypatch.setattr(module, "_DIRECT", os.O_CLOEXEC)
    memory = fresh(len(data))
    with Files([path], [stamp(path)]) as files:
        for at in range(0, len(data), MIB):
            files.fill(memory[at : at + MIB], 0, at, "x")
    assert (memory == data).all()
    assert looked == [MIB, 3 * MIB, 5 * MIB, 6 * MIB + MIB // 2]
    assert [offset // MIB for _, offset, _, _ in reads] == [0, 1, 4, 5]


def test_a_file_that_refuses_is_not_asked_again_and_others_are(make, cold, reads, monkeypatch):
    (one, data), (two, _) = make(6 * MIB, "one"), make(6 * MIB, "two")
    opened, asked = module._open_direct, []

    def open_direct(fd):  # the first is open for nothing but writing
        return open_file(str(one), os.O_WRONLY) if not asked and not asked.append(fd) else opened(fd)

    monkeypatch.setattr(module, "_open_direct", open_direct)
    memory = [fresh(6 * MIB), fresh(6 * MIB)]
    with Files([one, two], [stamp(one), stamp(two)]) as files:
        for file in (0, 1):
            for at in range(0, 6 * MIB, 2 * MIB):
                files.fill(memory[file][at : at + 2 * MIB], file, at, "x")
        assert files._refuses == [True, False]
    assert len(reads) == 3
    assert all((each == data).all() for each in memory)


def test_many_files_take_a_descriptor_each_until_one_is_read_past_the_cache(make, cold, reads, monkeypatch):
    paths = [make(2 * MIB, str(number))[0] for number in range(3)]
    fds = Path("/proc/self/fd")
    before = len(list(fds.iterdir()))
    with Files(paths, [stamp(path) for path in paths]) as files:
        assert len(list(fds.iterdir())) == before + 3
        files.fill(fresh(2 * MIB), 1, 0, "x")
        assert len(list(fds.iterdir())) == before + 4
        assert len(reads) == 1
        monkeypatch.setattr(module, "_open_direct", lambda fd: None)  # no more descriptors, or no /proc
        files.fill(fresh(2 * MIB), 2, 0, "x")
        assert len(reads) == 1
    assert len(list(fds.iterdir())) == before


def test_advice_may_be_refused(make, cold, reads, monkeypatch):
    path, data = make(2 * MIB)

    def refuse(*_):
        raise OSError(errno.ENOSYS, "no advice")

    monkeypatch.setattr(module.os, "posix_fadvise", refuse)
    assert (read_all(path, len(data)) == data).all()
    assert len(reads) == 1


@pytest.mark.parametrize("least", [1, PAGE, MIB])
def test_reads_that_bring_less_than_was_asked_for(make, cold, monkeypatch, least):
    path, data = make(4 * MIB)
    plain = os.preadv
    monkeypatch.setattr(module.os, "preadv", lambda fd, buffers, offset: plain(fd, [buffers[0][: MIB + least]], offset))
    assert (read_all(path, len(data)) == data).all()


def test_a_file_that_became_shorter(make, cold):
    path, data = make(4 * MIB)
    before = stamp(path)
    with Files([path], [before]) as files:
        os.truncate(path, 2 * MIB + 100)
        with pytest.raises(CheckpointError, match=rf"ends at offset {2 * MIB + 100}, inside tensor x: it is truncated"):
            files.fill(fresh(len(data)), 0, 0, "x")
    with pytest.raises(CheckpointError, match="changed while it was opened"):
        Files([path], [before])


def test_the_file_is_the_one_that_was_opened(make, cold, reads):
    path, _ = make(2 * MIB)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.replace(make(3 * MIB, "other")[0], path)
        with contextlib.closing(module._open_direct(fd)) as past:
            assert os.path.sameopenfile(fd, past.fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("offset", [0, 64, PAGE - 64, 5 * PAGE + 128, 8, 4095])
@pytest.mark.parametrize("nbytes", [4 * MIB, 6 * MIB + 1])
def test_memory_lies_in_its_pages_as_the_file_does(nbytes, offset):
    memory = private(nbytes, offset)
    assert len(memory) == nbytes
    address = memory.__array_interface__["data"][0]
    assert address % (2 * MIB) == (0 if offset % 64 else offset % PAGE)
    memory[:] = 1
