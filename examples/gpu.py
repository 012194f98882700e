"""Frames to a GPU and results back: the next frames are copied while the current one is computed on.

Without a GPU the same program computes on the CPU, and says so.

python examples/gpu.py
"""

from __future__ import annotations

import multiprocessing

import torch

import shmtensor

FRAMES, RESULTS, COUNT, SHAPE = "example-gpu-frames", "example-gpu-results", 40, (3, 240, 320)


def camera() -> None:
    with shmtensor.Producer(FRAMES, slots=8) as frames:
        for number in range(COUNT):
            frames.send(torch.full(SHAPE, float(number)), meta={"number": number})


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else None  # None: values stay where they are, in their slots
    context = multiprocessing.get_context("spawn")
    with (
        shmtensor.Consumer(FRAMES, device=device, prefetch=2 if device else 0) as frames,
        shmtensor.Publisher(RESULTS) as results,
        shmtensor.Subscriber(RESULTS) as reader,
    ):
        process = context.Process(target=camera, daemon=True)
        process.start()
        wrong = 0
        for msg in frames:  # ends when the camera has closed
            with msg:
                half = msg.value.mean(dim=(1, 2)) / 2  # on the device, if there is one
                results.send(half)  # from the device straight into a slot
            with reader.recv(timeout=60) as answer:
                wrong += not answer.value.eq(msg.meta["number"] / 2).all().item()
        process.join()
        pinned = frames.statistics().pinned_bytes
    if wrong:
        raise SystemExit(f"{wrong} results differ")
    where = f"on the GPU, from {pinned} pinned bytes" if device else "on the CPU: there is no usable CUDA device here"
    print(f"{COUNT} frames computed {where}")


if __name__ == "__main__":
    main()
