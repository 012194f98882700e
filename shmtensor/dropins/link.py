"""One process's hold on a queue: what keeps the channel there, and the process's two endpoints on it.

A queue must live as long as any process has it, whether or not that process has put or got anything yet. So there is
one more member of its channel, the keeper, which neither sends nor receives. Its life lock belongs to an open file
description, and the descriptor goes to every process that has the queue: forked children inherit it, others get it
from `multiprocessing` with the queue. The kernel drops the lock when the last of them has closed it or died.

    process A                          process B (forked or spawned)
    Link: keeper ----------+---------- Link: keeper            one description, one lock: the queue exists
          Putter, Getter   |                 Putter, Getter    each made at the first put or get
                     channel "queue-..."

Whoever lets go looks whether anybody is left, and removes the channel if not.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

from ..channel import control as ctl
from ..channel import membership, sweep
from ..channel.exclusive import defer
from ..channel.membership import Member
from ..channel.names import semaphore_name, socket_dir
from ..endpoints.base import Endpoint
from ..errors import ClosedError, ShmTensorError
from ..memory import forks
from ..memory.counters import Counter
from ..ring.layout import WORK_QUEUE
from . import pickling
from .getter import Getter
from .putter import Putter


class Link:
    """A process's hold on a queue's channel.

    Args:
        name: the channel.
        keeper: descriptor of the keeper's life lock; owned, and closed with the link.
        max_bytes: what the putter may use, None for half of `/dev/shm`.

    `abandoned` is set by its queue: it is called when an item is dropped after too many attempts.
    """

    abandoned: Callable[[], None]
    _left = True  # until it is made

    def __init__(self, name: str, keeper: int, max_bytes: int | None) -> None:
        self.name, self.max_bytes = name, max_bytes
        self._keeper = keeper
        forks.inherited.add(keeper)
        self._directory = socket_dir()
        self.start_anew()

    @classmethod
    def create(cls, max_bytes: int | None, values: tuple[tuple[int, int], ...], named: bool) -> tuple[Link, Any]:
        """Make a channel of a new name, its keeper, and its semaphores.

        Args:
            max_bytes: as for the link.
            values: of each semaphore its first value and its limit.
            named: whether processes that are spawned will have the queue.
        """
        name = f"queue-{os.getpid()}-{secrets.token_hex(6)}"
        member = membership.join(name, WORK_QUEUE, ctl.RECEIVER, 0, _prepare_nothing)
        made: list[int] = []
        try:
            counters = [
                Counter(semaphore_name(name, member.uid, number), value, most, named=named)
                for number, (value, most) in enumerate(values)
            ]
            made += map(os.dup, (member.control.locks.fd,))  # the same description: its lock lives on with this one
            link = cls(name, made[0], max_bytes)
            made.clear()
            member.control.locks.close()
        except BaseException:
            for keeper in made:
                forks.inherited.discard(keeper)
                os.close(keeper)
            member.leave()
            raise
        # crash: link.made
        return link, counters

    def start_anew(self) -> None:
        """No endpoint is made yet. Also for a forked child: the endpoints are its parent's, the keeper is inherited."""
        self._joining = threading.Lock()
        self._maker = 0
        """The thread that makes an endpoint, holding `_joining`."""
        self._late: Callable[[Endpoint], None] | None = None
        """How to leave once the endpoint is made, if the queue was closed meanwhile."""
        self._putter: Putter | None = None
        self._getter: Getter | None = None
        self._left = self._keeper < 0
        self._undelivered: list[Any] = []
        self._make_room: Callable[[], object] = bool

    def keep(self, undelivered: list[Any], make_room: Callable[[], object]) -> None:
        """Put what is in this list back when the link is let go, after calling `make_room` for each."""
        self._undelivered, self._make_room = undelivered, make_room

    @property
    def putter(self) -> Putter:
        """This process's putting end, made at first use."""
        return self._putter or self._make("_putter", lambda: Putter(self.name, self.max_bytes))

    @property
    def getter(self) -> Getter:
        """This process's getting end, made at first use."""
        return self._getter or self._make("_getter", lambda: Getter(self.name, self.abandoned))

    def _make(self, which: str, make: Callable[[], Any]) -> Any:
        """One thread at a time makes an endpoint."""
        late = None
        try:
            with self._joining:
                if self._keeper < 0:  # by another thread, since the caller looked
                    raise ClosedError(f'queue "{self.name}" is closed')
                self._maker = threading.get_ident()
                try:
                    if getattr(self, which) is None:
                        setattr(self, which, make())
                    return getattr(self, which)
                finally:
                    self._maker, late, self._late = 0, self._late, None
        finally:
            if late is not None:
                self._leave(late)

    def keeper_for_child(self) -> Any:
        """The keeper's descriptor, to be pickled for a child that is being spawned."""
        return reduction.DupFd(self._keeper)

    def close(self) -> None:
        """Let go: items that were put stay for those who have the queue; with nobody left it is gone. Idempotent.

        Tensors that were got stay valid; while they live, this process's getting end stays a member of the channel.
        """
        self._leave(lambda endpoint: endpoint.close())

    def end(self) -> None:
        """As `close`, but the process ends: memory is cleaned up even though tensors that were got may be alive."""
        self._leave(lambda endpoint: endpoint._at_exit())

    def _leave(self, leave: Callable[[Endpoint], None]) -> None:
        if self._left or defer(lambda: self._leave(leave)):
            return
        if self._maker == threading.get_ident():  # a departure that was put off until this thread's join was over
            self._late = leave
            return
        if self._undelivered:
            self._put_back()
        with self._joining:
            forks.inherited.discard(self._keeper)
            keeper, self._keeper = self._keeper, -1
            if keeper >= 0:
                os.close(keeper)  # first: the endpoint that leaves last removes the channel
        # crash: link.released
        for endpoint in (self._putter, self._getter):
            if endpoint is not None:
                with contextlib.suppress(ShmTensorError, OSError):
                    leave(endpoint)
        # crash: link.left
        with contextlib.suppress(ShmTensorError, OSError):
            sweep.sweep_channel(self.name, self._directory, patience=membership.LOCK_TIMEOUT)
        self._left = True

    def _put_back(self) -> None:
        """What was taken and never returned goes to another getter."""
        while self._undelivered:
            with contextlib.suppress(Exception):  # what cannot be put: there is nobody to tell
                self._make_room()
                self.putter.put(pickling.pack(self._undelivered[0]), 0.0)
            del self._undelivered[0]

    def __del__(self) -> None:
        self.close()


def _prepare_nothing(member: Member) -> None:
    """A keeper has neither a ledger nor an inbox."""
