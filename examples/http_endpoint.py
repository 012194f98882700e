"""An HTTP endpoint that takes an image and answers from a pool of model processes.

The HTTP process only moves bytes: a worker decodes the image and runs the model. Any number of requests wait at once,
on the event loop, without a thread for each. A worker that dies is started again, and what it was working on goes to
another one: no request is lost. More requests than may wait are refused at once, with a time after which to try again.

    pip install '.[http]'
    python examples/http_endpoint.py            # asks itself 300 times at once, and kills a worker meanwhile
    uvicorn --app-dir examples http_endpoint:app     # serves: curl --data-binary @cat.jpg localhost:8000/classify

For an orchestrator: `/healthz` fails once the pool has given up, so that this process is started anew; `/readyz` fails
while no worker is ready, so that requests go elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import torch
import uvicorn
from PIL import Image, UnidentifiedImageError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import shmtensor

SERVICE, WORKERS, REQUESTS = "example-http", 2, 300
MOST_WAITING, RETRY_AFTER = WORKERS, 1
"""Requests that may wait for a worker, and the seconds after which one that is refused may come again."""


class Classifier:
    """What a worker holds. It is made once in each of them."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # the workers share the cores
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, stride=2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(),
            torch.nn.Linear(128, 10), torch.nn.Softmax(dim=1),
        ).eval()  # fmt: skip

    @torch.inference_mode()
    def __call__(self, file: np.ndarray) -> torch.Tensor:
        """The probabilities of ten classes, from the bytes of an image file."""
        image = Image.open(io.BytesIO(file)).convert("RGB").resize((64, 64))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255)
        return self.model(pixels[None])[0]


async def classify(request: Request) -> JSONResponse:
    file = np.frombuffer(await request.body(), np.uint8)
    pool = request.app.state.pool
    if pool.stopping or pool.statistics().waiting >= MOST_WAITING:
        return overloaded()
    try:
        scores = await request.app.state.client.arequest(file, timeout=60)
    except shmtensor.RemoteError as error:  # the handler raised: its type's name and text are all that travels
        status = 415 if error.type_name.endswith(UnidentifiedImageError.__name__) else 500
        return JSONResponse({"error": str(error.text)}, status_code=status)
    except shmtensor.TimedOut:
        return overloaded()
    return JSONResponse({"label": int(scores.argmax()), "scores": scores.tolist()})


def overloaded() -> JSONResponse:
    return JSONResponse({"error": "overloaded"}, status_code=503, headers={"Retry-After": str(RETRY_AFTER)})


async def healthz(request: Request) -> JSONResponse:
    """Live: this process answers, and its pool has not ended."""
    live = request.app.state.pool.exit_code is None
    return JSONResponse({"live": live}, status_code=200 if live else 503)


async def readyz(request: Request) -> JSONResponse:
    """Ready: a worker takes requests. Also while others are restarted or reloaded."""
    pool = request.app.state.pool
    seen = pool.statistics()
    ready = seen.ready > 0 and not pool.stopping
    shown = [{"pid": each.pid, "ready": each.ready, "last_error": each.last_error} for each in seen.workers]
    return JSONResponse({"ready": ready, "waiting": seen.waiting, "workers": shown}, status_code=200 if ready else 503)


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    with shmtensor.WorkerPool(Classifier, name=SERVICE, workers=WORKERS) as pool:
        # more slots than may wait: what a client has no room to send is not counted
        async with shmtensor.Client(SERVICE, slots=32, slot_bytes="256KiB") as client:
            app.state.client, app.state.pool = client, pool
            yield


app = Starlette(
    routes=[
        Route("/classify", classify, methods=["POST"]), Route("/healthz", healthz), Route("/readyz", readyz)
    ],
    lifespan=lifespan,
)  # fmt: skip


def make_images() -> list[bytes]:
    """Image files, each of its own colours."""
    rng = np.random.default_rng(0)
    files = []
    for _ in range(REQUESTS):
        file = io.BytesIO()
        colours = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(colours).resize((128, 128)).save(file, "PNG")
        files.append(file.getvalue())
    return files


async def ask(files: list[bytes], port: int, kill: Any) -> tuple[list[list[float]], int]:
    """Every file at once over HTTP, and again if it is refused; `kill()` when a quarter of the answers is there.

    Returns the answers, and how often one was refused.
    """
    answered = refused = 0
    limits = httpx.Limits(max_connections=len(files))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120, limits=limits) as web:
        while (await web.get("/readyz")).status_code == 503:
            await asyncio.sleep(0.05)

        async def post(file: bytes) -> list[float]:
            nonlocal answered, refused
            while (answer := await web.post("/classify", content=file)).status_code == 503:
                refused += 1
                await asyncio.sleep(float(answer.headers["Retry-After"]))
            answer.raise_for_status()
            answered += 1
            if answered == len(files) // 4:
                kill()
            return answer.json()["scores"]

        return await asyncio.gather(*(post(file) for file in files)), refused


async def main() -> None:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        if serving.done():
            raise RuntimeError("the server has not started")
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    files = make_images()
    scores, refused = await ask(files, port, lambda: os.kill(app.state.pool.pids[0], signal.SIGKILL))
    model = Classifier()
    for file, score in zip(files, scores, strict=True):
        torch.testing.assert_close(torch.tensor(score), model(np.frombuffer(file, np.uint8)))
    server.should_exit = True
    await serving
    print(f"{len(scores)} requests at once, one of {WORKERS} workers killed meanwhile: every answer came, and is right")
    print(f"at most {MOST_WAITING} waited for a worker; others were told to come again, {refused} times in all")


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="%(message)s")
    asyncio.run(main())
