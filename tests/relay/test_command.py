"""`shmtensor relay` as users run it: a process on each side."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("zenoh", reason="a relay needs the extra `relay`")

import shmtensor

from ..waiting import PATIENCE
from .hosts import ROOT, endpoint


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "shmtensor", "relay", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_both_ends(channel, by):
    where, far_name = endpoint(), f"{channel}-far"
    with shmtensor.Producer(channel) as tx, shmtensor.Consumer(far_name) as rx:
        ends = [
            start(far_name, "--listen", where, "--window", "8"),
            start(channel, "--to", where, "--remote", far_name, "--wait", str(PATIENCE)),
        ]
        try:
            for number in range(40):
                tx.send(np.array(number), timeout=PATIENCE)
                with rx.recv(timeout=PATIENCE) as message:
                    assert message.value == number
            assert [it.poll() for it in ends] == [None, None]
        finally:
            said = []
            for it in reversed(ends):
                it.send_signal(by)
                said.append(it.communicate(timeout=PATIENCE))
        assert [it.returncode for it in ends] == [0, 0]
        near, far = said
        assert re.search(r"INFO relay of channel \S+ is connected", near[1])
        assert near[1].splitlines()[-1].endswith(f"INFO relay of channel {channel} has ended")
        assert far[1].splitlines()[-1].endswith(f"INFO relay of channel {far_name} has ended")
        assert "ERROR" not in near[1] + far[1]
        assert near[0] == far[0] == ""


def test_errors(channel):
    for arguments, text, code in (
        ((channel, "--to", "192.0.2.7"), "an endpoint is PROTOCOL/ADDRESS", 2),
        ((channel, "--to", endpoint()), "does not exist yet", 2),
        ((channel, "--to", endpoint(), "--pattern", "fan-out", "--wait", "0.3"), "no far relay has answered", 1),
        ((channel, "--to", endpoint(), "--slots", "4"), "for the far relay", 2),
        ((channel, "--listen", endpoint(), "--no-transit"), "for the near relay", 2),
    ):
        process = start(*arguments)
        out, error = process.communicate(timeout=PATIENCE)
        assert process.returncode == code, error
        assert text in error
        assert "Traceback" not in error
        assert out == ""
