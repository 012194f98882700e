"""A producer that never imports torch, and a consumer that reads what it sends as torch tensors.

A camera process stays small this way: importing `shmtensor` and sending arrays loads NumPy, but not torch.

    python examples/numpy_only.py
"""

from __future__ import annotations

import subprocess
import sys

CHANNEL, FRAMES = "example-numpy", 30


def produce() -> None:
    """The camera process: NumPy only."""
    import numpy as np

    import shmtensor

    with shmtensor.Publisher(CHANNEL, slots=4) as pub:
        pub.wait_for_subscribers(1, timeout=60)
        for number in range(FRAMES):
            pub.send({"frame": np.full((120, 160, 3), number, np.uint8), "id": number})
    assert "torch" not in sys.modules, "something imported torch"


def consume() -> None:
    """Another program that shares nothing with the camera but the channel's name."""
    import torch

    import shmtensor

    with shmtensor.Subscriber(CHANNEL) as sub:
        camera = subprocess.Popen([sys.executable, __file__, "produce"])
        numbers = []
        for msg in sub:
            with msg:
                # An array arrives as an array; on a read-only one torch warns, so this takes a copy.
                frame = torch.from_numpy(msg.value["frame"].copy())
                if not bool((frame == msg.value["id"]).all()):
                    raise SystemExit(f"frame {msg.value['id']} is damaged")
                numbers.append(msg.value["id"])
    if camera.wait(timeout=60) or numbers != list(range(FRAMES)):
        raise SystemExit(f"the camera ended with {camera.returncode}, received: {numbers}")
    print(f"{len(numbers)} frames from a process without torch")


if __name__ == "__main__":
    produce() if sys.argv[1:] == ["produce"] else consume()
