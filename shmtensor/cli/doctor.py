"""`shmtensor doctor`: whether this machine has what the library needs.

Checks of the machine (shared memory, limits, kernel features, the socket directory), each of which tries the real
thing, and of the software: the interpreter and the packages that the library needs.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import platform
import re
import resource
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import typer
from rich.markup import escape
from rich.table import Table

from .. import native
from ..channel import cleanup, control
from ..channel.cleanup import foreign
from ..channel.inspect import view_of
from ..channel.names import PREFIX, socket_dir
from ..codec.libraries import EXTRA
from ..cuda.copies import Pinning
from ..cuda.runtime import runtime
from ..errors import CudaError, ResourceError, ShmTensorError
from ..memory import placement, words
from ..memory import segment as shm
from ..memory.control_groups import groups_of, read_text
from ..memory.semaphores import Sleeper, unlink_semaphore
from ..options import format_bytes
from .channels import describe, usable_socket_dir
from .output import AsJson, console, guarded, print_json

OK: Final = "ok"
WARN: Final = "warn"
FAIL: Final = "fail"


@dataclass(frozen=True)
class Finding:
    """One result: name, status, value, and what that means or what to do about it."""

    name: str
    status: str
    value: str
    meaning: str


_COLOURS = {OK: "green", WARN: "yellow", FAIL: "bold red"}


@guarded
def doctor(as_json: AsJson = False) -> None:
    """Check shared memory, limits, kernel features and versions. Exit code 1 if something that is needed is missing."""
    findings = examine()
    if as_json:
        print_json({"ok": not any(it.status == FAIL for it in findings), "findings": [asdict(it) for it in findings]})
    else:
        _show(findings)
    if any(finding.status == FAIL for finding in findings):
        raise typer.Exit(1)


def examine() -> list[Finding]:
    """All findings, in the order of the report. A check that raises is a failed finding.

    One check waits for a segment server that does not serve. If the wait times out, the others do not wait again.
    """
    findings: list[Finding] = []
    with contextlib.ExitStack() as without_waiting:

        def add(finding: Finding) -> None:
            findings.append(finding)
            if finding.name == _SERVER and finding.status == FAIL:
                without_waiting.enter_context(placement.at_once())

        for check in (*MACHINE, *SOFTWARE):
            try:
                for finding in check():
                    add(finding)
            except Exception as error:
                name = check.__name__.replace("_", " ")
                findings.append(
                    Finding(name, FAIL, type(error).__name__, f"{error}; this check broke where it should not have")
                )
    return findings


def _show(findings: list[Finding]) -> None:
    out = console()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("", "what", "value", "meaning"):
        table.add_column(heading, overflow="fold")
    for it in findings:
        table.add_row(f"[{_COLOURS[it.status]}]{it.status}[/]", it.name, escape(it.value), escape(it.meaning))
    out.print(table)
    failed, warned = (sum(it.status == status for it in findings) for status in (FAIL, WARN))
    out.print(f"{len(findings)} checks, {warned} warnings, {failed} failures")


_CHANNEL = control.base(control.CAPACITY) * 8 + shm.PAGE
"""Bytes of the smallest channel: its members, and a page."""
_SERVER = "segment server"
_MIB = 1 << 20
_ROOMY = 256 * _MIB
_FEW_FILES = 1024
_NO_LIMIT = 1 << 60
_MEMORY_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
"""By version of the control groups: limit and use."""
_NAMED = 3


def shared_memory() -> Iterator[Finding]:
    """Size, options, and one real segment."""
    place = placement.current()
    yield from _mounted() if place is placement.FILES else _served(place)
    name = f"{PREFIX}doctor-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with shm.create(name, _CHANNEL, "free some") as segment:
            segment.map(writable=True)
            segment.locks().close()
        yield Finding(
            "shared-memory segment", OK, "created, mapped, removed", "POSIX shared memory works for this user"
        )
    except (OSError, ShmTensorError) as error:
        yield Finding(
            "shared-memory segment", FAIL, str(error), f"this user must be able to create segments in {place}"
        )
    finally:
        with contextlib.suppress(OSError):
            shm.unlink(name)


def _served(place: placement.Place) -> Iterator[Finding]:
    """A segment server, and its room."""
    try:
        size, free = place.total_bytes(), place.free_bytes()
    except ResourceError as error:
        yield Finding(_SERVER, FAIL, "does not serve", str(error))
        return
    yield Finding(
        _SERVER, WARN if free < _ROOMY else OK, f"{format_bytes(size)}, {format_bytes(free)} free",
        f"rings are kept by {place}, for all containers that share the directory; /dev/shm is not used",
    )  # fmt: skip


def _mounted() -> Iterator[Finding]:
    """`/dev/shm`: its size and options."""
    try:
        space = os.statvfs(shm.SHM_DIR)
    except OSError as error:
        yield Finding(
            shm.SHM_DIR, FAIL, error.strerror or "missing", f"mount a tmpfs at {shm.SHM_DIR}: every ring lies there"
        )
        return
    size, free = space.f_blocks * space.f_frsize, shm.free_bytes()
    value = f"{format_bytes(size)}, {format_bytes(free)} free"
    if free < _ROOMY:
        yield Finding(
            shm.SHM_DIR, WARN, value,
            "rings need slots x slot_bytes here: remount with size=, or start the container with --shm-size=1g; "
            "shmtensor gc frees what dead processes left",
        )  # fmt: skip
    else:
        yield Finding(shm.SHM_DIR, OK, value, "rings live here; creation reserves every page")
    kind, options = _mount(shm.SHM_DIR)
    if kind == "tmpfs":
        yield Finding(f"{shm.SHM_DIR} mount", OK, f"{kind} {options}", "memory, not a disk")
    else:
        yield Finding(
            f"{shm.SHM_DIR} mount", WARN, f"{kind} {options}",
            "expected tmpfs: elsewhere slots may be written to a disk",
        )  # fmt: skip


def _mount(path: str) -> tuple[str, str]:
    """(file system, options) of the last mount at a path."""
    found = ("part of its parent", "")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[4] == path:
            kind, _, options = after.split(" ", 2)
            found = kind, f"{before.split()[5]},{options}"
    return found


def limits() -> Iterator[Finding]:
    """Limits of open files, locked memory, and the memory of this process's control group."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = "an endpoint keeps up to 3, and up to 2 per peer; with a segment server, up to 2 per segment as well"
    if soft < _FEW_FILES:
        yield Finding("open files", WARN, f"{soft} (hard {hard})", f"{needed}: raise with ulimit -n")
    else:
        yield Finding("open files", OK, f"{soft} (hard {hard})", needed)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    value = "unlimited" if locked == resource.RLIM_INFINITY else format_bytes(locked)
    yield Finding(
        "locked memory", OK, value, "the library locks no memory itself; pinning rings for CUDA is the driver's affair"
    )
    limit, used = _cgroup_memory()
    if limit is None:
        yield Finding("memory control group", OK, "no limit", "rings count as memory of whoever touches a page first")
    else:
        room = limit - used
        yield Finding(
            "memory control group", WARN if room < _ROOMY else OK,
            f"{format_bytes(limit)}, {format_bytes(max(0, room))} left",
            "rings count against it: a ring beyond it ends in the out-of-memory killer, not in an error: raise it",
        )  # fmt: skip


def _cgroup_memory() -> tuple[int | None, int]:
    """(smallest limit on the way to the root, bytes used there); versions 2 and 1."""
    best: tuple[int | None, int] = (None, 0)
    for version, group in groups_of("memory"):
        limit_file, used_file = _MEMORY_FILES[version]
        try:
            limit, used = int(read_text(group / limit_file)), int(read_text(group / used_file))
        except (OSError, ValueError):  # "max" as well: no limit
            continue
        if 0 <= limit < _NO_LIMIT and (best[0] is None or limit - used < best[0] - best[1]):
            best = limit, used
    return best


def huge_pages() -> Iterator[Finding]:
    """Whether rings may use huge pages: the mount's `huge=` decides, the kernel's switch overrides it."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
        chosen = re.search(r"\[(\w+)\]", text)
        switch = chosen[1] if chosen else text.strip()
    except OSError:
        switch = "not offered"
    mount = re.search(r"huge=(\w+)", _mount(shm.SHM_DIR)[1])
    option = mount[1] if mount else "never"
    works = switch == "force" or (switch != "deny" and option in ("always", "within_size", "advise"))
    meaning = "rings may use huge pages" if works else (
        f"optional: large rings fault faster after mount -o remount,huge=within_size {shm.SHM_DIR}"
    )  # fmt: skip
    yield Finding("huge pages", OK, f"shmem_enabled={switch}, {shm.SHM_DIR} huge={option}", meaning)


def kernel() -> Iterator[Finding]:
    """The three kernel features that the protocol needs."""
    if words.HAS_BARRIER:
        yield Finding("membarrier", OK, "works", "sleepers are woken without a polling tick")
    elif words.WEAKLY_ORDERED:
        yield Finding(
            "membarrier", FAIL, "not offered", "this processor needs it: allow membarrier(2) in the seccomp profile"
        )
    else:
        yield Finding(
            "membarrier", WARN, "not offered",
            "a lost wake-up costs up to 10 ms: allow membarrier(2) in the seccomp profile",
        )  # fmt: skip
    try:
        yield _ofd_locks()
    except OSError as error:
        yield Finding("OFD locks", FAIL, str(error), "needs a segment to try them on")
    name = f"{PREFIX}doctor-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        sleeper = Sleeper(name, create=True)
        sleeper.post()
        works = sleeper.wait(1.0)
        sleeper.close()
        status = OK if works else FAIL
        yield Finding(
            "POSIX semaphores", status, "works" if works else "a post did not arrive", "full rings wait on one"
        )
    except (OSError, ShmTensorError) as error:
        yield Finding("POSIX semaphores", FAIL, str(error), f"needs a writable {shm.SHM_DIR}, or a segment server")
    finally:
        with contextlib.suppress(OSError):
            unlink_semaphore(name)


def _ofd_locks() -> Finding:
    name = f"{PREFIX}doctor-{os.getpid()}-{secrets.token_hex(4)}"
    with shm.create(name, shm.PAGE, "free some") as segment:
        shm.unlink(name)
        first, second = segment.locks(), segment.locks()
        try:
            works = first.try_exclusive(1) and second.held_by_other(1) and not second.try_exclusive(1)
            first.close()
            works = works and second.try_exclusive(1)
        except OSError as error:
            return Finding("OFD locks", FAIL, str(error), "needs Linux 3.15 or newer; some sandboxes lack F_OFD_SETLK")
        finally:
            first.close()
            second.close()
    return Finding(
        "OFD locks", OK if works else FAIL, "works" if works else "locks do not exclude",
        "the proof that a peer is alive",
    )  # fmt: skip


def socket_directory() -> Iterator[Finding]:
    """The directory of the sockets for wake-ups."""
    try:
        path = socket_dir()
    except ResourceError as error:
        yield Finding("socket directory", FAIL, str(error), "sockets that wake sleeping receivers lie here")
        return
    fifo = f"{path}/{secrets.token_hex(8)}"
    try:
        os.mkfifo(fifo, 0o600)
        os.unlink(fifo)
    except OSError as error:
        yield Finding(
            "socket directory", FAIL, f"{path}: {error.strerror}",
            "no endpoint can make its inbox there: give it room and inodes, mount it writable, or set SHMTENSOR_DIR",
        )  # fmt: skip
        return
    info = os.stat(path)
    value = f"{path}, mode {stat.S_IMODE(info.st_mode):o}, user {info.st_uid}"
    yield Finding(
        "socket directory", OK, value, "yours alone; the processes of a channel must share it (SHMTENSOR_DIR moves it)"
    )


def remove_ipc() -> Iterator[Finding]:
    """systemd-logind may delete a user's shared memory at the end of the last session."""
    folders = [Path(root) / "systemd" for root in ("/usr/lib", "/run", "/etc")]
    files = [folder / "logind.conf" for folder in folders] + sorted(
        (file for folder in folders for file in folder.glob("logind.conf.d/*.conf")), key=lambda file: file.name
    )
    texts = []
    for file in files:
        try:
            texts.append(file.read_text())
        except OSError:
            continue
    if not texts:
        return
    chosen = "yes (systemd's default)"
    for text in texts:
        for value in re.findall(r"^\s*RemoveIPC\s*=\s*(\w+)", text, re.MULTILINE):
            chosen = value
    removes = chosen.split()[0].lower() in ("yes", "true", "1", "on")
    if removes and os.geteuid() >= 1000 and os.path.isdir("/run/systemd/system"):
        yield Finding(
            "systemd RemoveIPC", WARN, chosen,
            "at your last logout systemd deletes your segments under running jobs: set RemoveIPC=no in logind.conf, or "
            "run loginctl enable-linger",
        )  # fmt: skip
    else:
        reason = (
            "nothing is removed at logout"
            if not removes
            else "does not touch system users, nor anybody where logind is not running"
        )
        yield Finding("systemd RemoveIPC", OK, chosen, reason)


def leftovers() -> Iterator[Finding]:
    """What `shmtensor gc` would remove."""
    try:
        found = cleanup.sweep_all(socket_dir(), dry_run=True)
    except ResourceError as error:
        yield Finding("leftovers", WARN, "not counted", str(error))
        return
    if found:
        value = f"{len(found)} files, {format_bytes(sum(it.nbytes for it in found))}"
        yield Finding(
            "leftovers", WARN, value,
            "of dead processes: shmtensor gc removes them, as does the next endpoint that is made",
        )  # fmt: skip
    else:
        yield Finding("leftovers", OK, "none", "nothing of dead processes lies around")


def foreign_entries() -> Iterator[Finding]:
    """Foreign files among the library's."""
    try:
        found = [describe(it) for it in foreign(usable_socket_dir())]
    except ResourceError as error:
        yield Finding("not ours", WARN, "not counted", str(error))
        return
    if not found:
        yield Finding("not ours", OK, "none", "nothing else lies under the library's names")
        return
    more = f"; {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    yield Finding(
        "not ours", WARN, "; ".join(found[:_NAMED]) + more, "passed by, and harms nobody: its owner may remove it"
    )


def unreadable() -> Iterator[Finding]:
    """This user's channels that cannot be read: of another version, without permission, damaged."""
    try:
        views = [view_of(name) for name in cleanup.channels()]
    except ResourceError as error:
        yield Finding("channels", WARN, "not counted", str(error))
        return
    closed = [view for view in views if view.owner == os.geteuid() and not view.readable]
    if closed:
        text = "; ".join(f"{view.name}: {view.notes[0]}" for view in closed[:_NAMED])
        yield Finding(
            "channels", WARN, f"{len(closed)} of {len(views)} cannot be read: {text}",
            "use the same version everywhere; what nobody uses any more can be deleted",
        )  # fmt: skip
    else:
        yield Finding("channels", OK, f"{len(views)}", "all of this user's can be read")


MACHINE: Final[tuple[Callable[[], Iterator[Finding]], ...]] = (
    shared_memory, limits, huge_pages, kernel, socket_directory, remove_ipc, leftovers,
    foreign_entries, unreadable,
)  # fmt: skip


_NEEDED = (("NumPy", "numpy", "numpy"), ("pyzmq", "pyzmq", "zmq"), ("posix_ipc", "posix_ipc", "posix_ipc"))


def python() -> Iterator[Finding]:
    """The interpreter and the platform."""
    system = f"{platform.system()} {platform.machine()}"
    version = f"{platform.python_implementation()} {platform.python_version()}, {system}"
    works = sys.platform == "linux" and sys.version_info >= (3, 10) and sys.implementation.name == "cpython"
    yield Finding("Python", OK if works else FAIL, version, "needs CPython 3.10 or newer on Linux")


def packages() -> Iterator[Finding]:
    """Versions of the required packages, each imported."""
    for label, distribution, module in _NEEDED:
        try:
            importlib.import_module(module)
            yield Finding(label, OK, importlib.metadata.version(distribution), "imports")
        except Exception as error:
            yield Finding(label, FAIL, f"{type(error).__name__}: {error}", f"pip install {distribution}")


def codec() -> Iterator[Finding]:
    """Whether messages are sent and received by the compiled module."""
    if native.module is not None:
        yield Finding("compiled core", OK, "in use", "messages are sent and received without Python code")
        return
    if native.switched_off():
        yield Finding("compiled core", OK, "switched off", "by SHMTENSOR_PURE")
        return
    yield Finding(
        "compiled core", WARN, "not in use",
        f"{native.why_not}; the Python code does the same, forty times slower for small messages: {native.remedy}",
    )  # fmt: skip


def torch() -> Iterator[Finding]:
    """torch, which only tensors need, and CUDA, which is optional."""
    try:
        module = importlib.import_module("torch")
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        value = "not installed" if missing else f"{type(error).__name__}: {error}"
        yield Finding("torch", WARN, value, f"NumPy arrays work without it, tensors do not: {EXTRA}")
        return
    yield Finding(
        "torch", OK, str(module.__version__), "imports; imported by the library when the first tensor arrives"
    )
    yield from _cuda(module)


def _cuda(torch: Any) -> Iterator[Finding]:
    try:
        cuda = runtime()
    except CudaError as error:
        yield Finding("CUDA", OK, "not available", f"optional, host tensors need none; {error.strerror}")
        return
    value = f"{torch.version.cuda}, {cuda.device_count()} devices"
    yield Finding("CUDA", OK, value, "tensors are copied to devices from pinned slots, and from devices into them")
    for what, writable in (("rings of senders and work queues", True), ("fan-out rings, read-only", False)):
        failure = _pins(writable)
        yield Finding(
            "CUDA pinning", WARN if failure else OK, failure or "works",
            f"{what}: " + ("copies are pageable, slower, and the host waits for them" if failure else "one page tried"),
        )  # fmt: skip


def _pins(writable: bool) -> str:
    """Why a page of shared memory cannot be pinned; empty if it can."""
    name = f"{PREFIX}doctor-pin-{secrets.token_hex(8)}"
    with shm.create(name, shm.PAGE, "free some") as segment:
        shm.unlink(name)
        mapping = segment.map(writable=writable)
    pinning = Pinning(mapping.buffer, mapping.address, writable=writable)
    pinning.parts(mapping.buffer, 0, shm.PAGE, runtime().current_device())
    failure = pinning.failure
    pinning.release()
    return failure


SOFTWARE: Final[tuple[Callable[[], Iterator[Finding]], ...]] = (python, packages, codec, torch)
