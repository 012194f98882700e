"""Parts of checkpoints as `shmtensor.dcp` saves them, without torch."""

from __future__ import annotations

import numpy as np

from shmtensor.checkpoint.formats.distcp import KEY


def dcp_part(rank: int, step: int) -> tuple[dict, dict]:
    """State and `meta` of one of two parts, of one tensor of all, one of its own, and an object."""
    tensors = [["w", ["w"], [10_000], [5_000 * rank]], [f"own{rank}", ["own", rank], [0], [0]]]
    objects = [["object", ["object"], 4], [f"o{rank}", ["o", rank], 3]]
    state = {
        "tensors": {"w": np.full(5_000, 10.0 * step + rank), "own": np.empty(0)},
        "objects": np.frombuffer(b"same" + b"own", np.uint8),
    }
    return state, {"step": step, KEY: {"version": 1, "tensors": tensors, "objects": objects}}


def save_part(writer, rank: int, step: int):
    """Save the part of a rank; returns the handle."""
    state, meta = dcp_part(rank, step)
    return writer.save(state, meta=meta)
