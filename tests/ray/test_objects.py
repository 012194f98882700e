"""Tensors in object refs of a Ray cluster are views of its object store."""

from __future__ import annotations

import pickle

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


@pytest.mark.parametrize("source", ["repeated", "overlapping", "a slice"])
def test_what_expand_repeats_is_stored_once(source):
    """As a view of what it repeats, as torch itself pickles it."""
    torch = pytest.importorskip("torch")
    from shmtensor.ray import objects

    made = {
        "repeated": torch.ones(3, 1, dtype=torch.uint16).expand(3, 100_000),
        "overlapping": torch.as_strided(torch.arange(700.0), (300, 200), (1, 2), 0),
        "a slice": torch.arange(4000.0)[2000:2003].expand(50_000, 3),
    }[source]
    stored = pickle.dumps(objects._flatten(made), protocol=5)
    assert len(stored) < 5000
    found = objects.rebuild(pickle.loads(stored))
    assert torch.equal(found, made)
    assert (found.dtype, found.stride()) == (made.dtype, made.stride())
