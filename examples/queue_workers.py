"""Images to worker processes and results back, through a queue.

The only line that differs from the same program over the standard library is the one that makes the context:

    ctx = multiprocessing.get_context("spawn")
"""

import torch

import shmtensor


def work(tasks, results):
    for number, image in iter(tasks.get, None):
        image -= image.mean()  # what came out of the queue may be written: it is the getter's own
        results.put((number, image.square().mean()))


if __name__ == "__main__":
    ctx = shmtensor.get_context("spawn")
    tasks, results = ctx.Queue(maxsize=8), ctx.Queue()
    workers = [ctx.Process(target=work, args=(tasks, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for number in range(20):
        tasks.put((number, torch.arange(3 * 64 * 64.0).view(3, 64, 64) * number))
    for _ in workers:
        tasks.put(None)
    powers = dict(results.get() for _ in range(20))
    for worker in workers:
        worker.join()
    assert all(powers[number] > powers[number - 1] for number in range(1, 20))
    print("20 images from 2 workers, mean square of the last:", round(powers[19].item()))
