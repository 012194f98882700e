"""Child processes of this interpreter: their module search path, and how they notice the end of their parent.

Python puts the current directory, or the directory of a script, before the standard library. A child process of the
library imports modules from where this process has them; a directory that may contain a stray `json.py` comes last, or
not at all.

    standard library | directories of the library and of what it needs | site-packages | directories of the user
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import signal
import sys
import sysconfig
from io import FileIO
from multiprocessing import parent_process
from typing import Any, Final


class ParentWatch:
    """Whether the parent of this process has ended; for processes that `multiprocessing` started.

    It checks the parent's pid and `multiprocessing`'s pipe. The pipe alone is not enough: every child that the parent
    forks inherits the parent's end of it.

    Args:
        others: objects with a `fileno()`: `wait` also returns when one of them can be read.
    """

    def __init__(self, *others: Any) -> None:
        self._poll, parent = select.poll(), parent_process()
        for each in others:
            self._poll.register(each, select.POLLIN)
        self._is_orphan = parent is None
        if parent is not None:
            self._poll.register(parent.sentinel, select.POLLIN)
            try:
                self._pidfd = FileIO(os.pidfd_open(parent.pid or -1))
                self._poll.register(self._pidfd, select.POLLIN)
            except ProcessLookupError:  # it has ended already
                self._is_orphan = True
            except (OSError, AttributeError):  # a kernel, or a sandbox, without it
                pass

    def has_ended(self) -> bool:
        """Whether the parent has ended. Takes about 1 µs."""
        return self._is_orphan or bool(self._poll.poll(0))

    def wait(self) -> None:
        """Wait until the parent has ended."""
        if not self._is_orphan:
            self._poll.poll()


def how_ended(code: int) -> str:
    """How a process has ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


_NEEDED: Final = ("shmtensor", "numpy", "zmq", "posix_ipc", "xxhash", "ml_dtypes")
_ENTER: Final = (
    "import sys\n"  # built in: found without a path
    "sys.path[:] = filter(None, sys.path)\n"  # the current directory, which -c has put first
    "at = next((n for n, entry in enumerate(sys.path) if entry.endswith('-packages')), len(sys.path))\n"
    "sys.path[at:at] = {directories}\n"
)


def python_command(statements: str, *arguments: str) -> list[str]:
    """The command of a child process: this interpreter runs `statements`, with `arguments` in `sys.argv[1:]`.

    It imports the standard library first, then the library and what it needs from where this process has them, then
    site-packages. Neither the current directory nor the directory of this process's script is on its path, nor what
    `PYTHONPATH` names if the process is started with `python_environment()`.
    """
    flags = [
        flag
        for flag, is_set in (
            ("-I", sys.flags.isolated), ("-E", sys.flags.ignore_environment), ("-s", sys.flags.no_user_site),
            ("-S", sys.flags.no_site),
        )
        if is_set
    ]  # fmt: skip
    enter = _ENTER.format(directories=json.dumps(needed_directories()))
    return [sys.executable, *flags, "-c", enter + statements, *arguments]


def python_environment(**changes: str) -> dict[str, str]:
    """The environment of such a process: this one's with `changes`, without `PYTHONPATH`, whose directories would come
    first."""
    environment = {**os.environ, **changes}
    environment.pop("PYTHONPATH", None)
    return environment


def needed_directories() -> list[str]:
    """The directories of the library and of what it needs, in the order of this process's path."""
    found = set()
    for name in _NEEDED:
        module = sys.modules.get(name)
        spec = importlib.util.find_spec(name) if module is None else module.__spec__
        if spec is None:
            continue
        if spec.submodule_search_locations:
            found.add(os.path.dirname(os.path.abspath(next(iter(spec.submodule_search_locations)))))
        elif spec.origin is not None:
            found.add(os.path.dirname(os.path.abspath(spec.origin)))
    order = [os.path.abspath(entry) for entry in sys.path]
    return sorted(found, key=lambda directory: order.index(directory) if directory in order else -1)


def safe_path(path: list[str]) -> list[str]:
    """The entries of a `sys.path` with the standard library before all others, and the directories of this process's
    program, the current one and its script's, after them."""
    zipped = f"{sys.base_prefix}/{sys.platlibdir}/python{sys.version_info[0]}{sys.version_info[1]}.zip"
    directories = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    standard = {os.path.abspath(entry) for entry in (zipped, *directories)}
    standard |= {os.path.join(directory, "lib-dynload") for directory in standard}
    last = {os.path.abspath(entry) for entry in _program_directories()}

    def rank(entry: str) -> int:
        path = os.path.abspath(entry)
        return 0 if path in standard else 2 if path in last else 1

    return sorted(path, key=rank)


def _program_directories() -> list[str]:
    script = getattr(sys.modules["__main__"], "__file__", None)
    directories = [] if script is None else [os.path.dirname(script)]
    try:
        return [*directories, os.getcwd()]
    except FileNotFoundError:
        return directories


def look_last(directory: str) -> None:
    """Move a directory to the end of this process's module search path, or add it there.

    For programs whose modules are in the current directory.
    """
    directory = os.path.abspath(directory)
    sys.path[:] = [*(entry for entry in sys.path if os.path.abspath(entry) != directory), directory]
