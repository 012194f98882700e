"""Finds the processes of members in `/proc`: which process holds a lock, its pid in this namespace, its name."""

from __future__ import annotations

import bisect
import contextlib
import errno
import os
from operator import itemgetter
from typing import Final, NamedTuple

_PYTHON: Final = ("python", "pypy")
_SEGMENTS: Final = ("shmtensor.", "memfd:shmtensor.")
"""How the names of segments begin, in `/dev/shm` or of a segment server."""


class Process(NamedTuple):
    """A process of this machine. Both fields are empty if it cannot be found or read."""

    pid: int
    """In the pid namespace of this process."""
    name: str


UNKNOWN: Final = Process(0, "")

_File = tuple[int, int]
Ranges = list[tuple[int, int]]
"""First and last bytes, in order. Those that overlap or adjoin are one."""


def covers(ranges: Ranges, byte: int) -> bool:
    """Whether a byte lies in one of these ranges."""
    at = bisect.bisect_right(ranges, byte, key=itemgetter(0))
    return at > 0 and byte <= ranges[at - 1][1]


class Processes:
    """Finds processes by the locks that they hold, as far as `/proc/<pid>/fd` may be read.

    Which process a member belongs to is kept for as long as this object lives; the rest until `refresh`.
    """

    def __init__(self) -> None:
        self._files: dict[int, dict[_File, list[str]]] = {}
        self._namespaces: dict[int, list[int]] | None = None
        self._found: dict[int, Process] = {}
        self._stopped: dict[int, bool] = {}

    def refresh(self) -> None:
        """Forget which files are open, and which processes run or are stopped."""
        self._files.clear()
        self._stopped.clear()
        self._namespaces = None

    def forget_all_but(self, uids: set[int]) -> None:
        """Forget the processes of members that are gone."""
        for uid in self._found.keys() - uids:
            del self._found[uid]

    def known(self, uid: int) -> Process:
        """The process of a member, if it was found before."""
        return self._found.get(uid, UNKNOWN)

    def find(self, uid: int, pid: int, file: os.stat_result, byte: int) -> Process:
        """The process of a living member: `pid` in its own namespace, it holds a lock on `byte` of `file`."""
        found = self._found.get(uid)
        if found is None:
            found = self._found[uid] = self._search(pid, file, byte)
        return found

    def _search(self, pid: int, file: os.stat_result, byte: int) -> Process:
        if self.holds(pid, file, byte):
            return Process(pid, name_of(pid))
        if self._namespaces is None:
            self._namespaces = _in_namespaces()
        for candidate in self._namespaces.get(pid, ()):
            if self.holds(candidate, file, byte):
                return Process(candidate, name_of(candidate))
        return UNKNOWN

    def is_stopped(self, pid: int) -> bool:
        """Whether a process is stopped, by a signal or a debugger. False if that cannot be seen."""
        if pid not in self._stopped:
            self._stopped[pid] = _status(pid)[0] in ("T", "t")
        return self._stopped[pid]

    def holds(self, pid: int, file: os.stat_result, byte: int) -> bool:
        """Whether the process is known to hold a lock on a byte of a file."""
        return covers(self.locked(pid, file), byte)

    def locked(self, pid: int, file: os.stat_result) -> Ranges:
        """The bytes of a file on which the process is known to hold locks now."""
        if pid not in self._files:
            self._files[pid] = _open_files(pid)
        numbers = self._files[pid].get((file.st_dev, file.st_ino), ())
        return _merged([found for number in numbers for found in _locks(pid, number)])


def _merged(ranges: Ranges) -> Ranges:
    found: Ranges = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return found


def holders(path: str, first: int, end: int) -> list[Process]:
    """The processes that are known to hold a lock within `[first, end)` of a file, without this one.

    Descriptors are compared by name, since `stat` of one on a file system that hangs would hang.
    """
    found, path = [], os.path.realpath(path)
    for pid in sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        with contextlib.suppress(OSError):
            numbers = [] if pid == os.getpid() else os.listdir(f"/proc/{pid}/fd")
            names = ((number, _target(f"/proc/{pid}/fd/{number}")) for number in numbers)
            ranges = [each for number, name in names if name == path for each in _locks(pid, number)]
            if any(start < end and first <= last for start, last in ranges):
                found.append(Process(pid, name_of(pid)))
    return found


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _locks(pid: int, number: str) -> Ranges:
    """The first and last bytes of the locks of an open file description."""
    found: Ranges = []
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/fdinfo/{number}") as lines:
        for parts in (line.split() for line in lines if line.startswith("lock:")):
            if parts[2] == "OFDLCK":
                found.append((int(parts[-2]), int(parts[-1])))
    return found


def _open_files(pid: int) -> dict[_File, list[str]]:
    """The descriptors of a process by the file that they lead to: of those that may be segments, by their names.

    `stat` of one on a file system that hangs would hang. Raises `OSError` if this process has no descriptor left.
    """
    found: dict[_File, list[str]] = {}
    try:
        for number in os.listdir(f"/proc/{pid}/fd"):
            if os.path.basename(_target(f"/proc/{pid}/fd/{number}")).startswith(_SEGMENTS):
                with contextlib.suppress(OSError):
                    info = os.stat(f"/proc/{pid}/fd/{number}")
                    found.setdefault((info.st_dev, info.st_ino), []).append(number)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # else it would be unknown for as long as it lives
            raise
    return found


def _in_namespaces() -> dict[int, list[int]]:
    """Of the processes in other pid namespaces: their pid there -> their pids here."""
    found: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError, ValueError), open(f"/proc/{entry}/status") as lines:
                    pids = next((line.split()[1:] for line in lines if line.startswith("NSpid:")), [])
                    if len(pids) > 1:
                        found.setdefault(int(pids[-1]), []).append(int(entry))
    return found


def _status(pid: int) -> tuple[str, int]:
    """The state of a process, a letter, and its parent; neither if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, parent, *_ = file.read().rpartition(b") ")[2].split()
        return state.decode(), int(parent)
    except (OSError, ValueError):
        return "", 0


def name_of(pid: int) -> str:
    """The name of a process for people: its program, or the script or module of a Python program; empty if it is gone.

    `python -c`, as multiprocessing and worker pools start their workers, is called what the Python program is called
    that started it. So a worker has the same name by each start method.
    """
    name, is_python = _own_name(pid)
    above = name
    while is_python and above.endswith(" -c"):
        pid = _status(pid)[1]
        above, is_python = _own_name(pid)
    return above if is_python else name


def _own_name(pid: int) -> tuple[str, bool]:
    """The name of a process by its own command line, and whether it is a Python program."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            arguments = [os.fsdecode(each) for each in file.read(1 << 16).split(b"\0")]
        with open(f"/proc/{pid}/comm", "rb") as file:
            command = os.fsdecode(file.read()).strip()
    except OSError:
        return "", False
    program = os.path.basename(arguments[0])
    is_python = program.startswith(_PYTHON)
    name = (_of_python(program, arguments[1:]) if is_python else program) or command
    return "".join(each if each.isprintable() else "?" for each in name)[:64], is_python


def _of_python(program: str, arguments: list[str]) -> str:
    rest = iter(arguments)
    for each in rest:
        if each in ("-X", "-W", "--check-hash-based-pycs"):
            next(rest, None)
        elif each.startswith("-m"):
            return each[2:] or next(rest, program)
        elif each.startswith("-c"):
            return f"{program} -c"
        elif each and not each.startswith("-"):
            return os.path.basename(each)
    return program
