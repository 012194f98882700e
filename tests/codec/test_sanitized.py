"""The compiled module under the address and undefined-behaviour sanitizers: damaged bytes never lead it outside."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from ..waiting import PATIENCE

ROOT = Path(__file__).parents[2]
LIBRARIES = ("libasan.so", "libubsan.so")

CASES = [("fuzz_codec", 3000, 100_000), ("fuzz_writer", 3, 500), ("fuzz_reader", 150, 20_000)]

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


def library(name: str) -> str:
    return subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A copy of the package with a module that is built for it; -Werror: the build has no warnings."""
    if not all(os.path.isabs(library(name)) for name in LIBRARIES):
        pytest.skip("no libraries of the sanitizers")
    directory = tmp_path_factory.mktemp("sanitized")
    shutil.copytree(ROOT / "shmtensor", directory / "shmtensor", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    native = directory / "shmtensor" / "native"
    target = native / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    flags = ["-g", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fno-omit-frame-pointer"]
    flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    includes = [f"-isystem{np.get_include()}", f"-isystem{sysconfig.get_paths()['include']}"]
    built = subprocess.run(
        ["gcc", *flags, *includes, *map(str, sorted(native.rglob("*.c"))), "-o", str(target)],
        capture_output=True, text=True,
    )  # fmt: skip
    if built.returncode and re.search(r"cannot find .*(libasan|-lasan|-lubsan)", built.stderr):
        pytest.skip("no libraries of the sanitizers")
    assert built.returncode == 0, built.stderr
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(("name", "short", "soak"), CASES)
def test_under_the_sanitizers(package, name, short, soak):
    """Damaged messages; writers that are driven at random beside the reference; damaged segments for readers."""
    count = soak if os.environ.get("SHMTENSOR_SOAK") else short
    environment = {
        name: value for name, value in os.environ.items() if name not in ("SHMTENSOR_PURE", "PYTHONPATH")
    } | {"LD_PRELOAD": " ".join(map(library, LIBRARIES)), "ASAN_OPTIONS": "detect_leaks=0"}
    script = ROOT / "tests" / "native" / f"{name}.py"
    done = subprocess.run(
        [sys.executable, str(script), str(package), "1", str(count)],
        env=environment, capture_output=True, text=True, timeout=20 * PATIENCE, cwd=package,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, str(count)), done.stderr[-4000:]
