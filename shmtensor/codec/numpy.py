"""NumPy arrays as leaves, and NumPy dtypes beyond the table as JSON descriptions. Never imports torch.

| description | dtype |
|---|---|
| string, such as `">i8"`, `"<M8[ns]"`, `"<U3"`, `"\\|V7"` | the built-in type of that name |
| `{"ml": name}` | the type of that name of `ml_dtypes` |
| `{"base": description, "shape": [int...]}` | subarray, inside a field |
| `{"names", "formats", "offsets", "itemsize", "titles", "aligned", "record"}` | structured |

The last three keys of a structured dtype are optional. A description is data: it is checked field by field, names no
code, and cannot express types that hold objects.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

import numpy as np

from ..errors import ArgumentTypeError, WireError
from ..options import shown
from ..wire.dtypes import TABLE, DType
from .leaf import Leaf, Refused

Array = np.ndarray[Any, Any]
AnyDType = np.dtype[Any]

CARRIER: dict[int, AnyDType] = {row.code: np.dtype(row.carrier) for row in TABLE}
ROW: dict[AnyDType, DType] = {np.dtype(row.carrier): row for row in TABLE if row.numpy}
MAX_NDIM = 64 if int(np.__version__.split(".")[0]) >= 2 else 32

_MAX_ITEMSIZE = (1 << 31) - 1
_MAX_DEPTH = 32
_UNIT = r"(\[\d{0,9}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
_BUILTIN = re.compile(rf"[<>|](b1|i[1248]|u[1248]|f(2|4|8|16)|c(8|16|32)|[SUV]\d{{1,10}}|[mM]8{_UNIT})\Z")
_REQUIRED = {"names", "formats", "offsets", "itemsize"}
_OPTIONAL = {"titles", "aligned", "record"}


def describe(dtype: AnyDType, depth: int = 0) -> Any:
    """The JSON description of a dtype. Raises `Refused` for types that cannot be sent."""
    if dtype.hasobject:
        raise Refused(
            ArgumentTypeError, f"dtype {dtype} holds Python objects: convert to a fixed-size dtype, or send a list"
        )
    if depth > _MAX_DEPTH:
        raise Refused(ArgumentTypeError, f"dtype is nested more than {_MAX_DEPTH} deep")
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return {"base": describe(base, depth + 1), "shape": list(shape)}
    if dtype.names is not None:
        table: Any = dtype.fields
        fields = [table[name] for name in dtype.names]
        description: dict[str, Any] = {
            "names": list(dtype.names),
            "formats": [describe(field[0], depth + 1) for field in fields],
            "offsets": [int(field[1]) for field in fields],
            "itemsize": dtype.itemsize,
        }
        titles = [field[2] if len(field) > 2 else None for field in fields]
        if any(title is not None for title in titles):
            if not all(title is None or isinstance(title, str) for title in titles):
                raise Refused(ArgumentTypeError, f"dtype {dtype} has a title that is no string")
            description["titles"] = titles
        if dtype.isalignedstruct:
            description["aligned"] = 1
        if dtype.type is np.record:
            description["record"] = 1
        return description
    if dtype.type.__module__ == "ml_dtypes":
        return {"ml": dtype.type.__name__}
    if dtype.isbuiltin != 2 and _BUILTIN.match(dtype.str):
        return dtype.str
    raise Refused(
        ArgumentTypeError,
        f"dtype {dtype} is not of a fixed size that is known here: send array.view('V{dtype.itemsize}'), "
        "or for strings array.astype('U')",
    )


def build(description: object, depth: int = 0) -> AnyDType:
    """The dtype of a description. Raises `WireError` for anything invalid."""
    if depth > _MAX_DEPTH:
        raise WireError(f"dtype is nested more than {_MAX_DEPTH} deep")
    try:
        dtype = _build(description, depth)
    except (WireError, MemoryError):
        raise
    except Exception as error:  # NumPy raises half a dozen types of error for impossible dtypes
        raise WireError(f"invalid dtype {shown(description)}: {error}") from None
    if dtype.hasobject or dtype.itemsize > _MAX_ITEMSIZE:
        raise WireError(f"invalid dtype {shown(description)}")
    return dtype


def _build(description: object, depth: int) -> AnyDType:
    if isinstance(description, str) and _BUILTIN.match(description):
        return np.dtype(description)
    if isinstance(description, dict):
        keys = set(description)
        if keys == {"ml"}:
            return _ml_dtype(description["ml"])
        if keys == {"base", "shape"}:
            base, shape = build(description["base"], depth + 1), description["shape"]
            if not isinstance(shape, list) or len(shape) > MAX_NDIM or not _sizes(shape, base.itemsize):
                raise WireError("invalid subarray")
            return np.dtype((base, tuple(shape)))
        if keys >= _REQUIRED and keys <= _REQUIRED | _OPTIONAL:
            return _structured(description, depth)
    raise WireError(f"invalid dtype {shown(description)}")


def _sizes(shape: list[Any], itemsize: int) -> bool:
    size = max(itemsize, 1)
    for length in shape:
        if type(length) is not int or not 0 <= length <= _MAX_ITEMSIZE:
            return False
        size *= max(length, 1)
    return size <= _MAX_ITEMSIZE


def _structured(description: dict[str, Any], depth: int) -> AnyDType:
    names, formats, offsets = description["names"], description["formats"], description["offsets"]
    titles, itemsize = description.get("titles", []), description["itemsize"]
    if not all(isinstance(part, list) for part in (names, formats, offsets, titles)):
        raise WireError("invalid structured dtype")
    if not len(names) == len(formats) == len(offsets) or (titles and len(titles) != len(names)):
        raise WireError("invalid structured dtype: fields of different number")
    if not all(isinstance(name, str) for name in names):
        raise WireError("invalid structured dtype: a name is no string")
    if not all(title is None or isinstance(title, str) for title in titles):
        raise WireError("invalid structured dtype: a title is no string")
    flags = [description.get("aligned", 0), description.get("record", 0)]
    if type(itemsize) is not int or not 0 <= itemsize <= _MAX_ITEMSIZE or not all(f in (0, 1) for f in flags):
        raise WireError("invalid structured dtype")
    fields = [build(field, depth + 1) for field in formats]
    for field, offset in zip(fields, offsets, strict=True):
        if type(offset) is not int or not 0 <= offset <= itemsize - field.itemsize:
            raise WireError(f"invalid structured dtype: field at {shown(offset, 20)} of {itemsize} bytes")
    parts: dict[str, Any] = {"names": names, "formats": fields, "offsets": offsets, "itemsize": itemsize}
    if titles:
        parts["titles"] = titles
    dtype = np.dtype(parts, align=bool(flags[0]))  # type: ignore[call-overload]
    if dtype.itemsize != itemsize:
        raise WireError(f"invalid structured dtype: {itemsize} bytes")
    result: AnyDType = np.dtype((np.record, dtype)) if flags[1] else dtype
    return result


def _ml_dtype(name: object) -> AnyDType:
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]{0,31}", name):
        raise WireError("invalid dtype of ml_dtypes")
    try:
        import ml_dtypes
    except ImportError:
        raise WireError(f"array of dtype {name}, but the package ml_dtypes is not installed") from None
    kind = getattr(ml_dtypes, name, None)
    if not (isinstance(kind, type) and issubclass(kind, np.generic)):
        raise WireError(f"array of dtype {name}, which this version of ml_dtypes lacks")
    return np.dtype(kind)


def address_of(array: Array) -> int:
    """Address of the first element."""
    try:
        # takes a quarter of the time of the other way
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError):  # read-only, empty, strided, or of a type without a buffer
        return int(array.__array_interface__["data"][0])


def array_at(address: int, nbytes: int) -> Array:
    """A `uint8` array over memory that it does not keep alive."""
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    return np.frombuffer(memory, np.uint8)


class _Memory:
    """What NumPy makes an array of: bytes at an address, and what keeps them alive."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, False)}
        self.owner = owner


def memory_of(address: int, nbytes: int, owner: object) -> Array:
    """A `uint8` array over memory that lives as long as `owner`, which it keeps alive. It is flagged writable."""
    return np.asarray(_Memory(address, nbytes, owner))


def array_leaf(array: Array) -> Leaf:
    """The leaf of an array of type `ndarray` or `memmap` itself. Raises `Refused` for dtypes that cannot be sent."""
    dtype = array.dtype
    row = ROW.get(dtype)
    description = None
    if row is None:
        description = describe(dtype)
        try:
            same = build(description) == dtype
        except WireError:
            same = False
        if not same:
            raise Refused(ArgumentTypeError, f"dtype {dtype} cannot be described: send array.view('u1')")
    strides = None if array.flags.c_contiguous else array.strides
    return Leaf(
        array, row, dtype.itemsize, array.shape, strides, address_of(array), _copy, torch=False, description=description
    )


def _copy(leaf: Leaf, payload: Array, offset: int) -> None:
    source: Array = leaf.source
    if source.dtype.names is not None:
        source = source.view(np.dtype((np.void, leaf.itemsize)))  # whole items: the padding is sent as well
    np.copyto(np.ndarray(leaf.shape, source.dtype, payload, offset, leaf.strides), source)
