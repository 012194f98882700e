"""A process of the relay's tests: says what happens, one JSON list a line; ends when it is asked to."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from typing import Any


def say(*what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def wait_for_end() -> None:
    wait_for("end")


def wait_for(word: str) -> bool:
    """False: that of the end came instead."""
    for line in sys.stdin:
        if line in ("end\n", f"{word}\n"):
            return line == f"{word}\n"
    return False


def relay(*, crash: list[Any] | None = None, also: dict[str, Any] | None = None, **options: Any) -> None:
    """A relay. `crash`: point, action, and at which time that it comes by. `also`: of another relay in this process."""
    if crash is not None:
        from ..faults import points

        points.install()
        points.arm(*crash)
    import shmtensor

    with contextlib.ExitStack() as stack:
        if also is not None:
            stack.enter_context(shmtensor.Relay(also.pop("name"), **also))
        made = stack.enter_context(shmtensor.Relay(options.pop("name"), **options))
        say("ready", 0)

        def report() -> None:
            try:
                made.wait(120)
                say("connected", 0)
            except shmtensor.ShmTensorError as error:
                say("error", str(error))

        threading.Thread(target=report, daemon=True).start()
        more = True
        while more:
            more = wait_for("statistics")
            say("statistics", {name: vars(it) for name, it in made.statistics().items()})


def receive(*, channel: str, kind: str, count: int, waits: bool = False, **options: Any) -> None:
    """Receive so many different numbers, and say each, with when it came. `waits`: begin when it is asked to."""
    import shmtensor

    seen = set()
    with getattr(shmtensor, kind)(channel, until="closed", **options) as end:
        say("ready", 0)
        if waits and not wait_for("go"):
            return
        while len(seen) < count:
            with end.recv(timeout=120) as message:
                number = int(message.value["number"])
                assert (message.value["data"] == number % 251).all()
                seen.add(number)
                say("got", number, time.monotonic())
                del message
        wait_for_end()


def send(
    *, channel: str, kind: str, first: int, count: int, nbytes: int = 100, every: float = 0.0, **options: Any
) -> None:
    """Send so many numbers, one in `every` seconds at most. Says at which of them there was no slot for a second."""
    import numpy as np

    import shmtensor

    with getattr(shmtensor, kind)(channel, **options) as end:
        say("ready", 0)
        if not wait_for("go"):
            return
        pause = threading.Event()
        for number in range(first, first + count):
            value = {"number": number, "data": np.full(nbytes, number % 251, np.uint8)}
            try:
                end.send(value, timeout=1.0)
            except shmtensor.RingFull:
                say("full", number)
                end.send(value)
            pause.wait(every) if every else None
        say("sent", count)
        wait_for_end()


def request(*, channel: str) -> None:
    """Send a request, and wait for its reply."""
    import shmtensor

    with shmtensor.Client(channel) as client:
        say("ready", 0)
        say("got", client.request({"number": 0}))


def ask(*, channel: str, count: int, nbytes: int = 100, slots: int = 16) -> None:
    """Send so many requests, as many at a time as there are slots, and say each reply, with when it came."""
    import numpy as np

    import shmtensor

    with shmtensor.Client(channel, slots=slots) as client:
        say("ready", 0)
        if not wait_for("go"):
            return
        requests = ({"number": number, "data": np.full(nbytes, number % 251, np.uint8)} for number in range(count))
        for number, reply in enumerate(client.map(requests)):
            assert reply["number"] == number
            assert len(reply["data"]) == nbytes
            assert (reply["data"] == number % 251).all()
            say("got", number, time.monotonic())
        wait_for_end()


def serve(*, channel: str, crash: list[Any] | None = None, waits: bool = False) -> None:
    """Answer requests with what they hold, and say each, with how often it was taken. `waits`: each when asked to."""
    if crash is not None:
        from ..faults import points

        points.install()
        points.arm(*crash)
    import shmtensor

    with shmtensor.Server(channel) as server:
        threading.Thread(target=lambda: wait_for_end() or server.stop(), daemon=True).start()
        say("ready", 0)
        for request in server:
            say("took", [int(request.value["number"]), request.attempt])
            if waits:
                threading.Event().wait()
            request.reply(request.value)
            say("replied", 0)


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
