"""multiprocessing.Pipe, which pickles too, but in the calling thread and without a lock."""

from __future__ import annotations

import multiprocessing

from .base import FAN_OUT, PAIR, Copies, Link, LinkSettings, Receiver, Sender, Transport


class PipeLink(Link):
    def __init__(self, settings: LinkSettings) -> None:
        super().__init__(settings)
        self.reading, self.writing = multiprocessing.get_context("spawn").Pipe(duplex=False)

    def sender(self, index: int = 0) -> Sender:
        return Sender(self.writing.send, self.writing.close)

    def receiver(self, index: int = 0) -> Receiver:
        return Receiver(self.reading.recv, self.reading.close)

    def close(self) -> None:
        self.reading.close()
        self.writing.close()


class PicklePipe(Transport):
    name = "multiprocessing.Pipe"
    form = "numpy"
    work = "pickle, write to a pipe (as much in flight as it holds); read, unpickle a NumPy array"
    patterns = frozenset({PAIR, FAN_OUT})

    def link(self, settings: LinkSettings) -> Link:
        return Copies(settings, self.link) if settings.pattern == FAN_OUT else PipeLink(settings)
