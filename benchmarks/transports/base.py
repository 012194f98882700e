"""What a transport must offer to be measured: a one-way link that sends one and receives one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import shmtensor

PAIR = "pair"
"""One sender, one receiver."""
FAN_OUT = "fan-out"
"""One sender, every receiver gets every message."""
FAN_IN = "fan-in"
"""Several senders, one receiver."""
WORK_QUEUE = "work queue"
"""One sender, each message goes to one of several receivers."""
ANY_OBJECT = "any object"
"""One `put`, one `get`, of any object that pickles."""


@dataclass(frozen=True)
class LinkSettings:
    """What every transport is asked for alike."""

    name: str
    """Unique name of the channel, service or socket."""
    nbytes: int
    """Payload bytes of a message."""
    in_flight: int = 16
    """Messages that may be sent and not yet received; the sender then waits."""
    awake: bool = True
    """Whether a receiver that can choose polls (True) or sleeps (False) while it waits."""
    pattern: str = PAIR
    peers: int = 1
    """Receivers of a fan-out or work queue, senders of a fan-in."""


@dataclass(frozen=True)
class Sender:
    """The sending end, in the process that sends."""

    send: Callable[[Any], object]
    """Send one payload."""
    close: Callable[[], object]


@dataclass(frozen=True)
class Receiver:
    """The receiving end, in the process that receives."""

    recv: Callable[[], Any]
    """Wait for one payload and return it, usable, in the transport's form, until the next one is asked for."""
    close: Callable[[], object]
    sleeps: Callable[[], int] | None = None
    """How often `recv` went to sleep, where the transport counts that."""


class Link(ABC):
    """A connection. Made in the parent process, pickled into those that use it."""

    def __init__(self, settings: LinkSettings) -> None:
        self.settings = settings

    @abstractmethod
    def sender(self, index: int = 0) -> Sender:
        """Open a sending end here; `index` counts those of a fan-in. The receiving ends are open by then."""

    @abstractmethod
    def receiver(self, index: int = 0) -> Receiver:
        """Open a receiving end here; `index` counts those of a fan-out or work queue."""

    def close(self) -> None:  # noqa: B027
        """In the parent, when all other processes are gone."""


@contextmanager
def opened(transport: Transport, *settings: LinkSettings) -> Iterator[list[Link]]:
    """A link for each of the settings, closed after the `with` block."""
    with ExitStack() as stack:
        yield [stack.enter_context(closing(transport.link(each))) for each in settings]


class Copies(Link):
    """A fan-out for what has none: a link to each receiver, and the message is sent down all of them."""

    def __init__(self, settings: LinkSettings, make: Callable[[LinkSettings], Link]) -> None:
        super().__init__(settings)
        one = replace(settings, pattern=PAIR, peers=1)
        self.links = [make(replace(one, name=f"{settings.name}-{index}")) for index in range(settings.peers)]

    def sender(self, index: int = 0) -> Sender:
        senders = [link.sender() for link in self.links]
        sends = [sender.send for sender in senders]

        def send(payload: Any) -> None:
            for one in sends:
                one(payload)

        return Sender(send, lambda: [sender.close() for sender in senders])

    def receiver(self, index: int = 0) -> Receiver:
        return self.links[index].receiver()

    def close(self) -> None:
        for link in self.links:
            link.close()


class Transport(ABC):
    """A way to move a tensor from one process to another."""

    name: ClassVar[str]
    """As tables show it."""
    package: ClassVar[str | None] = None
    """Module that must be importable; None: the standard library."""
    distribution: ClassVar[str | None] = None
    """Whose version counts, if it is not named like the module."""
    form: ClassVar[str] = "torch"
    """What `send` takes and `recv` gives: `"torch"`, `"numpy"` or `"bytes"`."""
    work: ClassVar[str]
    """What one send and one receive do, in a few words."""
    patterns: ClassVar[frozenset[str]] = frozenset({PAIR})
    """What `link` can make."""
    sleeps: ClassVar[bool] = True
    """Whether a receiver can sleep until a message comes; else it polls."""
    own_processes: ClassVar[bool] = False
    """Whether it starts the other process itself, and is driven through `peer` instead of `link`."""

    @abstractmethod
    def link(self, settings: LinkSettings) -> Link:
        """A new link."""

    def version(self) -> str | None:
        """Installed version; None for the standard library."""
        if self.package is None:
            return None
        if self.package == "shmtensor":
            return shmtensor.__version__  # also of a checkout that is not installed
        return importlib.metadata.version(self.distribution or self.package)

    def skip_reason(self) -> str | None:
        """Why it cannot be measured here, or None."""
        if self.package is not None and importlib.util.find_spec(self.package) is None:
            return f"{self.distribution or self.package} is not installed"
        return None
