"""Bare pyzmq over ipc: what a wake-up through a socket costs without anything else."""

from __future__ import annotations

from .base import Link, LinkSettings, Receiver, Sender, Transport


class ZmqLink(Link):
    """A PUSH and a PULL socket; the receiver binds."""

    @property
    def address(self) -> str:
        return f"ipc://@{self.settings.name}"  # Linux's abstract namespace: nothing to clean up

    def sender(self) -> Sender:
        import zmq

        context = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.sndhwm = self.settings.in_flight
        socket.connect(self.address)
        return Sender(socket.send, lambda: context.destroy(linger=1000))

    def receiver(self) -> Receiver:
        import zmq

        context = zmq.Context()
        socket = context.socket(zmq.PULL)
        socket.rcvhwm = self.settings.in_flight
        socket.bind(self.address)
        return Receiver(socket.recv, lambda: context.destroy(linger=0))


class ZmqBytes(Transport):
    name = "pyzmq ipc"
    package = "zmq"
    form = "bytes"
    work = "send bytes over a socket; block in recv, receive bytes"

    def link(self, settings: LinkSettings) -> Link:
        return ZmqLink(settings)

    def version(self) -> str | None:
        import zmq

        return f"{zmq.__version__} (libzmq {zmq.zmq_version()})"
