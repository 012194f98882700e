"""Each example runs as a script, says that it succeeded, ends by itself and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, socket_directory, tmp_path):
    names = [name for name in ("images", "logits", "camera", "loan", "numpy") if f"example-{name}" in path.read_text()]
    source = path.read_text()
    for name in names:  # channels of this run's own: another run may be at the same example
        source = source.replace(f"example-{name}", f"test-{os.getpid()}-x-{name}")
    assert names, "an example names its channels example-..."
    script = tmp_path / path.name
    script.write_text(source)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True, text=True, timeout=150, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert done.stdout.strip()


def test_every_example_is_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    assert [path.name for path in EXAMPLES if f"examples/{path.name}" not in readme] == []
    assert len(EXAMPLES) == 4
