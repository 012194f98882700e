"""The calls of a client that have not ended: their replies, time-outs and cancellations.

A thread that waits for its own reply receives, and dispatches the replies of other calls to them (leader and
followers), so that a single thread's `request` costs no switch of threads. A thread of the library's own receives only
while there are futures and no other thread does.

Any thread that calls may be interrupted by an asynchronous exception: a call, a reply or a lock is taken from one place
and recorded in another in one C call, and the next caller finishes what an interrupted one has recorded.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from concurrent.futures import CancelledError
from time import monotonic, monotonic_ns
from typing import Any

from ..endpoints.base import LIVENESS_INTERVAL, check_timeout
from ..endpoints.message import Message
from ..errors import ArgumentTypeError, ClosedError, TimedOut
from .call import AutoResetEvent, Call, from_reply, late, unanswered
from .client_endpoints import Answers, Requests
from .client_threads import Driver, Notifier
from .sidecar import FOREVER, ONCE

_NO_WAIT = (False,)
"""The argument of a lock's `acquire` that does not wait."""


class CallsInFlight:
    """A client's calls from their start to their end, and the threads that wait for them."""

    def __init__(self, requests: Requests, answers: Answers) -> None:
        self.requests, self.answers = requests, answers
        self.calls = requests.calls
        """Calls that were posted and have not ended, by sequence number."""
        self.leading = threading.Lock()
        """Of the thread that receives."""
        self.followers: deque[AutoResetEvent] = deque()
        """Events of the threads that wait while another one receives."""
        self.received: list[Message] = []
        """Replies whose calls have not been looked up. Of the thread that receives."""
        self.ended: list[tuple[Call, Any, BaseException | None]] = []
        """Calls that were taken out of `calls`, with their ends. The C call that takes them out puts them here, so that
        a thread that is interrupted then leaves them to the next caller."""
        self.given_up: list[Call] = []
        """Calls that no thread waits for any more, and that may still be in `calls`."""
        self.driver, self.notifier = Driver(self), Notifier(self)
        self.check_due = 0.0
        self.nearest = 0  # no call of a future expires before
        self.has_submitted = False  # there are futures, or were
        self.replied = self.failed = self.cancelled = self.late = self.duplicates = 0

    def begin(self, timeout: float | None, retry: bool) -> Call:
        """A call that is to be posted now. What interrupted calls have left is finished first."""
        if self.given_up or self.ended:
            self.cancel_given_up()
        if retry is not True and retry is not False:
            raise ArgumentTypeError(f"retry must be True or False, not {retry!r}")
        if timeout is None:
            return Call(0, 0 if retry else ONCE)
        if type(timeout) is not float or not timeout >= 0:
            check_timeout(timeout)
        return Call(monotonic_ns() + int(timeout * 1e9) if timeout < FOREVER else 0, 0 if retry else ONCE)

    # --- waiting

    def wait(self, call: Call, timeout: float | None = None) -> None:
        """Wait until the call has ended, at most `timeout` seconds; receive meanwhile if no other thread does."""
        until = math.inf if timeout is None else monotonic() + timeout
        ends = min(until, call.deadline * 1e-9) if call.deadline else until
        if self.ended:
            self.finish_ended()
        while not call.done:
            leads: list[bool] = []
            try:
                leads.extend(map(self.leading.acquire, _NO_WAIT))  # taken and recorded in one C call
                while leads[0] and not call.done and monotonic() < ends:
                    self.receive(ends)
            finally:
                if leads and leads[0]:
                    self.leading.release()  # the first call
                    if self.followers or self.has_submitted:
                        self.promote()
            if not leads[0] and (now := monotonic()) < ends:
                self._follow(call, min(LIVENESS_INTERVAL, ends - now))
            if not call.done and (now := monotonic()) >= ends:
                if now >= until:
                    return
                self._expire()
                self.finish_ended()

    def _follow(self, call: Call, seconds: float) -> None:
        """Wait until the thread that receives has this call's reply, or makes this thread its successor."""
        event = call.event
        if event is None:
            event = call.event = AutoResetEvent()
        try:
            self.followers.append(event)
            if not call.done and self.leading.locked():  # else the thread that received may not have seen this one
                event.wait(seconds)
        finally:
            try:
                self.followers.remove(event)
            except ValueError:
                pass
            if call.done and not self.leading.locked():  # this thread may have been made the successor
                self.promote()

    def promote(self) -> None:
        """Let another thread receive: this one has stopped. Without, it would begin within `LIVENESS_INTERVAL`."""
        if not self.promote_follower():
            self.driver.wake()

    def promote_follower(self) -> bool:
        """Let the thread that has waited longest receive; False if none waits."""
        with contextlib.suppress(IndexError):
            self.followers[0].set()
            return True
        return False

    @property
    def has_futures(self) -> bool:
        """Whether any of the calls is a future's."""
        return any(call.future is not None for call in list(self.calls.values()))

    def until_nearest(self) -> float:
        """Seconds to receive before the next call may expire, at most `LIVENESS_INTERVAL`."""
        nearest = self.nearest
        return min(LIVENESS_INTERVAL, max(0.0, (nearest - monotonic_ns()) * 1e-9)) if nearest else LIVENESS_INTERVAL

    # --- receiving: one thread at a time

    def receive(self, until: float) -> None:
        """Wait for a reply and dispatch it to its call; check the other calls when that is due.

        Returns at `until`, on the clock of `monotonic`, at the latest.
        """
        if self.received or self.ended:  # by a thread that was interrupted
            self.dispatch()
            return
        try:
            message = self.answers.recv(timeout=min(LIVENESS_INTERVAL, max(0.0, until - monotonic())))
            self.received[:] = (message,)  # no call since it was taken
        except TimedOut:
            self.check_calls()
            return
        except ClosedError as error:  # by another thread, or in a signal handler of this one
            self.end_all(error)
            return
        del message
        self.dispatch()
        if monotonic() >= self.check_due:
            self.check_calls()

    def dispatch(self) -> None:
        """Give the replies that were received to their calls."""
        received = self.received
        while received:
            message = received[0]
            seq = self.answers.request_of(message)
            failed = message.meta is not None
            value, error = (None, from_reply(message.value, message.meta)) if failed else (message.value, None)
            if not self.end(seq, value, error):
                self.duplicates += 1
            del received[0]
        self.finish_ended()

    def end(self, seq: int, value: Any, error: BaseException | None) -> bool:
        """Move a call from `calls` to `ended`, for `finish_ended`; False if it has ended before."""
        try:
            end = zip(map(self.calls.pop, (seq,)), (value,), (error,), strict=False)
            self.ended.extend(end)  # out of the dict and into the list in one C call
        except KeyError:
            return False
        return True

    def finish_ended(self) -> None:
        """Finish the calls that have ended. Several threads may do so at once, and each may be interrupted."""
        ended = self.ended
        while ended:
            try:
                end = ended[0]
            except IndexError:
                break
            call, value, error = end
            if not call.done:
                if error is None:
                    self.replied += 1
                elif isinstance(error, CancelledError):
                    self.cancelled += 1
                elif not isinstance(error, ClosedError):
                    self.failed += 1
                    self.late += isinstance(error, TimedOut)
                call.finish(value, error)
            try:
                ended.remove(end)
            except ValueError:  # by another thread
                pass
            del call, value, error, end
        if self.notifier.due:
            self.notifier.wake()

    def check_calls(self) -> None:
        """End calls for which no reply will come: expired, refused by every server, or lost with their server."""
        self.check_due = monotonic() + LIVENESS_INTERVAL
        requests = self.requests
        self.cancel_given_up()
        self._expire()
        done = []
        for call in list(self.calls.values()):
            if requests.is_done(call) or (
                call.bits & ONCE and requests.was_taken(call) and requests.withdraw(call, taken=True)
            ):
                done.append(call)
        if done:
            try:
                while True:  # a reply comes before its `done`: those that are there now have none, or are among these
                    message = self.answers.recv(timeout=0)
                    self.received[:] = (message,)
                    del message
                    self.dispatch()
            except (TimedOut, ClosedError):
                pass
        for call in done:
            if not call.done:
                self.end(call.seq, None, unanswered(requests, call, self.answers.unread()))
        self.finish_ended()

    def expire(self, call: Call) -> None:
        """End a call whose time is up, without finishing it."""
        error = late(self.requests, call)  # before `cancel`, which may finish it
        self.requests.cancel(call)
        self.end(call.seq, None, error)

    def _expire(self) -> None:
        """End the calls whose time is up, without finishing them."""
        for call in list(self.calls.values()):
            if call.deadline and monotonic_ns() >= call.deadline:
                self.expire(call)
        self.nearest = min((call.deadline for call in list(self.calls.values()) if call.deadline), default=0)

    # --- giving up

    def give_up(self, call: Call) -> None:
        """Cancel a call that nothing waits for any more. Callers that raise append to `given_up` themselves."""
        self.given_up.append(call)
        self.cancel_given_up()

    def cancel_given_up(self) -> None:
        """Withdraw the requests of calls that were given up, and finish what interrupted calls have left."""
        given_up = self.given_up
        while given_up:
            try:
                call = given_up[0]
            except IndexError:
                break
            if call.seq and self.calls.get(call.seq) is call:
                if not self.requests.closed:
                    self.requests.cancel(call)
                self.end(call.seq, None, CancelledError())
            try:
                given_up.remove(call)
            except ValueError:
                pass
        self.finish_ended()

    def end_all(self, error: BaseException) -> None:
        """End and finish every call with a `ClosedError`."""
        for call in list(self.calls.values()):
            self.end(call.seq, None, ClosedError(str(error)))
        self.finish_ended()

    def cancel_all(self) -> None:
        """Withdraw every request; the calls have not ended yet."""
        if not self.requests.closed:
            for call in list(self.calls.values()):
                self.requests.cancel(call)

    # --- closing

    def close(self) -> None:
        """Close both endpoints, end every call with `ClosedError`, and stop the threads. Every step may be repeated."""
        self.cancel_all()
        self.requests.close()
        self.answers.close()
        self.driver.stop()
        self.end_all(ClosedError(f'Client of service "{self.requests.name}" is closed'))
        self.promote()
        self.notifier.stop()

    async def aclose(self) -> None:
        """`close` for asyncio: the loop does not wait for threads that are inside a call."""
        ends = self.requests, self.answers
        self.cancel_all()
        self.driver.stop(wait=False)
        for end in ends:
            end.refuse_calls()
        try:
            for end in ends:
                await end.until_idle()
            await self.driver.ended()
        finally:
            self.close()
