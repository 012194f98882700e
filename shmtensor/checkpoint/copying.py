"""The copy that a trainer waits for: bytes of a state into slots."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..views import moves
from ..views.numpy import Array
from .plan import Plan


class Regions:
    """The bytes of a plan's regions, each asked for once: in a layout they come one after the other."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._region = -1
        self._bytes: Any = None

    def __call__(self, region: int) -> Any:
        if region != self._region:
            self._bytes = None  # before the next one: both may be copies
            self._bytes = self._plan.regions[region].bytes()
            self._region = region
        return self._bytes


def copy(target: Array, source: Any) -> None:
    """Copy bytes into a slot, with torch's threads if that is worth it; from a device other than CUDA's as well."""
    if isinstance(source, np.ndarray):
        torch = sys.modules.get("torch")
        if torch is None or len(target) < moves.LARGE or not source.flags.writeable:
            target[:] = source
            return
        source = torch.from_numpy(source)
    else:
        torch = sys.modules["torch"]
    torch.from_numpy(target).copy_(source)
