"""The stages of examples/pipeline.py: what they copy, and who waits for whom. Restarts: the example itself, as run."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path

import numpy as np
import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import shmtensor
from shmtensor.endpoints.asyncio import AsyncSender

from ..endpoints.test_asyncio import PATIENCE, asleep, run, turns_of_the_loop  # noqa: F401


@pytest.fixture
def pipeline(monkeypatch):
    """The example, as a module."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    return importlib.import_module("pipeline")


class Copies(TorchDispatchMode):
    """Names of the operators that copy a tensor."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("copy_", "_to_copy", "clone", "contiguous"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_a_stage_copies_a_tensor_at_most_once(run, channel, pipeline, monkeypatch):  # noqa: F811
    written = []
    fill = AsyncSender._fill

    def count(sender, out, *args):
        written.append(out.nbytes)
        return fill(sender, out, *args)

    monkeypatch.setattr(AsyncSender, "_fill", count)

    async def main():
        data, expected = pipeline.make_frame(3)
        names = [f"{channel}-{number}" for number in range(4)]
        with shmtensor.Producer(names[0]) as source, shmtensor.Consumer(names[-1]) as results:
            await source.asend(np.frombuffer(data, np.uint8), {"frame": 3})
            keepers = [shmtensor.Consumer(name) for name in names[1:3]]  # what is sent stays for the next stage
            for work, *ends in zip(pipeline.STAGES, names, names[1:], strict=False):
                with shmtensor.Consumer(ends[0]) as rx, shmtensor.Producer(ends[1]) as tx:
                    written.clear()
                    with Copies() as copies, await rx.arecv(timeout=PATIENCE) as msg:
                        await work(msg, tx)
                    del msg
                    assert copies.seen == []
                    assert len(written) == (1 if work is pipeline.count else 0)
            for keeper in keepers:
                keeper.close()
            with await results.arecv(timeout=PATIENCE) as msg:
                assert (msg.meta, msg.value.tolist()) == ({"frame": 3}, expected)

    run(main())


def test_backpressure_reaches_the_first_stage(run, channel, pipeline, monkeypatch):  # noqa: F811
    """Nobody works at the last stage: every slot fills up, and then whoever feeds the first one waits."""

    async def main():
        names = [f"{channel}-{number}" for number in range(4)]
        frames = [pipeline.make_frame(number) for number in range(12)]
        fed = []
        with (
            shmtensor.Producer(names[0], slots=pipeline.SLOTS) as source,
            shmtensor.Producer(names[2]) as keeper,
            shmtensor.Consumer(names[3]) as results,
        ):

            async def feed():
                for number, (data, _) in enumerate(frames):
                    await source.asend(np.frombuffer(data, np.uint8), {"frame": number})
                    fed.append(number)
                source.close()

            early = [
                asyncio.create_task(pipeline.run_stage(work, *ends))
                for work, *ends in zip(pipeline.STAGES[:2], names, names[1:], strict=False)
            ]
            feeding = asyncio.create_task(feed())
            room = len(pipeline.STAGES) * pipeline.SLOTS
            while len(fed) < room:
                await turns_of_the_loop(1)
            await asleep(source)
            await turns_of_the_loop(500)
            assert len(fed) == room
            last = asyncio.create_task(pipeline.run_stage(pipeline.STAGES[2], *names[2:]))
            got = {}
            while len(got) < len(frames):
                with await results.arecv(timeout=PATIENCE) as msg:
                    got[msg.meta["frame"]] = msg.value.tolist()
            assert [got[number] for number in range(len(frames))] == [expected for _, expected in frames]
            await feeding
            await asyncio.gather(*early)
            keeper.close()
            await last

    run(main())
