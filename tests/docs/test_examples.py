"""Each example runs as a script, says that it succeeded, ends by itself and leaves nothing behind."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from ..waiting import complaints, wait_until

ROOT = Path(__file__).parents[2]
CHANNELS = ("images", "logits", "camera", "loan", "numpy", "pipeline", "http", "model", "gpu", "device")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
WITHOUT_CHANNELS = {
    "dataloader", "executor", "pool_and_pipe", "queue_workers", "training", "lightning_checkpoints",
    "transformers_checkpoints",
}  # fmt: skip
"""Examples that name no channel of their own."""
ELSEWHERE = {"ray_cluster"}
"""Examples that other tests run: tests/ray/test_relays.py."""
NEEDS = {"lightning_checkpoints": ("lightning",), "transformers_checkpoints": ("transformers", "accelerate")}
"""Examples for frameworks that the tests do not install -> what they import. What these warn of is their own affair."""
LINES = {
    "pool_and_pipe": ("from shmtensor import get_context", "from multiprocessing import get_context"),
    "queue_workers": ("from shmtensor import get_context", "from multiprocessing import get_context"),
    "dataloader": (
        'DataLoader(Squares(), batch_size=16, num_workers=2, multiprocessing_context=shmtensor.get_context("fork"))',
        "DataLoader(Squares(), batch_size=16, num_workers=2)",
    ),
}
"""Drop-ins -> their part of a line, and what stands there without this library. The executor's: test_executor.py."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [path for path in EXAMPLES if path.stem not in {*LINES, *ELSEWHERE}], ids=lambda path: path.stem
)
def test_example(path, socket_directory, tmp_path):
    for package in NEEDS.get(path.stem, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    names = [name for name in CHANNELS if f"example-{name}" in path.read_text()]
    source = path.read_text()
    for name in names:  # channels of this run's own: another run may be at the same example
        source = source.replace(f"example-{name}", f"test-{os.getpid()}-x-{name}")
    assert bool(names) == (path.stem not in WITHOUT_CHANNELS), "an example names its channels example-..."
    script = tmp_path / path.name
    script.write_text(source)
    done = subprocess.run(
        [sys.executable, *([] if path.stem in NEEDS else ["-W", "error"]), str(script)],
        capture_output=True, text=True, timeout=400, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert complaints(done.stderr) == "" or path.stem in NEEDS
    assert done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("name", LINES)
def test_a_drop_in_is_one_line_in_place_of_another(name, socket_directory, tmp_path):
    """Both programs say the same; ours without a warning."""
    source = (ROOT / "examples" / f"{name}.py").read_text()
    ours, theirs = LINES[name]
    assert source.count(ours) == 1
    assert source.count(theirs) == 1, "the docstring shows the other line"
    outputs = []
    for line, warnings in ((ours, "error"), (theirs, "ignore::DeprecationWarning")):
        script = tmp_path / f"{name}.py"
        script.write_text(source.replace(ours, line))
        done = subprocess.run(
            [sys.executable, "-W", warnings, str(script)],
            capture_output=True, text=True, timeout=400, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert (done.returncode, complaints(done.stderr)) == (0, "")
        outputs.append(done.stdout)
    assert outputs[0].strip()
    assert outputs[0] == outputs[1]


def test_the_device_ring_over_a_stand_in(standin, channel, monkeypatch, capsys):
    """Where there is no device; the reader is a thread here, which reads the same slots."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("device_ring")
    threads = SimpleNamespace(SimpleQueue=queue.SimpleQueue, Process=threading.Thread)
    monkeypatch.setattr(example.multiprocessing, "get_context", lambda method: threads)
    monkeypatch.setattr(example, "CHANNEL", channel)
    example.main()
    assert "20 tensors were read on the GPU" in capsys.readouterr().out
    gc.collect()
    wait_until(lambda: not standin.device_memory)


def test_every_example_is_in_the_documentation():
    page = (ROOT / "docs" / "guide" / "examples.md").read_text()
    guides = "".join(path.read_text() for path in (ROOT / "docs" / "guide").glob("*.md"))
    for path in EXAMPLES:
        assert f'--8<-- "examples/{path.name}"' in page
        assert f"examples.md#{path.stem})" in guides or f": examples.md#{path.stem}\n" in guides
    assert {path.stem for path in EXAMPLES} >= {
        "camera_fanout",
        "inference_workers",
        "loan",
        "numpy_only",
        "request_reply",
        *WITHOUT_CHANNELS,
    }
