"""What one message costs, in counts that no load changes: the regression guard of the hot path.

`python -m benchmarks.instructions` shows the counts of this tree beside the stored ones; `--write` stores them.
Counted are the Python instructions, the calls of Python functions and those of C functions that one `send` and one
`recv` of a 1 KiB tensor take in the steady state, both ends in one process. Counts differ between minor versions of
Python, and with the compiled module there is little to count: the baseline (`instructions.json`) has an entry for each.
`SHMTENSOR_PURE=1` counts, or with `--write` stores, what the Python code does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from .processes import fresh_name

BASELINE = Path(__file__).with_name("instructions.json")
TOLERANCE = 1.10
"""A count may be so many times the stored one."""
NBYTES = 1024
SLOTS = 4
WARM = 4 * SLOTS
"""Messages before the counted ones: by then every description and record is known."""
COUNTED = 2 * SLOTS
KINDS = ("instructions", "Python calls", "C calls")

app = typer.Typer(add_completion=False)


def version() -> str:
    """The key in the baseline: this interpreter, and whether the compiled module does the work."""
    import torch  # noqa: F401  the compiled module is asked for once torch is there

    from shmtensor import native

    code = "Python code" if native.module is None else "compiled"
    return f"{sys.version_info.major}.{sys.version_info.minor}, {code}"


def count(call: Callable[[], Any]) -> dict[str, int]:
    """What one call does. Nothing that it starts in other threads counts."""
    counts = dict.fromkeys(KINDS, 0)

    def trace(frame: Any, event: str, argument: object) -> Any:
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode":
            counts["instructions"] += 1
        return trace

    def profile(frame: Any, event: str, argument: object) -> None:
        if event == "call":
            counts["Python calls"] += 1
        elif event == "c_call":
            counts["C calls"] += 1

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before[0])
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before[1])
    counts["C calls"] -= 1  # setprofile itself
    return counts


def measure(name: str | None = None) -> dict[str, dict[str, int]]:
    """The counts of one `send` and one `recv`: the most common ones of several messages.

    Args:
        name: the channel's name; None: one that nobody else uses.
    """
    import torch

    import shmtensor

    tensor = torch.arange(NBYTES // 4, dtype=torch.float32)
    name = name or fresh_name()
    with (
        shmtensor.Publisher(name, slots=SLOTS, slot_bytes=NBYTES) as pub,
        shmtensor.Subscriber(name, spin=1.0) as sub,
    ):

        def send() -> None:
            pub.send(tensor)

        def recv() -> None:
            sub.recv().value  # noqa: B018  the message and its lease end here

        for _ in range(WARM):
            send()
            recv()
        seen: dict[str, list[dict[str, int]]] = {"send": [], "recv": []}
        for _ in range(COUNTED):
            # each count calls twice: the other side runs as often in between
            seen["send"].append(count(send))
            recv()
            recv()
            send()
            send()
            seen["recv"].append(count(recv))
    return {step: {kind: _common(found, kind) for kind in KINDS} for step, found in seen.items()}


def _common(found: list[dict[str, int]], kind: str) -> int:
    values = sorted(counts[kind] for counts in found)
    return max(values, key=values.count)


def load(path: Path = BASELINE) -> dict[str, dict[str, dict[str, int]]]:
    """The stored counts of every version of Python."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def exceeding(now: dict[str, dict[str, int]], stored: dict[str, dict[str, int]]) -> list[str]:
    """What has grown by more than the tolerance, in words."""
    return [
        f"{step}: {value} {kind}, {value / stored[step][kind] - 1:+.0%} on the stored {stored[step][kind]}"
        for step, counts in now.items()
        for kind, value in counts.items()
        if value > TOLERANCE * stored[step][kind]
    ]


@app.command()
def main(
    write: Annotated[bool, typer.Option("--write", help="Store the counts of this tree.")] = False,
) -> None:
    """Count, compare with the stored counts, and store them if asked to. Exit code 1 if they have grown too much."""
    now, stored = measure(), load()
    known = stored.get(version())
    for step, counts in now.items():
        for kind, value in counts.items():
            beside = "" if known is None else f"  stored {known[step][kind]:5}"
            typer.echo(f"{step:5} {kind:13} {value:5}{beside}")
    if write:
        stored[version()] = now
        BASELINE.write_text(json.dumps(dict(sorted(stored.items())), indent=1) + "\n", encoding="utf-8")
        typer.echo(f"stored for {version()}")
        return
    if known is None:
        typer.echo(f"nothing is stored for {version()}: --write does")
        return
    for text in exceeding(now, known):
        typer.echo(text)
    if exceeding(now, known):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
