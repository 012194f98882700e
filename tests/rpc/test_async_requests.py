"""`Client.arequest`: many tasks of one loop wait for replies at once; none is lost, whoever is cancelled or killed."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import random
import threading

import numpy as np
import pytest

import shmtensor

from ..endpoints.test_asyncio import PATIENCE, in_thread, run, turns_of_the_loop, until  # noqa: F401
from . import services


def double(value):
    if int(value[0]) < 0:
        raise ValueError("negative")
    return value * 2


@pytest.fixture
def service(channel):
    """A server in a thread of this process."""
    with shmtensor.Server(channel) as server:
        thread = threading.Thread(target=server.run, args=(double,), daemon=True)
        thread.start()
        yield channel
        server.stop()
        thread.join(PATIENCE)


def number(value: int) -> np.ndarray:
    return np.full(3, value, np.int64)


def test_requests_of_many_tasks(run, service):  # noqa: F811
    async def main():
        async with shmtensor.Client(service, slots=4) as client:
            assert (await client.arequest(number(4), timeout=float("inf"))).tolist() == [8, 8, 8]

            async def ask(count):
                assert int((await client.arequest(number(count), {"a": 1}, timeout=PATIENCE))[0]) == 2 * count

            await asyncio.gather(*(ask(count) for count in range(100)))
            with pytest.raises(shmtensor.RemoteError, match="ValueError: negative"):
                await client.arequest(number(-1), timeout=PATIENCE)
            stats = client.statistics()
            assert (stats.requests, stats.replies, stats.errors, stats.outstanding) == (102, 101, 1, 0)
        assert client.closed
        with pytest.raises(shmtensor.ClosedError, match="Client of service"):
            await client.arequest(number(1))

    run(main())


def test_no_reply_in_time(run, channel):  # noqa: F811
    async def main():
        with shmtensor.Client(channel, slots=2) as client:
            for timeout in (0, 0.02):
                with pytest.raises(shmtensor.TimedOut, match="no server took it"):
                    await client.arequest(number(1), timeout=timeout)
            waiting = [asyncio.create_task(client.arequest(number(1), timeout=PATIENCE)) for _ in range(4)]
            await until(lambda: client.statistics().outstanding == 2)
            with pytest.raises(shmtensor.RingFull):
                await client.arequest(number(1), timeout=0.02)
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)
            assert client.statistics().outstanding == 0
            waiting = asyncio.create_task(client.arequest(number(1)))
            await until(lambda: client.statistics().outstanding == 1)
        with pytest.raises(shmtensor.ClosedError):
            await waiting

    run(main())


def test_random_cancellations(run, service):  # noqa: F811
    """A reply goes to the task that asked, or nowhere; slots of requests and replies come back."""
    rng = random.Random(1)

    async def main():
        with shmtensor.Client(service, slots=3) as client:
            done = []

            async def ask(count):
                assert int((await client.arequest(number(count), timeout=PATIENCE))[0]) == 2 * count
                done.append(count)

            for first in range(0, 200, 20):
                tasks = [asyncio.create_task(ask(count)) for count in range(first, first + 20)]
                while not all(task.done() for task in tasks):
                    await turns_of_the_loop(rng.randrange(8))
                    if rng.random() < 0.3:
                        rng.choice(tasks).cancel()
                for task in tasks:
                    if not task.cancelled():
                        task.result()
                assert client.statistics().outstanding == 0
            await asyncio.gather(*(ask(count) for count in range(20)))
            assert len(done) >= 20

    run(main())


def test_threads_and_tasks_share_a_client(run, service):  # noqa: F811
    async def main():
        with shmtensor.Client(service, slots=4) as client:

            def ask_in_thread(first):
                return [int(client.request(number(count), timeout=PATIENCE)[0]) for count in range(first, first + 50)]

            def submit(first):
                futures = [client.submit(number(count), timeout=PATIENCE) for count in range(first, first + 50)]
                return [int(future.result(PATIENCE)[0]) for future in futures]

            async def ask(count):
                return int((await client.arequest(number(count), timeout=PATIENCE))[0])

            joins = [in_thread(ask_in_thread, 0), in_thread(submit, 50)]
            assert await asyncio.gather(*(ask(count) for count in range(100))) == [2 * count for count in range(100)]
            assert [value for join in joins for value in await join()] == [2 * count for count in range(100)]

    run(main())


def test_nothing_waits_for_a_thread_that_waits_for_servers(run, channel):  # noqa: F811
    async def main():
        async with shmtensor.Client(channel) as client, contextlib.AsyncExitStack() as stack:
            server = await stack.enter_async_context(shmtensor.Server(channel))
            join = in_thread(lambda: client.wait_for_servers(2, timeout=PATIENCE))
            await until(lambda: client._requests._recipients.listeners)
            asking = asyncio.create_task(client.arequest(number(7), timeout=PATIENCE))
            req = await server.arecv(timeout=PATIENCE)
            await stack.enter_async_context(shmtensor.Server(channel))  # ends the thread's wait
            await join()
            await req.areply(req.value)
            assert int((await asking)[0]) == 7

    run(main())


@pytest.mark.slow
def test_a_killed_server_costs_no_request(run, channel):  # noqa: F811
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    roles = [
        context.Process(target=role, args=(pipe[1], channel, {}), daemon=True)
        for role, pipe in zip((services.hold, services.double), pipes, strict=True)
    ]

    async def main():
        with shmtensor.Client(channel) as client:

            async def ask(count):
                return int((await client.arequest(number(count), timeout=PATIENCE))[0])

            roles[0].start()
            await until(pipes[0][0].poll)
            assert pipes[0][0].recv() == "here"
            tasks = [asyncio.create_task(ask(count)) for count in range(100)]
            await until(pipes[0][0].poll)
            assert pipes[0][0].recv()[1] == 1  # it has a request, and keeps it
            roles[1].start()
            await until(lambda: sum(task.done() for task in tasks) >= 50)
            roles[0].kill()
            assert await asyncio.gather(*tasks) == [2 * count for count in range(100)]

    run(main())
    roles[1].terminate()
    for role in roles:
        role.join(PATIENCE)
    shmtensor.Publisher(channel + "-next").close()  # who comes next removes what the dead left


def test_one_loop_at_a_time(channel):
    async def main():
        async with shmtensor.Client(channel) as client:
            first = asyncio.create_task(client.arequest(number(1)))
            await until(lambda: client.statistics().outstanding)
            await turns_of_the_loop(5)

            def other():
                with pytest.raises(
                    shmtensor.LoopError, match=r'^Client of service "[^"]*": tasks of another event loop'
                ):
                    asyncio.run(client.arequest(number(2), timeout=PATIENCE))

            await asyncio.to_thread(other)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first

    asyncio.run(main())
