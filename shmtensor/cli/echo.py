"""`shmtensor echo`: what the messages of a channel consist of."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from ..codec.outline import as_json as json_of
from ..codec.outline import as_text
from ..observe.messages import Messages, Seen
from ..options import format_bytes
from .output import console, guarded, print_json_line, seconds, until_interrupted
from .waiting import Unreadable, named, wait_for_channel

_PAUSE_S = 0.02


@guarded
def echo(
    channel: Annotated[str, typer.Argument(metavar="NAME", help="The channel.")],
    count: Annotated[int, typer.Option(help="End after so many messages; 0: on Ctrl-C.", min=0)] = 0,
    digest: Annotated[bool, typer.Option(help="Read the payload for a digest, or leave it alone.")] = True,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds to wait for the channel; by default without limit.", min=0.0)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each message as one line of JSON.")] = False,
) -> None:
    """Print the messages of a channel: structure, dtypes, shapes, scalars, meta, and a digest of the bytes.

    First those that are still needed, then each new one that can be read before its slot is used again; it says how
    many it missed. It joins no channel: nothing is taken from a work queue, and no sender waits. What was overwritten
    while it was read is not printed. The digest (xxh3, 64 bits) is left out if the payload may have been written to
    meanwhile. Ctrl-C ends it; exit code 1 if there is no channel in time, or it cannot be read.
    """
    named(channel)
    unreadable, done = Unreadable(), 0
    with until_interrupted():
        while not count or done < count:
            wait_for_channel(channel, timeout)
            try:
                with Messages(channel, digests=digest) as messages:
                    unreadable.over()
                    last = False
                    while not last and (not count or done < count):
                        last = messages.ended  # what was sent before that is read once more
                        found = messages.new()
                        for seen in found[: count - done] if count else found:
                            _print(channel, seen, as_json)
                            done += 1
                        if not found:
                            time.sleep(_PAUSE_S)
            except FileNotFoundError:
                continue  # it has just ended, or is just being made
            except (OSError, ValueError) as error:
                unreadable.again(channel, error)


def _print(channel: str, seen: Seen, as_json: bool) -> None:
    age = max(0.0, (time.monotonic_ns() - seen.sent_ns) / 1e9)
    if as_json:
        print_json_line(_dict(channel, seen, age))
        return
    parts = [f"#{seen.seq} of {seen.pid}", f"{seconds(age)} ago", format_bytes(seen.nbytes)]
    if seen.digest is not None:
        parts.append(seen.digest)
    parts.append(as_text(seen.value))
    if seen.meta is not None:
        parts.append(f"meta {as_text(seen.meta)}")
    out = console()
    if seen.missed:
        out.print(f"{seen.missed} before the next one missed", style="dim")
    out.print("  ".join(parts), soft_wrap=True, markup=False)


def _dict(channel: str, seen: Seen, age: float) -> dict[str, Any]:
    return {
        "channel": channel,
        "sender": f"{seen.sender:016x}",
        "pid": seen.pid,
        "seq": seen.seq,
        "time": time.time() - age,
        "bytes": seen.nbytes,
        "value": json_of(seen.value),
        "meta": json_of(seen.meta),
        "digest": seen.digest,
        "missed": seen.missed,
    }
