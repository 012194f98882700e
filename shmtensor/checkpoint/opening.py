"""Find the checkpoint that a path means, a file, a directory of shards or of ranks' parts, `latest`, the newest
complete one, and open it.

An `Opener` opens one file or directory of a checkpoint, encrypted or not. An encrypted file has a description of its
own (`envelope.py`), so that nothing of the format inside is read: regions are decrypted where they are. Only files
without such a description, of torch's own and `.npz` of other programs, are decrypted as a whole, into memory, and
opened there by their format.
"""

from __future__ import annotations

import dataclasses
import errno
import hmac
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from ..errors import ArgumentError, ArgumentTypeError, CheckpointError, WrongKey
from . import index
from .answers import Replaced
from .description import read_described_file
from .envelope import (
    CONTENTS,
    DATA,
    SUFFIX,
    Cipher,
    Envelope,
    Readable,
    SealedFile,
    is_encrypted,
    read_envelope,
    read_names,
)
from .formats import FORMATS, KNOWN, Opened, detect
from .formats.base import INDEX, Place, check_apart, find_groups, find_index, shard_of
from .index import LATEST, is_file_name
from .keys import KeyRing
from .locations import Location, MemoryFile, Stamp, T, fresh, is_shortage, open_input, stamp, unchanged
from .manifest import MANIFEST, Part
from .manifest import read as read_manifest
from .plan import Entry, Plan, Region
from .remote import RemotePath, is_outage
from .structure import MAX_TENSORS

_PIECE: Final = 8 << 20
_STORED: Final = re.compile(r"(.*):(\d{1,19})", re.DOTALL)


class Opener:
    """Opens the files of one call, with a key or without.

    key:    as the user passed it; None: encrypted files are a `WrongKey`, with it plain files are
    locked: without a key, open encrypted files as far as they are readable (`Opened.locked`)
    option: how the user passes the key, for errors
    """

    def __init__(self, key: object = None, *, locked: bool = False, option: str = "key=") -> None:
        self._keys = None if key is None else KeyRing(key, option)
        self._locked, self._option = locked, option

    def open(self, path: Location) -> Opened:
        """Open a file, or a directory of a format. Raises `CheckpointError`, `WrongKey`; `Replaced` if another one has
        got its path meanwhile."""
        return unchanged(path, lambda: self._open(path)) if path.is_file() else self._open(path)

    def _open(self, path: Location) -> Opened:
        if path.is_file() and is_encrypted(path):
            return self._open_encrypted(path)
        if path.name.endswith(SUFFIX) and path.is_file():
            raise CheckpointError(f"{path} has the name of an encrypted file, and does not begin as one: it is damaged")
        if self._keys is not None:
            raise WrongKey(
                f"{path} is not encrypted, and {self._option} was given: leave it out if you trust this file, or "
                "encrypt it (shmtensor checkpoint encrypt)"
            )
        return detect(path).open(path)

    def unlock(self, readable: Readable) -> tuple[SealedFile, bytes]:
        """An encrypted file that can be decrypted, and its data key."""
        path, envelope = readable.path, readable.envelope
        if self._keys is None:
            raise WrongKey(f"{path} is encrypted: pass {self._option}, what it was saved with")
        data_key = self._keys.master(envelope.recipe, str(path)).unwrap(readable.wrapped, readable.digest)
        if data_key is None:
            raise WrongKey(
                f"{path}: {self._option} does not open it: pass the key that it was saved with (if it is that, "
                "somebody has changed the file's header)"
            )
        return SealedFile(path, envelope, Cipher(data_key, readable.digest)), data_key

    def _open_encrypted(self, path: Location) -> Opened:
        readable = read_envelope(path)
        envelope = readable.envelope
        if envelope.format not in KNOWN:
            raise CheckpointError(f"{path}: its header has the format {envelope.format!r:.40}, which is not known")
        if self._keys is None and self._locked:
            return Opened(
                envelope.format, read_names(readable), [path], [readable.stamp], None, None, envelope.native,
                locked=True,
            )  # fmt: skip
        sealed, data_key = self.unlock(readable)
        if envelope.contents:
            return self._open_contents(readable, sealed, data_key)
        if envelope.name:
            raise CheckpointError(f"{path} is one file of several: pass its directory")
        return _open_whole(sealed)

    def _open_contents(self, readable: Readable, sealed: SealedFile, data_key: bytes) -> Opened:
        path, envelope = readable.path, readable.envelope
        data = bytearray(envelope.contents)
        with open_input(path) as file:
            sealed.read(file, CONTENTS, 0, data)
        described = read_described_file(bytes(data), str(path))
        files, stamps, all_sealed = [path], [readable.stamp], [sealed]
        numbers = {envelope.name: 0}
        places: list[Place] = []
        for region, text in zip(described.plan.regions, described.stored, strict=True):
            match = _STORED.fullmatch(text)
            if match is None:
                raise CheckpointError(f"{path}: a region is stored at {text!r:.80}: its contents are damaged")
            name, offset = match[1], int(match[2])
            if name not in numbers:
                other, found = self._open_other(path, name, envelope, data_key)
                numbers[name] = len(files)
                files.append(found.path)
                stamps.append(found.stamp)
                all_sealed.append(other)
            number = numbers[name]
            if offset + region.nbytes > all_sealed[number].envelope.nbytes:
                raise CheckpointError(
                    f"{files[number]}: a region of {region.nbytes} bytes at {offset} is not in its "
                    f"{all_sealed[number].envelope.nbytes} bytes"
                )
            places.append((number, offset))
        check_apart(path, described.plan, places)
        return Opened(
            envelope.format, described.plan, files, stamps, places, described.digests if envelope.native else None,
            envelope.native, sealed=all_sealed,
            shown=path.parent if envelope.name else None,
        )  # fmt: skip

    def _open_other(self, path: Location, name: str, first: Envelope, data_key: bytes) -> tuple[SealedFile, Readable]:
        """Another file of the same checkpoint."""
        if not first.name or not is_file_name(name):
            raise CheckpointError(f"{path} names the file {name!r:.80}, which is not beside it")
        other = path.with_name(name + SUFFIX)
        try:
            readable = read_envelope(other)
        except FileNotFoundError:
            raise CheckpointError(f"{path} names {other.name}, which is missing") from None
        envelope = readable.envelope
        foreign = (envelope.checkpoint, envelope.name) != (first.checkpoint, name)
        if not foreign:
            sealed, other_key = self.unlock(readable)
            if hmac.compare_digest(other_key, data_key):
                return sealed, readable
        raise CheckpointError(f"{other} is a file of another checkpoint: it was swapped")


def _open_whole(sealed: SealedFile) -> Opened:
    """Decrypt a file into memory, and open it there."""
    memory = MemoryFile(sealed.path.name)
    decrypt_to(sealed, lambda offset, piece: os.pwrite(memory.fd, piece, offset))
    opened = KNOWN[sealed.envelope.format].open(memory.path)
    return dataclasses.replace(opened, shown=sealed.path, keeps=memory, decrypted=True)


def decrypt_to(sealed: SealedFile, write: Callable[[int, memoryview], Any]) -> None:
    """Pass the plain bytes of a file to `write(offset, bytes)`, in order, each piece after it was authenticated."""
    buffer, nbytes = memoryview(bytearray(min(_PIECE, sealed.envelope.nbytes))), sealed.envelope.nbytes
    with open_input(sealed.path) as file:
        for at in range(0, nbytes, _PIECE):
            piece = buffer[: min(_PIECE, nbytes - at)]
            sealed.read(file, DATA, at, piece)
            write(at, piece)


PLAIN: Final = Opener()
"""Opens files that are not encrypted."""


_PATIENCE: Final = 20
"""Times that a checkpoint is looked for, while a trainer replaces or deletes what was found."""
_PLAIN: Final = tuple(each.suffix for each in FORMATS.values())
_SUFFIXES: Final = (*_PLAIN, *(suffix + SUFFIX for suffix in _PLAIN))
_ENCRYPTED_INDEX: Final = INDEX + SUFFIX
_MODEL: Final = re.compile(
    r"(?:pytorch_|adapter_|diffusion_pytorch_)?model(?P<variant>(?:\.[\w-]+)*)\.(?:safetensors|bin|pt|pth|npz)"
)
"""Names of the model's file in a directory to which other programs save a training. Files beside it (`optimizer.pt`,
`scheduler.pt`) are parts of the same checkpoint."""


def open_path(path: str | os.PathLike[str], opener: Opener = PLAIN) -> Opened:
    """Open the checkpoint that a path means; reads its description, not the tensors.

    A file or a directory of shards means itself. Any other directory means its `latest`; if there is no `latest`, or
    its target is gone, the newest complete checkpoint in it. Raises `FileNotFoundError`, or `CheckpointError` for what
    is damaged or no checkpoint.
    """
    return persistently(path, lambda: open_once(path, opener))


def persistently(path: str | os.PathLike[str], step: Callable[[], T]) -> T:
    """Call `step`, which opens the checkpoint that a path means, and return its result. It is called again if another
    checkpoint has got the path meanwhile, or if the writer has deleted the one that was found (with a small
    `keep_last`)."""
    left = _PATIENCE
    while True:
        left -= 1
        try:
            return step()
        except _NothingComplete as error:
            raise FileNotFoundError(error.errno, error.strerror, error.filename) from None
        except (FileNotFoundError, Replaced):
            if not left or not fresh(path).exists():
                raise


class _NothingComplete(FileNotFoundError):
    """There are checkpoints in a directory, and all are damaged; or there are none."""


def open_once(path: str | os.PathLike[str], opener: Opener = PLAIN, rank: int | None = None) -> Opened:
    """Open what a path means now, or one rank's part of it. What `persistently` tries again raises here:
    `FileNotFoundError`, `Replaced`."""
    found = resolve(fresh(path), opener)
    if rank is None:
        return found if isinstance(found, Opened) else open_found(found, opener)
    directory = found.files[0].parent if isinstance(found, Opened) else found
    if not (directory / MANIFEST).exists():
        raise ArgumentError(f"rank={rank}: {directory} was not saved by several ranks: leave out rank=")
    return open_part(directory, rank, opener)


def open_found(path: Location, opener: Opener = PLAIN) -> Opened:
    """Open a file, or a directory that is one checkpoint."""
    if path.is_dir():
        if (path / MANIFEST).exists():
            return open_ranks(path, opener)
        path = whole(path) or path
    return opener.open(path)


def open_listed(path: Location, opener: Opener = PLAIN) -> Opened:
    """Open a checkpoint that was found in its directory; or the one that has replaced it meanwhile."""
    return persistently(path, lambda: open_found(path, opener)) if isinstance(path, Path) else open_found(path, opener)


def resolve(path: Location, opener: Opener = PLAIN) -> Location | Opened:
    """The file or directory that a path means; already opened if it was found as the newest complete one.

    It is no link that a writer moves: which checkpoint it is does not change any more.
    """
    path = _followed(path) if isinstance(path, Path) else path
    is_remote = isinstance(path, RemotePath)  # where links were copied as files, which do not move
    if is_remote and path.name == LATEST and (path.parent / index.INDEX).exists():
        return newest(path.parent, opener)
    is_copy = is_remote and not path.name.endswith(_SUFFIXES) and path.is_file()
    if (is_copy or not path.exists()) and (second := _by_alias(path)) is not None:
        return second
    if isinstance(path, Path) and path.is_symlink() and not path.exists():
        # a file of another program, as in an incomplete cache; or an alias, which means no other checkpoint
        if path.name.endswith(_SUFFIXES) or path.name in known_aliases(path.parent):
            raise FileNotFoundError(errno.ENOENT, f"it is a link to {os.readlink(path)}, which is not there", str(path))
        return newest(path.parent, opener)
    if path.is_dir():
        if (path / MANIFEST).exists() or (path / _ENCRYPTED_INDEX).exists() or find_index(path) is not None:
            return path
        latest = path / LATEST
        if not (is_remote and (path / index.INDEX).exists()) and latest.exists() and not _is_note(latest):
            return resolve(latest, opener)
        snapshot = _snapshot(path)
        if snapshot is not None:
            return resolve(snapshot, opener)
        return path if whole(path) is not None else newest(path, opener)
    if not path.exists():
        if path.name == LATEST and path.parent.is_dir():  # a file system without links
            return newest(path.parent, opener)
        for suffix in _SUFFIXES:
            named = path.with_name(path.name + suffix)
            if path.name and named.is_file():
                return named
        raise FileNotFoundError(errno.ENOENT, "there is no such checkpoint", str(path))
    return path


def _followed(path: Path) -> Path:
    """The target of a link if it lies in the same directory: links such as `latest` are moved while they are used.
    Other links are not followed: those of a cache have the file names, which their targets lack."""
    for _ in range(_PATIENCE):
        try:
            target = os.readlink(path)
        except OSError:  # no link
            return path
        beside = path.parent / target
        if beside.parent != path.parent or not os.path.lexists(beside):
            return path
        path = beside
    return path


def _by_alias(path: Location) -> Location | None:
    """The checkpoint of an alias by the list of saves, for aliases whose link could not be made."""
    if not known_aliases(path.parent):
        return None
    given = [entry for entry in index.entries(path.parent) if entry.alias == path.name]
    entry = index.aliases(given, path.parent).get(path.name)
    return None if entry is None else path.with_name(entry.name)


def known_aliases(directory: Location) -> set[str]:
    """The aliases in a directory's list of saves."""
    return {entry.alias for entry in index.entries(directory) if entry.alias}


def whole(directory: Location) -> Location | None:
    """The main file of a directory that is one checkpoint: its index, the first of its shards, or the model's file.

    None for any other directory, such as one that a `CheckpointWriter` writes to, whose files are a checkpoint each.
    """
    if (directory / MANIFEST).exists():
        return directory / MANIFEST
    if (directory / _ENCRYPTED_INDEX).exists():
        return directory / _ENCRYPTED_INDEX
    found = find_index(directory)
    if found is not None or (directory / index.INDEX).exists():
        return found
    names = [found.name for found in directory.iterdir() if not found.name.startswith(".")]
    groups = _shards(directory, names)
    models = sorted(
        (match["variant"], not name.endswith(".safetensors"), name)
        for name in names
        if (match := _MODEL.fullmatch(name)) and shard_of(name) is None and (directory / name).is_file()
    )
    if models and (not models[0][0] or len({variant for variant, _, _ in models}) == 1):
        return directory / models[0][2]
    return directory / groups[0][0] if len(groups) == 1 and not models else None


def candidates(directory: Location) -> Iterator[tuple[int, Location]]:
    """(mtime in ns, path) of what may be checkpoints in a directory; hidden names are unfinished ones."""
    there = [path for path in directory.iterdir() if not path.name.startswith(".") and path.name != LATEST]
    first = {name: group[0] for group in _shards(directory, (path.name for path in there)) for name in group}
    for path in there:
        if first.get(path.name, path.name) == path.name and (changed := _changed_at(path)) is not None:
            yield changed, path


def _changed_at(path: Location) -> int | None:
    """When what may be a checkpoint was written, in ns, 0 if that is not known; None if it cannot be one."""
    try:
        if path.is_symlink() and (not path.exists() or path.resolve().parent == path.parent.resolve()):
            return None  # an alias of one that is listed itself, or a link to nothing
        if path.is_dir():
            main = whole(path)
            return None if main is None else main.stat().st_mtime_ns
        return path.stat().st_mtime_ns if path.name.endswith(_SUFFIXES) else None
    except FileNotFoundError:
        return None
    except CheckpointError:  # reported when it is opened
        return _time_of(path)


def _shards(directory: Location, names: Iterable[str]) -> list[list[str]]:
    """The shards among the files of a directory, by checkpoint. A file that is a checkpoint of its own is none,
    although its name may be like that of one, such as `epoch-1-of-3.safetensors`."""
    groups = find_groups(names)
    if groups:
        saved = index.order(directory)
        groups = find_groups(name for group in groups.values() for name in group if name not in saved)
    return [group for group in groups.values() if not _is_described(directory / group[0])]


def _is_described(path: Location) -> bool:
    """Whether a file has the description of a whole checkpoint."""
    try:
        return detect(path).describes(path)
    except (CheckpointError, FileNotFoundError):
        return False


def _time_of(path: Location) -> int:
    try:
        return path.stat().st_mtime_ns
    except CheckpointError:
        return 0


def newest_first(directory: Location) -> list[tuple[int, Location]]:
    """The candidates: first those in the list of saves, the last saved first, whatever their mtime; then the others by
    their mtime."""
    order = index.order(directory)
    return sorted(candidates(directory), key=lambda found: (order.get(found[1].name, -1), found), reverse=True)


def each_newest_first(directory: Location) -> Iterator[Location]:
    """The same, one after the other: other candidates are searched for only when no checkpoint in the list can be
    loaded. So as long as the list is right, loading the newest takes the same number of requests, however many
    checkpoints there are."""
    order = index.order(directory)
    for name in sorted(order, key=lambda name: order[name], reverse=True):
        path = directory / name
        if _changed_at(path) is not None:
            yield path
    for _, path in sorted(candidates(directory), reverse=True):
        if path.name not in order:
            yield path


def newest(directory: Location, opener: Opener = PLAIN) -> Opened:
    """Open the newest complete checkpoint of a directory; warn of each newer one that is not complete."""
    count, failed, changed = 0, None, False
    for path in each_newest_first(directory):
        if failed is not None:
            warnings.warn(f"passed over: {failed}", RuntimeWarning, stacklevel=4)
        count, failed = count + 1, None
        try:
            return open_listed(path, opener)
        except FileNotFoundError:
            changed = True
        except WrongKey:  # an older one is not what the caller wants
            raise
        except Exception as error:  # whatever the error says of this file, try the others
            if is_outage(path, error) or is_shortage(error):
                raise
            failed = error
    if failed is not None:
        if count == 1 and isinstance(failed, CheckpointError):
            raise failed  # there is no other one
        warnings.warn(f"passed over: {failed}", RuntimeWarning, stacklevel=4)
    raise (FileNotFoundError if changed else _NothingComplete)(
        errno.ENOENT, "there is no complete checkpoint in this directory", str(directory)
    )


def _is_note(latest: Location) -> bool:
    """Whether `latest` is a file of one line that another program wrote, such as the name of a directory."""
    if latest.is_symlink() or not latest.is_file():
        return False
    with open_input(latest) as file:
        text = file.pread(257, 0)
    return len(text) <= 256 and text.isascii() and text.decode("ascii").strip().isprintable()


def _snapshot(directory: Location) -> Location | None:
    """The directory of revision `main` in a repository of Hugging Face's cache; None if it is no such cache."""
    main = directory / "refs" / "main"
    if not main.is_file() or not (directory / "snapshots").is_dir():
        return None
    with open_input(main) as file:
        revision = file.pread(257, 0).decode("utf-8", "replace").strip()
    found = directory / "snapshots" / revision
    if not re.fullmatch(r"[0-9A-Za-z]{1,128}", revision) or not found.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"revision {revision!r:.80} is not in this cache", str(directory))
    return found


def open_part(directory: Location, rank: int, opener: Opener = PLAIN) -> Opened:
    """Open the checkpoint file of one rank. `ArgumentError` if there is no such rank."""
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise ArgumentTypeError(f"rank must be an int, not {type(rank).__name__}")
    return unchanged(directory / MANIFEST, lambda: _open_numbered(directory, rank, opener))


def _open_numbered(directory: Location, rank: int, opener: Opener) -> Opened:
    manifest = read_manifest(directory)
    if not 0 <= rank < len(manifest.parts):
        raise ArgumentError(f"rank={rank}: {directory} has the parts of {len(manifest.parts)} ranks, from 0 on")
    return _open_part(directory, manifest.parts[rank], opener)


def open_parts(directory: Location) -> list[Opened]:
    """Open the checkpoint files of all ranks, in their order."""
    return unchanged(
        directory / MANIFEST, lambda: [_open_part(directory, part, PLAIN) for part in read_manifest(directory).parts]
    )


def _open_part(directory: Location, part: Part, opener: Opener) -> Opened:
    path = directory / part.file
    if not path.is_file():
        raise CheckpointError(f"{directory}: {part.file} is missing, which its manifest names")
    opened = opener.open(path)
    if opened.locked:
        return opened
    if opened.state is not None or opened.places is None:
        raise CheckpointError(f"{path} was written by another program")
    if sum(opened.sizes) != part.nbytes:
        raise CheckpointError(f"{path} has {sum(opened.sizes)} bytes, {part.nbytes} were written")
    return opened


def open_ranks(directory: Location, opener: Opener = PLAIN) -> Opened:
    """Open all parts as one checkpoint."""
    return unchanged(directory / MANIFEST, lambda: _open_ranks(directory, opener))


def _open_ranks(directory: Location, opener: Opener) -> Opened:
    manifest = read_manifest(directory)
    tree: list[Any] = []
    tensors: list[Entry] = []
    regions: list[Region] = []
    files: list[Location] = []
    stamps: list[Stamp] = []
    places: list[Place] = []
    digests: list[int] | None = []
    sealed: list[SealedFile | None] = []
    locked = False
    for rank, part in enumerate(manifest.parts):
        opened = _open_part(directory, part, opener)
        plan = opened.plan
        if len(tensors) + len(plan.tensors) > MAX_TENSORS:
            raise CheckpointError(f"{directory} has more than {MAX_TENSORS} tensors: read its parts, with rank=")
        try:
            tree.append([["i", hex(rank)], _shifted(plan.tree, len(tensors), len(plan.tensors))])
        except RecursionError:
            raise CheckpointError(f"{opened.files[0]}: invalid structure: it is too deep") from None
        tensors += [
            entry._replace(name=f"{rank}.{entry.name}", region=entry.region + len(regions) if entry.region >= 0 else -1)
            for entry in plan.tensors
        ]
        regions += plan.regions
        places += [(file + len(files), offset) for file, offset in opened.places or ()]
        if digests is not None and opened.digests is not None:
            digests += opened.digests
        else:
            digests = None
        sealed += opened.sealed or [None] * len(opened.files)
        locked = locked or opened.locked
        files += opened.files
        stamps += opened.stamps
    rest = [path for other in manifest.others if (path := directory / other.file).is_file()]
    rest.append(directory / MANIFEST)
    meta = plan.meta if len(manifest.parts) == 1 else None
    made = Plan({"k": tree}, tensors, regions, meta)
    return Opened(
        opened.format, made, [*files, *rest], [*stamps, *(stamp(path) for path in rest)],
        None if locked else places, digests, native=True, sealed=[*sealed, *[None] * len(rest)], locked=locked,
    )  # fmt: skip


def _shifted(node: Any, by: int, count: int) -> Any:
    """A tree of `count` tensors with `by` added to their numbers; an invalid number becomes -1."""
    if isinstance(node, list):
        return [_shifted(each, by, count) for each in node]
    if not isinstance(node, dict):
        return node

    def number(found: Any) -> Any:
        return found if type(found) is not int else found + by if 0 <= found < count else -1

    made: dict[str, Any] = {}
    for tag, body in node.items():
        if tag in ("x", "B"):
            made[tag] = number(body)
        elif tag == "z" and isinstance(body, list) and len(body) == 4 and isinstance(body[3], list):
            made[tag] = [*body[:3], [number(each) for each in body[3]]]
        elif tag == "d" and isinstance(body, dict):
            made[tag] = {key: _shifted(each, by, count) for key, each in body.items()}
        else:
            made[tag] = _shifted(body, by, count) if tag in ("k", "o", "c", "t", "m", "a", "e", "E") else body
    return made
