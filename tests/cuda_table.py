"""`docs/cuda-verified.md`: every test that needs a CUDA device, and on which hardware it has passed.

python -m pytest -m cuda -n 0 --junitxml run.xml         # on a machine that has one
python -m tests.cuda_table run.xml "NVIDIA X, driver Y"  # note what passed
python -m tests.cuda_table                               # after a test was added: list it
"""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "cuda-verified.md"
NOT_YET = "not yet"
_ROW = re.compile(r"^\| (?P<what>[^|]+) \| `(?P<test>tests/[^`]+)` \| (?P<on>[^|]+) \|$", re.MULTILINE)
_HEAD = "| what | test | verified on |\n|---|---|---|\n"


def collected() -> list[str]:
    """The tests that are marked `cuda`, as `file::name`, parameters left out."""
    files = [path for path in sorted((ROOT / "tests").glob("test_*.py")) if "mark.cuda" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "cuda", "-n", "0", *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    names = re.findall(r"^(tests/\S+::[A-Za-z_0-9:]+)", done.stdout, re.MULTILINE)
    return list(dict.fromkeys(names))


def listed(page: str) -> dict[str, str]:
    """By test, what the page says of where it was verified."""
    return {match["test"]: match["on"] for match in _ROW.finditer(page)}


def passed(report: str) -> set[str]:
    """The tests of a JUnit report that passed with all their parameters."""
    good: dict[str, bool] = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name', '').partition('[')[0]}"
        good[name] = good.get(name, True) and not any(
            case.find(end) is not None for end in ("failure", "error", "skipped")
        )
    return {name for name, is_good in good.items() if is_good}


def render(page: str, tests: list[str], good: set[str], hardware: str) -> str:
    """The page with its table made anew."""
    before = listed(page)
    lines = []
    for test in tests:
        what = test.rpartition("::")[2].removeprefix("test_").replace("_", " ")
        lines.append(f"| {what} | `{test}` | {hardware if test in good else before.get(test, NOT_YET)} |\n")
    head, _, rest = page.partition(_HEAD)
    after = _ROW.sub("", rest).strip()
    return head + _HEAD + "".join(lines) + (f"\n{after}\n" if after else "")


def main(arguments: list[str]) -> None:
    good, hardware = set(), ""
    if arguments:
        report, hardware = arguments
        good = passed(Path(report).read_text())
    PAGE.write_text(render(PAGE.read_text(), collected(), good, hardware))


if __name__ == "__main__":
    main(sys.argv[1:])
