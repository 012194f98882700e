"""States that lie on a device: copied on a side stream, handed over by event, against a stand-in for the runtime."""

from __future__ import annotations

import collections
import contextlib
import threading

import numpy as np
import pytest
import torch

import shmtensor
from shmtensor.checkpoint import copying, names, offload, writer
from shmtensor.checkpoint.loader import load_checkpoint
from shmtensor.checkpoint.writer import CheckpointWriter

PATIENCE = 120.0
MIB = 1 << 20


class Stream:
    def __init__(self, device):
        self.device, self.queue = device, collections.deque()

    def synchronize(self):
        while self.queue:
            self.queue.popleft()()


class Event:
    def __init__(self, stream):
        self.device, self.stream, self.done, self.error = stream.device, stream, threading.Event(), None

    def query(self):
        return self.done.is_set()

    def synchronize(self):
        self.stream.owner.asked(self)
        assert self.done.wait(PATIENCE)
        if self.stream.owner.error:
            raise self.stream.owner.error


class Fake:
    """Streams whose work is done when the test says so (`hold`), or as soon as somebody waits."""

    def __init__(self):
        self.default = self.stream("cuda:0")
        self.here, self.hold, self.error, self.copied = [self.default], None, None, 0
        self.lock = threading.RLock()

    def stream(self, device):
        made = Stream(device)
        made.owner = self
        return made

    def current_stream(self, device):
        return self.here[-1]

    @contextlib.contextmanager
    def on(self, stream):
        self.here.append(stream)
        try:
            yield
        finally:
            self.here.pop()

    def record_event(self, stream):
        event = Event(stream)
        stream.queue.append(event.done.set)
        return event

    def wait_event(self, stream, event):
        stream.queue.append(lambda: self.run(event))

    def run(self, event):
        with self.lock:
            while not event.done.is_set():
                event.stream.queue.popleft()()

    def asked(self, event):
        if self.hold is not None:
            assert self.hold.wait(PATIENCE)
        self.run(event)

    def to_host(self, target, source):
        def copy():
            if self.error is None:
                target[:] = source
                self.copied += 1

        self.here[-1].queue.append(copy)


@pytest.fixture
def cuda(monkeypatch, channel):
    monkeypatch.setattr(names, "PREFIX", channel)
    fake = Fake()
    for module in (offload, copying):
        monkeypatch.setattr(module, "runtime", lambda: fake)
    return fake


def test_trial(cuda, tmp_path, monkeypatch):
    plan = writer.plan

    class Dev(np.ndarray): ...

    def marked(*args):
        made = plan(*args)
        for region in made.regions:
            region.device = "cuda:0"
            source = region._source
            region._source = lambda source=source: source().view(Dev)
        return made

    monkeypatch.setattr(writer, "plan", marked)
    monkeypatch.setattr(copying, "copy", None)
    from shmtensor.checkpoint import staging

    def copy(target, source):
        cuda.to_host(target, source)

    monkeypatch.setattr(staging, "copy", copy)
    cuda.hold = threading.Event()
    w = torch.ones(200_000)
    with CheckpointWriter(tmp_path, memory="4MiB") as writing:
        handle = writing.save({"w": w, "step": 1})
        assert not handle.staged.done()
        cuda.hold.set()
        assert handle.staged.result(PATIENCE) == 800_000
        assert (load_checkpoint(handle.durable.result(PATIENCE).path)["w"] == 1).all()
        cuda.error = RuntimeError("bad")
        handle = writing.save({"w": w, "step": 2})
        with pytest.raises(RuntimeError, match="bad"):
            handle.staged.result(PATIENCE)
        with pytest.raises(RuntimeError, match="bad"):
            handle.durable.result(PATIENCE)
        cuda.error = None
        handle = writing.save({"w": w, "step": 3})
        handle.durable.result(PATIENCE)
        big = {"w": [torch.full((300_000,), float(i)) for i in range(10)]}
        back = load_checkpoint(writing.save(big).durable.result(PATIENCE).path)
        assert [t[0].item() for t in back["w"]] == list(range(10))
