"""The command line as tests run it in their own process: with every command."""

from __future__ import annotations

from shmtensor.cli.main import make_app

app = make_app()
