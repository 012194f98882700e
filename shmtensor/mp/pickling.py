"""Turn any object into a value that can be sent, and back: pickle's stream as one array, and tensors and arrays beside
it.

The drop-ins promise the standard library's semantics, so this is the only place of the package where received bytes
are unpickled. The stream is pickle protocol 5 with `multiprocessing`'s reductions. A tensor or array in the object,
however deep, is only named in the stream and sent beside it (pickle calls that out of band):

1. CPU tensors, dense, quantized or sparse, and arrays of a dtype that the library sends: as themselves.
2. Objects made of such tensors (parameters, subclasses, storages): their own reduction, the tensors in it as in 1. A
   storage that a reduction names is a uint8 tensor of its bytes.
3. Anything else that offers buffers to pickle (array subclasses, data frames): each buffer as a uint8 array.

`torch.multiprocessing` registers reductions that share a tensor's memory through a file descriptor; these are replaced
here, as the bytes are copied into a slot. Each reducer runs only for objects of its own type: pickling plain objects
costs what it costs without it.

Queues send one stream (`pack`, `unpack`). Pools, pipes and executors keep large bytes out of it (`dumps`, `loads`): an
object that holds megabytes as `bytes` or `str`, an encoded image say, would be copied into the stream, into fresh
memory that the kernel has to zero first. pickle writes such an object to its file in a call of its own; the file here
keeps the object instead of copying it.

Received tensors are copied to a device for queues and executors that were created with `device=`:

    slot ---- copy on the consumer's own stream ---- event ---- current stream of the thread that gets the value

The memory on the device belongs to the consumer's stream, so that a copy need not wait for the current stream's work.
`record_stream` notes that the current stream uses it too: otherwise torch could reuse it while a kernel reads it.
"""

from __future__ import annotations

import collections
import contextlib
import copyreg
import io
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final, NamedTuple

import numpy as np

from ..codec.leaf import Refused
from ..codec.libraries import torch_views
from ..codec.numpy import ROW, Array, array_leaf
from ..cuda.runtime import device_of, runtime
from ..endpoints.message import Message
from ..endpoints.workqueue import Consumer
from ..errors import ArgumentError

_PROTOCOL = 5

_Reduced = tuple[Any, ...] | str
_reducers: dict[type, Callable[[Any], _Reduced]] = {}
"""By exact type, in place of what is registered with `multiprocessing`."""
_torch_types = False
_reductions = collections.ChainMap(_reducers, ForkingPickler._extra_reducers, copyreg.dispatch_table)  # type: ignore
"""The pickler's dispatch table. It includes reducers that a program registers later."""
_SCALARS: Final = frozenset({int, float, complex, bool, str, bytes, type(None)})
_layouts: frozenset[Any] = frozenset()
"""Layouts of tensors that are sent as themselves. (torch's reduction of a sparse tensor leaks what it rebuilds.)"""


class _Stand(bytearray):
    """A placeholder for a leaf: an empty buffer, so that pickle sends it out of band."""

    __slots__ = ("leaf",)
    leaf: Any


def dump(obj: object, file: Any) -> list[Any]:
    """Write the stream to anything with `write`; returns the leaves in the order in which the stream names them."""
    if not _torch_types and "torch" in sys.modules:
        _add_torch_types()
    leaves: list[Any] = []

    def note(buffer: pickle.PickleBuffer) -> None:
        exporter = memoryview(buffer).obj
        leaves.append(exporter.leaf if type(exporter) is _Stand else np.frombuffer(buffer.raw(), np.uint8))

    pickler = pickle.Pickler(file, _PROTOCOL, buffer_callback=note)
    pickler.dispatch_table = _reductions
    pickler.dump(obj)
    return leaves


def _array(file: io.BytesIO) -> Array:
    return np.frombuffer(file.getbuffer(), np.uint8)


def pack(obj: object) -> Any:
    """As `dumps`, but a lone tensor or array is sent as it is, and an object without any as its stream alone.

    A lone stream is `bytes`, sent as a uint8 array of one dimension. An item that is such an array itself is sent
    beside a stream, so that the two cannot be confused.
    """
    kind = type(obj)
    if kind in _SCALARS:
        return pickle.dumps(obj, _PROTOCOL)
    if kind is np.ndarray:
        array: Any = obj
        if array.dtype in ROW and (array.ndim != 1 or array.dtype != np.uint8):
            return array
    elif _torch_types and kind is sys.modules["torch"].Tensor:
        tensor: Any = obj
        if not tensor.requires_grad and _is_plain(tensor):
            return tensor
    file = io.BytesIO()
    leaves = dump(obj, file)
    return [_array(file), *leaves] if leaves else file.getvalue()


def is_stream(value: Any) -> bool:
    """Whether a received value is a lone stream."""
    return type(value) is np.ndarray and value.ndim == 1 and value.dtype == np.uint8


def unpack(value: Any) -> Any:
    """The object of a value that `pack` made, after it was received. As for `loads` otherwise."""
    if type(value) is list:
        return pickle.loads(value[0], buffers=value[1:])
    if is_stream(value):
        return pickle.loads(value)
    return value


# --- how a leaf is named in the stream


def _given(leaf: Any) -> Any:
    """The function in the stream that the unpickler calls with the next leaf."""
    return leaf


def _beside(leaf: Any) -> _Reduced:
    stand = _Stand()
    stand.leaf = leaf
    return _given, (pickle.PickleBuffer(stand),)


def _reduce_array(array: Array) -> _Reduced:
    if array.dtype not in ROW:
        try:
            array_leaf(array)
        except Refused:  # objects, or a dtype that the library does not send
            return array.__reduce_ex__(_PROTOCOL)
    return _beside(array)


_reducers[np.ndarray] = _reduce_array


# --- torch: nothing here runs before the program has imported it


def _add_torch_types() -> None:
    """Add the reducers of torch's types, once torch is imported completely."""
    global _layouts, _torch_types
    torch: Any = sys.modules["torch"]
    registered = getattr(sys.modules.get("torch.multiprocessing.reductions"), "reduce_tensor", None)
    if registered is None or torch.Tensor not in ForkingPickler._extra_reducers:  # type: ignore[attr-defined]
        return  # another thread is still importing it, so there are no tensors yet
    _reducers[torch.nn.Parameter] = _reduce_parameter
    for kind in (*torch._storage_classes, torch.storage.TypedStorage):
        _reducers[kind] = _reduce_typed_storage
    _reducers[torch.UntypedStorage] = _reduce_storage
    _reducers[torch.Tensor] = _reduce_tensor
    names = ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")
    _layouts = frozenset(getattr(torch, name) for name in names if hasattr(torch, name))
    _torch_types = True


def _reduce_tensor(tensor: Any) -> _Reduced:
    if tensor.requires_grad:
        _check_leaf(tensor)
        if not _is_plain(tensor):
            return tensor.__reduce_ex__(_PROTOCOL)  # type: ignore[no-any-return]
        return _with_grad, (tensor.detach(),)
    return _beside(tensor) if _is_plain(tensor) else tensor.__reduce_ex__(_PROTOCOL)


def _reduce_parameter(parameter: Any) -> _Reduced:
    _check_leaf(parameter)
    return parameter.__reduce_ex__(_PROTOCOL)  # type: ignore[no-any-return]


def _check_leaf(tensor: Any) -> None:
    """Refuse, and warn of, the same tensors as `torch.multiprocessing`."""
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            "a tensor that is not a leaf of the autograd graph and requires grad is not sent, since autograd does not "
            "cross process boundaries: send tensor.detach()"
        )
    sys.modules["torch.utils.hooks"].warn_if_has_hooks(tensor)


def _is_plain(tensor: Any) -> bool:
    """Whether a tensor whose type is exactly `torch.Tensor` is no more than elements in host memory."""
    return (
        tensor.is_cpu
        and tensor.layout in _layouts
        and not tensor.is_nested
        and tensor.dtype in torch_views().ROW
        and not getattr(tensor, "__dict__", None)
    )


def _with_grad(tensor: Any) -> Any:
    return tensor.requires_grad_()


def _reduce_storage(storage: Any) -> _Reduced:
    torch: Any = sys.modules["torch"]
    if storage.device.type != "cpu":  # torch's own pickle of an untyped one cannot be read
        return _untyped, (torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.uint8, _internal=True),)
    return _storage_of, (torch.empty(0, dtype=torch.uint8).set_(storage),)


def _storage_of(tensor: Any) -> Any:
    """Exactly the tensor's bytes as a storage, even if they share a larger one with another tensor of the message."""
    if device_of(tensor) >= 0:  # it was copied to a device, into memory of its own
        return tensor.untyped_storage()
    return sys.modules["torch"].from_numpy(tensor.numpy()).untyped_storage()


def _untyped(storage: Any) -> Any:
    return storage._untyped_storage


def _reduce_typed_storage(storage: Any) -> _Reduced:
    if storage._untyped_storage.device.type != "cpu":
        return storage.__reduce__()  # type: ignore[no-any-return]
    return _typed_storage, (storage._untyped_storage, storage.dtype)


def _typed_storage(storage: Any, dtype: Any) -> Any:
    return sys.modules["torch"].storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


# --- large bytes beside the stream


_LARGE: Final = 256 << 10
"""A piece of so many bytes is an object of the caller: pickle's own pieces are less than half as long."""


class _Pieces:
    """A file for a pickler, which keeps large pieces without a copy."""

    def __init__(self) -> None:
        self._pieces: list[Any] = []
        self._small = io.BytesIO()

    def write(self, data: Any) -> int:
        if type(data) is bytes and len(data) >= _LARGE:
            self._cut()
            self._pieces.append(np.frombuffer(data, np.uint8))  # keeps the object alive; bytes never change
            return len(data)
        return self._small.write(data)

    def stream(self) -> Any:
        """Everything that was written: one array, or a list of them."""
        self._cut()
        return self._pieces if len(self._pieces) > 1 else self._pieces[0]

    def _cut(self) -> None:
        self._pieces.append(_array(self._small))
        self._small = io.BytesIO()


class _Joined(io.RawIOBase):
    """Several arrays as one file."""

    def __init__(self, pieces: list[Any]) -> None:
        self._rest = [memoryview(piece) for piece in reversed(pieces)]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while self._rest and not self._rest[-1].nbytes:
            self._rest.pop()
        if not self._rest:
            return 0
        piece = self._rest[-1]
        count = min(piece.nbytes, len(buffer))
        buffer[:count] = piece[:count]
        self._rest[-1] = piece[count:]
        return count


def dumps(obj: object) -> list[Any]:
    """Pickle an object as a value that `Producer.send` takes: `[stream, leaf, leaf, ...]`, to be read by `loads`.

    Args:
        obj: anything that pickles.

    Returns:
        The stream, a uint8 array [bytes]; or, with something large in it, a list of such arrays, in order. Then the
        tensors and arrays that go beside it. They and the large bytes are the object's own, no copies: change nothing
        of it until the value is sent.

    Raises whatever pickling the object raises.

    >>> import numpy as np
    >>> value = dumps({"x": np.arange(3), "name": "a"})
    >>> len(value), value[1].tolist()
    (2, [0, 1, 2])
    >>> loads(value)
    {'x': array([0, 1, 2]), 'name': 'a'}
    >>> len(dumps(["a", bytes(1 << 20)])[0])
    3
    """
    file = _Pieces()
    leaves = dump(obj, file)
    return [file.stream(), *leaves]


def loads(value: list[Any]) -> Any:
    """The object of a value that `dumps` made, after it was received.

    Tensors and arrays of the object are the leaves of the value itself: the owner of its memory decides how long they
    may be used and whether they may be written. Raises whatever unpickling raises. Use it only for values of trusted
    processes: unpickling may run any code.
    """
    stream, *leaves = value
    if type(stream) is not list:
        return pickle.loads(stream, buffers=leaves)
    # larger than pickle's own pieces; what is larger than the buffer is read straight into its object
    return pickle.load(io.BufferedReader(_Joined(stream), _LARGE // 2), buffers=leaves)


def nbytes_of(value: list[Any]) -> int:
    """Bytes of everything in a value, except sparse tensors, whose size is not known."""
    stream = value[0]
    pieces = stream if type(stream) is list else [stream]
    total = 0
    for part in (*pieces, *value[1:]):
        with contextlib.suppress(RuntimeError):
            total += part.nbytes
    return total


# --- exceptions


def _same(failure: Exception) -> Exception:
    return failure


class DescribedError(NamedTuple):
    """An exception on its way from a worker to the caller, as a pickle stream and its leaves. The text of its traceback
    arrives even if the exception itself cannot be pickled or unpickled."""

    trace: str
    stream: bytes
    leaves: list[Any]

    @classmethod
    def of(cls, error: BaseException, trace: str, instead: Callable[[Exception], Exception] = _same) -> DescribedError:
        """Describe an exception. One that cannot be pickled is replaced by `instead` of the failure, if that can be."""
        try:
            return cls._of(error, trace)
        except Exception as failure:
            trace = f"{trace}\n\nIt cannot be pickled:\n\n{''.join(traceback.format_exception(failure))}"
            try:
                return cls._of(instead(failure), trace)
            except Exception:  # in its turn
                return cls._of(pickle.PicklingError(f"{type(failure).__name__} at the exception of a call"), trace)

    @classmethod
    def _of(cls, error: BaseException, trace: str) -> DescribedError:
        stream, *leaves = dumps(error)
        return cls(trace, b"".join(stream if type(stream) is list else [stream]), leaves)

    def rebuilt(self, cause: Callable[[str], BaseException]) -> BaseException:
        """The exception, with the text of its traceback as its cause. If unpickling it raises, that error has the same
        cause."""
        text = cause(self.trace)
        try:
            error: BaseException = loads([np.frombuffer(self.stream, np.uint8), *self.leaves])
            error.__cause__ = text
            return error
        except BaseException as failure:
            raise failure from text


# --- copies to a device


_PIN_LOOP = "_pin_memory_loop"
"""Name of the function of DataLoader's thread that pins batches."""


def number_of(device: Any) -> int | None:
    """The number of the device that `device=` names. Raises `CudaError` if CUDA is missing, `ArgumentError` if it names
    no CUDA device."""
    return None if device is None else runtime().device(device)


class DeviceConsumer(Consumer):
    """A consumer whose received values can be copied to a device."""

    def copy_out(self, value: Any, device: int) -> tuple[Any, Any, list[Any]]:
        """Start the copies on this endpoint's own stream: (value on the device, event after the copies, new memory)."""
        self._devices.poll()
        return self._copy_out(value, device)


class Transfer:
    """Device memory whose copies are under way."""

    def __init__(self, device: int, event: Any, memory: list[Any]) -> None:
        self._device, self._event, self._memory = device, event, memory

    def hand_over(self) -> None:
        """Make this thread's current stream wait for the copies. The host does not wait."""
        cuda = runtime()
        stream = cuda.current_stream(self._device)
        cuda.stream_waits(stream, self._event)
        for tensor in self._memory:
            cuda.used_on(tensor, stream)


class Transfers:
    """Copies values to one device. Thread-safe."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._lock = threading.Lock()

    @classmethod
    def to(cls, device: Any) -> Transfers | None:
        """The transfers for an option `device=`; None if values stay in host memory."""
        number = number_of(device)
        return None if number is None else cls(number)

    def start(self, value: Any, consumer: DeviceConsumer) -> tuple[Any, Transfer | None]:
        """Start copying the tensors of a value that this consumer got. Returns the value with the tensors on the
        device, and the transfer, or None if it holds no tensor.

        Slots stay leased until their copies are complete and the consumer copies the next value, or closes.
        """
        with self._lock:
            moved, event, memory = consumer.copy_out(value, self._device)
        return moved, Transfer(self._device, event, memory) if memory else None

    def unpack(self, message: Message, consumer: DeviceConsumer) -> Any:
        """The object of a queue's item, its tensors on the device and safe on the current stream."""
        value = message.value
        if is_stream(value):
            return unpack(value)
        if getattr(getattr(threading.current_thread(), "_target", None), "__name__", "") == _PIN_LOOP:
            raise ArgumentError(
                "pin_memory=True pins tensors in host memory, but batches of this context arrive on device "
                f"{self._device}: drop pin_memory=True"
            )
        value, transfer = self.start(value, consumer)
        if transfer is not None:
            transfer.hand_over()
        return unpack(value)
