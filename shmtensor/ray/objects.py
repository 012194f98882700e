"""`register`: tensors in object refs. Their bytes lie in Ray's object store, and `ray.get` gives views of these.

A tensor is pickled as its description (wire/spec.py) and one out-of-band buffer: Ray copies the buffer into its store,
once, or sends a small one along with the reference. What reads it makes a tensor over Ray's buffer, which holds the
object in the store as long as the tensor's storage lives. So the leases are Ray's own.

Ray calls a function by the exact class of an object, for whatever it finds on its way through a value. So it cannot be
seen what a tensor belongs to: `torch.nn.Parameter` would become a view as well, by its data, if it were not registered.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ..codec.encode import encode
from ..codec.implementation import decode
from ..codec.libraries import import_torch
from ..codec.numpy import address_of, memory_of
from ..errors import ShmTensorError
from ..wire.spec import GROUP_ALIGNMENT
from .relays import ray_module

_PICKLED: Final = None
"""In place of a description: torch's own way to pickle it follows."""
_registered: dict[type, tuple[Any, Any]] = {}
"""By class: what pickles it here, and what did so before."""


def register() -> None:
    """Let this process put torch tensors into object refs such that `ray.get` gives views instead of copies.

    Experimental. For each process that puts tensors: the driver calls it after `ray.init`, and the workers too, with
    `ray.init(runtime_env={"worker_process_setup_hook": "shmtensor.ray.register"})`. Processes that only get need
    nothing but shmtensor and torch.

    From then on, tensors of type `torch.Tensor` itself that lie in host memory and need no gradient are copied
    once, into the object store. `ray.get` on a node that has the object gives a tensor that *is* the object's
    bytes: shared with everyone there, so it must not be written to (torch cannot forbid it: call `.clone()` first).
    The object stays in the store until the last such tensor, slice and view of it is gone, even if the reference
    is. After `ray.shutdown()`, what this process still views may change: copy it before. On another node Ray copies
    the object there first. Every dtype, dense strides, and sparse, nested and quantized tensors survive. Small objects
    (100 KB, by Ray's default) lie in the processes' own memory.

    A `torch.nn.Parameter` is copied once more by `ray.get`, and is private: optimizers write to it. Other subclasses,
    and tensors that need a gradient or have attributes, are pickled as before; but the plain tensors that they are made
    of, and those that any other object holds, are views: buffers of a module (such as the running mean of a batch
    norm), the local tensor of a DTensor, the state of an optimizer, a tensor in an attribute.

    Raises:
        ArgumentError: this process is not connected to a cluster.
        DependencyError: Ray or torch is not installed.
    """
    ray_module()
    torch = import_torch()
    from ray.util import register_serializer

    unregister()
    for kind, serializer, deserializer in (
        (torch.Tensor, _flatten, rebuild),
        (torch.nn.Parameter, _flatten_parameter, rebuild_parameter),
    ):
        before = _reducers().get(kind)
        register_serializer(kind, serializer=serializer, deserializer=deserializer)
        _registered[kind] = _reducers()[kind], before


def unregister() -> None:
    """Pickle tensors as before `register`, with what was registered for them then. Idempotent."""
    while _registered:
        kind, (own, before) = _registered.popitem()
        reducers = _reducers()
        if reducers.get(kind) is not own:
            continue  # something else was registered since
        if before is None:
            del reducers[kind]
        else:
            reducers[kind] = before


def _reducers() -> Any:
    """The functions by which Ray pickles objects, by class."""
    from ray import cloudpickle

    return cloudpickle.CloudPickler.dispatch


def _flatten(tensor: Any) -> tuple[Any, ...]:
    """The function and arguments that are pickled instead of a tensor: its description, and its bytes as an array,
    which are not copied if they are dense; or torch's own function and arguments."""
    if not (tensor.requires_grad or tensor.__dict__ or tensor.device.type != "cpu"):
        span = _span(tensor)
        if span < tensor.numel():
            base = tensor.as_strided((span,), (1,), tensor.storage_offset())
            return _PICKLED, _strided, (_flatten(base), tuple(tensor.shape), tensor.stride())
        try:
            out = encode(tensor)
        except ShmTensorError:
            pass
        else:
            payload = out.in_place()
            if payload is None:
                payload = np.empty(out.nbytes, np.uint8)
                out.copy_into(payload)
            return out.description, payload
    return (_PICKLED, *tensor.__reduce_ex__(2))


def _span(tensor: Any) -> int:
    """The number of elements of its storage that a tensor spans; after `expand` that is fewer than it has."""
    if tensor.layout is not import_torch().strided or tensor.is_nested or tensor.is_quantized or not tensor.numel():
        return int(tensor.numel())
    return 1 + sum((int(size) - 1) * int(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _strided(flat: tuple[Any, ...], shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    return rebuild(flat).as_strided(shape, strides)


def rebuild(parts: tuple[Any, ...]) -> Any:
    """The tensor of what `_flatten` has returned. If it is a view, it keeps the object of Ray alive."""
    if parts[0] is _PICKLED:
        return parts[1](*parts[2])
    description, received = parts
    address = address_of(received)
    if address % GROUP_ALIGNMENT:  # a small object, which is nowhere but in this process
        received = received.copy()
        address = address_of(received)
    value, _ = decode(description, memory_of(address, received.nbytes, received), readonly=True)
    return value


def _flatten_parameter(parameter: Any) -> tuple[Any, ...]:
    """What is pickled instead of a parameter: its data as of a tensor, torch's function that makes a parameter of
    data, and what else that one needs."""
    function, (data, *rest), *_ = parameter.__reduce_ex__(2)
    return _flatten(data), function, rest


def rebuild_parameter(parts: tuple[Any, ...]) -> Any:
    """The parameter of what `_flatten_parameter` has returned, in memory of its own."""
    flat, function, rest = parts
    data = rebuild(flat)
    return function(data if flat[0] is _PICKLED else data.clone(), *rest)
