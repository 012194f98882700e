"""Bare pyzmq over ipc: what a wake-up through a socket costs without anything else."""

from __future__ import annotations

from typing import Any

from .base import FAN_IN, FAN_OUT, PAIR, WORK_QUEUE, Link, LinkSettings, Receiver, Sender, Transport


class ZmqLink(Link):
    """PUSH and PULL, for a fan-out PUB and SUB. The single end binds."""

    @property
    def address(self) -> str:
        return f"ipc://@{self.settings.name}"  # Linux's abstract namespace: nothing to clean up

    @property
    def mark(self) -> int:
        """High-water mark of each end of a connection. PUSH deals jobs out in turn to whoever is below it: the queues
        of all workers together have room for as many as may wait."""
        settings = self.settings
        return max(
            1, settings.in_flight // (2 * settings.peers) if settings.pattern == WORK_QUEUE else settings.in_flight
        )

    def sender(self, index: int = 0) -> Sender:
        import zmq

        settings, context = self.settings, zmq.Context()
        fan_out = settings.pattern == FAN_OUT
        socket = context.socket(zmq.XPUB if fan_out else zmq.PUSH)
        socket.sndhwm = self.mark
        if fan_out:
            socket.xpub_verbose = True  # tell of every subscription, not only of the first to a topic
            socket.xpub_nodrop = True  # a full subscriber makes the sender wait
            socket.bind(self.address)
            for _ in range(settings.peers):
                socket.recv()  # a subscription
        elif settings.pattern == WORK_QUEUE:
            monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            socket.bind(self.address)
            for _ in range(settings.peers):
                monitor.recv_multipart()  # a worker is there: who comes late would find the jobs dealt out
            socket.disable_monitor()
        else:
            socket.connect(self.address)
        return Sender(self._send(socket), lambda: context.destroy(linger=1000))

    def receiver(self, index: int = 0) -> Receiver:
        import zmq

        context = zmq.Context()
        socket = context.socket(zmq.SUB if self.settings.pattern == FAN_OUT else zmq.PULL)
        socket.rcvhwm = self.mark
        if self.settings.pattern == FAN_OUT:
            socket.subscribe(b"")
        if self.settings.pattern in (FAN_OUT, WORK_QUEUE):
            socket.connect(self.address)
        else:
            socket.bind(self.address)
        return Receiver(self._recv(socket), lambda: context.destroy(linger=0))

    def _send(self, socket: Any) -> Any:
        return socket.send

    def _recv(self, socket: Any) -> Any:
        return socket.recv


class ZmqNoCopyLink(ZmqLink):
    def _send(self, socket: Any) -> Any:
        return lambda array: socket.send(array, copy=False)

    def _recv(self, socket: Any) -> Any:
        import numpy as np

        return lambda: np.frombuffer(socket.recv(copy=False).buffer, np.float32)


class ZmqBytes(Transport):
    name = "pyzmq ipc"
    package = "zmq"
    distribution = "pyzmq"
    form = "bytes"
    work = "send bytes over a socket; block in recv, receive bytes"
    patterns = frozenset({PAIR, FAN_OUT, FAN_IN, WORK_QUEUE})

    def link(self, settings: LinkSettings) -> Link:
        return ZmqLink(settings)

    def version(self) -> str | None:
        import zmq

        return f"{zmq.__version__} (libzmq {zmq.zmq_version()})"


class ZmqNoCopy(ZmqBytes):
    name = "pyzmq ipc, copy=False"
    form = "numpy"
    work = "send the array's own memory, which the caller must leave alone until it is gone; array over the frame"

    def link(self, settings: LinkSettings) -> Link:
        return ZmqNoCopyLink(settings)
