"""`.pt` files of torch's own: what `torch.load(weights_only=True)` gives, and nothing that costs more than it is."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from shmtensor import ArgumentError, CheckpointError, load_arrays, load_checkpoint, load_into
from shmtensor.checkpoint import structure
from shmtensor.checkpoint.convert import convert
from shmtensor.checkpoint.formats import torch as torch_format
from shmtensor.checkpoint.opening import open_path

from ..commands import app
from .state_files import SUFFIX, same, training_state

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantize:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantize:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning"),
]


def alike(a, b) -> bool:
    """The same in all that a program can tell: classes, values, what is shared inside, strides, grad, attributes."""
    return _alike(a, b, {})


def _alike(a, b, met) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, dict, set, tuple, torch.Tensor)) and a != ():
        if id(a) in met:
            return met[id(a)] is b
        met[id(a)] = b
    if isinstance(a, torch.Tensor):
        if (a.dtype, a.layout, a.device, a.requires_grad, a.is_nested) != (
            b.dtype, b.layout, b.device, b.requires_grad, b.is_nested,
        ):  # fmt: skip
            return False
        if a.layout == torch.sparse_coo:
            return (
                a.shape == b.shape
                and a.is_coalesced() == b.is_coalesced()
                and all(map(same, (a._indices(), a._values()), (b._indices(), b._values())))
            )
        if a.is_nested:
            return same(a, b)  # its symbolic shape is another one each time
        if a.is_meta:
            return (a.shape, a.stride()) == (b.shape, b.stride())
        if a.layout == torch.strided:
            if (a.stride(), a.storage_offset(), a.is_conj(), a.is_neg()) != (
                b.stride(), b.storage_offset(), b.is_conj(), b.is_neg(),
            ):  # fmt: skip
                return False
            if a.untyped_storage().nbytes() != b.untyped_storage().nbytes():
                return False
            if bytes(a.untyped_storage()) != bytes(b.untyped_storage()):
                return False
        return same(a.detach(), b.detach()) and _alike(vars(a), vars(b), met)
    if isinstance(a, dict):
        return (
            [*map(repr, a)] == [*map(repr, b)]
            and all(_alike(a[key], b[other], met) for key, other in zip(a, b, strict=True))
            and (not hasattr(a, "__dict__") or _alike(vars(a), vars(b), met))
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_alike(x, y, met) for x, y in zip(a, b, strict=True))
    if isinstance(a, set):
        return sorted(map(repr, a)) == sorted(map(repr, b))
    if isinstance(a, (torch.storage.TypedStorage, torch.storage.UntypedStorage)):
        return bytes(a.untyped()) == bytes(b.untyped())
    return repr(a) == repr(b)


def shared_state():
    inner = [1, 2, {"x": torch.ones(2)}]
    return {"a": inner, "b": inner, "c": [inner, inner], "t": (inner, inner)}


def parameter_with_attribute():
    made = torch.nn.Parameter(torch.ones(3))
    made.note = "mine"
    return made


def tensor_with_attribute():
    made = torch.ones(3)
    made.note = ["mine"]
    return made


def jagged():
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)


LINE = torch.arange(24.0)
STATES = {
    "numbers": lambda: [0, 1, -1, 255, 256, 65536, 1 << 31, -(1 << 40), 1 << 500, 1.5, float("nan"), True, None],
    "complex": lambda: [1j, complex(2, -3.5), complex(float("inf"), float("nan"))],
    "texts": lambda: ["", "text", "ü\n\0", "\ud800", "x" * 100_000],
    "bytes": lambda: [b"\x00\xff", b"x" * 100_000],
    "bytearray": lambda: [bytearray(), bytearray(b"\x00\xff"), bytearray(b"x" * 100_000)],
    "sets": lambda: [set(), {1, "a", None, 2.5, b"x"}, {(1, (2, 3))}, {1j}],
    "keys": lambda: {1: 2, None: 3, (1, "a", (2,)): 4, 1.5: 5, False: 6, b"k": 7, 2j: 8},
    "containers": lambda: {"l": [], "t": (), "d": {}, "n": [[[]], ((),)], "o": OrderedDict(a=1), "c": Counter("abca")},
    "large containers": lambda: {"l": list(range(5000)), "d": {n: str(n) for n in range(5000)}, "t": (0.5,) * 5000},
    "shared": shared_state,
    "torch types": lambda: [
        torch.Size([1, 2]), torch.Size([]), torch.float16, torch.uint3, torch.device("cuda:1"), torch.device("cpu"),
        torch.strided, torch.sparse_coo, torch.per_tensor_affine,
    ],
    "dtypes": lambda: {
        str(dtype): torch.arange(96, dtype=torch.uint8).view(dtype)
        for dtype in (torch.int8, torch.float64, torch.bfloat16, torch.complex32, torch.complex128, torch.uint16,
                      torch.uint64, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
                      torch.float8_e5m2fnuz)
    },
    "bool": lambda: torch.tensor([True, False]),
    "views": lambda: [
        LINE, LINE[3:7], LINE[::2], LINE.view(4, 6).t(), LINE[:1].expand(1000), LINE.view(2, 3, 4).permute(2, 0, 1),
        torch.empty(0, 3), torch.tensor(1.5), torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    ],
    "conj and neg": lambda: [
        torch.randn(3, dtype=torch.complex64).conj(), torch.randn(3, dtype=torch.complex64).conj().imag,
    ],
    "grad": lambda: [torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2)),
                     torch.nn.Parameter(torch.ones(2), requires_grad=False)],
    "buffer": lambda: torch.nn.Buffer(torch.ones(2)),
    "attributes": lambda: [parameter_with_attribute(), tensor_with_attribute()],
    "meta": lambda: [torch.empty(3, 4, device="meta"), torch.empty(4, 3, device="meta").t(),
                     torch.nn.Parameter(torch.empty(1 << 40, device="meta"))],
    "sparse": lambda: [torch.eye(3).to_sparse(), torch.eye(3).to_sparse().coalesce(), torch.eye(3).to_sparse_csr(),
                       torch.eye(4).to_sparse_bsr((2, 2)), torch.eye(3).to_sparse_csc(),
                       torch.sparse_coo_tensor(torch.zeros(2, 0, dtype=torch.int64), torch.empty(0), (1 << 30,) * 2)],
    "quantized": lambda: [
        torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 3, torch.qint8),
        torch.quantize_per_channel(torch.randn(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.quint8),
        torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 3, torch.qint32),
    ],
    "nested": lambda: [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
                       torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 1)]), jagged()],
    "storages": lambda: [torch.arange(5.0).untyped_storage(), torch.arange(3).storage()],
    "training": lambda: training_state() | {"model": torch.nn.Linear(2, 2).state_dict(), "rng": torch.get_rng_state()},
    "one tensor": lambda: torch.arange(3),
    "module state": lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).state_dict(),
    "nothing": lambda: None,
}  # fmt: skip
LOADABLE = sorted(STATES)


def saved(state, path, **options):
    torch.save(state, path, **options)
    return torch.load(path, weights_only=True, map_location="cpu")


def test_nested_tensors_of_the_old_format_are_refused(tmp_path):
    """torch makes them of sizes that it has not read yet: of whatever lies in that memory."""
    torch.save(STATES["nested"]()[:1], tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="nested tensor of the old format"):
        load_checkpoint(tmp_path / "a.pt")


@pytest.mark.parametrize("old", [False, True], ids=["zip", "old"])
@pytest.mark.parametrize("name", LOADABLE)
def test_what_torch_gives_is_what_comes(name, old, tmp_path):
    if old and name == "nested":
        pytest.skip("refused, see the test before")
    path = tmp_path / "a.pt"
    try:
        expected = saved(STATES[name](), path, _use_new_zipfile_serialization=not old)
    except (pickle.UnpicklingError, RuntimeError, AttributeError):  # of the old format; the next test is for the new
        with pytest.raises(CheckpointError):
            load_checkpoint(path)
        return
    for map in (True, False):
        assert alike(load_checkpoint(path, map=map), expected)
    assert alike(load_checkpoint(path, verify="all"), expected)


def test_nearly_all_of_the_list_is_loadable(tmp_path):
    """The test before this one says nothing about what torch does not load itself."""
    refused = []
    for name in LOADABLE:
        try:
            saved(STATES[name](), tmp_path / "a.pt")
        except (pickle.UnpicklingError, RuntimeError, AttributeError):
            refused.append(name)
    assert refused == []
    torch.save({"a": b"", "b": np.ones(2)}, tmp_path / "a.pt")  # to be torch's to refuse, as this list says
    with pytest.raises(CheckpointError, match="GLOBAL"):
        load_checkpoint(tmp_path / "a.pt")


def test_frozensets_are_torchs_to_refuse(tmp_path):
    torch.save({"a": frozenset([1])}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"torch\.load\(weights_only=True\) does not open it"):
        load_checkpoint(tmp_path / "a.pt")


class Allowed:
    def __init__(self):
        self.values = [1, {"a": torch.ones(2)}]

    def __eq__(self, other):
        return alike(vars(self), vars(other))

    __hash__ = None


def test_classes_that_the_user_allowed(tmp_path):
    torch.save({"x": Allowed()}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="add_safe_globals"):
        load_checkpoint(tmp_path / "a.pt")
    with torch.serialization.safe_globals([Allowed]):
        assert load_checkpoint(tmp_path / "a.pt") == {"x": Allowed()}
        assert load_checkpoint(tmp_path / "a.pt", keys="x") == {"x": Allowed()}
        with pytest.raises(CheckpointError, match="Allowed is not saved"):
            load_arrays(tmp_path / "a.pt")


def test_parts_of_it(tmp_path):
    state = {"model": OrderedDict({"l1.weight": torch.ones(2), "l2.bias": torch.ones(3)}), "s": {1}, "m": {0: 5, 1: 6},
             "c": Counter("aab")}  # fmt: skip
    state["model"]._metadata = {"version": 1}
    torch.save(state, tmp_path / "a.pt")
    back = load_checkpoint(tmp_path / "a.pt", keys=["model.l1", "m.0", "s", "c.a"])
    assert same(back, {"model": OrderedDict({"l1.weight": torch.ones(2)}), "s": {1}, "m": {0: 5}, "c": Counter(a=2)})
    assert back["model"]._metadata == {"version": 1}
    assert load_checkpoint(tmp_path / "a.pt", keys=[]) == {}
    with pytest.raises(ArgumentError, match="nothing named 'modle': did you mean model"):
        load_checkpoint(tmp_path / "a.pt", keys="modle")
    arrays = load_arrays(tmp_path / "a.pt")
    assert np.array_equal(arrays["model"]["l1.weight"], np.ones(2, np.float32))
    assert arrays["s"] == {1}


def test_writing_to_what_was_loaded_leaves_the_file(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"a": torch.ones(5000)}, path)
    before = path.read_bytes()
    for map in (True, False):
        load_checkpoint(path, map=map)["a"].zero_()
    assert path.read_bytes() == before


CONVERTED = {
    "c": 1 - 2j, "nan": complex(float("nan"), float("-inf")), "s": {1, "a"}, "b": bytearray(b"\x00\xff"),
    "long": bytearray(range(256)) * 40, "t": torch.arange(3), "n": [1, (2,)], "empty": set(),
}  # fmt: skip


@pytest.mark.parametrize("format", sorted(SUFFIX))
def test_what_torch_gives_can_be_converted(format, tmp_path):
    torch.save(CONVERTED, tmp_path / "a.pt")
    made = convert(open_path(tmp_path / "a.pt"), tmp_path / f"b{SUFFIX[format]}", format)
    back = load_checkpoint(made.path, verify="all")
    assert same(back, CONVERTED)
    if format == "torch":
        seen = torch.load(made.path, weights_only=True)
        assert seen["long"].numpy().tobytes() == CONVERTED["long"]
        assert same({**seen, "long": 0}, {**CONVERTED, "long": 0})
    torch.save({"m": torch.empty(4, 3, device="meta").t(), "f": 1}, tmp_path / "m.pt")
    made = convert(open_path(tmp_path / "m.pt"), tmp_path / f"m{SUFFIX[format]}", format, overwrite=True)
    back = load_checkpoint(made.path)["m"]
    assert (back.device.type, back.shape, back.stride()) == ("meta", (3, 4), (1, 3))
    assert load_arrays(made.path, keys="f") == {"f": 1}
    with pytest.raises(CheckpointError, match="on the device meta"):
        load_arrays(made.path)
    if format == "torch":
        assert torch.load(made.path, weights_only=True)["m"].is_meta


def test_sets_and_numbers_are_saved(tmp_path):
    from .state_files import save

    state = {**CONVERTED, "f": frozenset([1, (2, 3)]), "nested": [{1j}]}
    for format, suffix in SUFFIX.items():
        path = save(state, tmp_path / f"a{suffix}", format)
        assert same(load_checkpoint(path, map=False), state)
        assert load_arrays(path, keys=["f", "s"]) == {"f": state["f"], "s": state["s"]}
    assert torch.load(tmp_path / "a.pt", weights_only=True)["f"] == {1, (2, 3)}


# --- pickles that cost more than they are


def archive_of(pickled, path, storages=(), compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", b"little")
        for name, data in dict(storages).items():
            archive.writestr(f"archive/data/{name}", data)
        archive.writestr("archive/version", b"3\n")
    return path


def nested_lists(levels):
    """`a = [b, b]`, `b = [c, c]`, and so on: a few bytes a level."""
    return b"\x80\x02" + b"]q\x00" + b"".join(
        b"](h" + bytes([n]) + b"h" + bytes([n]) + b"eq" + bytes([n + 1]) for n in range(levels)
    ) + b"."  # fmt: skip


def test_shared_lists_stay_shared(tmp_path):
    path = archive_of(nested_lists(60), tmp_path / "a.pt")
    assert path.stat().st_size < 2000
    state = load_checkpoint(path)
    for _ in range(60):
        assert state[0] is state[1]
        state = state[0]
    assert state == []
    for look in (load_arrays, lambda path: open_path(path).plan):
        with pytest.raises(CheckpointError, match="share others so often that they are more than"):
            look(path)
    done = CliRunner().invoke(app, ["checkpoint", "verify", str(path)])
    assert done.exit_code == 0, done.output  # its bytes are what they were
    wrapped = {}
    shared = wrapped
    for _ in range(50):
        shared = {"a": shared, "b": shared}
    torch.save({"deep": shared, "w": torch.ones(2)}, path)
    assert same(load_checkpoint(path, keys="w"), {"w": torch.ones(2)})
    assert load_checkpoint(path)["deep"]["a"] is not None
    net = torch.nn.Linear(2, 2, bias=False)
    torch.save({"deep": shared, "net": net.state_dict()}, path)
    load_into(net, path, key="net")
    whole = torch.nn.Sequential(net)
    torch.nn.init.normal_(net.weight)
    kept = net.weight.clone()
    torch.save({"deep": shared, "net": whole.state_dict()}, path)
    torch.nn.init.zeros_(net.weight)
    load_into(net, path, key="net.0")
    assert torch.equal(net.weight, kept)


def test_tensors_that_are_shared_are_looked_at_once(tmp_path, monkeypatch):
    sparse, nested = torch.eye(3).to_sparse(), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    torch.save([sparse, nested] * 50, tmp_path / "a.pt")
    views, take_apart, known = structure._tensor_tools()
    taken, checked = [], []
    monkeypatch.setattr(
        structure, "_tensor_tools", lambda: (views, lambda tensor: (taken.append(1), take_apart(tensor))[1], known)
    )
    monkeypatch.setattr(torch_format, "_check_nested", lambda *_: checked.append(1))
    assert len(open_path(tmp_path / "a.pt").plan.tensors) == 200
    assert (len(taken), len(checked)) == (2, 2)  # the second by each of two walks
    assert len(load_checkpoint(tmp_path / "a.pt")) == 100


def test_what_contains_itself_is_refused(tmp_path):
    endless: list = [1]
    endless.append({"x": (endless,)})
    torch.save({"a": endless}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="a list in its state contains itself"):
        load_checkpoint(tmp_path / "a.pt")
    deep: list = []
    for _ in range(70):
        deep = [deep]
    torch.save({"a": deep, "b": deep}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="nested more than 64 deep"):
        load_checkpoint(tmp_path / "a.pt")
    path = archive_of(b"\x80\x02" + b"](" * 100_000 + b"e" * 100_000 + b".", tmp_path / "b.pt")
    with pytest.raises(CheckpointError, match=r"nested more than 64 deep|belong to nothing"):
        load_checkpoint(path)


def text(value):
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value):
    return b"\x8a\x09" + value.to_bytes(9, "little")


def storage(kind="FloatStorage", key="0", count=4, module="torch"):
    return b"(" + text("storage") + f"c{module}\n{kind}\n".encode() + text(key) + text("cpu") + number(count) + b"tQ"


def tensor(source, offset=0, size=(4,), stride=(1,), function="_rebuild_tensor_v2"):
    def numbers(values):
        return b"(" + b"".join(map(number, values)) + b"t"

    return (
        f"ctorch._utils\n{function}\n(".encode() + source + number(offset) + numbers(size) + numbers(stride)
        + b"\x89ccollections\nOrderedDict\n)RtR"
    )  # fmt: skip


HUGE = 1 << 45
TUPLES = b"K\x01q\x00" + b"h\x00\x86q\x00" * 60
"""A tuple that takes 2**60 steps to hash or to write."""
LISTS = b"]q\x00" + b"](h\x00h\x00eq\x00" * 60
"""The same as lists, in the memo only."""
HOSTILE = {
    "a storage beyond the file": (tensor(storage(count=HUGE)), "storage '0' should have"),
    "a storage that is not there": (tensor(storage(key="7")), "storage '7' should have 16 bytes of .*which is not"),
    "a shape beyond its storage": (tensor(storage(), size=(HUGE,)), "ends at byte .* of storage '0', which has 16"),
    "strides beyond its storage": (tensor(storage(), size=(2, 2), stride=(HUGE, 1)), "ends at byte"),
    "an offset beyond its storage": (tensor(storage(), offset=HUGE), "ends at byte"),
    "a quantized tensor larger than its storage": (
        tensor(storage("QInt8Storage"), size=(HUGE,), stride=(0,), function="_rebuild_qtensor"), "larger than its"),
    "a tensor of another tensor's elements": (
        b"ctorch._utils\n_rebuild_device_tensor_from_cpu_tensor\n("
        + tensor(storage(), size=(HUGE,), stride=(0,)) + b"ctorch\nfloat64\n" + text("cpu") + b"\x89tR",
        "larger than their storages, to be copied"),
    "an empty tensor class": (b"ctorch\nTensor\n(" + number(HUGE) + b"tR", r"a call of torch\.Tensor with arguments"),
    "a new tensor class": (b"ctorch\nFloatTensor\n(" + number(HUGE) + b"t\x81", r"a call of torch\.FloatTensor"),
    "a bare storage": (b"ctorch.storage\nUntypedStorage\n(" + number(HUGE) + b"tR", "a call of .*UntypedStorage"),
    "a bytearray": (b"c__builtin__\nbytearray\n(" + number(HUGE) + b"tR", r"a call of builtins\.bytearray"),
    "bytes, again and again": (
        text("x" * 60_000) + b"q\x00]q\x01(" + b"c_codecs\nencode\nh\x00\x85R" * 60 * 20 + b"e", "it makes .* bytes"),
    "an encoding": (
        b"c_codecs\nencode\n(c_codecs\nencode\n(" + text("ab") + text("latin1") + b"tR" + text("hex") + b"tR",
        "the encoding 'hex'"),
    "a set, again and again": (
        b"](" + b"K\x01" * 50_000 + b"eq\x00]q\x01(" + b"c__builtin__\nset\nh\x00\x85R" * 3000 + b"e", "much more"),
    "a key of shared tuples": (
        b"}K\x01q\x00" + b"h\x00\x86q\x00" * 60 + b"K\x01s", "takes much more steps"),
    "a key of deep tuples": (b"}" + b")" + b"\x85" * 90_000 + b"K\x01s", "nested more than 64 deep"),
    "a set of deep tuples": (
        b"c__builtin__\nset\n](" + b")" + b"\x85" * 90_000 + b"e\x85R", "nested more than 64 deep"),
    "values that belong to nothing": (b"]" * 600_000, "values that belong to nothing"),
    "marks": (b"(" * 600_000, "values that belong to nothing"),
    "an unknown opcode": (b"\x95" + bytes(8), "an opcode that is not known"),
    "a string beyond the file": (b"X\xff\xff\xff\xff", "a string of 4294967295 bytes"),
    "a part of a nested tensor beyond its buffer": (
        b"ctorch._utils\n_rebuild_nested_tensor\n(" + tensor(storage())
        + tensor(storage("LongStorage", "1", 2), size=(2, 1), stride=(1, 1))
        + tensor(storage("LongStorage", "2", 2), size=(2, 1), stride=(1, 1))
        + tensor(storage("LongStorage", "3", 2), size=(2,)) + b"tR", "beyond its buffer|out of bounds for storage"),
    "arguments in a list": (b"c__builtin__\nbytearray\n](" + number(HUGE) + b"eR", "without .* a tuple of arguments"),
    "a tensor class with arguments in a list": (
        b"ctorch\nFloatTensor\n](" + number(HUGE) + b"eR", "without .* a tuple of arguments"),
    "a function of tuples": (TUPLES + b")R", "a call without the name of a function"),
    "a class of tuples": (TUPLES + b")\x81", "a call without the name of a function"),
    "a name of a layout": (b"ctorch.serialization\n_get_layout\n" + TUPLES + b"\x85R", "takes much more steps"),
    "a layout of tuples": (b"ctorch._utils\n_rebuild_sparse_tensor\n" + TUPLES + b")\x86R", "takes much more steps"),
    "a layout of lists": (LISTS + b"ctorch._utils\n_rebuild_sparse_tensor\nh\x00)\x86R", "lists inside a list"),
    "a dict of Python 2": (b"cUserList\nOrderedDict\n)R" + TUPLES + b"K\x01s", "takes much more steps"),
    "attributes in a tuple": (b"ccollections\nOrderedDict\n)R" + TUPLES + b"K\x01\x86\x85b", "attributes that are no"),
    "attributes in a list": (b"ccollections\nOrderedDict\n)R](" + TUPLES + b"K\x01\x86eb", "attributes that are no"),
    "a dict of pairs": (b"ccollections\nOrderedDict\n](](" + TUPLES + b"K\x01ee\x85R", "takes much more steps"),
    "a dict of dicts' keys": (
        b"}(" + TUPLES[:64] + b"Nuq\x01]q\x02(" + b"ccollections\nOrderedDict\nh\x01\x85R" * 900 + b"e", "much more"),
    "memory of another tensor": (
        tensor(storage()) + b"(" + tensor(storage()) + b"K\x00" + number(HUGE) + b"\x85K\x01\x85tb", "never written"),
    "memory without strides": (
        tensor(storage()) + b"(" + storage() + b"K\x00" + number(HUGE) + b"\x85tb", "never written"),
    "memory in a list": (
        tensor(storage()) + b"](" + storage() + b"K\x00" + number(HUGE) + b"\x85K\x01\x85eb", "never written"),
    "a sparse tensor of repeated elements": (
        b"ctorch._utils\n_rebuild_sparse_tensor\n(ctorch.serialization\n_get_layout\n" + text("torch.sparse_coo")
        + b"\x85R(" + tensor(storage("LongStorage", "1", 2), size=(1, HUGE), stride=(0, 0))
        + tensor(storage(), size=(HUGE,), stride=(0,)) + b"K\x02\x85ttR", "larger than their storages, to be copied"),
    "keys that share a hash": (
        b"}(" + b"".join(number(5 + n * ((1 << 61) - 1)) + b"N" for n in range(8, 80)) + b"u", "that share a hash"),
    "tuples that share a hash": (
        b"}(" + b"".join(number(5 + n * ((1 << 61) - 1)) + b"\x85N" for n in range(8, 80)) + b"u", "that share a hash"),
    "a set that shares a hash": (
        b"c__builtin__\nset\n](" + b"".join(number(5 + n * ((1 << 61) - 1)) for n in range(8, 80)) + b"e\x85R",
        "that share a hash"),
    "an index of a sparse tensor": (
        b"ctorch._utils\n_rebuild_sparse_tensor\n(ctorch.serialization\n_get_layout\n" + text("torch.sparse_coo")
        + b"\x85R(" + tensor(storage("LongStorage", "2", 2), size=(1, 2), stride=(2, 1))
        + tensor(storage(), size=(2,)) + b"(K\x02t\x89ttR", r"does not open it"),
}  # fmt: skip


STORAGES = {"0": bytes(16), "1": struct.pack("<qq", 2, 2), "2": struct.pack("<qq", 1, 1 << 40),
            "3": struct.pack("<qq", 0, 2)}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_pickles_that_cost_more_than_they_are(name, tmp_path):
    pickled, message = HOSTILE[name]
    path = archive_of(b"\x80\x02" + pickled + b".", tmp_path / "a.pt", STORAGES)
    for map in (True, False):
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(path, map=map)
    old = io.BytesIO()
    for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}):
        pickle.dump(part, old, 2)
    (tmp_path / "old.pt").write_bytes(old.getvalue() + b"\x80\x02" + pickled + b".")
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path / "old.pt")


def test_the_same_pickles_within_their_bounds(tmp_path):
    """That the refusals above are for what they say, and not for how these pickles are made."""
    good = b"(" + tensor(storage()) + tensor(storage(), size=(2, 3), stride=(1, 1)) + tensor(
        storage(), size=(1000, 1000), stride=(0, 0)) + b"t"  # fmt: skip
    path = archive_of(b"\x80\x02" + good + b".", tmp_path / "a.pt", {"0": bytes(16)})
    a, b, c = load_checkpoint(path)
    assert (a.shape, b.shape, c.shape) == ((4,), (2, 3), (1000, 1000))
    assert same(load_checkpoint(path, map=False)[2], c)


def test_packed_archives(tmp_path):
    """Somebody packed a file again: torch reads it, if it does not map it."""
    torch.save({"a": torch.arange(1000.0), "b": [1, {2}]}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    expected = torch.load(tmp_path / "b.pt", weights_only=True)
    for map in (True, False):
        assert alike(load_checkpoint(tmp_path / "b.pt", map=map, verify="all"), expected)


def test_shards_of_pickles(tmp_path):
    names = [f"pytorch_model-{n:05}-of-00002.bin" for n in (1, 2)]
    torch.save({"a": torch.ones(2)}, tmp_path / names[0])
    torch.save(OrderedDict(b=torch.zeros(2)), tmp_path / names[1])
    for path in (tmp_path, *(tmp_path / name for name in names)):
        assert same(load_checkpoint(path), {"a": torch.ones(2), "b": torch.zeros(2)})
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": names[0], "b": names[1]}}))
    assert same(load_checkpoint(tmp_path), {"a": torch.ones(2), "b": torch.zeros(2)})
    torch.save({"a": torch.ones(2)}, tmp_path / names[1])
    with pytest.raises(CheckpointError, match="'a' is in another one as well"):
        load_checkpoint(tmp_path)
    (tmp_path / names[1]).unlink()
    with pytest.raises(CheckpointError, match=names[1]):
        load_checkpoint(tmp_path / names[0])
