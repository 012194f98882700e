"""A pipeline of three stages, each a process: decode, model, post-process, joined by work queues.

A stage reads its input where it lies and computes its output into the next slot, or copies it there once. The channels
are short: when a later stage is slow, the ones before it wait, and so does whoever feeds the first. Each stage can be
killed and started again while the others run: a message is done only when its result is on its way, so that what a dead
stage had in its hands goes to its successor. (A result may so come twice; whoever takes the last ones sees to that.)

    python examples/pipeline.py
"""

from __future__ import annotations

import asyncio
import multiprocessing
import zlib
from collections.abc import Awaitable, Callable

import numpy as np
import torch

import shmtensor

NAME, FRAMES, SLOTS = "example-pipeline", 60, 2
HEIGHT, WIDTH, CLASSES = 120, 160, 4


async def decode(msg: shmtensor.Message, tx: shmtensor.Producer) -> None:
    """A compressed frame in, its pixels from 0 to 1 out: written into the slot by the division."""
    frame = np.frombuffer(zlib.decompress(msg.value), np.uint8).reshape(HEIGHT * WIDTH, 3)
    with await tx.aloan((HEIGHT * WIDTH, 3), np.float32, meta=msg.meta) as loan:
        np.divide(frame, np.float32(255), out=loan.array)


async def model(msg: shmtensor.Message, tx: shmtensor.Producer) -> None:
    """Pixels in, scores of each pixel out: computed from slot to slot."""
    with await tx.aloan((HEIGHT * WIDTH, CLASSES), torch.float32, meta=msg.meta) as loan:
        torch.mm(torch.from_numpy(msg.value), weights(), out=loan.tensor)


async def count(msg: shmtensor.Message, tx: shmtensor.Producer) -> None:
    """Scores in, how many pixels are of each class out: a small tensor, copied once."""
    await tx.asend(torch.bincount(msg.value.argmax(1), minlength=CLASSES), msg.meta)


STAGES = (decode, model, count)
Work = Callable[[shmtensor.Message, shmtensor.Producer], Awaitable[None]]


def weights() -> torch.Tensor:
    return torch.tensor([[1.0, 0.0, 0.0, 0.3], [0.0, 1.0, 0.0, 0.4], [0.0, 0.0, 1.0, 0.5]])


async def run_stage(work: Work, source: str, target: str) -> None:
    """Until the stream ends."""
    async with shmtensor.Consumer(source) as rx, shmtensor.Producer(target, slots=SLOTS) as tx:
        async for msg in rx:
            with msg:  # done when the block is left: its result is on its way by then
                await work(msg, tx)


def stage(work: Work, source: str, target: str) -> None:
    """A stage's process."""
    torch.set_num_threads(1)  # the stages share the cores
    asyncio.run(run_stage(work, source, target))


class Pipeline:
    """The processes, and both ends: `source` takes compressed frames, `results` gives counts."""

    def __init__(self, name: str) -> None:
        self.channels = [f"{name}-{what}" for what in ("frames", "pixels", "scores", "counts")]
        # A channel without a sender has ended. These are always there, so that a stage may be away for a while.
        self.keepers = [shmtensor.Producer(channel) for channel in self.channels[1:]]
        self.source = shmtensor.Producer(self.channels[0], slots=SLOTS)
        self.results = shmtensor.Consumer(self.channels[-1])
        self.context = multiprocessing.get_context("spawn")
        self.processes = [self.start(number) for number in range(len(STAGES))]

    def start(self, number: int) -> multiprocessing.process.BaseProcess:
        ends = self.channels[number : number + 2]
        process = self.context.Process(target=stage, args=(STAGES[number], *ends), daemon=True)
        process.start()
        return process

    def restart(self, number: int) -> None:
        """Kill a stage, whatever it is doing, and start it again."""
        self.processes[number].kill()
        self.processes[number].join()
        self.processes[number] = self.start(number)

    def close(self) -> None:
        """The frames end; each stage ends when the one before it has."""
        for sender in (self.source, *self.keepers):
            sender.close()
        for process in self.processes:
            process.join()
        self.results.close()


def make_frame(number: int) -> tuple[bytes, list[int]]:
    """A compressed frame, and its counts."""
    frame = torch.randint(0, 256, (HEIGHT * WIDTH, 3), generator=torch.Generator().manual_seed(number))
    frame = frame.to(torch.uint8)
    expected = torch.bincount(torch.mm(frame / 255, weights()).argmax(1), minlength=CLASSES).tolist()
    return zlib.compress(frame.numpy().tobytes(), 1), expected


async def main() -> None:
    pipeline = Pipeline(NAME)
    frames = [make_frame(number) for number in range(FRAMES)]
    got: dict[int, list[int]] = {}

    async def feed() -> None:
        for number, (data, _) in enumerate(frames):
            await pipeline.source.asend(np.frombuffer(data, np.uint8), {"frame": number})

    feeding = asyncio.create_task(feed())
    while len(got) < FRAMES:
        with await pipeline.results.arecv(timeout=120) as msg:
            got[msg.meta["frame"]] = msg.value.tolist()
        if len(got) in (FRAMES // 4, FRAMES // 2, 3 * FRAMES // 4):  # each stage once
            await asyncio.to_thread(pipeline.restart, 4 * len(got) // FRAMES - 1)
    await feeding
    pipeline.close()
    if [got[number] for number in range(FRAMES)] != [expected for _, expected in frames]:
        raise RuntimeError("a count is wrong")
    print(f"{FRAMES} frames through {len(STAGES)} stages, each killed and started again once: every count is right")


if __name__ == "__main__":
    asyncio.run(main())
