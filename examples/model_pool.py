"""A pool of workers that load a model once, know what is asked of them, and are replaced without losing a request.

Each worker loads the weights before it takes requests. When new weights are there, the pool is reloaded: one worker
after the other gets a new process, while requests go on.

    python examples/model_pool.py
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import tempfile
import threading
from pathlib import Path

import torch

import shmtensor

SERVICE, WORKERS = "example-model", 2


def load(weights: Path, worker: int) -> torch.nn.Module:
    """`setup`: once in each worker, before it takes requests."""
    torch.set_num_threads(1)  # the workers share the cores
    device = f"cuda:{worker % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Linear(4, 2)
    model.load_state_dict(torch.load(weights, weights_only=True))
    return model.eval().to(device)


def unload(model: torch.nn.Module) -> None:
    """`teardown`: when the worker ends, with what `load` returned."""
    logging.getLogger("example").info(
        "a model of %d parameters is unloaded", sum(p.numel() for p in model.parameters())
    )


@torch.inference_mode()
def predict(value: torch.Tensor, context: shmtensor.RequestContext) -> torch.Tensor | None:
    """The reply to one request."""
    model, out = context.state, value
    for _ in range((context.meta or {}).get("steps", 1)):
        if context.cancelled:  # the client has given up, or is dead: the reply would be dropped
            return None
        out = model(value.to(model.weight.device))
    return out.cpu()


def write_weights(path: Path, factor: float) -> None:
    torch.save({"weight": torch.full((2, 4), factor), "bias": torch.zeros(2)}, path)


def ask(until: threading.Event, seen: list[float]) -> None:
    """A client that asks all the time."""
    with shmtensor.Client(SERVICE) as client:
        while not until.is_set():
            seen.append(client.request(torch.ones(4), meta={"steps": 3}, timeout=60)[0].item())


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        weights = Path(directory) / "weights.pt"
        write_weights(weights, 1.0)
        pool = stack.enter_context(
            shmtensor.WorkerPool(
                predict, name=SERVICE, workers=WORKERS, setup=functools.partial(load, weights), teardown=unload
            )
        )
        pool.wait_ready(timeout=120)
        over, seen = threading.Event(), list[float]()
        client = threading.Thread(target=ask, args=(over, seen))
        client.start()
        try:
            write_weights(weights, 2.0)
            pool.reload(timeout=120)  # shmtensor serve: kill -HUP
        finally:
            over.set()
            client.join()
        with shmtensor.Client(SERVICE) as last:
            seen.append(last.request(torch.ones(4), timeout=60)[0].item())
        statistics = pool.statistics()
        for each in statistics.workers:
            print(f"worker {each.worker}: generation {each.generation}, restarts {each.restarts}, errors {each.errors}")
        assert seen[-1] == 8.0
        assert set(seen) <= {4.0, 8.0}
        assert all(each.generation == 1 for each in statistics.workers)
        print("new weights in every worker, and every request was answered meanwhile")


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="%(message)s")
    main()
