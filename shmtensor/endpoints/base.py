"""What every endpoint shares: its state, its end, and the fork rule."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ..channel import doorbells
from ..errors import ArgumentError, ArgumentTypeError, ClosedError, ForkedError
from ..memory import forks, words

if TYPE_CHECKING:
    from ..channel.membership import Member
    from .devices import Devices

OPEN: Final = ""
CLOSED: Final = "closed"
CLOSING: Final = "closing"
LEAVING: Final = "closed, views alive"
FORKED: Final = "forked"

TICK: Final = 0.25 if words.HAS_BARRIER else 0.01
"""Seconds that a sleep lasts at most before the sleeper looks around by itself."""

SPIN_NS: Final = 20_000
"""Nanoseconds that the compiled module may look for a message or a slot without letting other threads run."""

_Self = TypeVar("_Self", bound="Endpoint")
_living: weakref.WeakSet[Endpoint] = weakref.WeakSet()
lingering: set[Endpoint] = set()
"""Closed endpoints whose views are alive: nobody else may refer to them, but their leases must end properly."""


class Endpoint(ABC):
    """Base of everything that joins a channel. Thread-safe: one call at a time, others wait."""

    _member: Member
    _kind: int
    _pin: Any = "auto"
    _gpu: Devices | None = None  # what deals with CUDA, once it is needed: endpoints/devices.py

    def __init__(self) -> None:
        self._state = OPEN
        self._mutex = threading.Lock()
        self._pid = os.getpid()
        self._crowd: Any = None  # the tasks of an event loop that wait here: endpoints/crowd.py
        _living.add(self)
        forks.track(self)
        _hook_multiprocessing()

    @property
    def name(self) -> str:
        """The channel's name."""
        return self._member.channel

    @property
    def closed(self) -> bool:
        """Whether `close()` was called, or the process forked."""
        return self._state != OPEN

    @property
    def _channel_kind(self) -> int:
        """What its channel is: see `KINDS`."""
        return self._kind

    @abstractmethod
    def close(self) -> None:
        """Leave the channel. Idempotent; works while views are alive."""

    @abstractmethod
    def _at_exit(self) -> None:
        """The process ends: close without acknowledging anything, and clean up even though views may be alive."""

    def drop_in_child(self) -> None:
        """This process is a forked child: the endpoint is the parent's."""
        self._unlearn()
        self._state = FORKED
        if self._crowd is not None:
            self._crowd.drop_in_child()
        self._mutex = threading.Lock()

    def _outlast(self) -> None:
        """The process ends, all its endpoints are closed: wait for those who need what ends with it."""
        return

    def _devices(self) -> Devices:
        if self._gpu is None:
            from .devices import Devices

            self._gpu = Devices(self, self._pin)
        return self._gpu

    def _copying(self) -> int:
        """How many copies from or to a device are on their way; lets go of those that are done."""
        return 0 if self._gpu is None else self._gpu.pending.look()

    def _finish_copies(self) -> None:
        """Wait for them."""
        if self._gpu is not None:
            self._gpu.pending.finish()

    @abstractmethod
    def _unlearn(self) -> None:
        """Forget what the compiled module was told about this endpoint: it has changed."""

    def _refuse(self) -> None:
        what = f'{type(self).__name__} of channel "{self._member.channel}"'
        if self._state == FORKED:
            raise ForkedError(f"{what} belongs to process {self._pid}, which forked this one: create a new one here")
        raise ClosedError(f"{what} is closed")

    def __enter__(self: _Self) -> _Self:
        if self._state:
            self._refuse()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._at_exit()

    def __del__(self) -> None:
        if getattr(self, "_state", CLOSED) == OPEN and hasattr(self, "_member"):
            with contextlib.suppress(Exception):
                self._at_exit()

    def __repr__(self) -> str:
        return f'<{type(self).__name__} "{self._member.channel}" {self._state or "open"}{self._about()}>'

    def _about(self) -> str:
        return ""


def check_timeout(timeout: Any) -> None:
    """A timeout is None, or seconds that are not negative."""
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise ArgumentTypeError(f"timeout is in seconds (int or float) or None, not {type(timeout).__name__}")
    if not timeout >= 0:
        raise ArgumentError(f"timeout must be 0 or more seconds, or None to wait for ever, not {timeout!r}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """An option is one of a few words."""
    if value not in choices:
        raise ArgumentError(f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}")


def check_count(name: str, value: object, least: int, most: int) -> None:
    """An option is an int within bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name} must be an int, not {type(value).__name__}")
    if not least <= value <= most:
        raise ArgumentError(f"{name} must be between {least} and {most}, not {value}")


def local_members() -> frozenset[int]:
    """The uids of all endpoints of this process."""
    return frozenset(endpoint._member.uid for endpoint in list(_living) if hasattr(endpoint, "_member"))


def _hook_multiprocessing() -> None:
    """A `multiprocessing` child ends without `atexit`; it runs its own finalizers instead."""
    global _hooked_pid
    util = sys.modules.get("multiprocessing.util")
    if util is not None and _hooked_pid != os.getpid():
        _hooked_pid = os.getpid()
        util.Finalize(None, _close_all, exitpriority=0)


_hooked_pid = 0


@atexit.register
def _close_all() -> None:
    for endpoint in list(_living):
        if endpoint._state in (OPEN, CLOSING, LEAVING):
            with contextlib.suppress(Exception):
                endpoint._at_exit()
    for endpoint in list(lingering):
        endpoint._outlast()
    doorbells.close_context()
