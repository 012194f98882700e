"""Which receiving end is used: the compiled one, or the reference where nothing was compiled, and for device memory."""

from __future__ import annotations

from typing import Any

from .. import native
from .broadcast import BroadcastFeed, LatestFeed
from .competing import CompetingFeed
from .feed import COMPETING, LATEST, Feed, Reception
from .ledger import Ledger
from .received import Counts as Counts
from .received import Received as Received

if native.module is not None:
    from .compiled import CompiledFeed

    Counts = native.module.Counts  # type: ignore[misc]
    Received = native.module.Received  # type: ignore[misc]


def make_feed(reception: Reception, ledger: Ledger, *args: Any) -> Feed:
    """The feed of a receiver for a new sender; `args` are the rest of those of `Feed`."""
    if native.module is not None and reception.codec is not None and not ledger.device:
        return CompiledFeed(reception, ledger, *args)
    if reception.mode == COMPETING:
        return CompetingFeed(reception, ledger, *args)
    return (LatestFeed if reception.mode == LATEST else BroadcastFeed)(reception, ledger, *args)
