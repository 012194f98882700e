"""The files of one save while they are written: under a temporary name, at offsets, with direct I/O if possible.

Large pieces are written straight from the slots, whose pages are aligned for O_DIRECT. If the file system refuses that,
the same calls use the page cache. Small pieces (headers) always do, after everything else.

`EncryptedOutput` has the same interface, over an `Output` of ciphertext. A chunk is encrypted by the thread that writes
it, so that several are at once, and the plain slot stays as it is: after a death the next process takes the bytes from
there again. Every write of a segment has a new random nonce, also when a header is patched, so that no two plaintexts
ever have the same key and nonce.

The data key exists in memory only. It is in each file, wrapped, before the first segment: a process that continues with
the files of a dead one unwraps it from there.

Header and first tensors share a segment, and headers are written last, when the slots of a save that streams are free
again. A death between the new ciphertext and its new tag would lose these tensors. So a segment that is changed goes to
the *journal* first, past the end of the file, which is cut off at last; the next process repeats the write from there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

from ..memory.descriptors import OpenFile, open_file
from ..memory.mapped_file import fresh
from ..memory.shortage import explain
from .description import Described
from .directory import remove, sync
from .envelope import CONTENTS, DATA, ENTRY, SEGMENT, SUFFIX, Cipher, Envelope, SealedFile, read_envelope, render_names
from .formats import Layout
from .formats.base import FileSpec, Place
from .keys import KEY_BYTES, NONCE_BYTES, TAG_BYTES, MasterKey
from .locations import PAGE, LocalFile, write_all
from .plan import Plan

_DIRECT: Final = getattr(os, "O_DIRECT", 0)
_REFUSED: Final = (errno.EINVAL, errno.EOPNOTSUPP)
MOST_OPEN: Final = 64
"""Files of a save that are open at once, by two descriptors each. Of the usual `ulimit -n`, 1024, most are left."""


class _File:
    """A file of a save that is open.

    plain:  its descriptor, to write through the page cache
    direct: another one, for direct I/O; None where that is refused
    users:  threads that use it now
    """

    __slots__ = ("direct", "plain", "users")

    def __init__(self, plain: OpenFile, direct: OpenFile | None) -> None:
        self.plain, self.direct, self.users = plain, direct, 0

    def close(self) -> None:
        for file in (self.plain, self.direct):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()


class Output:
    """Files (name, bytes) below `path`; a single file with the name "" is `path` itself.

    There may be more of them than a process may open: `MOST_OPEN` are open at once, those used last. A file is complete
    on disk before it is closed, so that no error of the disk is lost with its descriptor.

    resume: continue with the existing files. They had their full sizes: `OSError` if one is shorter, because bytes are
            lost.
    """

    def __init__(self, path: str, files: Sequence[tuple[str, int]], *, resume: bool = False) -> None:
        self.path, self.files = path, tuple(files)
        self.is_directory = bool(self.files[0][0])
        self._lock = threading.Lock()
        self._open: dict[int, _File] = {}  # the one that was used last is the last
        self._synced: dict[int, tuple[str, int, int]] = {}  # files that are complete on disk, as `finish` returns them
        self._refuses = not _DIRECT  # direct I/O; set by any writing thread, never reset
        if not resume:
            remove(path)
            if self.is_directory:
                os.mkdir(path)
        for index in range(len(self.files)):
            if resume:
                self._check_size(index)
            else:
                self._create(index)

    def at(self, index: int) -> str:
        """Path of a file."""
        name = self.files[index][0]
        return os.path.join(self.path, name) if name else self.path

    def _create(self, index: int) -> None:
        with contextlib.closing(self._descriptor(index, os.O_RDWR | os.O_CREAT | os.O_EXCL)) as file:
            # to its full size: writes that extend a file wait for each other
            os.ftruncate(file.fd, -(-self.files[index][1] // PAGE) * PAGE)

    def _check_size(self, index: int) -> None:
        expected, found = self.files[index][1], os.stat(self.at(index)).st_size
        if found < expected:
            raise OSError(errno.EIO, f"{self.at(index)} was truncated by somebody, from {expected} bytes to {found}")

    def _descriptor(self, index: int, flags: int) -> OpenFile:
        try:
            return open_file(self.at(index), flags)
        except OSError as error:
            if error.errno == errno.EMFILE:
                raise explain(error, f"cannot open {self.at(index)}") from None
            raise

    def _direct(self, index: int) -> OpenFile | None:
        if self._refuses:
            return None
        try:
            return self._descriptor(index, os.O_WRONLY | _DIRECT)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            return None

    @contextlib.contextmanager
    def _using(self, index: int) -> Iterator[_File]:
        """A context manager in which a file stays open."""
        with self._lock:
            file = self._open.pop(index, None)
            if file is None:
                self._make_room()
                file = _File(self._descriptor(index, os.O_RDWR), self._direct(index))
            self._open[index] = file
            self._synced.pop(index, None)
            file.users += 1
        try:
            yield file
        finally:
            with self._lock:
                file.users -= 1

    def _make_room(self) -> None:
        """Close the file that was used first, if many are open."""
        oldest = next((index for index, file in self._open.items() if not file.users), None)
        if oldest is not None and len(self._open) >= MOST_OPEN:
            file = self._open[oldest]
            self._synced[oldest] = self._sync(oldest, file)
            del self._open[oldest]
            file.close()

    def write(self, index: int, offset: int, view: memoryview) -> None:
        """Write whole pages of a slot at a page's offset; `finish` cuts off what is beyond the file's end.

        Callable from several threads at once, at different offsets.
        """
        with self._using(index) as file:
            if file.direct is not None and not self._refuses and not offset % PAGE and not len(view) % PAGE:
                try:
                    write_all(file.direct.fd, view, offset)
                    return
                except OSError as error:
                    if error.errno not in _REFUSED:
                        raise
                    self._refuses = True  # its descriptor stays open: another thread may be using it
            write_all(file.plain.fd, view, offset)

    def patch(self, index: int, offset: int, data: Any) -> None:
        """Write a small piece at any offset."""
        with self._using(index) as file:
            write_all(file.plain.fd, data, offset)

    def read(self, index: int, offset: int, into: memoryview) -> None:
        """Read back what was written. `OSError` if it is not there."""
        with self._using(index) as file:
            _read(file.plain.fd, into, offset)

    def describe(self, digests: Sequence[int]) -> None:
        """Plain files describe themselves in their own format: nothing to do."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(nbytes for _, nbytes in self.files)

    def finish(self) -> list[tuple[str, int, int]]:
        """Set the exact size of each file and sync it; returns (name, bytes, mtime in ns) of each."""
        found = []
        for index in range(len(self.files)):
            if index not in self._synced:
                with self._using(index) as file:
                    found.append(self._sync(index, file))
            else:
                found.append(self._synced[index])
        # crash: write.synced
        if self.is_directory:
            sync(self.path)
        return found

    def _sync(self, index: int, file: _File) -> tuple[str, int, int]:
        name, nbytes = self.files[index]
        os.ftruncate(file.plain.fd, nbytes)
        # crash: write.sized
        os.fsync(file.plain.fd)
        return name, nbytes, os.fstat(file.plain.fd).st_mtime_ns

    def close(self) -> None:
        """Close the files. Idempotent."""
        files, self._open = self._open, {}
        for file in files.values():
            file.close()

    def discard(self) -> None:
        """Close and remove the files."""
        self.close()
        with contextlib.suppress(OSError):
            remove(self.path)


def _read(fd: int, into: memoryview, offset: int) -> None:
    while into:
        count = os.preadv(fd, [into], offset)
        if not count:
            raise OSError(errno.EIO, "the file under its temporary name is shorter than what was written")
        into, offset = into[count:], offset + count


class _Call(NamedTuple):
    done: Future[None]
    function: Callable[..., None]
    args: tuple[Any, ...]


class Disk:
    """`count` writing threads, started at once; they end with the process.

    Not a `ThreadPoolExecutor`: its `submit` raises if a thread cannot be started, and may still run the call later,
    when the files are closed.
    """

    def __init__(self, count: int) -> None:
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        self.threads = 0
        for number in range(count):
            thread = threading.Thread(target=self._work, name=f"shmtensor disk {number}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads may be started
                return
            self.threads += 1

    def submit(self, function: Callable[..., None], *args: Any) -> Future[None]:
        """Call the function in one of the threads; if there is none, here. Returns a future."""
        call = _Call(Future(), function, args)
        if self.threads:
            self._calls.put(call)
        else:
            _run(*call)
        return call.done

    def _work(self) -> None:
        while True:
            _run(*self._calls.get())


def _run(done: Future[None], function: Callable[..., None], args: tuple[Any, ...]) -> None:
    try:
        function(*args)
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(None)


_TOGETHER: Final = 4 << 20
"""Bytes that are encrypted before they are written: they stay in the cache, and the disk gets long writes."""


_JOURNAL: Final = struct.Struct(f"<Q{ENTRY}s")
"""Number and table entry of the segment that follows."""


class Sealing(NamedTuple):
    """The contents of encrypted files besides their data.

    master:   the key-encryption key
    format:   name of the format inside
    contents: the description, with the places of the regions; None if it is not known
    names:    the readable names, or b""
    native:   written by this library
    """

    master: MasterKey
    format: str
    contents: Described | None
    names: bytes
    native: bool = True

    @classmethod
    def of(cls, master: MasterKey, format: str, plan: Plan, layout: Layout, *, readable: bool) -> Sealing:
        """For a plan that is being written."""
        contents = describe(plan, layout.files, layout.places)
        return cls(master, format, contents, render_names(plan) if readable else b"")


def describe(plan: Plan, files: Sequence[FileSpec], places: Sequence[Place]) -> Described:
    """The contents of encrypted files: the description, in which a region is stored under `file:offset`."""
    return Described(plan.describe(), [f"{files[file].name}:{offset}" for file, offset in places])


class EncryptedOutput:
    """As `Output`: files (name, plain bytes) below `path`, which are encrypted. The last one has the contents.

    resume:  continue with the existing files. `OSError` if they are not what an earlier process began.
    journal: another process may continue, without the plain bytes of what is written
    """

    def __init__(
        self, path: str, files: Sequence[FileSpec], sealing: Sealing, *, resume: bool = False, journal: bool = False
    ) -> None:
        self._contents, self._journals = sealing.contents, journal
        checkpoint, data_key = os.urandom(16).hex(), os.urandom(KEY_BYTES)
        envelopes = [
            self._envelope(checkpoint, file, sealing, is_last=number == len(files) - 1)
            for number, file in enumerate(files)
        ]
        plain = [
            (encrypted_name(name), envelope.file_bytes) for (name, _), envelope in zip(files, envelopes, strict=True)
        ]
        self._output = Output(path, plain, resume=resume)
        self.path, self.files, self.is_directory = path, self._output.files, self._output.is_directory
        self._own = threading.local()
        self._sealed: list[SealedFile] = []
        self._ciphers: list[Cipher] = []
        try:
            for number, envelope in enumerate(envelopes):
                names = sealing.names if envelope.names else b""
                if resume:
                    envelope, cipher = self._resume(number, envelope, sealing.master)
                else:
                    digest = envelope.digest(names)
                    cipher = Cipher(data_key, digest)
                    head = envelope.start + sealing.master.wrap(data_key, digest) + names
                    self._output.patch(number, 0, head)
                self._ciphers.append(cipher)
                self._sealed.append(SealedFile(Path(self.at(number)), envelope, cipher))
            for number in range(len(files) if resume else 0):
                self._repeat(number)
        except BaseException:
            if resume:
                self.close()
            else:
                self.discard()
            raise
        # crash: seal.begun

    @staticmethod
    def _envelope(checkpoint: str, file: FileSpec, sealing: Sealing, *, is_last: bool) -> Envelope:
        contents = len(sealing.contents.file(None)) if is_last and sealing.contents is not None else 0
        names = len(sealing.names) if is_last else 0
        return Envelope(
            checkpoint, file.name, sealing.format, sealing.native, file.nbytes, contents, names, sealing.master.recipe
        )

    def _resume(self, number: int, expected: Envelope, master: MasterKey) -> tuple[Envelope, Cipher]:
        path = Path(self.at(number))
        with self._reading(number) as file:
            found = read_envelope(path, file=LocalFile(file.fd), is_complete=False)
        data_key = master.unwrap(found.wrapped, found.digest)
        if data_key is None or found.envelope.file_bytes != expected.file_bytes:
            raise OSError(errno.EIO, f"{path} was changed by somebody: it does not open with the key of the save")
        return found.envelope, Cipher(data_key, found.digest)

    def _repeat(self, index: int) -> None:
        """Write the segment in the journal again, if one is there."""
        envelope, at = self._sealed[index].envelope, self._journal_at(index)
        head, sealed = bytearray(_JOURNAL.size), bytearray(SEGMENT)
        room = os.stat(self.at(index)).st_size - at - len(head)
        if room <= 0:
            return
        self._output.read(index, at, memoryview(head))
        number, entry = _JOURNAL.unpack(head)
        size = min(SEGMENT, envelope.nbytes - number * SEGMENT)
        if not 0 < size <= room:
            return
        self._output.read(index, at + len(head), memoryview(sealed)[:size])
        nonce, tag = entry[:NONCE_BYTES], entry[NONCE_BYTES:]
        if self._ciphers[index].open(DATA, number, nonce, bytes(sealed[:size]) + tag, bytearray(size)):
            self._output.patch(index, envelope.data_at + number * SEGMENT, bytes(sealed[:size]))
            self._output.patch(index, envelope.entry_at(DATA, number), entry)

    def _reading(self, index: int) -> contextlib.closing[OpenFile]:
        return contextlib.closing(open_file(self.at(index), os.O_RDONLY))

    def _journal_at(self, index: int) -> int:
        return -(-self._sealed[index].envelope.file_bytes // PAGE) * PAGE

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(nbytes for _, nbytes in self.files)

    def at(self, index: int) -> str:
        """Path of a file."""
        return self._output.at(index)

    def write(self, index: int, offset: int, view: memoryview) -> None:
        """Encrypt and write bytes at the start of a segment, whole segments but for the end of the file; what is beyond
        the end is left out.

        Callable from several threads at once, at different segments.
        """
        view = view[: max(0, self._sealed[index].envelope.nbytes - offset)]
        for at in range(0, len(view), _TOGETHER):
            self._write(index, DATA, offset + at, view[at : at + _TOGETHER])

    def _write(self, index: int, part: int, offset: int, view: memoryview, *, journal: bool = False) -> None:
        envelope, cipher = self._sealed[index].envelope, self._ciphers[index]
        first, count = offset // SEGMENT, -(-len(view) // SEGMENT)
        scratch = self._scratch()
        nonces, table = os.urandom(NONCE_BYTES * count), bytearray(ENTRY * count)
        for number in range(count):
            at, nonce = number * SEGMENT, nonces[NONCE_BYTES * number : NONCE_BYTES * (number + 1)]
            plain = view[at : at + SEGMENT]
            end = at + len(plain)
            cipher.seal(part, first + number, nonce, plain, scratch[at : end + TAG_BYTES])
            table[ENTRY * number : ENTRY * (number + 1)] = (
                nonce + scratch[end : end + TAG_BYTES]
            )  # the next one is there
        end = -(-len(view) // PAGE) * PAGE
        scratch[len(view) : end] = bytes(end - len(view))
        if journal:
            data = _JOURNAL.pack(first, bytes(table)) + scratch[: len(view)]
            self._output.patch(index, self._journal_at(index), data)
            # crash: seal.journal
        self._output.write(index, envelope.at(part) + offset, scratch[:end])
        # crash: seal.written
        self._output.patch(index, envelope.entry_at(part, first), bytes(table))

    def _scratch(self) -> memoryview:
        """Memory of this thread, at the start of a page, for direct I/O."""
        if not hasattr(self._own, "scratch"):
            memory: Any = fresh(_TOGETHER + PAGE)
            self._own.scratch = memoryview(memory)
        scratch: memoryview = self._own.scratch
        return scratch

    def patch(self, index: int, offset: int, data: Any) -> None:
        """Write a piece at any offset. Segments that are only partly covered are decrypted and encrypted again."""
        view, envelope = memoryview(data).cast("B"), self._sealed[index].envelope
        at, end = offset, offset + len(view)
        while at < end:
            start = at // SEGMENT * SEGMENT
            if at == start and end - at >= SEGMENT:
                count = min((end - at) // SEGMENT * SEGMENT, _TOGETHER)
                self._write(index, DATA, at, view[at - offset : at - offset + count])
            else:
                size = min(SEGMENT, envelope.nbytes - start)
                count = min(size - (at - start), end - at)
                segment = bytearray(size)
                if count < size:
                    self._read_segment(index, start // SEGMENT, segment)
                segment[at - start : at - start + count] = view[at - offset : at - offset + count]
                self._write(index, DATA, start, memoryview(segment), journal=self._journals and count < size)
            at += count

    def _read_segment(self, index: int, number: int, into: bytearray) -> None:
        """Read a segment; zeros if it was never written."""
        entry = bytearray(ENTRY)
        self._output.read(index, self._sealed[index].envelope.entry_at(DATA, number), memoryview(entry))
        if any(entry):
            self.read(index, number * SEGMENT, memoryview(into))

    def read(self, index: int, offset: int, into: memoryview) -> None:
        """Read back what was written. Raises `CheckpointError` if it is not there."""
        sealed = self._sealed[index]
        reader = SealedFile(sealed.path, sealed.envelope, self._ciphers[index])  # which keeps no segment
        with self._reading(index) as file:
            reader.read(LocalFile(file.fd), DATA, offset, into)

    def describe(self, digests: Sequence[int]) -> None:
        """Write the contents, with the digests of the regions. Call it once, after everything else."""
        if self._contents is not None:
            data, last = memoryview(self._contents.file(digests)), len(self.files) - 1
            for at in range(0, len(data), _TOGETHER):
                self._write(last, CONTENTS, at, data[at : at + _TOGETHER])
        # crash: seal.described

    def finish(self) -> list[tuple[str, int, int]]:
        """Set the exact size of each file and sync it; returns (name, bytes, mtime in ns) of each."""
        return self._output.finish()

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._output.close()

    def discard(self) -> None:
        """Close and remove the files."""
        self.close()
        self._output.discard()


def encrypted_name(name: str) -> str:
    """The name of an encrypted file; "" for the only file, which its caller names."""
    return name + SUFFIX if name else ""
