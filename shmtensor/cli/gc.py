"""`shmtensor gc`: remove what dead processes left behind."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from rich.markup import escape

from ..channel import cleanup
from ..channel.cleanup import Leftover
from ..channel.info import ChannelInfo
from ..channel.inspect import view_of
from ..channel.names import socket_dir
from ..options import format_bytes
from .ls import user_name
from .output import console, guarded, print_json

PATIENCE = 2.0
"""Seconds to wait for a channel's lock."""


@guarded
def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Remove segments, semaphores and sockets whose owners are dead. What the living need is never touched.

    A checkpoint that only shared memory has, as its trainer and its writing process died before it was on disk, goes as
    well: load it first (load_newest).

    Exit code 1 if a segment server has not answered, and so something is left that is nobody's: run gc again.
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
        _show(removed, unanswered, stuck, left, dry_run)
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


def _show(
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
