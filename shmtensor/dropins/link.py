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
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from typing import Any

from ..channel import control as ctl
from ..channel import membership, sweep
from ..channel.exclusive import defer
from ..channel.membership import Member
from ..channel.names import socket_dir
from ..endpoints.base import Endpoint
from ..errors import ClosedError, ShmTensorError
from ..ring.layout import WORK_QUEUE
from .getter import Getter
from .putter import Putter


class Link:
    """A process's hold on a queue's channel.

    Args:
        name: the channel.
        keeper: descriptor of the keeper's life lock; owned, and closed with the link.
        max_bytes: what the putter may use, None for half of `/dev/shm`.
        abandoned: called when an item is dropped after too many attempts.
    """

    def __init__(self, name: str, keeper: int, max_bytes: int | None, abandoned: Callable[[], None]) -> None:
        self.name, self.max_bytes = name, max_bytes
        self._keeper, self._abandoned = keeper, abandoned
        self._directory = socket_dir()
        self.start_anew()

    @classmethod
    def create(cls, max_bytes: int | None, abandoned: Callable[[], None]) -> Link:
        """Make a channel of a new name, and its keeper."""
        name = f"queue-{os.getpid()}-{secrets.token_hex(6)}"
        member = membership.join(name, WORK_QUEUE, ctl.RECEIVER, 0, _prepare_nothing)
        keeper = os.dup(member.control.locks.fd)  # the same description: its lock lives on with this descriptor
        member.control.locks.close()
        # crash: link.made
        return cls(name, keeper, max_bytes, abandoned)

    def start_anew(self) -> None:
        """No endpoint is made yet. Also for a forked child: the endpoints are its parent's, the keeper is inherited."""
        self._joining = threading.Lock()
        self._maker = 0
        """The thread that makes an endpoint, holding `_joining`."""
        self._late: Callable[[Endpoint], None] | None = None
        """How to leave once the endpoint is made, if the queue was closed meanwhile."""
        self._putter: Putter | None = None
        self._getter: Getter | None = None

    @property
    def putter(self) -> Putter:
        """This process's putting end, made at first use."""
        putter = self._putter
        if putter is None:
            with self._making():
                if self._putter is None:
                    self._putter = Putter(self.name, self.max_bytes)
                putter = self._putter
        return putter

    @property
    def getter(self) -> Getter:
        """This process's getting end, made at first use."""
        getter = self._getter
        if getter is None:
            with self._making():
                if self._getter is None:
                    self._getter = Getter(self.name, self._abandoned)
                getter = self._getter
        return getter

    @contextlib.contextmanager
    def _making(self) -> Iterator[None]:
        """One thread at a time makes an endpoint."""
        late = None
        try:
            with self._joining:
                if self._keeper < 0:  # by another thread, since the caller looked
                    raise ClosedError(f'queue "{self.name}" is closed')
                self._maker = threading.get_ident()
                try:
                    yield
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
        if self._keeper < 0 or defer(lambda: self._leave(leave)):
            return
        if self._maker == threading.get_ident():  # a departure that was put off until this thread's join was over
            self._late = leave
            return
        with self._joining:
            keeper, self._keeper = self._keeper, -1
        if keeper < 0:
            return
        os.close(keeper)  # first: the endpoint that leaves last removes the channel
        # crash: link.released
        for endpoint in (self._putter, self._getter):
            if endpoint is not None:
                with contextlib.suppress(ShmTensorError, OSError):
                    leave(endpoint)
        # crash: link.left
        with contextlib.suppress(ShmTensorError, OSError):
            sweep.sweep_channel(self.name, self._directory, patience=membership.LOCK_TIMEOUT)


def _prepare_nothing(member: Member) -> None:
    """A keeper has neither a ledger nor an inbox."""
