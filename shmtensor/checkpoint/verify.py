"""Verify a checkpoint: read every region, in little memory, and compare it with its digest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from .digests import Summer
from .files import Files
from .formats import Opened
from .formats.zip_directory import check_crcs
from .reading import CHUNK, Damage

Progress = Callable[[int], Any]


def check(opened: Opened, *, readers: int, progress: Progress | None = None) -> list[Damage]:
    """Returns the damaged regions. `progress` is called with the number of bytes of each piece, from any reader.

    Files without digests cannot be verified, except for the CRC-32 of members of a zip archive: a wrong one raises
    `CheckpointError`, as does a file that ends early.
    """
    digests, places = opened.digests, opened.places
    if places is None or digests is None:
        if opened.format != "safetensors":
            check_archive(opened, progress)
        return []
    own = threading.local()

    def check_region(region: int) -> Damage | None:
        if not hasattr(own, "buffer"):
            own.buffer = np.empty(CHUNK, np.uint8)
        file, offset = places[region]
        nbytes = opened.plan.regions[region].nbytes
        summer = Summer()
        for at in range(0, nbytes, CHUNK):
            view = own.buffer[: min(CHUNK, nbytes - at)]
            files.fill(view, file, offset + at, opened.plan.names(region))
            summer.update(view)
            if progress is not None:
                progress(view.nbytes)
        if summer.digest == digests[region]:
            return None
        names = opened.plan.names(region)
        return Damage(region, names, opened.files[file], offset, digests[region], summer.digest)

    order = sorted(range(len(places)), key=places.__getitem__)
    with (
        Files(opened.files, opened.sizes) as files,
        ThreadPoolExecutor(readers, thread_name_prefix="shmtensor-verify") as pool,
    ):
        return [damage for damage in pool.map(check_region, order) if damage is not None]


def check_archive(opened: Opened, progress: Progress | None = None) -> None:
    """Compare the members of zip archives with their CRC-32; `CheckpointError` names one that is damaged."""
    for path in opened.files:
        with path.open("rb") as file:
            zipped = file.read(2) == b"PK"
        if zipped:
            check_crcs(path, progress)
