"""Tensors in Ray's object refs: put on a node and got by an actor there, as they are, and by `shmtensor.ray.register`.

    python -m benchmarks.ray_objects

Medians, for each way in a cluster of its own on this machine, one after the other: `ray.put` of a torch tensor in
the driver, and an actor that gets it and reads one byte of each page, with the call of the actor. docs/guide/ray.md
shows the output.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from typing import Any

from .sizes import KIB, MIB, label

SIZES = (KIB, MIB, 16 * MIB)
COUNT = 60
WAYS = {
    "as it is": "Ray",
    "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS=1": "Ray, zero-copy tensors",
    "shmtensor.ray.register": "shmtensor.ray.register",
}


def measure(way: str) -> None:
    """One way, in this process: prints a line for each size."""
    import logging
    import warnings

    import ray
    import torch

    warnings.simplefilter("ignore")
    hook = {"worker_process_setup_hook": way} if way.startswith("shmtensor") else None
    ray.init(
        num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
        object_store_memory=512 * MIB, runtime_env=hook, _node_ip_address="127.0.0.1",
    )  # fmt: skip
    if hook is not None:
        import shmtensor.ray

        shmtensor.ray.register()

    class Reader:
        def read(self, tensor: Any) -> int:
            return int(tensor[::4096].sum())

    reader = ray.remote(Reader).remote()
    for nbytes in SIZES:
        tensor = torch.ones(nbytes, dtype=torch.uint8)
        puts, gets = [], []
        for number in range(COUNT + 5):
            start = time.perf_counter()
            reference = ray.put(tensor)
            middle = time.perf_counter()
            ray.get(reader.read.remote(reference))
            end = time.perf_counter()
            if number >= 5:
                puts.append(middle - start)
                gets.append(end - middle)
        put, get = (statistics.median(times) * 1e3 for times in (puts, gets))
        print(f"{WAYS[way]:24} {label(nbytes):>8} {put:9.2f} ms {get:9.2f} ms", flush=True)
    ray.shutdown()


def main() -> None:
    print(f"{'':24} {'':>8} {'put':>12} {'call, read':>12}")
    for way in WAYS:
        name, equals, value = way.partition("=")
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", **({name: value} if equals else {})}
        subprocess.run([sys.executable, "-m", "benchmarks.ray_objects", way], env=environment, check=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1])
    else:
        main()
