"""The parent's side of a pool: the two channels it shares with its workers, and the calls that are on their way."""

from __future__ import annotations

import _thread
import os
import secrets
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from concurrent.futures._base import CANCELLED_AND_NOTIFIED, LOGGER, PENDING
from typing import Any, Final

from ..calls import Condition, aside
from ..errors import RingFull
from .arrivals import Arrival, Arrivals
from .parcels import Inbox, Outbox, Parcel
from .streams import loads, nbytes_of
from .worker import COPY_MOST, NOTHING, Address, Packed, inline, unfold

AT_ONCE_MOST: Final = 4 << 20
"""Calls [bytes] up to here are copied into their slot by the thread that also takes results; larger ones hold it up."""


class WouldWait(Exception):
    """A call cannot be sent at once: there is no room now, or copying it takes long."""


class Task(Future[Any]):
    """What `submit` returns. What runs it is an attempt (`Shipment`); a retry is another one.

    A task that is cancelled does not cancel its attempt: a worker gets an empty call instead. (Before Python 3.12 a
    cancelled future that waits when the pool breaks ends the management thread, and all others wait for ever.)

    An exception from outside leaves no lock behind and no one uninformed: `cancel` finishes what it has begun.
    """

    _state: str
    _waiters: list[Any]
    _done_callbacks: list[Callable[[Future[Any]], object]]

    def __init__(self, value: list[Any]) -> None:
        super().__init__()
        self._condition = Condition()
        self.value: list[Any] | None = value
        """The pickled call, until the task is over: its tensors are the caller's own, no copies."""
        self._arrival: Arrival | None = None
        self.deaths = 0
        """How many workers died at it."""
        self._reported = False
        """That it was cancelled, to those who wait by `concurrent.futures.wait` and the like."""

    def cancel(self) -> bool:
        """Cancel the call if no worker was chosen for it yet. True if it is cancelled."""
        try:
            return self._cancel()
        except BaseException:
            self._cancel()
            raise

    def _cancel(self) -> bool:
        """May be interrupted, and called again."""
        with self._condition:
            if self._state == PENDING:
                self._state = CANCELLED_AND_NOTIFIED  # whoever waits for it need not wait for the executor to come by
            elif self._state != CANCELLED_AND_NOTIFIED:
                return False
            self._condition.notify_all()
        self.value = None
        if self._waiters and not self._reported:
            aside(self._report, "shmtensor cancelled", wait=False)
        self._invoke_callbacks()
        return True

    def _report(self) -> None:
        with self._condition:
            if not self._reported:
                self._reported = True
                for waiter in self._waiters:
                    waiter.add_cancelled(self)

    def _invoke_callbacks(self) -> None:
        """Call each once, also where it is called again after an exception."""
        callbacks = self._done_callbacks
        while callbacks:
            callback = callbacks[0]  # from here until it is called nothing can be interrupted, nor another thread run
            del callbacks[0]
            try:
                callback(self)
            except Exception:
                LOGGER.exception("exception calling callback for %r", self)

    def begin(self) -> bool:
        """A worker was chosen; whether there is anything to run. Nothing is if it was cancelled, or its pool broke."""
        with self._condition:
            if self._state == PENDING:
                self.set_running_or_notify_cancel()
        return self.running()

    def finish(self, result: object, arrival: Arrival | None = None) -> None:
        """The call returned; `arrival` if tensors of the result are on their way to a device."""
        self.value = None
        self._arrival = arrival
        self.set_result(result)

    def result(self, timeout: float | None = None) -> Any:
        """As for the standard future. Tensors on a device are safe on the stream that is current here."""
        result = super().result(timeout)
        if self._arrival is not None:
            self._arrival.hand_over()
        return result

    def fail(self, error: BaseException) -> None:
        """The call raised, or cannot be run."""
        self.value = None
        try:
            self.set_exception(error)
        except InvalidStateError:  # cancelled just now
            pass


class Depot:
    """Both ends of a pool's parcels in the parent. Owns an endpoint on each channel until it is closed or dropped."""

    def __init__(self, max_bytes: int | None, arrivals: Arrivals | None, *, slots_only: bool) -> None:
        name = f"executor-{os.getpid()}-{secrets.token_hex(4)}"
        self._max_bytes, self._arrivals, self._slots_only = max_bytes, arrivals, slots_only
        self._outbox = Outbox(f"{name}.calls", max_bytes)
        try:
            self._inbox = Inbox(f"{name}.results")
        except BaseException:
            self._outbox.close()
            raise
        self._under_way: set[Shipment] = set()
        self.address = Address(f"{name}.calls", f"{name}.results", self._outbox.index, max_bytes)

    def ship(self, shipment: Shipment, wait: bool) -> Packed:
        """Put a call into a slot, or make it fit to go without one.

        If there is no room: waits as long as other calls are under way, then raises `ResourceError`. Without `wait`,
        raises `WouldWait`.
        """
        value = shipment.task.value
        if value is None or not shipment.task.begin():
            return NOTHING
        packed = None if self._slots_only else inline(value)
        if packed is not None:
            return packed
        holder = "calls that run, and by arguments that workers keep"
        try:
            if wait:
                shipment.parcel = self._outbox.post(value, lambda: self._may_get_room(shipment), "a call", holder)
            elif nbytes_of(value) <= AT_ONCE_MOST:
                shipment.parcel = self._outbox.post_now(value)
            else:
                raise WouldWait
        except RingFull:
            raise WouldWait from None
        except Exception:
            if shipment.over:
                return NOTHING  # to raise would be to wait for a lock of the pool that broke meanwhile
            raise
        self._under_way.add(shipment)
        return shipment.parcel

    def _may_get_room(self, shipment: Shipment) -> bool:
        return bool(self._under_way) and not shipment.over

    def arrived(self, shipment: Shipment) -> None:
        """An attempt is over, however it ended."""
        shipment.over = True
        self._under_way.discard(shipment)

    def killed(self, shipment: Shipment) -> bool:
        """Whether a worker took the call and died; asked while the other workers still live."""
        return shipment.parcel is not None and self._outbox.was_lost(shipment.parcel)

    def open(self, packed: Packed | None) -> tuple[Any, Arrival | None]:
        """The object that a worker sent. Large tensors and arrays in it are the worker's slot, or on their way to the
        device: then there is an arrival."""
        if isinstance(packed, bytes):
            return unfold(packed), None
        if packed is None:
            raise AttributeError("the call raised an exception that is false as a truth value")
        message = self._inbox.take(packed)
        try:
            value = message.copy() if message.nbytes <= COPY_MOST else message.value
            if self._arrivals is None:
                return loads(value), None
            value, arrival = self._arrivals.bring(value, self._inbox)
            return loads(value), arrival
        finally:
            message.release()

    def close(self) -> None:
        """Leave both channels. Results that are alive stay valid. Idempotent."""
        self._outbox.close()
        self._inbox.close()

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self.close()


class Shipment:
    """A call on its way: the standard executor carries this, up to where the call is sent (`lines.py`).

    That is when a worker will have time for it soon and not in `submit`, so that a thousand calls that wait take no
    slots. To the standard executor it is also the future of the call: it asks whether to begin, and says how it ended.
    """

    parcel: Parcel | None = None
    over = False
    """Whether the attempt has ended: its pool broke before it was sent."""

    def __init__(self, depot: Depot, task: Task, settle: Callable[[Shipment, Packed | None, Any], None]) -> None:
        self.depot, self.task, self._settle = depot, task, settle
        self.begun = False
        self._end = _thread.allocate_lock()

    def ship(self, wait: bool) -> Packed:
        """See `Depot.ship`."""
        return self.depot.ship(self, wait)

    # --- as the standard executor's future, for its management thread and that of `CallLine`

    def set_running_or_notify_cancel(self) -> bool:
        """Begin, unless it was cancelled."""
        self.begun = True
        return not self.over

    def cancel(self) -> bool:
        """`shutdown` ends what has not begun."""
        if self.begun:
            return False
        self._ended(None, CancelledError())
        return True

    def set_result(self, packed: Packed) -> None:
        """The worker has sent this."""
        self._ended(packed, None)

    def set_exception(self, error: BaseException) -> None:
        """The call raised this, or cannot be run."""
        self._ended(None, error)

    def _ended(self, packed: Packed | None, error: BaseException | None) -> None:
        if self._end.acquire(False):  # two threads of a pool that breaks may come
            try:
                self._settle(self, packed, error)
            except Exception:
                LOGGER.exception("exception at the end of a call")
