"""Requests over a relay, the far side: a client on the servers' host, which passes replies back to the near relay.

posted -> ended (a reply, a verdict, withdrawn) -> sent -> confirmed; docs/internals/relay.md.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from ..channel.names import reply_channel
from ..codec.encode import encode
from ..endpoints.base import LIVENESS_INTERVAL
from ..endpoints.message import Message
from ..errors import ClosedError
from ..rpc.endpoints import FAILED, ONCE
from ..rpc.request import MOST_TEXT
from .endpoints import FarCall, FarRequestSender, Filling, NearReplyReceiver, count_servers
from .frames import (
    DIED,
    DROPPED,
    EXPIRED,
    NOTE,
    REPLY,
    RETURNED,
    WORN,
    Cancel,
    Item,
    Part,
    ReplyNote,
    State,
    Status,
    request_note,
)
from .sending import ItemSender
from .threads import RelayThread
from .window import Outgoing

log = logging.getLogger("shmtensor.relay")


class _Ended:
    """The end of a request on this host, as an item to send: a reply, or the reason why there is none."""

    def __init__(
        self, number: int, end: int, attempts: int, message: Message | None = None, described: bytes = b""
    ) -> None:
        self.number, self._message = number, message
        self._described = ReplyNote(end, attempts).pack() + described

    def read(self) -> tuple[Any, bytes]:
        """Payload and description, to be sent."""
        message = self._message
        return (b"", self._described) if message is None else (message.value, self._described + message.meta)

    def release(self) -> None:
        """Release it: the near relay has received it."""
        if self._message is not None:
            self._message.release()


class FarClient:
    """Posts the requests of one near client, and receives their replies."""

    def __init__(self, service: FarService, name: str, *, slots: int | None, max_bytes: Any, label: str) -> None:
        self._service = service
        self.requests = FarRequestSender(name, slots=slots, max_bytes=max_bytes, full="grow", label=label)
        try:
            self.answers = NearReplyReceiver(reply_channel(name, self.requests.uid), spin=0.0)
        except BaseException:
            self.requests.close()
            raise
        service.add(self)

    @property
    def calls(self) -> dict[int, FarCall]:
        """The requests that are posted and have not ended, by their sequence numbers."""
        return self.requests.calls  # type: ignore[return-value]

    def forward(self, item: Item, timeout: float) -> int:
        """Post a whole request. Raises `RingFull`."""
        call = self._service.begin(item.number, item.description)
        self.requests.post_request(call, item.payload, item.description[NOTE:], timeout)
        # crash: relay.posted
        self._service.note_posted(self, call)
        return call.seq

    def fill(self, first: Part, timeout: float) -> _FillingRequest:
        """A slot for a request that comes in parts. Raises `RingFull`."""
        call = self._service.begin(first.number, first.description)
        filling = self.requests.fill_request(call, first.description[NOTE:], first.nbytes, timeout)
        return _FillingRequest(filling, lambda: self._service.note_posted(self, call))

    def close(self) -> None:
        """Cancel the client's requests, since it has left the near channel."""
        self._service.remove(self)
        self.requests.close()
        self.answers.close()


class _FillingRequest:
    """A request that comes in parts."""

    def __init__(self, filling: Filling, posted: Callable[[], None]) -> None:
        self._filling, self._posted = filling, posted

    @property
    def nbytes(self) -> int:
        return self._filling.nbytes

    @property
    def filled(self) -> int:
        return self._filling.filled

    def add(self, payload: memoryview) -> None:
        self._filling.add(payload)

    def finish(self) -> int:
        seq = self._filling.finish()
        # crash: relay.posted
        self._posted()
        return seq


_SLICE_NS: Final = 20_000_000
_SLICES: Final = 50
"""Of these the one counts in which servers took the most requests: a second."""
_SLICE_S: Final = 0.01
_POLL_S: Final = 0.001
_SLOW_S: Final = 0.005
_PROGRESS_S: Final = 0.05
_IDLE_S: Final = 1.0
_SILENCE_S: Final = 3.0
"""Seconds without a confirmation that can be true, which comes each second, after which replies are sent anew."""
_STATUS_S: Final = 1.0
_FOREVER: Final = 1 << 30
_DECLINED: Final = 'service "{}": the far host has no room for this request: {}'


class FarService:
    """The requests of one near relay at the far one: what was posted, how it ended, what the near relay has of that.

    Replies are taken and sent by a thread of its own; requests are posted by the stream's.

    Args:
        name: the service.
        near, far: for frames.
        nbytes: the window.
        path: the hash of the near channel.
        put: sends a frame to the near relay.
        acknowledge: the near relay has what ended the items of these numbers.
    """

    def __init__(
        self,
        name: str,
        near: int,
        far: int,
        nbytes: int,
        path: int,
        put: Callable[[bytes, bytes], None],
        acknowledge: Callable[[Sequence[int]], None],
    ) -> None:
        self._name, self._near, self._far, self._nbytes = name, near, far, nbytes
        self._path, self._put, self._acknowledge = path, put, acknowledge
        self._paths: set[tuple[int, ...]] = {(path,)}
        self.servers = 0
        self.arrived_ns = 0
        """When the frame came whose requests are posted now."""
        self._changed = threading.Condition()
        self._clients: list[FarClient] = []
        self._unwanted: set[int] = set()  # cancelled before they were posted
        self._ended: dict[int, _Ended] = {}  # not confirmed, by the number of the request
        self._new: list[_Ended] = []  # not sent
        self._attempt = self._current = 0  # of what was sent last; of the near relay, once it is open
        self._window: Outgoing[_Ended] = Outgoing()
        self._sender: ItemSender[_Ended] | None = None
        self._check_due = self._progress = self._confirmed = self._status_due = 0.0
        self._said = 0  # so many STATUS
        self._stop = self._posted = False
        self._taken: set[int] = set()  # numbers of requests that were seen to be taken, and have not ended
        self._slices: deque[list[int]] = deque()  # number of a slice of time, and how many were taken in it
        self._thread: threading.Thread | None = None

    # --- the stream's thread

    def start(self) -> None:
        """Begin, unless that is done. Raises `RuntimeError` if there is no thread for it."""
        if self._thread is None:
            thread = RelayThread(self._run, f"shmtensor relay {self._name} replies")
            thread.start()
            self._thread = thread

    def add(self, client: FarClient) -> None:
        """Add a near client, whose requests will come."""
        with self._changed:
            self._clients.append(client)

    def remove(self, client: FarClient) -> None:
        """Remove a near client that has left."""
        with self._changed:
            if client in self._clients:
                self._clients.remove(client)
            numbers = [call.number for call in client.calls.values()]
            self._taken.difference_update(numbers)
        self._acknowledge(numbers)

    def begin(self, number: int, description: bytes) -> FarCall:
        """The call of a request that is to be posted. Raises `WireError`."""
        note = request_note(description)
        return FarCall(number, self.arrived_ns + note.remaining if note.remaining else 0, note.bits, note.attempts)

    def note_posted(self, client: FarClient, call: FarCall) -> None:
        """A request is posted."""
        with self._changed:
            is_unwanted = call.number in self._unwanted
            self._unwanted.discard(call.number)
            self._posted = True
            self._progress = time.monotonic()
            self._changed.notify_all()
        if is_unwanted:
            client.requests.cancel(call)

    def decline(self, number: int, why: str) -> None:
        """A request cannot be posted: its client gets an error that says why."""
        error = {"type": "NoRoom", "text": _DECLINED.format(self._name, why)[:MOST_TEXT], "traceback": ""}
        out = encode(error, {FAILED: True})
        with self._changed:
            self._unwanted.discard(number)
            self._add_end(_Ended(number, REPLY, 0, described=bytes(out.description)))
            self._changed.notify_all()

    def note_paths(self, paths: Iterable[Sequence[int]]) -> None:
        """The requests come through the channels of these hashes, and the near one: what leads back there takes none of
        them."""
        self._paths = {(*path, self._path) for path in paths} or {(self._path,)}

    def look_for_servers(self) -> None:
        """Count the servers; they are as many as before if that cannot be done now. Raises `ArgumentError` if this is
        no service."""
        found = count_servers(self._name, self._paths)
        if found is not None:
            self.servers = found

    def credit(self) -> int:
        """How many more requests the near relay may send: docs/internals/relay.md."""
        untaken = self._untaken()
        if not self.servers:
            return 0
        return max(0, max([self.servers, *(2 * count for _, count in list(self._slices))]) - untaken)

    @property
    def has_untaken(self) -> bool:
        """Whether a request was posted that no server has begun with."""
        return self._untaken() > 0

    def _untaken(self) -> int:
        untaken = 0
        with self._changed:
            self._count_taken(0)
            for client in self._clients:
                for call in list(client.calls.values()):
                    if call.number in self._taken:
                        continue
                    if client.requests.was_taken(call):
                        self._taken.add(call.number)
                        self._count_taken(1)
                    else:
                        untaken += 1
        return untaken

    def _count_taken(self, count: int) -> None:
        slices, now = self._slices, time.monotonic_ns() // _SLICE_NS
        while slices and slices[0][0] <= now - _SLICES:
            slices.popleft()
        if count and (not slices or slices[-1][0] != now):
            slices.append([now, 0])
        if count:
            slices[-1][1] += count

    def open(self, attempt: int) -> None:
        """The near relay takes replies in this attempt."""
        with self._changed:
            if attempt != self._current:
                self._current = attempt
                self._changed.notify_all()

    # --- Zenoh's threads

    def confirm(self, frame: State) -> None:
        """Note that the near relay has received replies. Raises `WireError`."""
        with self._changed:
            if frame.attempt != self._attempt:
                return
            done = self._window.acknowledge(frame.acknowledged, (), frame.consumed)
            for it in done:
                self._ended.pop(it.number, None)
            self._confirmed = time.monotonic()
            self._changed.notify_all()
        # crash: relay.confirmed
        for it in done:
            it.release()
        if done:
            self._acknowledge([it.number for it in done])

    def is_unheard(self, attempt: int) -> bool:
        """Whether replies are under way in that attempt, and the near relay says nothing of them that can be true."""
        with self._changed:
            is_late = time.monotonic() - self._confirmed > _SILENCE_S
            return is_late and self._attempt == attempt and len(self._window) > 0

    def cancel(self, frame: Cancel, received: int) -> None:
        """Cancel these requests: their replies are not wanted."""
        numbers = set(frame.numbers)
        with self._changed:
            found = [(it, call) for it in self._clients for call in list(it.calls.values()) if call.number in numbers]
            self._unwanted |= {number for number in numbers if number > received}
            while len(self._unwanted) > 1 << 16:
                self._unwanted.pop()
        for client, call in found:
            call.is_cancelled = True
            with contextlib.suppress(ClosedError):
                client.requests.cancel(call)

    # --- its own thread

    def _run(self) -> None:
        while not self._stop:
            try:
                self._take_replies()
                if time.monotonic() >= self._check_due:
                    self._check_due = time.monotonic() + LIVENESS_INTERVAL
                    for client in list(self._clients):
                        self._check_calls(client)
                self._send()
                self._wait()
            except Exception:
                log.exception("relay of channel %s: replies are held up by an error", self._name)
                with self._changed:
                    self._changed.wait(LIVENESS_INTERVAL)

    def _take_replies(self) -> None:
        for client in list(self._clients):
            self._take_from(client, 0)

    def _take_from(self, client: FarClient, timeout: float) -> None:
        """Take the replies to one client that are there, or the first one that comes in time."""
        try:
            while (message := client.answers.next(timeout)) is not None:
                call = client.calls.pop(client.answers.request_of(message), None)
                if call is None:
                    message.release()  # it has ended before
                else:
                    # crash: relay.replied
                    self._note_end(_Ended(call.number, REPLY, 0, message))
                timeout = 0
                del message
        except ClosedError:  # the stream has closed it
            pass

    def _note_end(self, ended: _Ended) -> None:
        with self._changed:
            if ended.number in self._taken:
                self._taken.discard(ended.number)
            else:
                self._count_taken(1)
            self._add_end(ended)

    def _add_end(self, ended: _Ended) -> None:
        self._ended[ended.number] = ended
        self._new.append(ended)
        self._progress = time.monotonic()

    def _check_calls(self, client: FarClient) -> None:
        """Find the calls of a client for which no reply will come."""
        requests, calls = client.requests, list(client.calls.values())
        if not calls or requests.closed:
            return
        is_alone = not self.servers and count_servers(self._name, self._paths) == 0
        over = []
        for call in calls:
            was_taken = requests.was_taken(call)
            if requests.is_done(call) or (call.bits & ONCE and was_taken and requests.withdraw(call, taken=True)):
                over.append(call)
            elif is_alone and requests.withdraw(call):
                call.is_returned = not (call.bits & ONCE and was_taken)
                over.append(call)
        if over:
            self._take_from(client, 0)  # a reply comes before its `done`: it is there now, or there is none
        for call in over:
            if client.calls.pop(call.seq, None) is not None:
                self._note_end(_Ended(call.number, *self._verdict(client, call)))

    def _verdict(self, client: FarClient, call: FarCall) -> tuple[int, int]:
        """Why a request has no reply, and how many servers have had it."""
        code, attempts = client.requests.verdict(call)
        if code:
            return code, attempts
        if call.is_returned:
            return RETURNED, attempts
        if call.is_cancelled or (call.deadline and time.monotonic_ns() >= call.deadline):
            return EXPIRED, attempts
        unread = client.answers.unread()
        if unread is not None:
            log.error("relay of channel %s: a reply cannot be read: %s", self._name, unread)
            return DROPPED, attempts
        return (DIED if call.bits & ONCE or not attempts else WORN), attempts

    def _send(self) -> None:
        """Send what the near relay has not confirmed: what is new, or all of it when it has begun anew."""
        with self._changed:
            attempt = self._current
            if not attempt:
                return
            if attempt != self._attempt:
                self._attempt, self._window = attempt, Outgoing()
                self._window.begin(_FOREVER, self._nbytes, 0)
                self._sender = ItemSender(
                    (self._near, self._far, attempt), 0, (), self._window, lock=self._changed,
                    read=_Ended.read, origin=lambda it: it.number,
                    claim=lambda nbytes: self._claim(attempt, nbytes), put=self._put,
                )  # fmt: skip
                ended = list(self._ended.values())
            else:
                ended = self._new
            self._new = []
            if not len(self._window):
                self._confirmed = time.monotonic()
            entries = self._window.add(ended)
            sender = self._sender
        if sender is not None:
            sender.add(entries)
            sender.send()
            self._report(attempt)

    def _report(self, attempt: int) -> None:
        """Say each second what was sent, while it is not confirmed: so the near relay sees what is lost."""
        now = time.monotonic()
        with self._changed:
            if now < self._status_due or not len(self._window) or self._sender is None or self._current != attempt:
                return
            self._status_due = now + _STATUS_S
            self._said += 1
            frame = Status(self._near, self._far, attempt, self._said, self._sender.after, self._window.sent_bytes, ())
        self._put(frame.head(), b"")

    def _claim(self, attempt: int, nbytes: int) -> bool:
        """Wait for credit for so many bytes. False: the attempt is over."""
        with self._changed:
            while not self._stop and self._current == attempt:
                if self._window.may_send(nbytes):
                    self._window.note_sent(nbytes)
                    return True
                self._changed.wait(LIVENESS_INTERVAL)
                self._report(attempt)
        return False

    def _wait(self) -> None:
        """Wait until there may be something to do."""
        with self._changed:
            if self._stop or self._new or self._current != self._attempt:
                return
            busy = [it for it in self._clients if it.calls]
            if not busy:
                if not self._posted:
                    self._changed.wait(LIVENESS_INTERVAL if len(self._window) else _IDLE_S)
                self._posted = False
                return
            if len(busy) > 1:
                is_recent = time.monotonic() - self._progress < _PROGRESS_S
                self._changed.wait(_POLL_S if is_recent else _SLOW_S)
                return
        self._take_from(busy[0], _SLICE_S)

    def stop(self) -> None:
        """Send nothing more."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        with self._changed:
            ended = list(self._ended.values())
            self._ended.clear()
        for it in ended:
            it.release()
