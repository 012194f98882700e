"""What a transport must offer to be measured: a one-way link that sends one and receives one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar


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


@dataclass(frozen=True)
class Sender:
    """The sending end, in the process that sends."""

    send: Callable[[Any], object]
    """Send one payload: afterwards the caller may change it."""
    close: Callable[[], object]


@dataclass(frozen=True)
class Receiver:
    """The receiving end, in the process that receives."""

    recv: Callable[[], Any]
    """Wait for one payload and return it, usable, in the transport's form."""
    close: Callable[[], object]
    sleeps: Callable[[], int] | None = None
    """How often `recv` went to sleep, where the transport counts that."""


class Link(ABC):
    """A one-way connection. Made in the parent process, pickled into the two that use it."""

    def __init__(self, settings: LinkSettings) -> None:
        self.settings = settings

    @abstractmethod
    def sender(self) -> Sender:
        """Open the sending end here. The receiving end is open by then."""

    @abstractmethod
    def receiver(self) -> Receiver:
        """Open the receiving end here."""

    def close(self) -> None:  # noqa: B027
        """In the parent, when both processes are gone."""


class Transport(ABC):
    """A way to move a tensor from one process to another."""

    name: ClassVar[str]
    """As tables show it."""
    package: ClassVar[str | None] = None
    """Distribution and module that must be installed; None: the standard library."""
    form: ClassVar[str] = "torch"
    """What `send` takes and `recv` gives: `"torch"`, `"numpy"` or `"bytes"`."""
    work: ClassVar[str]
    """What one send and one receive do, in a few words."""

    @abstractmethod
    def link(self, settings: LinkSettings) -> Link:
        """A new link."""

    def version(self) -> str | None:
        """Installed version; None for the standard library."""
        return None if self.package is None else importlib.metadata.version(self.package)

    def skip_reason(self) -> str | None:
        """Why it cannot be measured here, or None."""
        if self.package is not None and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        return None
