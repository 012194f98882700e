"""Request and reply: two worker processes answer for a small model, one of them is killed, and no request is lost.

python examples/request_reply.py
"""

from __future__ import annotations

import logging
import os
import signal

import torch

import shmtensor


class Model:
    """What a worker makes once: a network that is the same in every process."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # the workers share the cores
        torch.manual_seed(0)
        self.network = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, stride=2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
            torch.nn.Linear(8, 10),
        ).eval()  # fmt: skip

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return self.network(images)


def main() -> None:
    logging.getLogger("shmtensor.serve").setLevel(logging.ERROR)  # no line about the death that is meant
    images = torch.rand(60, 3, 64, 64)
    pool = shmtensor.WorkerPool(Model, name="example-model", workers=2, max_batch=8, max_wait=0.005)
    with pool, shmtensor.Client("example-model") as client:
        pool.wait_ready(timeout=120)
        futures = [client.submit(image) for image in images[:30]]
        os.kill(pool.pids[0], signal.SIGKILL)  # its requests go to the other worker, and it is replaced
        futures += [client.submit(image) for image in images[30:]]
        logits = torch.stack([future.result(timeout=120) for future in futures])
    torch.testing.assert_close(logits, Model()(images))
    print(f"{len(images)} images, {tuple(logits.shape)} logits, one worker killed, every reply right")


if __name__ == "__main__":
    main()
