"""Fill `docs/internals/cuda-verified.md`: every test and benchmark row that needs a CUDA device, and where it was run.

python -m tests.cuda.session run.json                                        # on a machine that has one
python -m benchmarks.run --only cuda --rounds 1 --json gpu.json
python -m tests.cuda.table run.json gpu.json                                 # note what passed, and what was measured
python -m tests.cuda.table                                                   # after a test or a row was added: list it
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "internals" / "cuda-verified.md"
NOT_YET = "not yet"
FILES = {
    "tests/cuda/test_hardware.py": "`cuda/test_copies.py`, `cuda/test_deaths.py`, `cuda/test_runtime.py`",
    "tests/cuda/test_ipc_device.py": "`cuda/test_ipc.py`, `cuda/test_deaths.py`",
    "tests/cuda/test_device.py": "`cuda/test_dropins.py`, `cuda/test_checkpoint.py`",
}
"""Every file with tests that need a device -> where the same sentences are tested against the stand-in."""
BY_HAND = {
    "test_the_workloads_run": "`cuda/test_benchmarks.py`",
    "test_device_memory_and_events_are_shared": "`cuda/test_runtime.py`",
    "test_batches_on_the_device": "`cuda/test_dropins.py`, with `fork`",
    "test_a_checkpoint_is_loaded_straight_to_the_device": "`cuda/test_loading.py`",
    "test_a_queue_on_the_device": "`cuda/test_dropins.py`, without sparse tensors",
    "test_a_capture_does_not_notice_that_another_thread_asks_for_events": "`cuda/test_calls.py`",
}
STAND_IN_ALONE = {
    "test_a_copy_that_fails_is_told_to_the_receiver_and_its_slot_comes_back": "a copy to the device that fails",
    "test_a_sender_dies_before_its_copy_is_published": "a death at each step of a copy from the device",
    "test_a_receiver_dies_with_a_copy_on_its_way": "a death at each step of a copy to the device",
    "test_a_trainer_dies_while_its_state_leaves_the_device": "a death at each step of a save",
    "test_a_registration_that_fails_for_the_second_range_only": "a registration that is refused, also in part",
    "test_a_read_only_registration_that_is_refused_all_the_same": "a read-only registration that is refused",
}
"""Tests of `tests/cuda/test_deaths.py` for which there is no counterpart with a device."""
NO_COUNTERPART = "no test there"
_ROW = re.compile(r"^\| (?P<what>[^|]+) \| `(?P<key>[^`|]+)` \| (?P<without>[^|]+) \| (?P<on>[^|]+) \|$", re.MULTILINE)
_HEAD = "| what | test, or benchmark row | without a device | verified on hardware |\n|---|---|---|---|\n"


def tests() -> list[str]:
    """The tests that need a device, as `file::name`."""
    found = []
    for file in FILES:
        for node in ast.parse((ROOT / file).read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.append(f"{file}::{node.name}")
    return found


def alone() -> list[str]:
    """The tests of what no device can be made to do."""
    return [f"tests/cuda/test_deaths.py::{name}" for name in STAND_IN_ALONE]


def rows() -> list[str]:
    """The rows of the benchmarks that need one, as `workload: row`."""
    from benchmarks.workloads import WORKLOADS

    return [f"{each.name}: {row.name}" for each in WORKLOADS if each.name.startswith("cuda-") for row in each.rows]


def listed(page: str) -> dict[str, str]:
    """By test or row, what the page says of where it was verified."""
    return {match["key"]: match["on"] for match in _ROW.finditer(page)}


def verified(report: dict[str, Any]) -> dict[str, str]:
    """By test or row, the hardware, of a report of `tests.cuda.session` or of `benchmarks.run --json`."""
    if "passed" in report:
        return dict.fromkeys(report["passed"], report["hardware"])
    hardware = report["machine"]["gpu"]
    if hardware is None:
        return {}
    on = f"{hardware['name']}, CUDA {hardware['cuda']}, torch {report['versions']['torch']}, {report['date'][:10]}"
    return {
        f"{row['workload']}: {row['name']}": on
        for row in report["rows"]
        if row["median"] is not None and row["workload"].startswith("cuda-")
    }


def render(page: str, keys: list[str], good: dict[str, str]) -> str:
    """The page with its table made anew."""
    before = listed(page)
    lines = []
    for key in keys:
        file, _, name = key.partition("::")
        if name in STAND_IN_ALONE:
            lines.append(f"| {STAND_IN_ALONE[name]} | `{key}` | this | {NO_COUNTERPART} |\n")
            continue
        what = name.removeprefix("test_").replace("_", " ") if name else "a speed: see the row's text in benchmarks.md"
        without = BY_HAND.get(name, FILES[file]) if name else _program_of(key)
        lines.append(f"| {what} | `{key}` | {without} | {good.get(key, before.get(key, NOT_YET))} |\n")
    head, _, rest = page.partition(_HEAD)
    after = _ROW.sub("", rest).strip()
    return head + _HEAD + "".join(lines) + (f"\n{after}\n" if after else "")


def _program_of(row: str) -> str:
    rival = any(each in row for each in ("cuda-handover", "DCP"))
    return "no" if rival else "its program: `cuda/test_benchmarks.py`"


def main(arguments: list[str]) -> None:
    good: dict[str, str] = {}
    for report in arguments:
        good |= verified(json.loads(Path(report).read_text()))
    PAGE.write_text(render(PAGE.read_text(), [*tests(), *alone(), *rows()], good))
    print(f"{len(good)} rows noted in {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    if not sys.argv[1:] or sys.argv[1].startswith("-"):
        sys.exit(
            "usage: python -m tests.cuda.table REPORT.json ...: note in docs/internals/cuda-verified.md what passed"
        )
    main(sys.argv[1:])
