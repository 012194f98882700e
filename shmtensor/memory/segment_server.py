"""The segment server: it keeps the names of segments for processes that share a directory, but no `/dev/shm`.

One thread, which never waits for a client. What it does at each death, its own included, stands in
docs/internals/segment-server.md.

    awaiting    processes that lived before it have not given back what they have mapped: all else is put off
    serving     it answers everything
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import fcntl
import itertools
import logging
import os
import select
import socket
import stat
import struct
import termios
import time
from typing import Final

from ..errors import ResourceError, WireError
from ..options import format_bytes, parse_bytes
from ..wire import segment_packets as packets
from ..wire.segment_packets import LOCKS, NEW_SOCKET, SOCKET, Op, Reply, Request, Space, Status
from . import shortage
from .control_groups import groups_of, read_text
from .descriptors import OpenFile
from .locks import LockFile, is_locked, locked_bytes
from .served import ID_END, pid_of, receive

log = logging.getLogger("shmtensor.memory")

MOST_NAMES: Final = 65_536
MOST_CONNECTIONS: Final = 4096
_OTHER_FILES: Final = 64
_BACKLOG: Final = 1024
_PAUSE_S: Final = 0.01
"""Seconds to wait where the machine may open no more files, and nothing can be closed."""
_LOOK_S: Final = 5.0
"""Seconds after which a server looks whether its socket still has its name."""
_SUM_S: Final = 1.0
"""Seconds for which a sum of all segments is taken: what is reserved meanwhile is added to it."""
_MOST_REQUEST: Final = 1024
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL, _SHRINK, _GROW, _WRITE, _FUTURE_WRITE = 1, 2, 4, 8, 16
_CREDENTIALS: Final = struct.Struct("3i")
_LATEST: Final = (1 << 63) - 1


class _Named:
    """A segment that has a name. Owns its descriptor."""

    __slots__ = ("file", "serial")

    def __init__(self, file: OpenFile, serial: int) -> None:
        self.file, self.serial = file, serial

    @property
    def status(self) -> Status:
        info = os.fstat(self.file.fd)
        changed = min(max(0, info.st_mtime_ns), _LATEST)  # any holder may set it to any time
        return Status(info.st_dev, info.st_ino, info.st_size, info.st_blocks, info.st_mode, changed)


class _Client:
    """A connection. Owns its socket."""

    __slots__ = ("granted", "is_present", "pid", "since", "socket", "uid")

    def __init__(self, connected: socket.socket, pid: int, uid: int) -> None:
        self.socket, self.pid, self.uid, self.since = connected, pid, uid, time.monotonic()
        self.granted: tuple[_Named, int, int] | None = None  # what it is reserving: bytes, and bytes there were
        self.is_present = False


class SegmentServer:
    """Keeps the names of segments in a directory and passes what they lead to. `run` serves until `stop`.

    Args:
        directory: the directory that all processes share, with mode 0700 and of this user.
        limit: bytes that all segments together may take, or a string such as `"8GiB"`; None: half of the memory of this
            machine, or of its control group (v2).

    Raises `ResourceError` if another server runs there, or the directory cannot be used.
    """

    def __init__(self, directory: str, limit: int | str | None = None) -> None:
        self.directory = directory
        self.limit = default_limit() if limit is None else parse_bytes(limit, "limit")
        self._names: dict[str, _Named] = {}
        self._clients: dict[int, _Client] = {}
        self._order: list[str] = []
        self._serial = 0
        self._summed, self._at_most = float("-inf"), 0  # when all segments were looked at, and what they take at most
        self._stopping = False
        self._lacks = ""  # why it was not given all that it awaits
        self._is_refusing = False  # connections: logged once
        files = self._most_files = os.sysconf("SC_OPEN_MAX")
        self._most_clients = max(8, min(MOST_CONNECTIONS, (files - _OTHER_FILES) // 4))
        self._most_names = max(8, min(MOST_NAMES, files - _OTHER_FILES - self._most_clients))
        had_locks = os.path.lexists(f"{directory}/{LOCKS}")
        try:
            self._locks = LockFile(f"{directory}/{LOCKS}", os.O_CREAT)
        except OSError as error:
            raise shortage.explain_file(error, f"{directory}/{LOCKS}") from None
        with contextlib.ExitStack() as undo:
            undo.callback(self._locks.close)
            if not self._locks.try_exclusive(0):
                raise ResourceError(errno.EADDRINUSE, f"another segment server runs in {directory}: one is enough")
            if not had_locks and _answers(f"{directory}/{SOCKET}"):
                text = f"another segment server runs in {directory}, where {LOCKS} was removed: end it first"
                raise ResourceError(errno.EADDRINUSE, text)
            self._awaited = {byte - 1 for byte in locked_bytes(self._locks.fd, 1, 1 + ID_END)}
            try:
                self._poll = undo.enter_context(select.epoll())
                self._woken, self._waker = (undo.enter_context(each) for each in socket.socketpair())
                self._listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                undo.callback(_remove, f"{directory}/{NEW_SOCKET}")
                self._folder = os.open(directory, os.O_PATH | os.O_CLOEXEC)
                undo.callback(os.close, self._folder)
                self._listen()
            except OSError as error:
                raise shortage.explain_file(error, f"{directory}/{SOCKET}", "cannot make socket") from None
            undo.pop_all()

    def _listen(self) -> None:
        """Listen. The socket gets its name last, so that no process sees the directory without a socket, or a socket
        that does not serve."""
        path = f"{self.directory}/{NEW_SOCKET}"
        _remove(path)
        self._listener.bind(path)
        os.chmod(path, 0o600)
        self._own = os.lstat(path)
        self._listener.listen(_BACKLOG)
        for each in (self._listener, self._woken, self._waker):
            each.setblocking(False)
        self._poll.register(self._listener, select.EPOLLIN)
        self._poll.register(self._woken, select.EPOLLIN)
        # crash: share.listening
        os.rename(path, f"{self.directory}/{SOCKET}")

    def __repr__(self) -> str:
        state = f"awaiting {len(self._awaited)}" if self._awaited else "serving"
        return f"SegmentServer({self.directory!r}, {state}, {len(self._names)} names)"

    # --- running

    def run(self) -> None:
        """Serve until `stop` is called. Raises `ResourceError` if its socket was removed or replaced: nobody can reach
        it, and another server may run there."""
        log.info("%r is ready, with at most %s", self, format_bytes(self.limit))
        looked = time.monotonic()
        while not self._stopping:
            if time.monotonic() - looked >= _LOOK_S:
                looked = time.monotonic()
                if not self._has_name():
                    text = f"{self.directory}/{SOCKET} was removed or replaced, and so this server ends: start it again"
                    raise ResourceError(errno.ESTALE, f"{text} if no other runs there")
            for fd, _ in self._poll.poll(_LOOK_S):
                if fd == self._listener.fileno():
                    self._accept()
                elif fd in self._clients:
                    self._serve(self._clients[fd])

    def _has_name(self) -> bool:
        """Whether its socket still has its name in this very directory, which may be called otherwise by now."""
        try:
            info = os.lstat(SOCKET, dir_fd=self._folder)
        except OSError as error:
            return error.errno != errno.ENOENT
        return os.path.samestat(info, self._own)

    def stop(self) -> None:
        """End `run`. May be called from a signal handler or another thread."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def close(self) -> int:
        """Close everything; returns how many names living processes may still give to another server. Idempotent.

        The socket keeps its name if there are such names: it shows new processes that the directory has a segment
        server.
        """
        if self._locks.fd < 0:
            return 0
        left = len(self._names) if is_locked(self._locks.fd, 1, ID_END) else 0
        if not left and self._has_name():
            with contextlib.suppress(OSError):
                os.unlink(f"{self.directory}/{SOCKET}")
        self._poll.close()
        for each in (self._listener, self._woken, self._waker, *(client.socket for client in self._clients.values())):
            each.close()
        for named in self._names.values():
            named.file.close()
        os.close(self._folder)
        self._clients.clear()
        self._names.clear()
        self._locks.close()
        rest = f": {left} segments are still in use, and their processes give them to the next server" if left else ""
        log.info("the segment server of %s has ended%s", self.directory, rest)
        return left

    def __enter__(self) -> SegmentServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- connections

    def _accept(self) -> None:
        try:
            connected, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _FULL and not self._drop_idle():
                self._explain_shortage()
                time.sleep(_PAUSE_S)
            return
        try:
            connected.setblocking(False)
            raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid, uid, _ = _CREDENTIALS.unpack(raw)
            if len(self._clients) >= self._most_clients and not self._drop_idle():
                raise OSError(errno.EMFILE, f"{len(self._clients)} processes are connected, which is the limit")
            self._poll.register(connected, select.EPOLLIN)
        except OSError as error:
            connected.close()
            if not self._is_refusing:
                log.error("it refuses connections: %s", error.strerror)
            self._is_refusing = True
            return
        self._is_refusing = False
        self._clients[connected.fileno()] = _Client(connected, pid, uid)

    def _drop_idle(self) -> bool:
        """Close the oldest connection that is between two packets and holds nothing."""
        idle = [client for client in self._clients.values() if not client.is_present and client.granted is None]
        if not idle:
            return False
        self._drop(min(idle, key=lambda client: client.since))
        return True

    def _drop(self, client: _Client) -> None:
        with contextlib.suppress(OSError):
            self._poll.unregister(client.socket)
        self._clients.pop(client.socket.fileno(), None)
        client.socket.close()

    def _serve(self, client: _Client) -> None:
        """Answer one packet; end the connection if there is none, or it makes no sense."""
        beside = OpenFile()
        try:
            data, beside = receive(client.socket, _MOST_REQUEST)
            if not data or _has_unread(client.socket):
                self._drop(client)
                return
            client.since = time.monotonic()
            if client.uid != os.geteuid():  # refused now, since who is sending hears nothing of a connection that ends
                text = (
                    f"it serves user {os.geteuid()}, as its host has it, you are user {client.uid} there: be the same"
                )
                self._reply(client, Reply(0, errno.EPERM, text=text.encode()))
                self._drop(client)
                return
            request = Request.unpack(data)
            if (beside.fd >= 0) != _has_file(request):
                raise WireError(f"request {request.op.name} with the wrong number of descriptors")
            reply, back = self._answer(client, request, beside)
            if not self._reply(client, reply, back):
                self._drop(client)
        except BlockingIOError:
            pass
        except WireError as error:
            log.warning("process %d, by its number here, has sent %s", client.pid, error)
            self._reply(client, Reply(0, errno.EBADMSG, text=str(error).encode()))
            self._drop(client)
        except OSError as error:
            text = error.strerror or str(error)
            if error.errno in _FULL:
                text = self._explain_shortage()
            self._reply(client, Reply(0, error.errno or errno.EIO, text=text.encode()))
            self._drop(client)
        except Exception:  # whatever one client sends, the others are served
            log.exception("a request of process %d, by its number here, has failed", client.pid)
            self._drop(client)
        finally:
            beside.close()  # unless a name has it now

    def _explain_shortage(self) -> str:
        """Why the server can open no more files. If it awaits segments then, it cannot take them: this is logged once,
        and sent to all clients as the reason."""
        text = (
            f"it may open too few files ({self._most_files}), and keeps {len(self._names)} names: start it again with "
            "a higher limit (ulimit -n, LimitNOFILE=)"
        )
        if self._awaited and not self._lacks:
            self._lacks = text
            log.error("%s", text)
        return text

    @staticmethod
    def _reply(client: _Client, reply: Reply, back: OpenFile | None = None) -> bool:
        """Whether the reply could be sent at once: who does not read gets none."""
        beside = [] if back is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", back.fd))]
        try:
            client.socket.sendmsg([reply.pack()], beside)
        except OSError:
            return False
        return True

    # --- requests

    def _answer(self, client: _Client, request: Request, beside: OpenFile) -> tuple[Reply, OpenFile | None]:
        if request.op == Op.GIVE:
            return self._give(request, beside), None
        if request.op == Op.PRESENT:
            client.is_present = True
            self._awaited.discard(request.value)
            # crash: share.present
            return Reply(request.op), None
        if self._is_awaiting() and request.op != Op.SPACE:
            return Reply(request.op, errno.EAGAIN, self._space(0), self._lacks.encode()), None
        if request.op == Op.SPACE:
            return Reply(request.op, 0, self._space(self._used())), None
        if request.op == Op.LIST:
            names = self._in_order()
            later = itertools.islice(names, bisect.bisect_right(names, request.name), None)
            text = packets.pack_listing((name, self._names[name].status) for name in later)
            return Reply(request.op, text=text), None
        if request.op == Op.OPEN:
            return self._open(request, beside)
        named = self._names.get(request.name)
        if named is None:
            return Reply(request.op, errno.ENOENT), None
        if request.op == Op.STATUS:
            return Reply(request.op, 0, named.status), None
        if request.op == Op.UNLINK:
            del self._names[request.name]
            named.file.close()
            # crash: share.unlinked
            return Reply(request.op), None
        return self._reserve(client, named, request.value), None

    def _in_order(self) -> list[str]:
        if len(self._order) != len(self._names) or any(name not in self._names for name in self._order):
            self._order = sorted(self._names)
        return self._order

    def _open(self, request: Request, beside: OpenFile) -> tuple[Reply, OpenFile | None]:
        named = self._names.get(request.name)
        if named is not None:
            if request.value == packets.EXCLUSIVE:
                return Reply(request.op, errno.EEXIST), None
            return Reply(request.op, 0, (*named.status, named.serial)), named.file
        if request.value == packets.EXISTING:
            return Reply(request.op, errno.ENOENT), None
        if len(self._names) >= self._most_names:
            text = f"it keeps {self._most_names} names, which is the limit: shmtensor gc removes what the dead left"
            return Reply(request.op, errno.EMFILE, text=text.encode()), None
        # crash: share.opened
        self._serial = max(self._serial + 1, time.monotonic_ns())
        named = _sealed(beside, self._serial)
        # crash: share.sealed
        self._names[request.name] = named
        self._at_most += _nbytes(named.file)
        # crash: share.named
        return Reply(request.op, 0, (*named.status, named.serial)), None

    def _give(self, request: Request, beside: OpenFile) -> Reply:
        named = self._names.get(request.name)
        if named is not None and named.serial >= request.value:
            if _inode(named.file) == _inode(beside):
                return Reply(request.op)
            text = b"another segment has its name: what was open before goes on apart from it"
            return Reply(request.op, errno.ESTALE, text=text)
        given = self._names[request.name] = _sealed(beside, request.value)
        self._at_most += _nbytes(given.file)
        self._serial = max(self._serial, request.value)
        if named is not None:
            named.file.close()
        # crash: share.given
        return Reply(request.op)

    def _reserve(self, client: _Client, named: _Named, nbytes: int) -> Reply:
        client.granted = None
        if nbytes > self.limit - self._at_most or time.monotonic() - self._summed > _SUM_S:
            self._summed, self._at_most = time.monotonic(), self._used()
        if nbytes > self.limit - self._at_most:
            return Reply(Op.RESERVE, errno.ENOSPC, self._space(self._at_most))
        self._at_most += nbytes
        client.granted = (named, nbytes, _nbytes(named.file))
        return Reply(Op.RESERVE)

    def _is_awaiting(self) -> bool:
        self._awaited = {number for number in self._awaited if is_locked(self._locks.fd, 1 + number)}
        if not self._awaited:
            self._lacks = ""
        return bool(self._awaited)

    def _used(self) -> int:
        """What the kernel counts for all names, and what is being reserved and not there yet."""
        used = sum(_nbytes(named.file) for named in self._names.values())
        for client in self._clients.values():
            if client.granted is not None:
                named, nbytes, before = client.granted
                if named.file.fd >= 0:
                    used += max(0, nbytes - (_nbytes(named.file) - before))
        return used

    def _space(self, used: int) -> Space:
        pid = pid_of(next(iter(self._awaited))) if self._awaited else 0
        return Space(self.limit, used, len(self._names), self._most_names, len(self._awaited), pid)


_FULL: Final = (errno.EMFILE, errno.ENFILE)


def _answers(path: str) -> bool:
    """Whether a server listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.setblocking(False)
        try:
            connection.connect(path)
        except BlockingIOError:
            return True  # with too much to do
        except OSError:
            return False
        return True


def _has_unread(connected: socket.socket) -> bool:
    """Whether a reply on this connection was not read yet. Each may have a descriptor with it, and the kernel allows a
    user only so many that are on their way (`RLIMIT_NOFILE`)."""
    return any(fcntl.ioctl(connected, termios.TIOCOUTQ, bytes(4)))


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _has_file(request: Request) -> bool:
    """Whether a descriptor goes with a request."""
    return request.op == Op.GIVE or (request.op == Op.OPEN and request.value != packets.EXISTING)


def _nbytes(file: OpenFile) -> int:
    return 512 * os.fstat(file.fd).st_blocks


def _inode(file: OpenFile) -> tuple[int, int]:
    info = os.fstat(file.fd)
    return info.st_dev, info.st_ino


def _sealed(file: OpenFile, serial: int) -> _Named:
    """Check and seal the file that a client has passed, and open it anew, so that no client shares locks with the
    server.

    Raises `WireError` if it is not memory of this user that may grow and be written.
    """
    info = os.fstat(file.fd)
    try:
        seals = fcntl.fcntl(file.fd, _GET_SEALS)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
            raise WireError(f"a descriptor of something that is not memory of user {os.geteuid()}")
        if seals & (_GROW | _WRITE | _FUTURE_WRITE):
            raise WireError("memory that is sealed against growing or writing")
        if not seals & _SEAL:
            fcntl.fcntl(file.fd, _ADD_SEALS, _SHRINK | _SEAL)
        elif not seals & _SHRINK:
            raise WireError("memory that cannot be sealed against shrinking")
    except OSError as error:
        raise WireError(f"a descriptor of something that cannot be sealed: {error.strerror}") from None
    own = OpenFile()
    own.open(os.open, f"/proc/self/fd/{file.fd}", os.O_RDWR | os.O_CLOEXEC)
    return _Named(own, serial)


def default_limit() -> int:
    """Half of the memory of this machine, or of the control group of this process, bytes."""
    nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for version, group in groups_of("memory"):
        if version == 2:
            with contextlib.suppress(OSError, ValueError):
                nbytes = min(nbytes, int(read_text(group / "memory.max")))
    return nbytes // 2
