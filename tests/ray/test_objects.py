"""Tensors in object refs of a Ray cluster are views of its object store."""

from __future__ import annotations

import pytest

from .cluster import RayCluster, skip_unless_there

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster():
    skip_unless_there()
    made = RayCluster("object_plays", "shmtensor.ray.register")
    yield made
    made.close()


@pytest.mark.parametrize("play", ["objects", "models", "registers", "leases", "owner_dies"])
def test_objects(cluster, play):
    cluster.play(play)
