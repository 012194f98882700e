"""A slot on loan: what is computed into it is sent without any copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..codec.encode import shape_of
from ..errors import ArgumentTypeError, ReleasedError
from .base import Local

if TYPE_CHECKING:
    from ..codec.encode import Encoded
    from ..ring.ring import Ring


class Loan(Local):
    """A context manager over a free slot. Leaving it sends what was written; an exception discards it."""

    __slots__ = (
        "__weakref__",
        "_array",
        "_commit",
        "_decode",
        "_dtype",
        "_out",
        "_ring",
        "_shape",
        "_slot",
        "_view",
        "seq",
    )

    seq: int
    """The message's sequence number once it is sent, else 0."""

    def __init__(
        self,
        commit: Callable[..., int],
        decode: Callable[..., Any],
        ring: Ring,
        slot: int,
        out: Encoded,
        array: Any,
        dtype: Any,
        shape: Any,
    ) -> None:
        # `commit` publishes the slot, `decode` makes the view of it; both are the sender's
        self._commit, self._decode, self._ring, self._slot, self._out = commit, decode, ring, slot, out
        self._array, self._dtype, self._shape = array, dtype, shape_of(shape)
        self._view: Any = None
        self.seq = 0

    @property
    def tensor(self) -> Any:
        """The slot as a torch tensor of the loan's shape and dtype; undefined until it is written."""
        view = self._open()
        if type(view).__module__.startswith("numpy"):
            raise ArgumentTypeError("this loan has a NumPy dtype: use loan.array, or pass a torch dtype")
        return view

    @property
    def array(self) -> Any:
        """The slot as an ndarray of the loan's shape and dtype. Its contents are undefined until they are written."""
        view = self._open()
        if not type(view).__module__.startswith("numpy"):
            raise ArgumentTypeError("this loan has a torch dtype: use loan.tensor, or pass a NumPy dtype")
        return view

    def send(self) -> int:
        """Publish now. Returns the sequence number."""
        self._open()
        self._view = None
        # the array lives until the message is published: its end would free the slot
        self.seq = self._commit(self._ring, self._slot, self._out, self._array)
        self._array = None
        return self.seq

    def discard(self) -> None:
        """Give the slot back unsent, once no view of it lives. Idempotent."""
        self._array = self._view = None

    def _open(self) -> Any:
        if self._array is None:
            raise ReleasedError("this loan was sent or discarded: its memory is not yours any more")
        if self._view is None:
            self._view = self._decode(self._out.description, self._array, readonly=False)[0]
        return self._view

    def __enter__(self) -> Loan:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._array is None:
            return
        if kind is None:
            self.send()
        else:
            self.discard()

    def _instead(self) -> str:
        return "send it here; the other process receives the message: pass it the channel's name"

    def __repr__(self) -> str:
        state = "open" if self._array is not None else f"sent as {self.seq}" if self.seq else "discarded"
        return f"<Loan shape={self._shape} {self._dtype} {state}>"
