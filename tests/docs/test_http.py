"""examples/http_endpoint.py as a module: what is no image. Load, and a killed worker: the example itself, as run."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


@pytest.mark.slow
def test_what_is_no_image_is_refused(channel, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    endpoint = importlib.import_module("http_endpoint")
    monkeypatch.setattr(endpoint, "SERVICE", channel)
    monkeypatch.setattr(endpoint, "WORKERS", 1)

    async def main():
        async with endpoint.lifespan(endpoint.app):
            transport = httpx.ASGITransport(app=endpoint.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as web:
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
        del endpoint.app.state.client, endpoint.app.state.pool

    asyncio.run(main())
