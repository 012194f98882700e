"""Never a stale tensor: whatever is kept of a message, its bytes never change while it is kept."""

from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shmtensor

from ..waiting import PATIENCE

KEEPERS = {
    "value": lambda tensor: tensor,
    "slice": lambda tensor: tensor[1:3],
    "view": lambda tensor: tensor.view(2, -1),
    "transposed": lambda tensor: tensor.view(2, -1).t(),
    "parameter": lambda tensor: torch.nn.Parameter(tensor),
    "graph": lambda tensor: (torch.nn.Parameter(torch.ones(())) * tensor).grad_fn,
    "numpy": lambda tensor: tensor.numpy(),
    "numpy slice": lambda tensor: tensor.numpy()[::2],
    "memoryview": lambda tensor: memoryview(tensor.numpy()),
    "storage": lambda tensor: tensor.untyped_storage(),
    "bytes view": lambda tensor: tensor.view(torch.uint8),
    "detached": lambda tensor: tensor.detach().requires_grad_(),
    "chunk": lambda tensor: torch.chunk(tensor, 2)[1],
    "list": lambda tensor: [tensor[0], {"a": tensor[3]}],
}


def content(kept) -> object:
    """The bytes that something kept still shows."""
    if isinstance(kept, torch.nn.Parameter):
        return kept.detach().clone()
    if isinstance(kept, torch.Tensor):
        return kept.detach().clone()
    if isinstance(kept, np.ndarray):
        return kept.copy()
    if isinstance(kept, memoryview):
        return kept.tobytes()
    if isinstance(kept, torch.UntypedStorage):
        return bytes(kept)
    if isinstance(kept, (list, dict)):
        return [content(item) for item in (kept.values() if isinstance(kept, dict) else kept)]
    return kept._saved_other.clone()  # an autograd node


def same(one, two) -> bool:
    if isinstance(one, list):
        return all(same(a, b) for a, b in zip(one, two, strict=True))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    return bool(np.array_equal(one, two)) if isinstance(one, np.ndarray) else one == two


@pytest.mark.parametrize("pattern", ["fan-out", "work-queue"])
@pytest.mark.parametrize("keeper", KEEPERS)
@pytest.mark.parametrize("end", ["release", "close", "gone"])
def test_kept_views_never_change(channel, pattern, keeper, end):
    fan_out = pattern == "fan-out"
    tx = (shmtensor.Publisher if fan_out else shmtensor.Producer)(channel, slots=3)
    make = shmtensor.Subscriber if fan_out else shmtensor.Consumer
    rx = make(channel)
    tx.send(torch.arange(8, dtype=torch.float32))
    msg = rx.recv(timeout=PATIENCE)
    kept = KEEPERS[keeper](msg.value)
    before = content(kept)
    msg.release()
    del msg
    other = None
    if end == "close":
        rx.close()
        other = rx = make(channel)
    for number in range(1000 if end == "gone" else 300):
        tx.send(torch.full((8,), -float(number)), timeout=PATIENCE)
        rx.recv(timeout=PATIENCE).release()
    if end == "gone":
        tx.close()
    gc.collect()
    assert same(content(kept), before)
    tx.close()
    rx.close()
    del other
    assert same(content(kept), before)
    del kept, before, rx
    gc.collect()


EXAMPLE = itertools.count()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fan_out=st.booleans(),
    slots=st.integers(1, 4),
    program=st.lists(st.tuples(st.sampled_from("ssssrrrkkdcl"), st.integers(0, 99)), max_size=60),
)
@pytest.mark.filterwarnings("ignore:.*that no consumer has finished:ResourceWarning")  # on purpose
def test_any_history_of_sends_keeps_and_drops(channel, fan_out, slots, program):
    """A random program of sends, receives, keeps, drops, closes; everything kept shows what it showed at first."""
    both = (shmtensor.Publisher, shmtensor.Subscriber), (shmtensor.Producer, shmtensor.Consumer)
    pattern = both[0] if fan_out else both[1]
    kept: list[tuple[object, object]] = []
    channel = f"{channel}-{next(EXAMPLE)}"
    with pattern[0](channel, slots=slots, slot_bytes=64, full="grow") as tx:
        rx = pattern[1](channel)
        number = 0
        for action, choice in program:
            if action == "s":
                number += 1
                size = (1, 4, 40)[choice % 3]
                tx.send({"a": torch.full((size,), float(number)), "b": np.full(3, number)})
            elif action == "l":
                number += 1
                with tx.loan((5,), np.int64) as loan:
                    loan.array[...] = number
            elif action == "d" and kept:
                kept.pop(choice % len(kept))
            elif action == "c":
                rx.close()
                rx = pattern[1](channel)
            elif action in "rk":
                try:
                    msg = rx.recv(timeout=0)
                except shmtensor.TimedOut:
                    continue
                if action == "k":
                    value = msg.value
                    leaf = value if isinstance(value, np.ndarray) else value["ab"[choice % 2]]
                    kept.append((leaf[:], content(leaf)))
                    del value, leaf
                msg.release()
                del msg
            assert all(same(content(leaf), before) for leaf, before in kept)
        rx.close()
    assert all(same(content(leaf), before) for leaf, before in kept)
    kept.clear()
