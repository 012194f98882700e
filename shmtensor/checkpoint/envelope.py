"""The envelope of an encrypted file: a file of any format in segments of AES-256-GCM.

    |-- readable -----------------------|          |-- encrypted -----------------------------|
    | 16 | 4 | header | data key | names | table ...| contents, to a page | data: the file itself |
    magic  bytes of the header, JSON      28 bytes per segment: nonce, tag

| part | what |
|---|---|
| header | JSON, see `Envelope`: sizes, the format inside, how `key=` gives the key-encryption key |
| data key | 60 bytes: nonce, the wrapped key, tag; bound to the SHA-256 of magic, header and names (the *digest*) |
| names | JSON `{name: [dtype, of torch (1, 0), shape, bytes]}` if names are to be readable; else empty |
| table | per segment 12 bytes of nonce, random each time that it is written, and 16 of its tag |
| contents | the description of the checkpoint, with the places of the regions in the data; or nothing |
| data | the plain file, byte for byte the same size; segment n is at n times the segment's size |

Each segment is bound to the digest, to its part and its number. Since the digest covers the sizes, a segment that was
swapped, repeated, cut off or taken from another file does not open. A ciphertext has the place of its plain bytes, in
whole pages, so that direct I/O and reading by position stay possible.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from ..errors import CheckpointError
from ..options import shown
from ..wire.spec import MAX_BYTES
from .index import is_file_name
from .json_pieces import JsonPieces
from .keys import NONCE_BYTES, TAG_BYTES, WRAPPED_BYTES, check_recipe, import_aes, invalid_tag
from .locations import PAGE, PIECE, InputFile, Location, Stamp, open_input, stamp_of
from .plan import MAX_DESCRIPTION, Plan
from .structure import MAX_TENSORS

SUFFIX: Final = ".encrypted"
"""Added to the name of a file that is encrypted."""
MAGIC: Final = b"shmtensor.crypt\n"
SEGMENT: Final = 64 << 10
"""Bytes of a segment: small, so that a slice reads little; a call of the cipher takes less than a tenth of its time."""
DATA, CONTENTS = 0, 1
"""The two encrypted parts of a file."""
ENTRY: Final = NONCE_BYTES + TAG_BYTES
HIDDEN_DIGEST: Final = "0" * 16
"""Stored in place of the digest in lists that are not encrypted: the digest would reveal which checkpoints are
equal."""
_VERSION: Final = 1
_MAX_HEADER: Final = 64 << 10
_MAX_CONTENTS: Final = 4 * MAX_DESCRIPTION
_START = struct.Struct("<16sI")
_PLACE = struct.Struct("<32sBQ")
_KEYS: Final = {"version", "id", "name", "format", "native", "nbytes", "contents", "names", "segment", "key"}
_TOGETHER: Final = 16  # segments that are read at once: they stay in the cache until they are decrypted


@dataclass(frozen=True)
class Envelope:
    """The header of an encrypted file.

    checkpoint: 32 hex digits, the same for all files of a checkpoint
    name:       of the plain file in a directory of several; "" for the only file
    format:     of the checkpoint
    native:     written by this library, so that the contents have digests
    nbytes:     of the plain file
    contents:   bytes of the contents, 0 if there are none
    names:      bytes of the readable names, 0 if they are not readable
    recipe:     how `key=` gives the key-encryption key
    """

    checkpoint: str
    name: str
    format: str
    native: bool
    nbytes: int
    contents: int
    names: int
    recipe: dict[str, Any]

    @cached_property
    def start(self) -> bytes:
        """Magic and header."""
        header = json.dumps(
            {
                "version": _VERSION, "id": self.checkpoint, "name": self.name, "format": self.format,
                "native": self.native, "nbytes": self.nbytes, "contents": self.contents, "names": self.names,
                "segment": SEGMENT, "key": self.recipe,
            }
        ).encode("ascii")  # fmt: skip
        return _START.pack(MAGIC, len(header)) + header

    @property
    def names_at(self) -> int:
        """Offset of the readable names."""
        return len(self.start) + WRAPPED_BYTES

    @property
    def table_at(self) -> int:
        """Offset of the table."""
        return self.names_at + self.names

    def count(self, part: int) -> int:
        """Segments of a part."""
        return -(-self.size(part) // SEGMENT)

    def size(self, part: int) -> int:
        """Bytes of a part."""
        return self.contents if part == CONTENTS else self.nbytes

    @property
    def contents_at(self) -> int:
        """Offset of the contents."""
        return _pages(self.table_at + ENTRY * (self.count(CONTENTS) + self.count(DATA)))

    @property
    def data_at(self) -> int:
        """Offset of the data."""
        return self.contents_at + _pages(self.contents)

    @property
    def file_bytes(self) -> int:
        """Bytes of the encrypted file."""
        return self.data_at + self.nbytes

    def at(self, part: int) -> int:
        """Offset of a part."""
        return self.contents_at if part == CONTENTS else self.data_at

    def entry_at(self, part: int, number: int) -> int:
        """Offset of a segment's entry in the table."""
        return self.table_at + ENTRY * (number if part == CONTENTS else self.count(CONTENTS) + number)

    def digest(self, names: bytes) -> bytes:
        """The digest of all that is readable but the data key."""
        return hashlib.sha256(self.start + names).digest()


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


class Cipher:
    """Encrypts and decrypts the segments of one file. Thread-safe."""

    __slots__ = ("_aes", "_digest")

    def __init__(self, data_key: bytes, digest: bytes) -> None:
        self._aes, self._digest = import_aes()(data_key), digest

    def seal(self, part: int, number: int, nonce: bytes, plain: Any, into: Any) -> None:
        """Encrypt a segment; `into` has room for it and its tag."""
        self._aes.encrypt_into(nonce, plain, _PLACE.pack(self._digest, part, number), into)

    def open(self, part: int, number: int, nonce: bytes, sealed: Any, into: Any) -> bool:
        """Decrypt a segment with its tag; False if it is not authentic."""
        try:
            self._aes.decrypt_into(nonce, sealed, _PLACE.pack(self._digest, part, number), into)
        except invalid_tag():
            return False
        return True

    def __repr__(self) -> str:
        return "<Cipher>"


class SealedFile:
    """An encrypted file whose data key is known."""

    def __init__(self, path: Location, envelope: Envelope, cipher: Cipher) -> None:
        self.path, self.envelope, self._cipher = path, envelope, cipher
        self._own = threading.local()
        self._last: tuple[int, int, bytes] = (-1, -1, b"")  # the last segment of which only a part was wanted

    def __repr__(self) -> str:
        return f"<SealedFile {str(self.path)!r}>"

    def read(self, file: InputFile, part: int, offset: int, memory: Any) -> None:
        """Decrypt bytes of a part, straight into the memory (a writable view of bytes). Raises `CheckpointError`."""
        view, at, end = memoryview(memory).cast("B"), offset, offset + len(memory)
        if end > self.envelope.size(part):
            raise CheckpointError(f"{self.path}: bytes {offset} to {end} are wanted of {self.envelope.size(part)}")
        while at < end:
            number, skipped = divmod(at, SEGMENT)
            size = min(SEGMENT, self.envelope.size(part) - number * SEGMENT)
            if skipped or end - at < size:
                count = min(size - skipped, end - at)
                view[at - offset : at - offset + count] = self._one(file, part, number, size)[skipped : skipped + count]
            else:
                count = self._run(file, part, number, view[at - offset :])
            at += count

    def _one(self, file: InputFile, part: int, number: int, size: int) -> bytes:
        """A segment of which a part is wanted. The last one is kept: small parts of a tensor follow each other."""
        last = self._last
        if last[:2] != (part, number):
            plain = bytearray(size)
            self._run(file, part, number, memoryview(plain))
            self._last = last = (part, number, bytes(plain))
        return last[2]

    def _run(self, file: InputFile, part: int, first: int, view: memoryview) -> int:
        """Decrypt as many whole segments as the memory has room for, and are read at once; returns the bytes."""
        envelope = self.envelope
        sizes: list[int] = []
        room = len(view)
        for number in range(first, min(first + _TOGETHER, envelope.count(part))):
            size = min(SEGMENT, envelope.size(part) - number * SEGMENT)
            if size > room:
                break
            sizes.append(size)
            room -= size
        table = self._pread(file, ENTRY * len(sizes), envelope.entry_at(part, first))
        if not hasattr(self._own, "sealed"):
            self._own.sealed = memoryview(bytearray((SEGMENT + TAG_BYTES) * _TOGETHER))
        sealed: memoryview = self._own.sealed
        pieces, at = [], 0
        for number, size in enumerate(sizes):
            pieces.append(sealed[at : at + size + TAG_BYTES])
            at += size + TAG_BYTES
            pieces[-1][size:] = table[ENTRY * number + NONCE_BYTES : ENTRY * (number + 1)]
        self._preadv(file, [piece[:-TAG_BYTES] for piece in pieces], envelope.at(part) + first * SEGMENT)
        done = 0
        for number, (piece, size) in enumerate(zip(pieces, sizes, strict=True)):
            nonce = table[ENTRY * number : ENTRY * number + NONCE_BYTES]
            if not self._cipher.open(part, first + number, nonce, piece, view[done : done + size]):
                raise CheckpointError(
                    f"{self.path}: segment {first + number} of {envelope.count(part)} of its "
                    f"{'contents' if part == CONTENTS else 'data'}, at offset "
                    f"{envelope.at(part) + (first + number) * SEGMENT}, is not authentic: it was damaged, swapped or "
                    "changed: load another checkpoint"
                )
            done += size
        return done

    def _pread(self, file: InputFile, nbytes: int, offset: int) -> bytes:
        data = bytearray(nbytes)
        self._preadv(file, [memoryview(data)], offset)
        return bytes(data)

    def _preadv(self, file: InputFile, views: Sequence[memoryview], offset: int) -> None:
        left = list(views)
        while left:
            count = file.preadv(left, offset)
            if not count:
                raise CheckpointError(f"{self.path}: the file ends at offset {offset}: it is truncated")
            offset += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]


class Readable:
    """The readable part of an encrypted file. It is not authenticated before the data key is unwrapped."""

    def __init__(self, path: Location, envelope: Envelope, wrapped: bytes, digest: bytes, stamp: Stamp) -> None:
        self.path, self.envelope, self.wrapped, self.digest = path, envelope, wrapped, digest
        self.stamp = stamp


def read_envelope(path: Location, *, file: InputFile | None = None, is_complete: bool = True) -> Readable:
    """Read the readable part of a file, without a key. Raises `CheckpointError` unless every size fits the file.

    With `file`, of the open file; not `is_complete`: it is being written, and may be longer.
    """
    if file is None:
        with open_input(path) as opened:
            return read_envelope(path, file=opened, is_complete=is_complete)
    found = stamp_of(file)
    size = found.nbytes
    start = file.pread(_START.size, 0)
    magic, length = _START.unpack(start) if len(start) == _START.size else (b"", 0)
    if magic != MAGIC:
        raise CheckpointError(f"{path} is no encrypted checkpoint: it begins with {start[:16]!r}")
    if length > min(_MAX_HEADER, size - len(start)):
        raise CheckpointError(
            f"{path}: its header should have {length} bytes, the file has {size} (at most {_MAX_HEADER} are allowed): "
            "it is truncated or damaged"
        )
    start += file.pread(length, len(start))
    envelope = _parse(start, str(path))
    if size != envelope.file_bytes and (is_complete or size < envelope.file_bytes):
        raise CheckpointError(
            f"{path}: it should have {envelope.file_bytes} bytes, and has {size}: it is "
            + ("truncated" if size < envelope.file_bytes else "longer than it says")
        )
    wrapped = file.pread(WRAPPED_BYTES, len(start))
    summer = hashlib.sha256(start)
    at, end = envelope.names_at, envelope.table_at
    while at < end:
        piece = file.pread(min(PIECE, end - at), at)
        if not piece:
            raise CheckpointError(f"{path}: the file ends at offset {at}: it is truncated")
        summer.update(piece)
        at += len(piece)
    return Readable(path, envelope, wrapped, summer.digest(), found)


def _parse(start: bytes, label: str) -> Envelope:
    try:
        found = json.loads(start[_START.size :].decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{label}: invalid JSON in its header: {error}") from None
    if not isinstance(found, dict) or set(found) != _KEYS:
        raise CheckpointError(f"{label}: its header has not the keys of an encrypted checkpoint: it is damaged")
    if found["version"] != _VERSION or found["segment"] != SEGMENT:
        raise CheckpointError(
            f"{label}: version {shown(found['version'], 20)} with segments of {shown(found['segment'], 20)} bytes, "
            f"this library reads version {_VERSION} with {SEGMENT}"
        )
    for key, most in (("nbytes", MAX_BYTES), ("contents", _MAX_CONTENTS), ("names", MAX_DESCRIPTION)):
        if type(found[key]) is not int or not 0 <= found[key] <= most:
            raise CheckpointError(f"{label}: its header says {shown(found[key], 40)} bytes of {key}: it is damaged")
    name, checkpoint = found["name"], found["id"]
    if name != "" and not is_file_name(name):
        raise CheckpointError(f"{label}: its header has the name {shown(name)}: it is damaged")
    if not isinstance(checkpoint, str) or not re.fullmatch(r"[0-9a-f]{32}", checkpoint):
        raise CheckpointError(f"{label}: its header has the id {shown(checkpoint)}: it is damaged")
    if not isinstance(found["format"], str) or type(found["native"]) is not bool:
        raise CheckpointError(f"{label}: its header has the format {shown(found['format'])}: it is damaged")
    envelope = Envelope(
        checkpoint, name, found["format"], found["native"], found["nbytes"], found["contents"], found["names"],
        check_recipe(found["key"], label),
    )  # fmt: skip
    if envelope.start != start:
        raise CheckpointError(f"{label}: its header is not written as this library writes it: it is damaged")
    return envelope


def render_names(plan: Plan) -> bytes:
    """The readable names of a plan's tensors."""
    return json.dumps(
        {entry.name: [entry.dtype, int(entry.torch), list(entry.shape), entry.nbytes] for entry in plan.tensors},
        separators=(",", ":"),
    ).encode("ascii")


def read_names(readable: Readable) -> Plan:
    """A plan of the readable names, without a structure; without tensors if they are not readable."""
    envelope, label = readable.envelope, str(readable.path)
    tensors: list[Any] = []
    regions: list[Any] = []
    if envelope.names:
        with open_input(readable.path) as file:
            pieces = JsonPieces(file, envelope.names_at, envelope.names, label)
            for name in pieces.entries():
                match pieces.value():
                    case [dtype, int() as torch, list() as shape, int() as nbytes]:
                        tensors.append([name, torch, dtype, shape, None, len(regions) if nbytes else -1, 0])
                        regions += [[nbytes, 1]] if nbytes else []
                    case other:
                        raise CheckpointError(f"{label}: invalid entry of tensor {shown(name)}: {shown(other)}")
                if len(tensors) > MAX_TENSORS:
                    raise CheckpointError(f"{label}: more than {MAX_TENSORS} tensors")
            pieces.finish()
    try:
        return Plan.from_parts({"version": 1, "tree": None, "tensors": tensors, "regions": regions, "meta": None})
    except CheckpointError as error:
        raise CheckpointError(f"{label}: {error}") from None


def is_encrypted(path: Location) -> bool:
    """Whether a file begins as an encrypted one does."""
    with open_input(path) as file:
        return file.pread(len(MAGIC), 0) == MAGIC
