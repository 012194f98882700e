"""What the library logs: under names that the guide lists, and each line once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import shmtensor

from ..waiting import PATIENCE

PACKAGE = Path(shmtensor.__file__).parent
GUIDE = PACKAGE.parent / "docs" / "guide" / "observability.md"


def names() -> dict[str, set[str]]:
    """The name of each logger, and the folders of the modules that use it."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for name in re.findall(
            r'^log = logging\.getLogger\("(.*?)"\)|getLogger\("(shmtensor\.native)"\)', path.read_text(), re.M
        ):
            found.setdefault("".join(name), set()).add(path.relative_to(PACKAGE).parts[0])
    return found


def test_each_part_has_a_logger_of_its_name():
    found = names()
    assert found.pop("shmtensor.serve") == {"rpc"}  # of worker pools; `shmtensor.rpc` is of servers and clients
    assert found == {f"shmtensor.{folder}": {folder} for folder in {part for parts in found.values() for part in parts}}


def test_the_guide_names_each_logger():
    said = set(re.findall(r"^\| `(shmtensor\.[a-z]+)` \|", GUIDE.read_text(), re.MULTILINE))
    assert said == set(names())


def test_only_programs_of_the_library_set_up_logging():
    """A handler of a library, beside one of the program, would print every line twice."""
    users = set()
    for path in PACKAGE.rglob("*.py"):
        if re.search(r"addHandler|basicConfig|StreamHandler\(|propagate\b|captureWarnings", path.read_text()):
            users.add(path.relative_to(PACKAGE).as_posix())
    assert users == {"rpc/worker.py", "checkpoint/writer_process.py", "cli/services.py"}


def test_a_handler_that_sets_up_logging_late_gets_each_line_once():
    code = (
        "import logging\n"
        "from shmtensor.rpc.worker import log_to_stderr\n"
        "log_to_stderr(3); log_to_stderr(3)\n"
        "logging.getLogger('shmtensor.endpoints').warning('first')\n"
        "logging.basicConfig(format='root: %(message)s')\n"
        "logging.getLogger('shmtensor.endpoints').warning('second')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    first, second = done.stderr.splitlines()
    assert first.endswith("WARNING worker 3: first")
    assert second == "root: second"
