"""Tests of other projects, with this library in place of what they test: loky's executor, PyTorch's DataLoader.

They are not part of this repository. `SHMTENSOR_SUITES` names a directory that has them, unpacked: `loky-3.7.0/` (its
source distribution) and `data/test/stateful_dataloader/test_dataloader.py` (torchdata's repository, whose copy of
PyTorch's `test/test_dataloader.py` takes its DataLoader from one import). docs/internals/contributing.md,
"Suites of others", says how to get them.

Only the factory is replaced, by a module that each of their processes imports first, subprocesses and workers too. The
tests that ask for something else are listed, one by one, in docs/guide/executor.md and docs/guide/data-loaders.md.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUITES = Path(os.environ.get("SHMTENSOR_SUITES", "/nowhere"))
LOKY = SUITES / "loky-3.7.0"
DATALOADER = SUITES / "data/test/stateful_dataloader"
LIMIT = 3000.0

pytestmark = pytest.mark.slow

IN_LOKYS_PLACE = """
import concurrent.futures.process as standard
import types, weakref
import loky.process_executor as theirs
import shmtensor

class ProcessPoolExecutor(shmtensor.ProcessPoolExecutor):
    def __init__(self, max_workers=None, job_reducers=None, result_reducers=None, timeout=None, context=None,
                 initializer=None, initargs=(), env=None):
        super().__init__(max_workers, mp_context=context and context.get_start_method(), initializer=initializer,
                         initargs=initargs)

    def shutdown(self, wait=True, kill_workers=False):
        super().shutdown(wait=wait)
        self._processes = {}  # None, where loky has an empty dict

    @property
    def _flags(self):
        return Flags(weakref.ref(self))

class Flags:
    def __init__(self, executor):
        self._executor = executor

    @property
    def shutdown(self):
        executor = self._executor()
        return executor is None or executor._shutdown_thread

    @property
    def broken(self):
        executor = self._executor()
        return (executor is not None and executor._broken) or None

theirs.ProcessPoolExecutor = ProcessPoolExecutor
theirs.BrokenProcessPool = theirs.TerminatedWorkerError = standard.BrokenProcessPool
theirs.ShutdownExecutorError = RuntimeError
"""

LOKYS_CLASSES = """
import multiprocessing
import pytest
import loky.process_executor as theirs
from tests import _executor_mixin, _test_process_executor as suite

counted = _executor_mixin._check_subprocesses_number

def none_is_left(executor=None, expected_process_number=None, expected_max_process_number=None, patience=10):
    if not expected_process_number and executor is None:  # workers are started when they are needed
        counted(None, expected_process_number, expected_max_process_number, patience)

_executor_mixin._check_subprocesses_number = none_is_left

class Mixin(_executor_mixin.ExecutorMixin):
    executor_type = theirs.ProcessPoolExecutor
    context = multiprocessing.get_context("forkserver")

class TestShutdown(Mixin, suite.ExecutorShutdownTest): pass
class TestWait(Mixin, suite.WaitTests): pass
class TestAsCompleted(Mixin, suite.AsCompletedTests): pass
class TestExecutor(Mixin, suite.ExecutorTest): pass
"""

IN_TORCHS_PLACE = """
import multiprocessing
import torch.utils.data
import shmtensor

class DataLoader(torch.utils.data.DataLoader[torch.utils.data.dataloader._T_co]):
    def __init__(self, dataset, *args, **options):
        context = options.get("multiprocessing_context")
        if isinstance(context, multiprocessing.context.BaseContext):
            context = context.get_start_method()
        if options.get("num_workers") and (context is None or context in multiprocessing.get_all_start_methods()):
            options["multiprocessing_context"] = shmtensor.get_context(context)
        super().__init__(dataset, *args, **options)

StatefulDataLoader = DataLoader
"""


def failures(directory: Path, path: list[Path], *arguments: str, log: Path) -> tuple[set[str], set[str]]:
    """Run pytest there: the tests that ran, and those that failed."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT))), "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    report = log.with_suffix(".xml")
    with log.open("w") as output:
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments],
            cwd=directory, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=LIMIT,
        )  # fmt: skip
    ran, failed = set(), set()
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        name = re.sub(r"\[.*", "", case.attrib["name"])
        kinds = {child.tag for child in case}
        if "skipped" not in kinds:
            ran.add(name)
        if kinds & {"failure", "error"}:
            failed.add(name)
    return ran, failed


def listed(page: str, heading: str) -> set[str]:
    """The tests that a page of docs/ names in the section below a heading."""
    text = (ROOT / "docs" / page).read_text().split(heading, 1)[1]
    return set(re.findall(r"`(test_\w+)`", text.split("\n## ")[0].split("\n### ")[0]))


@pytest.mark.skipif(not LOKY.exists(), reason="SHMTENSOR_SUITES names no directory with loky-3.7.0")
@pytest.mark.timeout(LIMIT)
def test_lokys_executor_tests(tmp_path):
    """They pass but for those that docs/guide/executor.md lists."""
    place = tmp_path / "place"
    place.mkdir()
    (place / "sitecustomize.py").write_text(IN_LOKYS_PLACE)
    (place / "test_in_lokys_place.py").write_text(LOKYS_CLASSES)
    ran, failed = failures(
        LOKY, [place, LOKY], "--rootdir", str(place), "-c", os.devnull, str(place / "test_in_lokys_place.py"),
        log=tmp_path / "loky.log",
    )  # fmt: skip
    assert len(ran) > 40
    assert failed <= listed("guide/executor.md", "### loky's tests"), tmp_path


@pytest.mark.skipif(not DATALOADER.exists(), reason="SHMTENSOR_SUITES names no directory with torchdata's tests")
@pytest.mark.timeout(LIMIT)
def test_pytorchs_dataloader_tests(tmp_path):
    """They pass but for those that docs/guide/data-loaders.md lists."""
    pytest.importorskip("expecttest", reason="torch's testing modules need expecttest")
    place = tmp_path / "place" / "torchdata" / "stateful_dataloader"
    place.mkdir(parents=True)
    (place.parent / "__init__.py").write_text("")
    (place / "__init__.py").write_text(IN_TORCHS_PLACE)
    ran, failed = failures(DATALOADER, [tmp_path / "place"], "test_dataloader.py", log=tmp_path / "dataloader.log")
    assert len(ran) > 100
    assert failed <= listed("guide/data-loaders.md", "### PyTorch's tests"), tmp_path
