"""A save without a local copy (`local=False`): from the slots straight to its URL, in the writing process.

    gathered:  all of it is in the slots, which are held until the end: a state that does not fit is refused by `save`
    digested:  each chunk in turn; then the headers, which have the digests, are written into the slots
    noted:     a small file in the directory names what will be at the URL
    sent:      each file, from its slots in order; it appears at the URL as a whole
    listed:    the list of saves at the URL names it: only now does a reader take it for the newest
    pruned:    what `keep_last` does not keep is deleted at the URL
    recorded:  the list of the directory says so as well, if it can be written: from now on the slots are not needed
    done:      the note is removed, the slots are released, and one report makes `durable` and `uploaded` done

Nothing but the slots has the state until it is listed. They outlive the trainer or the writing process: the next
writing process gets all messages again, and begins anew under the same name, or finds it listed. If every process dies,
the slots are lost, and with them what was not listed. Files that are at the URL by then are in no list, and the note
names them: the next process that saves from the directory to the same URL deletes them. What either list has is never
deleted so. Requests can be carried out late, after they were given up: so each later list at the URL has again what the
directory's list calls uploaded, and a name that was swept is not given again by the same process.

All that asks the server happens in a thread of `Disk`; the writing process goes on receiving meanwhile.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..endpoints.message import Message
from ..errors import CheckpointError
from . import index
from .description import combine
from .directory import NOTE, Best, Directory, remove
from .formats import get_format
from .index import UPLOADED, Saved, is_file_name
from .locations import read_regular
from .output import Disk
from .remote import url_of
from .slots import Chunk
from .snapshot import Snapshot
from .upload import Target, mark_of

_MAX_NOTE: Final = 8 << 20

log = logging.getLogger("shmtensor.checkpoint")


class StreamedSnapshot(Snapshot):
    """The messages of one save, and what becomes of them at a URL.

    target: opens the URL, in the thread
    """

    def __init__(self, head: Message, target: Callable[[], Target], url: str, disk: Disk) -> None:
        super().__init__(head)
        self._open_target, self._url, self._disk = target, url, disk
        self.unlisted = ""
        """Why the directory's list does not have it, although it is durable."""
        self._slots: list[tuple[Chunk, Message]] = []
        self._sending: Future[None] | None = None
        self._entry: Saved | None = None
        self._listed: set[str] = set()
        self._swept: set[str] = set()
        self._pruned: list[str] = []

    def url_of(self, name: str) -> str:
        """Where a name is, as it is shown."""
        return url_of(self._url, name)

    @property
    def can_step(self) -> bool:
        return self._sending.done() if self._sending is not None else super().can_step

    @property
    def is_sending(self) -> bool:
        """Whether a thread has it, or had it, and its end is still to be recorded."""
        return self._sending is not None

    def begin(self, directory: Directory, writer: str) -> Saved | None:
        """The entry if an earlier process has recorded it. Whether it has listed it, the thread asks the server."""
        self.begun = True
        self._directory, self._writer = directory, writer
        self._path = directory.temporary(self.name, writer, self.number, NOTE)
        self._start_sums()
        return directory.recorded(writer, self.number)

    def write_next(self, disk: Disk) -> None:
        """Digest the next chunk."""
        chunk, message = self.chunks[self._next], self._chunks.pop(self._next)
        self._digest(chunk, message)
        self._held.append(message)
        self._slots.append((chunk, message))
        self._next += 1

    def complete(self) -> Saved | None:
        """Begin to send it; when that has ended, its entry. Raises what the thread did."""
        if self._sending is None:
            self.written = 0
            for file, offset, data in self.layout.finish(*self._digests()):
                self._patch(file, offset, data)
            # crash: direct.digested
            self._sending = self._disk.submit(self._send)
            return None
        self._sending.result()
        return self._entry

    def commit(self, entry: Saved) -> None:
        """It is listed: record that, and remove the note. May be repeated. If that fails, the note stays, whose name no
        process sweeps, since it is in the list at the URL."""
        self.name = entry.name
        directory = self._directory
        try:
            if directory.recorded(entry.writer, entry.number) is None:
                made = replace(entry, upload=UPLOADED)
                kept = index.without(index.read(directory.path), self._is_gone)
                index.write(directory.path, [*index.before(kept, made), made])
                directory.sync()
            # crash: direct.recorded
            remove(self._path)
        except OSError as error:
            self.unlisted = str(error)
        # crash: direct.done
        self.seconds = time.monotonic() - float(self.options["began"])

    def _is_gone(self, each: Saved) -> bool:
        """Whether an entry of the directory's list is neither at the URL nor here."""
        return not (each.name in self._listed or self._directory.is_taken(each.name))

    def retain(
        self, keep_last: int | None, keep_every: int | None, keep_best: Best | None
    ) -> tuple[list[str], list[str]]:
        """What is at the URL was pruned by the thread. Returns the names."""
        return self._pruned, []

    def discard_files(self) -> None:
        """The note stays, as long as what it names may be at the URL. Waits for the thread, which reads the slots."""
        if self._sending is not None:
            wait([self._sending])

    def drop_log(self) -> None:
        """There is none."""

    def release_chunks(self) -> None:
        self._slots.clear()
        super().release_chunks()

    # --- in the thread

    def _send(self) -> None:
        target = self._target = self._open_target()
        mark, recorded = mark_of(self._url), index.read(self._directory.path)
        self._swept = sweep(self._directory, target, mark, {entry.name for entry in recorded}, but=self._path)
        listed = target.read_list()
        found = [entry for entry in listed if (entry.writer, entry.number) == (self._writer, self.number)]
        if found:
            self._entry, self._listed = found[-1], {entry.name for entry in listed}
            return
        noted = read_note(self._path)
        name = self._free_name({entry.name for entry in (*listed, *recorded)}) if noted is None else noted.name
        now = time.time_ns()
        files = [(file, nbytes, now) for file, nbytes in self.layout.files]
        if noted is None:
            write_note(self._path, Note(mark, name, [file for file, _, _ in files]))
            self._directory.sync()
        # crash: direct.noted
        for number, (file, nbytes, _) in enumerate(files):
            slots = [slot for slot in self._slots if slot[0].file == number]
            target.put_stream(f"{name}/{file}" if file else name, _SlotReader(slots), nbytes, self._sent)
            # crash: direct.file
        digests, _ = self._digests()
        metrics = {key: float(value) for key, value in self.options["metrics"].items()}
        entry = Saved(
            name, self._writer, self.number, self.options["step"], sum(nbytes for _, nbytes, _ in files),
            combine(digests), tuple(files), metrics, self.options["alias"],
        )  # fmt: skip
        try:
            kept = target.add_to_list(entry, [*recorded, entry])
        except OSError:
            kept = target.read_list()
            if entry.identity not in {each.identity for each in kept}:  # else it was written, and the answer lost
                raise
        # crash: direct.listed
        left = {each.name for each in target.prune(kept)}
        self._entry, self._listed = entry, left
        self._pruned = [each.name for each in kept if each.name not in left]

    def _free_name(self, listed: set[str]) -> str:
        """A name that nothing has at the URL: by a number after it, if the user has not given it."""
        ending = get_format(self.options["format"]).suffix if self.layout.single else ""
        stem, name, again = self.name.removesuffix(ending), self.name, 1
        while name in listed or name in self._swept or self._target.is_taken(name):
            if self.options["fixed"]:
                raise FileExistsError(17, f"{self.url_of(name)} exists: pass another name, or remove it")
            again += 1
            name = f"{stem}-{again}{ending}"
        return name

    def _sent(self, nbytes: int) -> None:
        self.written += nbytes

    # --- slots

    def _patch(self, file: int, offset: int, data: bytes) -> None:
        """Write into the slots, where only the writing process reads these bytes: to do so again changes nothing."""
        view = memoryview(data)
        for chunk, message in self._slots:
            if chunk.file != file or not chunk.offset <= offset < chunk.offset + chunk.nbytes:
                continue
            at = offset - chunk.offset
            count = min(len(view), chunk.nbytes - at)
            message.value.data[at : at + count] = view[:count]
            view, offset = view[count:], offset + count
            if not view:
                return


class _SlotReader:
    """A file's bytes, read from its slots in order."""

    def __init__(self, slots: list[tuple[Chunk, Message]]) -> None:
        self._slots = slots
        self._number = self._at = 0

    def read(self, nbytes: int) -> bytes:
        """The next bytes: as many as asked for, or all that are left."""
        parts: list[Any] = []
        while nbytes and self._number < len(self._slots):
            chunk, message = self._slots[self._number]
            count = min(nbytes, chunk.nbytes - self._at)
            parts.append(message.value.data[self._at : self._at + count])
            self._at, nbytes = self._at + count, nbytes - count
            if self._at == chunk.nbytes:
                self._number, self._at = self._number + 1, 0
        return b"".join(parts)

    def rewind(self) -> None:
        """Begin anew."""
        self._number = self._at = 0


class Note(NamedTuple):
    """What a save will have at a URL: `mark_of` the URL, and the files below its name."""

    at: str
    name: str
    files: list[str]


def write_note(path: str, note: Note) -> None:
    """Write a note; the caller syncs the directory. Raises OSError."""
    index.replace(path, json.dumps(note._asdict()).encode())


def read_note(path: str) -> Note | None:
    """A note; None if there is none, or it cannot be read."""
    try:
        found = json.loads(read_regular(Path(path), _MAX_NOTE))
        note = Note(found["at"], found["name"], found["files"])
        if isinstance(note.at, str) and is_file_name(note.name) and isinstance(note.files, list):
            return note if all(file == "" or is_file_name(file) for file in note.files) else None
    except index.UNREADABLE:
        pass
    return None


def sweep(directory: Directory, target: Target, mark: str, recorded: set[str], *, but: str) -> set[str]:
    """Delete what dead saves have left at the URL: files of notes that no list names. What cannot be deleted is in the
    log, and is tried again by the next save. Returns the names that were deleted. Raises OSError if the list at the URL
    cannot be read.

    mark:     of the URL: notes of others are left
    recorded: what the directory's list has: the one at the URL may be damaged
    but:      the note of the save that is at work
    """
    deleted: set[str] = set()
    found = [(path, note) for path in directory.notes() if path != but and (note := read_note(path)) is not None]
    notes = [(path, note) for path, note in found if note.at == mark]
    if not notes:
        return deleted
    listed = {entry.name for entry in target.read_list()} | recorded
    for path, (_, name, files) in notes:
        try:
            if name not in listed:
                deleted.add(name)
                for file in files:
                    target.delete(f"{name}/{file}" if file else name)
                    # crash: direct.swept
            os.unlink(path)
        except FileNotFoundError:
            pass
        except (OSError, CheckpointError) as error:
            log.warning("%s, which a process that died has left, was not deleted: %s", target.path / name, error)
    return deleted
