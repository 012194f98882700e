"""The pickle of torch's archives: written without torch, and checked before torch loads one of another program.

`Pickler` writes the structure of a state as `torch.load(weights_only=True)` reads it. Protocol 2, and only opcodes and
names that torch allows: containers, numbers, strings, and calls of `torch._utils._rebuild_tensor_v2` (and `_v3` where
torch has no storage type of the dtype) over storages that are named by the number of their region.

`PickleCheck` finds out what a pickle would cost in `torch.load(weights_only=True)`, before it is loaded. torch limits
which functions a pickle calls, but not what they cost: `bytearray(1 << 40)`, a storage or a shape beyond the file, a
set made of one list a thousand times, a tuple of tuples whose hash takes 2**64 steps. So the opcodes that torch knows
are first run here, with sizes in place of values:

    numbers, short strings    themselves
    tuples                    their items, how many they have when each shared one counts every time, how deep they are
    lists, dicts, sets        how many items were put into them, and how much their hashes take together
    storages                  bytes, from the name that the pickle has for them
    tensors                   elements, and whether they repeat bytes of their storage

Anything else is an `_Other`; torch decides whether it is allowed. Functions are called by their names, with tuples of
arguments in which no list is shared. Costs linear in the size of the file are allowed, and no others.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, Final

from ...errors import CheckpointError
from ...wire.dtypes import BY_NAME
from ...wire.spec import MAX_BYTES, BigKeys
from ..plan import Entry, Plan
from ..structure import key_of, scalar_of

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


_ITEMSIZES: Final = {
    "BoolStorage": 1, "CharStorage": 1, "ByteStorage": 1, "ShortStorage": 2, "IntStorage": 4, "LongStorage": 8,
    "HalfStorage": 2, "BFloat16Storage": 2, "FloatStorage": 4, "DoubleStorage": 8, "ComplexFloatStorage": 8,
    "ComplexDoubleStorage": 16, "QInt8Storage": 1, "QUInt8Storage": 1, "QInt32Storage": 4, "QUInt4x2Storage": 1,
    "QUInt2x4Storage": 1, "UntypedStorage": 1,
}  # fmt: skip
_CLASSES: Final = re.compile(r"torch(\.\w+)*\.\w*(Tensor|Storage)\Z")  # which make memory of their arguments
_RENAMED: Final = {
    "__builtin__": "builtins", "UserDict": "collections", "UserList": "collections", "UserString": "collections",
}  # fmt: skip
"""Modules of Python 2 whose names torch takes for these."""
_OF_TORCH: Final = ("torch.", "builtins.", "collections.", "_codecs.")  # functions that torch calls unasked
_FREELY_CALLED: Final = re.compile(r"torch\.(nested|distributed)\.|torch\._tensor\._rebuild_from_type_v2\Z")
_COPIED: Final = ("sparse_tensor", "nested_tensor", "qtensor", "device_tensor_from_cpu_tensor")
"""Those of torch's functions that walk over the elements of tensors, or copy them."""
_MOST_COPIED: Final = 16  # times the bytes of all storages
_PLAIN_ENCODINGS: Final = ("latin1", "latin-1", "iso-8859-1", "iso8859-1", "utf-8", "utf8", "ascii")
_MAX_DEPTH: Final = 64  # of a tuple that is a key
_MAX_STACK: Final = 1 << 19  # values on the stack: picklers use them after each thousand, but for tuples
_FREE: Final = 1 << 20  # steps, and bytes, that any pickle may take
_SHORT: Final = 256  # characters of a string that is kept
_MANY: Final = 1 << 62

_REBUILD: Final = "torch._utils._rebuild_"


class _Other:
    """A value whose size does not matter."""


class _Text:
    """A string or bytes too long to keep."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class _Bytes(_Text):
    pass


class _Global:
    def __init__(self, name: str) -> None:
        self.name = name


class _Tuple:
    __slots__ = ("_hash", "depth", "items", "weight")

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items
        inner = [item for item in items if type(item) is _Tuple]
        self.weight: int = min(_MANY, 1 + len(items) - len(inner) + sum(item.weight for item in inner))
        self.depth: int = 1 + max([item.depth for item in inner], default=0)
        self._hash: int | None = None

    def __hash__(self) -> int:
        """Equal for two tuples if it is for the real ones. Only for those that are not too deep."""
        if self._hash is None:
            self._hash = hash(tuple(self.items))
        return self._hash


class _Items:
    """A list, dict or set.

    start:   its first item, if there is one
    nested:  whether lists, dicts, sets or tuples are in it
    values:  those in a list or set that matter if they become the keys of a dict or set: no short numbers and strings
    hashes:  of the keys of a dict
    """

    __slots__ = ("count", "depth", "hashes", "is_dict", "nested", "start", "values", "weight")

    def __init__(self, *, is_dict: bool = False) -> None:
        self.count = self.weight = self.depth = 0
        self.is_dict, self.nested = is_dict, False
        self.start: Sequence[Any] = ()
        self.values: list[Any] | None = None  # as a pickle of two bytes makes one of these
        self.hashes: BigKeys | None = None

    def put(self, value: Any) -> None:
        """Add the weight of an item or key."""
        if type(value) is _Tuple:
            self.weight = min(_MANY, self.weight + value.weight)
            self.depth = max(self.depth, value.depth)


def _matters(value: Any) -> bool:
    """Whether a value's hash may be that of many others."""
    return type(value) in (_Tuple, complex) or (type(value) is int and value.bit_length() >= 64)


class _Storage:
    def __init__(self, nbytes: int, itemsize: int, label: str) -> None:
        self.nbytes, self.itemsize, self.label = nbytes, itemsize, label


class _Tensor:
    def __init__(self, elements: int, nbytes: int, *, repeats: bool) -> None:
        self.elements, self.nbytes, self.repeats = elements, nbytes, repeats


_NO_TENSOR: Final = _Tensor(0, 0, repeats=False)

# (name of a storage, bytes) -> None; raises if the file does not have them
CheckStorage = Callable[[str, int], None]


class PickleCheck:
    """Runs the pickles of one file.

    nbytes: most bytes of the pickle; check_storage: called for every storage that it names; old: the bytes of storages
    follow the pickles. Raises `CheckpointError`.
    """

    def __init__(
        self, file: BinaryIO, nbytes: int, check_storage: CheckStorage, label: str, *, old: bool = False
    ) -> None:
        self._file, self._label, self._old = file, label, old
        self._room = 64 * nbytes + _FREE
        self._nbytes = nbytes
        self._made = self._copied = self._held = 0
        self._check_storage = check_storage
        self._storages: dict[str, _Storage] = {}
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._waiting = 0
        self._memo: dict[int, Any] = {}
        self._actions = _actions(self)

    def run(self) -> None:
        """Run one pickle, from the file's position to the end of the pickle."""
        self._stack, self._marks, self._memo = [], [], {}
        read, actions = self._file.read, self._actions
        try:
            while True:
                action = actions.get(read(1))
                if action is None:
                    raise self._bad("an opcode that is not known there")
                if action():
                    return
                if len(self._stack) > _MAX_STACK or len(self._marks) > _MAX_STACK:
                    raise self._bad(f"more than {_MAX_STACK} values that belong to nothing")
        except CheckpointError:
            raise
        except (
            IndexError,
            KeyError,
            struct.error,
            UnicodeDecodeError,
            AttributeError,
            TypeError,
            ValueError,
            OverflowError,
            RecursionError,
        ) as error:
            raise self._bad(f"{type(error).__name__}: {error}") from None

    def _bad(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self._label}: torch.load(weights_only=True) does not open it, or not safely: {why} (before offset "
            f"{self._file.tell()} of the pickle)"
        )

    # --- costs

    def _spend(self, steps: int) -> None:
        self._room -= steps
        if self._room < 0:
            raise self._bad("it takes much more steps than it has bytes")

    def _make(self, nbytes: int) -> None:
        """Bytes that are copied."""
        self._made += nbytes
        if self._made > 2 * self._nbytes + _FREE:
            raise self._bad(f"it makes {self._made} bytes, and has {self._nbytes}")

    def _copy(self, tensors: Sequence[Any]) -> None:
        """Tensors whose elements are walked over or copied."""
        for tensor in tensors:
            if type(tensor) is _Tuple:
                self._copy(tensor.items)
            elif type(tensor) is _Tensor:
                self._copied += tensor.nbytes
        if self._copied > _MOST_COPIED * self._held + _FREE:
            raise self._bad(f"tensors larger than their storages, to be copied: {self._copied} bytes of {self._held}")

    def _note(self, key: Any, container: _Items) -> None:
        """A key of a dict, or item of a set."""
        if type(key) is not _Tuple:
            self._spend(1)
        elif key.depth > _MAX_DEPTH:
            raise self._bad(f"a key that is a tuple nested more than {_MAX_DEPTH} deep")
        else:
            self._spend(key.weight)
        container.put(key)
        if _matters(key):
            container.hashes = container.hashes or BigKeys()
            if not container.hashes.add(key):
                raise self._bad("keys of one dict or set that share a hash")

    def _put(self, container: Any, values: Sequence[Any], keys: Sequence[Any] = ()) -> None:
        if type(container) is not _Items:
            return  # an object of some class that the user allowed, or an error of torch's
        container.count += len(values)
        container.start = container.start or tuple(values[:1])
        for value in values:
            container.put(value)
            container.nested = container.nested or type(value) in (_Tuple, _Items)
            if not container.is_dict and (_matters(value) or type(value) is _Items):
                container.values = container.values or []
                container.values.append(value)
        for key in keys:
            self._note(key, container)

    def _check_arguments(self, items: Sequence[Any]) -> None:
        """Spend what torch takes to copy arguments, or to write them into the text of an error. Deeper lists may be
        shared so often that this never ends."""
        for item in items:
            if type(item) is _Tuple:
                self._spend(item.weight)
                self._check_arguments(item.items)
            elif type(item) is _Items:
                if item.nested:
                    raise self._bad("an argument of a function with lists inside a list")
                self._spend(item.count)

    # --- opcodes

    def take(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) != count:
            raise self._bad("it ends early")
        return data

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def text(self, nbytes: int, *, raw: bool) -> None:
        if nbytes <= _SHORT:
            data = self.take(nbytes)
            self.push(data.decode("utf-8", "replace" if raw else "surrogatepass"))
            return
        if nbytes > self._nbytes:
            raise self._bad(f"a string of {nbytes} bytes")
        left = nbytes
        while left:
            left -= len(self.take(min(left, 1 << 20)))
        self.push(_Bytes(nbytes) if raw else _Text(nbytes))

    def real(self) -> None:
        self.push(struct.unpack(">d", self.take(8))[0])

    def protocol(self) -> None:
        self.take(1)

    def number(self) -> None:
        data = self.take(self.take(1)[0])
        self.push(int.from_bytes(data, "little", signed=True))

    def line(self) -> str:
        data = self._file.readline(_SHORT)
        if not data.endswith(b"\n"):
            raise self._bad("a name without an end")
        return data[:-1].decode("utf-8")

    def find(self) -> None:
        module, name = self.line(), self.line()
        self.push(_Global(f"{_RENAMED.get(module, module)}.{name}"))

    def mark(self) -> None:
        self._marks.append(self._stack)
        self._waiting += len(self._stack)
        if self._waiting > _MAX_STACK:
            raise self._bad(f"more than {_MAX_STACK} values that belong to nothing")
        self._stack = []

    def to_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        self._waiting -= len(self._stack)
        return items

    def tuple_of(self, count: int) -> None:
        items = self._stack[-count:]
        if len(items) != count:
            raise self._bad("a tuple of values that are not there")
        del self._stack[-count:]
        self.push(_Tuple(items))

    def append(self) -> None:
        value = self._stack.pop()
        self._put(self._stack[-1], (value,))

    def extend(self) -> None:
        values = self.to_mark()
        self._put(self._stack[-1], values)

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._put(self._stack[-1], (value,), (key,))

    def set_items(self) -> None:
        values = self.to_mark()
        self._put(self._stack[-1], values[1::2], values[::2])

    def put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def get(self, index: int) -> None:
        self.push(self._memo[index])

    def call(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        self.push(self._call(function, arguments))

    def build(self) -> None:
        state = self._stack.pop()
        value = self._stack[-1]
        first = state.items[0] if type(state) is _Tuple and state.items else None
        if type(value) is _Items:
            if type(state) is not _Items or not state.is_dict:
                raise self._bad("attributes that are no dict")
            self._spend(state.count)
        elif type(first) is _Storage and len(state.items) >= 4:
            self._stack[-1] = self._tensor(*state.items[:4])
        elif type(value) is _Tensor:
            if (
                type(state) is not _Tuple
                or type(first) is _Storage
                or (type(first) is _Tensor and len(state.items) != 5)
            ):
                raise self._bad("the state of a tensor that torch has never written")
            self._stack[-1] = first if type(first) is _Tensor else value

    def load_storage(self) -> None:
        name = self._stack.pop()
        items = name.items if type(name) is _Tuple else ()
        if len(items) not in (5, 6) or items[0] != "storage" or type(items[1]) is not _Global:
            raise self._bad("a storage without a name")
        kind, key, count = items[1].name.rpartition(".")[2], items[2], items[4]
        itemsize = _ITEMSIZES.get(kind)
        if itemsize is None or type(key) is not str or type(count) is not int or not 0 <= count <= MAX_BYTES:
            raise self._bad(f"a storage {key!r:.40} of kind {kind:.40} with {count!r:.40} elements")
        found = self._storages.get(key)
        if found is None:
            found = _Storage(count * itemsize, itemsize, key)
            self._check_storage(key, found.nbytes)
            if found.nbytes:
                self._storages[key] = found
                self._held += found.nbytes
        view = items[5] if len(items) == 6 else None
        if type(view) is _Tuple:
            _, first, length = view.items
            if not (type(first) is int and type(length) is int and min(first, length) >= 0 and first + length <= count):
                raise self._bad(f"a part of storage {key!r:.40} that it does not have")
            found = _Storage(length * itemsize, itemsize, key)
        self.push(found)

    # --- functions

    def _call(self, function: Any, arguments: Any) -> Any:
        if type(function) is not _Global or type(arguments) is not _Tuple:
            raise self._bad("a call without the name of a function, or a tuple of arguments")
        name, items = function.name, arguments.items
        first = items[0] if items else None
        is_sequence = name in ("builtins.set", "builtins.frozenset", "collections.Counter", "collections.OrderedDict")
        if name == f"{_REBUILD}parameter_with_state":
            self._check_arguments(items[:3])
        elif name.startswith(_OF_TORCH) and not is_sequence and not _FREELY_CALLED.match(name):
            self._check_arguments(items)
        if name == "torch._tensor._rebuild_from_type_v2" and len(items) == 4:
            return self._call(first, items[2])
        if name.startswith(_REBUILD):
            return self._rebuild(name.removeprefix(_REBUILD), items)
        if name == "torch.nn.parameter.Parameter":
            return first if type(first) is _Tensor else _NO_TENSOR
        if _CLASSES.match(name):
            if items:
                raise self._bad(f"a call of {name} with arguments")
            return _NO_TENSOR
        if is_sequence:
            if len(items) > 1:
                raise self._bad(f"a call of {name} with {len(items)} arguments")
            return self._container(name, first)
        if name == "torch.Size":
            return first if type(first) is _Tuple else _Other()
        if name == "builtins.complex" and items and all(type(item) in (int, float) for item in items):
            return complex(*items)
        if name in ("builtins.bytearray", "_codecs.encode"):
            return self._bytes(name, items)
        return _Other()

    def _count(self, value: Any) -> int:
        return value.count if type(value) is _Items else len(value.items) if type(value) is _Tuple else 0

    def _container(self, name: str, source: Any) -> _Items:
        made = _Items(is_dict=name.startswith("collections."))
        made.count = self._count(source)
        if type(source) not in (_Items, _Tuple):
            return made
        if source.depth > _MAX_DEPTH:
            raise self._bad(f"a set of tuples that are nested more than {_MAX_DEPTH} deep")
        self._spend(made.count + source.weight)
        if type(source) is _Items and source.is_dict:
            made.weight, made.depth, made.hashes = source.weight, source.depth, source.hashes
            return made
        values = source.items if type(source) is _Tuple else source.values or ()
        if name.endswith("OrderedDict"):  # of pairs, as Python 2 wrote it
            pairs = [value.items if type(value) is _Tuple else value.start for value in values]
            values = [pair[0] for pair in pairs if pair]
        for value in values:
            self._note(value, made)
        if not made.is_dict:
            made.values, made.nested = list(values), any(type(value) is _Tuple for value in values)
        return made

    def _bytes(self, name: str, items: Sequence[Any]) -> _Bytes:
        source = items[0] if items else ""
        encoding = items[1] if len(items) > 1 else "latin1"
        if type(source) is str:
            nbytes = 4 * len(source)
        elif isinstance(source, _Text):
            nbytes = source.nbytes
        elif type(source) is _Items:
            nbytes = source.count
        else:
            raise self._bad(f"a call of {name} with another argument than text")
        if encoding not in _PLAIN_ENCODINGS:
            raise self._bad(f"a call of {name} with the encoding {encoding!r:.40}")
        self._make(nbytes)
        return _Bytes(nbytes)

    def _rebuild(self, name: str, items: Sequence[Any]) -> Any:
        if name in _COPIED:
            self._copy(items)
        if name in ("parameter", "parameter_with_state"):
            return items[0] if type(items[0]) is _Tensor else _NO_TENSOR
        if name in ("tensor", "tensor_v2"):
            return self._tensor(*items[:4])
        if name == "tensor_v3":
            dtype = items[6].name.removeprefix("torch.") if type(items[6]) is _Global else ""
            row = BY_NAME.get(dtype)
            storage, offset, size, stride = items[:4]
            return self._tensor(storage, offset, size, stride, 16 if row is None else row.itemsize)
        if name == "qtensor":
            made = self._tensor(*items[:4])
            if made.repeats:
                raise self._bad("a quantized tensor that is larger than its storage")
            return made
        if name.startswith("device_tensor"):
            return items[0] if type(items[0]) is _Tensor else _NO_TENSOR
        if name == "nested_tensor" and self._old:
            raise self._bad("a nested tensor of the old format, whose sizes torch uses before it has read them")
        if name == "wrapper_subclass" and type(items[0]) is _Global and _CLASSES.match(items[0].name):
            raise self._bad(f"a wrapper of class {items[0].name}")
        return _NO_TENSOR  # sparse, nested, meta: of tensors that were made before, or without memory

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any, itemsize: int | None = None) -> _Tensor:
        shape, steps = (part.items if type(part) is _Tuple else () for part in (size, stride))
        if type(storage) is not _Storage or type(size) is not _Tuple or type(stride) is not _Tuple:
            raise self._bad("a tensor without a storage, a shape or strides")
        numbers = [offset, *shape, *steps]
        if len(shape) != len(steps) or not all(type(n) is int and 0 <= n <= MAX_BYTES for n in numbers):
            raise self._bad(f"a tensor of shape {shape!r:.80} and strides {steps!r:.80}")
        itemsize = storage.itemsize if itemsize is None else itemsize
        elements = 1
        last = offset
        for length, step in zip(shape, steps, strict=True):
            elements = min(_MANY, elements * length)
            last += (length - 1) * step
        if elements and (last + 1) * itemsize > storage.nbytes:
            raise self._bad(
                f"a tensor of shape {tuple(shape)!r:.80} that ends at byte {(last + 1) * itemsize} of storage "
                f"{storage.label!r:.40}, which has {storage.nbytes}"
            )
        nbytes = elements * itemsize
        return _Tensor(elements, nbytes, repeats=nbytes > storage.nbytes)


def _actions(check: PickleCheck) -> dict[bytes, Callable[[], Any]]:
    """What each opcode that torch knows does; the result is true at the end."""
    take, push = check.take, check.push

    def integer(form: str) -> Callable[[], None]:
        parser = struct.Struct(form)
        return lambda: push(parser.unpack(take(parser.size))[0])

    def index(nbytes: int) -> int:
        return int.from_bytes(take(nbytes), "little")

    items = lambda: push(_Items())  # noqa: E731
    return {
        b"c": check.find, b"\x81": check.call, b"R": check.call, b"b": check.build, b"Q": check.load_storage,
        b"a": check.append, b"e": check.extend, b"s": check.set_item, b"u": check.set_items,
        b"(": check.mark, b"t": lambda: push(_Tuple(check.to_mark())),
        b"\x85": lambda: check.tuple_of(1), b"\x86": lambda: check.tuple_of(2), b"\x87": lambda: check.tuple_of(3),
        b")": lambda: push(_Tuple(())), b"]": items, b"\x8f": items, b"}": lambda: push(_Items(is_dict=True)),
        b"N": lambda: push(None), b"\x88": lambda: push(True), b"\x89": lambda: push(False), b"G": check.real,
        b"J": integer("<i"), b"K": integer("<B"), b"M": integer("<H"), b"\x8a": check.number,
        b"X": lambda: check.text(index(4), raw=False), b"U": lambda: check.text(index(1), raw=True),
        b"q": lambda: check.put(index(1)), b"r": lambda: check.put(index(4)),
        b"h": lambda: check.get(index(1)), b"j": lambda: check.get(index(4)),
        b"\x80": check.protocol, b".": lambda: True,
    }  # fmt: skip
