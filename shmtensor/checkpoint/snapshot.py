"""One save in the writing process: from messages to a durable file, step by step.

    gathering -> writing -> complete -> done            `failed` and `dropped` from any but the last

If shared memory has room for all of it, the messages are held until the checkpoint is durable: after a death the next
process receives all of them again and starts over. A save that streams releases each chunk once it is written into the
temporary file; a log beside that file has the chunks that are written, and the next process continues there.

One rank's part of a checkpoint goes from messages to a voted file, and then to an outcome (`PartSnapshot`):

    gathering -> writing -> voted -> committed | given up

The file is written as that of any save. Then it is renamed into the directory of the checkpoint of all ranks
(`ranks.py`), and its chunks are released. The head is released with the outcome: if the process dies before, the next
one receives the head again and finds the vote.

A save without a local copy (`local=False`, `UrlSnapshot`) goes from the slots straight to its URL:

    gathered:  all of it is in the slots, which are held until the end: a state that does not fit is refused by `save`
    digested:  each chunk in turn; then the headers, which have the digests, are written into the slots
    noted:     a small file in the directory names what will be at the URL
    sent:      each file, from its slots in order; it appears at the URL as a whole
    listed:    the list of saves at the URL names it: only now does a reader take it for the newest
    pruned:    what `keep_last` does not keep is deleted at the URL
    recorded:  the list of the directory says so as well, if it can be written: from now on the slots are not needed
    done:      the note is removed, the slots are released, and one report makes `durable` and `uploaded` done

Until it is listed, only the slots have the state. They outlive the trainer or the writing process: the next writing
process gets all messages again, and begins anew under the same name, or finds the checkpoint listed. If every process
dies, the slots are lost, and with them what was not listed. Files that are at the URL by then are in no list, and the
note names them: the next process that saves from the directory to the same URL deletes them. What either list has is
never deleted so. Requests can be carried out late, after they were given up: so each later list at the URL has again
what the directory's list calls uploaded, and a name that was swept is not given again by the same process.

All requests to the server are made in a thread of `Disk`; the writing process goes on receiving meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..endpoints.message import Message
from ..errors import CheckpointError, ShmTensorError
from . import index
from .description import Summer, combine
from .directory import NOTE, Directory, Keep, remove
from .envelope import HIDDEN_DIGEST, SUFFIX
from .formats import Layout, get_format
from .index import PENDING, UPLOADED, Saved, is_file_name
from .keys import MasterKey
from .locations import PAGE, read_regular
from .manifest import part_name
from .output import Disk, EncryptedOutput, Output, Sealing
from .plan import Plan
from .ranks import Votes, Waiting
from .remote import url_of
from .run_record import Outcome, Vote
from .slots import Chunk, cut
from .upload import Target, mark_of

WRITES: Final = 4
"""Chunks that are being written at once, so that the disk never waits for the next one."""
_READ: Final = 1 << 20

log = logging.getLogger("shmtensor.checkpoint")


class _Write(NamedTuple):
    """A chunk that is being written."""

    chunk: Chunk
    message: Message
    done: Future[None]


class Snapshot:
    """The messages of one save, and its files."""

    def __init__(self, head: Message, master: MasterKey | None = None) -> None:
        self.head = head
        self._master = master  # of a writer that encrypts
        self.options: dict[str, Any] = head.meta
        self.number: int = self.options["n"]
        self.name: str = self.options["name"]
        self.streams: bool = self.options["streams"]
        self.begun = False
        self.staged = False  # the trainer has published all of it
        self.written = 0
        self.seconds = 0.0
        """From the beginning of `save` until it was durable under its name."""
        self.unsynced: OSError | None = None
        """The error because of which it is not known to be durable, though complete under its name."""
        self.unlinked = ""
        """Why `latest` or an alias does not lead to it; "" if they do."""
        self._chunks: dict[int, Message] = {}
        self._held: list[Message] = []
        self._writes: deque[_Write] = deque()
        self._next = 0  # the chunk whose write is begun next
        self._output: Output | EncryptedOutput | None = None
        self._log = -1

    # --- gathering

    @cached_property
    def layout(self) -> Layout:
        return get_format(self.options["format"]).layout(self._plan, self.options["max_shard"])

    @property
    def _metrics(self) -> dict[str, float]:
        return index.metrics_of(self.options["metrics"])

    @cached_property
    def _plan(self) -> Plan:
        return Plan.from_description(self.head.value.tobytes())

    @cached_property
    def chunks(self) -> list[Chunk]:
        return cut(self.layout, self.options["chunk"])

    def add(self, message: Message) -> None:
        """Add a chunk, or the end."""
        number = message.meta.get("i")
        if number is None:
            self.staged = True
            self._held.append(message)
        elif number < self._next:  # an earlier process had written it and not released it
            message.release()
        else:
            self._chunks[number] = message

    @property
    def can_step(self) -> bool:
        """Whether there is a step to do now: write the next chunk, or finish when all are written."""
        if not self.staged and not self.streams:
            return False  # the trainer is copying: leave memory bandwidth and cores to it
        if not self.begun:
            return True
        return bool(self._writes) or self._next in self._chunks or (self.staged and self._next == len(self.chunks))

    # --- writing

    def begin(self, directory: Directory, writer: str) -> Saved | None:
        """Open the files; returns the entry if an earlier process had completed them. Raises OSError."""
        self.begun = True
        self._directory, self._writer = directory, writer
        self._path = directory.temporary(self.name, writer, self.number)
        self._log_path = directory.temporary(self.name, writer, self.number, "log")
        entry = self._recorded()
        if entry is not None:
            return entry
        self._start_sums()
        lines = self._read_log() if self.streams else []
        # crash: write.begun
        self._output = self._create(resume=bool(lines))
        if self.streams:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._log = os.open(self._log_path, flags | (0 if lines else os.O_TRUNC), 0o644)
        self._catch_up(len(lines))
        # crash: write.created
        return None

    def _create(self, *, resume: bool) -> Output | EncryptedOutput:
        files, format = self.layout.files, self.options["format"]
        if self._master is None:
            return Output(self._path, files, resume=resume)
        readable = self.options["readable_names"]
        sealing = Sealing.of(self._master, format, self._plan, self.layout, readable=readable)
        return EncryptedOutput(self._path, files, sealing, resume=resume, journal=self.streams)

    def was_recorded(self, directory: Directory, writer: str) -> bool:
        """Whether an earlier process had completed its files."""
        return directory.recorded(writer, self.number) is not None

    def _recorded(self) -> Saved | None:
        """The entry, if the files are complete. Raises OSError if they cannot become complete."""
        directory = self._directory
        entry = directory.recorded(self._writer, self.number)
        if entry is not None and (entry.is_there(directory.path) or entry.is_at(self._path)):
            return entry
        if entry is not None and len(self._chunks) < len(self.chunks):
            raise FileNotFoundError(2, f"{directory.at(self.name)} is gone: somebody removed it while it was finished")
        if directory.is_taken(self.name):
            raise FileExistsError(17, f"{directory.at(self.name)} exists: somebody made it after the save began")
        return None

    def _read_log(self) -> list[int]:
        """The chunks that are certainly in the temporary files: 0, 1, 2, ..."""
        try:
            with open(self._log_path, encoding="ascii") as file:
                lines = [json.loads(line) for line in file if line.endswith("\n")]
        except FileNotFoundError:
            return []
        if lines != list(range(len(lines))):
            raise OSError(5, f"{self._log_path} is damaged")
        return lines

    def _catch_up(self, count: int) -> None:
        """Compute the digests of what an earlier process wrote, by reading it back."""
        buffer = memoryview(bytearray(_READ if count else 0))
        for chunk in self.chunks[:count]:
            for at, nbytes, region, _, _ in chunk.runs:
                done = 0
                while region >= 0 and done < nbytes:
                    part = buffer[: min(nbytes - done, len(buffer))]
                    self._files.read(chunk.file, chunk.offset + at + done, part)
                    self._sums[region].update(part)
                    done += len(part)
            self.written += chunk.nbytes
        self._next = count
        for number in [number for number in self._chunks if number < count]:
            self._chunks.pop(number).release()

    @property
    def _files(self) -> Output | EncryptedOutput:
        if self._output is None:
            raise RuntimeError("the files are not open")
        return self._output

    @property
    def is_written(self) -> bool:
        return self._next == len(self.chunks) and not self._writes

    def write_next(self, disk: Disk) -> None:
        """Begin up to `WRITES` writes, straight from the slots; digest the oldest chunk meanwhile, and wait until it is
        written. Raises OSError."""
        while len(self._writes) < WRITES and self._next in self._chunks:
            self._begin_write(disk)
        chunk, message, done = self._writes[0]
        self._digest(chunk, message)
        done.result()
        del self._writes[0]
        self.written += chunk.nbytes
        if not self.streams:
            self._held.append(message)
            return
        # crash: stream.written
        line = b"%d\n" % chunk.index
        if os.write(self._log, line) != len(line):
            raise OSError(28, f"{self._log_path}: No space left on device")
        # crash: stream.logged
        message.release()
        # crash: stream.released

    def _start_sums(self) -> None:
        self._sums = [Summer(crc=self.layout.needs_crc) for _ in self.layout.places]

    def _digest(self, chunk: Chunk, message: Message) -> None:
        view: memoryview = message.value.data
        for at, nbytes, region, _, _ in chunk.runs:
            if region >= 0:
                self._sums[region].update(view[at : at + nbytes])

    def _digests(self) -> tuple[list[int], list[int]]:
        """Digests and CRCs of the regions."""
        return [each.digest for each in self._sums], [each.crc for each in self._sums]

    def _begin_write(self, disk: Disk) -> None:
        message = self._chunks.pop(self._next)
        chunk = self.chunks[self._next]
        view: memoryview = message.value.data[: -(-chunk.nbytes // PAGE) * PAGE]
        # crash: write.chunk
        done = disk.submit(self._files.write, chunk.file, chunk.offset, view)
        self._writes.append(_Write(chunk, message, done))
        self._next += 1

    def complete(self) -> Saved | None:
        """Write headers with the digests, sync the files and record them; returns the entry, None if it is not ready
        yet. Raises OSError."""
        digests, crcs = self._digests()
        # crash: write.finishing
        for file, offset, data in self.layout.finish(digests, crcs):
            self._files.patch(file, offset, data)
        self._files.describe(digests)
        # crash: write.headers
        files = self._files.finish()
        self._files.close()
        entry = Saved(
            self.name, self._writer, self.number, self.options["step"],
            sum(nbytes for _, nbytes, _ in files), HIDDEN_DIGEST if self._master else combine(digests),
            tuple(files), self._metrics, self.options["alias"], PENDING if self.options["upload"] else "",
        )  # fmt: skip
        # crash: commit.before
        self._record(entry)
        # crash: commit.recorded
        return entry

    def _record(self, entry: Saved) -> None:
        """Record that the files are complete, before they get their name."""
        self._directory.record(entry)

    def commit(self, entry: Saved) -> None:
        """Rename the files to their final name, then move `latest`. May be repeated. OSError if the rename fails.

        After the rename the checkpoint is complete; `unsynced` and `unlinked` have the failures of later steps.
        """
        directory = self._directory
        if not entry.is_there(directory.path):
            if directory.is_taken(self.name):
                raise FileExistsError(17, f"{directory.at(self.name)} exists: somebody made it after the save began")
            os.rename(self._path, directory.at(self.name))
        # crash: commit.renamed
        try:
            directory.sync()
        except OSError as error:
            self.unsynced = error
        # crash: commit.durable
        unlinked = [directory.point_latest(self.name)]
        # crash: alias.before
        unlinked.append(directory.point_aliases())
        self.unlinked = "; ".join(filter(None, unlinked))
        self.seconds = time.monotonic() - float(self.options["began"])

    def retain(self, keep: Keep) -> tuple[list[str], list[str]]:
        """Remove the log and delete old checkpoints; returns the names of the deleted, and what failed.

        Deletes no checkpoint if this one is not known to be durable. May be repeated.
        """
        self.drop_log()
        if self.unsynced is not None:
            return [], []
        return self._directory.retain(keep)

    # --- the end

    def release_chunks(self) -> None:
        """Release all messages but the head: after a death the next process finds in the list that it was complete."""
        writing = [write.message for write in self._writes]
        for message in (*self._chunks.values(), *writing, *self._held):
            message.release()
        self._chunks.clear()
        self._writes.clear()
        self._held.clear()

    def release(self) -> None:
        """Release all messages."""
        self.release_chunks()
        self.head.release()

    def discard(self) -> None:
        """Remove its files and release all messages."""
        self.discard_files()
        # crash: discard.removed
        if self.begun:
            self.drop_log()
        self.release()

    def discard_files(self) -> None:
        """Remove its files, but not the log, which shows the next process that they were there.

        Waits for writes first: their descriptors could soon belong to other files.
        """
        wait([write.done for write in self._writes])
        if self.begun:
            with contextlib.suppress(OSError):
                self._directory.withdraw({(self.name, self._writer, self.number)})
        if self._output is not None:
            self._output.discard()
        if self.begun:
            with contextlib.suppress(OSError):
                remove(self._path)

    def drop_log(self) -> None:
        """Close and remove the log."""
        fd, self._log = self._log, -1
        if fd >= 0:
            os.close(fd)
        with contextlib.suppress(OSError):
            remove(self._log_path)


_PATIENCE: Final = 10.0
"""Seconds in which a part that may count is taken back, before its save is said to have failed all the same."""
POLLS = (0.02, 0.5)
"""Seconds between two checks of the votes: the first, plus a twentieth of the time waited so far; at most the last."""


class PartSnapshot(Snapshot):
    """The messages of one rank's save. `name` is the key that the parts of all ranks have in common."""

    def __init__(self, head: Message, votes: Votes, master: MasterKey | None = None) -> None:
        super().__init__(head, master)
        self._votes = votes
        self.since = self._next_poll = 0.0
        self.entry: Saved | None = None
        """Once its part may count."""
        self.failure: OSError | ShmTensorError | None = None
        self._failed = 0.0

    def was_recorded(self, directory: Directory, writer: str) -> bool:
        """Whether an earlier process had voted, or the outcome is known."""
        return self._votes.find(self.name) is not None or self._votes.outcome(self.name) is not None

    def _recorded(self) -> Saved | None:
        outcome = self._votes.outcome(self.name)
        if outcome is not None and not outcome.name:
            raise OSError(errno.ECANCELED, outcome.reason)
        vote = self._votes.find(self.name)
        if vote is not None:
            entry = self._entry(vote)
            if outcome is not None or entry.is_at(self._path) or entry.is_at(self._place(vote)):
                return entry
        if outcome is not None:  # committed: the directory with this rank's vote was renamed
            return self._entry(None)
        voted = vote is not None or not self.streams
        if voted and len(self._chunks) < len(self.chunks):  # an earlier process had voted, and released them
            raise FileNotFoundError(2, f"{self._path} is gone: somebody removed it")
        return None

    def _place(self, vote: Vote) -> str:
        return f"{self._votes.pending(self.name)}/{vote.file}"

    def _entry(self, vote: Vote | None) -> Saved:
        files = (("", vote.nbytes, vote.changed),) if vote else (("", self.layout.nbytes, 0),)
        digest = vote.digest if vote else ""
        return Saved(self.name, self._writer, self.number, self.options["step"], files[0][1], digest, files)

    def _record(self, entry: Saved) -> None:
        with self._or_decided():
            self._votes.prepare(self.name, self._vote(entry))

    @contextlib.contextmanager
    def _or_decided(self) -> Iterator[None]:
        """An error of what is done within says that the others have decided meanwhile, if so: its directory is gone.

        Raises the reason, as OSError, if they have given the checkpoint up.
        """
        try:
            yield
        except OSError:
            outcome = self._votes.outcome(self.name)
            if outcome is None:
                raise
            if not outcome.name:
                raise OSError(errno.ECANCELED, outcome.reason) from None

    def _vote(self, entry: Saved) -> Vote:
        _, nbytes, changed = entry.files[0]
        rank, world_size = self.options["rank"], self.options["world_size"]
        suffix = get_format(self.options["format"]).suffix + (SUFFIX if self._master else "")
        file = part_name(rank, suffix)
        return Vote(
            rank, world_size, self.number, file, nbytes, changed, entry.digest, self.options["step"], self._metrics,
            self.options["alias"], self.options["fixed"], self.options["upload"],
        )  # fmt: skip

    def commit(self, entry: Saved) -> None:
        """Add the part to those of the other ranks. Raises OSError, with the reason if the checkpoint was given up."""
        self.entry = entry
        self.since = time.monotonic()
        if self._votes.outcome(self.name) is None:
            with self._or_decided():
                self._votes.add(self.name, self._vote(entry), self._path)

    def poll(self, *, alone: bool) -> Outcome | Waiting | None:
        """The outcome, or the missing ranks; None if it is not time to check. Raises OSError."""
        now = time.monotonic()
        if now < self._next_poll:
            return None
        if self.failure is None:
            found: Outcome | Waiting | None = self._votes.poll(self.name, alone=alone)
        else:
            found = self._votes.refuse(self.name, reason_of(self.failure))
        first, last = POLLS
        self._next_poll = now + min(last, first + (now - self.since) / 20)
        if isinstance(found, Outcome):
            self.seconds = now - float(self.options["began"])
        return found

    def fail(self, error: OSError | ShmTensorError) -> bool:
        """Have `poll` give the checkpoint up from now on; False if that has failed for `_PATIENCE` as well."""
        now = time.monotonic()
        if self.failure is None:
            self.failure, self._failed = error, now
            self.since, self._next_poll = now, 0.0
        return now - self._failed < _PATIENCE

    def refuse_later(self) -> None:
        """Let the checkpoint be given up later, without waiting."""
        if self.failure is not None:
            self._votes.refuse_later(self.name, reason_of(self.failure))


def reason_of(error: OSError | ShmTensorError) -> str:
    """The text of an error; of an outcome, which is raised as `ECANCELED`, the reason alone."""
    return str(error.strerror if isinstance(error, OSError) and error.errno == errno.ECANCELED else error)


_MAX_NOTE: Final = 8 << 20


class UrlSnapshot(Snapshot):
    """One save without a local copy: its messages, and the files that they become at a URL.

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
        """Whether a thread is sending it, or has sent it and the end is not recorded yet."""
        return self._sending is not None

    def begin(self, directory: Directory, writer: str) -> Saved | None:
        """The entry, if an earlier process has recorded it. The thread finds out from the server whether it is
        listed."""
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
        """Begin to send it; when that has ended, return its entry. Raises what the thread raised."""
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
        """Record that it is listed, and remove the note. May be repeated. If this fails, the note stays; no process
        deletes the files that it names, since they are in the list at the URL."""
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

    def retain(self, keep: Keep) -> tuple[list[str], list[str]]:
        """The names that the thread has deleted at the URL."""
        return self._pruned, []

    def discard_files(self) -> None:
        """Wait for the thread, which reads the slots. The note stays as long as the files that it names may be at the
        URL."""
        if self._sending is not None:
            wait([self._sending])

    def drop_log(self) -> None:
        """Do nothing: there is no log."""

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
        entry = Saved(
            name, self._writer, self.number, self.options["step"], sum(nbytes for _, nbytes, _ in files),
            combine(digests), tuple(files), self._metrics, self.options["alias"],
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
