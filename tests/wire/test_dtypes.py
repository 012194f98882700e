"""Every dtype of torch and NumPy survives, bit for bit; there is one table, and its codes never move."""

from __future__ import annotations

import subprocess
import sys
import warnings

import ml_dtypes
import numpy as np
import pytest
import torch

from shmtensor.codec.encode import encode_empty
from shmtensor.errors import ArgumentTypeError
from shmtensor.wire.dtypes import BY_CODE, BY_NAME, TABLE

from ..codec.another import decode, encode, implementation, payload_of, travel  # noqa: F401

TORCH = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)


def test_the_table_has_every_dtype_of_the_installed_torch():
    assert {str(dtype).removeprefix("torch.") for dtype in TORCH} <= {row.name for row in TABLE if row.torch}
    for dtype in TORCH:
        assert BY_NAME[str(dtype).removeprefix("torch.")].itemsize == dtype.itemsize


def test_codes_are_unique_and_never_move():
    assert len(BY_CODE) == len(TABLE)
    assert [(row.code, row.name) for row in TABLE if row.code < 30] == [
        (1, "bool"), (2, "int8"), (3, "int16"), (4, "int32"), (5, "int64"), (6, "uint8"), (7, "uint16"),
        (8, "uint32"), (9, "uint64"), (10, "float16"), (11, "float32"), (12, "float64"), (13, "complex64"),
        (14, "complex128"), (20, "bfloat16"), (21, "complex32"), (22, "float8_e4m3fn"),
        (23, "float8_e4m3fnuz"), (24, "float8_e5m2"), (25, "float8_e5m2fnuz"), (26, "float8_e8m0fnu"),
        (27, "float4_e2m1fn_x2"),
    ]  # fmt: skip


CARRIER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def bits(tensor):
    """The elements' bytes in C order."""
    return tensor.view(CARRIER[tensor.element_size()]).contiguous().reshape(-1).view(torch.uint8)


def random_tensor(dtype, shape):
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's about complex32
        return raw.view(CARRIER[dtype.itemsize]).view(shape).view(dtype)


@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (0, 3)], ids=str)
def test_torch_dtypes(shape):
    for dtype in TORCH:
        tensor = random_tensor(dtype, shape)
        back = travel(tensor)
        assert (back.dtype, back.shape, back.stride()) == (dtype, tensor.shape, tensor.stride())
        assert torch.equal(bits(back), bits(tensor)), dtype
        for view in (tensor[:, ::2], tensor.t()) if len(shape) == 2 else ():
            back = travel({"x": view})["x"]
            assert (back.dtype, back.shape) == (dtype, view.shape)
            assert torch.equal(bits(back), bits(view)), dtype


ML = sorted(n for n in dir(ml_dtypes) if isinstance(t := getattr(ml_dtypes, n), type) and issubclass(t, np.generic))
POINT = np.dtype([("x", "<f4"), ("y", ">f8")])
NUMPY = [
    *(np.dtype(code) for code in "?bBhHiIlLqQefdgFDG"),
    *(np.dtype(">" + code) for code in "hHiIqQefdgFDG"),
    *(np.dtype(f"M8[{unit}]") for unit in ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "25s", "as")),
    *(np.dtype(text) for text in ("m8[us]", "M8", "m8", ">M8[ns]", "S5", "U3", ">U3", "V7")),
    *(np.dtype(getattr(ml_dtypes, name)) for name in ML),
    POINT,
    np.dtype([("a", "i1"), ("b", POINT), ("c", "M8[us]", (2, 3)), ("d", "U2")]),
    np.dtype([("a", "i1"), ("b", "f8")], align=True),
    np.dtype({"names": ["p", "q"], "formats": ["u1", "f4"], "offsets": [9, 2], "itemsize": 16}),
    np.dtype({"names": ["p", "q"], "formats": ["u4", "u1"], "offsets": [0, 0]}),  # a union
    np.dtype([(("the title", "a"), "f4"), ("b", "i2")]),
    np.dtype((np.record, [("a", "f4")])),
    np.dtype([("m", ml_dtypes.bfloat16), ("s", "S3")]),
    np.dtype({"names": [], "formats": [], "itemsize": 4}),
]


def raw_bytes(array):
    if array.dtype.names is not None:  # with the padding
        array = array.view(np.dtype((np.void, array.itemsize)))
    return np.ascontiguousarray(array).tobytes()


def check_numpy_dtype(dtype):
    raw = bytearray(np.random.default_rng(2).integers(0, 100, 12 * dtype.itemsize, dtype=np.uint8).tobytes())
    array = np.ndarray((3, 4), dtype, raw)
    for source in (array, array[0], array[1, 1:2], array.T, array[::2, ::-1], array[:0], np.ndarray((), dtype, raw)):
        for back in (travel(source, readonly=True), travel([source], readonly=True)[0]):
            assert back.dtype == source.dtype
            assert back.dtype.isalignedstruct == dtype.isalignedstruct
            assert (back.dtype.type is np.record) == (dtype.type is np.record)
            assert back.dtype.fields == dtype.fields
            assert back.shape == source.shape
            assert raw_bytes(back) == raw_bytes(source)
            assert not back.flags.writeable


def test_numpy_dtypes():
    for dtype in NUMPY:
        check_numpy_dtype(dtype)


SCALARS = [
    np.float32(3), np.float64("nan"), np.bool_(True), np.int8(-1), np.longdouble("1.1"), np.complex64(1j),
    np.datetime64("2024-02-29", "D"), np.timedelta64(3, "ns"), np.str_("a\0"), np.str_(""), np.bytes_(b"b\0"),
    np.bytes_(b""), ml_dtypes.bfloat16(1.5), np.void(b"abc"), np.array([(1, 2)], POINT)[0], np.float16(1),
]  # fmt: skip


def test_numpy_scalars():
    for scalar in SCALARS:
        back = travel([scalar])[0]
        assert type(back) is type(scalar)
        assert back.dtype == scalar.dtype
        assert back.tobytes() == scalar.tobytes() or back == scalar  # a long double has padding
        assert str(back) == str(scalar)


OF_OBJECTS = [np.array([object()]), np.zeros(2, [("a", "O")])]
if hasattr(np.dtypes, "StringDType"):  # NumPy 2
    OF_OBJECTS.append(np.array(["a"], np.dtypes.StringDType()))


@pytest.mark.parametrize("array", OF_OBJECTS)
def test_dtypes_of_objects_are_refused(array):
    with pytest.raises(ArgumentTypeError, match=r'value\["a"\]\[0\]: dtype .* objects'):
        encode({"a": [array]})


def test_a_loan_is_described_as_a_value():
    for value in (torch.zeros(2, 3, dtype=torch.bfloat16), np.zeros((4,), ">i4"), torch.zeros(()), torch.zeros(0)):
        for meta in (None, {"a": [1, None]}):
            empty = encode_empty(value.shape, value.dtype, meta)
            assert (empty.description, empty.nbytes) == (encode(value, meta).description, value.nbytes)
    assert encode_empty(3, "f4").description == encode_empty((3,), np.float32).description
    assert len(encode(torch.zeros(1, 2, 3, 4, 5)).description) < 100


@pytest.mark.parametrize(("dtype", "arrives"), [(torch.bfloat16, torch.bfloat16), ("f4", np.float32)])
def test_a_loan_is_a_view_to_compute_into(dtype, arrives):
    payload = payload_of(64)
    view, meta = decode(encode_empty((3, 4), dtype).description, payload, readonly=False)
    assert (view.dtype, tuple(view.shape), meta) == (arrives, (3, 4), None)
    view[...] = 2
    assert payload.any()


def test_numpy_alone_never_imports_torch():
    code = (
        "import sys; import numpy as np; from shmtensor.codec.implementation import *;"
        "from shmtensor.codec.leaf import *; p = encode({'a': np.arange(3), 'b': [np.zeros(2, 'M8[s]'), 1]});"
        "b = np.zeros(p.nbytes, 'u1'); p.copy_into(b); v = decode(p.description, b, readonly=True);"
        "copy_value(v[0]); map_leaves(np.copy, v[0]);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
