"""examples/http_endpoint.py as a module: what is no image, too many requests, its health.

Load, and a killed worker: the example itself, as run.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ..waiting import PATIENCE, stop

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

pytestmark = pytest.mark.slow


@pytest.fixture
def endpoint(channel, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    endpoint = importlib.import_module("http_endpoint")
    monkeypatch.setattr(endpoint, "SERVICE", channel)
    monkeypatch.setattr(endpoint, "WORKERS", 1)
    return endpoint


@contextlib.asynccontextmanager
async def serving(endpoint):
    """A client of the running application, whose pool is ready."""
    async with endpoint.lifespan(endpoint.app):
        transport = httpx.ASGITransport(app=endpoint.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as web:
            await asyncio.to_thread(endpoint.app.state.pool.wait_ready, timeout=PATIENCE)
            yield web
    del endpoint.app.state.client, endpoint.app.state.pool


async def until(holds):
    """Until a coroutine function returns something true."""
    deadline = time.monotonic() + PATIENCE
    while not await holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_what_is_no_image_is_refused(endpoint):
    async def main():
        async with serving(endpoint) as web:
            refused = await web.post("/classify", content=b"not an image")
            assert refused.status_code == 415, refused.text
            assert "cannot identify image file" in refused.json()["error"]
            answer = await web.post("/classify", content=endpoint.make_images()[0])
            assert answer.status_code == 200
            assert len(answer.json()["scores"]) == 10
            assert (await web.get("/classify")).status_code == 405
            endpoint.app.state.client.close()
            with pytest.raises(endpoint.shmtensor.ClosedError):
                await web.post("/classify", content=b"")

    asyncio.run(main())


def test_more_requests_than_may_wait_are_refused(endpoint, monkeypatch):
    """While the worker is stopped; all that were accepted are answered afterwards."""
    monkeypatch.setattr(endpoint, "MOST_WAITING", 2)
    image = endpoint.make_images()[0]

    async def main():
        async with serving(endpoint) as web:
            assert (await web.post("/classify", content=image)).status_code == 200
            pid = endpoint.app.state.pool.pids[0]
            stop(pid)
            try:
                accepted = [asyncio.create_task(web.post("/classify", content=image)) for _ in range(2)]

                async def are_waiting():
                    return (await web.get("/readyz")).json()["waiting"] == 2

                await until(are_waiting)
                refused = await web.post("/classify", content=image)
                assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
            finally:
                os.kill(pid, signal.SIGCONT)
            assert [(await each).status_code for each in accepted] == [200, 200]
            assert (await web.post("/classify", content=image)).status_code == 200

    asyncio.run(main())


def test_live_and_ready(endpoint):
    async def main():
        async with serving(endpoint) as web:
            pool = endpoint.app.state.pool

            async def statuses():
                return [(await web.get(path)).status_code for path in ("/healthz", "/readyz")]

            assert await statuses() == [200, 200]
            (seen,) = (await web.get("/readyz")).json()["workers"]
            assert seen == {"pid": pool.pids[0], "ready": True, "last_error": ""}
            os.kill(pool.pids[0], signal.SIGKILL)

            async def has_died():
                return "SIGKILL" in (await web.get("/readyz")).json()["workers"][0]["last_error"]

            async def is_back():
                return await statuses() == [200, 200]

            await until(has_died)
            await until(is_back)
            down = dataclasses.replace(pool.statistics(), ready=0)
            endpoint.app.state.pool = SimpleNamespace(exit_code=None, stopping=False, statistics=lambda: down)
            assert await statuses() == [200, 503], "it lives, and no worker is ready"
            endpoint.app.state.pool = pool
            pool.stop()
            await asyncio.to_thread(pool.join, timeout=PATIENCE)
            assert await statuses() == [503, 503]
            assert (await web.post("/classify", content=b"")).status_code == 503

    asyncio.run(main())
