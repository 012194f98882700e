"""Channels of a Ray cluster: two nodes with a `/dev/shm` each, actors that meet by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

import shmtensor
import shmtensor.ray

from ..scenes import HIDDEN, ROOT
from .cluster import RayCluster, skip_unless_there

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster():
    skip_unless_there()
    made = RayCluster("relay_plays")
    yield made
    made.close()


def test_the_example(cluster):
    """Of the guide, on two nodes."""
    said = cluster.play("example", (ROOT / "examples" / "ray_cluster.py").read_text())
    assert said.endswith("20 images were seen on each of 2 nodes\n")


@pytest.mark.parametrize("how", ["ends", "killed", "shutdown"])
def test_relays_end_with_their_driver(cluster, how):
    cluster.play("driver_ends", how)


@pytest.mark.parametrize(
    "play",
    [
        "fan_out",
        "fan_out_restarted",
        "queue",
        "queue_without_consumers",
        "service",
        "refusals",
        "actor_ends",
        "nodes_come_and_go",
        "node_without_the_library",
    ],
)
def test_relays(cluster, play):
    cluster.play(play)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"name": "bad name"}, ValueError, "bad name"),
        ({"name": []}, ValueError, "one channel, or several"),
        ({"name": ["a", "a"]}, ValueError, "one channel, or several"),
        ({"pattern": "fan"}, ValueError, "pattern='fan'"),
        ({"delivery": "some"}, ValueError, "delivery='some'"),
        ({"delivery": "latest", "pattern": "work-queue"}, ValueError, "is for a fan-out"),
        ({"protocol": "udp"}, ValueError, "protocol='udp'"),
        ({"ports": 7447}, TypeError, "ports is a range"),
        ({"ports": range(10)}, ValueError, "a range of ports from 1"),
        ({"ports": range(10, 10)}, ValueError, "a range of ports from 1"),
        ({"nodes": "abc"}, TypeError, "nodes are IDs"),
        ({"nodes": [1]}, TypeError, "nodes are IDs"),
        ({"window": 0}, ValueError, "window must be between"),
        ({"slots": 0}, ValueError, "slots must be between"),
        ({"away": -1}, ValueError, "away must be"),
        ({"max_bytes": "many"}, ValueError, "max_bytes"),
        ({"name": "x" * 60, "pattern": "service"}, ValueError, "service name"),
    ],
)  # fmt: skip
def test_bad_arguments(options, kind, text):
    with pytest.raises(kind, match=text) as caught:
        shmtensor.ray.relays(options.pop("name", "frames"), **options)
    assert isinstance(caught.value, shmtensor.ShmTensorError)


def run(source: str) -> None:
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_without_a_cluster():
    skip_unless_there()
    run("""
import shmtensor.ray, sys
assert "ray" not in sys.modules and "torch" not in sys.modules
for call in (lambda: shmtensor.ray.relays("frames"), shmtensor.ray.register):
    try:
        call()
    except shmtensor.ArgumentError as error:
        assert "ray.init()" in str(error), error
    else:
        raise AssertionError(call)
import ray
assert not ray.is_initialized()
""")


def test_without_ray():
    run(
        HIDDEN.format(name="ray")
        + """
import shmtensor.ray
try:
    shmtensor.ray.relays("frames")
except shmtensor.DependencyError as error:
    assert error.name == "ray" and "pip install '.[ray]'" in str(error), error
else:
    raise AssertionError
"""
    )
