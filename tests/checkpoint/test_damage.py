"""Damaged, truncated and malicious checkpoint files: a clear error, never a wrong state, a crash, or foreign code."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import pickle
import struct
import zipfile

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shmtensor
from shmtensor import ArgumentError, CheckpointError, list_checkpoints, load_arrays, load_checkpoint, load_into
from shmtensor.checkpoint.convert import convert
from shmtensor.checkpoint.description import Described
from shmtensor.checkpoint.formats import detect, get_format
from shmtensor.checkpoint.formats.safetensors import _SUM, DESCRIBED
from shmtensor.checkpoint.load import check
from shmtensor.checkpoint.opening import open_path
from shmtensor.checkpoint.plan import Plan, check_structure, plan

from .state_files import SUFFIX, mixed_state, model, same, save

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # torch warns about half of the types that a fuzzer comes upon
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
each_format = pytest.mark.parametrize("format", sorted(SUFFIX))
FUZZ = settings(deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))


@pytest.fixture
def path_of(tmp_path):
    return lambda format, name="a": tmp_path / (name + SUFFIX[format])


def change(path, offset, data):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


# --- damage


@each_format
def test_one_flipped_bit_in_any_tensor(format, path_of):
    state = mixed_state()
    path = save(state, path_of(format), format)
    whole = path.read_bytes()
    opened = detect(path).open(path)
    for region, (_, offset) in enumerate(opened.places):
        nbytes = opened.plan.regions[region].nbytes
        for at in {0, nbytes // 2, nbytes - 1}:
            change(path, offset + at, bytes([whole[offset + at] ^ 4]))
            for options in ({"map": False}, {"verify": "all"}):
                with pytest.raises(CheckpointError, match="is damaged") as caught:
                    load_checkpoint(path, **options)
                assert opened.plan.names(region) in str(caught.value)
                assert f"at offset {offset} " in str(caught.value)
                assert str(path) in str(caught.value)
            name = opened.plan.tensors[opened.plan.members[region][0]].name
            if not name.startswith(("sparse#", "csr#", "quantized#", "channels#", "nested#", "long bytes")):
                load_checkpoint(path)
                load_checkpoint(path, map=False, verify=False)
            else:  # looked at already when it is built
                with pytest.raises(CheckpointError, match="is damaged"):
                    load_checkpoint(path)
            change(path, offset + at, whole[offset + at : offset + at + 1])
    assert path.read_bytes() == whole


def test_a_module_is_told_of_damage(path_of):
    net = model()
    path = save(net, path_of("safetensors"))
    opened = detect(path).open(path)
    offset = opened.places[0][1]
    change(path, offset, bytes([path.read_bytes()[offset] ^ 1]))
    with pytest.raises(CheckpointError, match=f'tensor "0.weight", "1.weight" at offset {offset} is damaged'):
        load_into(model(), path)
    with pytest.raises(CheckpointError, match=f'tensor "0.weight", "1.weight" at offset {offset} is damaged'):
        load_into(model().double(), path)
    load_into(model(), path, verify=False)


@each_format
def test_truncation_anywhere(format, path_of):
    path = save(mixed_state(), path_of(format), format)
    whole = path.read_bytes()
    for length in [0, 1, 7, 8, 9, 100, 4095, 4096, 4097, *range(0, len(whole), 997), len(whole) - 1]:
        path.write_bytes(whole[:length])
        for load in (load_checkpoint, load_arrays):
            with pytest.raises(CheckpointError):
                load(path)
    if format == "distcp":
        path.write_bytes(whole[:-1])
        with pytest.raises(CheckpointError, match="it is truncated"):
            load_checkpoint(path)
    elif format != "safetensors":  # whose table of contents is at the end
        for inside, end in ((True, len(whole) // 2), (False, len(whole) - 1)):
            path.write_bytes(whole[:end])
            where = r"inside member '.+' at offset \d+" if inside else "in its table of contents"
            with pytest.raises(CheckpointError, match=f"it ends at offset {end}, {where}: it is truncated"):
                load_checkpoint(path)
    path.write_bytes(whole + b"\0")
    if format in ("safetensors", "distcp"):
        with pytest.raises(CheckpointError, match="longer than it says"):
            load_checkpoint(path)


def test_a_flipped_byte_in_a_file_of_torchs_own(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"x": torch.arange(1000)}, path)
    data = bytearray(path.read_bytes())
    at = data.index(torch.arange(100, 110).numpy().tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"member '.*data/0' is damaged: it does not have the CRC-32"):
        load_checkpoint(path, verify="all")


def test_a_module_without_memory_is_refused(path_of):
    path = save({"0.weight": torch.ones(2, 2)}, path_of("safetensors"))
    with pytest.raises(shmtensor.ArgumentError, match=r"0\.weight and 1 others of the module are on the device meta"):
        load_into(torch.nn.Sequential(torch.nn.Linear(2, 2, device="meta")), path)


@pytest.mark.parametrize("format", ["npz", "torch"])
def test_members_that_another_one_hides(format, path_of):
    """An entry of the table of contents whose comment is as long as all entries after it."""
    path = save(mixed_state(), path_of(format), format)
    whole = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        start, names = archive.start_dir, archive.namelist()
    second = whole.index(b"PK\x01\x02", start + 4)
    after = whole.index(b"PK\x01\x02", second + 4)
    struct.pack_into("<H", whole, second + 32, whole.rindex(b"PK\x05\x06") - after)
    path.write_bytes(whole)
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == names[:2]
    with pytest.raises(CheckpointError, match=f"should name {len(names)} members, and names 2: it is damaged"):
        load_checkpoint(path)


@FUZZ
@given(data=st.data(), format=st.sampled_from(sorted(SUFFIX)))
def test_any_change_is_found_or_harmless(data, format, tmp_path_factory):
    """What is read with `map=False` is what was saved, or an error."""
    state = {"a": torch.arange(50), "b": [np.arange(3.0), "text", 7], "c": torch.ones(2, 3).t()}
    path = save(state, tmp_path_factory.mktemp("change") / f"a{SUFFIX[format]}", format)
    whole = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    try:
        back = load_checkpoint(path, map=False)
    except CheckpointError:
        return
    assert same(back, state)


# --- files that say what cannot be, and are signed


def mutate(data, value, depth=0):
    """The JSON value with something changed at a random place."""
    junk = st.one_of(
        st.none(), st.booleans(), st.integers(-2, 9), st.sampled_from([1 << 31, 1 << 62, 1 << 63, 1 << 70]),
        st.sampled_from(["", "x", "float64", "qint8", "quint4x2", "<M8[ns]", "|V4", "nan"]), st.just([]), st.just({}),
        st.sampled_from(["x", "B", "d", "t", "z", "k", "n", "size"]).map(lambda tag: {tag: 0}),
        st.floats(allow_nan=False, allow_infinity=False),
    )  # fmt: skip
    if isinstance(value, (list, dict)) and value and data.draw(st.integers(0, 7)):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = data.draw(st.sampled_from(keys))
        how = data.draw(st.integers(0, 9))
        if how == 0:
            del value[key]
        elif how == 1 and isinstance(value, list):
            value.insert(key, copy.deepcopy(data.draw(st.sampled_from(value))))
        elif how == 2 and isinstance(value, list):
            value[key] = copy.deepcopy(data.draw(st.sampled_from(value)))
        else:
            value[key] = mutate(data, value[key], depth + 1)
        return value
    return data.draw(junk)


def sign_again(path, change_parts):
    """Change the description in a safetensors file, with a digest that is right again."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    parts = json.loads(header["__metadata__"][DESCRIBED])
    parts = change_parts(parts)
    described = Described(json.dumps(parts["plan"]).encode(), parts["stored"])
    digests = [int(parts["xxh3"][at : at + 16], 16) for at in range(0, len(parts["xxh3"]), 16)]
    described._regions = len(digests)
    header["__metadata__"][DESCRIBED], header["__metadata__"][_SUM] = described.text(digests)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


@FUZZ
@given(data=st.data())
def test_signed_nonsense(data, tmp_path_factory):
    """Whoever can write a file can sign it: what it says is believed only as far as it can be."""
    state = mixed_state()
    path = save(state, tmp_path_factory.mktemp("nonsense") / "a.safetensors")

    def change_parts(parts):
        for _ in range(data.draw(st.integers(1, 3))):
            parts["plan"] = mutate(data, parts["plan"])
        return parts

    sign_again(path, change_parts)
    net = torch.nn.Linear(2, 2)
    for load in (
        load_checkpoint,
        load_arrays,
        lambda path: load_checkpoint(path, keys=["weight", "a.b", "parts"]),
        lambda path: load_into(net, path, key="a", strict=False),
        lambda path: lay_out(path, "torch"),
        lambda path: lay_out(path, "npz"),
    ):
        try:
            touch(load(path))
        except (CheckpointError, ArgumentError):  # the latter if a key is not there any more
            pass


def lay_out(path, format):
    """What `convert` does before it copies."""
    made = detect(path).open(path).plan
    check_structure(made)
    layout = get_format(format).layout(made)
    layout.finish([0] * len(made.regions), [0] * len(made.regions))


def touch(value):
    """Read at both ends of every tensor."""
    if isinstance(value, dict):
        for child in value.values():
            touch(child)
    elif isinstance(value, (list, tuple)):
        for child in value:
            touch(child)
    elif isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested:
        if value.numel() and not value.is_quantized and "bits" not in str(value.dtype):
            repr(value[(0,) * value.ndim]), repr(value[(-1,) * value.ndim])
    elif isinstance(value, np.ndarray) and value.size:
        value[(0,) * value.ndim], value[(-1,) * value.ndim]


def test_a_description_of_someone_else(path_of):
    path = save({"a": torch.ones(4)}, path_of("safetensors"))
    sign_again(path, lambda parts: parts | {"stored": ["b"]})
    with pytest.raises(CheckpointError, match="region 0 should lie under 'b'"):
        load_checkpoint(path)
    path = save({"a": torch.ones(4)}, path_of("safetensors"))

    def longer(parts):
        parts["plan"]["regions"][0][0] = 32
        return parts

    sign_again(path, longer)
    with pytest.raises(CheckpointError, match=r"tensor 'a' has 16 bytes at offset .*, its description says 32"):
        load_checkpoint(path)


def deep(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


DEEP = deep(900)
"""What a parser takes, and what is too deep for a few calls more."""


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("version", 2, "version 2"),
        ("regions", [[0, 4]], "without bytes"),
        ("regions", [[16, 3]], "alignment 3"),
        ("tensors", [["a", 1, "float32", [5], None, 0, 0]], "ends at byte 20 of region 0, which has 16"),
        ("tensors", [["a", 1, "float32", [3], None, 0, 2]], "item size 4 has offset 2"),
        ("tensors", [["a", 1, "float32", [2], [-4], 0, 0]], "a stride of .* is -4"),
        ("tensors", [["a", 1, "float32", [1 << 61, 1 << 61], None, 0, 0]], "more than"),
        ("tensors", [["a", 1, "float32", [0], None, 0, 0]], "has no bytes, and a place"),
        ("tensors", [["a", 1, "O", [1], None, 0, 0]], "unknown dtype 'O'"),
        ("tensors", [["a", 0, "|O8", [1], None, 0, 0]], "invalid dtype"),
        ("tensors", [["a", 1, "float32", [4], None, 0, 0]] * 2, "two tensors named 'a'"),
        ("tensors", [], "region 0 belongs to no tensor"),
        ("meta", [], "meta is neither"),
        ("tree", {"x": 1}, "tensor 1 of 1"),
        ("tree", {"x": True}, "tensor number True"),
        ("tree", {"y": 0}, "invalid structure"),
        ("tree", {"device": "$(rm)"}, "invalid structure"),
        ("tree", {"dtype": "load"}, "no dtype of torch"),
        ("tree", {"k": [[["i", "0x1"], 1], [["i", "0x1"], 2]]}, "a key twice"),
        ("tree", {"z": ["coo", [1, 9], [], [0]]}, "composite 'coo'"),
        ("tree", [{"x": 0}, {"x": 0}], "tensor 0 is there twice"),
        ("tree", [{"x": 0}, {"B": 0}], "tensor 0 is there twice"),
        ("tree", {"z": ["coo", [0, 9], [], [0, 0]]}, "tensor 0 is there twice"),
        ("tree", {"e": [5 + n * ((1 << 61) - 1) for n in range(8, 80)]}, "share a hash"),
        ("tree", {"E": [{"t": [5 + n * ((1 << 61) - 1)]} for n in range(8, 80)]}, "share a hash"),
        ("tree", {"k": [[["i", hex(5 + n * ((1 << 61) - 1))], 0] for n in range(8, 80)]}, "share a hash"),
        ("tree", {"k": [[["i", "0x" + "f" * 5000], 0]]}, "invalid dict key"),
        ("tree", {"y": DEEP}, r"invalid structure: \{'y': \[\["),
        ("tensors", [["a", 1, DEEP, [4], None, 0, 0]], "unknown dtype"),
        ("tensors", [["a", 0, DEEP, [4], None, 0, 0]], "invalid dtype"),
        ("version", DEEP, "has version"),
        ("meta", {"a": DEEP}, "meta is nested more than 64 deep"),
        ("regions", [DEEP], "invalid description"),
        ("tree", [[[[]]]] * 1, None),
    ],
)  # fmt: skip
def test_what_a_plan_cannot_say(field, value, message, path_of):
    parts = json.loads(plan({"a": torch.ones(4)}).describe()) | {field: value}
    path = save({"a": torch.ones(4)}, path_of("safetensors"))
    sign_again(path, lambda all: all | {"plan": parts})
    if message is None:
        assert load_checkpoint(path) == value
        return
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)
    with pytest.raises((CheckpointError, ArgumentError)):
        load_checkpoint(path, keys="a")


def test_regions_that_lie_over_each_other(path_of):
    """More of them than the file could hold, each as large as the file."""
    path = save({"a": np.arange(6000), "b": np.arange(6000)}, path_of("distcp"), "distcp")
    _, start, nbytes = struct.unpack("<16sQQ", path.read_bytes()[:32])
    parts = json.loads(path.read_bytes()[start : start + nbytes].partition(b"\n")[2])
    first = parts["stored"][0]
    for stored in (str(int(first) + 8), "0" + first, first):
        parts["stored"][1] = stored
        data = Described(json.dumps(parts["plan"]).encode(), parts["stored"], archives=parts["archives"]).file([0, 0])
        path.write_bytes(
            struct.pack("<16sQQ", b"shmtensor.distcp", start, len(data))
            + path.read_bytes()[32:start]
            + data.ljust(-(-(start + len(data)) // 4096) * 4096 - start, b"\0")
        )
        with pytest.raises(CheckpointError, match=r"two of its regions|it has a region of|stored under one name"):
            load_checkpoint(path)


def test_an_archive_with_two_tables_of_contents(tmp_path):
    """Other readers, torch's among them, go by the locator before the end, and would read what was not looked at."""
    path = tmp_path / "a.pt"
    torch.save({"a": torch.ones(2)}, path)
    whole = path.read_bytes()
    *_, count, nbytes, start, _ = struct.unpack("<IHHHHIIH", whole[-22:])
    body, end = whole[: start + nbytes], whole[-22:]
    record = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, nbytes, start)
    path.write_bytes(body + record + struct.pack("<IIQI", 0x07064B50, 0, len(body), 1) + end)
    assert same(load_checkpoint(path), {"a": torch.ones(2)})
    for other in (start, 0, 1 << 63):
        path.write_bytes(body + record + struct.pack("<IIQI", 0x07064B50, 0, other, 1) + end)
        with pytest.raises(CheckpointError, match="its end record of 64 bits is not at"):
            load_checkpoint(path)
    path.write_bytes(body + struct.pack("<IIQI", 0x07064B50, 0, start, 1) + end)
    with pytest.raises(CheckpointError, match="its end record of 64 bits is not at"):
        load_checkpoint(path)


@pytest.mark.parametrize("name", ["archive/DATA.PKL", "Archive/data.pkl", "archive/DATA/0", "archive/VERSION"])
def test_members_that_differ_by_their_case(name, tmp_path):
    """torch reads the first one of a name, whatever its case is."""
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        members = [("archive/" + each.partition("/")[2], archive.read(each)) for each in archive.namelist()]
    for before in (True, False):
        with zipfile.ZipFile(tmp_path / "b.pt", "w") as archive:
            for each, data in [(name, b"x" * 5000), *members] if before else [*members, (name, b"x" * 5000)]:
                archive.writestr(each, data)
        with pytest.raises(CheckpointError, match=r"two members of one name"):
            load_checkpoint(tmp_path / "b.pt")
    with zipfile.ZipFile(tmp_path / "b.pt", "w") as archive:
        for each, data in members:
            archive.writestr(name if each.lower() == name.lower() else each, data)
    with pytest.raises(CheckpointError) if name != "archive/VERSION" else contextlib.nullcontext():
        load_checkpoint(tmp_path / "b.pt")


def test_what_is_no_regular_file_is_not_waited_for(tmp_path):
    safetensors.torch.save_file({"a": torch.ones(1)}, tmp_path / "model-00001-of-00001.safetensors")
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    for path in (tmp_path, tmp_path / "model-00001-of-00001.safetensors"):
        with pytest.raises(CheckpointError, match="is no regular file"):
            load_checkpoint(path)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model.safetensors.index.json.encrypted").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path)


def test_a_directory_of_indexes(tmp_path):
    safetensors.torch.save_file({"a": torch.ones(1)}, tmp_path / "model-1-of-1.safetensors")
    for n in range(33):
        (tmp_path / f"{n}.safetensors.index.json").write_text('{"weight_map":{"a":"b.safetensors"}}')
    with pytest.raises(CheckpointError, match="has 33 indexes of shards"):
        load_checkpoint(tmp_path / "model-1-of-1.safetensors")
    (tmp_path / "0.safetensors.index.json").unlink()
    assert list(load_checkpoint(tmp_path / "model-1-of-1.safetensors")) == ["a"]


def test_names_of_arrays_that_differ_by_slashes(path_of):
    names = ["".join("/|"[n >> bit & 1] for bit in range(10)) for n in range(1024)]
    made = get_format("npz").layout(plan({name: np.ones(1) for name in names}))
    assert len(made.places) == 1024
    path = save({name: np.full(1, n) for n, name in enumerate(names)}, path_of("npz"), "npz")
    assert len(np.load(path).files) == 1025
    assert [int(value[0]) for value in load_checkpoint(path).values()] == list(range(1024))


def test_a_name_that_is_no_text(path_of, tmp_path):
    path = path_of("safetensors")
    header_file(path, b'{"\\ud800":%b}' % EMPTY)
    for format in sorted(SUFFIX):
        made = convert(open_path(path), tmp_path / f"b{SUFFIX[format]}", format)
        assert list(load_checkpoint(made.path)) == ["\ud800"]


def test_long_texts_of_surrogates(path_of):
    """A piece of a text may end between two of them, but not inside a pair."""
    path = path_of("safetensors")
    for text in (r"\ud83d" * 100_000, r"\ud83d\ude00" * 50_000, "x" + r"\ude00" * 100_000, r"\\" * 300_001):
        header_file(path, b'{"__metadata__":{"a":"%b"},"t":%b}' % (text.encode(), EMPTY))
        assert list(load_checkpoint(path)) == ["t"]


def test_deep_and_large_descriptions():
    deep = b'{"version":1,"tree":' + b"[" * 100_000 + b"]" * 100_000 + b',"tensors":[],"regions":[],"meta":null}'
    with pytest.raises(CheckpointError, match=r"RecursionError|nested"):
        Plan.from_description(deep)
    with pytest.raises(CheckpointError, match="at most"):
        Plan.from_description(b" " * (49 << 20))


# --- safetensors headers


def header_file(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
EMPTY = b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": F32}, b"", "ends at offset .* truncated"),
        ({"a": F32 | {"data_offsets": [4, 8]}}, bytes(8), "begins at offset .*was expected"),
        ({"a": F32, "b": F32}, bytes(4), "begins at offset"),
        ({"a": F32 | {"shape": [2]}}, bytes(4), "has 4 bytes at offset"),
        ({"a": F32 | {"shape": [True]}}, bytes(4), "invalid entry"),
        ({"a": F32 | {"shape": [-1]}}, bytes(4), "invalid entry"),
        ({"a": F32 | {"data_offsets": [4, 0]}}, bytes(4), "invalid entry"),
        ({"a": F32 | {"shape": [1 << 40] * 60}}, bytes(4), "has 4 bytes|invalid entry"),
        ({"a": F32 | {"dtype": "F33"}}, bytes(4), "unknown dtype 'F33'"),
        ({"a": F32 | {"more": 1}}, bytes(4), "invalid entry"),
        ({"a": 3}, b"", "invalid entry"),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__ are not strings"),
        (b'{"a":%b,"a":%b}' % ((b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}',) * 2), b"", "a key appears twice"),
        (b'{"a":{"dtype":"U8","dtype":"U8"}}', b"", "a key appears twice"),
        (b'{"__metadata__":{"shmtensor":"a","shmtensor":"b"}}', b"", "a key appears twice"),
        (b'{"__metadata__":{},"__metadata__":{}}', b"", "a key appears twice"),
        (b"[]     ", b"", "no checkpoint"),
        (b'{"\xff":1}', b"", "invalid JSON"),
        (b'{"a":' + b"[" * 90_000, b"", "invalid JSON"),
    ],
)
def test_headers_that_cannot_be(header, data, message, path_of):
    path = path_of("safetensors")
    header_file(path, header, data)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)


def test_a_header_that_claims_much(path_of):
    path = path_of("safetensors")
    for length in (100_000_001, 1 << 62, 10_000):
        header_file(path, b"{}", length=length)
        with pytest.raises(CheckpointError, match=r"no checkpoint|should have 10000 bytes"):
            load_checkpoint(path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../a.safetensors"}, "not beside it"),
        ({"a": "/etc/passwd"}, "not beside it"),
        ({"a": "model-2.safetensors"}, "missing: model-2"),
        ({"a": "a" * 300}, "not beside it"),
        ({"a": "\ud800.safetensors"}, "not beside it"),
        ({"b": "model-1.safetensors"}, "is not in the shard"),
        ({"a": 3}, "no weight_map"),
        (None, "no weight_map"),
    ],
)
def test_an_index_that_leads_astray(weight_map, message, tmp_path):
    safetensors.torch.save_file({"a": torch.ones(1)}, tmp_path / "model-1.safetensors")
    index = {"metadata": {}} | ({} if weight_map is None else {"weight_map": weight_map})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)


def test_shards_of_different_saves(tmp_path):
    """The index of one save, a shard of another: sizes agree, digests do not."""
    first = save({"a": torch.ones(9), "b": torch.ones(9)}, tmp_path / "1", max_shard=36)
    second = save({"a": torch.zeros(9), "b": torch.zeros(9)}, tmp_path / "2", max_shard=36)
    os.replace(second / "model-00002-of-00002.safetensors", first / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match='tensor "b" at offset 4096 is damaged'):
        load_checkpoint(first, map=False)


# --- pickles and archives


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_no_pickle_runs(tmp_path):
    mark = tmp_path / "mark"
    torch.save({"a": Evil(mark)}, tmp_path / "zip.pt")
    torch.save({"a": Evil(mark)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Evil(mark), 2))
    np.savez(tmp_path / "a.npz", a=np.array([Evil(mark)], dtype=object))
    own = save({"a": torch.ones(3)}, tmp_path / "own.pt", "torch")
    replace_member(own, "archive/data.pkl", pickle.dumps(Evil(mark), 2))
    for name in ("zip.pt", "old.pt", "raw.pt", "a.npz"):
        with pytest.raises(CheckpointError):
            load_checkpoint(tmp_path / name)
    assert same(load_checkpoint(own), {"a": torch.ones(3)}), "the pickle of a file of ours is not looked at"
    assert not mark.exists()


def replace_member(path, name, data):
    """Write an archive again, stored, with one member changed."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    members[name] = data
    with zipfile.ZipFile(path, "w") as archive:
        for each, contents in members.items():
            archive.writestr(each, contents)


def test_archives_that_cannot_be(tmp_path):
    path = tmp_path / "a.npz"
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": (1 << 40,)})
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(path, "w", compression) as archive:
            archive.writestr("x.npy", file.getvalue() + b"12345678")
        with pytest.raises(CheckpointError, match=r"member 'x\.npy': an array of shape \(1099511627776,\)"):
            load_checkpoint(path)
    for name, contents in (
        ("x.npy", b"\x93NUMPY\x09\x00"),
        ("x.npy", b""),
        ("x.npy", b"\x93NUMPY\x01\x00\x05\x00{(((("),
    ):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(name, contents)
        with pytest.raises(CheckpointError, match="member 'x"):
            load_checkpoint(path)
    own = save({"a": np.ones(3)}, path, "npz")
    replace_member(own, "a.npy", b"short")
    with pytest.raises(CheckpointError, match=r"member 'a\.npy' at offset .* has 5 bytes, its description says 24"):
        load_checkpoint(own)
    replace_member(own, "shmtensor.json", b"x" * 99)
    with pytest.raises(CheckpointError, match="its description is damaged"):
        load_checkpoint(own)


def test_a_member_that_unpacks_to_more_than_it_can(tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.zeros(10))
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\x01\x02")
    struct.pack_into("<I", data, at + 24, 0x7FFFFFFF)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="says 2147483647 bytes, and has"):
        load_checkpoint(path)


def test_truncation_anywhere_in_a_file_of_old_torch(tmp_path):
    """Its storages follow its pickles, without a table: what they should have is compared with the file's size."""
    path, shared = tmp_path / "a.pt", torch.arange(100.0)
    state = {
        "a": shared,
        "b": shared[10:],
        "c": torch.ones(3, dtype=torch.bool),
        "e": torch.empty(0),
        "f": torch.empty(0, 3),
    }
    torch.save(state, path, _use_new_zipfile_serialization=False)
    whole = path.read_bytes()
    assert same(load_checkpoint(path), state)
    assert check(open_path(path), readers=1) == []
    for length in [*range(0, len(whole), 37), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            check(open_path(path), readers=1)
        assert list_checkpoints(tmp_path)[0].error is not None


@pytest.mark.parametrize("name", ["a.pt", "a.npz", "a.safetensors", "a"])
@pytest.mark.parametrize(
    "contents", [b"", b"\x80", b"\x80\x02}q\x00.", b"PK\x03\x04", b"PK\x05\x06" + bytes(18), b"\0" * 64]
)
def test_rubbish(name, contents, tmp_path):
    path = tmp_path / name
    path.write_bytes(contents)
    if name == "a.npz" and contents[:4] == b"PK\x05\x06":
        assert load_checkpoint(path) == {}  # an archive of nothing
        return
    if name == "a.pt" and contents == b"\x80\x02}q\x00.":
        with pytest.raises(CheckpointError, match=r"torch\.load"):
            load_checkpoint(path)
        return
    with pytest.raises(CheckpointError):
        load_checkpoint(path)


def test_a_description_that_is_overlooked(path_of, tmp_path):
    """A changed name must not turn a file of ours into a file of somebody else, whose structure is another one."""
    state = {"a": [torch.ones(2), np.ones(2)]}
    for format, name in (("torch", b"shmtensor.json"), ("npz", b"shmtensor.json"), ("safetensors", b'"shmtensor"')):
        path = save(state, path_of(format), format)
        data = path.read_bytes()
        for at in (data.index(name), data.rindex(name)):
            path.write_bytes(data[: at + 3] + b"X" + data[at + 4 :])
            with pytest.raises(CheckpointError):
                load_checkpoint(path)
    sharded = save(state, tmp_path / "shards", max_shard=8)
    index = sharded / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"metadata"', '"mxtadata"'))
    assert same(load_checkpoint(sharded), state)
