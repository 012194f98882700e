"""The one clean-up: what a member leaves behind, what a channel leaves behind, what everybody left behind.

`close`, a crash noticed by a peer, the next join and `shmtensor gc` all end up here. Everything is decided under the
control lock, from life locks; names go first and the entry that lists them last, so that a death in between is
repeated, not lost.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

from ..errors import ResourceError, TimedOut, WireError
from ..memory import segment as shm
from ..memory.semaphores import unlink_semaphore
from ..ring.layout import DONE, FAN_OUT, MAX_RINGS, R_RECORDS, RECORD_WORDS
from ..ring.ledger import Ledger
from ..ring.ring import Ring
from . import control as ctl
from .control import Control, Entry
from .exclusive import exclusive
from .names import control_name, ledger_name, parse_file, ring_name, socket_path

_FRESH_NS = 5_000_000_000


def unlink_member(channel: str, uid: int, directory: str) -> None:
    """Remove every name that a member may own: inbox, semaphore, rings, ledger."""
    with contextlib.suppress(OSError):
        os.unlink(socket_path(directory, uid))
    unlink_semaphore(ledger_name(channel, uid))
    # crash: sweep.names
    count = 0
    while count < MAX_RINGS and os.path.exists(shm.SHM_DIR + ring_name(channel, uid, count)):
        count += 1
    for index in reversed(range(count)):  # whoever repeats this after a death in between finds the rest by the first
        shm.unlink(ring_name(channel, uid, index))
    shm.unlink(ledger_name(channel, uid))


def unlink_channel(control: Control, directory: str) -> None:
    """Under the lock, nobody else alive: remove every name of the channel, the control segment last."""
    for index in range(control.capacity):
        if owner := control.owner(index):
            unlink_member(control.channel, owner, directory)
    # crash: sweep.channel
    shm.unlink(control.name)


def reap(control: Control, directory: str, me: int | None) -> None:
    """Under the lock: remove every dead member but those whose messages somebody still needs.

    `me` is the caller's own index: one cannot ask the kernel about oneself.
    """
    dead = list(_expendable(control, me))
    for index in dead:
        unlink_member(control.channel, control.owner(index), directory)
        # crash: sweep.unlinked
        control.clear(index)
    if dead:
        control.advance()


def _expendable(control: Control, me: int | None) -> Iterator[int]:
    """Indices of the dead whose messages nobody needs."""
    members = {entry.index: entry for entry in control.members()}
    alive = [entry for entry in members.values() if entry.index == me or control.is_alive(entry.index)]
    for index in range(control.capacity):
        if control.owner(index) and index != me and not control.is_alive(index):
            entry = members.get(index)
            if entry is None or entry.role != ctl.SENDER or not _is_needed(control, entry, alive):
                yield index


def _is_needed(control: Control, sender: Entry, alive: list[Entry]) -> bool:
    """Whether a dead or closed sender has messages that the living have not taken; True if that cannot be told now."""
    try:
        ledger = Ledger.attach(ledger_name(control.channel, sender.uid), sender.uid, control.capacity)
    except (FileNotFoundError, WireError):
        return False
    except ResourceError:
        return True
    try:
        if control.kind == FAN_OUT:
            return any(
                ledger.start(entry.index, entry.uid) is not None and ledger.finished(entry.index) != entry.uid
                for entry in alive
                if entry.role == ctl.RECEIVER and not entry.leaving and not entry.flags & ctl.LATEST
            )
        return has_undone(control, ledger)
    finally:
        ledger.close()


def has_undone(control: Control, ledger: Ledger) -> bool:
    """Whether a work-queue producer's rings hold a published message that nobody has finished, or may hold one."""
    published = ledger.published
    for index in range(min(ledger.rings, MAX_RINGS)):
        try:
            ring = Ring.attach(
                ring_name(control.channel, ledger.uid, index), ledger.uid, index,
                kind=control.ring_kind, capacity=control.capacity, writable=False,
            )  # fmt: skip
        except (FileNotFoundError, WireError):
            continue
        except ResourceError:
            return True
        for slot in range(ring.slots):
            seq = ring.words[R_RECORDS + slot * RECORD_WORDS]
            if 0 < seq <= published and ring.words[ring.state + 8 * slot + DONE] != seq:
                return True
    return False


def leave(control: Control, directory: str, index: int, uid: int, *, keep: bool) -> None:
    """Under the lock: remove a member, unless `keep` (others still drain it), then the channel if nobody else lives."""
    if not keep:
        unlink_member(control.channel, uid, directory)
        # crash: leave.unlinked
        control.clear(index)
    control.advance()
    # crash: leave.cleared
    # before asking for the others: of two that leave together, the second must see it
    control.locks.unlock(ctl.LIFE + index)
    if not control.anybody_alive():
        unlink_channel(control, directory)
    else:
        reap(control, directory, None)


class Leftover(NamedTuple):
    """Something that nobody alive owns."""

    channel: str
    path: str
    nbytes: int


def channels() -> list[str]:
    """Every channel that has files in `/dev/shm`."""
    parsed = (parse_file(name) for name in shm.listing())
    return sorted({found[0] for found in parsed if found})


def _leftovers(channel: str) -> list[Leftover]:
    """Every file of a channel that belongs to this user."""
    found = []
    for name in shm.listing():
        parsed = parse_file(name)
        if parsed and parsed[0] == channel:
            path = f"{shm.SHM_DIR}/{name}"
            with contextlib.suppress(OSError):
                info = os.stat(path, follow_symlinks=False)
                if info.st_uid == os.geteuid():
                    found.append(Leftover(channel, path, info.st_size))
    return found


def sweep_channel(channel: str, directory: str, *, dry_run: bool = False, patience: float = 0.0) -> list[Leftover]:
    """Remove what a channel's dead left behind; the whole channel if nobody lives.

    Nothing that the living need is touched. Waits `patience` seconds for the channel's lock; a channel that is locked
    for longer is somebody's and is left alone.
    """
    name = control_name(channel)
    before = [found for found in _leftovers(channel) if _owner_of(found.path) is not None]
    try:
        segment = shm.attach(name)
    except FileNotFoundError:
        # A control segment is made first and unlinked last: what lay there before we found none is nobody's.
        return _remove(before, dry_run=dry_run)
    except (ResourceError, WireError):
        return []  # another user's, or not a segment
    with segment:
        if not segment.is_mine():
            return []  # root could
        locks = segment.locks()
        try:
            with exclusive(locks, patience, f'channel "{channel}"'):
                if not segment.is_still(name):
                    return []
                segment.nbytes = os.fstat(segment.fd).st_size  # a joiner may have made it between our look and the lock
                control = Control(channel, segment, locks) if segment.nbytes == Control.nbytes() else None
                return _sweep_locked(channel, control, directory, dry_run)
        except TimedOut:
            return []
        finally:
            locks.close()


def _sweep_locked(channel: str, control: Control | None, directory: str, dry_run: bool) -> list[Leftover]:
    files = _leftovers(channel)
    if control is not None and control.is_ready:
        try:
            control.check()
        except WireError:
            return []  # another version's: not ours to judge
        directory = control.directory(directory)
        if control.anybody_alive():
            expendable = {control.owner(index) for index in _expendable(control, None)}
            owners = {control.owner(index) for index in range(control.capacity)} - expendable
            gone = [found for found in files if (uid := _owner_of(found.path)) is not None and uid not in owners]
            inboxes = (socket_path(directory, uid) for uid in expendable)
            gone += [Leftover(channel, path, 0) for path in inboxes if os.path.exists(path)]
            if not dry_run:
                reap(control, directory, None)
            return _remove(gone, dry_run=dry_run)
    main = shm.SHM_DIR + control_name(channel)
    if not dry_run and control is not None and control.is_ready:
        for index in range(control.capacity):
            if owner := control.owner(index):
                unlink_member(channel, owner, directory)
    return _remove(sorted(files, key=lambda leftover: leftover.path == main), dry_run=dry_run)


def _owner_of(path: str) -> int | None:
    found = parse_file(os.path.basename(path))
    return found[1] if found else None


def _remove(leftovers: list[Leftover], *, dry_run: bool) -> list[Leftover]:
    if not dry_run:
        for leftover in leftovers:
            with contextlib.suppress(OSError):
                os.unlink(leftover.path)
    return leftovers


def sweep_all(
    directory: str, *, dry_run: bool = False, skip: str | None = None, patience: float = 0.0
) -> list[Leftover]:
    """Sweep every channel of this user, then the inboxes that no member owns."""
    gone = []
    for channel in channels():
        if channel != skip:
            with contextlib.suppress(OSError, WireError):
                gone += sweep_channel(channel, directory, dry_run=dry_run, patience=patience)
    return gone + _sweep_sockets(directory, dry_run=dry_run)


def _sweep_sockets(directory: str, *, dry_run: bool) -> list[Leftover]:
    try:
        with os.scandir(directory) as entries:
            paths = [entry for entry in entries if len(entry.name) == 16]
    except OSError as error:
        raise ResourceError(error.errno, f"socket directory {directory}: {error.strerror}") from None
    if not paths:
        return []
    owners: set[int] = set()
    for channel in channels():
        try:
            if os.stat(shm.SHM_DIR + control_name(channel)).st_uid != os.geteuid():
                continue  # its members' sockets lie in a directory of their own
            with shm.attach(control_name(channel)) as segment:
                if segment.nbytes == Control.nbytes():
                    locks = segment.locks()
                    control = Control(channel, segment, locks)
                    owners.update(control.owner(index) for index in range(control.capacity))
                    locks.close()
        except (OSError, WireError):
            return []  # a channel that we cannot read may own any of them
    gone = []
    for path in paths:
        try:
            uid = int(path.name, 16)
            fresh = time.time_ns() - path.stat(follow_symlinks=False).st_mtime_ns < _FRESH_NS
        except (ValueError, OSError):
            continue
        if uid not in owners and not fresh:
            gone.append(Leftover("", path.path, 0))
    return _remove(gone, dry_run=dry_run)
