"""What a relay's window allows on a link with delay: a simulation in virtual time, with the relay's own book-keeping.

    python -m benchmarks.relay_window

Both sides keep their books by `shmtensor.relay.window`, and split, gather and acknowledge as the relay does. The link
has a rate and a delay and loses nothing, as TCP makes it look; copying takes no time. docs/internals/relay.md shows the
output.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from shmtensor.relay.relay import WINDOW, WINDOW_BYTES
from shmtensor.relay.sending import BATCH, PART
from shmtensor.relay.window import Incoming, Outgoing

from .sizes import KIB, MIB, label

RATE = 10e9 / 8
"""Bytes a second: 10 Gbit/s."""
DELAYS = (0.001, 0.01, 0.1)
"""Seconds, one way."""
SIZES = (KIB, 64 * KIB, MIB, 16 * MIB)
WINDOWS = ((16, WINDOW_BYTES), (WINDOW, WINDOW_BYTES), (4096, 256 * MIB))
"""The first is what one sender whose ring has 16 slots makes of the second: each message under way holds one."""
TRIPS = 60
"""Round trips that are simulated. The first ones fill the window: the second half of the time counts."""

Frame = tuple[int, int, int]
"""Bytes, how many items are whole with it, and the number of the last of these."""


class Simulation:
    """A near relay that always has messages, a far one that takes everything at once, and the link between them."""

    def __init__(self, nbytes: int, delay: float, window: tuple[int, int]) -> None:
        self._nbytes, self._delay, self._now, self._link_free, self._count = nbytes, delay, 0.0, 0.0, 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._out, self._in = Outgoing[None](), Incoming()
        self._in.start_at(1)
        self._out.begin(*window, 0)
        self._frames = self._make_frames()
        self._frame: Frame | None = None

    def _at(self, when: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, call))

    def _make_frames(self) -> Iterator[Frame | None]:
        """Small items together, large ones in parts; None while there is no credit for a message."""
        while True:
            count = 0
            while count < max(1, BATCH // self._nbytes) and self._out.may_add():
                self._out.add([None])
                count += 1
            if not count:
                yield None
            elif self._nbytes <= BATCH:
                yield count * self._nbytes, count, self._out.newest
            else:
                for rest in range(self._nbytes, 0, -PART):
                    yield min(PART, rest), int(rest <= PART), self._out.newest

    def _send(self) -> None:
        """What there is credit for."""
        while True:
            self._frame = frame = self._frame or next(self._frames)
            if frame is None or not self._out.may_send(frame[0]):
                return
            self._frame = None
            self._out.note_sent(frame[0])
            self._link_free = max(self._link_free, self._now) + frame[0] / RATE
            self._at(self._link_free + self._delay, lambda frame=frame: self._arrive(*frame))  # type: ignore[misc]

    def _arrive(self, nbytes: int, count: int, last: int) -> None:
        self._in.consumed += nbytes
        for number in range(last - count + 1, last + 1):
            self._in.receive(number)
            self._in.acknowledge(number)
        state = self._in.acknowledged, (), self._in.consumed

        def on_state() -> None:
            self._out.acknowledge(*state)
            self._send()

        self._at(self._now + self._delay, on_state)

    def run(self) -> float:
        """Bytes a second."""
        self._send()
        seconds = TRIPS * (2 * self._delay + self._nbytes / RATE)
        half = 0
        while self._events and self._events[0][0] < seconds:
            self._now, _, call = heapq.heappop(self._events)
            if self._now < seconds / 2:
                half = self._in.consumed
            call()
        return (self._in.consumed - half) / (seconds / 2)


def main() -> None:
    print(f"{'window':>16}  {'message':>8}" + "".join(f"{1000 * delay:>11g} ms" for delay in DELAYS))
    for window in WINDOWS:
        for nbytes in SIZES:
            cells = [Simulation(nbytes, delay, window).run() for delay in DELAYS]
            name = f"{window[0]}, {label(window[1])}"
            print(f"{name:>16}  {label(nbytes):>8}" + "".join(f"{cell / 1e6:>9.4g} MB/s" for cell in cells))


if __name__ == "__main__":
    main()
