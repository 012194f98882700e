"""What people write by hand: a ring in multiprocessing.shared_memory, a pipe that says which slot, a semaphore."""

from __future__ import annotations

import multiprocessing
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from .base import FAN_OUT, PAIR, Copies, Link, LinkSettings, Receiver, Sender, Transport


class SharedMemoryLink(Link):
    """Slot n is free when the semaphore says so; the receiver gives a slot back when it asks for the next one."""

    def __init__(self, settings: LinkSettings) -> None:
        super().__init__(settings)
        context = multiprocessing.get_context("spawn")
        self.slots = settings.in_flight + 1  # one is in the receiver's hands
        self.memory = SharedMemory(create=True, size=self.slots * settings.nbytes)
        self.reading, self.writing = context.Pipe(duplex=False)
        self.free = context.Semaphore(self.slots)

    def _tensors(self) -> list[Any]:
        import torch

        nbytes = self.settings.nbytes
        return [
            torch.frombuffer(self.memory.buf, dtype=torch.float32, count=nbytes // 4, offset=slot * nbytes)
            for slot in range(self.slots)
        ]

    def sender(self, index: int = 0) -> Sender:
        tensors, state = self._tensors(), [0]
        acquire, write, slots = self.free.acquire, self.writing.send_bytes, self.slots

        def send(tensor: Any) -> None:
            slot = state[0]
            acquire()
            tensors[slot].copy_(tensor)
            write(slot.to_bytes(2, "little"))
            state[0] = (slot + 1) % slots

        return Sender(send, tensors.clear)

    def receiver(self, index: int = 0) -> Receiver:
        tensors, held = self._tensors(), []
        release, read = self.free.release, self.reading.recv_bytes

        def recv() -> Any:
            if held:
                release()
            else:
                held.append(True)
            return tensors[int.from_bytes(read(), "little")]

        return Receiver(recv, tensors.clear)

    def close(self) -> None:
        self.reading.close()
        self.writing.close()
        self.memory.close()
        self.memory.unlink()


class SharedMemoryAndPipe(Transport):
    name = "shared_memory + Pipe"
    package = "torch"
    work = "wait for a slot, copy into it, write its number to a pipe; read that, receive a torch tensor over the slot"
    patterns = frozenset({PAIR, FAN_OUT})

    def link(self, settings: LinkSettings) -> Link:
        return Copies(settings, self.link) if settings.pattern == FAN_OUT else SharedMemoryLink(settings)
