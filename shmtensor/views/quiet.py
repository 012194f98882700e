"""torch's once-per-process warnings about prototypes, given where nobody sees them."""

from __future__ import annotations

import threading
import warnings

import torch

_CPU = torch.device("cpu")
_silent: set[str] = set()
_silence_lock = threading.Lock()


def silence(kind: str) -> None:
    """Let torch give its once-per-process warning about a kind of tensor where nobody sees it.

    Filters of warnings belong to the whole process, so they are changed once per kind and not once per message.
    """
    if kind in _silent:
        return
    with _silence_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "compressed":
            index = torch.zeros(1, dtype=torch.int64, device=_CPU)
            torch.sparse_csr_tensor(index, index[:0], index[:0], (0, 0), device=_CPU)
        elif kind == "nested":
            torch.nested.nested_tensor([torch.zeros(1, device=_CPU)])
        elif kind == "quantized":
            torch._empty_affine_quantized([0], scale=1.0, zero_point=0, dtype=torch.quint8, device=_CPU)
        else:
            torch.empty(1, dtype=torch.complex32, device=_CPU)
        _silent.add(kind)
