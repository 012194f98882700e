"""The trainer's half of one save: make room as `busy` says, then copy chunk after chunk into slots.

It runs in the writer's thread. No wait takes longer than a quarter of a second; after each it checks that the writing
process lives and that the caller still waits.

`PlanCache` reuses plan and layout of the last save for a state with the same tensors at the same addresses. What is
reused depends on *marks* alone: each leaf's name, address, shape, strides, dtype, device and size of storage. A save
computes the marks of its state. If they are equal, the table of tensors, the regions and the JSON text of both are
reused; the structure around the tensors, with every scalar in it, and the plan's references to memory are always made
anew, so that the cache keeps no tensor alive. The layout is reused if it has room for the new description
(`Layout.holds`). In any other case the state is planned from scratch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from ..codec.leaf import Leaf, Refused, is_tensor
from ..codec.libraries import torch_views
from ..codec.numpy import ROW, Array, address_of, array_at, array_leaf
from ..endpoints.loan import Loan
from ..errors import ArgumentError, ArgumentTypeError, ClosedError, PeerDied, RingFull, TimedOut
from ..shielded import Call
from .formats import Format, Layout
from .handle import FAILED, REPLACED, WAITING, WRITING, Save, SavesInFlight
from .plan import Plan, Region, assemble, lone
from .slots import ABANDON, END, HEAD, Chunk, Offload, Stager, Transfer, cut
from .structure import Encoder, check_meta

_T = TypeVar("_T")
_CHECK_INTERVAL: Final = 0.25
"""Seconds to wait for a slot before it checks again."""
_TAKE_BACK: Final = 60.0
"""Seconds to wait for a small slot, for the message that takes a save back."""


class Staging:
    """Copies states into the slots of one writer. `is_lost()`: there is no writing process, nor will there be one."""

    def __init__(self, stager: Stager, saves: SavesInFlight, is_lost: Callable[[], bool]) -> None:
        self._stager, self._saves, self._is_lost = stager, saves, is_lost
        self._call: Call[Any] | None = None

    def make_room(self, call: Call[Any], busy: str, count: int) -> list[Save] | None:
        """Do what `busy` says for a state of `count` chunks. Returns the saves that the writing process was asked to
        drop, or None if this one is to be skipped."""
        stager, in_flight, self._call = self._stager, self._saves.in_flight, call
        if busy == "block" or not in_flight or (stager.fits(count) and stager.has_room(count)):
            return []
        if busy == "skip":
            return None
        asked = [save for save in in_flight if save.status == WAITING]
        for save in asked:
            self._call_with_room(partial(stager.send_small, ABANDON, save.number, force=False), None, save)
        return asked

    def stage(
        self, call: Call[Any], save: Save, plan: Plan, after: dict[int, Any], chunks: Sequence[Chunk],
        described: bytes, options: dict[str, Any], deadline: float | None,
    ) -> Callable[[], None] | None:  # fmt: skip
        """Copy everything, unless the save fails meanwhile. An exception takes the save back, and so does a caller that
        abandons the call before the end of the save is published.

        Copies from devices start after the events `after` and are under way when this returns. Then it returns a
        function to call: it publishes each chunk when its copies are complete, and then the end of the save.
        """
        stager, number, wake = self._stager, save.number, bool(options["streams"])
        offload = None
        self._call = call
        try:
            head = np.frombuffer(described, np.uint8)
            if plan.devices:
                offload = save.offload = stager.offload(plan, after)
            self._call_with_room(partial(stager.send_small, HEAD, number, head, wake=wake, **options), deadline, save)
            # crash: stage.begun
            if offload is not None:
                self._offload(save, offload, Transfer(plan, offload.copy), chunks, deadline, wake=wake)
                return partial(self._finish, save, offload, plan.nbytes, wake=wake)
            self._copy(save, Transfer(plan), chunks, deadline, wake=wake)
            self._end(save, deadline)
        except _Over:
            if offload is not None:
                offload.abandon()  # the save has the reason
        except BaseException:
            if offload is not None:
                offload.abandon()
            self._take_back(number)
            raise
        save.staged.set_result(plan.nbytes)
        return None

    def _copy(
        self, save: Save, transfer: Transfer, chunks: Sequence[Chunk], deadline: float | None, *, wake: bool
    ) -> None:
        """Copy host memory. A state that streams is copied slot by slot, so that the writing process can start at once.
        For any other state all free slots are taken first, and the copies follow each other without a pause."""
        stager, number, done = self._stager, save.number, 0
        while done < len(chunks):
            loans = [self._call_with_room(partial(stager.lend, number, chunks[done].index), deadline, save)]
            if not wake:
                loans += stager.lend_more(number, [chunk.index for chunk in chunks[done + 1 :]])
            slots = [loan.array for loan in loans]
            try:
                transfer.fill(chunks[done : done + len(loans)], slots)
                for loan in loans:
                    # crash: stage.copied
                    stager.publish(loan, wake=wake)
            except BaseException:
                slots.clear()  # the exception's traceback keeps this frame, and must not keep the slots
                for loan in loans:
                    loan.discard()
                raise
            done += len(loans)
            slots.clear()  # a slot is not free while a view of it is alive
            loans.clear()
            del loan

    def _offload(
        self, save: Save, offload: Offload, transfer: Transfer, chunks: Sequence[Chunk],
        deadline: float | None, *, wake: bool,
    ) -> None:  # fmt: skip
        """Start the copies from devices, slot by slot, and copy the rest."""
        with offload.under_way():
            for chunk in chunks:
                loan = self._lend(save, chunk.index, offload, deadline, wake=wake)
                try:
                    transfer.fill([chunk], [loan.array])
                except BaseException:
                    offload.hold(loan)  # a device may be writing into it
                    raise
                offload.note(loan)
                del loan

    def _lend(self, save: Save, index: int, offload: Offload, deadline: float | None, *, wake: bool) -> Loan:
        """A slot for a chunk. While it waits it publishes the slots that are filled: only those can come back free."""
        while True:
            for loan in offload.complete(wait=False):
                self._stager.publish(loan, wake=wake)
                del loan
            if not offload.pending:
                return self._call_with_room(partial(self._stager.lend, save.number, index), deadline, save)
            try:
                return self._stager.lend(save.number, index, timeout=0)
            except RingFull:
                self._stager.publish(next(offload.complete(wait=True)), wake=wake)

    # --- after `CheckpointWriter.save` has returned

    def _finish(self, save: Save, offload: Offload, nbytes: int, *, wake: bool) -> None:
        """Publish the chunks whose copies are under way, and the end of the save."""
        try:
            for loan in offload.complete(wait=True):
                self._stager.publish(loan, wake=wake)
            self._end(save, None)
        except _Over:
            offload.abandon()
        except Abandoned:
            offload.abandon()
            self._take_back(save.number)
            return
        except BaseException as error:
            offload.abandon()
            self._take_back(save.number, FAILED, error)
            if not save.staged.done():
                save.staged.set_exception(error)
            return
        offload.forget()
        save.staged.set_result(nbytes)

    def _end(self, save: Save, deadline: float | None) -> None:
        # crash: stage.filled
        self._call_with_room(partial(self._stager.send_small, END, save.number), deadline, save)
        # crash: stage.ended

    def _call_with_room(self, call: Callable[..., _T], deadline: float | None, save: Save, *, over: bool = False) -> _T:
        """Repeat `call(timeout=)` until there is a slot, and check the caller, the writing process, the save and the
        deadline in between. With `over`, go on though the caller has left or the save has ended."""
        self._check_call(over=over)
        try:
            return call(timeout=0)  # at once if a slot is free, even if the deadline has passed
        except RingFull as error:
            full, began = str(error), time.monotonic()  # only the text: the error's frames would keep slots
        try:
            return self._wait_for_room(call, deadline, save, full, over=over)
        finally:
            save.waited += time.monotonic() - began

    def _wait_for_room(
        self, call: Callable[..., _T], deadline: float | None, save: Save, full: str, *, over: bool
    ) -> _T:
        while True:
            self._check_call(over=over)
            if save.status not in (WAITING, WRITING) and not over:
                raise _Over
            if self._is_lost():
                raise PeerDied("the writing process of checkpoints is dead")
            if deadline is not None and time.monotonic() >= deadline:
                raise TimedOut(f"no room for the checkpoint within timeout=: {full}")
            try:
                return call(timeout=_CHECK_INTERVAL)
            except RingFull as error:
                full = str(error)

    def _check_call(self, *, over: bool) -> None:
        if self._call is not None and self._call.abandoned and not over:
            raise Abandoned

    def _take_back(self, number: int, status: str = REPLACED, error: BaseException | None = None) -> None:
        """Make the writing process drop a save that was not completely staged."""
        save = next((save for save in self._saves.in_flight if save.number == number), None)
        if save is None:
            return
        if error is not None:  # before the writing process reports that it was replaced
            self._saves.finish(number, status, error)
        abandon = partial(self._stager.send_small, ABANDON, number, force=True)
        with contextlib.suppress(PeerDied, TimedOut, ClosedError, _Over):
            self._call_with_room(abandon, time.monotonic() + _TAKE_BACK, save, over=True)
        self._saves.finish(number, status, error)


class Abandoned(Exception):
    """Raised when the caller of `CheckpointWriter.save` has abandoned the call."""


class _Over(Exception):
    """Raised when the save that is being staged has failed meanwhile."""


Marks = list[Any]
_ATTRIBUTES: Final = attrgetter("dtype", "layout", "shape", "device")


class Prepared(NamedTuple):
    """A plan with its bytes, its description, and the layout of the files."""

    plan: Plan
    described: bytes
    geometry: Geometry


class Geometry:
    """The part of a layout that does not depend on digests; cut into chunks once for each size."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self._size = layout, 0
        self._chunks: list[Chunk] = []
        self.single, self.nbytes = layout.single, layout.nbytes

    def chunks(self, size: int) -> list[Chunk]:
        """The layout in chunks of so many bytes."""
        if size != self._size:
            self._chunks, self._size = cut(self._layout, size), size
        return self._chunks

    def holds(self, description: bytes) -> bool:
        """Whether a plan of this description, of the same tensors and regions, is laid out in the same way."""
        return self._layout.holds is not None and self._layout.holds(description)


class PlanCache:
    """The cache of one writer. Thread-safe, and consistent after any exception: a thread takes the memory out, and puts
    it back when it is complete again. A thread that finds none plans from scratch."""

    def __init__(self, format: Format, max_shard: int | None) -> None:
        self._make = partial(_Memory, format, max_shard)
        self._kept: list[_Memory] = []

    @property
    def hits(self) -> int:
        """How often a state was planned from memory."""
        return self._kept[-1].hits if self._kept else 0

    def prepare(self, state: object, meta: dict[str, Any] | None) -> Prepared:
        """Plan a state. Raises as `plan` does."""
        try:
            memory = self._kept.pop()
        except IndexError:
            memory = self._make()
        prepared = memory.prepare(state, meta)
        if not self._kept:
            self._kept.append(memory)
        return prepared


class _Memory:
    """The last plan. For one thread at a time."""

    def __init__(self, format: Format, max_shard: int | None) -> None:
        self._format, self._max_shard = format, max_shard
        self._marks: Marks | None = None
        self._plan = Plan(None, [], [], None)
        self._spots: list[_Spot] = []
        self._described = b""
        self._geometry: Geometry | None = None
        self.hits = 0
        """How often a state was planned from memory."""

    def prepare(self, state: object, meta: dict[str, Any] | None) -> Prepared:
        """Plan a state. Raises as `plan` does."""
        if meta is not None:
            check_meta(meta)
        made = self._again(state, meta)
        if made is None:
            made = self._anew(state, meta)
        described = made.describe()
        if self._geometry is None or not (described == self._described or self._geometry.holds(described)):
            # of a plan without memory: a layout keeps its plan
            bare = made.renewed(made.tree, [Region(region.nbytes, region.align) for region in made.regions], meta)
            self._geometry = Geometry(self._format.layout(bare, self._max_shard))
        self._described = described
        return Prepared(made, described, self._geometry)

    def _again(self, state: object, meta: dict[str, Any] | None) -> Plan | None:
        if self._marks is None:
            return None
        outline = _Outline()
        try:
            tree = outline.encode(state)
            sources = [source for _, source in outline.leaves]
            marks = _marks([name for name, _ in outline.leaves], sources)
        except (ArgumentError, ArgumentTypeError, RuntimeError, NotImplementedError):
            return None  # a full plan reports the error, or can do it
        if marks is None or marks != self._marks:
            return None
        self.hits += 1
        return self._plan.renewed(tree, [spot.region(sources) for spot in self._spots], meta)

    def _anew(self, state: object, meta: dict[str, Any] | None) -> Plan:
        self._marks = self._geometry = None  # nothing is reused after an error
        encoder = Encoder()
        made = assemble(encoder.encode(state), encoder.leaves, meta)
        leaves = [leaf for _, leaf in encoder.leaves]
        if all(map(_is_usual, leaves)) and all(region.address or region.leaf >= 0 for region in made.regions):
            self._spots = [_Spot(each.nbytes, each.align, each.address, each.leaf) for each in made.regions]
            bare = [Region(each.nbytes, each.align) for each in made.regions]
            self._plan = made.renewed(None, bare, None)
            self._marks = _marks([name for name, _ in encoder.leaves], [leaf.source for leaf in leaves])
        return made


class _Spot(NamedTuple):
    """How to find a region again: at an address, or as the only leaf in it."""

    nbytes: int
    align: int
    address: int
    leaf: int

    def region(self, sources: Sequence[Any]) -> Region:
        """The region in a state with the same marks, whose sources it keeps alive."""
        nbytes, align, address, number = self
        if address:
            return Region(nbytes, align, partial(_memory, sources, address, nbytes), address)
        source = sources[number]
        return lone(array_leaf(source) if isinstance(source, np.ndarray) else torch_views().tensor_leaf(source))


def _memory(owners: Sequence[Any], address: int, nbytes: int) -> Array:
    """Host memory that belongs to some of the owners."""
    return array_at(address, nbytes)


class _Outline(Encoder):
    """A walk that collects tensors and arrays themselves instead of leaves. Refuses unusual types."""

    leaves: list[tuple[str, Any]]

    def _tensor(self, tensor: Any, name: str) -> Any:
        if type(tensor) not in torch_views().tensor_types():
            raise Refused(ArgumentTypeError, "of another type")
        # a tensor of our own: it keeps this memory even if the state's tensor is given other memory meanwhile
        return {"x": self._leaf(name, tensor.detach())}

    def _array(self, array: Array, name: str) -> int:
        return self._leaf(name, array)


def _is_usual(leaf: Leaf) -> bool:
    """Whether the marks describe a leaf completely: not so for parts of quantized tensors, and structured arrays."""
    if not leaf.torch:
        return leaf.dtype is not None and ROW.get(leaf.source.dtype) is leaf.dtype
    return torch_views().ROW.get(leaf.source.dtype) is leaf.dtype


def _marks(names: list[str], sources: Sequence[Any]) -> Marks | None:
    """The marks: everything that the plan depends on, without references to memory; None if it depends on more."""
    tensors = [source for source in sources if is_tensor(source)]
    kinds = [source.dtype if isinstance(source, np.ndarray) else None for source in sources]
    marks: Marks = [names, kinds]
    if tensors:
        views = torch_views()
        if any(map(views.is_neg, tensors)) or any(map(views.is_conj, tensors)):
            return None  # what is saved is a copy of their own memory
        marks += [
            list(map(views.data_ptr, tensors)), list(map(views.stride, tensors)), list(map(_ATTRIBUTES, tensors)),
            [storage.nbytes() for storage in map(views.untyped_storage, tensors)],
        ]  # fmt: skip
    marks.append([
        (address_of(source), source.shape, source.strides) for source in sources if isinstance(source, np.ndarray)
    ])  # fmt: skip
    return marks
