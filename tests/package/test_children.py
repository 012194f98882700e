"""Child processes look for modules in the standard library first, and where others may write last or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shmtensor
from shmtensor import children

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0

LEFT = """
import os
with open({said!r}, "a") as file:
    print(__name__, os.getpid(), file=file)
raise SystemExit("foreign code ran")
"""
# what the interpreter, the library and the libraries that it needs import
NAMES = [
    "json", "signal", "struct", "socket", "selectors", "random", "hashlib", "threading", "logging", "tempfile", "glob",
    "multiprocessing", "concurrent", "asyncio", "ctypes", "cython", "gevent", "eventlet", "sitecustomize",
    "usercustomize", "numpy", "zmq", "xxhash", "posix_ipc", "ml_dtypes", "shmtensor",
]  # fmt: skip


@pytest.fixture
def hostile(tmp_path):
    """A directory in which somebody has left modules under the names of others; what ran of them."""
    path = tmp_path / "hostile"
    path.mkdir()
    said = tmp_path / "said"
    for name in NAMES:
        (path / f"{name}.py").write_text(LEFT.format(said=str(said)))
    yield path
    assert not said.exists(), said.read_text()


def run_child(statements: str, **options) -> str:
    done = subprocess.run(
        children.python_command(statements, "argument"), capture_output=True, text=True, timeout=PATIENCE, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


IMPORTS = "import json, numpy, zmq, xxhash, posix_ipc, shmtensor; print(json.dumps([sys.path, shmtensor.__file__]))"


@pytest.mark.parametrize("pythonpath", [None, "", ":", ".", os.pathsep.join([".", str(ROOT)])])
def test_a_child_imports_nothing_from_the_current_directory(hostile, pythonpath):
    environment = children.python_environment(**({} if pythonpath is None else {"PYTHONPATH": pythonpath}))
    path, file = json.loads(run_child(IMPORTS, cwd=hostile, env=environment))
    assert str(hostile) not in map(os.path.abspath, path)
    assert "" not in path
    assert file == shmtensor.__file__


def test_the_standard_library_comes_before_where_the_package_lies(hostile):
    (hostile / "shmtensor.py").unlink()
    (hostile / "shmtensor").symlink_to(ROOT / "shmtensor")
    for name in ("numpy", "zmq", "xxhash", "posix_ipc", "ml_dtypes"):
        (hostile / f"{name}.py").unlink()
    outer = (
        f"sys.path[:] = [path for path in sys.path if path != {str(ROOT)!r}]; sys.path.append({str(hostile)!r}); "
        "from shmtensor import children; "
        f"print(__import__('json').dumps(children.python_command({IMPORTS!r})))"
    )
    command = json.loads(run_child(outer))
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=children.python_environment())
    assert done.returncode == 0, done.stderr
    path, file = json.loads(done.stdout)
    assert Path(file) == hostile / "shmtensor" / "__init__.py"
    assert path.index(os.path.dirname(os.__file__)) < path.index(str(hostile))


def test_a_child_has_the_packages_of_its_parent_before_those_of_site_packages(tmp_path):
    """Two versions of one package: the child imports the one that its parent has."""
    (tmp_path / "xxhash.py").write_text("VERSION = 'ours'\n")
    outer = (
        f"sys.path.insert(1, {str(tmp_path)!r}); import subprocess, xxhash; from shmtensor import children; "
        "c = children.python_command('import xxhash; print(xxhash.VERSION)'); "
        "subprocess.run(c, env=children.python_environment(), check=True)"
    )
    assert run_child(outer).strip() == "ours"


def test_arguments_and_changes_of_the_environment_arrive():
    said = run_child(
        "import os; print(sys.argv[1:], os.environ['A'], 'PYTHONPATH' in os.environ)",
        env=children.python_environment(A="b", PYTHONPATH="/x"),
    )
    assert said.strip() == "['argument'] b False"


def test_flags_of_the_search_path_are_handed_on():
    outer = [sys.executable, "-I", "-c", f"import sys; sys.path.append({str(ROOT)!r}); "
             "from shmtensor import children; print(children.python_command('')[1])"]  # fmt: skip
    assert subprocess.run(outer, capture_output=True, text=True, check=True).stdout.strip() == "-I"


def test_look_last(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/a", str(tmp_path), "/b"])
    children.look_last(os.getcwd())
    assert sys.path == ["/a", "/b", str(tmp_path)]
    children.look_last("/a")
    assert sys.path == ["/b", str(tmp_path), "/a"]


TRAIN = """
import os, sys
sys.path[:] = {path!r}
import numpy as np
from shmtensor.checkpoint import names
from shmtensor.checkpoint.writer import CheckpointWriter
names.PREFIX = {prefix!r}
os.chdir({hostile!r})
with CheckpointWriter({directory!r}) as writer:
    writer.save({{"w": np.ones(1000), "step": 1}}).durable.result(60)
    writer.start()
"""


@pytest.mark.slow
@pytest.mark.parametrize("pythonpath", ["", ":", "."])
def test_the_writing_process_imports_nothing_from_the_trainers_directory(hostile, tmp_path, channel, pythonpath):
    """The trainer's own script lies elsewhere, so that it imports nothing from there."""
    program = tmp_path / "elsewhere" / "train.py"
    program.parent.mkdir()
    path = [entry for entry in sys.path if entry and entry != str(ROOT)]
    program.write_text(
        TRAIN.format(path=[*path, str(ROOT)], prefix=channel, hostile=str(hostile), directory=str(tmp_path / "a"))
    )
    done = subprocess.run(
        [sys.executable, str(program)], cwd=program.parent, env={**os.environ, "PYTHONPATH": pythonpath},
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a" / "step-00000001.safetensors").is_file()
