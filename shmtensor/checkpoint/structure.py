"""The structure of a state as JSON, and back.

| JSON | value |
|---|---|
| null, true, false, string, number | itself |
| array | list |
| `{"d": {key: node}}` | dict whose keys are all strings |
| `{"k": [[key, node], ...]}` | dict with other keys, written as below |
| `{"o": [[key, node], ...]}` | OrderedDict |
| `{"o": [...], "m": node}` | OrderedDict with the `_metadata` that torch gives a state dict |
| `{"c": [[key, node], ...]}` | Counter |
| `{"t": [node, ...]}` | tuple |
| `{"x": n}` | tensor or array number n |
| `{"z": [kind, parameters, [scalar, ...], [n, ...]]}` | sparse, quantized or nested tensor of these tensors |
| `{"f": "nan"}` (`"inf"`, `"-inf"`) | a float that JSON lacks |
| `{"i": hex}` | int of more than 1024 bits |
| `{"j": [node, node]}` | complex number |
| `{"b": base64}` | bytes |
| `{"B": n}` | bytes stored as array number n |
| `{"a": node}` | bytearray of these bytes |
| `{"e": [node, ...]}`, `{"E": [node, ...]}` | set, frozenset |
| `{"n": [dtype, base64]}` | NumPy scalar, its dtype as in `Entry.dtype` |
| `{"s": string}` | `numpy.str_` |
| `{"size": [int, ...]}` | `torch.Size` |
| `{"dtype": name}`, `{"device": name}` | `torch.dtype`, `torch.device` |
| `{"meta": [dtype, shape, strides]}` | tensor without data, from a file of another program; strides in elements |

An object always has one of these tags, so that no string or key can be mistaken for one.

A key of a dict is a string, or `["i", hex]`, `["f", hex]`, `["b", 0 or 1]`, `["n"]` for int, float, bool and None. The
`meta` that a user gives a checkpoint is JSON as well, and checked here.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
import math
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np

from ..codec.leaf import Leaf, Refused, is_tensor
from ..codec.libraries import import_torch, torch_views
from ..codec.numpy import CARRIER, ROW, AnyDType, Array, array_leaf, build, describe
from ..errors import ArgumentError, ArgumentTypeError, CheckpointError, WireError
from ..options import shown
from ..wire.dtypes import BY_NAME
from ..wire.spec import COMPOSITES, BigKeys, Keys

MAX_TENSORS: Final = 1_000_000
"""The most tensors of a checkpoint: readers refuse more, and so does the planner. The limits of the text are in
`plan.py`."""
MAX_DEPTH: Final = 64
_INLINE = 4096  # longer bytes are stored as arrays
_MAX_PLAIN_BITS = 1024
_MAX_KEY: Final = 3500  # hex digits: Python writes no longer ints in decimal, as the names of tensors have them
_HEX = re.compile(r"-?0x[0-9a-f]+\Z")
_DEVICE = re.compile(r"[a-z]{1,20}(:\d{1,4})?\Z")
_ALLOWED = (
    "allowed are torch tensors, NumPy arrays and scalars, nn.Module, dict, list, tuple, set, str, bytes, bytearray, "
    "int, float, complex, bool, None, torch.Size, torch.dtype and torch.device"
)


def dtype_name(dtype: AnyDType) -> Any:
    """The name of a NumPy dtype in the table, else its description (JSON)."""
    row = ROW.get(dtype)
    return describe(dtype) if row is None else row.name


def numpy_dtype(name: Any) -> AnyDType:
    """The NumPy dtype of a name or description; the carrier where NumPy lacks the type. `WireError` if invalid."""
    row = BY_NAME.get(name) if isinstance(name, str) else None
    return build(name) if row is None else CARRIER[row.code]


class Encoder:
    """One walk over a state.

    leaves: (dotted name, leaf) of each tensor and array, in the order of their numbers
    """

    def __init__(self) -> None:
        self.leaves: list[tuple[str, Leaf]] = []

    def encode(self, state: object) -> Any:
        """The state's structure. Raises `ArgumentTypeError` or `ArgumentError`, with the path."""
        try:
            return self._node(state, "", 0)
        except Refused as refused:
            path = "".join(reversed(refused.path)).removeprefix(".")
            raise refused.error(f"{path or 'state'}: {refused.reason}") from None

    def _leaf(self, name: str, leaf: Any) -> int:
        if len(self.leaves) >= MAX_TENSORS:
            raise Refused(ArgumentError, f"state has more than {MAX_TENSORS} tensors: stack some")
        self.leaves.append((name or "tensor", leaf))
        return len(self.leaves) - 1

    def _node(self, value: Any, name: str, depth: int) -> Any:
        kind = type(value)
        if kind is str or kind is bool or value is None:
            return value
        if kind is int:
            return _int(value)
        if kind is float:
            return _float(value)
        if is_tensor(value):
            return self._tensor(value, name)
        if isinstance(value, np.ndarray):
            if kind is not np.ndarray and kind is not np.memmap:
                raise _refuse(value, "save numpy.asarray(array)")
            return {"x": self._array(value, name)}
        if isinstance(value, dict):
            return self._dict(value, name, depth)
        if isinstance(value, (list, tuple)):
            return self._sequence(value, name, depth)
        if isinstance(value, np.generic):
            return _numpy_scalar(value)
        if isinstance(value, bytes):
            if len(value) > _INLINE:
                return {"B": self._array(np.frombuffer(value, np.uint8), name)}
            return {"b": base64.b64encode(value).decode("ascii")}
        if isinstance(value, (str, int, float)):  # enums, versions: come back as what they are to JSON
            plain: Any = str.__str__(value) if isinstance(value, str) else None
            return plain if isinstance(value, str) else _int(int(value)) if isinstance(value, int) else _float(value)
        return self._of_torch(value, name, depth)

    def _dict(self, value: dict[Any, Any], name: str, depth: int) -> Any:
        _check_depth(depth)
        plain = not isinstance(value, (OrderedDict, Counter))
        nodes = self._children(value.items(), name, depth)
        if plain and all(type(key) is str for key in value):
            return {"d": dict(zip(value, nodes, strict=True))}
        pairs, keys = [], Keys()
        for key, child in zip(value, nodes, strict=True):
            try:
                pairs.append([key_token(key), child])
                keys.add(key)
            except (ArgumentTypeError, ArgumentError) as error:
                raise Refused(type(error), str(error)) from None
        node: dict[str, Any] = {"k" if plain else "c" if isinstance(value, Counter) else "o": pairs}
        metadata = getattr(value, "_metadata", None) if isinstance(value, OrderedDict) else None
        if metadata is not None:
            node["m"] = self._children([("_metadata", metadata)], name, depth)[0]
        return node

    def _children(self, pairs: Iterable[tuple[Any, Any]], name: str, depth: int) -> list[Any]:
        """The nodes of values by their keys."""
        start = f"{name}." if name else ""
        nodes = []
        key: Any = None
        try:
            for key, child in pairs:
                nodes.append(self._node(child, f"{start}{key}", depth + 1))
        except Refused as refused:
            refused.path.append(f".{key}" if isinstance(key, str) else f"[{key!r}]")
            raise
        return nodes

    def _sequence(self, value: Sequence[Any], name: str, depth: int) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Size):
            return {"size": [int(n) for n in value]}
        _check_depth(depth)
        nodes = self._children(enumerate(value), name, depth)
        return nodes if isinstance(value, list) else {"t": nodes}

    def _array(self, array: Array, name: str) -> int:
        return self._leaf(name, array_leaf(array))

    def _tensor(self, tensor: Any, name: str) -> Any:
        views, take_apart, known = _tensor_tools()
        try:
            plain = _plain_leaf(tensor, views) if type(tensor) in known else None
            if plain is not None:
                return {"x": self._leaf(name, plain)}
            if type(tensor) not in known and not views.is_jagged(tensor):
                raise _refuse(tensor, "save tensor.as_subclass(torch.Tensor); of a DTensor its to_local()")
            apart = self._apart(take_apart, tensor)
            if apart is None:
                return {"x": self._leaf(name, views.tensor_leaf(tensor))}
            token, scalars, parts = apart
            numbers = [
                self._leaf(f"{name}#{index}", part if isinstance(part, Leaf) else views.tensor_leaf(part))
                for index, part in enumerate(parts)
            ]
        except (RuntimeError, NotImplementedError) as error:
            raise Refused(ArgumentTypeError, f"tensor cannot be read: {error}") from error
        return {"z": [token[0], list(token[1:]), [self._node(scalar, "", 0) for scalar in scalars], numbers]}

    def _apart(self, take_apart: Callable[[Any], Any], tensor: Any) -> Any:
        return take_apart(tensor)

    def _of_torch(self, value: Any, name: str, depth: int) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None:
            if isinstance(value, torch.nn.Module):
                return self._node(value.state_dict(), name, depth)
            if isinstance(value, torch.dtype):
                return {"dtype": str(value).removeprefix("torch.")}
            if isinstance(value, torch.device):
                return {"device": str(value)}
        return self._rare(value, name, depth)

    def _rare(self, value: Any, name: str, depth: int) -> Any:
        if isinstance(value, complex):
            return {"j": [_float(value.real), _float(value.imag)]}
        if isinstance(value, bytearray):
            return {"a": self._node(bytes(value), name, depth)}
        if isinstance(value, (set, frozenset)):
            _check_depth(depth)
            nodes = self._children(enumerate(value), name, depth)
            return {"e" if isinstance(value, set) else "E": nodes}
        raise _refuse(value, _ALLOWED)


class ForeignEncoder(Encoder):
    """As `Encoder`, for a state that another library has loaded, in which objects may be shared: it writes out at most
    `most` values."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._left = self._most = most
        self._known: dict[int, tuple[Any, Any]] = {}

    def _node(self, value: Any, name: str, depth: int) -> Any:
        self._left -= 1
        if self._left < 0:
            raise Refused(
                ArgumentError,
                f"its objects share others so often that they are more than {self._most} when written out: "
                "load_checkpoint gives it as it is",
            )
        return super()._node(value, name, depth)

    def _tensor(self, tensor: Any, name: str) -> Any:
        if tensor.is_meta and not tensor.is_nested and tensor.layout == sys.modules["torch"].strided:
            dtype = str(tensor.dtype).removeprefix("torch.")
            return {"meta": [dtype, list(tensor.shape), list(tensor.stride())]}
        return super()._tensor(tensor, name)

    def _apart(self, take_apart: Callable[[Any], Any], tensor: Any) -> Any:
        """Once for each tensor: all of its elements are looked at."""
        if id(tensor) not in self._known:
            self._known[id(tensor)] = tensor, take_apart(tensor)
        return self._known[id(tensor)][1]


@functools.cache
def _tensor_tools() -> tuple[Any, Any, frozenset[type]]:
    """What `Encoder._tensor` needs, once torch is imported."""
    views = torch_views()
    from ..codec.composites import take_apart

    return views, take_apart, views.tensor_types()


def _plain_leaf(tensor: Any, views: Any) -> Leaf | None:
    """The leaf of a contiguous tensor in host memory, three times faster than `tensor_leaf`; None for other tensors."""
    negative = views.PLAIN.get(tensor.dtype)
    if (
        negative is None
        or not tensor.is_cpu
        or tensor.is_nested
        or tensor.layout != views.torch.strided
        or not tensor.is_contiguous()
        or (negative and tensor.is_neg())
    ):
        return None
    address = tensor.data_ptr()
    if not address or not views.has_memory(tensor):
        return None
    row = views.ROW[tensor.dtype]
    return Leaf(tensor, row, row.itemsize, tuple(tensor.shape), None, address, views.copy_strided, torch=True)


def _refuse(value: object, remedy: str) -> Refused:
    kind = type(value)
    return Refused(ArgumentTypeError, f"object of type {kind.__module__}.{kind.__qualname__} is not saved: {remedy}")


def _check_depth(depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise Refused(ArgumentError, f"containers are nested more than {MAX_DEPTH} deep, or one contains itself")


def _int(value: int) -> Any:
    return value if value.bit_length() <= _MAX_PLAIN_BITS else {"i": hex(value)}


def _float(value: float) -> Any:
    return float(value) if math.isfinite(value) else {"f": repr(float(value))}


def _numpy_scalar(value: Any) -> Any:
    if isinstance(value, np.str_):
        return {"s": str.__str__(value)}
    if isinstance(value, np.bytes_):
        return {"n": ["bytes", base64.b64encode(bytes(value)).decode("ascii")]}
    array = np.array(value)
    return {"n": [dtype_name(array.dtype), base64.b64encode(array.tobytes()).decode("ascii")]}


# (number of the tensor, whether its bytes are copied) -> tensor or array, and
# (kind, parameters, scalars, numbers) -> composite
MakeLeaf = Callable[[int, bool], Any]
MakeComposite = Callable[[str, tuple[int, ...], list[Any], list[int]], Any]


class Decoder:
    """Structures back to states. With `torch`, the three torch types come back as such, else as tuple and strings.

    Each tensor of a plan is in its structure once: what is shared are bytes."""

    def __init__(self, leaf: MakeLeaf, composite: MakeComposite, *, torch: bool = True) -> None:
        self._make_leaf = leaf
        self._composite = composite
        self._torch = torch
        self._used: set[int] = set()

    def decode(self, node: Any, depth: int = 0) -> Any:
        """The value of a node. Raises `CheckpointError` if it is invalid."""
        if depth > MAX_DEPTH + 2:
            raise CheckpointError(f"structure is nested more than {MAX_DEPTH} deep")
        if node is None or isinstance(node, (str, bool, int, float)):
            return node
        if isinstance(node, list):
            return [self.decode(child, depth + 1) for child in node]
        if isinstance(node, dict) and node:
            tag = next(iter(node))
            body = node[tag]
            if len(node) == 1 or (tag == "o" and set(node) == {"o", "m"}):
                try:
                    return self._tagged(tag, body, node, depth)
                except (WireError, binascii.Error) as error:
                    if isinstance(error, CheckpointError):
                        raise
                    raise CheckpointError(f"invalid structure: {error}") from None
        raise CheckpointError(f"invalid structure: {shown(node)}")

    def _use(self, number: int) -> int:
        """The number of a tensor. `CheckpointError` if it was used before: that would cost again what it costs."""
        if number in self._used:
            raise CheckpointError(f"invalid structure: tensor {number} is there twice")
        self._used.add(number)
        return number

    def _leaf(self, value: Any, *, copied: bool = False) -> Any:
        return self._make_leaf(self._use(number(value)), copied)

    def _tagged(self, tag: str, body: Any, node: dict[str, Any], depth: int) -> Any:
        match tag, body:
            case "x", int():
                return self._leaf(body)
            case "d", dict():
                return {key: self.decode(child, depth + 1) for key, child in body.items()}
            case (("k" | "o" | "c"), list()):
                return self._pairs(tag, body, node.get("m"), depth)
            case "t", list():
                return tuple([self.decode(child, depth + 1) for child in body])
            case "z", [str() as kind, list() as parameters, list() as scalars, list() as numbers]:
                values = [self.decode(scalar, depth + 1) for scalar in scalars]
                checked = check_composite(kind, parameters, values, numbers)
                return self._composite(kind, checked, values, [self._use(each) for each in numbers])
            case "f", ("nan" | "inf" | "-inf"):
                return float(body)
            case "i", str() if _HEX.match(body):
                return int(body, 16)
            case "b", str():
                return base64.b64decode(body, validate=True)
            case "B", int():
                array = np.asarray(self._leaf(body, copied=True))
                if not array.flags.c_contiguous:  # one byte, repeated
                    raise CheckpointError(f"invalid structure: bytes in tensor {body}, which is no run of memory")
                return array.tobytes()
            case "a", dict() if body.keys() <= {"b", "B"}:
                return bytearray(self.decode(body, depth + 1))
            case "j", [real, imaginary]:
                return complex(_part(self.decode(real)), _part(self.decode(imaginary)))
            case (("e" | "E"), list()):
                return self._set(tag, body, depth)
            case "n", [dtype, str() as text]:
                return scalar_of(dtype, text)
            case "s", str():
                return np.str_(body)
            case "size", list() if all(type(n) is int and 0 <= n < 1 << 62 for n in body):
                return import_torch().Size(body) if self._torch else tuple(body)
            case "dtype", str() if re.fullmatch(r"[a-z][a-z0-9_]{0,31}", body):
                return self._dtype(body)
            case "device", str() if _DEVICE.match(body):
                return self._device(body)
            case "meta", [str() as dtype, list() as shape, list() as strides]:
                return self._meta(dtype, shape, strides)
        raise CheckpointError(f"invalid structure: {shown(node)}")

    def _pairs(self, tag: str, body: list[Any], metadata: Any, depth: int) -> Any:
        pairs = []
        for pair in body:
            if not (isinstance(pair, list) and len(pair) == 2):
                raise CheckpointError(f"invalid structure: {shown(pair)} is no key and value")
            pairs.append((key_of(pair[0]), self.decode(pair[1], depth + 1)))
        _check_hashes([key for key, _ in pairs])
        value: Any = dict(pairs) if tag == "k" else OrderedDict(pairs) if tag == "o" else Counter(dict(pairs))
        if len(value) != len(pairs):
            raise CheckpointError("invalid structure: a dict has a key twice")
        if metadata is not None:
            value._metadata = self.decode(metadata, depth + 1)
        return value

    def _set(self, tag: str, body: list[Any], depth: int) -> Any:
        values = [self.decode(child, depth + 1) for child in body]
        try:
            _check_hashes(values)
            found = set(values) if tag == "e" else frozenset(values)
        except TypeError as error:
            raise CheckpointError(f"invalid structure: {error} in a set") from None
        if len(found) != len(values):
            raise CheckpointError("invalid structure: a set has a value twice")
        return found

    def _meta(self, dtype: str, shape: list[Any], strides: list[Any]) -> Any:
        if not self._torch:
            return self._composite("meta", (), [], [])
        if not all(type(n) is int and 0 <= n < 1 << 62 for n in [*shape, *strides]):
            raise CheckpointError(f"invalid structure: a tensor of shape {shown(shape)} and strides {shown(strides)}")
        try:
            return import_torch().empty_strided(shape, strides, dtype=self._dtype(dtype), device="meta")
        except (RuntimeError, TypeError) as error:
            raise CheckpointError(f"invalid structure: {error}") from None

    def _dtype(self, name: str) -> Any:
        if not self._torch:
            return f"torch.{name}"
        torch = import_torch()
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"torch.{name} is no dtype of torch {torch.__version__}")
        return dtype

    def _device(self, name: str) -> Any:
        if not self._torch:
            return name
        try:
            return import_torch().device(name)
        except RuntimeError:
            raise CheckpointError(f"torch knows no device {name!r}") from None


def _check_hashes(keys: Iterable[Any]) -> None:
    """`CheckpointError` if too many keys of one dict or set share a hash: to make it would take minutes."""
    big_keys = BigKeys()
    for key in keys:
        if not big_keys.add(key):
            raise CheckpointError("invalid structure: keys of one dict or set that share a hash")


def _part(value: Any) -> float:
    """Real or imaginary part of a complex number."""
    if type(value) is not float and type(value) is not int:
        raise CheckpointError(f"invalid structure: {shown(value, 40)} in a complex number")
    try:
        return float(value)
    except OverflowError:
        raise CheckpointError("invalid structure: a complex number beyond all floats") from None


def number(value: Any) -> int:
    """A tensor's number; `CheckpointError` if it cannot be one."""
    if type(value) is not int or not 0 <= value < MAX_TENSORS:
        raise CheckpointError(f"invalid structure: tensor number {shown(value, 40)}")
    return value


def check_composite(kind: str, parameters: list[Any], scalars: list[Any], numbers: list[Any]) -> tuple[int, ...]:
    """The parameters of a composite; `CheckpointError` unless its parts are as many as its kind has."""
    shape = COMPOSITES.get(kind)
    if (
        shape is None
        or len(numbers) != shape.leaves
        or len(scalars) != shape.scalars
        or not (shape.parameters <= len(parameters) <= (80 if shape.sized else shape.parameters))
        or not all(type(p) is int and -1 <= p < 1 << 62 for p in parameters)
    ):
        raise CheckpointError(f"invalid structure: composite {kind!r:.20}")
    for value in numbers:
        number(value)
    return tuple(parameters)


def scalar_of(dtype: Any, text: str) -> Any:
    """The NumPy scalar of an `{"n": [dtype, text]}`."""
    data = base64.b64decode(text, validate=True)
    if dtype == "bytes":
        return np.bytes_(data)
    kind = numpy_dtype(dtype)
    if kind.itemsize != len(data):
        raise CheckpointError(f"invalid structure: NumPy scalar of {len(data)} bytes, its dtype has {kind.itemsize}")
    return np.frombuffer(data, kind, 1)[0] if data else np.zeros((), kind)[()]


_encode_json = json.JSONEncoder(separators=(",", ":")).encode
_decode_json = json.JSONDecoder().decode


def read_json(data: bytes) -> object:
    """The value of a JSON text in UTF-8; `WireError` if it is invalid."""
    try:
        return _decode_json(data.decode("utf-8"))
    except (ValueError, RecursionError, MemoryError) as error:
        raise WireError(f"invalid JSON of {len(data)} bytes: {type(error).__name__}") from None


def key_token(key: object) -> object:
    """The token of a dict key; `ArgumentTypeError` for an unsupported type of key."""
    if isinstance(key, str):
        return str.__str__(key)
    if key is None:
        return ("n",)
    if isinstance(key, bool):
        return ("b", int(key))
    if isinstance(key, int):
        return ("i", hex(key))
    if isinstance(key, float):
        return ("f", float.hex(key))
    raise ArgumentTypeError(f"dict key of type {type(key).__name__}: keys are str, int, float, bool or None")


def key_of(token: object) -> object:
    """The dict key of a token; `WireError` if it is invalid."""
    if isinstance(token, str):
        return token
    match token:
        case ["n"]:
            return None
        case ["b", int() as bit] if bit in (0, 1) and not isinstance(bit, bool):
            return bool(bit)
        case ["i", str() as text] if len(text) < _MAX_KEY and _HEX.match(text):
            return int(text, 16)
        case ["f", str() as text] if len(text) < 64:
            try:
                return float.fromhex(text)
            except (ValueError, OverflowError):
                pass
    raise WireError("invalid dict key ")


def is_deep(value: object) -> bool:
    """Whether dicts and lists are nested more than `MAX_DEPTH` deep. What is deeper may be too deep to be written."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        containers = [each for each in level if isinstance(each, (dict, list, tuple))]
        level = [child for each in containers for child in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return False
    return True


def check_meta(meta: object) -> None:
    """`ArgumentTypeError` or `ArgumentError` unless it is a dict that JSON can express."""
    if not isinstance(meta, dict):
        raise ArgumentTypeError(
            f"meta is of type {type(meta).__name__}: a dict that JSON can express, or None, is allowed"
        )
    try:
        _encode_json(meta)
        _check_keys(meta)
    except ArgumentTypeError:
        raise
    except TypeError as error:
        raise ArgumentTypeError(f"meta is not JSON: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"meta is not JSON: {error}") from None
    if is_deep(meta):
        raise ArgumentError(f"meta is nested more than {MAX_DEPTH} deep")


def _check_keys(meta: object) -> None:
    # json would silently turn such keys into strings, and write one twice
    containers = [meta]
    while containers:
        value = containers.pop()
        children: Any = value
        if isinstance(value, dict):
            keys = Keys()
            for key in value:
                if not isinstance(key, str):
                    raise ArgumentTypeError(f"meta has the key {key!r:.40}: only str keys are allowed there")
                keys.add(key)
            children = value.values()
        containers += [child for child in children if isinstance(child, (dict, list, tuple))]
