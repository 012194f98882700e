"""`Server` on an event loop: `arecv`, `async for`, `areply`, `aclose`; and `Client.aclose`."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch

import shmtensor

from ..endpoints.test_asyncio import PATIENCE, asleep, in_thread, run, turns_of_the_loop, until  # noqa: F401


async def serve(server) -> None:
    async for req in server:
        with req:
            if int(req.value[0]) < 0:
                raise ValueError("negative")
            await req.areply(req.value * 2)


def number(value: int) -> np.ndarray:
    return np.full(3, value, np.int64)


def test_requests_are_answered_on_a_loop(run, channel):  # noqa: F811
    async def main():
        async with shmtensor.Server(channel) as server, shmtensor.Client(channel, slots=4) as client:
            serving = asyncio.create_task(serve(server))
            got = await asyncio.gather(*(client.arequest(number(n), timeout=PATIENCE) for n in range(50)))
            assert [int(each[0]) for each in got] == [2 * n for n in range(50)]
            with pytest.raises(shmtensor.RemoteError, match="negative"):
                await client.arequest(number(-1), timeout=PATIENCE)
            with pytest.raises(ValueError, match="negative"):
                await serving
            serving = asyncio.create_task(serve(server))
            tensor = await client.arequest(torch.ones(3), timeout=PATIENCE)
            assert tensor.tolist() == [2, 2, 2]
            server.stop()
            await serving
        assert server.closed
        assert server.statistics().replied == 51
        with pytest.raises(shmtensor.ClosedError):
            await server.arecv()

    run(main())


def test_a_thread_asks_a_server_on_a_loop(run, channel):  # noqa: F811
    async def main():
        async with shmtensor.Server(channel) as server:
            serving = [asyncio.create_task(serve(server)) for _ in range(3)]
            with shmtensor.Client(channel) as client:

                def ask():
                    return [int(each[0]) for each in client.map([number(n) for n in range(100)], timeout=PATIENCE)]

                assert await in_thread(ask)() == [2 * n for n in range(100)]
            server.stop()
            await asyncio.gather(*serving)

    run(main())


def test_batches_on_a_loop(run, channel):  # noqa: F811
    async def main():
        server = shmtensor.Server(channel, max_batch=4, max_wait=PATIENCE)
        async with server, shmtensor.Client(channel) as client:
            asking = [asyncio.create_task(client.arequest(number(n), timeout=PATIENCE)) for n in range(4)]
            batch = await server.arecv(timeout=PATIENCE)
            assert batch.value.shape == (4, 3)
            with pytest.raises(shmtensor.ArgumentError):
                await batch.areply(batch.value[:3])
            await batch.areply(batch.value.sum(1))
            with pytest.raises(shmtensor.ReleasedError):
                await batch.areply(batch.value.sum(1))
            assert sorted(int(each) for each in await asyncio.gather(*asking)) == [0, 3, 6, 9]
            # what a cancelled task has put aside is in the next batch
            asking = [asyncio.create_task(client.arequest(number(n), timeout=PATIENCE)) for n in range(2)]
            waiting = asyncio.create_task(server.arecv())
            await until(lambda: server.statistics().taken == 6)
            waiting.cancel()
            await asyncio.wait([waiting])
            asking += [asyncio.create_task(client.arequest(number(n), timeout=PATIENCE)) for n in range(2)]
            batch = await server.arecv(timeout=PATIENCE)
            assert len(batch) == 4
            batch.reply(batch.value)
            del batch
            await asyncio.gather(*asking)

    run(main())


def test_a_cancelled_reply_to_a_batch_can_be_gone_on_with(run, channel):  # noqa: F811
    """There is room for one reply at a time: the task that answers waits for its client to let go of the first."""
    nbytes = 1 << 20

    async def main():
        server = shmtensor.Server(channel, slots=1, max_bytes=nbytes + (1 << 19), max_batch=2, max_wait=PATIENCE)
        async with server, shmtensor.Client(channel) as client:
            asking = [asyncio.create_task(client.arequest(number(n), timeout=PATIENCE)) for n in range(2)]
            batch = await server.arecv(timeout=PATIENCE)
            value = np.arange(2, dtype=np.uint8).repeat(nbytes).reshape(2, nbytes)
            replying = asyncio.create_task(batch.areply(value))
            await until(lambda: batch.requests[0].answered)
            await asleep(server._taken.replies[client._requests.uid])
            replying.cancel()
            await asyncio.wait([replying])
            assert replying.cancelled()
            assert [request.answered for request in batch] == [True, False]
            done, left = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            assert done.pop().result().sum() == 0
            asking.clear()
            await batch.areply(value)
            assert (await left.pop()).sum() == nbytes

    run(main())


def test_nothing_comes(run, channel):  # noqa: F811
    async def main():
        async with shmtensor.Server(channel) as server:
            for timeout in (0, 0.02):
                with pytest.raises(shmtensor.TimedOut, match="no request in time"):
                    await server.arecv(timeout=timeout)
            waiting = asyncio.create_task(server.arecv())
            await asleep(server._receiver)
            server.close()
            with pytest.raises(shmtensor.ClosedError):
                await waiting

    run(main())


@pytest.mark.parametrize("turns", range(5))
def test_a_cancelled_task_has_taken_nothing(run, channel, turns):  # noqa: F811
    async def main():
        async with shmtensor.Server(channel) as server, shmtensor.Client(channel) as client:
            waiting = asyncio.create_task(server.arecv())
            await asleep(server._receiver)
            asking = asyncio.create_task(client.arequest(number(7), timeout=PATIENCE))
            await turns_of_the_loop(turns)
            waiting.cancel()
            await asyncio.wait([waiting])
            req = await server.arecv(timeout=PATIENCE) if waiting.cancelled() else waiting.result()
            del waiting
            await req.areply(req.value)
            assert int((await asking)[0]) == 7

    run(main())


def test_a_reply_waits_for_room(run, channel):  # noqa: F811
    """The client lets go of a reply: the next one has its slot."""
    nbytes = 1 << 20

    async def main():
        server = shmtensor.Server(channel, slots=1, max_bytes=nbytes + (1 << 19))
        async with server, shmtensor.Client(channel) as client:
            asking = [asyncio.create_task(client.arequest(n, timeout=PATIENCE)) for n in range(2)]
            first, second = await server.arecv(timeout=PATIENCE), await server.arecv(timeout=PATIENCE)
            await first.areply(np.zeros(nbytes, np.uint8))
            replying = asyncio.create_task(second.areply(np.ones(nbytes, np.uint8)))
            await asleep(server._taken.replies[client._requests.uid])
            assert not replying.done()
            done, left = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            assert done.pop().result().sum() == 0
            asking.clear()
            await replying
            assert (await left.pop()).sum() == nbytes
            # without room it is the caller's again
            client_keeps = asyncio.create_task(client.arequest(2, timeout=PATIENCE))
            third = await server.arecv(timeout=PATIENCE)
            await third.areply(np.ones(nbytes, np.uint8))
            kept = await client_keeps
            asking = asyncio.create_task(client.arequest(3, timeout=PATIENCE))
            fourth = await server.arecv(timeout=PATIENCE)
            with pytest.raises(shmtensor.RingFull, match=r'service ".*": no room for a reply of 1.0 MiB'):
                await fourth.areply(np.ones(nbytes, np.uint8))
            assert not fourth.answered
            fourth.fail("no room")
            del kept, client_keeps
            with pytest.raises(shmtensor.RemoteError):
                await asking

    run(main())


def test_the_loop_does_not_wait_for_a_thread_that_waits_for_room(run, channel, monkeypatch):  # noqa: F811
    nbytes = 1 << 20
    monkeypatch.setattr("shmtensor.rpc.endpoints.ROOM_S", PATIENCE)  # only the loop drops the reply that is in the way

    async def main():
        server = shmtensor.Server(channel, slots=1, max_bytes=nbytes + (1 << 19))
        async with server, shmtensor.Client(channel) as client:
            asking = [asyncio.create_task(client.arequest(n)) for n in range(3)]
            reqs = [await server.arecv(timeout=PATIENCE) for _ in asking]
            await reqs[0].areply(np.zeros(nbytes, np.uint8))
            join = in_thread(lambda: reqs[1].reply(np.ones(nbytes, np.uint8)))
            await asleep(server._taken.replies[client._requests.uid])
            replying = asyncio.create_task(reqs[2].areply(np.full(nbytes, 2, np.uint8)))
            await turns_of_the_loop(9)
            for value in range(3):
                assert (await asking.pop(0)).sum() == value * nbytes
            await asyncio.gather(join(), replying)

    run(main())


def test_aclose_of_a_client(run, channel):  # noqa: F811
    async def main():
        client = shmtensor.Client(channel)
        asking = asyncio.create_task(client.arequest(number(1)))
        future = client.submit(number(1))
        done = threading.Event()

        def ask():
            try:
                client.request(number(1))
            except shmtensor.ClosedError:
                done.set()

        join = in_thread(ask)
        await until(lambda: client.statistics().outstanding == 3)
        beats = 0

        async def beat():
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0)

        beating = asyncio.create_task(beat())
        await client.aclose()
        beating.cancel()
        assert beats > 1  # the loop went on
        assert client.closed
        with pytest.raises(shmtensor.ClosedError):
            await asking
        with pytest.raises(shmtensor.ClosedError):
            future.result(PATIENCE)
        await join()
        assert done.is_set()
        await client.aclose()
        async with shmtensor.Client(channel) as client:
            pass
        assert client.closed

    run(main())
