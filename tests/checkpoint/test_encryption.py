"""Encrypted checkpoints: keys, what comes back, what tampering does, how little a slice reads, what a death leaves."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import struct
import subprocess
import sys
import textwrap
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import shmtensor
from shmtensor.checkpoint import envelope, index, keys, names, opening, process_handle
from shmtensor.checkpoint.convert import Original, encrypt_file
from shmtensor.checkpoint.directory import LOCK, remove
from shmtensor.checkpoint.envelope import ENTRY, HIDDEN_DIGEST, SEGMENT, is_encrypted, read_envelope
from shmtensor.checkpoint.index import INDEX
from shmtensor.checkpoint.keys import KeyWrapper, MasterKey, Passphrase
from shmtensor.checkpoint.load import load_arrays, load_checkpoint
from shmtensor.checkpoint.opening import Opener
from shmtensor.checkpoint.writer import CheckpointWriter
from shmtensor.memory.locks import LockFile

from ..commands import app
from ..faults.interrupts import each_boundary, stride
from ..waiting import once, stop
from .state_files import SUFFIX, mixed_state, same, save
from .test_cli import run_and_die
from .test_deaths import EXCHANGE_POINTS, arm

pytest.importorskip("cryptography", reason="needs cryptography: pip install '.[crypto]'")

PATIENCE = 120.0
KEY = bytes(range(32))
OTHER = bytes(32)
CHEAP = Passphrase("correct horse ä", cost=10)
MARK = "a name that must not be readable"
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("own_channels")


class Wrapper:
    """A key service."""

    def __init__(self, mask: int = 0x5A) -> None:
        self.mask, self.calls = mask, []

    def wrap(self, key: bytes) -> bytes:
        self.calls.append("wrap")
        return b"wrapped:" + bytes(each ^ self.mask for each in key)

    def unwrap(self, wrapped: bytes) -> bytes:
        self.calls.append("unwrap")
        assert wrapped.startswith(b"wrapped:")
        return bytes(each ^ self.mask for each in wrapped[8:])


FORMS = {"bytes": KEY, "passphrase": CHEAP, "wrapper": Wrapper()}


@pytest.fixture
def own_channels(monkeypatch, channel):
    """Channel names that the leak check knows as this run's own."""
    monkeypatch.setattr(names, "PREFIX", channel)


@pytest.fixture(scope="module")
def state():
    rng = np.random.default_rng(1)
    return {MARK: rng.random((300, 1000)), "b": np.arange(20_000), "small": np.float32(3), "step": 7, "e": np.empty(0)}


@pytest.fixture
def sealed(state, tmp_path):
    """An encrypted safetensors file of several segments, by `encrypt_file`."""
    path = save(state, tmp_path / "a.safetensors")
    made = encrypt_file(path, None, MasterKey.of(KEY))
    path.unlink()
    return made


def write(directory, state, key=KEY, **options):
    with CheckpointWriter(directory, key=key, **options) as writer:
        return writer.save(state).durable.result(PATIENCE)


def holds(data: bytes, text: str) -> bool:
    return text.encode() in data


# --- what comes back


@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize("format", sorted(SUFFIX))
def test_round_trip(format, form, state, tmp_path):
    key = FORMS[form]
    done = write(tmp_path / "a", state, key, format=format)
    assert done.path.endswith(f"step-00000007{SUFFIX[format]}.encrypted")
    assert done.nbytes == os.path.getsize(done.path)
    data = Path(done.path).read_bytes()
    assert not holds(data, MARK)
    assert state["b"].tobytes()[800:1000] not in data
    for path in (done.path, tmp_path / "a", tmp_path / "a" / "latest", done.path.partition(".")[0]):
        assert same(load_arrays(path, key=key, verify="all"), state)
    assert same(load_arrays(done.path, map=False, key=key), state)
    assert same(shmtensor.load_newest(tmp_path / "a", key=key), state)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about half of these types
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("format", sorted(SUFFIX))
def test_a_bit_of_everything_streams(format, tmp_path):
    state = mixed_state() | {"long": torch.randn(900_000)}
    done = write(tmp_path / "a", state, format=format, memory="1MiB")
    assert same(load_checkpoint(done.path, key=KEY), state)
    with shmtensor.open_checkpoint(done.path, key=KEY) as checkpoint:
        assert torch.equal(checkpoint["long"].read(np.s_[77_777:78_000]), state["long"][77_777:78_000])
        assert torch.equal(checkpoint["transposed"].read(), state["transposed"])
        assert repr(checkpoint).startswith(f"<CheckpointReader '{done.path}' {format}")


def test_shards(state, tmp_path):
    done = write(tmp_path / "a", state, max_shard=500_000, keep_last=2)
    files = sorted(each.name for each in Path(done.path).iterdir())
    assert len(files) == 3
    assert all(name.endswith(".encrypted") for name in files)
    assert same(load_arrays(tmp_path / "a", key=KEY, verify="all"), state)
    first, second, index = (Path(done.path) / name for name in files)
    with pytest.raises(shmtensor.CheckpointError, match="pass its directory"):
        load_arrays(first, key=KEY)
    assert same(load_arrays(index, key=KEY), state)
    other = write(tmp_path / "b", state, max_shard=500_000)
    kept = first.read_bytes()
    first.write_bytes((Path(other.path) / first.name).read_bytes())
    with pytest.raises(shmtensor.CheckpointError, match="another checkpoint: it was swapped"):
        load_arrays(done.path, key=KEY)
    first.write_bytes(second.read_bytes())
    with pytest.raises(shmtensor.CheckpointError, match="another checkpoint: it was swapped"):
        load_arrays(done.path, key=KEY)
    first.unlink()
    with pytest.raises(shmtensor.CheckpointError, match="is missing"):
        load_arrays(done.path, key=KEY)
    first.write_bytes(kept)
    assert same(load_arrays(done.path, key=KEY), state)
    assert [found.error for found in shmtensor.list_checkpoints(tmp_path / "a")] == [None]


def test_several_ranks(tmp_path):
    writers = [CheckpointWriter(tmp_path / "a", rank=rank, world_size=2, key=CHEAP) for rank in range(2)]
    handles = [writer.save({"part": np.full(50_000, rank), "step": 3}) for rank, writer in enumerate(writers)]
    for handle in handles:
        handle.durable.result(PATIENCE)
    for writer in writers:
        writer.close()
    assert load_arrays(tmp_path / "a", rank=1, key=CHEAP)["part"][-1] == 1
    assert sorted(load_arrays(tmp_path / "a", key=CHEAP, verify="all")) == [0, 1]
    with pytest.raises(shmtensor.CheckpointError, match="encrypted: pass key="):
        load_arrays(tmp_path / "a", rank=1)
    (found,) = shmtensor.list_checkpoints(tmp_path / "a")
    assert (found.step, found.encrypted, found.error) == (3, True, None)


def test_load_into(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.BatchNorm1d(400))
    done = write(tmp_path / "a", {"model": module, "half": torch.ones(3)})
    like = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.BatchNorm1d(400)).double()
    for other in (torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.BatchNorm1d(400)), like):
        shmtensor.load_into(other, done.path, key="model", encryption_key=KEY)
        for name, tensor in module.state_dict().items():
            assert torch.equal(other.state_dict()[name].to(tensor.dtype), tensor)
    with pytest.raises(shmtensor.CheckpointError, match="encrypted: pass key="):
        shmtensor.load_into(module, done.path, key="model")


def test_old_ones_are_deleted_and_the_newest_is_found(state, tmp_path):
    with CheckpointWriter(tmp_path / "a", key=KEY, keep_last=2, readable_names=True) as writer:
        for step in range(4):
            writer.save({"w": np.full(1000, step), "step": step}, metrics={"loss": step})
    found = shmtensor.list_checkpoints(tmp_path / "a")
    assert [(each.step, each.metrics, each.encrypted, each.error) for each in found] == [
        (3, {"loss": 3.0}, True, None), (2, {"loss": 2.0}, True, None),
    ]  # fmt: skip
    assert [each.error for each in shmtensor.list_checkpoints(tmp_path / "a", key=KEY)] == [None, None]
    assert all("does not open it" in each.error for each in shmtensor.list_checkpoints(tmp_path / "a", key=OTHER))
    newest = Path(found[0].path)
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    with pytest.warns(RuntimeWarning, match="not authentic"):
        assert shmtensor.load_newest(tmp_path / "a", key=KEY)["step"] == 2
    for key in (None, OTHER, CHEAP):  # an older one, or none, would silently begin anew
        with pytest.raises(shmtensor.CheckpointError, match="key="):
            shmtensor.load_newest(tmp_path / "a", key=key)
    assert {each["digest"] for each in json.loads((tmp_path / "a" / INDEX).read_text())["saves"]} == {"0" * 16}


# --- keys


def test_wrong_and_missing_keys(sealed, state, tmp_path):
    for key, text in (
        (None, "is encrypted: pass key="), (OTHER, "key= does not open it"), (CHEAP, "with 32 bytes, and key= is"),
        (Wrapper(), "with 32 bytes, and key= is"),
    ):  # fmt: skip
        with pytest.raises(shmtensor.CheckpointError, match=text) as caught:
            load_arrays(sealed, key=key)
        assert str(sealed) in str(caught.value)
    plain = save(state, tmp_path / "plain.safetensors")
    for call in (load_arrays, load_checkpoint, shmtensor.open_checkpoint):
        with pytest.raises(shmtensor.CheckpointError, match="is not encrypted, and key= was given"):
            call(plain, key=KEY)
    with pytest.raises(shmtensor.CheckpointError, match="is not encrypted, and key= was given"):
        shmtensor.load_newest(tmp_path, key=KEY)
    with pytest.raises(shmtensor.ArgumentError, match="shared memory, which is not encrypted"):
        load_arrays(tmp_path, from_memory=True, key=KEY)


@pytest.mark.parametrize("mine", [Passphrase("another", cost=10), "x", Wrapper(1)])
def test_another_key_of_the_same_form(mine, tmp_path, state, monkeypatch):
    monkeypatch.setattr(keys.Passphrase, "stretch", lambda self, salt, cost: (self._text.encode() * 32)[:32])
    path = save(state, tmp_path / "a.safetensors")
    right = Wrapper() if isinstance(mine, Wrapper) else CHEAP
    made = encrypt_file(path, None, MasterKey.of(right))
    with pytest.raises(shmtensor.CheckpointError, match="key= does not open it"):
        load_arrays(made, key=mine)
    assert same(load_arrays(made, key=right), state)


def test_what_is_no_key(tmp_path):
    for key, error in (
        (b"short", shmtensor.ArgumentError), (7, shmtensor.ArgumentTypeError), ("", shmtensor.ArgumentError),
        (Wrapper, shmtensor.ArgumentTypeError),
    ):  # fmt: skip
        with pytest.raises(error):
            CheckpointWriter(tmp_path / "a", key=key)
        with pytest.raises(error):
            load_checkpoint(tmp_path, key=key)
    for cost in (9, 19):
        with pytest.raises(shmtensor.ArgumentError, match="10 to 18"):
            Passphrase("x", cost=cost)
    with pytest.raises(shmtensor.ArgumentTypeError):
        Passphrase(b"x")
    with pytest.raises(shmtensor.ArgumentError, match="readable_names= is for encrypted"):
        CheckpointWriter(tmp_path / "a", readable_names=True)
    assert not (tmp_path / "a").exists()


def test_a_key_service_that_fails(tmp_path, state):
    class Failing(Wrapper):
        def unwrap(self, wrapped):
            raise OSError("the secret is xyz")

    class Short(Wrapper):
        def unwrap(self, wrapped):
            return b"short"

        def wrap(self, key):
            return b""

    path = save(state, tmp_path / "a.safetensors")
    wrapper = Wrapper()
    assert isinstance(wrapper, KeyWrapper)
    made = encrypt_file(path, None, MasterKey.of(wrapper))
    assert wrapper.calls == ["wrap"]
    with pytest.raises(shmtensor.CheckpointError, match="raised OSError") as caught:
        load_arrays(made, key=Failing())
    assert "xyz" not in str(caught.value)
    with pytest.raises(shmtensor.CheckpointError, match="returned no 32 bytes"):
        load_arrays(made, key=Short())
    with pytest.raises(shmtensor.ArgumentTypeError, match=r"wrap\(\) must return"):
        MasterKey.of(Short())


def test_without_cryptography(monkeypatch, tmp_path, sealed):
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for call in (lambda: CheckpointWriter(tmp_path / "a", key=KEY), lambda: load_checkpoint(sealed, key=KEY)):
        with pytest.raises(shmtensor.DependencyError, match=r"pip install '\.\[crypto\]'"):
            call()
    assert [found.encrypted for found in shmtensor.list_checkpoints(tmp_path)] == [True]  # needs no key


def test_the_key_is_nowhere(tmp_path, state, caplog):
    """Not in the writing process's arguments or environment, in no file, repr or log."""
    secret = bytes(range(101, 133))
    shapes = [secret, secret.hex().encode(), repr(secret).encode()]
    caplog.set_level(logging.DEBUG)
    with CheckpointWriter(tmp_path / "a", key=secret) as writer:
        handle = writer.save(state)
        handle.durable.result(PATIENCE)
        pid = writer.statistics().pid
        seen = [
            Path(f"/proc/{pid}/cmdline").read_bytes(), Path(f"/proc/{pid}/environ").read_bytes(),
            Path(f"/proc/{pid}/fd/0").read_bytes(),
            repr((writer, handle, writer.statistics(), handle.durable)).encode(), repr(vars(writer._process)).encode()
        ]  # fmt: skip
        assert seen[2] == b"\0"  # what it was told is gone when it has read it
        seen[-1] = seen[-1].replace(repr(writer._process._secret).encode(), b"")  # the one place that has it
        shared = [each for each in Path("/dev/shm").iterdir() if names.PREFIX in each.name]
        assert shared
        seen += [each.read_bytes() for each in shared]
    seen += [each.read_bytes() for each in (tmp_path / "a").iterdir() if each.is_file()]
    seen += [caplog.text.encode()]
    for each in (MasterKey.of(secret), Opener(secret), opening.KeyRing(secret), Passphrase("hush")):
        seen.append(repr(each).encode())
    assert not [data[:80] for data in seen if any(shape in data for shape in (*shapes, b"hush"))]
    with pytest.raises(shmtensor.CheckpointError) as caught:
        load_arrays(tmp_path / "a", key=OTHER)
    assert OTHER.hex() not in str(caught.value)


def test_no_two_files_have_one_data_key(tmp_path, state):
    path = save(state, tmp_path / "a.safetensors")
    first = encrypt_file(path, tmp_path / "1.encrypted", MasterKey.of(KEY)).read_bytes()
    second = encrypt_file(path, tmp_path / "2.encrypted", MasterKey.of(KEY)).read_bytes()
    assert first[-1000:] != second[-1000:]
    table = read_envelope(tmp_path / "1.encrypted").envelope
    entries = [first[at : at + 12] for at in range(table.table_at, table.contents_at - ENTRY, ENTRY)]
    used = [entry for entry in entries if any(entry)]
    assert len(used) > 30
    assert len(set(used)) == len(used)


# --- tampering


def test_any_flipped_byte_is_found(sealed, state):
    """The header, the wrapped key, the names, the table, the contents, the data; but for padding, which has no
    meaning."""
    good = sealed.read_bytes()
    made = read_envelope(sealed).envelope
    start, padding = len(made.start), made.table_at + ENTRY * (made.count(0) + made.count(1))
    spots = [*range(0, start, 7), *range(start, made.table_at, 5), *range(made.table_at, padding, 37), padding - 1]
    spots += [
        made.contents_at,
        made.contents_at + made.contents - 1,
        made.data_at,
        made.data_at + SEGMENT,
        len(good) - 1,
    ]
    spots += range(made.data_at, len(good), SEGMENT - 77)
    for spot in spots:
        data = bytearray(good)
        data[spot] ^= 0x10
        sealed.write_bytes(data)
        with pytest.raises(shmtensor.CheckpointError):
            load_arrays(sealed, key=KEY)
            pytest.fail(f"byte {spot} was changed")
    sealed.write_bytes(good)
    assert same(load_arrays(sealed, key=KEY), state)


def segments(sealed):
    made = read_envelope(sealed).envelope
    return made, [made.data_at + number * SEGMENT for number in range(made.nbytes // SEGMENT)]


def test_swapped_repeated_and_foreign_segments(sealed, state, tmp_path):
    good = sealed.read_bytes()
    made, at = segments(sealed)

    def entry(number: int) -> slice:
        return slice(made.entry_at(0, number), made.entry_at(0, number + 1))

    def segment(number: int) -> slice:
        return slice(at[number], at[number] + SEGMENT)

    foreign = encrypt_file(save(state, tmp_path / "b.safetensors"), None, MasterKey.of(KEY)).read_bytes()
    for first, second, source in ((3, 5, good), (4, 5, good), (3, 3, foreign)):
        data = bytearray(good)
        data[segment(first)], data[entry(first)] = source[segment(second)], source[entry(second)]
        sealed.write_bytes(data)
        with pytest.raises(shmtensor.CheckpointError, match=rf"{MARK}.*segment {first} of .* is not authentic"):
            load_arrays(sealed, key=KEY)
        with pytest.raises(shmtensor.CheckpointError, match="is not authentic"):
            load_arrays(sealed, key=KEY, verify=False)  # not a question of digests


def test_truncated_and_longer_files(sealed):
    good = sealed.read_bytes()
    for size in (0, 10, 19, 30, 200, 5000, len(good) - SEGMENT, len(good) - 1, len(good) + 1, len(good) + SEGMENT):
        sealed.write_bytes((good + bytes(SEGMENT))[:size])
        for key in (KEY, None):
            with pytest.raises(shmtensor.CheckpointError):
                load_arrays(sealed, key=key)
        if size >= 16:
            (found,) = shmtensor.list_checkpoints(sealed.parent)
            assert found.error


def test_hostile_headers(sealed, monkeypatch, request):
    """Refused before any work is done for them: scrypt is not called, no memory is asked for."""
    good = sealed.read_bytes()
    made = read_envelope(sealed).envelope
    header = json.loads(made.start[20:])
    monkeypatch.setattr(Passphrase, "stretch", lambda *_: pytest.fail("scrypt was called"))
    tracemalloc.start()
    request.addfinalizer(tracemalloc.stop)
    huge = 1 << 62
    scrypt = {"by": "scrypt", "salt": "00" * 16, "cost": 17}
    bad = [
        {key: value} for key in ("nbytes", "contents", "names") for value in (huge, -1, 1.5, True, None, "7", 1 << 80)
    ]
    bad += [
        {"key": scrypt | change}
        for change in ({"cost": 40}, {"cost": 19}, {"cost": -1}, {"cost": True}, {"salt": ""}, {"n": 1})
    ]
    bad += [{"key": {"by": "wrapper", "wrapped": value}} for value in ("", "!", "A" * 40_000, 7)]
    bad += [{"key": value} for value in ({}, None, {"by": "x"}, [], {"by": "key", "more": 1})]
    bad += [{"version": 2}, {"segment": 1}, {"segment": huge}, {"name": "../x"}, {"name": 3}, {"id": ""}, {"id": 5}]
    bad += [{"format": "x"}, {"format": 1}, {"native": 1}, {"more": 1}]
    for change in bad:
        text = json.dumps(header | change).encode()
        sealed.write_bytes(struct.pack("<16sI", envelope.MAGIC, len(text)) + text + good[len(made.start) :])
        for key in (KEY, CHEAP):
            with pytest.raises(shmtensor.CheckpointError):
                load_arrays(sealed, key=key)
        with pytest.raises(shmtensor.CheckpointError):
            Opener(locked=True).open(sealed)
    for text in (b"[" * 60_000, b"{}", b'{"version":1,"version":1}', b"\xff"):
        sealed.write_bytes(struct.pack("<16sI", envelope.MAGIC, len(text)) + text + good[len(made.start) :])
        with pytest.raises(shmtensor.CheckpointError):
            load_arrays(sealed, key=KEY)
    sealed.write_bytes(struct.pack("<16sI", envelope.MAGIC, 0xFFFFFFFF) + good[20:])
    with pytest.raises(shmtensor.CheckpointError, match="header should have 4294967295 bytes"):
        load_arrays(sealed, key=KEY)
    assert tracemalloc.get_traced_memory()[1] < 4 * len(good) < 16 << 20  # the file itself is in memory here


def test_readable_names_are_authenticated(state, tmp_path):
    done = write(tmp_path / "a", state, readable_names=True)
    path = Path(done.path)
    opened = Opener(locked=True).open(path)
    assert opened.locked
    assert [(entry.name, entry.shape) for entry in opened.plan.tensors] == [
        (MARK, (300, 1000)), ("b", (20_000,)), ("e", (0,)),
    ]  # fmt: skip
    good = path.read_bytes()
    assert holds(good, MARK)
    path.write_bytes(good.replace(b"[300,1000]", b"[300,1001]", 1))
    with pytest.raises(shmtensor.CheckpointError, match="key= does not open it"):
        load_arrays(path, key=KEY)
    for names_in in (b'{"a":[', b'{"a":["float64",0,[1],-8]}', b'{"a":["float64",0,[1],4]}', b'{"a":["no",0,[],0]}'):
        at = good.index(b'{"' + MARK.encode())
        size = read_envelope(path).envelope.names
        path.write_bytes(good[:at] + names_in.ljust(size) + good[at + size :])
        with pytest.raises(shmtensor.CheckpointError):
            Opener(locked=True).open(path)
    path.write_bytes(good)
    assert same(load_arrays(path, key=KEY), state)


# --- how little is read


@pytest.mark.parametrize("format", sorted(SUFFIX))
def test_a_slice_reads_little(format, tmp_path, monkeypatch):
    state = {f"w{number}": np.random.default_rng(number).random((1000, 400)) for number in range(5)}
    done = write(tmp_path / "a", state, format=format)  # 16 MB
    read = []
    for name in ("pread", "preadv"):
        real = getattr(os, name)

        def count(fd, what, offset, *, real=real):
            found = real(fd, what, offset)
            read.append(len(found) if isinstance(found, bytes) else found)
            return found

        monkeypatch.setattr(os, name, count)
    with shmtensor.open_checkpoint(done.path, key=KEY) as checkpoint:
        opening_bytes = sum(read)
        part = checkpoint["w3"].read(np.s_[500:550])
    assert (part == state["w3"][500:550]).all()
    assert part.nbytes == done.nbytes // 100 // 1000 * 1000 or part.nbytes * 95 < done.nbytes < part.nbytes * 105
    assert sum(read) <= 2 * part.nbytes, (opening_bytes, sum(read), part.nbytes)
    read.clear()
    assert (load_arrays(done.path, key=KEY, keys="w1", slices={"w1": np.s_[:50]})["w1"] == state["w1"][:50]).all()
    assert sum(read) <= 2 * part.nbytes


def test_columns(tmp_path):
    state = {"w": np.random.default_rng(3).random((500, 900))}
    done = write(tmp_path / "a", state)
    with shmtensor.open_checkpoint(done.path, key=KEY) as checkpoint:
        for index in (np.s_[:, 3], np.s_[::7, 100:120], np.s_[-1], np.s_[250:260, ::400]):
            assert (checkpoint["w"].read(index) == state["w"][index]).all()


# --- files of other programs, and the command line


@pytest.fixture
def run():
    def invoke(*arguments, code=0, input=None):
        environment = {"COLUMNS": "200", "NO_COLOR": "1"}
        result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)], env=environment, input=input)
        assert result.exit_code == code, (result.output, result.exception)
        return result.output

    return invoke


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(KEY)
    return path


def files_of_others(folder: Path) -> dict[str, tuple[Path, dict]]:
    import safetensors.numpy

    arrays = {"a": np.arange(30_000.0).reshape(3, -1), "b": np.ones(3, np.float32)}
    safetensors.numpy.save_file(arrays, folder / "a.safetensors")
    np.savez(folder / "a.npz", **arrays)
    np.savez_compressed(folder / "packed.npz", **arrays)
    torch.save({key: torch.from_numpy(value) for key, value in arrays.items()}, folder / "a.pt")
    torch.save({"a": torch.ones(5)}, folder / "old.pt", _use_new_zipfile_serialization=False)
    made = {name: (folder / name, arrays) for name in ("a.safetensors", "a.npz", "packed.npz", "a.pt")}
    return made | {"old.pt": (folder / "old.pt", {"a": np.ones(5, np.float32)})}


@pytest.mark.parametrize("name", ["a.safetensors", "a.npz", "packed.npz", "a.pt", "old.pt"])
def test_files_of_other_programs(name, tmp_path, run, key_file):
    path, arrays = files_of_others(tmp_path)[name]
    before = path.read_bytes()
    run("encrypt", path, "--key-file", key_file, "--readable-names")
    path.unlink()
    sealed = path.with_name(name + ".encrypted")
    back = load_arrays(sealed, key=KEY)
    assert all((back[key] == value).all() for key, value in arrays.items())
    kept = load_checkpoint(sealed, key=KEY)
    assert set(kept) == set(arrays)
    with shmtensor.open_checkpoint(sealed, key=KEY, arrays=True) as checkpoint:
        assert checkpoint.path == str(sealed)
        assert (checkpoint["a"].read(np.s_[1:]) == arrays["a"][1:]).all()
    assert "a" in run("info", sealed)
    assert "no digests" not in run("verify", sealed, "--key-file", key_file)
    data = bytearray(sealed.read_bytes())
    data[-3] ^= 1
    broken = tmp_path / f"broken-{name}.encrypted"
    broken.write_bytes(data)
    assert "not authentic" in run("verify", broken, "--key-file", key_file, code=1)
    run("decrypt", sealed, "--key-file", key_file)
    assert path.read_bytes() == before
    del kept


@pytest.mark.parametrize("format", sorted(SUFFIX))
def test_encrypt_and_decrypt(format, state, run, tmp_path, key_file):
    path = save(state, tmp_path / f"a{SUFFIX[format]}", format, meta={"m": 1})
    before = path.read_bytes()
    made = json.loads(run("encrypt", path, "--key-file", key_file, "--json"))
    sealed = Path(made["path"])
    assert (sealed, made["bytes"]) == (path.with_name(path.name + ".encrypted"), sealed.stat().st_size)
    assert path.read_bytes() == before  # stays
    assert same(load_arrays(sealed, key=KEY, verify="all"), state)
    text = run("info", sealed)
    assert "encrypted" in text
    assert "names are not readable" in text
    assert MARK not in text
    assert MARK in run("info", sealed, "--key-file", key_file)
    shown = json.loads(run("info", sealed, "--json", "--key-file", key_file))
    assert (shown["encrypted"], shown["locked"], shown["meta"]) == (True, False, {"m": 1})
    assert f"ok {sealed}" in run("verify", sealed, "--key-file", key_file)
    assert "pass --key-file or --passphrase" in run("verify", sealed, code=1)
    assert "--passphrase is something else" in run("verify", sealed, "--passphrase", input="x\n", code=1)
    assert "--key-file was given" in run("verify", path, "--key-file", key_file, code=1)
    assert "exists" in run("decrypt", sealed, "--key-file", key_file, code=1)
    run("decrypt", sealed, tmp_path / "b", "--key-file", key_file)
    run("decrypt", sealed, "--key-file", key_file, "--overwrite")
    assert path.read_bytes() == (tmp_path / "b").read_bytes() == before
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")]


def saved_run(path: Path) -> list:
    """Three checkpoints with metrics, of which the first is the best; what `list_checkpoints` says of them."""
    with CheckpointWriter(path) as writer:
        for step in (1, 2, 3):
            writer.save(large(step), metrics={"loss": float(step)}, alias="best" if step == 1 else None)
    return listed(path)


def listed(path: Path) -> list:
    return [(each.step, each.time, each.metrics, each.aliases) for each in shmtensor.list_checkpoints(path)]


def name_of(step: int, sealed: bool) -> str:
    return f"step-{step:08d}.safetensors{'.encrypted' * sealed}"


@pytest.mark.parametrize("replace", [True, False])
def test_a_whole_run_in_whatever_order(replace, run, tmp_path, key_file):
    """Order and times of the steps stay as they are, with `--replace` also metrics, names and the list of saves."""
    before, more = saved_run(tmp_path / "a"), ["--key-file", key_file, *["--replace"] * replace]
    for command, sealed in (("encrypt", False), ("decrypt", True)):
        for step in (2, 3, 1):
            run(command, tmp_path / "a" / name_of(step, sealed), *more)
            if not replace:
                (tmp_path / "a" / name_of(step, sealed)).unlink()
        key = None if sealed else KEY
        assert shmtensor.load_newest(tmp_path / "a", key=key)["step"] == 3
        if replace:
            assert listed(tmp_path / "a") == before
            assert os.readlink(tmp_path / "a" / "best") == name_of(1, not sealed)
            assert load_checkpoint(tmp_path / "a" / "latest", key=key)["step"] == 3
        else:
            assert [each[:2] for each in listed(tmp_path / "a")] == [
                (None if key else each[0], each[1]) for each in before
            ]
    if replace:
        assert all(each.digest != HIDDEN_DIGEST for each in index.read(str(tmp_path / "a")))
        with CheckpointWriter(tmp_path / "a", keep_last=1) as writer:
            writer.save(large(4)).durable.result(PATIENCE)
        assert {step for step, *_ in listed(tmp_path / "a")} == {1, 4}  # the best stays


def test_boundaries_of_a_replacement(tmp_path):
    """Whenever it is interrupted, every step can be loaded by the names that led to it; repeated, it is complete."""
    saved_run(tmp_path / "a")
    path = tmp_path / "b" / name_of(1, False)

    def again():
        shutil.rmtree(path.parent, ignore_errors=True)
        shutil.copytree(tmp_path / "a", path.parent, symlinks=True)

    again()
    for attempt in each_boundary(lambda: encrypt_file(path, None, MasterKey.of(KEY), replace=True), step=stride(29)):
        for name in ("best", path.name, name_of(1, True)):
            if os.path.lexists(path.parent / name):
                key = KEY if is_encrypted(path.parent / name) else None
                assert load_arrays(path.parent / name, key=key)["w"][0] == 1
        assert load_arrays(path.parent / "latest")["step"] == 3
        if path.exists():
            assert attempt.raised
            encrypt_file(path, None, MasterKey.of(KEY), replace=True, overwrite=True)
        assert sorted({*os.listdir(path.parent)} - {f"{INDEX}.tmp"}) == sorted(  # which the next save writes anew
            [name_of(1, True), name_of(2, False), name_of(3, False), "best", "latest", INDEX, LOCK]
        )
        assert os.readlink(path.parent / "best") == name_of(1, True)
        assert [each.step for each in index.read(str(path.parent)) if each.is_there(str(path.parent))] == [1, 2, 3]
        again()
    assert attempt.at > 1000


def test_a_file_is_not_replaced_while_a_writer_is_open(run, tmp_path, key_file):
    saved_run(tmp_path / "a")
    path = tmp_path / "a" / name_of(2, False)
    with CheckpointWriter(tmp_path / "a"):
        assert "another CheckpointWriter is open" in run("encrypt", path, "--key-file", key_file, "--replace", code=1)
    assert "same directory" in run(
        "encrypt", path, tmp_path / "b.encrypted", "--key-file", key_file, "--replace", code=2
    )
    assert path.exists()
    assert not list((tmp_path / "a").glob("*.encrypted"))
    run("encrypt", tmp_path / "a" / "latest", "--key-file", key_file, "--replace")  # what it leads to
    assert os.readlink(tmp_path / "a" / "latest") == name_of(3, True)


def test_what_is_not_replaced(run, state, tmp_path, key_file, monkeypatch):
    """A file by itself, one of several, a link from elsewhere, one that changes meanwhile."""
    path = save(state, tmp_path / "a.safetensors")
    sealed = encrypt_file(path, tmp_path / "model.bin.encrypted", MasterKey.of(KEY)).rename(tmp_path / "model.bin")
    more = ["--key-file", key_file, "--replace"]
    assert "only another file" in run("decrypt", sealed, sealed, *more, "--overwrite", code=2)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.safetensors").symlink_to(path)
    assert "a link into another directory" in run("encrypt", tmp_path / "elsewhere" / "b.safetensors", *more, code=2)
    shards = save({"small": np.arange(5)}, tmp_path / "shards", max_shard=500_000)
    assert "one file of several" in run("encrypt", min(shards.glob("*-00001-of-*")), *more, code=2)

    def replaced(made, *_):
        path.with_name("new").write_bytes(b"new")
        os.replace(path.with_name("new"), path)
        return before(made, *_)

    before = Original.before
    monkeypatch.setattr(Original, "before", replaced)
    assert "changed while it was read" in run("encrypt", path, *more, code=1)
    assert path.read_bytes() == b"new"
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith((".", "a."))] == ["a.safetensors"]


def test_links_and_mode_follow(run, state, tmp_path, key_file):
    path = save(state, tmp_path / "a.safetensors")
    path.chmod(0o600)
    (tmp_path / "absolute").symlink_to(path)
    (tmp_path / "relative").symlink_to("./a.safetensors")
    run("encrypt", tmp_path / "absolute", "--key-file", key_file, "--replace")
    made = tmp_path / "a.safetensors.encrypted"
    assert made.stat().st_mode & 0o777 == 0o600
    assert {os.readlink(tmp_path / link) for link in ("absolute", "relative")} == {made.name}
    assert not path.exists()


@pytest.mark.parametrize("point", EXCHANGE_POINTS)
def test_a_command_dies_while_it_replaces_a_file(point, tmp_path, run, key_file):
    """Nothing is lost, whatever is there loads; the command finishes it, or the next save."""
    path = tmp_path / "a"
    saved_run(path)
    arguments = ["encrypt", path / name_of(1, False), "--key-file", key_file, "--replace"]
    run_and_die(f"exchange.{point}", *arguments)
    there = {each.name for each in path.iterdir() if each.name.startswith("step-00000001")}
    assert there
    for name in there:
        assert load_arrays(path / name, key=KEY if "encrypted" in name else None)["step"] == 1
    assert shmtensor.load_newest(path)["step"] == 3
    if (path / name_of(1, False)).exists():
        run(*arguments, "--overwrite")
    assert os.readlink(path / "best") == name_of(1, True)
    with CheckpointWriter(path, keep_last=1) as writer:
        writer.save(large(4)).durable.result(PATIENCE)
    assert [entry.name for entry in index.read(str(path))] == [name_of(1, True), name_of(4, False)]
    assert {name for name in os.listdir(path) if name.startswith("step")} == {name_of(1, True), name_of(4, False)}


@pytest.mark.parametrize("command", ["encrypt", "decrypt", "convert"])
def test_what_a_dead_command_has_left_goes_with_the_next_one(command, tmp_path, run, key_file):
    """And what another one is writing stays, as the files of other targets do."""
    path = save({"w": np.zeros(1000), "v": np.ones(1000)}, tmp_path / "a.safetensors")
    if command == "decrypt":
        path = encrypt_file(path, None, MasterKey.of(KEY))
    arguments = [command, path, tmp_path / ("b.encrypted" if command == "encrypt" else "b")]
    arguments += ["--max-shard", "4KiB"] if command == "convert" else ["--key-file", key_file]
    before = set(tmp_path.iterdir())
    run_and_die("convert.begun", *arguments)
    (left,) = set(tmp_path.iterdir()) - before
    of_another = tmp_path / ".bb.convert-1.tmp"
    of_another.touch()
    with contextlib.closing(LockFile(str(min(left.iterdir()) if left.is_dir() else left))) as writing:
        assert writing.try_exclusive(0)
        run(*arguments)
        assert left.exists()
    remove(str(arguments[2]))
    run(*arguments)
    assert set(tmp_path.iterdir()) - before == {arguments[2], of_another}


def test_a_passphrase_is_asked_for(run, state, tmp_path):
    path = save(state, tmp_path / "a.safetensors")
    assert "hush" not in run("encrypt", path, "--passphrase", input="hush\nhush\n")
    path.unlink()
    sealed = tmp_path / "a.safetensors.encrypted"
    assert "does not open it" in run("decrypt", sealed, "--passphrase", input="other\n", code=1)
    run("decrypt", sealed, "--passphrase", input="hush\n")
    assert same(load_arrays(path), state)
    assert same(load_arrays(sealed, key="hush"), state)


def test_commands_refuse(run, state, sealed, key_file, tmp_path):
    path = save(state, tmp_path / "a.safetensors")
    assert "pass the key by one of" in run("encrypt", path, code=2)
    assert "pass the key by one of" in run("encrypt", path, "--passphrase", "--key-file", key_file, code=2)
    assert "use convert for a URL" in run("encrypt", "http://127.0.0.1/a.safetensors", "--key-file", key_file, code=2)
    assert "use convert for a URL" in run("decrypt", sealed, "s3://bucket/a", "--key-file", key_file, code=2)
    rows = json.loads(run("ls", sealed.parent, "--json"))["checkpoints"]
    (row,) = (each for each in rows if each["name"] == sealed.name)
    assert (row["encrypted"], row["tensors"]) == (True, None)  # whose names are not readable
    empty = tmp_path / "empty.safetensors.encrypted"
    empty.touch()
    assert "it is damaged" in run("verify", empty, "--key-file", key_file, code=1)
    assert "encrypted already" in run("encrypt", sealed, "--key-file", key_file, code=2)
    assert "is not encrypted" in run("decrypt", path, "--key-file", key_file, code=2)
    assert "ends in .encrypted" in run("encrypt", path, tmp_path / "b", "--key-file", key_file, code=2)
    assert "only the names" in run("decrypt", sealed, tmp_path / "b.encrypted", "--key-file", key_file, code=2)
    assert "is no file" in run("encrypt", tmp_path, "--key-file", key_file, code=2)
    (tmp_path / "bad").write_bytes(b"short")
    assert "is no key" in run("encrypt", path, "--key-file", tmp_path / "bad", code=2)
    assert "No such file" in run("encrypt", path, "--key-file", tmp_path / "none", code=1)
    (tmp_path / "hex").write_text(KEY.hex() + "\n")
    assert "ok" in run("verify", sealed, "--key-file", tmp_path / "hex")
    assert "pass --encrypt-with" in run("convert", path, tmp_path / "b.pt", "--readable-names", code=2)
    assert "ends in .encrypted" in run("convert", path, tmp_path / "b.pt", "--encrypt-with", key_file, code=2)
    assert "ends in .encrypted" in run("convert", path, tmp_path / "b.pt.encrypted", code=2)
    shards = save(state, tmp_path / "shards", max_shard=500_000)
    first = min(shards.glob("*-00001-of-*"))
    assert "one file of several" in run("encrypt", first, "--key-file", key_file, code=2)


def test_convert(run, state, sealed, key_file, tmp_path):
    run("convert", sealed, tmp_path / "b.pt", "--key-file", key_file)
    assert same(load_arrays(tmp_path / "b.pt"), state)
    run("convert", tmp_path / "b.pt", tmp_path / "c.npz.encrypted", "--encrypt-with", key_file, "--readable-names")
    assert MARK in run("info", tmp_path / "c.npz.encrypted")
    run("convert", tmp_path / "c.npz.encrypted", tmp_path / "d", "--key-file", key_file, "--encrypt-with", key_file,
        "--max-shard", "500000")  # fmt: skip
    assert same(load_arrays(tmp_path / "d", key=KEY, verify="all"), state)
    assert "ok" in run("verify", tmp_path / "d", "--key-file", key_file)
    assert "pass --key-file or --passphrase" in run("convert", sealed, tmp_path / "e.pt", code=1)
    assert not (tmp_path / "e.pt").exists()


def test_ls(run, state, key_file, tmp_path):
    write(tmp_path / "a", state)
    (row,) = json.loads(run("ls", tmp_path / "a", "--json"))["checkpoints"]
    assert (row["encrypted"], row["step"], row["error"], row["tensors"]) == (True, 7, None, None)
    (row,) = json.loads(run("ls", tmp_path / "a", "--json", "--key-file", key_file))["checkpoints"]
    assert (row["tensors"], row["error"]) == (3, None)


# --- deaths


STREAMS = "1MiB"


def whole(path: Path, steps: list[int]) -> None:
    """Exactly these are there, they open, and nothing is half-done."""
    left = {each.name for each in path.iterdir()} - {LOCK, INDEX, "latest"}
    assert left == {f"step-{step:08d}.safetensors.encrypted" for step in steps}
    for name in left:
        found = load_arrays(path / name, key=KEY, verify="all")
        assert (found["w"] == found["step"]).all()


def large(step: int) -> dict:
    return {"small": np.arange(5), "w": np.full(100_000, step), "step": step}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "memory", "nth"),
    [
        ("seal.begun", "8MiB", 1), ("seal.written", "8MiB", 1), ("seal.described", "8MiB", 1),
        ("seal.written", STREAMS, 3), ("stream.logged", STREAMS, 3), ("seal.journal", STREAMS, 1),
        ("seal.written", STREAMS, 14), ("seal.written", STREAMS, 15), ("seal.described", STREAMS, 1),
        ("write.sized", STREAMS, 1), ("commit.recorded", STREAMS, 1), ("commit.renamed", "8MiB", 1),
    ],
)  # fmt: skip
def test_the_writing_process_dies(point, memory, nth, tmp_path, monkeypatch):
    """It is started again, has the key again, and every save is durable. At its 14th segment of the stream it is
    patching the header in the segment that has the first tensors, whose slots are free by then."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(process_handle, "_PAUSES", (0.0,) * 5)
    code = arm(point, "kill", nth, tmp_path / "flag")
    monkeypatch.setattr(process_handle, "LAUNCH", code + process_handle.LAUNCH)
    with CheckpointWriter(tmp_path / "a", memory=memory, key=KEY) as writer:
        for step in (1, 2):
            writer.save(large(step)).durable.result(PATIENCE)
        assert writer.statistics().restarts == 1
    whole(tmp_path / "a", [1, 2])


@pytest.mark.slow
def test_both_die_during_a_save(tmp_path):
    """What is left under a temporary name does not open without the key, and is removed by the next writer."""
    path = tmp_path / "a"
    code = f"""
        import os, signal, numpy as np
        from tests.faults import points
        points.install("shmtensor.checkpoint")
        from shmtensor.checkpoint import names, process_handle
        from shmtensor.checkpoint.writer import CheckpointWriter
        names.PREFIX = {names.PREFIX!r}
        arm = "from tests.faults import points; points.install('shmtensor.checkpoint'); "
        arm += "points.arm('seal.described', lambda: (os.kill(os.getppid(), 9), os.kill(os.getpid(), 9))); "
        process_handle.LAUNCH = "import os; " + arm + process_handle.LAUNCH
        with CheckpointWriter({str(path)!r}, key=bytes(range(32))) as writer:
            writer.save({{"{MARK}": np.full(100_000, 1), "step": 1}}).durable.result(100)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, timeout=PATIENCE)
    assert done.returncode == -9
    (left,) = path.glob(".*.tmp")
    data = left.read_bytes()
    assert not holds(data, MARK)
    assert np.full(100, 1).tobytes() not in data
    assert shmtensor.list_checkpoints(path) == []
    with CheckpointWriter(path, key=KEY) as writer:
        writer.save(large(2))
    whole(path, [2])


def test_a_writer_that_waits_has_the_key_again(tmp_path):
    with CheckpointWriter(tmp_path / "a", key=KEY) as writer:
        writer.start(timeout=PATIENCE)
        pid = writer.statistics().pid
        stop(pid)
        handle = writer.save(large(1))
        with once(lambda: handle.status == "waiting", lambda: os.kill(pid, 9)):
            handle.durable.result(PATIENCE)
    whole(tmp_path / "a", [1])


def test_the_crc_of_a_zip_inside_is_right(tmp_path, state):
    """The file inside is complete: another program opens what `decrypt` gives."""
    done = write(tmp_path / "a", state, format="npz")
    sealed, _ = Opener(KEY).unlock(read_envelope(Path(done.path)))
    out = bytearray(sealed.envelope.nbytes)
    opening.decrypt_to(sealed, lambda at, piece: out.__setitem__(slice(at, at + len(piece)), piece))
    (tmp_path / "x.npz").write_bytes(out)
    with np.load(tmp_path / "x.npz") as found:
        assert zlib.crc32(found["b"].tobytes()) == zlib.crc32(state["b"].tobytes())
