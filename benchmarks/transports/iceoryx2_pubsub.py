"""iceoryx2's Python binding: a publish-subscribe service of byte slices.

It is given its fastest known form: ctypes array types are made once, and the payload's address is used as
it is instead of through `Sample.payload()`, which costs about 3 µs a message. A receiver polls.

Version 0.10.0 takes `BackpressureStrategy.RetryUntilDelivered` and shows it, but drops what a full subscriber
has no room for all the same: `send` returns 0. So what was not delivered is loaned, copied and sent again here.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

from .base import FAN_IN, FAN_OUT, PAIR, Link, LinkSettings, Receiver, Sender, Transport


class Iceoryx2Link(Link):
    overwrites = False
    """Whether a full subscriber loses its oldest message; else the publisher waits, and nothing is lost."""

    def _service(self) -> tuple[Any, Any]:
        import iceoryx2 as iox

        iox.set_log_level(iox.LogLevel.Error)
        node = iox.NodeBuilder.new().create(iox.ServiceType.Ipc)
        service = (
            node.service_builder(iox.ServiceName.new(self.settings.name))
            .publish_subscribe(iox.Slice[ctypes.c_uint8])
            .payload_alignment(iox.Alignment.new(64))
            .enable_safe_overflow(self.overwrites)
            .subscriber_max_buffer_size(self.settings.in_flight)
            .subscriber_max_borrowed_samples(4)
            .max_publishers(max(2, self.settings.peers))
            .max_subscribers(max(2, self.settings.peers))
            .open_or_create()
        )
        return node, service

    def sender(self, index: int = 0) -> Sender:
        node, service = self._service()
        publisher = service.publisher_builder().initial_max_slice_len(self.settings.nbytes).create()
        loan, memmove = publisher.loan_slice_uninit, ctypes.memmove

        def send(tensor: Any) -> None:
            nbytes = tensor.nbytes
            sample = loan(nbytes)
            memmove(sample.payload_ptr, tensor.data_ptr(), nbytes)
            while not sample.assume_init().send():  # full: nobody got it
                time.sleep(0)
                sample = loan(nbytes)
                memmove(sample.payload_ptr, tensor.data_ptr(), nbytes)

        return Sender(send, lambda: (publisher.delete(), node))

    def receiver(self, index: int = 0) -> Receiver:
        import torch

        node, service = self._service()
        subscriber = service.subscriber_builder().create()
        receive, frombuffer, float32 = subscriber.receive, torch.frombuffer, torch.float32
        make_array = (ctypes.c_float * (self.settings.nbytes // 4)).from_address

        def recv() -> Any:
            while (sample := receive()) is None:
                pass
            array = make_array(sample.payload_ptr)
            array.owner = sample  # the tensor keeps the array, the array the sample
            return frombuffer(array, dtype=float32)

        return Receiver(recv, lambda: (subscriber.delete(), node))


class Overwriting(Iceoryx2Link):
    """For a subscriber that wants the newest `in_flight` messages."""

    overwrites = True


class Iceoryx2(Transport):
    name = "iceoryx2"
    package = "iceoryx2"
    work = "loan, copy in, send; poll, receive a torch tensor over the sample"
    patterns = frozenset({PAIR, FAN_OUT, FAN_IN})
    sleeps = False

    def link(self, settings: LinkSettings) -> Link:
        return Iceoryx2Link(settings)
