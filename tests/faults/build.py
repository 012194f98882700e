"""The test build of the compiled module: the same sources, with crash points. It is made once, and kept by them."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sysconfig
import time
from pathlib import Path

import numpy as np

from shmtensor import native

from .points import PACKAGE

_CACHE = Path(__file__).parent / "__pycache__" / "build"
_NATIVE = PACKAGE / "native"
_POINTS = Path(__file__).parents[1] / "native" / "points.c"
_KEEP_S = 86400.0
_COMPILER = shutil.which("cc") or shutil.which("gcc")
_FLAGS = ["-O2", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread", "-DSHMTENSOR_CRASH_POINTS"]

POSSIBLE = native.module is not None and _COMPILER is not None
"""Whether there is a compiled module here, and a compiler for its test build."""
WHY_NOT = f"no compiled module ({native.why_not})" if native.module is None else "no C compiler"


@functools.cache
def module_path() -> str:
    """Its path."""
    includes = [f"-I{_NATIVE}", f"-isystem{np.get_include()}", f"-isystem{sysconfig.get_paths()['include']}"]
    command = [str(_COMPILER), *_FLAGS, *includes]
    sources = [*sorted(_NATIVE.rglob("*.c")), _POINTS]
    digest = hashlib.sha256("\n".join(command).encode())
    for path in (*sources, *sorted(_NATIVE.rglob("*.h"))):
        digest.update(path.read_bytes())
    name = f"{digest.hexdigest()[:16]}{sysconfig.get_config_var('EXT_SUFFIX')}"
    target = _CACHE / name
    if not target.exists():
        _CACHE.mkdir(parents=True, exist_ok=True)
        written = _CACHE / f"{os.getpid()}.{name}"
        done = subprocess.run([*command, *map(str, sources), "-o", str(written)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        written.replace(target)
        for old in _CACHE.iterdir():
            if old.stat().st_mtime < time.time() - _KEEP_S:
                old.unlink(missing_ok=True)
    return str(target)
