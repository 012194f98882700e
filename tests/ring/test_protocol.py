"""The protocol files of the native core, with threads in the place of processes, plain and under sanitizers."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from shmtensor.channel import control
from shmtensor.ring import events, layout
from shmtensor.wire import record

from ..waiting import PATIENCE

ROOT = Path(__file__).parents[2]
PROTOCOL = ROOT / "shmtensor" / "native" / "protocol"
FLAGS = ["-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-pthread"]
SANITIZERS = {"plain": [], "address": ["-fsanitize=address,undefined"], "thread": ["-fsanitize=thread"]}

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


@pytest.fixture(scope="module", params=list(SANITIZERS))
def program(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("protocol") / "threads"
    sources = [ROOT / "tests" / "native" / "threads.c", *sorted(PROTOCOL.glob("*.c"))]
    built = subprocess.run(
        ["gcc", *FLAGS, *SANITIZERS[request.param], *map(str, sources), "-o", str(path)], capture_output=True, text=True
    )
    if built.returncode and re.search(r"cannot find .*(lib[at]san|-l[at]san|-lubsan)", built.stderr):
        pytest.skip(f"no library of the {request.param} sanitizer")
    assert built.returncode == 0, built.stderr
    return path


def run(program: Path, *arguments: object) -> list[list[int]]:
    """For each reader: messages, words that were checked, messages passed over."""
    file = program.parent / "locks"
    file.write_bytes(b"")
    done = subprocess.run(
        [str(program), *map(str, arguments), str(file)], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [list(map(int, line.split())) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(("readers", "slots"), [(1, 4), (2, 8), (5, 64)])
def test_every_reader_gets_every_message_in_order(program, readers, slots):
    results = run(program, "all", readers, 5000, slots, 0)
    assert len(results) == readers
    assert {(messages, missed) for messages, _, missed in results} == {(5000, 0)}
    assert len({words for _, words, _ in results}) == 1


@pytest.mark.slow
def test_history_keeps_messages_for_the_late(program):
    assert [(messages, missed) for messages, _, missed in run(program, "all", 2, 3000, 8, 4)] == [(3000, 0)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("history", [0, 3])
@pytest.mark.parametrize("mode", ["latest", "latest 3"])
def test_the_newest_is_never_torn(program, mode, history):
    for messages, _, missed in run(program, mode, 2, 5000, 8, history):
        assert messages >= 1
        assert messages + missed <= 5000  # those that were published after its last look are neither


@pytest.mark.slow
@pytest.mark.parametrize(("readers", "slots"), [(1, 4), (3, 4), (3, 64)])
@pytest.mark.parametrize(("mode", "history"), [("queue", 0), ("group", 0), ("group", 3)])
def test_each_message_is_done_once(program, mode, history, readers, slots):
    results = run(program, mode, readers, 5000, slots, history)
    assert sum(messages for messages, _, _ in results) == 5000


@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-gcc") is None, reason="needs aarch64-linux-gnu-gcc")
@pytest.mark.parametrize("source", sorted(path.name for path in PROTOCOL.glob("*.c")))
def test_it_builds_for_aarch64(source, tmp_path):
    command = ["aarch64-linux-gnu-gcc", *FLAGS, "-c", str(PROTOCOL / source), "-o", str(tmp_path / "object")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_header_has_the_numbers_of_the_reference():
    text = (PROTOCOL / "ring.h").read_text()
    numbers = {name: int(value) for name, value in re.findall(r"\b([A-Z_]+) = (\d+)", text)}
    states = re.search(r"enum \{ (CLAIMED[^}]*) \};", text)
    assert states is not None
    names = [name.partition(" ")[0] for name in states[1].split(", ")]
    assert {name: at for at, name in enumerate(names[:-1])} == {
        name: getattr(layout, name)
        for name in ("CLAIMED", "DONE", "RELEASED", "ATTEMPT", "NOTE", "DEADLINE", "VERDICT")
    }
    assert {name: numbers[name] for name in EXPECTED} == EXPECTED


def test_the_header_of_traces_has_the_numbers_of_the_reference():
    text = (PROTOCOL / "events.h").read_text()
    numbers = {name: int(value) for name, value in re.findall(r"\b([A-Z_]+) = (\d+)", text)}
    assert numbers == {
        "EVENT_SEND": events.SEND, "T_UNTIL": events.T_UNTIL, "AREA_WRITTEN": events.A_WRITTEN,
        "AREA_EVENTS": events.A_EVENTS, "EVENT_WORDS": events.EVENT_WORDS, "MOST_EVENTS": 1,
    }  # fmt: skip
    assert "EVENT_SEND = 1, EVENT_TAKE, EVENT_RELEASE }" in text
    assert (events.TAKE, events.RELEASE) == (2, 3)
    assert f"MOST_EVENTS = 1 << {events.MOST_EVENTS.bit_length() - 1} " in text


EXPECTED = {
    "RECORD_WORDS": layout.RECORD_WORDS, "HEADER_WORDS": layout.R_RECORDS, "INLINE_BYTES": record.INLINE,
    "INLINE_WORD": record.INLINE_OFFSET // 8, "MOST_MEMBERS": control.CAPACITY, "MOST_RINGS": layout.MAX_RINGS,
    "RECORD_VERSION": record.VERSION, "SPILLED": record.SPILLED, "PAYLOAD_ALIGNMENT": record.ALIGNMENT,
    "STATE_WORDS": 8, "T_HISTORY": layout.L_HISTORY, "T_PUBLISHED": layout.L_PUBLISHED, "T_CLOSED": layout.L_CLOSED,
    "T_RINGS": layout.L_RINGS, "T_MEMBERS": layout.L_MEMBERS, "ATTEMPT_SHIFT": layout.ATTEMPT_SHIFT,
    "GROUP_DONE": layout.GROUP_DONE, "GROUP_LOCK_SHIFT": layout.GROUP_LOCK_SHIFT,
}  # fmt: skip
