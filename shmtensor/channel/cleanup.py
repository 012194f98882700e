"""The only clean-up code: it removes the files of a member, of a channel, or of all channels of the user.

`close`, a peer that notices a crash, the next join and `shmtensor gc` all use it. All decisions are made under the
control lock, by the members' life locks. Files are removed before the entry that lists them, so that the next clean-up
repeats what a death interrupts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from ..errors import ReentrantError, ResourceError, ShmTensorError, TimedOut, WireError
from ..memory import placement
from ..memory import segment as shm
from ..memory.locks import LockFile
from ..memory.semaphores import semaphore_exists, unlink_semaphore
from ..memory.words import store
from ..options import printable
from ..ring.layout import DONE, FAN_OUT, MAX_RINGS, state_word
from ..ring.ring import SequenceTable
from . import control as ctl
from .control import Control, Entry, exclusively
from .names import (
    PREFIX,
    SERVER_FILES,
    control_name,
    files_by_channel,
    is_socket_name,
    parse_file,
    ring_name,
    semaphore_name,
    sequence_table_name,
    socket_path,
)

if TYPE_CHECKING:
    from .membership import Member

log = logging.getLogger("shmtensor.channel")

_FRESH_NS = 5_000_000_000


def unlink_member(channel: str, uid: int, directory: str) -> bool:
    """Remove every name that a member may own: inbox, semaphore, rings, sequence table.

    Returns False if a segment server cannot do so now: names are left, so the member's entry must stay.
    """
    with contextlib.suppress(OSError):
        os.unlink(socket_path(directory, uid))
    if not unlink_semaphore(sequence_table_name(channel, uid)):
        return False
    # crash: sweep.names
    # last to first: after a death in between, the next clean-up counts from 0 and finds the rest
    for number in reversed(range(_count(lambda number: semaphore_exists(semaphore_name(channel, uid, number))))):
        if not unlink_semaphore(semaphore_name(channel, uid, number)):
            return False
    for index in reversed(range(_count(lambda index: shm.exists(ring_name(channel, uid, index))))):
        if not shm.unlink(ring_name(channel, uid, index)):
            return False
    return shm.unlink(sequence_table_name(channel, uid))


def _count(exists: Callable[[int], bool]) -> int:
    """How many files of a numbered kind exist."""
    return next((number for number in range(MAX_RINGS) if not exists(number)), MAX_RINGS)


def unlink_channel(control: Control, directory: str) -> None:
    """Remove every name of the channel, the control segment last. Under the lock, when no other member lives.

    If a segment server cannot do so now, the next sweep does it.
    """
    if not all(unlink_member(control.channel, uid, directory) for uid in control.owners()):
        return
    # crash: sweep.channel
    shm.unlink(control.name)


def _reap_one(control: Control, index: int, uid: int, directory: str) -> list[int]:
    """Remove a dead member. Returns its uid, or nothing if its files could not be removed. In `reap` itself it would be
    a branch in a loop in a `with` block, where CPython 3.12 may let an exception pass by the block's end."""
    if not unlink_member(control.channel, uid, directory):
        return []
    # crash: sweep.unlinked
    control.clear(index)
    return [uid]


def reap(control: Control, directory: str, me: Member | None) -> list[int]:
    """Under the lock: remove every dead member but those whose messages a living member still needs.

    Returns the uids of the removed members. `me` is the caller: the kernel does not report a process's own locks. It
    does not wait for a segment server: what needs one is left to the next liveness check.
    """
    removed = []
    with placement.at_once():
        for index, uid in [(index, control.owner(index)) for index in _expendable(control, me)]:
            removed += _reap_one(control, index, uid, directory)
    if removed:
        control.advance()
    end_groups(control, me)
    return removed


def _own(me: Member | None) -> tuple[int, ...]:
    """The entries whose life locks the caller holds itself."""
    return () if me is None else (me.index, me.recipient[0])


def end_groups(control: Control, me: Member | None) -> None:
    """Under the lock: mark groups as leaving whose members take no more messages; their entries stay while views
    live."""
    members, own = list(control.members()), _own(me)
    for group in members:
        if group.role == ctl.GROUP and not group.leaving:
            mine = (entry for entry in members if entry.group == group.uid and not entry.leaving)
            if not any(entry.index in own or control.is_alive(entry.index) for entry in mine):
                store(control.words, ctl.base(group.index) + ctl.M_LEAVING, 1)
                control.advance()


def _expendable(control: Control, me: Member | None) -> Iterator[int]:
    """Indices of the dead members whose messages no living member needs."""
    members, own = {entry.index: entry for entry in control.members()}, _own(me)
    alive = [entry for entry in members.values() if entry.index in own or control.is_alive(entry.index)]
    for index in range(control.capacity):
        if control.owner(index) and index not in own and not control.is_alive(index):
            entry = members.get(index)
            if entry is None or entry.role != ctl.SENDER or not _is_needed(control, entry, alive):
                yield index


def _is_needed(control: Control, sender: Entry, alive: list[Entry]) -> bool:
    """Whether a dead or closed sender has messages that living members have not taken; True if that is unknown."""
    try:
        sequences = control.sequence_table(sender.uid)
    except (FileNotFoundError, WireError):
        return False
    except ResourceError:
        return True
    try:
        if control.kind == FAN_OUT:
            # for newest-only receivers, too: nothing waits for them, but they get the last message
            return any(
                sequences.start(entry.index, entry.uid) is not None and sequences.finished(entry.index) != entry.uid
                for entry in alive
                if not entry.leaving and (entry.is_recipient or (entry.flags & ctl.LATEST and not sequences.device))
            )
        return any(True for _ in _undone(control, sequences))
    except ResourceError:  # a ring cannot be mapped
        return True
    finally:
        sequences.close()


def _undone(control: Control, sequences: SequenceTable) -> Iterator[int]:
    """The numbers of a work-queue producer's published messages that are not done. Raises `ResourceError` if a ring
    cannot be mapped."""
    published = sequences.published
    for index in range(min(sequences.rings, MAX_RINGS)):
        try:
            ring = control.ring(sequences.uid, index, writable=False)
        except (FileNotFoundError, WireError):
            continue
        for slot, seq in enumerate(ring.seqs):
            if 0 < seq <= published and ring.words[state_word(ring, slot) + DONE] != seq:
                yield seq


def count_undone(control: Control) -> int:
    """How many messages of all senders of a work queue, closed and dead ones included, are not done."""
    count = 0
    for entry in control.members():
        if entry.role == ctl.SENDER:
            with contextlib.suppress(FileNotFoundError, WireError, ResourceError):
                sequences = control.sequence_table(entry.uid)
                try:
                    count += sum(1 for _ in _undone(control, sequences))
                finally:
                    sequences.close()
    return count


def leave(member: Member, *, keep: bool, count: bool = False) -> int:
    """Under the lock: remove a member, unless `keep` (others still need it), then the channel if no other member lives.

    With `count`, returns how many messages of a work queue are lost with the channel, else 0.
    """
    control, directory, index, uid = member.control, member.directory, member.index, member.uid
    if control.owner(index) != uid:
        return 0  # it has left, and the entry may be another member's
    if keep:
        store(control.words, ctl.base(index) + ctl.M_LEAVING, ctl.KEPT)
    elif unlink_member(control.channel, uid, directory):  # else it is left as if it had died
        # crash: leave.unlinked
        control.clear(index)
    control.advance()
    # crash: leave.cleared
    # before the others are checked: of two that leave together, the second must not see the first
    for own in _own(member):
        control.locks.unlock(ctl.LIFE + own)
    if control.anybody_alive():
        reap(control, directory, None)
        return 0
    with placement.at_once():
        lost = count_undone(control) if count else 0
    unlink_channel(control, directory)
    return lost


class Leftover(NamedTuple):
    """A file that no living member owns."""

    channel: str
    path: str
    nbytes: int
    file: str = ""
    """The name of a segment or semaphore; empty: it is in the socket directory."""
    is_unanswered: bool = False
    """A segment server could not remove it now."""

    @property
    def is_left(self) -> bool:
        """Whether it is still there."""
        return shm.exists("/" + self.file) if self.file else os.path.lexists(self.path)


def channels() -> list[str]:
    """The names of all channels that have files in `/dev/shm`, of any user."""
    found: dict[str, None] = {}
    for name, info in shm.scan():
        parsed = parse_file(name)
        if parsed and parsed[0] not in found and info and stat.S_ISREG(info.st_mode):
            found[parsed[0]] = None
    return sorted(found)


def _mine(channel: str, names: Iterable[str]) -> list[Leftover]:
    """The regular files among `names` that belong to this user."""
    return [
        Leftover(channel, shm.path_of(name), info.st_size, name)
        for name, info in shm.statuses(names).items()
        if info is not None and info.st_uid == os.geteuid() and stat.S_ISREG(info.st_mode)
    ]


def _files(channel: str) -> list[Leftover]:
    """This user's files of a channel."""
    return _mine(channel, files_by_channel().get(channel, ()))


def has_members(channel: str) -> bool:
    """Whether a member of a channel lives. It takes no lock and lists nothing."""
    try:
        with shm.look_at(control_name(channel), is_regular=True) as segment:
            return segment.is_locked(ctl.LIFE, ctl.CAPACITY)
    except TimeoutError:
        raise  # a signal handler's: nothing here waits
    except (OSError, WireError):
        return False


_WELL, _WITH_CLOSED, _UNKNOWN = range(3)
"""States of a channel: some members live and none is dead; the same, except senders that have closed, whose messages
others may still need; unknown."""
_FEW: Final = 16
"""Entries of a table that are read together with its head. Few channels have more members, and reading takes most of
the time."""


class _Table:
    """The table of members of one channel after the other, as read without the lock: memory that is used again."""

    def __init__(self) -> None:
        self._words = memoryview(bytearray(Control.nbytes())).cast("Q")
        self._first = self._words[: ctl.base(_FEW)]
        self._owners = self._words[ctl.base(0) + ctl.M_OWNER :: ctl.base(1) - ctl.base(0)]

    def look(self, channel: str) -> tuple[set[int], int]:
        """The uids in it, and 0; and whether there may be something to clean up, for that only the lock decides.

        If it is `_WELL`, there is nothing but files of a uid that is not in it: a member stores its uid before it makes
        its files, with its life lock held, and files are removed before the uid.
        """
        try:
            with shm.look_at(control_name(channel), is_regular=True) as segment:
                if segment.info.st_uid != os.geteuid() or segment.nbytes != self._words.nbytes:
                    return set(), _UNKNOWN
                segment.read_into(self._first)
                if (self._words[ctl.W_MAGIC], self._words[ctl.W_VERSION]) != (ctl.MAGIC, ctl.VERSION):
                    return set(), _UNKNOWN
                if self._words[ctl.W_USED] > _FEW:
                    segment.read_into(self._words)
                owners = self._owners[: self._words[ctl.W_USED]].tolist()
                taken = [index for index, owner in enumerate(owners) if owner]
                dead = [index for index in taken if not segment.is_locked(ctl.LIFE + index)]
        except TimeoutError:
            raise  # a signal handler's: nothing here waits
        except (OSError, WireError):
            return set(), _UNKNOWN
        if len(dead) == len(taken) or any(self._words[ctl.base(at) + ctl.M_LEAVING] != ctl.KEPT for at in dead):
            return {0, *owners}, _UNKNOWN
        return {0, *owners}, _WITH_CLOSED if dead else _WELL


def sweep_channel(
    channel: str,
    directory: str,
    *,
    dry_run: bool = False,
    patience: float = 0.0,
    files: list[Leftover] | None = None,
) -> list[Leftover]:
    """Remove what a channel's dead members left; the whole channel if no member lives. Returns what was removed.

    Nothing that living members need is touched. Waits `patience` seconds for the channel's lock; a channel that is
    locked for longer is in use and left alone. `files`: the channel's files, if the caller has listed them already.
    """
    name = control_name(channel)
    found = _files(channel) if files is None else files
    before = [leftover for leftover in found if _owner_of(leftover) is not None]
    if not shm.is_ours(name):
        # A control segment is made first and unlinked last: if there is none, the files listed before have no owner.
        return _remove(before, dry_run=dry_run)
    try:
        segment = shm.attach(name)
    except FileNotFoundError:
        return _remove(before, dry_run=dry_run)
    except (ResourceError, WireError):
        return []  # it cannot be read, so it may have living members
    with segment:
        locks = segment.locks()
        try:
            return exclusively(
                locks, patience, f'channel "{channel}"',
                lambda: _sweep_locked(channel, segment, locks, directory, before, dry_run=dry_run),
            )  # fmt: skip
        except (TimedOut, ReentrantError):
            return []
        finally:
            locks.close()


def _sweep_locked(
    channel: str, segment: shm.Segment, locks: LockFile, directory: str, before: list[Leftover], *, dry_run: bool
) -> list[Leftover]:
    """Without waiting for a segment server: others wait for the lock."""
    with placement.at_once():
        return _sweep(channel, segment, locks, directory, before, dry_run=dry_run)


def _sweep(
    channel: str, segment: shm.Segment, locks: LockFile, directory: str, before: list[Leftover], *, dry_run: bool
) -> list[Leftover]:
    """`before`: the files of members, as listed before the channel was locked. Members that have joined since own none
    of them."""
    if not segment.is_still(control_name(channel)):
        return []
    segment.nbytes = os.fstat(segment.fd).st_size  # a joiner may have made it before we had the lock
    control = None
    if segment.nbytes:
        if segment.nbytes != Control.nbytes() or segment.read(0, 1)[0] not in (0, ctl.MAGIC):
            return []  # another version's or another program's: left alone
        if segment.is_sparse():
            return []  # not ours: in ours every page is reserved; touching a missing page may kill the process (SIGBUS)
        control = Control(channel, segment, locks)
    if control is not None and control.is_ready:
        try:
            control.check()
        except WireError:
            return []  # another version's
        directory = control.directory(directory)
        if control.anybody_alive():
            expendable = {control.owner(index) for index in _expendable(control, None)}
            owners = {control.owner(index) for index in range(control.capacity)} - expendable
            gone = [found for found in before if _owner_of(found) not in owners]
            inboxes = (socket_path(directory, uid) for uid in expendable)
            gone += [Leftover(channel, path, 0) for path in inboxes if os.path.exists(path)]
            if not dry_run:
                reap(control, directory, None)
            return _remove(gone, dry_run=dry_run)
    main = control_name(channel)[1:]
    files = sorted(_files(channel), key=lambda leftover: leftover.file == main)
    if control is not None and control.is_ready and not dry_run:
        for uid in control.owners():
            unlink_member(channel, uid, directory)
    return _remove(files, dry_run=dry_run)


def _owner_of(leftover: Leftover) -> int | None:
    found = parse_file(leftover.file)
    return found[1] if found else None


def _remove(leftovers: list[Leftover], *, dry_run: bool) -> list[Leftover]:
    if dry_run:
        return leftovers
    tried = []
    for leftover in leftovers:
        is_done = True
        if leftover.file:
            is_done = shm.unlink("/" + leftover.file)
        else:
            with contextlib.suppress(OSError):
                os.unlink(leftover.path)
        tried.append(leftover._replace(is_unanswered=not is_done))
    return tried


def sweep_all(
    directory: str,
    *,
    dry_run: bool = False,
    joined: str | None = None,
    patience: float = 0.0,
    most_closed: int | None = None,
) -> list[Leftover]:
    """Sweep every channel of this user, then the inboxes that no member owns. A channel that fails is skipped.

    Waits up to `patience` seconds for the lock of each channel in which a member has died; others are only read.
    `joined`: the channel that the caller joins next, which removes what its members left: here go only the files that
    none of them owns, as a segment server may have been given them again after they were removed.
    `most_closed`: how many of the channels without deaths, in which senders have closed and left messages, are swept;
    they are chosen at random. Their receivers clean up when they have taken these messages, and finding out what they
    still need would make joins slow.
    """
    gone: list[Leftover] = []
    todo: list[str] = []
    closed: list[str] = []
    table, known = _Table(), set[int]()
    listed = files_by_channel()
    for channel, names in listed.items():
        owners, state = table.look(channel)
        known |= owners
        if (channel == joined or state == _WELL) and owners.issuperset(names.values()):
            continue
        (closed if state == _WITH_CLOSED and owners.issuperset(names.values()) else todo).append(channel)
    if most_closed is not None and len(closed) > most_closed:
        start = time.monotonic_ns() % len(closed)
        closed = (closed + closed)[start : start + most_closed]
    for channel in todo + closed:
        try:
            if files := _mine(channel, listed[channel]):
                gone += sweep_channel(channel, directory, dry_run=dry_run, patience=patience, files=files)
        except (ShmTensorError, OSError, ValueError, LookupError, ArithmeticError) as error:
            if isinstance(error, TimeoutError) and not isinstance(error, TimedOut):
                raise  # a signal handler's
            log.debug("channel %s could not be swept: %s", channel, error, exc_info=True)
    return gone + _sweep_sockets(directory, known, dry_run=dry_run)


def _sweep_sockets(directory: str, known: set[int], *, dry_run: bool) -> list[Leftover]:
    """`known`: uids that were in tables of members just now. Their inboxes are not checked."""
    try:
        names = [name for name in os.listdir(directory) if is_socket_name(name) and int(name, 16) not in known]
    except OSError as error:
        raise ResourceError(error.errno, f"socket directory {directory}: {error.strerror}") from None
    old = [found for name in names if (found := _stale(f"{directory}/{name}")) is not None]
    if not old:
        return []
    owners: set[int] = set()
    for channel in files_by_channel():
        name = control_name(channel)
        if not shm.is_ours(name):
            continue  # it has no members of this user
        try:
            with shm.attach(name) as segment:
                owners.update(_owners(segment))
        except FileNotFoundError:
            continue
        except (OSError, WireError):
            return []  # a channel that cannot be read may own any of them
    return _remove([Leftover("", path, 0) for path, uid in old if uid not in owners], dry_run=dry_run)


def _stale(path: str) -> tuple[str, int] | None:
    """(path, uid) if this is an inbox or FIFO of this user, and not one that is just being made."""
    try:
        info = os.lstat(path)
    except OSError:
        return None
    if not (stat.S_ISSOCK(info.st_mode) or stat.S_ISFIFO(info.st_mode)) or info.st_uid != os.geteuid():
        return None  # not ours
    return (path, int(os.path.basename(path), 16)) if time.time_ns() - info.st_mtime_ns >= _FRESH_NS else None


def _owners(segment: shm.Segment) -> set[int]:
    """The uids that a channel's control segment lists. Raises `WireError` if it is of another version."""
    if segment.nbytes == 0:
        return set()  # being made: it has no members yet
    magic, version = segment.read(0, 2) if segment.nbytes >= 16 else (0, 0)
    if magic != ctl.MAGIC:
        return set()  # no channel
    if segment.nbytes != Control.nbytes() or version != ctl.VERSION:
        raise WireError(f"segment {segment.name} has layout version {version}, this library reads {ctl.VERSION}")
    words = segment.read(0, Control.nbytes() // 8)
    return {words[ctl.base(index) + ctl.M_OWNER] for index in range(ctl.CAPACITY)}


_PREFIXES: Final = (PREFIX[1:], f"sem.{PREFIX[1:]}")


@dataclass(frozen=True)
class Foreign:
    """A file under one of the library's names that the library did not make. It is skipped, and does no harm."""

    path: str
    """Characters that cannot be printed are written as escapes."""
    owner: int
    """User id, -1 if it is unknown."""
    what: str


def foreign(directory: str | None = None) -> list[Foreign]:
    """The files in a socket directory, and those in `/dev/shm` with names like the library's, that the library did not
    make."""
    found = []
    for name in sorted(shm.listing()):
        if name.startswith(_PREFIXES):
            known = parse_file(name) is not None
            info = shm.status("/" + name)
            if info is None or not (known and stat.S_ISREG(info.st_mode)):
                found.append(_foreign(shm.path_of(name), info, "" if known else ", not a name of this library's"))
    with contextlib.suppress(OSError):
        for name in sorted(set(os.listdir(directory) if directory is not None else []) - SERVER_FILES):
            path = f"{directory}/{name}"
            try:
                info = os.lstat(path)
            except OSError:
                continue
            if not (is_socket_name(name) and (stat.S_ISSOCK(info.st_mode) or stat.S_ISFIFO(info.st_mode))):
                found.append(_foreign(path, info, ""))
    return found


def _foreign(path: str, info: os.stat_result | None, more: str) -> Foreign:
    what = "cannot be looked at" if info is None else f"{shm.kind_of(info.st_mode)}{more}"
    return Foreign(printable(path), -1 if info is None else info.st_uid, what)
