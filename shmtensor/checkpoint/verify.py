"""Verify a checkpoint: read every region, in little memory, and compare it with its digest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from .digests import Summer
from .envelope import DATA, SEGMENT
from .files import Files
from .formats import Opened
from .formats.zip_directory import check_crcs
from .keys import WrongKey
from .locations import open_input
from .manifest import MANIFEST, check_others
from .reading import CHUNK, Damage

Progress = Callable[[int], Any]


def check(opened: Opened, *, readers: int, progress: Progress | None = None) -> list[Damage]:
    """Returns the damaged regions. `progress` is called with the number of bytes of each piece, from any reader.

    Files without digests cannot be verified, except for the CRC-32 of members of a zip archive: a wrong one raises
    `CheckpointError`, as does a file that ends early, and a segment of an encrypted file that is not authentic: every
    byte of such a file is decrypted. `.metadata` for DCP is compared with the digest in the manifest.
    """
    digests, places = opened.digests, opened.places
    if opened.locked:
        raise WrongKey(f"{opened.main} is encrypted: pass key=, what it was saved with")
    if opened.files[-1].name == MANIFEST:
        check_others(opened.files[-1].parent)
    _check_rest(opened, all_of_it=places is None or digests is None)
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
        Files(opened.files, opened.sizes, opened.sealed) as files,
        ThreadPoolExecutor(readers, thread_name_prefix="shmtensor-verify") as pool,
    ):
        return [damage for damage in pool.map(check_region, order) if damage is not None]


def _check_rest(opened: Opened, *, all_of_it: bool) -> None:
    """Decrypt the segments of encrypted files in which no region is; or all of them."""
    regions = [] if all_of_it else zip(opened.places or (), opened.plan.regions, strict=True)
    read: set[tuple[int, int]] = set()
    for (file, offset), region in regions:
        read.update((file, number) for number in range(offset // SEGMENT, -(-(offset + region.nbytes) // SEGMENT)))
    with Files(opened.files, opened.sizes, opened.sealed) as files:
        for file, sealed in enumerate(opened.sealed):
            if sealed is None:
                continue
            memory = np.empty(SEGMENT, np.uint8)
            for number in range(sealed.envelope.count(DATA)):
                if (file, number) not in read:
                    nbytes = min(SEGMENT, sealed.envelope.nbytes - number * SEGMENT)
                    files.fill(memory[:nbytes], file, number * SEGMENT, "none")


def check_archive(opened: Opened, progress: Progress | None = None) -> None:
    """Compare the members of zip archives with their CRC-32; `CheckpointError` names one that is damaged."""
    for path in opened.files:
        with open_input(path) as file:
            zipped = file.pread(2, 0) == b"PK"
        if zipped:
            check_crcs(path, progress)
