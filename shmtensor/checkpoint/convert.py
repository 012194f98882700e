"""`convert`: write a checkpoint in another format, complete under its name or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ArgumentError, ResourceError
from .build import check_structure
from .digests import Summer, combine
from .formats import FORMATS, Format, Layout, Opened, get_format
from .load import map_files, raise_damage
from .output import Output
from .reading import Damage

_PIECE = 8 << 20


class Converted(NamedTuple):
    """The result: path, bytes of all files, and the digest of all regions."""

    path: Path
    nbytes: int
    digest: str


def convert(
    opened: Opened,
    target: str | os.PathLike[str],
    format: str | None = None,
    *,
    max_shard: int | None = None,
    overwrite: bool = False,
    progress: Callable[[int], Any] | None = None,
) -> Converted:
    """Write a checkpoint in another format; it loads as the same state.

    `target` is a file, or with `max_shard` (bytes of a file) a directory. `format` is by default what the target's
    suffix says. Digests of the source are compared on the way. The files are written under a hidden name, synced to
    disk, and renamed at the end. Raises `ArgumentError`, `ResourceError` (the target exists, no space), and
    `CheckpointError` for a damaged source.
    """
    target = Path(target)
    check_structure(opened.plan)
    layout = _format_of(target, format, max_shard).layout(opened.plan, max_shard)
    if os.path.lexists(target):
        if not overwrite:
            raise ResourceError(errno.EEXIST, f"{target} exists: choose another name, or overwrite it")
        if target.is_dir() or not layout.single:
            raise ResourceError(errno.EEXIST, f"{target} exists, and only a file is replaced by a file: remove it")
    temporary = target.with_name(f".{target.name}.convert-{os.getpid()}.tmp")
    try:
        output = Output(str(temporary), layout.files)
    except OSError as error:
        raise _explain(error, target) from None
    try:
        digests = _write(opened, layout, output, progress)
        output.finish()
        os.replace(temporary, target)
        _sync(target.parent)
    except OSError as error:
        output.discard()
        raise _explain(error, target) from None
    except BaseException:
        output.discard()
        raise
    output.close()
    return Converted(target, layout.nbytes, combine(digests))


def _format_of(target: Path, name: str | None, max_shard: int | None) -> Format:
    if name is not None:
        return get_format(name)
    for each in FORMATS.values():
        if target.suffix == each.suffix:
            return each
    if max_shard is not None:
        return get_format("safetensors")
    raise ArgumentError(f"{target.name} has no suffix that says the format: pass one of {', '.join(FORMATS)}")


def _write(opened: Opened, layout: Layout, output: Output, progress: Callable[[int], Any] | None) -> list[int]:
    """Write everything; returns the digests of the regions."""
    plan = opened.plan
    mapped = map_files(opened, range(len(plan.regions))) if opened.places is not None else {}
    summers = [Summer(crc=layout.needs_crc) for _ in plan.regions]
    with ThreadPoolExecutor(1, thread_name_prefix="shmtensor-convert") as pool:
        for file in range(len(layout.files)):
            for piece in layout.pieces(file):
                if piece.region < 0:
                    if piece.data is not None:
                        output.patch(file, piece.offset, piece.data)
                    continue
                contents: Any = mapped[piece.region] if mapped else plan.regions[piece.region].bytes()
                data: Any = memoryview(contents)
                for at in range(0, piece.nbytes, _PIECE):
                    part = data[at : at + _PIECE]
                    writing = pool.submit(output.patch, file, piece.offset + at, part)
                    summers[piece.region].update(part)
                    writing.result()
                    if progress is not None:
                        progress(len(part))
    digests = [summer.digest for summer in summers]
    if opened.digests is not None and opened.places is not None:
        raise_damage(
            [
                Damage(region, plan.names(region), opened.files[opened.places[region][0]], opened.places[region][1],
                       expected, digests[region])
                for region, expected in enumerate(opened.digests)
                if expected != digests[region]
            ]
        )  # fmt: skip
    for file, offset, last in layout.finish(digests, [summer.crc for summer in summers]):
        output.patch(file, offset, last)
    return digests


def _sync(directory: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _explain(error: OSError, target: Path) -> ResourceError:
    code = error.errno or errno.EIO
    return ResourceError(code, f"cannot write {target}: {os.strerror(code)}")
