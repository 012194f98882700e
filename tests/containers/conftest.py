"""A directory for a segment server of each test's own."""

from __future__ import annotations

import pytest


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Of this process, too, with nothing decided before."""
    path = tmp_path / "d"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("SHMTENSOR_DIR", str(path))
    return str(path)
