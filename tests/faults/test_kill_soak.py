"""The kill soak, `python -m tests.faults.soak`, in its short form: some kills of each kind."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from ..scenes import ROOT
from ..waiting import PATIENCE
from .matrix import UNBUILT


@UNBUILT
@pytest.mark.slow
def test_nothing_is_lost_torn_or_left():
    command = [sys.executable, "-m", "tests.faults.soak", "--kills", "64", "--seconds", str(PATIENCE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=4 * PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    figures = ast.literal_eval(done.stdout.splitlines()[-1])
    assert figures["kills"] == 64
    assert figures["episodes"] == 10
    assert figures["messages"] > 0
