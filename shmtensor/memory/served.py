"""The place of names that a segment server keeps, as its clients see it. docs/internals/segment-server.md.

Each request is a connection of its own, so that no state is shared by threads, with a forked child, or with a signal
handler that interrupts a request.

What this process has mapped it holds: a descriptor for each, which a new server is given when the old one has died. A
thread waits for that. There is one as soon as something is held, and a lock that proves that this process lives.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import logging
import os
import secrets
import select
import socket
import stat
import struct
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from ..errors import ResourceError, WireError
from ..shielded import OwnThread
from ..wire import segment_packets as packets
from ..wire.segment_packets import LOCKS, SOCKET, Op, Reply, Request, Space
from . import lifecycle, shortage
from .descriptors import Found, OpenFile, empty_all_of, unopened
from .locks import LockFile
from .shortage import Unserved

log = logging.getLogger("shmtensor.memory")

PATIENCE: Final = 10.0
"""Seconds for which a request waits for a server, and for the processes that it awaits."""
_AT_ONCE: Final = 1.0
"""Seconds for which a server may take to answer what is asked at once; the same for `unlink` and `exists`, in all."""
_PAUSES: Final = (0.002, 0.01, 0.05, 0.25)
_IDLE_S: Final = 5.0
"""Seconds after which a process that follows a server looks whether it still holds anything."""
_SPACE_S: Final = 0.05
"""Seconds for which the room of a server is taken to be as it was."""
_NOEXEC: Final = 8  # MFD_NOEXEC_SEAL
_ANSWERS: Final = (0, errno.ENOENT, errno.EEXIST, errno.ENOSPC)
"""Errors of replies that are answers, beside those that say to ask later."""
_NONE, _LATER = errno.ECONNREFUSED, errno.EAGAIN
_ABSENT: Final = (errno.ECONNREFUSED, errno.ENOENT)
"""Errors of a connection: there is no server."""
_BROKEN: Final = (errno.ECONNRESET, errno.EPIPE, errno.EAGAIN)
"""Errors of a connection: there was a server, and there may be one."""
_ANCILLARY: Final = socket.CMSG_SPACE(4 * 4)
_PID_BITS: Final = 22
_RANDOM_BITS: Final = 40
ID_END: Final = 1 << (_PID_BITS + _RANDOM_BITS)
"""The numbers of processes are below this one: their lock is on the byte after it."""


def new_id() -> int:
    """A number for this process: its pid, in its namespace, and random bits."""
    return (os.getpid() & ((1 << _PID_BITS) - 1)) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)


def pid_of(number: int) -> int:
    """The pid in the number of a process."""
    return number >> _RANDOM_BITS


class Hold:
    """A descriptor of a segment that this process has mapped, or is about to map. Owns it. Without a name: it only
    looks at it."""

    __slots__ = ("__weakref__", "file", "name", "serial")

    def __init__(self, file: OpenFile) -> None:
        self.file, self.name, self.serial = file, "", 0


class _Proof(NamedTuple):
    """That this process lives: the byte of its number is locked."""

    locks: LockFile
    number: int


class Served:
    """The names of the segment server of a directory."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._socket, self._lock_path = f"{directory}/{SOCKET}", f"{directory}/{LOCKS}"
        self._begin()
        lifecycle.track(self, type(self).drop_in_child)

    def _begin(self) -> None:
        self._holds: dict[weakref.ref[Hold], None] = {}
        self._attempts: set[object] = set()  # requests, from before they are sent until what came back is held
        self._wanting: dict[object, str] = {}  # calls that will hold something, and its name
        self._connections: set[socket.SocketType] = set()  # that are open, or about to be
        self._hurried: dict[object, int] = {}  # calls of `at_once`, and their threads
        self._silent_until = 0.0  # what is asked at once is not asked before: the server did not answer
        self._is_reported = False  # that there is none, until one answers
        self._follower: _thread.LockType | None = None  # the thread's, locked as long as it runs
        self._proof: _Proof | None = None  # only while there is a follower: every later server waits for its word
        self._presence = threading.RLock()  # of both; a signal handler may come in between
        self._room: tuple[float, Space] | None = None

    def drop_in_child(self) -> None:
        """In a forked child: what it holds is its parent's to give back, and its thread is not here."""
        holds, proof = self._held(), self._proof
        for connection in list(self._connections):
            connection.close()
        for hold in holds:
            hold.file.close()
        for name in self._wanting.values():  # another thread has just been passed it, and nobody has it yet
            empty_all_of(f"/memfd:{name}")
        if proof is not None:
            proof.locks.close()
        self._begin()

    def __str__(self) -> str:
        return f"the segment server in {self.directory}"

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        call = object()
        try:
            try:
                self._hurried[call] = threading.get_ident()
                yield
            finally:
                self._hurried.pop(call, None)
        except BaseException:
            self._hurried.pop(call, None)
            raise

    # --- names

    def find(self, name: str, flags: int, *, held: bool = True) -> Found:
        how = packets.EITHER if flags & os.O_CREAT else packets.EXISTING
        if flags & os.O_EXCL:
            how = packets.EXCLUSIVE
        made, wanting = OpenFile(), object()
        try:
            self._wanting[wanting] = name
            if held:
                self._be_present()
            if how != packets.EXISTING:
                _make_memory(made, name)
            reply, found = self._ask(Request(Op.OPEN, name, how), made, hold=name if held else "")
        finally:
            self._wanting.pop(wanting, None)
        if reply.error:
            raise OSError(reply.error, os.strerror(reply.error), self.path(name))
        more = flags & ~(os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        return Found(f"/proc/self/fd/{found.file.fd}", more, f"/memfd:{name}", found)

    def status(self, name: str) -> os.stat_result | None:
        reply, _ = self._ask(Request(Op.STATUS, name))
        return None if reply.error else packets.as_stat(reply.status, os.geteuid())

    def scan(self) -> Iterator[tuple[str, os.stat_result | None]]:
        after = ""
        while True:
            reply, _ = self._ask(Request(Op.LIST, after))
            found = list(packets.listing(reply.text))
            if not found:
                return
            for name, status in found:
                yield name, packets.as_stat(status, os.geteuid())
            after = found[-1][0]

    def listing(self) -> list[str]:
        return [name for name, _ in self.scan()]

    def exists(self, name: str) -> bool:
        try:
            reply, _ = self._ask(Request(Op.STATUS, name), patience=_AT_ONCE, absent=False)
        except ResourceError:
            return False
        return not reply.error

    def unlink(self, name: str) -> bool:
        for hold in self._held():
            if hold.name == name:
                hold.name = ""  # not for another server
        try:
            self._ask(Request(Op.UNLINK, name), patience=_AT_ONCE, absent=False)
        except ResourceError as error:
            return error.errno == _NONE  # the name has ended with the server
        return True

    # --- room

    @contextlib.contextmanager
    def room(self, name: str, fd: int, start: int, nbytes: int) -> Iterator[None]:
        info = os.fstat(fd)
        if 512 * info.st_blocks >= max(start + nbytes, info.st_size):
            yield  # every page of it is there
            return
        connection = unopened()
        try:
            self._room = None
            reply, _ = self._ask(Request(Op.RESERVE, name, nbytes), connection=connection)
            if reply.error:
                raise OSError(reply.error, os.strerror(reply.error), self.path(name))
            yield
            self._close(connection)
        except BaseException:
            self._close(connection)
            raise
        finally:
            self._room = None

    def free_bytes(self) -> int:
        space = self.space()
        return max(0, space.limit - space.used)

    def total_bytes(self) -> int:
        return self.space().limit

    def space(self, *, patience: float = PATIENCE) -> Space:
        """The room of the server, as it was within the last 50 ms."""
        now = time.monotonic()
        known = self._room
        if known is None or now - known[0] > _SPACE_S:
            reply, _ = self._ask(Request(Op.SPACE), patience=patience)
            known = self._room = (now, reply.space)
        return known[1]

    def path(self, name: str) -> str:
        return f"{self._socket}:{name}"

    def identity(self) -> str:
        info = os.stat(self.directory)
        return f"{info.st_dev}:{info.st_ino}"

    def more_room(self) -> str:
        return f"start the segment server with a larger limit (shmtensor share {self.directory} --limit SIZE)"

    # --- requests

    def _ask(
        self,
        request: Request,
        file: OpenFile | None = None,
        *,
        hold: str | None = None,
        patience: float = PATIENCE,
        absent: bool = True,
        connection: socket.SocketType | None = None,
    ) -> tuple[Reply, Hold]:
        """Send a request, again and again while there is no server or it awaits others. The reply, and what came
        with it.

        hold:       the name under which what comes is given to another server; empty: it is only closed in children
        patience:   seconds until `ResourceError` is raised; within `at_once`, there is one try, then `Unserved`
        absent:     whether to wait for a server where there is none
        connection: used for it, and left open; the caller's to close
        """
        hurried = threading.get_ident() in list(self._hurried.values())
        if (hurried or not absent) and time.monotonic() < self._silent_until:
            raise self._failure(Reply(0, errno.ETIMEDOUT, text=b"it did not answer a moment ago"), hurried)
        packet, deadline, tries = request.pack(), time.monotonic() + (0 if hurried else patience), 0
        used = unopened() if connection is None else connection
        try:
            while True:
                reply, found = self._attempt(used, packet, file, deadline, hold=hold)
                if reply.error not in (_NONE, _LATER, errno.ETIMEDOUT):
                    break
                self._close(used)
                if time.monotonic() >= deadline or (reply.error == _NONE and not absent):
                    raise self._failure(reply, hurried)
                time.sleep(_PAUSES[min(tries, len(_PAUSES) - 1)])
                tries += 1
            if connection is None:
                self._close(used)
        except BaseException:
            self._close(used)
            raise
        self._silent_until, self._is_reported = 0.0, False
        if reply.error not in _ANSWERS:
            raise ResourceError(reply.error, f"{self}: {reply.text.decode(errors='replace')}")
        return reply, found

    def _failure(self, reply: Reply, hurried: bool) -> ResourceError:
        text = f"{self} does not serve: {_reason(reply)}"
        if hurried and not self._is_reported:  # who asks at once goes on without the answer
            self._is_reported = True
            log.warning("%s", text)
        return (Unserved if hurried else ResourceError)(reply.error, text)

    def _attempt(
        self, connection: socket.SocketType, packet: bytes, file: OpenFile | None, deadline: float, *, hold: str | None
    ) -> tuple[Reply, Hold]:
        """The reply, and what came with it, held unless `hold` is None. If no server replies: what is the matter.

        An exception of a signal handler may come anywhere: what is undone is undone twice.
        """
        attempt = object()
        try:
            try:
                self._attempts.add(attempt)
                reply, found = self._try(connection, packet, file, deadline)
                if hold is not None and not reply.error:
                    found.name, found.serial = hold, reply.serial
                    self._holds[weakref.ref(found, self._holds.pop)] = None
                    # crash: served.held
                return reply, found
            except OSError as error:
                if not isinstance(error, ResourceError) and error.errno in _ABSENT:
                    ended = error.errno == errno.ECONNREFUSED  # its socket is there
                    why = "it has ended: start it again" if ended else "there is none: is it mounted? Start it"
                    why = f"{why} with shmtensor share {self.directory}"
                    return Reply(0, _NONE, text=why.encode()), Hold(OpenFile())
                if not isinstance(error, ResourceError) and error.errno in _BROKEN:
                    return Reply(0, _LATER, text=b"it has ended, or has too many connections"), Hold(OpenFile())
                raise
            finally:
                self._attempts.discard(attempt)
        except BaseException:
            self._attempts.discard(attempt)
            self._close(connection)
            raise

    def _try(
        self, connection: socket.SocketType, packet: bytes, file: OpenFile | None, deadline: float
    ) -> tuple[Reply, Hold]:
        """One try. What comes with the reply is the descriptor beside it, or `file`, if the server has taken that."""
        try:
            self._open(connection, socket.SOCK_NONBLOCK)
        except OSError as error:
            raise shortage.explain(error, f"cannot make a socket to ask {self}") from None
        connection.connect(self._socket)
        connection.sendmsg([packet], _beside(file))
        # crash: served.asked
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        if not poll.poll(max(_AT_ONCE, deadline - time.monotonic()) * 1000):
            self._silent_until = time.monotonic() + PATIENCE
            text = b"it does not answer: it is probably stopped (SIGSTOP, a debugger): continue it, or start it again"
            return Reply(0, errno.ETIMEDOUT, text=text), Hold(OpenFile())
        reply, received = self._receive(connection)
        return reply, Hold(received if received.fd >= 0 or file is None else file)

    def _open(self, connection: socket.SocketType, flags: int = 0) -> None:
        """Make a socket of it. It is recorded before, so that a forked child closes its copy."""
        self._connections.add(connection)
        connection.__init__(socket.AF_UNIX, socket.SOCK_SEQPACKET | flags)  # type: ignore[misc]

    def _close(self, connection: socket.SocketType) -> None:
        """Ended before it is closed: a child that another thread forks meanwhile has a copy, and no number of it."""
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()
        self._connections.discard(connection)

    def _receive(self, connection: socket.SocketType) -> tuple[Reply, OpenFile]:
        """Raises `ConnectionResetError` if the server has ended, `ResourceError` if it is another version's."""
        try:
            data, file = receive(connection, packets.MOST)
            if not data:
                raise ConnectionResetError(errno.ECONNRESET, "the server has ended")
            return Reply.unpack(data), file
        except WireError as error:
            raise ResourceError(errno.EPROTO, f"{self}: {error}: use one version of shmtensor everywhere") from None
        except PermissionError as error:
            raise ResourceError(errno.EACCES, f"{self}: {error.strerror}") from None

    # --- what this process holds, and gives to another server

    def _held(self) -> list[Hold]:
        return [hold for reference in list(self._holds) if (hold := reference()) is not None]

    def _be_present(self) -> None:
        """Follow the server, and prove that this process lives, from now on. Called while `_wanting` has something.

        In this order, so that no byte is locked without a thread, wherever an exception comes. Raises `ResourceError`
        if either cannot be: then it proves nothing.
        """
        with self._presence:
            follower = self._follower
            if follower is None or not follower.locked():
                self._drop_proof()
                if not self._start_follower(follower):
                    return
            self._prove()

    def _start_follower(self, before: _thread.LockType | None) -> bool:
        """Start the thread, in place of `before`, which has died. False at the end of the interpreter, where none can
        be started: the process ends, and with it what it holds."""
        follower = _thread.allocate_lock()
        follower.acquire()
        try:
            _thread.start_new_thread(self._begin_to_follow, (follower,))  # one C call
        except RuntimeError as error:
            if sys.is_finalizing() or "shutdown" in str(error):  # Python 3.12 says so before it is finalizing
                return False
            raise ResourceError(
                errno.EAGAIN,
                f"{self} needs a thread in each process that has segments: {error}: this process, or its "
                "container, may have no more of them: raise ulimit -u, or pids.max (containers: --pids-limit)",
            ) from None
        if self._follower is before:  # else a signal handler has started one
            self._follower = follower
        return True

    def _prove(self) -> int:
        """Lock a byte for this process, or again if the file was removed. Returns its number."""
        with self._presence:
            before = self._proof
            if before is not None and before.locks.is_at(self._lock_path):
                return before.number
            try:
                made = _Proof(LockFile(self._lock_path, os.O_CREAT), new_id())
            except OSError as error:
                raise shortage.explain_file(error, self._lock_path) from None
            if not made.locks.try_exclusive(1 + made.number):
                raise ResourceError(errno.EAGAIN, f"{self}: {self._lock_path} is locked by another program")
            if self._proof is before:
                self._proof = made
                if before is not None:
                    before.locks.close()
                return made.number
            made.locks.close()  # a signal handler has come in between
            return self._prove()

    def _drop_proof(self) -> None:
        proof, self._proof = self._proof, None
        if proof is not None:
            proof.locks.close()

    def _is_over(self, follower: _thread.LockType) -> bool:
        """In the thread: whether this process holds nothing and wants nothing, or another thread follows."""
        with self._presence:
            if self._follower is not follower:
                return True
            if self._held() or self._wanting:
                return False
            self._drop_proof()
            self._follower = None
            return True

    def _begin_to_follow(self, follower: _thread.LockType) -> None:
        """In a thread that was started by one C call: start the one that `threading` knows."""
        try:
            OwnThread(target=self._follow, args=(follower,), name="shmtensor-segments", daemon=True).start()
        except Exception:  # for want of threads or memory; this one will do
            self._follow(follower)

    def _follow(self, follower: _thread.LockType) -> None:
        """Follow the servers in a thread, until this process holds no segment and asks for none. Nothing else ends
        it, since the next server waits for its report."""
        ends = [unopened(), unopened()]
        try:
            while True:
                try:
                    self._follow_servers(follower, ends)
                    return
                except BaseException:  # such as for want of memory, which a line in the log needs as well
                    time.sleep(_PAUSES[-1])
        finally:
            for each in ends:
                self._close(each)
            follower.release()

    def _follow_servers(self, follower: _thread.LockType, ends: list[socket.SocketType]) -> None:
        """Report to the server, and, when it has ended, to the next one, with all that this process holds.

        ends: the connection, and the socket for the next one, which is made beforehand: this process may then have as
        many open files as it may have
        """
        tries, is_told = 0, False
        while True:
            if self._is_over(follower):
                return
            connection, is_connected = ends[0], False
            try:
                self._open_end(connection)
                connection.connect(self._socket)
                is_connected = True
                # what the server before this one has answered is held first
                answered = set(self._attempts)
                while answered & self._attempts:
                    time.sleep(_PAUSES[0])
                number = self._prove()  # again, if the file was removed: the server after this one looks at the new one
                with contextlib.suppress(OSError):
                    self._open_end(ends[1])
                self._report(connection, number)
                tries, is_told = 0, False
                while not _has_ended(connection):
                    if self._is_over(follower):
                        return
            except Exception as error:  # whatever it is, the server waits for the next try
                is_told = self._tell(error, is_told)
            finally:
                if is_connected:
                    self._close(connection)
                    ends.reverse()
            time.sleep(_PAUSES[min(tries, len(_PAUSES) - 1)])
            tries += 1

    def _tell(self, error: Exception, is_told: bool) -> bool:
        """Log why the server was not followed; an error that will not pass by itself is logged once. Returns whether it
        has been logged."""
        stays = not isinstance(error, OSError) or error.errno in (errno.EMFILE, errno.ENFILE)
        log.log(logging.WARNING if stays and not is_told else logging.DEBUG, "%s: %s", self, str(error) or repr(error))
        return is_told or stays

    def _open_end(self, end: socket.SocketType) -> None:
        if end.fileno() < 0:
            self._open(end)
        end.setblocking(True)  # whatever `socket.setdefaulttimeout` says

    def _report(self, connection: socket.SocketType, number: int) -> None:
        for hold in self._held():
            if hold.name:
                connection.sendmsg([Request(Op.GIVE, hold.name, hold.serial).pack()], _beside(hold.file))
                reply, _ = self._receive(connection)
                if reply.error == errno.ESTALE:
                    log.warning("%s has not taken %s: %s", self, hold.name, reply.text.decode(errors="replace"))
                elif reply.error:
                    raise OSError(reply.error, f"it has not taken {hold.name}: {reply.text.decode(errors='replace')}")
        connection.sendmsg([Request(Op.PRESENT, value=number).pack()])
        self._receive(connection)


def _has_ended(connection: socket.SocketType) -> bool:
    """Whether the server ends a connection within some seconds. Not by `poll(2)`, nor by a time-out of Python's, which
    is that: it fails where a process may open no files at all."""
    patience = struct.pack("ll", int(_IDLE_S), int(_IDLE_S % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
    try:
        connection.recv(1)
    except BlockingIOError:
        return False
    return True


def _reason(reply: Reply) -> str:
    """Why a server does not serve, as its reply says."""
    if reply.text:
        return reply.text.decode(errors="replace")
    space = reply.space
    return (
        f"it waits for {space.awaited} processes that have segments of the server before it, such as the one with pid "
        f"{space.pid} in its container: that is probably stopped, or may open no more files: continue it or kill it"
    )


def _make_memory(file: OpenFile, name: str) -> None:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        try:
            file.open(os.memfd_create, name, flags | _NOEXEC)
        except OSError as error:
            if error.errno != errno.EINVAL:  # Linux before 6.3
                raise
            file.open(os.memfd_create, name, flags)
        os.fchmod(file.fd, 0o600)
    except OSError as error:
        raise shortage.explain(error, f"cannot make memory for segment {name}") from None


def _beside(file: OpenFile | None) -> list[tuple[int, int, Any]]:
    """What goes with a packet: a descriptor, or none."""
    if file is None or file.fd < 0:
        return []
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", file.fd))]


def receive(connection: socket.SocketType, most: int) -> tuple[bytes, OpenFile]:
    """A packet of at most `most` bytes, and the descriptor beside it, if there is one. No bytes: the connection has
    ended.

    Raises `WireError` for a longer packet and for any other descriptors, `OSError` (`EMFILE`) if this process may open
    no more, `PermissionError` if it may not be passed any, `BlockingIOError` if there is no packet yet.
    """
    received: list[Any] = []
    file, opened = OpenFile(), None
    try:
        received.extend(map(connection.recvmsg, (most + 1,), (_ANCILLARY,), (socket.MSG_CMSG_CLOEXEC,)))
        opened = _passed(received)
        data, _, flags, _ = received[0]
        if flags & socket.MSG_CTRUNC and not opened:
            raise _not_passed()
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(data) > most or len(opened) > 1:
            raise WireError(f"a packet of {len(data)} bytes with {len(opened)} descriptors")
        if opened:
            if not stat.S_ISREG(os.fstat(opened[0]).st_mode):
                raise WireError("a descriptor of something that is not memory")
            file.open(opened.pop, 0)  # taken from the list and recorded in one C call
        return data, file
    except BaseException:
        left = _passed(received) if opened is None else opened
        while left:
            os.close(left.pop())
        raise


def _not_passed() -> OSError:
    """Why the kernel has kept a descriptor back: it says no more than that."""
    if not shortage.may_open(1):
        return OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return PermissionError(
        errno.EACCES,
        "the kernel refuses to pass segments between these processes, probably since their security labels differ "
        "(SELinux): start all containers with one label (--security-opt label=level:...)",
    )


def _passed(received: list[Any]) -> list[int]:
    """The descriptors beside a packet, if one was received."""
    found: list[int] = []
    for level, kind, raw in received[0][1] if received else ():
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found += struct.unpack(f"{len(raw) // 4}i", raw[: len(raw) // 4 * 4])
    return found
