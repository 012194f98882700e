"""Actors of a Ray cluster that meet by the name of a channel, on whichever nodes they are.

    pip install '.[ray,torch]'
    python examples/ray_cluster.py

Connects to the cluster of `RAY_ADDRESS`, or starts one on this machine. One actor on each node sees every image.
"""

import os

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import shmtensor.ray

CHANNEL = "example-ray"
IMAGES = 20


@ray.remote(num_cpus=0)
class Viewer:
    def __init__(self) -> None:
        self.images = shmtensor.Subscriber(CHANNEL)

    def watch(self) -> int:
        total = 0
        for message in self.images:  # ends when the camera has left
            total += int(message.value["number"])  # message.value["image"] is a view of shared memory
        return total


@ray.remote(num_cpus=0)
def camera() -> None:
    with shmtensor.Publisher(CHANNEL) as images:
        for number in range(IMAGES):
            images.send({"image": np.full((480, 640, 3), number, np.uint8), "number": number})


def main() -> None:
    ray.init(include_dashboard=False, log_to_driver=False)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    with shmtensor.ray.relays(CHANNEL) as relays:
        relays.wait(timeout=120)
        viewers = []
        for node in nodes:
            here = NodeAffinitySchedulingStrategy(node, soft=False)
            viewers.append(Viewer.options(scheduling_strategy=here).remote())
        ray.get([viewer.__ray_ready__.remote() for viewer in viewers])  # who subscribes later misses what was sent
        sums = [viewer.watch.remote() for viewer in viewers]
        ray.get(camera.remote())
        assert ray.get(sums) == [sum(range(IMAGES))] * len(nodes)
    print(f"{IMAGES} images were seen on each of {len(nodes)} nodes")
    ray.shutdown()


if __name__ == "__main__":
    main()
