"""The one dtype table: every element type with a code of its own on the wire.

| column | meaning |
|---|---|
| `code` | the wire constant, 1..254; it never changes and is never reused |
| `name` | the attribute of `torch` (or `numpy`, where NumPy has the type) |
| `itemsize` | bytes of one element |
| `carrier` | little-endian NumPy type of the same size, which holds the bytes where NumPy lacks the type |
| `numpy` | NumPy has the type itself, under this carrier |
| `torch` | torch has the type (a given version of torch may still lack it) |
| `quantized` | the values mean something only together with a scale and a zero point |

NumPy types beyond the table (structured, dates, strings, big-endian, ml_dtypes) have code `DESCRIBED` and travel as a
JSON description, see `shmtensor.codec.numpy`. All other tables of dtypes derive from this one.
"""

from __future__ import annotations

from typing import NamedTuple

DESCRIBED = 255


class DType(NamedTuple):
    """One row of the table; see the module's docstring for the columns."""

    code: int
    name: str
    itemsize: int
    carrier: str
    numpy: bool
    torch: bool
    quantized: bool = False


def _both(code: int, name: str, carrier: str) -> DType:
    return DType(code, name, int(carrier[2:]), carrier, numpy=True, torch=True)


def _only_torch(code: int, name: str, carrier: str, quantized: bool = False) -> DType:
    return DType(code, name, int(carrier[2:]), carrier, numpy=False, torch=True, quantized=quantized)


TABLE: tuple[DType, ...] = (
    _both(1, "bool", "|b1"),
    _both(2, "int8", "|i1"),
    _both(3, "int16", "<i2"),
    _both(4, "int32", "<i4"),
    _both(5, "int64", "<i8"),
    _both(6, "uint8", "|u1"),
    _both(7, "uint16", "<u2"),
    _both(8, "uint32", "<u4"),
    _both(9, "uint64", "<u8"),
    _both(10, "float16", "<f2"),
    _both(11, "float32", "<f4"),
    _both(12, "float64", "<f8"),
    _both(13, "complex64", "<c8"),
    _both(14, "complex128", "<c16"),
    _only_torch(20, "bfloat16", "<i2"),
    _only_torch(21, "complex32", "<i4"),
    _only_torch(22, "float8_e4m3fn", "|u1"),
    _only_torch(23, "float8_e4m3fnuz", "|u1"),
    _only_torch(24, "float8_e5m2", "|u1"),
    _only_torch(25, "float8_e5m2fnuz", "|u1"),
    _only_torch(26, "float8_e8m0fnu", "|u1"),
    _only_torch(27, "float4_e2m1fn_x2", "|u1"),
    _only_torch(30, "qint8", "|u1", quantized=True),
    _only_torch(31, "quint8", "|u1", quantized=True),
    _only_torch(32, "qint32", "<i4", quantized=True),
    _only_torch(33, "quint4x2", "|u1", quantized=True),
    _only_torch(34, "quint2x4", "|u1", quantized=True),
    _only_torch(40, "bits8", "|u1"),
    _only_torch(41, "bits16", "<i2"),
    _only_torch(42, "bits1x8", "|u1"),
    _only_torch(43, "bits2x4", "|u1"),
    _only_torch(44, "bits4x2", "|u1"),
    *(_only_torch(50 + bits, f"int{bits}", "|u1") for bits in range(1, 8)),
    *(_only_torch(60 + bits, f"uint{bits}", "|u1") for bits in range(1, 8)),
)

BY_CODE: dict[int, DType] = {row.code: row for row in TABLE}
BY_NAME: dict[str, DType] = {row.name: row for row in TABLE}
