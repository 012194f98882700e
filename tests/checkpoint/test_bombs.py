"""Files that claim much, or unpack to much: each is refused, and none takes more than 64 MiB to find that out."""

from __future__ import annotations

import io
import json
import shutil
import struct
import subprocess
import sys
import zipfile
import zlib

import numpy as np
import pytest
import safetensors.torch
import torch

from .state_files import save
from .test_damage import sign_again
from .test_pickles import HOSTILE, STORAGES, archive_of, nested_lists

MOST = 64 << 20
MIB = 1 << 20

MEASURE = """
import gc, json, os, sys, warnings
import numpy, safetensors.torch, torch
import shmtensor
from shmtensor.checkpoint.convert import convert
from shmtensor.checkpoint.opening import open_path
warnings.simplefilter("ignore")

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name + ":"))

def changed(path):
    made = convert(open_path(path), path + ".converted.npz", "npz")
    os.unlink(made.path)

WAYS = {
    "read": lambda path: shmtensor.load_checkpoint(path, map=False, verify="all"), "arrays": shmtensor.load_arrays,
    "convert": changed, "into": lambda path: shmtensor.load_into(torch.nn.Linear(2, 2), path),
}

def measure(path, way):
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    before = status("VmRSS")
    try:
        WAYS[way](path)
        error = None
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
        del caught
    return status("VmHWM") - before, error

for small in sys.argv[1:] * 2:
    for way in WAYS:
        measure(small, way)  # what the first of its kind loads
for line in sys.stdin:
    path, *ways = line.split()
    print(json.dumps([(way, *measure(path, way)) for way in ways or WAYS]), flush=True)
"""


def header_file(path, start, length, end=b"", fill=b" "):
    """A safetensors file whose header of `length` bytes is mostly one byte, or a few, again and again."""
    with path.open("wb") as file:
        file.write(length.to_bytes(8, "little") + start)
        left = length - len(start) - len(end)
        block = fill * (MIB // len(fill))
        while left:
            file.write(block[:left])
            left -= min(left, len(block))
        file.write(end)
    return path


LENGTH = 99_999_992
EMPTY = b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'


def spaces(folder):
    return header_file(folder / "a.safetensors", b" ", LENGTH)


def spaces_behind(folder):
    return header_file(folder / "a.safetensors", b'{"a":' + EMPTY + b"}", LENGTH, b"x")


def lists(folder):
    return header_file(folder / "a.safetensors", b'{"a":[', LENGTH, b"[]]}", b"[],")


def deep_lists(folder):
    return header_file(folder / "a.safetensors", b'{"a":', LENGTH, b"}", b"[")


def long_name(folder):
    return header_file(folder / "a.safetensors", b'{"', LENGTH, b'":1}', b"a")


def long_shape(folder):
    return header_file(
        folder / "a.safetensors", b'{"a":{"dtype":"U8","data_offsets":[0,0],"shape":[', LENGTH, b"1]}}", b"0,"
    )


def long_text(folder):
    metadata = b'{"__metadata__":{"shmtensor.xxh3":"0123456789abcdef","shmtensor":"'
    return header_file(folder / "a.safetensors", metadata, LENGTH, b'"}}', b"a")


def long_foreign_text(folder):
    return header_file(folder / "a.safetensors", b'{"__metadata__":{"x":"', 20_000_001, b'"},"a":3}', b'\\"')


def many_texts(folder):
    return header_file(folder / "a.safetensors", b'{"__metadata__":{', LENGTH - LENGTH % 7 + 19, b'"":1}}', b'"a":"",')


def many_tensors(folder):
    fill = b'"a":%b,' % EMPTY
    count = 1_100_000
    return header_file(folder / "a.safetensors", b"{", 1 + count * len(fill) + len(b'"b":1}'), b'"b":1}', fill)


def index_of_lists(folder):
    path = header_file(folder / "model.safetensors.index.json", b'{"weight_map":[', LENGTH, b"[]]}", b"[],")
    data = path.read_bytes()
    path.write_bytes(data[8:])
    return path


def index_of_many(folder):
    path = folder / "model.safetensors.index.json"
    with path.open("w") as file:
        file.write('{"weight_map":{' + '"a":"b.safetensors",' * 1_100_000 + '"a":"b.safetensors"}}')
    safetensors.torch.save_file({"a": torch.ones(1)}, folder / "b.safetensors")
    return path


def entry(name, header=0, nbytes=0, method=0, packed=None):
    packed = nbytes if packed is None else packed
    numbers = (0x02014B50, 20, 20, 0, method, 0, 0, 0, packed, nbytes, len(name), 0, 0, 0, 0, 0, header)
    return struct.pack("<IHHHHHHIIIHHHHHII", *numbers) + name


def local(name, nbytes=0, method=0, packed=None):
    packed = nbytes if packed is None else packed
    return struct.pack("<IHHHHHIIIHH", 0x04034B50, 20, 0, method, 0, 0, 0, packed, nbytes, len(name), 0) + name


def archive_end(count, nbytes, start):
    """With 64-bit numbers."""
    return (
        struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, nbytes, start)
        + struct.pack("<IIQI", 0x07064B50, 0, start + nbytes, 1)
        + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    )


def table(path, name_of, count, claimed=None):
    """An archive of one member, that its table of contents names again and again."""
    with path.open("wb") as file:
        start = file.write(local(name_of(0), 0))
        nbytes = 0
        for n in range(count):
            nbytes += file.write(entry(name_of(n), 0))
        file.write(archive_end(count if claimed is None else claimed, nbytes, start))
    return path


def manifest_of_lists(folder):
    (folder / "a").mkdir()
    (folder / "a" / "shmtensor.ranks.json").write_text(
        '{"version":1,"world_size":1,"parts":[' + "[]," * 5_500_000 + "[]]}"
    )
    return folder / "a"


def manifest_of_more(folder):
    (folder / "a").mkdir()
    (folder / "a" / "shmtensor.ranks.json").write_text('{"version":1,"a":[' + "[]," * 5_500_000 + "[]]}")
    return folder / "a"


def long_table(folder):
    return table(folder / "a.npz", lambda n: b"a%07d.npy" % n, 250_000)


def long_table_that_claims_little(folder):
    return table(folder / "a.npz", lambda n: b"a%07d.npy" % n, 250_000, 3)


def table_of_one_member(folder):
    return table(folder / "a.npz", lambda n: b"a.npy", 250_000)


def table_of_a_pickle(folder):
    return table(folder / "a.pt", lambda n: b"archive/data.pkl" if not n else b"archive/data/%07d" % n, 250_000)


def table_that_claims_all(folder):
    path = folder / "a.npz"
    path.write_bytes(local(b"a.npy") + archive_end(1 << 60, (1 << 62) + 7, 1 << 61))
    return path


def members_that_are_no_arrays(folder):
    """Consistent, and none of them an npy."""
    path = folder / "a.npz"
    with path.open("wb") as file:
        names = [b"%06d.npy" % n for n in range(100_000)]
        starts = [(file.tell(), file.write(local(name)))[0] for name in names]
        start = file.tell()
        nbytes = sum(file.write(entry(name, at)) for name, at in zip(names, starts, strict=True))
        file.write(archive_end(len(names), nbytes, start))
    return path


def packed_zeros(nbytes, start=b"", level=6):
    pack = zlib.compressobj(level, zlib.DEFLATED, -15)
    parts = [pack.compress(start)]
    block = bytes(16 * MIB)
    for _ in range(nbytes // len(block)):
        parts.append(pack.compress(block))
    parts.append(pack.flush())
    return b"".join(parts), len(start) + nbytes // len(block) * len(block)


def packed_archive(path, name, nbytes, start=b"", more=()):
    packed, size = packed_zeros(nbytes, start)
    with path.open("wb") as file:
        table = b""
        for each, data, method, unpacked in [*more, (name, packed, 8, size)]:
            table += entry(each, file.tell(), unpacked, method, len(data))
            file.write(local(each, unpacked, method, len(data)) + data)
        at = file.tell()
        file.write(table + archive_end(len(more) + 1, len(table), at))
    return path


def npy(shape, dtype="<f8", version=1):
    file = io.BytesIO()
    write = np.lib.format.write_array_header_1_0 if version == 1 else np.lib.format.write_array_header_2_0
    write(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue()


def packed_array(folder):
    return packed_archive(folder / "a.npz", b"a.npy", 256 << 20, npy(((256 << 20) // 8,)))


def packed_arrays(folder):
    """Each a little."""
    packed, size = packed_zeros(16 * MIB, npy((2 * MIB,)))
    more = [(b"%d.npy" % n, packed, 8, size) for n in range(60)]
    return packed_archive(folder / "a.npz", b"a.npy", 0, npy((0,)), more)


def long_npy_header(folder):
    return packed_archive(
        folder / "a.npz", b"a.npy", 256 << 20, b"\x93NUMPY\x02\x00" + struct.pack("<I", 1 << 30) + b"{"
    )


def long_stored_npy_header(folder):
    path = folder / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", b"\x93NUMPY\x02\x00" + struct.pack("<I", 150 * MIB) + b" " * (150 * MIB))
    return path


def large_shape(folder):
    path = folder / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", npy((1 << 40,)) + bytes(8))
    return path


def packed_description(folder):
    return packed_archive(folder / "a.npz", b"shmtensor.json", 256 << 20)


def long_description(folder):
    path = folder / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("shmtensor.json", b"0123456789abcdef\n" + b"[" * (150 * MIB))
    return path


def packed_pickle(folder):
    return packed_archive(folder / "a.pt", b"archive/data.pkl", 256 << 20, b"\x80\x02")


def packed_version(folder):
    more = [(b"archive/data.pkl", b"\x80\x02].", 0, 4)]
    return packed_archive(folder / "a.pt", b"archive/version", 256 << 20, b"3", more)


def packed_storage(folder):
    from .test_pickles import storage, tensor

    data = b"\x80\x02" + tensor(storage("ByteStorage", count=256 << 20), size=(256 << 20,)) + b"."
    return packed_archive(
        folder / "a.pt", b"archive/data/0", 256 << 20, b"", [(b"archive/data.pkl", data, 0, len(data))]
    )


def shared_lists(folder):
    return archive_of(nested_lists(60), folder / "a.pt")


def shared_tuples(folder):
    data = b"\x80\x02K\x01q\x00" + b"h\x00\x86q\x00" * 60 + b"."
    return archive_of(data, folder / "a.pt")


def old_storage(folder):
    import pickle

    path = folder / "a.pt"
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    assert data.count(b"K\x03") >= 1
    path.write_bytes(data.replace(b"K\x03", pickle.dumps(1 << 40, 2)[2:-1], 1))
    return path


def signed(folder, change):
    path = save({"a": torch.ones(4), "b": bytes(5000)}, folder / "a.safetensors")
    sign_again(path, change)
    return path


def repeated_bytes(folder):
    def change(parts):
        tensors = parts["plan"]["tensors"]
        number = next(n for n, each in enumerate(tensors) if each[0] == "b")
        tensors[number][3], tensors[number][4] = [1 << 36], [0]
        return parts

    return signed(folder, change)


def repeated_sizes(folder):
    """A nested tensor whose table of sizes is one number again and again."""

    def change(parts):
        plan = parts["plan"]
        plan["tensors"].append(["n", 1, "int64", [1 << 33, 1], [0, 8], 0, 0])
        plan["tensors"].append(["v", 1, "float32", [4], None, 0, 0])
        plan["tree"]["d"]["n"] = {"z": ["nested", [], [], [len(plan["tensors"]) - 1, len(plan["tensors"]) - 2]]}
        return parts

    return signed(folder, change)


def repeated_indices(folder):
    def change(parts):
        plan = parts["plan"]
        plan["tensors"].append(["i", 1, "int64", [1, 1 << 33], [8, 0], 0, 0])
        plan["tensors"].append(["v", 1, "float32", [1 << 33], [0], 0, 0])
        plan["tree"]["d"]["n"] = {"z": ["coo", [0, 9], [], [len(plan["tensors"]) - 2, len(plan["tensors"]) - 1]]}
        return parts

    return signed(folder, change)


def overlapping_bytes(folder):
    """Many objects of bytes, each a mebibyte in the same place."""

    def change(parts):
        plan, size = parts["plan"], parts["plan"]["regions"][-1][0]
        first = len(plan["tensors"])
        plan["tensors"] += [[f"n{n}", 0, "uint8", [size - n], None, len(plan["regions"]) - 1, n] for n in range(4000)]
        plan["tree"]["d"]["n"] = [{"a": {"B": first + n}} for n in range(4000)]
        return parts

    path = save({"a": torch.ones(4), "b": bytes(MIB)}, folder / "a.safetensors")
    sign_again(path, change)
    return path


def repeated_composites(folder):
    """Many packed tensors of one mebibyte, each of which is copied."""

    def change(parts):
        plan = parts["plan"]
        region = next(n for n, (size, _) in enumerate(plan["regions"]) if size == MIB)
        first = len(plan["tensors"])
        for n in range(2000):
            plan["tensors"] += [
                [f"v{n}", 1, "uint8", [MIB], None, region, 0], [f"s{n}", 1, "float32", [1], None, region, 0],
                [f"z{n}", 1, "float32", [1], None, region, 0],
            ]  # fmt: skip
        plan["tree"]["d"]["n"] = [
            {"z": ["quantized_packed", [0, 1, 2 * MIB], [], list(range(first + 3 * n, first + 3 * n + 3))]}
            for n in range(2000)
        ]
        return parts

    path = save({"a": torch.ones(4), "b": torch.zeros(MIB // 4)}, folder / "a.safetensors")
    sign_again(path, change)
    return path


def shape_of_nothing(folder):
    def change(parts):
        parts["plan"]["tensors"].append(["n", 1, "float32", [1 << 60, 0], None, -1, 0])
        parts["plan"]["tree"]["d"]["n"] = {"x": len(parts["plan"]["tensors"]) - 1}
        return parts

    return signed(folder, change)


HARMLESS = {"shared_lists", "shared_tuples", "shape_of_nothing", "repeated_bytes", "packed_version"}
"""Some ways succeed: what they hold is not as much as it looks."""
COPIED = {repeated_sizes, repeated_indices, overlapping_bytes, repeated_composites}
LONG = {spaces, spaces_behind, long_text, long_foreign_text, many_texts, many_tensors, index_of_many}
"""Looked at in one way: the others begin alike."""
FILES = [
    spaces, spaces_behind, lists, deep_lists, long_name, long_shape, long_text, long_foreign_text, many_texts,
    many_tensors, index_of_lists, index_of_many, manifest_of_lists, manifest_of_more,
    long_table, long_table_that_claims_little, table_of_one_member,
    table_of_a_pickle, table_that_claims_all, members_that_are_no_arrays, packed_array, packed_arrays,
    long_npy_header, long_stored_npy_header, large_shape, packed_description, long_description, packed_pickle,
    packed_version, packed_storage, shared_lists, shared_tuples, old_storage, repeated_bytes, repeated_sizes,
    repeated_indices, overlapping_bytes, repeated_composites, shape_of_nothing,
]  # fmt: skip


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What each way of reading a file costs, in a process of its own that has read good files of every format."""
    folder = tmp_path_factory.mktemp("small")
    torch.save({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, folder / "a.pt")
    safetensors.torch.save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, folder / "a.safetensors")
    np.savez_compressed(folder / "a.npz", weight=np.ones((2, 2)), bias=np.ones(2))
    command = [sys.executable, "-c", MEASURE, *map(str, sorted(folder.iterdir()))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def measure(path, *ways):
            process.stdin.write(f"{path} {' '.join(ways)}\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line, "the measuring process has died"
            return json.loads(line)

        yield measure
        process.stdin.close()
        assert process.wait() == 0


@pytest.mark.slow
@pytest.mark.parametrize("make", FILES, ids=lambda make: make.__name__)
def test_what_a_hostile_file_costs(make, tmp_path, measured):
    path = make(tmp_path)
    for way, nbytes, error in measured(path, *(["read"] if make in LONG else [])):
        assert nbytes <= MOST, f"{make.__name__}, {way}: {nbytes / MIB:.0f} MiB: {error}"
        copied = way == "convert" and make in COPIED  # what it says is written as it stands
        assert error is not None or copied or make.__name__ in HARMLESS, way
        if error is not None:
            assert error.startswith(("CheckpointError:", "ArgumentError:", "RuntimeError: Error(s) in loading")), way
    shutil.rmtree(tmp_path)


@pytest.mark.slow
def test_what_hostile_pickles_cost(tmp_path, measured):
    """All of those that other tests see refused, in one archive each."""
    for number, (name, (pickled, _)) in enumerate(HOSTILE.items()):
        path = archive_of(b"\x80\x02" + pickled + b".", tmp_path / f"{number}.pt", STORAGES)
        for way, nbytes, error in measured(path):
            assert nbytes <= MOST, f"{name}, {way}: {nbytes / MIB:.0f} MiB"
            assert error is not None, f"{name}, {way}"


def test_the_measure_sees_memory(tmp_path, measured):
    """A file that holds as much is allowed to take it: the numbers above would be nothing if this was not seen."""
    safetensors.torch.save_file({"a": torch.ones(40 * MIB)}, tmp_path / "a.safetensors")
    found = {way: nbytes for way, nbytes, _ in measured(tmp_path / "a.safetensors")}
    assert found["read"] > 150 * MIB
