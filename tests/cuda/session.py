"""Every test that needs a CUDA device, in one command, on a machine that has one: docs/internals/cuda-verified.md.

python -m tests.cuda.session run.json [--seconds 240]

Needs the package's dependencies and pytest; no compiler, and none of the packages of the other tests. The report is
written anew after each test, so what has passed is in it also when the time is over, or the process is killed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from .table import FILES, ROOT

NEEDED = ("torch", "numpy", "zmq", "posix_ipc", "xxhash", "typer", "rich")


def hardware() -> str:
    """What the tests ran on; `CudaError` says why there is nothing."""
    import torch

    from shmtensor.cuda.runtime import runtime

    runtime()
    driver = Path("/proc/driver/nvidia/version")
    words = driver.read_text().split() if driver.exists() else []
    version = next((f"driver {word}, " for word in words if word[:3].isdigit() and "." in word), "")
    day = time.strftime("%Y-%m-%d", time.gmtime())
    found = torch.cuda.get_device_name(0)
    return f"{found}, {version}CUDA {torch.version.cuda}, torch {torch.__version__}, {day}"


class Recorder:
    """What has become of each test, parameters together; written to a file on the way."""

    def __init__(self, on: str, file: Path) -> None:
        self.on, self.file = on, file
        self.left: Counter[str] = Counter()  # of each test, the runs that have not ended
        self.outcomes: dict[str, set[str]] = {}
        self.texts: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def pytest_collection_finish(self, session: Any) -> None:
        self.left.update(item.nodeid.partition("[")[0] for item in session.items)

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.partition("[")[0]
        if report.when == "call" or report.outcome != "passed":
            self.outcomes.setdefault(name, set()).add(report.outcome)
        if report.outcome != "passed":
            self.texts[report.nodeid] = str(report.longrepr)[-3000:]
        self.seconds[name] = round(self.seconds.get(name, 0.0) + report.duration, 2)
        if report.when == "teardown":
            self.left[name] -= 1
            self.write()

    def report(self) -> dict[str, Any]:
        passed = (name for name, found in self.outcomes.items() if found == {"passed"} and not self.left[name])
        return {
            "hardware": self.on,
            "python": platform.python_version(),
            "passed": sorted(passed),
            "other": self.texts,
            "seconds": self.seconds,
        }

    def write(self) -> None:
        """Whole, or not at all: the process may be killed at any time."""
        part = self.file.with_name(f"{self.file.name}.part")
        part.write_text(json.dumps(self.report(), indent=1) + "\n")
        os.replace(part, self.file)


def run(files: list[str], more: list[str], seconds: int, recorder: Recorder) -> int:
    """Run tests within so many seconds; the exit code is pytest's."""

    def over(*_: object) -> None:
        raise KeyboardInterrupt(f"the {seconds} seconds are over")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        # a configuration of its own: that of the suite wants packages that are not needed here
        options = [
            "-c",
            str(ROOT / "tests" / "cuda" / "cuda.ini"),
            "--rootdir",
            str(ROOT),
            "--confcutdir",  # else conftest.py, which lies above the configuration, is not read
            str(ROOT),
            "-p",
            "no:cacheprovider",
            "-v",
        ]
        code = pytest.main([*options, *more, *(str(ROOT / file) for file in files)], plugins=[recorder])
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    recorder.write()
    return int(code)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda.session", description=__doc__.partition("\n")[0])
    parser.add_argument("report", type=Path, help="file for the report, for python -m tests.cuda.table")
    parser.add_argument("--seconds", type=int, default=240, help="end after so many seconds, with what has passed then")
    options, more = parser.parse_known_args(arguments)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"missing: {', '.join(missing)}: install the dependencies of pyproject.toml")
        return 2
    try:
        on = hardware()
    except OSError as error:
        print(f"there is no device to test on: {error.strerror}")
        return 2
    print(on, flush=True)
    recorder = Recorder(on, options.report)
    code = run(list(FILES), more, options.seconds, recorder)
    report = recorder.report()
    print(f"{len(report['passed'])} tests passed, {len(report['other'])} did not, written to {options.report}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
