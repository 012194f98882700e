"""What type checkers see of an installed package: run by mypy, as a user would run it, outside of this repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("mypy")
pytest.importorskip("setuptools")

REPOSITORY = Path(__file__).parents[2]
PATIENCE = 400

PROGRAM = """
import shmtensor

queue = shmtensor.Queue[int](maxsize=4, ctx="spawn")
queue.put(3)
queue.put("three")  # error
number: int = queue.get()
text: str = queue.get_nowait()  # error
tasks: shmtensor.JoinableQueue[tuple[int, str]] = shmtensor.JoinableQueue()
tasks.put((1, "a"))
tasks.put(1)  # error
simple: shmtensor.SimpleQueue[bytes] = shmtensor.SimpleQueue()
data: bytes = simple.get()
anything = shmtensor.Queue()
anything.put(1)
anything.put("one")
with shmtensor.ProcessPoolExecutor(2, mp_context="fork") as pool:
    length: int = pool.submit(len, "abc").result()
"""


@pytest.fixture(scope="module")
def editable(tmp_path_factory):
    """A virtual environment with nothing but an editable install of a copy of this tree."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, tree)
    shutil.copytree(REPOSITORY / "shmtensor", tree / "shmtensor", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    code = "import sys, setuptools.build_meta as backend; print(backend.build_editable(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tree)], cwd=tree, capture_output=True, text=True, timeout=PATIENCE,
        env={**os.environ, "CC": "false"},  # types need no compiled module
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    environment = tree / "environment"
    venv.create(environment, symlinks=True)
    packages = next(environment.glob("lib/python*/site-packages"))
    with zipfile.ZipFile(next(tree.glob("*.whl"))) as wheel:
        wheel.extractall(packages)
    return environment / "bin" / "python"


@pytest.mark.slow
def test_an_editable_install_is_found_by_type_checkers(editable, tmp_path):
    """Also: the queues are generic, and an item of another type is an error."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    options = ("--strict", "--no-error-summary", "--no-incremental", "--python-executable", str(editable))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, program.name],
        cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    wrong = [number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# error")]
    said = [int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line]
    assert said == wrong, done.stdout + done.stderr


@pytest.mark.slow
def test_an_editable_install_is_a_path(editable, tmp_path):
    """A hook that finds the package when it is imported is nothing that a type checker can follow."""
    packages = next(editable.parents[1].glob("lib/python*/site-packages"))
    lines = [line for path in packages.glob("*.pth") for line in path.read_text().splitlines()]
    assert lines == [str(editable.parents[2])]
    assert (editable.parents[2] / "shmtensor" / "py.typed").exists()
