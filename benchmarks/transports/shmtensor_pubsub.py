"""shmtensor: Publisher and Subscriber."""

from __future__ import annotations

import shmtensor

from .base import Link, LinkSettings, Receiver, Sender, Transport


class ShmTensorLink(Link):
    def sender(self) -> Sender:
        settings = self.settings
        publisher = shmtensor.Publisher(settings.name, slots=settings.in_flight, slot_bytes=settings.nbytes)
        return Sender(publisher.send, publisher.close)

    def receiver(self) -> Receiver:
        subscriber = shmtensor.Subscriber(self.settings.name, spin=1.0 if self.settings.awake else 0.0)
        recv = subscriber.recv
        return Receiver(lambda: recv().value, subscriber.close, lambda: subscriber.statistics().sleeps)


class ShmTensor(Transport):
    name = "shmtensor"
    package = "shmtensor"
    work = "copy into a slot, publish; receive a torch tensor that is the slot"

    def link(self, settings: LinkSettings) -> Link:
        return ShmTensorLink(settings)
