"""Existing checkpoints in another form, complete under its name or not at all: `convert` writes another format;
`encrypt_file` and `decrypt_file` make of a file, byte for byte, an encrypted one and back.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from ..errors import ArgumentError, CheckpointError, ResourceError, ShmTensorError
from ..memory.descriptors import open_file
from ..memory.locks import LockFile
from .description import Described, Summer, combine
from .directory import LOCK, Directory, remove, sync
from .envelope import HIDDEN_DIGEST, SUFFIX, is_encrypted, read_envelope, render_names
from .formats import FORMATS, Format, Layout, Opened, get_format
from .formats.base import FileSpec, find_index
from .index import INDEX, LATEST
from .keys import MasterKey
from .load import OnBytes, map_files, raise_damage
from .locations import Location, location, open_input
from .manifest import MANIFEST
from .opening import PLAIN, Opener, decrypt_to, known_aliases
from .output import EncryptedOutput, Output, Sealing, describe
from .plan import check_structure
from .reading import Files, damaged
from .remote import RemotePath
from .threads import in_threads
from .upload import check_writable, put_file

_PIECE: Final = 8 << 20
_SEALED_PIECE: Final = 4 << 20
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
    progress: OnBytes | None = None,
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
            f"{target} exists: choose another name" + ("" if target.is_dir() else ", or overwrite it"),
        )
    with _scratch() as folder:
        local = folder / target.name
        made = convert(opened, local, format, **options)
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


_SCRATCH: Final = "shmtensor-convert-"
_SCRATCH_LOCK: Final = ".lock"


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A directory for temporary files, removed at the end; after a death, by this user's next one."""
    _remove_dead()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_SCRATCH))
        # crash: scratch.made
        if (lock := _lock_scratch(folder)) is not None:
            break
    try:
        # crash: scratch.locked
        yield folder
    finally:
        with contextlib.suppress(OSError), contextlib.closing(lock):
            _remove_scratch(folder)


def _lock_scratch(folder: Path) -> LockFile | None:
    """Hold the lock that marks a temporary directory as used; None if another process removed it before, as left by a
    dead process."""
    path = str(folder / _SCRATCH_LOCK)
    try:
        lock = LockFile(path, os.O_CREAT)
    except FileNotFoundError:
        return None
    if lock.try_exclusive(0) and lock.is_at(path):
        return lock
    lock.close()
    return None


def _remove_dead() -> None:
    """Remove the temporary directories of this user's dead conversions."""
    for name in os.listdir(tempfile.gettempdir()):
        left = Path(tempfile.gettempdir()) / name
        if name.startswith(_SCRATCH):
            with contextlib.suppress(OSError):
                if left.lstat().st_uid == os.geteuid():
                    _remove_if_dead(left)


def _remove_if_dead(folder: Path) -> None:
    if not (folder / _SCRATCH_LOCK).exists():
        folder.rmdir()  # empty: its owner is about to lock it (and will retry), or died before the last step
        return
    with contextlib.closing(LockFile(str(folder / _SCRATCH_LOCK))) as lock:
        if lock.try_exclusive(0):
            _remove_scratch(folder)


def _remove_scratch(folder: Path) -> None:
    """Remove one that is locked: its lock last, by which it is found if this is cut short."""
    for each in folder.iterdir():
        if each.name != _SCRATCH_LOCK:
            remove(str(each))
    # crash: scratch.emptied
    (folder / _SCRATCH_LOCK).unlink()
    folder.rmdir()


@contextlib.contextmanager
def replacing(
    target: Path,
    create: Callable[[str], AnyOutput],
    *,
    overwrite: bool,
    is_file: bool = True,
    original: Original | None = None,
) -> Iterator[AnyOutput]:
    """Files under a hidden name, made by `create`, which get the target's name when they are complete and on disk;
    after an exception they are removed, and after a death by the next one with this target. Raises `ResourceError`.

    original: what the file is made of, byte for byte: it gets its time
    """
    if os.path.lexists(target):
        if not overwrite:
            raise ResourceError(errno.EEXIST, f"{target} exists: choose another name, or overwrite it")
        if target.is_symlink() and (target.name == LATEST or target.name in known_aliases(target.parent)):
            raise ArgumentError(
                f"{target} is a link to {os.readlink(target)}, and a CheckpointWriter moves it when it saves, which it "
                "cannot do with a file: choose another name, or pass what it leads to"
            )
        if target.is_dir() or not is_file:
            raise ResourceError(errno.EEXIST, f"{target} exists, and only a file is replaced by a file: remove it")
    temporary, lock = target.with_name(f".{target.name}.convert-{os.getpid()}.tmp"), None
    try:
        _remove_leftovers(target)
        output = create(str(temporary))
        # crash: convert.begun
    except OSError as error:
        raise _explain(error, target) from None
    try:
        lock = _lock(Path(output.at(0)))
        yield output
        output.finish()
        if original is not None:
            original.before(temporary, target)
        # crash: exchange.recorded
        os.replace(temporary, target)
        sync(str(target.parent))
        # crash: exchange.renamed
        if original is not None:
            original.after(target)
    except OSError as error:
        output.discard()
        raise _explain(error, target) from None
    except BaseException:
        output.discard()
        raise
    finally:
        if lock is not None:
            lock.close()
    output.close()


def _lock(file: Path) -> LockFile | None:
    """Hold the lock that says that a file under a hidden name is being written; None where files have no locks."""
    lock = LockFile(str(file))
    try:
        if lock.try_exclusive(0) and lock.is_at(str(file)):
            return lock
    except OSError:
        lock.close()
        return None
    lock.close()
    raise ResourceError(errno.EBUSY, f"{file} was just removed by another process with the same target")


def _remove_leftovers(target: Path) -> None:
    """Remove what dead processes have left under hidden names of this target."""
    for name in os.listdir(target.parent):
        if not (name.startswith(f".{target.name}.convert-") and name.endswith(".tmp")):
            continue
        with contextlib.suppress(OSError):
            found = target.parent / name
            first = min(found.iterdir(), default=None) if found.is_dir() else found
            if first is None:
                found.rmdir()  # a process that has just created it fails, as it would a moment later
            else:
                with contextlib.closing(LockFile(str(first))) as lock:
                    if lock.try_exclusive(0):
                        remove(str(found))


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
    tell = progress or _say_nothing
    summers = [Summer(crc=layout.needs_crc) for _ in plan.regions]
    with Files.of(opened) as files:
        is_mapped = opened.places is not None and not in_pieces
        mapped = map_files(opened, files, range(len(plan.regions))) if is_mapped else {}
        for file in range(len(layout.files)):
            for piece in layout.pieces(file):
                if piece.region < 0:
                    if piece.data is not None:
                        output.patch(file, piece.offset, piece.data)
                    continue
                contents: Any = None
                if not in_pieces:
                    contents = mapped[piece.region] if mapped else plan.regions[piece.region].bytes()
                    contents = memoryview(contents)
                for at in range(0, piece.nbytes, _PIECE):
                    if not in_pieces:
                        part = contents[at : at + _PIECE]
                    else:
                        part = _read_piece(opened, files, piece.region, at, min(_PIECE, piece.nbytes - at))
                    writing = partial(output.patch, file, piece.offset + at, part)
                    in_threads([writing, partial(summers[piece.region].update, part)], 2)
                    tell(len(part))
    digests = [summer.digest for summer in summers]
    raise_damage(damaged(opened, dict(enumerate(digests))))
    for file, offset, last in layout.finish(digests, [summer.crc for summer in summers]):
        output.patch(file, offset, last)
    return digests


def _say_nothing(nbytes: int) -> None:
    """Do nothing: the default of `progress`."""


def _read_piece(opened: Opened, files: Files, region: int, at: int, nbytes: int) -> memoryview:
    memory: Any = np.empty(nbytes, np.uint8)
    file, offset = (opened.places or [])[region]
    files.fill(memory, file, offset + at, opened.plan.names(region))
    return memoryview(memory)


def _explain(error: OSError, target: Path) -> OSError:
    if isinstance(error, ShmTensorError):  # of what is read, or with a remedy
        return error
    code = error.errno or errno.EIO
    return ResourceError(code, f"cannot write {target}: {os.strerror(code)}")


def encrypt_file(
    source: Path,
    target: Path | None,
    master: MasterKey,
    *,
    readable_names: bool = False,
    overwrite: bool = False,
    replace: bool = False,
    progress: OnBytes | None = None,
) -> Path:
    """Write a checkpoint file again, encrypted; returns its path, by default the source's with `.encrypted`.

    The source stays, or with `replace` gives its place to the new file (`Original`). Of files that this library wrote,
    and of any safetensors file, tensors can be read one by one afterwards; others are decrypted as a whole when they
    are loaded. Raises `ArgumentError`, `CheckpointError`, `ResourceError`.
    """
    source = _not_a_link(source) if replace else source
    if not source.is_file():
        raise ArgumentError(f"{source} is no file: convert a checkpoint of several files with an encrypted target")
    if is_encrypted(source):
        raise ArgumentError(f"{source} is encrypted already")
    target = source.with_name(source.name + SUFFIX) if target is None else target
    if target.suffix != SUFFIX:
        raise ArgumentError(f"{target.name}: the name of an encrypted file ends in {SUFFIX}")
    original = Original(source, target, replace=replace)
    opened = PLAIN.open(source)
    if opened.files != [source]:
        raise ArgumentError(f"{source} is one file of several: convert the checkpoint with an encrypted target")
    tell = progress or _say_nothing
    names = render_names(opened.plan) if readable_names else b""
    files = [FileSpec("", source.stat().st_size)]
    sealing = Sealing(master, opened.format, _contents(opened, files), names, opened.native)
    with (
        original,
        open_input(source) as file,
        replacing(
            target, lambda path: EncryptedOutput(path, files, sealing), overwrite=overwrite, original=original
        ) as output,
    ):
        for at in range(0, files[0].nbytes, _SEALED_PIECE):
            piece = file.pread(min(_SEALED_PIECE, files[0].nbytes - at), at)
            if at + len(piece) != min(at + _SEALED_PIECE, files[0].nbytes):
                raise CheckpointError(f"{source}: it ends at offset {at + len(piece)}: it changed while it was read")
            output.write(0, at, memoryview(piece))
            tell(len(piece))
        output.describe(opened.digests or [0] * len(opened.plan.regions) if opened.places is not None else [])
    return target


def _not_a_link(source: Path) -> Path:
    """The file itself, which is to be replaced."""
    found = source.resolve()
    if found.parent != source.parent.resolve():
        raise ArgumentError(f"{source} is a link into another directory: pass {found}")
    return found


class Original:
    """The source file of `encrypt_file` or `decrypt_file`. The new file gets its mode and time, and with `replace` its
    place: in the list of saves, with step and metrics, and as the target of `latest` and other links of the directory.
    No `CheckpointWriter` may have the directory open then. Made before the file is read.

    Raises `ArgumentError`, `ResourceError`, and `CheckpointError` if the file has changed meanwhile.
    """

    def __init__(self, source: Path, target: Path, *, replace: bool) -> None:
        directory = source.parent
        here = directory.resolve() == target.parent.resolve()
        if (replace or here) and (directory / MANIFEST).exists():
            raise ArgumentError(f"{source} is the part of one of several ranks: convert the checkpoint")
        if replace and find_index(directory) is not None:
            raise ArgumentError(f"{source} is one file of several: convert the checkpoint with an encrypted target")
        if replace and (not here or source.name == target.name):
            raise ArgumentError(f"only another file of the same directory takes the place of {source}")
        self.digest = HIDDEN_DIGEST
        """That of its tensors together, for the list, if it may be known."""
        self._source, self._info = source, source.stat()
        self._directory = Directory(str(directory)) if replace else None
        self._is_managed = (directory / INDEX).exists() or (directory / LOCK).exists()

    def __enter__(self) -> None:
        if self._directory is None or not self._is_managed:
            return
        self._directory.check_idle()
        self._directory.own()
        try:
            if not self._directory.try_write():
                self._directory.check_idle()
        except BaseException:
            self._directory.close()
            raise

    def __exit__(self, *_: object) -> None:
        if self._directory is not None:
            self._directory.close()

    def before(self, made: Path, target: Path) -> None:
        """Called when the new file is complete, under a temporary name."""
        self._check()
        with contextlib.closing(open_file(str(made), os.O_RDONLY)) as file:
            with contextlib.suppress(OSError):  # a file system that has none
                os.fchmod(file.fd, stat.S_IMODE(self._info.st_mode))
                os.utime(file.fd, ns=(self._info.st_atime_ns, self._info.st_mtime_ns))
            os.fsync(file.fd)
        if self._directory is not None:
            self._directory.succeed(self._source.name, target.name, str(made), self.digest)

    def after(self, target: Path) -> None:
        """Called when the new file has its name."""
        if self._directory is None:
            return
        try:
            self._check()
            self._directory.end_of(self._source.name, target.name)
        except OSError as error:
            if isinstance(error, ShmTensorError):
                raise
            raise ResourceError(
                error.errno or errno.EIO, f"{target} is there, and {self._source} stays: {error}"
            ) from None

    def _check(self) -> None:
        now = self._source.stat()
        if (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns) != (
            self._info.st_dev, self._info.st_ino, self._info.st_size, self._info.st_mtime_ns,
        ):  # fmt: skip
            raise CheckpointError(f"{self._source} changed while it was read: it stays")


def _contents(opened: Opened, files: list[FileSpec]) -> Described | None:
    return None if opened.places is None else describe(opened.plan, files, opened.places)


def decrypt_file(
    source: Path,
    target: Path | None,
    opener: Opener,
    *,
    overwrite: bool = False,
    replace: bool = False,
    progress: OnBytes | None = None,
) -> Path:
    """Write the plain file that is in an encrypted one; returns its path, by default the source's without `.encrypted`.

    Every segment is authenticated; the new file appears when all are. Raises as `encrypt_file`.
    """
    source = _not_a_link(source) if replace else source
    if not source.is_file():
        raise ArgumentError(f"{source} is no file: convert a checkpoint of several files")
    if not is_encrypted(source):
        raise ArgumentError(f"{source} is not encrypted")
    readable = read_envelope(source)
    if readable.envelope.name:
        raise ArgumentError(f"{source} is one file of several: convert the checkpoint")
    if target is None:
        if source.suffix != SUFFIX:
            raise ArgumentError(f"{source.name} does not end in {SUFFIX}: name the new file")
        target = source.with_suffix("")
    if target.suffix == SUFFIX:
        raise ArgumentError(f"{target.name}: only the names of encrypted files end in {SUFFIX}")
    sealed, _ = opener.unlock(readable)
    files = [("", readable.envelope.nbytes)]

    def create(path: str) -> AnyOutput:
        return Output(path, files)

    tell = progress or _say_nothing
    original = Original(source, target, replace=replace)
    if replace and readable.envelope.contents and (digests := opener.open(source).digests) is not None:
        original.digest = combine(digests)
    with original, replacing(target, create, overwrite=overwrite, original=original) as output:

        def write(offset: int, piece: memoryview) -> None:
            output.patch(0, offset, piece)
            tell(len(piece))

        decrypt_to(sealed, write)
    return target
