"""The structure of a state as the pickle that `torch.load(weights_only=True)` reads. Needs neither torch nor pickle.

Protocol 2, and only opcodes and names that torch allows: containers, numbers, strings, and calls of
`torch._utils._rebuild_tensor_v2` (and `_v3` where torch has no storage type of the dtype) over storages that are named
by the number of their region.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Any, Final

from ..json_values import key_of
from ..plan import Entry, Plan
from ..structure import scalar_of

_MARK, _TUPLE, _EMPTY_TUPLE, _REDUCE, _PERSID, _APPENDS, _ITEMS = b"(", b"t", b")", b"R", b"Q", b"e", b"u"
_STORAGES: Final = {
    "bool": "BoolStorage", "int8": "CharStorage", "int16": "ShortStorage", "int32": "IntStorage",
    "int64": "LongStorage", "uint8": "ByteStorage", "float16": "HalfStorage", "float32": "FloatStorage",
    "float64": "DoubleStorage", "complex64": "ComplexFloatStorage", "complex128": "ComplexDoubleStorage",
    "bfloat16": "BFloat16Storage",
}  # fmt: skip
_MAX_INT_BYTES: Final = 255


class Pickler:
    """The pickle of a plan's state. NumPy arrays become tensors, of bytes where torch lacks their type."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._out: list[bytes] = []
        # a storage has one type for all its tensors
        self._types = [_storage_type({_torch_dtype(plan.tensors[n]) for n in members}) for members in plan.members]

    def dump(self) -> bytes:
        """The pickle."""
        self._out = [b"\x80\x02"]
        self._node(self._plan.tree)
        self._out.append(b".")
        return b"".join(self._out)

    def _node(self, node: Any) -> None:
        put = self._out.append
        if node is None or node is True or node is False:
            put(b"N" if node is None else b"\x88" if node else b"\x89")
        elif isinstance(node, int):
            self._int(node)
        elif isinstance(node, float):
            put(b"G" + struct.pack(">d", node))
        elif isinstance(node, str):
            self._text(node)
        elif isinstance(node, list):
            self._list(node)
        else:
            self._tagged(next(iter(node)), node)

    def _tagged(self, tag: str, node: dict[str, Any]) -> None:
        put, body = self._out.append, node[tag]
        if tag == "d":
            self._dict(list(body.items()))
        elif tag in ("k", "o", "c"):
            pairs = [(key_of(key), child) for key, child in body]
            if tag == "k":
                self._dict(pairs)
            else:
                self._subclass("OrderedDict" if tag == "o" else "Counter", pairs, node.get("m"))
        elif tag == "t":
            put(_MARK)
            for child in body:
                self._node(child)
            put(_TUPLE)
        elif tag in ("e", "E"):  # torch reads no frozenset
            self._call("__builtin__", "set", lambda: self._list(body))
        elif tag == "j":
            self._call("__builtin__", "complex", lambda: self._nodes(body))
        elif tag == "a":
            self._bytearray(body)
        elif tag == "meta":
            self._meta(*body)
        elif tag == "x" or tag == "B":
            self._tensor(body)
        elif tag == "z":
            kind, parameters, scalars, numbers = body
            self._node({"t": [kind, parameters, scalars, [{"x": number} for number in numbers]]})
        elif tag == "f":
            put(b"G" + struct.pack(">d", float(body)))
        elif tag == "i":
            self._int(int(body, 16))
        elif tag == "b":
            self._bytes(base64.b64decode(body))
        elif tag == "n":
            self._numpy(scalar_of(*body))
        elif tag == "s":
            self._text(body)
        elif tag == "size":
            self._call("torch", "Size", lambda: self._ints(body))
        elif tag == "dtype":
            self._global("torch", body)
        else:  # "device"
            self._call("torch", "device", lambda: self._text(body))

    def _numpy(self, value: Any) -> None:
        """A NumPy scalar, as a plain value or as text."""
        plain = value.item() if hasattr(value, "item") else value
        if isinstance(plain, bool):
            self._node(plain)
        elif isinstance(plain, int):
            self._int(plain)
        elif isinstance(plain, float):
            self._out.append(b"G" + struct.pack(">d", plain))
        elif isinstance(plain, bytes):
            self._bytes(plain)
        else:
            self._text(str(plain))

    def _int(self, value: int) -> None:
        if -(1 << 31) <= value < 1 << 31:
            self._out.append(b"J" + struct.pack("<i", value))
            return
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        if len(data) > _MAX_INT_BYTES:  # torch reads no longer ones
            self._text(hex(value))
        else:
            self._out.append(b"\x8a" + bytes((len(data),)) + data)

    def _text(self, text: str) -> None:
        data = text.encode("utf-8", "surrogatepass")
        self._out.append(b"X" + struct.pack("<I", len(data)) + data)

    def _bytes(self, data: bytes) -> None:
        def arguments() -> None:
            self._text(data.decode("latin1"))
            self._text("latin1")

        self._call("_codecs", "encode", arguments)

    def _bytearray(self, node: dict[str, Any]) -> None:
        if "B" in node:
            self._tensor(node["B"])
            return

        def arguments() -> None:
            self._text(base64.b64decode(node["b"]).decode("latin1"))
            self._text("latin-1")

        self._call("__builtin__", "bytearray", arguments)

    def _meta(self, dtype: str, shape: Sequence[int], strides: Sequence[int]) -> None:
        def arguments() -> None:
            self._global("torch", dtype)
            self._ints(shape)
            self._ints(strides)
            self._out.append(b"\x89")

        self._call("torch._utils", "_rebuild_meta_tensor_no_storage", arguments)

    def _list(self, nodes: Sequence[Any]) -> None:
        self._out.append(b"]" + _MARK)
        self._nodes(nodes)
        self._out.append(_APPENDS)

    def _nodes(self, nodes: Sequence[Any]) -> None:
        for node in nodes:
            self._node(node)

    def _dict(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        self._out.append(b"}")
        self._items(pairs)

    def _items(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        self._out.append(_MARK)
        for key, child in pairs:
            if isinstance(key, float):
                self._out.append(b"G" + struct.pack(">d", key))
            else:
                self._node(key)
            self._node(child)
        self._out.append(_ITEMS)

    def _subclass(self, name: str, pairs: Sequence[tuple[Any, Any]], metadata: Any) -> None:
        self._global("collections", name)
        self._out.append(_EMPTY_TUPLE + _REDUCE)
        self._items(pairs)
        if metadata is not None:
            self._dict([("_metadata", metadata)])
            self._out.append(b"b")

    def _global(self, module: str, name: str) -> None:
        self._out.append(f"c{module}\n{name}\n".encode())

    def _call(self, module: str, name: str, arguments: Any) -> None:
        self._global(module, name)
        self._out.append(_MARK)
        arguments()
        self._out.append(_TUPLE + _REDUCE)

    def _ints(self, values: Sequence[int]) -> None:
        self._out.append(_MARK)
        for value in values:
            self._int(value)
        self._out.append(_TUPLE)

    def _tensor(self, number: int) -> None:
        entry = self._plan.tensors[number]
        dtype = _torch_dtype(entry)
        shape, strides, itemsize = list(entry.shape), entry.strides, entry.itemsize
        if dtype is None:  # as bytes, one more dimension
            shape.append(itemsize)
            strides = None if strides is None else (*strides, 1)
            itemsize = 1
        steps = _element_strides(shape, strides, itemsize)
        kind = self._types[entry.region] if entry.region >= 0 else _STORAGES.get(dtype or "uint8")

        def arguments() -> None:
            self._storage(entry.region, number, kind, itemsize)
            self._int(entry.offset // itemsize)
            self._ints(shape)
            self._ints(steps)
            self._out.append(b"\x89")
            self._call("collections", "OrderedDict", lambda: None)
            if kind is None:
                self._global("torch", dtype or "uint8")

        self._call("torch._utils", "_rebuild_tensor_v2" if kind else "_rebuild_tensor_v3", arguments)

    def _storage(self, region: int, number: int, kind: str | None, itemsize: int) -> None:
        """Write a storage, named by its region, or by its tensor if it has no bytes."""
        nbytes = self._plan.regions[region].nbytes if region >= 0 else 0
        self._out.append(_MARK)
        self._text("storage")
        if kind is None:
            self._global("torch.storage", "UntypedStorage")
        else:
            self._global("torch", kind)
        self._text(str(region) if region >= 0 else f"empty{number}")
        self._text("cpu")
        self._int(nbytes if kind is None else nbytes // itemsize)
        self._out.append(_TUPLE + _PERSID)


def _storage_type(dtypes: set[str | None]) -> str | None:
    only = dtypes.pop()
    return None if dtypes or only is None else _STORAGES.get(only)


def _torch_dtype(entry: Entry) -> str | None:
    row = entry.row
    if row is None or not row.torch or row.quantized:
        return None
    return row.name


def _element_strides(shape: Sequence[int], strides: Sequence[int] | None, itemsize: int) -> list[int]:
    if strides is not None:
        return [stride // itemsize for stride in strides]
    steps = []
    step = 1
    for length in reversed(shape):
        steps.append(step)
        step *= max(length, 1)
    return steps[::-1]
