"""Images to worker processes and results back, through a queue.

With the standard library the program is the same but for its last import:

    from multiprocessing import get_context
"""

import torch

from shmtensor import get_context


def work(tasks, results):
    for number, image in iter(tasks.get, None):
        image -= image.mean()  # what came out of the queue may be written: it is the getter's own
        results.put((number, image.square().mean()))


if __name__ == "__main__":
    ctx = get_context("spawn")
    tasks, results = ctx.Queue(maxsize=8), ctx.Queue()
    workers = [ctx.Process(target=work, args=(tasks, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for number in range(20):
        tasks.put((number, torch.arange(3 * 64 * 64.0).view(3, 64, 64) * number))
    powers = dict(results.get() for _ in range(20))
    for _ in workers:  # only now: in the standard queue, a tensor that nobody has got yet is lost when its putter ends
        tasks.put(None)
    for worker in workers:
        worker.join()
    assert all(powers[number] > powers[number - 1] for number in range(1, 20))
    print("20 images from 2 workers, mean square of the last:", round(powers[19].item()))
