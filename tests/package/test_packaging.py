"""What is installed: its metadata, what wheels hold, and installations without torch or without the compiled module.

Imports no torch and needs no network: wheels are tested by this file before torch is installed beside them.
"""

from __future__ import annotations

import importlib.metadata
import io
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import shmtensor
from shmtensor import errors, native, statistics

from ..scenes import HIDDEN
from ..waiting import PATIENCE
from . import contents

TREE = Path(__file__).parents[2]
EXTRA = "pip install '.[torch]' in a checkout of shmtensor"


# --- metadata


def required(extra: str = "") -> set[str]:
    """Names of the packages that an installation brings, with an extra or without; extras of our own are followed."""
    names: set[str] = set()
    for text in importlib.metadata.requires("shmtensor") or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        if requirement.name == "shmtensor":
            for other in requirement.extras:
                names |= required(other)
        else:
            names.add(requirement.name)
    return names


def test_the_version_is_the_package_s():
    assert importlib.metadata.version("shmtensor") == shmtensor.__version__


def test_torch_is_an_extra():
    assert "torch" not in required()
    assert "torch" not in required("docs")
    for extra in ("torch", "demo", "test", "http"):
        assert "torch" in required(extra), extra
    assert required("torch") - required() == {"torch"}


def test_the_suite_s_torch_is_pinned():
    assert "torch==2.13.0" in (TREE / "constraints.txt").read_text().splitlines()


def test_metadata_says_what_an_index_shows():
    about = importlib.metadata.metadata("shmtensor")
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Description-Content-Type"] == "text/markdown"
    labels = {text.partition(",")[0] for text in about.get_all("Project-URL")}
    assert labels == {"Homepage", "Documentation", "Changelog", "Issues"}
    assert not [text for text in about.get_all("Classifier") if text.startswith("License ::")]  # the expression says it


# --- what packages hold


@pytest.fixture
def tree(tmp_path):
    """A source tree of a few files."""
    for name in ("shmtensor/__init__.py", "shmtensor/native/module.c", "shmtensor/native/native.h", "tests/test_a.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path


WHEEL = {
    "shmtensor/__init__.py",
    "shmtensor/py.typed",
    "shmtensor/native/_core.cpython-311-x86_64-linux-gnu.so",
    "shmtensor-0.1.0.dist-info/METADATA",
    "shmtensor-0.1.0.dist-info/licenses/LICENSE",
}


@pytest.mark.parametrize(
    ("missing", "added", "fault"),
    [
        (set(), set(), None),
        ({"shmtensor/py.typed"}, set(), "shmtensor/py.typed is missing"),
        ({"shmtensor/__init__.py"}, set(), "shmtensor/__init__.py is missing"),
        ({"shmtensor/native/_core.cpython-311-x86_64-linux-gnu.so"}, set(), "shmtensor/native/_core.*.so is missing"),
        (set(), {"tests/test_a.py"}, "tests/test_a.py should not be in a wheel"),
        (set(), {"shmtensor/native/module.c"}, "shmtensor/native/module.c should not be in a wheel"),
    ],
)
def test_a_wheel_is_checked(tree, missing, added, fault):
    path = tree / "shmtensor-0.1.0-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name in (WHEEL - missing) | added:
            wheel.writestr(name, "")
    assert contents.faults_of_wheel(contents.names_in(path), tree) == ([] if fault is None else [fault])


@pytest.mark.parametrize(
    ("missing", "added", "fault"),
    [
        (None, None, None),
        ("shmtensor/native/native.h", None, "shmtensor/native/native.h is missing"),
        ("tests/test_a.py", None, "tests/test_a.py is missing"),
        (None, "shmtensor/a.so", "shmtensor/a.so was built, and should not be in a source distribution"),
    ],
)
def test_a_source_distribution_is_checked(tree, missing, added, fault):
    path = tree / "shmtensor-0.1.0.tar.gz"
    wanted = {fault.partition(" ")[0] for fault in contents.faults_of_source(set(), tree)}
    with tarfile.open(path, "w:gz") as archive:
        for name in (wanted - {missing}) | ({added} - {None}):
            archive.addfile(tarfile.TarInfo(f"shmtensor-0.1.0/{name}"), io.BytesIO())
    assert contents.faults_of_source(contents.names_in(path), tree) == ([] if fault is None else [fault])


# --- programs


def run(source: str, *, without: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The program, where no module of this name can be imported."""
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN.format(name=without) + source], capture_output=True, text=True, timeout=PATIENCE,
        env={**{key: value for key, value in os.environ.items() if key != "SHMTENSOR_PURE"}, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


# --- without torch


TRANSPORT = """
import threading
import numpy as np, shmtensor

name, twice = NAME, np.arange(6.0).reshape(2, 3)
with shmtensor.Subscriber(name) as sub, shmtensor.Publisher(name) as pub:
    pub.send({"image": twice, "id": 7}, meta={"ts": 1.5})
    with sub.recv(timeout=60) as msg:
        assert (msg.value["image"] == twice).all() and msg.value["id"] == 7 and msg.meta == {"ts": 1.5}
    with pub.loan((2, 3), np.float32) as loan:
        loan.array[:] = 2
    with sub.recv(timeout=60) as msg:
        assert msg.value.dtype == np.float32 and msg.value.sum() == 12
with shmtensor.Producer(name + "-jobs") as tx, shmtensor.Consumer(name + "-jobs") as rx:
    tx.send(twice)
    with rx.recv(timeout=60) as msg:
        assert (msg.value == twice).all()
with shmtensor.Server(name + "-rpc", max_batch=4) as server, shmtensor.Client(name + "-rpc") as client:
    thread = threading.Thread(target=server.run, args=(np.negative,))
    thread.start()
    assert (client.request(twice, timeout=60) == -twice).all()
    server.stop()
    thread.join()
queue = shmtensor.Queue()
queue.put({"a": twice})
assert (queue.get()["a"] == twice).all()
queue.close()
queue.join_thread()
assert sys.modules.get("torch") is None
"""


@pytest.mark.parametrize("pure", ["0", "1"], ids=["compiled", "pure"])
def test_the_transport_works_without_torch(channel, pure):
    done = run(f"NAME = {channel!r}\n{TRANSPORT}", without="torch", SHMTENSOR_PURE=pure)
    if native.module is not None or pure == "1":
        assert done.stderr == ""


ELSEWHERE = """
import errno, inspect
sys.platform = PLATFORM
for name in ("fcntl", "mmap", "numpy", "posix_ipc", "resource", "zmq"):
    sys.modules[name] = None
import shmtensor
from shmtensor import errors, statistics

works = {name for module in (errors, statistics) for name, _ in inspect.getmembers(module, inspect.isclass)}
for name in shmtensor.__all__:
    value = getattr(shmtensor, name)
    assert getattr(shmtensor, name) is value
    if name not in works | {"__version__"}:
        try:
            value("a", timeout=1)
        except shmtensor.PlatformError as error:
            assert error.errno == errno.ENOSYS
            print(error.strerror)
"""


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_elsewhere_importing_works_and_an_endpoint_says_what_is_missing(platform):
    lines = run(f"PLATFORM = {platform!r}\n{ELSEWHERE}", without="torch").stdout.splitlines()
    assert set(lines) == {f"shmtensor needs Linux (it relies on OFD locks and /dev/shm), this is {platform}"}
    known = {*vars(errors), *vars(statistics), "__version__"}
    assert len(lines) == sum(name not in known for name in shmtensor.__all__)


CHECKPOINTS = """
import os, tempfile
import numpy as np, shmtensor

state = {"a": np.arange(6.0), "step": np.array(3)}
with tempfile.TemporaryDirectory() as folder:
    with shmtensor.CheckpointWriter(folder) as writer:
        for name in ("a.npz", "a.safetensors", "a.pt"):
            writer.save(state, name).durable.result(60)
            path = os.path.join(folder, name)
            for load in (shmtensor.load_arrays, shmtensor.load_checkpoint):
                found = load(path)
                assert (found["a"] == state["a"]).all() and found["step"] == 3, (name, load)
                del found
        assert sys.modules.get("torch") is None
    for call in (
        lambda: shmtensor.load_into(object(), path),
        lambda: shmtensor.load_checkpoint(FOREIGN),
    ):
        try:
            call()
        except ImportError as error:
            assert isinstance(error, shmtensor.DependencyError) and isinstance(error, shmtensor.ShmTensorError)
            assert error.name == "torch", error.name
            print(error)
"""


def test_checkpoints_of_arrays_work_without_torch_and_others_name_the_extra(tmp_path):
    foreign = tmp_path / "foreign.pt"
    with zipfile.ZipFile(foreign, "w") as archive:  # of an empty dict, as `torch.save` writes it
        archive.writestr("archive/data.pkl", b"\x80\x02}q\x00.")
        archive.writestr("archive/version", b"3\n")
    done = run(f"FOREIGN = {str(foreign)!r}\n{CHECKPOINTS}", without="torch")
    assert done.stdout.splitlines() == [f"this needs torch, which is not installed: {EXTRA}"] * 2


TENSORS = """
import logging
import numpy as np, shmtensor
from shmtensor.codec.decode import decode

try:
    decode(DESCRIPTION, np.zeros(64, np.uint8), readonly=False)
except shmtensor.DependencyError as error:
    print(error)
with shmtensor.Subscriber(NAME) as sub, shmtensor.Publisher(NAME) as pub:
    pub.send(np.arange(3))
    with sub.recv(timeout=60) as msg:
        try:
            msg.to("cuda")
        except ImportError as error:
            print(error)
"""


def test_a_tensor_that_arrives_without_torch_names_the_extra(channel):
    described = (
        "import torch, sys; from shmtensor.codec.encode import encode; "
        "sys.stdout.write(encode(torch.ones(3), None).description.hex())"
    )
    pytest.importorskip("torch")
    description = bytes.fromhex(
        subprocess.run(
            [sys.executable, "-c", described], capture_output=True, text=True, check=True, timeout=PATIENCE
        ).stdout
    )
    done = run(f"NAME, DESCRIPTION = {channel!r}, {description!r}\n{TENSORS}", without="torch")
    assert done.stdout.splitlines() == [
        f"the message has torch tensors, but torch is not installed: {EXTRA}",
        f"this needs torch, which is not installed: {EXTRA}",
    ]


def test_commands_that_need_torch_name_the_extra():
    source = """
import contextlib
from shmtensor.cli.main import make_app
from shmtensor.cli import doctor

with contextlib.suppress(SystemExit):
    make_app(["bench"])(["bench", "--seconds", "0.01"])
(finding,) = doctor.torch()
print(finding.status, finding.value, finding.meaning, sep=": ")
"""
    done = run(source, without="torch", COLUMNS="200")
    assert done.stderr == f"error: this needs torch, which is not installed: {EXTRA}\n"
    assert done.stdout == f"warn: not installed: NumPy arrays work without it, tensors do not: {EXTRA}\n"


# --- without the compiled module


ENDPOINTS = """
import os
import shmtensor
from shmtensor.cli import doctor

print("imported", file=sys.stderr)
for _ in range(2):
    with shmtensor.Subscriber(NAME) as sub, shmtensor.Publisher(NAME) as pub:
        pub.send(b"1")
        sub.recv(timeout=60).release()
if not (child := os.fork()):
    shmtensor.Subscriber(NAME).close()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
(finding,) = doctor.codec()
print(finding.status, finding.value, finding.meaning, sep=": ")
"""
LINE = "the compiled core is not used, so that small messages take about forty times longer: "
MODULE = "shmtensor.native._core"


def test_the_first_endpoint_says_that_nothing_is_compiled_and_what_to_do(channel):
    done = run(f"NAME = {channel!r}\n{ENDPOINTS}", without=MODULE)
    imported, *lines = done.stderr.splitlines()
    assert imported == "imported"
    (line,) = lines
    assert line.startswith(f"{LINE}no compiled module was installed: install a wheel")
    status, value, meaning = done.stdout.strip().split(": ", 2)
    assert (status, value) == ("warn", "not in use")
    for part in ("no compiled module was installed", "gcc python3-dev", "--force-reinstall --no-deps --no-cache-dir"):
        assert part in line
        assert part in meaning


def test_nothing_is_said_where_the_python_code_was_asked_for(channel):
    done = run(f"NAME = {channel!r}\n{ENDPOINTS}", without=MODULE, SHMTENSOR_PURE="1")
    assert done.stderr == "imported\n"
    assert done.stdout == "ok: switched off: by SHMTENSOR_PURE\n"


def test_a_module_that_does_not_load_is_not_called_missing():
    source = f"""
import importlib.machinery, importlib.util
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == {MODULE!r}:
            raise ImportError("undefined symbol: PyFoo", name=name)
sys.meta_path.insert(0, Broken())
from shmtensor import native
print(native.module, native.why_not)
"""
    assert run(source, without="").stdout == "None it cannot be loaded: undefined symbol: PyFoo\n"


@pytest.mark.skipif(native.module is None, reason="nothing is compiled here")
def test_nothing_is_said_where_it_is_in_use(channel):
    done = run(f"NAME = {channel!r}\n{ENDPOINTS}", without="")
    assert done.stderr == "imported\n"
    assert done.stdout.startswith("ok: in use: ")
