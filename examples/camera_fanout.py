"""One camera, two readers: a recorder that must not lose a frame, and a viewer that only wants the newest one.

The recorder holds the camera back when it falls behind; the viewer never does, however slow it is.

    python examples/camera_fanout.py
"""

from __future__ import annotations

import multiprocessing
import time
import zlib

import numpy as np

import shmtensor

CHANNEL, FRAMES = "example-camera", 120


def record(answer) -> None:
    """Lossless: every frame, in order. Its checksums stand for a file."""
    sums = []
    with shmtensor.Subscriber(CHANNEL) as sub:
        for msg in sub:
            with msg:
                sums.append(zlib.crc32(msg.value["image"]))  # reads the slot itself, without a copy
    answer.send(sums)


def view(answer) -> None:
    """Latest only: what it misses is counted."""
    shown, missed = [], 0
    with shmtensor.Subscriber(CHANNEL, delivery="latest") as sub:
        for msg in sub:
            with msg:
                shown.append(msg.value["id"])
                missed += msg.missed
                time.sleep(0.02)  # a slow screen
    answer.send((shown, missed))


def main() -> None:
    context = multiprocessing.get_context("spawn")
    recorder_pipe, theirs_1 = context.Pipe()
    viewer_pipe, theirs_2 = context.Pipe()
    readers = [
        context.Process(target=run, args=(end,), daemon=True) for run, end in ((record, theirs_1), (view, theirs_2))
    ]
    for reader in readers:
        reader.start()
    noise = np.random.default_rng(0)
    sent = []
    with shmtensor.Publisher(CHANNEL, slots=8) as camera:
        camera.wait_for_subscribers(len(readers), timeout=60)
        for number in range(FRAMES):
            image = noise.integers(0, 256, (240, 320, 3), dtype=np.uint8)
            sent.append(zlib.crc32(image))
            camera.send({"image": image, "id": number}, meta={"ts": time.time()})
    recorded = recorder_pipe.recv()
    shown, missed = viewer_pipe.recv()
    for reader in readers:
        reader.join()
    if recorded != sent:
        raise SystemExit("the recorder has other frames than the camera sent")
    if shown != sorted(set(shown)):
        raise SystemExit("the viewer went back in time")
    print(f"{FRAMES} frames: recorder got {len(recorded)}; viewer showed {len(shown)} and passed over {missed}")


if __name__ == "__main__":
    main()
