"""`shmtensor ls`: the members of each channel, and the messages that they hold. `shmtensor gc`: remove what dead
processes left behind."""

from __future__ import annotations

import fnmatch
import functools
import os
import pwd
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..channel import cleanup
from ..channel.cleanup import Foreign, Leftover, foreign
from ..channel.info import ChannelInfo, HeldMessage, Holding, MemberInfo
from ..channel.inspect import COUNTERS, Inspector, view_of
from ..channel.names import parse_file, socket_dir
from ..errors import ResourceError
from ..options import format_bytes
from .output import AsJson, console, fail, guarded, named, print_json, seconds

_WILD = frozenset("*?[")
_GAP = 3
"""Columns between two of a table."""
_LEAST = 8
"""Columns that are left of one that is cut."""
_NAMED = 10
"""Most channels that an error names."""
_FOREIGN_MOST = 20
"""Most lines about files that are not the library's."""


@guarded
def ls(
    pattern: Annotated[
        str | None, typer.Argument(help='A channel, or a pattern for their names, for example "camera*".')
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List channels: members, rings, slots in use, who holds which messages, and their age; and foreign files.

    It joins no channel and changes nothing. Exit code 1 if PATTERN is given and no channel has such a name.
    """
    if pattern is not None and not _WILD & set(pattern):
        named(pattern)
    wanted = None if pattern is None else functools.partial(_matches, pattern)
    views = Inspector(messages=as_json).channels(wanted)
    others = foreign(usable_socket_dir() if wanted is None else None)
    if wanted is not None:
        others = [it for it in others if wanted((parse_file(os.path.basename(it.path)) or ("",))[0])]
    if as_json:
        print_json(
            {
                "channels": [as_dict(view) for view in views],
                "foreign": [
                    {"path": it.path, "what": it.what, "user": user_name(it.owner) if it.owner >= 0 else None}
                    for it in others
                ],
            }
        )
    else:
        out = console()
        for view in views:
            _show(out, view)
        if not views and pattern is None:
            out.print("no channels")
        for it in others[:_FOREIGN_MOST]:
            out.print(f"[yellow]not ours:[/] {escape(describe(it))}", soft_wrap=True)
        if len(others) > _FOREIGN_MOST:
            out.print(f"[yellow]not ours:[/] {len(others) - _FOREIGN_MOST} more, see --json")
    if pattern is not None and not views:
        why = "what lies under its name is not the library's" if others else f"there {listed(cleanup.channels())}"
        raise fail(f'there is no channel "{pattern}": {why}')


def listed(names: Sequence[str]) -> str:
    """The names of channels in a sentence."""
    if not names:
        return "is no other either"
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{'is' if len(names) == 1 else 'are'} {', '.join(names[:_NAMED])}{more}"


def _matches(pattern: str, name: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern)


def usable_socket_dir() -> str | None:
    """This user's socket directory; None if it cannot be used."""
    try:
        return socket_dir()
    except ResourceError:
        return None


def describe(it: Foreign) -> str:
    """One line about a foreign file among the library's."""
    return f"{it.path}: {it.what}, user {user_name(it.owner) if it.owner >= 0 else 'unknown'}"


def as_dict(view: ChannelInfo) -> dict[str, Any]:
    """The JSON form of a channel; ages and times in seconds, sizes in bytes, uids as 16 hex digits."""
    return {
        "name": view.name,
        "kind": view.kind,
        "user": user_name(view.owner),
        "bytes": view.nbytes,
        "files": list(view.files),
        "living": view.living if view.readable else None,
        "depth": view.depth,
        "oldest_unread": view.oldest_unread,
        "members": [_member_dict(member) for member in view.members],
        "holdings": [holding_dict(holding) for holding in view.holdings],
        "messages": [_message_dict(message) for message in view.held],
        "notes": list(view.notes),
    }


def _member_dict(member: MemberInfo) -> dict[str, Any]:
    takes_all = member.delivery == "all"  # of others nobody knows what they have taken
    return {
        "uid": f"{member.uid:016x}",
        "index": member.index,
        "role": member.role,
        "delivery": member.delivery or None,
        "group": member.group or None,
        "pid": member.pid,
        "host_pid": member.host_pid or None,
        "process": member.process or None,
        "label": member.label or None,
        "alive": member.alive,
        "stopped": member.stopped,
        "leaving": member.leaving,
        "asleep": member.asleep,
        "joined": member.joined,
        "published": member.published,
        "newest_bytes": member.newest_bytes,
        "newest_age": member.newest_age,
        **{name: getattr(member, name) if takes_all else None for name in ("received", "unread", "oldest_unread")},
        **{name: getattr(member, name) for name in COUNTERS},
        "rings": [
            {
                "index": ring.index, "slots": ring.slots, "slot_bytes": ring.slot_bytes, "bytes": ring.nbytes,
                "slots_used": ring.slots_used, "bytes_used": ring.bytes_used,
            }
            for ring in member.rings
        ],
    }  # fmt: skip


def holding_dict(it: Holding) -> dict[str, Any]:
    """The JSON form of what a member holds."""
    return {
        "uid": f"{it.uid:016x}" if it.uid else None,
        "pid": it.pid or None,
        "alive": it.alive,
        "group": it.group or None,
        "how": it.how,
        "messages": it.messages,
        "bytes": it.nbytes,
        "oldest": it.oldest,
    }


def _message_dict(message: HeldMessage) -> dict[str, Any]:
    return {
        "sender": f"{message.sender:016x}",
        "ring": message.ring,
        "slot": message.slot,
        "span": message.span,
        "seq": message.seq,
        "bytes": message.nbytes,
        "age": message.age,
        "state": message.state,
        "attempt": message.attempt,
        "holders": [
            {
                "uid": f"{holder.uid:016x}" if holder.uid else None, "pid": holder.pid or None, "how": holder.how,
                "alive": holder.alive, "group": holder.group or None,
            }
            for holder in message.holders
        ],
    }  # fmt: skip


@functools.cache
def user_name(uid: int) -> str:
    """The name of a user id, or its number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


def _show(out: Console, view: ChannelInfo) -> None:
    dead = len(view.members) - view.living
    life = f"{view.living} alive" + (f", [red]{dead} gone[/]" if dead else "")
    if not view.readable:
        life = "[yellow]members unknown[/]"
    out.print(f"[bold]{view.name}[/]  {view.kind}, user {user_name(view.owner)}, {life}, {format_bytes(view.nbytes)}")
    if view.members:
        out.print(_members_table(view, out.width))
    if any(member.rings for member in view.members):
        out.print(_rings_table(view))
    if view.holdings:
        out.print(_holders_table(view))
    for note in view.notes:
        out.print(f"  [yellow]note:[/] {escape(note)}")
    out.print()


def _table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, _GAP - 1), header_style="dim")
    for heading in headings:
        numeric = heading in (
            "pid", "ring", "slots", "used", "messages", "published", "bytes", "slot", "total", "payload", "oldest",
        )  # fmt: skip
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=True)
    return table


def _members_table(view: ChannelInfo, width: int) -> Table:
    table = _table("member", "delivery", "pid", "life", "published", "joined", "process")
    for member in view.members:
        life = ["alive" if member.alive else "closed" if member.role == "sender" and member.leaving else "[red]dead[/]"]
        if member.leaving:
            life.append("being drained" if member.role == "sender" else "leaving, views alive")
        if member.stopped:
            life.append("[red]stopped[/]")
        elif member.asleep and member.alive:
            life.append("asleep")
        delivery = f"one of {member.group}" if member.group else member.delivery
        table.add_row(
            member.role, delivery, str(member.pid), ", ".join(life),
            str(member.published) if member.role == "sender" else "",
            f"{seconds(max(0.0, time.time() - member.joined))} ago", escape(program(member)),
        )  # fmt: skip
    return _cut(table, width, "process", "delivery")


def _cut(table: Table, width: int, *headings: str) -> Table:
    """Where the terminal is too narrow, cut these columns and no other, the widest first."""
    wanted = {
        column.header: max(map(cell_len, map(_plain, (column.header, *column.cells)))) for column in table.columns
    }
    excess = sum(wanted.values()) + _GAP * len(wanted) - width
    cut = {heading: wanted[heading] for heading in headings}
    while excess > 0 and max(cut.values()) > _LEAST:
        cut[max(cut, key=cut.__getitem__)] -= 1
        excess -= 1
    for column in table.columns:
        column.min_width = column.max_width = cut.get(str(column.header), wanted[column.header])
    return table


def _plain(cell: Any) -> str:
    return Text.from_markup(cell, emoji=False).plain


def program(member: MemberInfo) -> str:
    """What a member's process runs, and what the member calls itself."""
    # that of a sender behind a relay, which has no label of its own, begins with a blank
    return " ".join(filter(None, (member.process, member.label.strip())))


def _rings_table(view: ChannelInfo) -> Table:
    table = _table("ring", "of pid", "slots", "slot", "total", "used", "payload")
    for member in view.members:
        for ring in member.rings:
            table.add_row(
                str(ring.index), str(member.pid), str(ring.slots), format_bytes(ring.slot_bytes),
                format_bytes(ring.nbytes), str(ring.slots_used), format_bytes(ring.bytes_used),
            )  # fmt: skip
    return table


_WITHOUT_HOLDER = {
    "waiting": "none yet",
    "abandoned": "its receiver died or gave it back: waits for another",
    "history": "the publisher, for late subscribers",
}


def _holders_table(view: ChannelInfo) -> Table:
    table = _table("held by", "how", "messages", "bytes", "oldest")
    for it in view.holdings:
        table.add_row(holder_name(it), it.how, str(it.messages), format_bytes(it.nbytes), seconds(it.oldest))
    return table


def holder_name(it: Holding) -> str:
    """Who holds messages, in words, with markup."""
    if it.how in _WITHOUT_HOLDER:
        return (f"group {it.group}: " if it.group else "") + _WITHOUT_HOLDER[it.how]
    who = f"pid {it.pid}" if it.pid else "a process out of sight"
    return who if it.alive else f"{who} [red](dead: freed when the sender needs it)[/]"


PATIENCE = 2.0
"""Seconds to wait for a channel's lock."""


@guarded
def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove segments, semaphores and sockets of dead processes. What living processes need is never touched.

    This includes a checkpoint that is only in shared memory, because its trainer and its writing process died before it
    was on disk: load it first (load_newest).

    Exit code 1 if something could not be removed because a segment server did not answer: run gc again.
    """
    gone = cleanup.sweep_all(socket_dir(), dry_run=dry_run, patience=PATIENCE)
    unanswered = [leftover for leftover in gone if leftover.is_unanswered]
    stuck = [leftover for leftover in gone if not (dry_run or leftover.is_unanswered) and leftover.is_left]
    removed = [leftover for leftover in gone if leftover not in (*unanswered, *stuck)]
    left = [] if unanswered else _left({leftover.path for leftover in gone})
    if as_json:
        print_json(
            {
                "dry_run": dry_run,
                "removed": [{"channel": it.channel or None, "path": it.path, "bytes": it.nbytes} for it in removed],
                "bytes": sum(it.nbytes for it in removed),
                "failed": [it.path for it in (*unanswered, *stuck)],
                "left": [{"channel": view.name, "bytes": view.nbytes, "why": why(view)} for view in left],
            }
        )
    else:
        _show_removed(removed, unanswered, stuck, left, dry_run)
    if unanswered:
        raise typer.Exit(1)


def _left(gone: set[str]) -> list[ChannelInfo]:
    views = [view_of(name) for name in cleanup.channels()]
    return [view for view in views if set(view.files) - gone]


def why(view: ChannelInfo) -> str:
    """Why a channel was not removed."""
    if view.owner not in (os.geteuid(), -1):
        return f"belongs to user {user_name(view.owner)}"
    if view.living:
        pids = ", ".join(str(pid) for pid in sorted({member.pid for member in view.members if member.alive}))
        return f"in use by {view.living} living members (pid {pids})"
    if view.locked:
        return f"its lock was held for over {PATIENCE:g} s: a process is stopped in the middle of a change"
    return view.notes[0] if view.notes else "it changed meanwhile: run gc again"


def _show_removed(
    removed: list[Leftover], unanswered: list[Leftover], stuck: list[Leftover], left: list[ChannelInfo], dry_run: bool
) -> None:
    out = console()
    verb = "would remove" if dry_run else "removed"
    for leftover in removed:
        out.print(f"{verb} {escape(leftover.path)}  {format_bytes(leftover.nbytes)}", soft_wrap=True)
    for leftover in unanswered:
        why_not = "the segment server has not answered: run gc again"
        out.print(f"[yellow]could not remove[/] {escape(leftover.path)}: {why_not}", soft_wrap=True)
    for leftover in stuck:
        out.print(f"[yellow]could not remove[/] {escape(leftover.path)}: another user's?", soft_wrap=True)
    for view in left:
        out.print(f"left {view.name}  {format_bytes(view.nbytes)}: {escape(why(view))}", soft_wrap=True)
    count = "nothing" if not removed else f"{len(removed)} files, {format_bytes(sum(it.nbytes for it in removed))}"
    out.print(f"{verb} {count}")
