"""Each example runs as a script, says that it succeeded, ends by itself and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHANNELS = ("images", "logits", "camera", "loan", "numpy", "pipeline", "http", "model", "gpu")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DROP_INS = {"dataloader": "dataloader", "executor": "executor", "queue_workers": "queues", "training": "checkpoints"}
"""Examples without channels of their own -> the page in docs/ that they belong to."""


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, socket_directory, tmp_path):
    names = [name for name in CHANNELS if f"example-{name}" in path.read_text()]
    source = path.read_text()
    for name in names:  # channels of this run's own: another run may be at the same example
        source = source.replace(f"example-{name}", f"test-{os.getpid()}-x-{name}")
    assert bool(names) == (path.stem not in DROP_INS), "an example names its channels example-..., a drop-in has none"
    script = tmp_path / path.name
    script.write_text(source)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True, text=True, timeout=150, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert done.stdout.strip()


def test_every_example_is_in_the_documentation():
    readme = (ROOT / "README.md").read_text()
    for path in EXAMPLES:
        page = (ROOT / "docs" / f"{DROP_INS[path.stem]}.md").read_text() if path.stem in DROP_INS else readme
        assert f"examples/{path.name}" in page
    assert {path.stem for path in EXAMPLES} >= {
        "camera_fanout",
        "inference_workers",
        "loan",
        "numpy_only",
        "request_reply",
        *DROP_INS,
    }
