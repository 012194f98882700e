"""Named crash points: comments in the package (`# crash: name`), turned into calls in the fault tests' processes only.

They cost nothing in the package itself. `install()`, before `shmtensor` is imported, adds an import hook that compiles
the package with every marker line replaced by a call of `hit`; line numbers stay the same.

The compiled module has the same points by a macro (`native/protocol/words.h`) that is empty in any other build than
that of `tests/faults/build.py`. Where the environment names such a build, the hook loads it in the place of the module;
a point that it has is then where it is there, not in what Python does in its place.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import marshal
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "shmtensor"
_CACHE = Path(__file__).parent / "__pycache__" / "points"
_MARKER = re.compile(r"^(\s*)# crash: ([a-z.]+)$", re.MULTILINE)
_MACRO = re.compile(r'\bCRASH_POINT\("([a-z.]+)"\)')
_MODULE = "shmtensor.native._core"

BUILD = "SHMTENSOR_TEST_BUILD"
"""The environment variable that names the test build; read here alone."""

armed: dict[str, tuple[str | Callable[[], object], int]] = {}
hits: dict[str, int] = {}
_build: str | None = None


class Crash(Exception):
    """What the action "raise" raises."""


def names(part: str = "") -> list[str]:
    """Every point in the source of the package, or of one of its folders or modules."""
    where = PACKAGE / part
    modules = [where] if where.is_file() else where.rglob("*.py")
    return sorted(name for path in modules for _, name in _MARKER.findall(path.read_text()))


@functools.cache
def native_names() -> frozenset[str]:
    """Every point of the compiled module."""
    return frozenset(name for path in (PACKAGE / "native").rglob("*.c") for name in _MACRO.findall(path.read_text()))


def arm(point: str, action: str | Callable[[], object], nth: int = 1) -> None:
    """From now on, the nth time that this process comes by `point`: "kill", "stop", "exit", "raise", or a call."""
    if _build is not None and point in native_names():
        code = {"kill": 1, "stop": 2, "exit": 3}[action]  # type: ignore[index]
        assert _library().crash_arm(point.encode(), code, nth), "too many points"
        return
    armed[point] = (action, nth)
    hits[point] = 0


@functools.cache
def _library() -> ctypes.CDLL:
    """The test build that the package has, or will have: a library is loaded once."""
    return ctypes.CDLL(str(_build))


def hit(point: str) -> None:
    if point not in armed:
        return
    action, nth = armed[point]
    hits[point] += 1
    if hits[point] != nth:
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "exit":
        os._exit(3)
    elif callable(action):
        action()
    else:
        raise Crash(point)


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str):
        """The compiled module, from a cache beside Python's own: a test that starts a process waits for this."""
        path = self.get_filename(fullname)
        source = _MARKER.sub(r'\1_crash_hit("\2")', Path(path).read_text())
        head = importlib.util.MAGIC_NUMBER + importlib.util.source_hash(f"{path}\n{source}".encode())
        cache = _CACHE / f"{fullname}.{sys.implementation.cache_tag}"
        with contextlib.suppress(OSError):
            kept = cache.read_bytes()
            if kept.startswith(head):
                return marshal.loads(kept[len(head) :])
        code = compile(source, path, "exec", dont_inherit=True)
        if not sys.dont_write_bytecode:
            with contextlib.suppress(OSError):
                _CACHE.mkdir(parents=True, exist_ok=True)
                written = _CACHE / f"{cache.name}.{os.getpid()}"
                written.write_bytes(head + marshal.dumps(code))
                written.replace(cache)
        return code

    def exec_module(self, module) -> None:
        module.__dict__["_crash_hit"] = hit
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, within: str) -> None:
        self._within = within

    def find_spec(self, fullname, path=None, target=None):
        if fullname == _MODULE:
            return None if _build is None else importlib.util.spec_from_file_location(fullname, _build)
        if fullname != self._within and not fullname.startswith(self._within + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, [str(PACKAGE.parent)] if path is None else path)
        if spec is None or not spec.origin:
            return None
        return importlib.util.spec_from_file_location(
            fullname, spec.origin, loader=_Loader(fullname, spec.origin),
            submodule_search_locations=spec.submodule_search_locations,
        )  # fmt: skip


def install(within: str = "shmtensor") -> None:
    """Compile the package, or a part of it, with its crash points from now on. It must not have been imported yet.

    With the test build if the environment names it, else without a compiled module, as any other comes by no point.
    """
    global _build
    assert not any(name.split(".")[0] == "shmtensor" for name in sys.modules), "shmtensor is imported already"
    _build = os.environ.get(BUILD) or None
    os.environ["SHMTENSOR_PURE"] = "" if _build else "1"
    sys.meta_path.insert(0, _Finder(within))
