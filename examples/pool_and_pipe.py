"""Filter images in two worker processes of a Pool, and send what they make to a process that sums it up, by a Pipe.

With the standard library the program is the same but for one import:

    from multiprocessing import get_context
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shmtensor import get_context

COUNT = 24


def edges(image: np.ndarray) -> np.ndarray:
    """In a worker: where brightness changes from left to right."""
    return np.abs(np.diff(image.astype(np.int16), axis=1))


def sum_up(images: Any, answer: Any) -> None:
    """In another process: the strongest edge of each image, until there are no more."""
    strongest = []
    while (image := images.recv()) is not None:
        strongest.append(int(image.max()))
    answer.send(np.array(strongest))


def main() -> None:
    ctx = get_context("spawn")
    random = np.random.default_rng(0)
    images = [random.integers(0, 256 - 8 * number, (480, 640), np.uint8) for number in range(COUNT)]
    to_sum, ours = ctx.Pipe(duplex=False)
    answer, theirs = ctx.Pipe(duplex=False)
    summer = ctx.Process(target=sum_up, args=(to_sum, theirs))
    summer.start()
    to_sum.close()  # the child has them
    theirs.close()
    with ctx.Pool(2) as pool:
        for image in pool.imap(edges, images):
            ours.send(image)
    ours.send(None)
    print(f"strongest edges of {COUNT} images: {answer.recv()[:4].tolist()} ...")
    summer.join()


if __name__ == "__main__":
    main()
