"""shmtensor: Publisher and Subscriber; for the work queue Producer and Consumer."""

from __future__ import annotations

import shmtensor

from .base import FAN_IN, FAN_OUT, PAIR, WORK_QUEUE, Link, LinkSettings, Receiver, Sender, Transport


class ShmTensorLink(Link):
    def sender(self, index: int = 0) -> Sender:
        settings = self.settings
        kind = shmtensor.Producer if settings.pattern == WORK_QUEUE else shmtensor.Publisher
        sender = kind(settings.name, slots=settings.in_flight, slot_bytes=settings.nbytes)
        return Sender(sender.send, sender.close)

    def receiver(self, index: int = 0) -> Receiver:
        kind = shmtensor.Consumer if self.settings.pattern == WORK_QUEUE else shmtensor.Subscriber
        receiver = kind(self.settings.name, spin=1.0 if self.settings.awake else 0.0)
        recv = receiver.recv
        return Receiver(lambda: recv().value, receiver.close, lambda: receiver.statistics().sleeps)


class ShmTensor(Transport):
    name = "shmtensor"
    package = "shmtensor"
    work = "copy into a slot, publish; receive a torch tensor that is the slot"
    patterns = frozenset({PAIR, FAN_OUT, FAN_IN, WORK_QUEUE})

    def link(self, settings: LinkSettings) -> Link:
        return ShmTensorLink(settings)
