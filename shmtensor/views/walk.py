"""One walk over a value: its tokens, its scalars, and what is needed to copy its leaves.

Everything per leaf lies in parallel lists, and contiguous tensors in host memory make no object of their own: they
are nearly all the leaves there are, and a dict of a few hundred of them should cost hardly more than the copies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError
from ..wire import tree
from ..wire.spec import MAX_LEAVES
from .leaf import Leaf, Refused
from .numpy import ROW, address_of, array_leaf

if TYPE_CHECKING:
    from types import ModuleType

_ALLOWED = "allowed are torch tensors, NumPy arrays and scalars, dict, list, tuple, str, int, float, bool and None"
_MAX_TOKENS = 8 * MAX_LEAVES

# Filled once torch is loaded and a tensor has come by; empty, so that nothing is a tensor, until then.
tensor_types: frozenset[type] = frozenset()
plain_dtypes: dict[Any, bool] = {}
_views: ModuleType | None = None


def torch_views() -> Any:
    """The module `shmtensor.views.torch`, imported on the first call."""
    global _views, plain_dtypes, tensor_types
    if _views is None:
        from . import torch as views

        plain_dtypes = views.PLAIN
        tensor_types = views.tensor_types()
        _views = views
    return _views


def is_cuda_name(device: str) -> bool:
    """Whether the leaves of this device are copied by `views/device.py`: CUDA's, not those that ROCm calls so too."""
    return device.startswith("cuda") and sys.modules["torch"].version.hip is None


def device_job(source: Any, offset: int, nbytes: int, at: int | None = None) -> Any:
    """What copies a tensor of a CUDA device, or a run of its storage, into a payload: see `views/device.py`."""
    return device_views().job_of(source, offset, nbytes, at)


def device_views() -> Any:
    """The module `shmtensor.views.device`; imports torch."""
    from . import device

    return device


def is_tensor(value: object) -> bool:
    """Whether the value is a torch tensor of any type; does not import torch."""
    torch = sys.modules.get("torch")
    kind = getattr(torch, "Tensor", None)
    return kind is not None and isinstance(value, kind)


def _name(key: Any) -> str:
    return f'"{key:.60}"' if isinstance(key, str) else repr(key)


class Walk:
    """What a value consists of.

    tokens:     of `shmtensor.wire.tree`
    scalars:    in the order of the walk, as JSON
    sources:    the tensors and arrays, one per leaf, as the following lists are
    dtypes:     torch dtype or row of the table of a contiguous leaf, else `Leaf.key()`
    shapes:     elements
    addresses:  of memory to copy as it is, else 0
    special:    index -> Leaf, of every leaf that is not contiguous in host memory
    """

    __slots__ = ("addresses", "dtypes", "scalars", "shapes", "sources", "special", "tokens")

    def __init__(self) -> None:
        self.tokens: list[Any] = []
        self.scalars: list[object] = []
        self.sources: list[Any] = []
        self.dtypes: list[Any] = []
        self.shapes: list[tuple[int, ...]] = []
        self.addresses: list[int] = []
        self.special: dict[int, Leaf] = {}

    def values(self, values: Collection[Any], depth: int, label: Callable[[int], str]) -> None:
        """Walk the values of a container; `label` says how the path names one of them."""
        if tensor_types and len(values) > 2 and self._all_plain(values):
            return
        index = -1
        tensors, plain = tensor_types, plain_dtypes
        tokens, dtypes, shapes = self.tokens, self.dtypes, self.shapes
        addresses, sources = self.addresses, self.sources
        try:
            for index, value in enumerate(values):  # noqa: B007
                if type(value) in tensors:
                    # Sparse, nested and meta tensors drop out or raise before anything is noted.
                    try:
                        dtype = value.dtype
                        looks = plain.get(dtype)
                        if (
                            looks is not None
                            and value.is_cpu
                            and value.is_contiguous()
                            and not (looks and value.is_neg())
                        ):
                            shape = value.shape
                            if address := value.data_ptr():
                                tokens.append(0)
                                dtypes.append(dtype)
                                shapes.append(shape)
                                addresses.append(address)
                                sources.append(value)
                                continue
                    except RuntimeError:
                        pass  # no plain memory
                    self.tensor(value)
                else:
                    self.value(value, depth)
        except Refused as refused:
            refused.path.append(label(index))
            raise

    def _all_plain(self, values: Collection[Any]) -> bool:
        """Note all values at once if each is a contiguous tensor in host memory: twice as fast."""
        values = list(values)
        if not tensor_types.issuperset(map(type, values)):
            return False
        views = torch_views()
        try:
            dtypes = [value.dtype for value in values]
            kinds = set(dtypes)
            if (
                not plain_dtypes.keys() >= kinds
                or not all(map(views.is_cpu, values))
                or not all(map(views.is_contiguous, values))
                or (any(map(plain_dtypes.get, kinds)) and any(map(views.is_neg, values)))
            ):
                return False
            shapes = [value.shape for value in values]
            addresses = list(map(views.data_ptr, values))
        except RuntimeError:
            return False
        if 0 in addresses:
            return False
        self.tokens.extend([0] * len(values))
        self.dtypes.extend(dtypes)
        self.shapes.extend(shapes)
        self.addresses.extend(addresses)
        self.sources.extend(values)
        return True

    def value(self, value: Any, depth: int = 0) -> None:
        """Walk one value that is no plain tensor."""
        kind = type(value)
        if kind is np.ndarray:
            self.array(value)
        elif value is None or kind is bool or kind is int or kind is float or kind is str:
            self.tokens.append(tree.SCALAR)
            self.scalars.append(tree.scalar(value))
        elif isinstance(value, dict):
            self._dict(value, depth)
        elif isinstance(value, (list, tuple)):
            self._enter("l" if isinstance(value, list) else "t", len(value), depth)
            self.values(value, depth + 1, "[{}]".format)
        elif isinstance(value, np.generic):
            self._generic(value)
        elif isinstance(value, (int, float, str)):
            self.tokens.append(tree.SCALAR)
            self.scalars.append(tree.scalar(value))
        elif isinstance(value, np.ndarray):
            self.array(value)
        elif is_tensor(value):
            self.tensor(value)
        else:
            raise Refused(
                ArgumentTypeError, f"object of type {kind.__module__}.{kind.__qualname__} is not sent: {_ALLOWED}"
            )

    def _enter(self, token: str, count: int, depth: int) -> None:
        if depth >= tree.MAX_DEPTH:
            raise Refused(
                ArgumentError, f"containers are nested more than {tree.MAX_DEPTH} deep, or one contains itself"
            )
        if len(self.tokens) + count > _MAX_TOKENS:
            raise Refused(ArgumentError, f"value has more than {_MAX_TOKENS} parts: send numbers as tensors")
        self.tokens.append(token)
        self.tokens.append(count)

    def _dict(self, value: dict[Any, Any], depth: int) -> None:
        self._enter("d", len(value), depth)
        keys = list(value)
        if set(map(type, keys)) <= {str}:
            self.tokens.extend(keys)
        else:
            try:
                self.tokens.extend([tree.key_token(key) for key in keys])
            except ArgumentTypeError as error:
                raise Refused(ArgumentTypeError, str(error)) from None
        self.values(value.values(), depth + 1, lambda index: f"[{_name(keys[index])}]")

    def array(self, array: Any) -> None:
        """Walk one array, which must be a plain one or a memmap."""
        if type(array) is not np.ndarray and type(array) is not np.memmap:
            kind = type(array)
            remedy = (
                "send its .data and .mask in a dict"
                if isinstance(array, np.ma.MaskedArray)
                else "send numpy.asarray(array)"
            )
            raise Refused(
                ArgumentTypeError, f"array subclass {kind.__module__}.{kind.__qualname__} is not sent: {remedy}"
            )
        row = ROW.get(array.dtype)
        self.tokens.append(tree.LEAF)
        if row is not None and array.flags.c_contiguous:
            self.dtypes.append(row)
            self.shapes.append(array.shape)
            self.addresses.append(address_of(array))
            self.sources.append(array)
        else:
            self.leaf(array_leaf(array))

    def tensor(self, tensor: Any) -> None:
        """Walk one tensor of any type."""
        views = torch_views()
        try:
            if type(tensor) not in tensor_types and not views.is_jagged(tensor):
                raise views.refuse(tensor)
            from .composites import take_apart

            apart = take_apart(tensor)
            if apart is None:
                self.tokens.append(tree.LEAF)
                self.leaf(views.tensor_leaf(tensor))
                return
            token, scalars, parts = apart
            self.tokens.append(token)
            self.scalars.extend(scalars)
            for part in parts:
                self.leaf(part if isinstance(part, Leaf) else views.tensor_leaf(part))
        except (RuntimeError, NotImplementedError) as error:
            raise Refused(ArgumentTypeError, f"tensor cannot be read: {error}") from error

    def _generic(self, value: Any) -> None:
        if isinstance(value, np.str_):
            # as text and as bytes: an array would drop zeros at the end
            self.tokens.append(("str",))
            self.scalars.append(tree.scalar(value))
            return
        if isinstance(value, np.bytes_):
            self.tokens.append(("bytes",))
            self.leaf(array_leaf(np.frombuffer(bytes(value), np.uint8)))
            return
        self.tokens.append(("generic",))
        self.leaf(array_leaf(np.array(value)))

    def leaf(self, leaf: Leaf) -> None:
        """Note one leaf that is not contiguous in host memory, or not of a plain type."""
        self.special[len(self.sources)] = leaf
        self.sources.append(leaf.source)
        self.dtypes.append(leaf.key())
        self.shapes.append(leaf.shape)
        self.addresses.append(leaf.address)

    def leaf_at(self, index: int) -> Leaf:
        """The leaf of this index, made now if it is a contiguous one."""
        leaf = self.special.get(index)
        if leaf is None:
            source = self.sources[index]
            leaf = array_leaf(source) if isinstance(source, np.ndarray) else torch_views().tensor_leaf(source)
        return leaf
