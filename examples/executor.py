"""Load and augment images in two worker processes; the tensors come back through shared memory, not through pickle.

With the standard library the program is the same but for its first import:

    from concurrent.futures import ProcessPoolExecutor
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from shmtensor import ProcessPoolExecutor

COUNT = 24


def load(path: Path) -> dict[str, np.ndarray]:
    """In a worker: one sample, an image and its labels."""
    image = np.load(path)
    return {"image": image, "label": (image[0] > 127).astype(np.uint8)}


def brightness(sample: dict[str, np.ndarray]) -> float:
    """In a worker: what a sample says of itself."""
    return float(sample["image"].mean())


def main() -> None:
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(max_workers=2) as pool:
        paths = [Path(folder, f"{number}.npy") for number in range(COUNT)]
        for path in paths:
            np.save(path, random.integers(0, 256, (3, 640, 480), np.uint8))

        shapes, bright, total = set(), 0, 0.0
        for sample in pool.map(load, paths):
            shapes.add((sample["image"].shape, sample["label"].shape))
            bright += int(sample["label"].sum())
            sample["image"] //= 2  # results are this process's own: they may be written
            total += pool.submit(brightness, sample).result()
        print(f"{COUNT} samples of {shapes}: {bright} bright pixels, mean {total / COUNT:.3f}")


if __name__ == "__main__":
    main()
