"""Inference workers: a producer hands images to worker processes that run a small model and send the results back.

Two work queues: each image goes to exactly one worker, each result to the main process. A worker that died would cost
nothing but time: its image would go to another one.

    python examples/inference_workers.py
"""

from __future__ import annotations

import multiprocessing

import torch

import shmtensor

IMAGES, WORKERS = 60, 2


def make_model() -> torch.nn.Module:
    """The same small network in every process: the same seed gives the same weights."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
        torch.nn.Linear(8, 10),
    ).eval()  # fmt: skip


def work() -> None:
    """One worker: images in, logits out, until the producer has closed and all images are done."""
    torch.set_num_threads(1)  # the workers share the cores
    model = make_model()
    images, logits = shmtensor.Consumer("example-images"), shmtensor.Producer("example-logits")
    with images, logits, torch.inference_mode():
        for msg in images:
            with msg:  # done when the block is left: the result is on its way by then
                pixels = msg.value["image"].float().div(255)  # reads the slot itself
                logits.send(model(pixels[None])[0], meta={"id": msg.value["id"], "attempt": msg.attempt})


def main() -> None:
    context = multiprocessing.get_context("spawn")
    # The receiver of the results exists before the first worker does.
    with shmtensor.Consumer("example-logits") as results:
        workers = [context.Process(target=work, daemon=True) for _ in range(WORKERS)]
        for worker in workers:
            worker.start()
        images = torch.randint(0, 256, (IMAGES, 3, 96, 96), dtype=torch.uint8)
        got: dict[int, torch.Tensor] = {}
        with shmtensor.Producer("example-images", slots=8) as tx:
            tx.wait_for_consumers(WORKERS, timeout=60)
            for number, image in enumerate(images):
                tx.send({"image": image, "id": number})
                if number >= 4:  # results come back while images go out
                    take(results, got)
        while len(got) < IMAGES:
            take(results, got)
        for worker in workers:
            worker.join()
    model = make_model()
    with torch.inference_mode():
        for number, image in enumerate(images):
            torch.testing.assert_close(got[number], model(image[None].float().div(255))[0])
    print(f"{len(got)} images, {WORKERS} workers, all results as computed here")


def take(results: shmtensor.Consumer, got: dict[int, torch.Tensor]) -> None:
    with results.recv(timeout=60, copy=True) as msg:  # a private copy: its slot is free again at once
        got[msg.meta["id"]] = msg.value


if __name__ == "__main__":
    main()
