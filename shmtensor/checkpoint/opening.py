"""Open one file or directory of a checkpoint, encrypted or not: `Opener`.

An encrypted file has a description of its own (`envelope.py`), so that nothing of the format inside is read: regions
are decrypted where they are. Only files without such a description, of torch's own and `.npz` of other programs, are
decrypted as a whole, into memory, and opened there by their format.
"""

from __future__ import annotations

import dataclasses
import hmac
import os
import re
from collections.abc import Callable
from typing import Any, Final

from ..errors import CheckpointError
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
from .formats import FORMATS, Opened, detect
from .formats.base import Place
from .index import is_file_name
from .keys import KeyRing, WrongKey
from .locations import Location, MemoryFile, open_input

_PIECE: Final = 8 << 20
_STORED: Final = re.compile(r"(.*):(\d{1,19})", re.DOTALL)


class Opener:
    """Opens the files of one call, with `key=` or without.

    key:    as the user passed it; None: encrypted files are a `WrongKey`, with it plain files are
    locked: without a key, open encrypted files as far as they are readable (`Opened.locked`)
    """

    def __init__(self, key: object = None, *, locked: bool = False) -> None:
        self._keys = None if key is None else KeyRing(key)
        self._locked = locked

    def open(self, path: Location) -> Opened:
        """Open a file, or a directory of a format. Raises `CheckpointError`, `WrongKey`."""
        if path.is_file() and is_encrypted(path):
            return self._open_encrypted(path)
        if self._keys is not None:
            raise WrongKey(
                f"{path} is not encrypted, and key= was given: leave out key= if you trust this file, or encrypt it "
                "(shmtensor checkpoint encrypt)"
            )
        return detect(path).open(path)

    def unlock(self, readable: Readable) -> tuple[SealedFile, bytes]:
        """An encrypted file that can be decrypted, and its data key."""
        path, envelope = readable.path, readable.envelope
        if self._keys is None:
            raise WrongKey(f"{path} is encrypted: pass key=, what it was saved with")
        data_key = self._keys.master(envelope.recipe, str(path)).unwrap(readable.wrapped, readable.digest)
        if data_key is None:
            raise WrongKey(
                f"{path}: key= does not open it: pass the key that it was saved with (if it is that, somebody has "
                "changed the file's header)"
            )
        return SealedFile(path, envelope, Cipher(data_key, readable.digest)), data_key

    def _open_encrypted(self, path: Location) -> Opened:
        readable = read_envelope(path)
        envelope = readable.envelope
        if envelope.format not in FORMATS:
            raise CheckpointError(f"{path}: its header has the format {envelope.format!r:.40}, which is not known")
        if self._keys is None and self._locked:
            return Opened(
                envelope.format, read_names(readable), [path], [readable.file_bytes], None, None, envelope.native,
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
        files, sizes, all_sealed = [path], [readable.file_bytes], [sealed]
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
                sizes.append(found.file_bytes)
                all_sealed.append(other)
            number = numbers[name]
            if offset + region.nbytes > all_sealed[number].envelope.nbytes:
                raise CheckpointError(
                    f"{files[number]}: a region of {region.nbytes} bytes at {offset} is not in its "
                    f"{all_sealed[number].envelope.nbytes} bytes"
                )
            places.append((number, offset))
        return Opened(
            envelope.format, described.plan, files, sizes, places, described.digests if envelope.native else None,
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
    opened = FORMATS[sealed.envelope.format].open(memory.path)
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
