"""Features stay on the GPU: a process computes straight into a ring in device memory, others read it there.

Without a GPU the program says so and ends: such a ring lies in the memory of one.

python examples/device_ring.py
"""

from __future__ import annotations

import multiprocessing

import torch

import shmtensor

CHANNEL, COUNT, ROWS, COLUMNS = "example-device", 20, 256, 1024


def reader(results) -> None:
    """Nothing here says where the messages lie: their tensors are the slots, on the device."""
    sums = []
    with shmtensor.Subscriber(CHANNEL) as subscriber:
        results.put("joined")
        for msg in subscriber:  # ends when the publisher has closed
            sums.append(msg.value.float().mean())  # queued after the writer's kernel; the host does not wait
            del msg  # the slot goes back when the device has read it
    results.put([round(each.item()) for each in sums])


def main() -> None:
    try:
        publisher = shmtensor.Publisher(CHANNEL, device="cuda", slots=4)
    except shmtensor.CudaError as error:
        print(f"nothing to show here: {error.strerror}")
        return
    context = multiprocessing.get_context("spawn")  # a forked child has no CUDA
    results = context.SimpleQueue()
    with publisher:
        process = context.Process(target=reader, args=(results,), daemon=True)
        process.start()
        results.get()
        for number in range(COUNT):
            with publisher.loan((ROWS, COLUMNS), torch.float16, timeout=60) as loan:
                loan.tensor.fill_(number)  # computed where it will be read: no copy at all
    seen = results.get()
    process.join()
    if seen != list(range(COUNT)):
        raise SystemExit(f"other numbers were read: {seen}")
    print(f"{COUNT} tensors were read on the GPU where they had been computed")


if __name__ == "__main__":
    main()
