"""`convert`: write a checkpoint in another format, complete under its name or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import ArgumentError, ResourceError, ShmTensorError
from .build import check_structure
from .digests import Summer, combine
from .encrypted_output import EncryptedOutput, Sealing
from .envelope import SUFFIX
from .files import Files
from .formats import FORMATS, Format, Layout, Opened, get_format
from .keys import MasterKey
from .load import map_files, raise_damage
from .locations import Location, location
from .output import Output
from .reading import Damage
from .remote import RemotePath
from .upload import check_writable, put_file

_PIECE = 8 << 20
AnyOutput = Output | EncryptedOutput


class Converted(NamedTuple):
    """The result: path or URL, bytes of all files, and the digest of all regions."""

    path: Location
    nbytes: int
    digest: str


def convert(
    opened: Opened,
    target: str | os.PathLike[str],
    format: str | None = None,
    *,
    max_shard: int | None = None,
    overwrite: bool = False,
    master: MasterKey | None = None,
    readable_names: bool = False,
    progress: Callable[[int], Any] | None = None,
) -> Converted:
    """Write a checkpoint in another format; it loads as the same state.

    `target` is a file, or with `max_shard` (bytes of a file) a directory; or the URL of one: then the files are written
    into a temporary directory of this machine, and uploaded, the index of shards last. `format` is by default what the
    target's suffix says. Digests of the source are compared on the way. The files are written under a hidden name,
    synced to disk, and renamed at the end. `progress` is called with numbers of bytes, of a URL twice: when they are
    written, and when they are uploaded. Raises `ArgumentError`, `ResourceError` (the target exists, no space), and
    `CheckpointError` for a damaged source. With `master`, the key-encryption key, the new files are encrypted.
    """
    found = location(target)
    if isinstance(found, RemotePath):
        return _to_url(
            opened, found, format, max_shard=max_shard, overwrite=overwrite, master=master,
            readable_names=readable_names, progress=progress,
        )  # fmt: skip
    target = found
    check_structure(opened.plan)
    made = _format_of(target, format, max_shard, encrypted=master is not None)
    layout = made.layout(opened.plan, max_shard)

    def create(path: str) -> AnyOutput:
        if master is None:
            return Output(path, layout.files)
        sealing = Sealing.of(master, made.name, opened.plan, layout, readable=readable_names)
        return EncryptedOutput(path, layout.files, sealing)

    with replacing(target, create, overwrite=overwrite, is_file=layout.single) as output:
        digests = _write(opened, layout, output, progress)
        output.describe(digests)
        nbytes = output.nbytes
    return Converted(target, nbytes, combine(digests))


def _to_url(opened: Opened, target: RemotePath, format: str | None, *, overwrite: bool, **options: Any) -> Converted:
    check_writable(target)
    if target.exists() and (target.is_dir() or not overwrite):
        raise ResourceError(
            errno.EEXIST,
            f"{target} exists" + ("" if target.is_dir() else ", or overwrite it") + ": choose another name",
        )
    with tempfile.TemporaryDirectory(prefix="shmtensor-convert-", ignore_cleanup_errors=True) as folder:
        made = convert(opened, Path(folder) / target.name, format, **options)
        local = Path(folder) / target.name
        files = [local] if local.is_file() else sorted(local.iterdir(), key=lambda file: ".index." in file.name)
        done: list[RemotePath] = []
        try:
            for file in files:
                done.append(target if file == local else target / file.name)
                put_file(str(file), done[-1], file.stat().st_size, progress=options["progress"])
        except BaseException:
            if not local.is_file():  # of a directory nothing is left; a file has appeared as a whole, or not at all
                for path in done:
                    with contextlib.suppress(OSError):
                        path.ask("rm_file", path.key)
            raise
    return made._replace(path=target)


@contextlib.contextmanager
def replacing(
    target: Path, create: Callable[[str], AnyOutput], *, overwrite: bool, is_file: bool = True
) -> Iterator[AnyOutput]:
    """Files under a hidden name, made by `create`, which get the target's name when they are complete and on disk;
    after an exception they are removed. Raises `ResourceError`."""
    if os.path.lexists(target):
        if not overwrite:
            raise ResourceError(errno.EEXIST, f"{target} exists: choose another name, or overwrite it")
        if target.is_dir() or not is_file:
            raise ResourceError(errno.EEXIST, f"{target} exists, and only a file is replaced by a file: remove it")
    temporary = target.with_name(f".{target.name}.convert-{os.getpid()}.tmp")
    try:
        output = create(str(temporary))
    except OSError as error:
        raise _explain(error, target) from None
    try:
        yield output
        output.finish()
        os.replace(temporary, target)
        _sync(target.parent)
    except OSError as error:
        output.discard()
        if isinstance(error, ShmTensorError):  # of what is read
            raise
        raise _explain(error, target) from None
    except BaseException:
        output.discard()
        raise
    output.close()


def _format_of(target: Path, name: str | None, max_shard: int | None, *, encrypted: bool) -> Format:
    if (target.suffix == SUFFIX) != (encrypted and max_shard is None):
        raise ArgumentError(
            f"{target.name}: a file that is encrypted has a name that ends in {SUFFIX}, and no other one has"
        )
    if name is not None:
        return get_format(name)
    plain = target.with_suffix("") if encrypted and max_shard is None else target
    for each in FORMATS.values():
        if plain.suffix == each.suffix:
            return each
    if max_shard is not None:
        return get_format("safetensors")
    raise ArgumentError(f"{target.name} has no suffix that says the format: pass one of {', '.join(FORMATS)}")


def _write(opened: Opened, layout: Layout, output: AnyOutput, progress: Callable[[int], Any] | None) -> list[int]:
    """Write everything; returns the digests of the regions."""
    plan = opened.plan
    in_pieces = opened.places is not None and not opened.mappable
    mapped = map_files(opened, range(len(plan.regions))) if opened.places is not None and not in_pieces else {}
    summers = [Summer(crc=layout.needs_crc) for _ in plan.regions]
    with (
        ThreadPoolExecutor(1, thread_name_prefix="shmtensor-convert") as pool,
        Files(opened.files, opened.sizes, opened.sealed) if in_pieces else contextlib.nullcontext() as files,
    ):
        for file in range(len(layout.files)):
            for piece in layout.pieces(file):
                if piece.region < 0:
                    if piece.data is not None:
                        output.patch(file, piece.offset, piece.data)
                    continue
                contents: Any = None
                if files is None:
                    contents = mapped[piece.region] if mapped else plan.regions[piece.region].bytes()
                    contents = memoryview(contents)
                for at in range(0, piece.nbytes, _PIECE):
                    if files is None:
                        part = contents[at : at + _PIECE]
                    else:
                        part = _read_piece(opened, files, piece.region, at, min(_PIECE, piece.nbytes - at))
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


def _read_piece(opened: Opened, files: Files, region: int, at: int, nbytes: int) -> memoryview:
    memory: Any = np.empty(nbytes, np.uint8)
    file, offset = (opened.places or [])[region]
    files.fill(memory, file, offset + at, opened.plan.names(region))
    return memoryview(memory)


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
