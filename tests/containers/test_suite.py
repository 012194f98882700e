"""The tests of endpoints once more, with the names of a segment server: both places share one suite.

By hand, more of it: `SHMTENSOR_TEST_SEGMENTS=server python -m pytest tests/endpoints tests/rpc tests/ring`.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ..conftest import SERVED
from ..faults.interrupts import SOAK
from .servers import ROOT

SELECTION = ["tests/endpoints/test_fan_out.py", "tests/endpoints/test_work_queue.py", "tests/ring/test_sizing.py"]
MORE = [
    "tests/channel/test_membership.py",
    "tests/endpoints/test_groups.py",
    "tests/endpoints/test_claims.py",
    "tests/memory/test_forks.py",
    "tests/ring/test_reading.py",
    "tests/rpc/test_requests.py",
]
"""With SHMTENSOR_SOAK=1."""


@pytest.mark.skipif(SERVED, reason="this run is that one")
@pytest.mark.slow
def test_endpoints_by_the_names_of_a_segment_server():
    environment = {**os.environ, "SHMTENSOR_TEST_SEGMENTS": "server"}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_XDIST")}
    environment.pop("SHMTENSOR_DIR", None)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-n",
        "0",
        *SELECTION,
        *(MORE if SOAK else []),
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
