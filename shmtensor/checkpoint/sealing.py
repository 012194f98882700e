"""`encrypt` and `decrypt`: an existing checkpoint file, byte for byte, into an encrypted one and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from ..errors import ArgumentError, CheckpointError
from .convert import AnyOutput, replacing
from .description import Described
from .encrypted_output import EncryptedOutput, Sealing, describe
from .envelope import SUFFIX, is_encrypted, read_envelope, render_names
from .formats import Opened
from .formats.base import FileSpec
from .keys import MasterKey
from .opening import PLAIN, Opener, decrypt_to
from .output import Output

_PIECE: Final = 4 << 20

Progress = Callable[[int], Any]


def encrypt_file(
    source: Path,
    target: Path | None,
    master: MasterKey,
    *,
    readable_names: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write a checkpoint file again, encrypted; returns its path, by default the source's with `.encrypted`.

    The source stays. Of files that this library wrote, and of any safetensors file, tensors can be read one by one
    afterwards; others are decrypted as a whole when they are loaded. Raises `ArgumentError`, `CheckpointError`,
    `ResourceError`.
    """
    if not source.is_file():
        raise ArgumentError(f"{source} is no file: convert a checkpoint of several files with an encrypted target")
    if is_encrypted(source):
        raise ArgumentError(f"{source} is encrypted already")
    target = source.with_name(source.name + SUFFIX) if target is None else target
    if target.suffix != SUFFIX:
        raise ArgumentError(f"{target.name}: the name of an encrypted file ends in {SUFFIX}")
    opened = PLAIN.open(source)
    if opened.files != [source]:
        raise ArgumentError(f"{source} is one file of several: convert the checkpoint with an encrypted target")
    names = render_names(opened.plan) if readable_names else b""
    files = [FileSpec("", source.stat().st_size)]
    sealing = Sealing(master, opened.format, _contents(opened, files), names, opened.native)
    with (
        source.open("rb") as file,
        replacing(target, lambda path: EncryptedOutput(path, files, sealing), overwrite=overwrite) as output,
    ):
        for at in range(0, files[0].nbytes, _PIECE):
            piece = file.read(min(_PIECE, files[0].nbytes - at))
            if at + len(piece) != min(at + _PIECE, files[0].nbytes):
                raise CheckpointError(f"{source}: it ends at offset {at + len(piece)}: it changed while it was read")
            output.write(0, at, memoryview(piece))
            if progress is not None:
                progress(len(piece))
        output.describe(opened.digests or [0] * len(opened.plan.regions) if opened.places is not None else [])
    return target


def _contents(opened: Opened, files: list[FileSpec]) -> Described | None:
    return None if opened.places is None else describe(opened.plan, files, opened.places)


def decrypt_file(
    source: Path, target: Path | None, opener: Opener, *, overwrite: bool = False, progress: Progress | None = None
) -> Path:
    """Write the plain file that is in an encrypted one; returns its path, by default the source's without `.encrypted`.

    Every segment is authenticated; the new file appears when all are. Raises as `encrypt_file`.
    """
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

    with replacing(target, create, overwrite=overwrite) as output:

        def write(offset: int, piece: memoryview) -> None:
            output.patch(0, offset, piece)
            if progress is not None:
                progress(len(piece))

        decrypt_to(sealed, write)
    return target
