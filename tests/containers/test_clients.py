"""The clients of a segment server: who waits for one, what a fork leaves, what runs out."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import signal
import socket
import threading

import numpy as np
import pytest
from typer.testing import CliRunner

import shmtensor
from shmtensor.channel.names import parse_file
from shmtensor.memory import placement, segment, semaphores, served
from shmtensor.memory.locks import LockFile, locked_bytes
from shmtensor.memory.segment_server import SegmentServer
from shmtensor.memory.served import ID_END, Served

from ..commands import app
from ..faults.interrupts import each_boundary
from ..waiting import PATIENCE, wait_until
from .container import Member, Refused, names, nothing_left
from .servers import Server
from .test_server import connect, running

SEND = f"tx.send(np.full(100, n), timeout={PATIENCE})"
RECV = f"int(rx.recv(timeout={PATIENCE}).value[0])"
WAITS_FOR_EVER = (
    "from shmtensor.memory.served import Served; Served._ask.__kwdefaults__['patience'] = 1e6; "
    "from shmtensor.channel import membership; membership.LOCK_TIMEOUT = 1e6"
)
"""In a member: what waits for a server hangs without one, so that the test finds it."""


@pytest.fixture
def server(directory):
    with running(directory) as server:
        yield server


# --- who waits for a server


@pytest.mark.parametrize("pair", [("Publisher", "Subscriber"), ("Producer", "Consumer")], ids=lambda pair: pair[0])
def test_checks_for_the_dead_do_not_wait_for_a_server(directory, pair):
    """A receiver goes on with a living sender, and finds out that another one is dead, while there is no server."""
    make, take = pair
    server = Server(directory)
    with Member((), directory) as sender, Member((), directory) as receiver:
        receiver(f"rx = shmtensor.{take}('c')")
        victim = Member((), directory)
        for n, each in enumerate((sender, victim)):
            each(f"tx = shmtensor.{make}('c', slots=4, slot_bytes=4096)")
            each(f"n = {n}; {SEND}")
            assert receiver(RECV) == n
        receiver(WAITS_FOR_EVER)
        server.kill()
        victim.kill()
        with pytest.raises(Refused, match="TimedOut"):  # after some checks, each of which would have waited
            receiver("rx.recv(timeout=1)")
        assert receiver("rx.statistics().senders") == 1
        sender(f"n = 7; {SEND}")
        assert receiver(RECV) == 7
        assert receiver("rx.recv(timeout=0) if rx.statistics().behind else 'nothing'") == "nothing"

        server = Server(directory)
        kept = sorted(names(sender))
        with pytest.raises(Refused, match="TimedOut"):  # now the dead one is removed
            receiver("rx.recv(timeout=1)")
        assert len(names(sender)) < len(kept)
        sender("tx.close()")
        receiver("rx.close()")
        nothing_left(sender)
    server.close()


def test_a_sender_that_cannot_be_attached_yet_keeps_nobody_from_the_others(directory):
    server = Server(directory)
    with Member((), directory) as sender, Member((), directory) as late, Member((), directory) as receiver:
        receiver("rx = shmtensor.Subscriber('c')")
        sender("tx = shmtensor.Publisher('c', slots=4, slot_bytes=4096)")
        sender(f"n = 1; {SEND}")
        assert receiver(RECV) == 1
        late("tx = shmtensor.Publisher('c', slots=4, slot_bytes=4096)")  # the receiver has not seen it
        late(f"n = 2; {SEND}")
        sender(f"n = 3; {SEND}")
        receiver(WAITS_FOR_EVER)
        server.kill()
        assert receiver("int(rx.recv(timeout=0).value[0])") == 3
        with pytest.raises(Refused, match="TimedOut"):
            receiver("rx.recv(timeout=0.6)")
        server = Server(directory)
        assert receiver(RECV) == 2
        for each in (sender, late):
            each("tx.close()")
        receiver("rx.close()")
        nothing_left(sender)
    server.close()


def sender_of_one(directory):
    """A publisher that has sent one message."""
    member = Member((), directory)
    member("tx = shmtensor.Publisher('c', slots=4, slot_bytes=4096)")
    member(f"n = 1; {SEND}")
    return member


def test_it_is_no_end_of_the_stream_that_a_sender_cannot_be_attached_yet(directory):
    """It dies without a server; the next one is given its messages by another receiver."""
    server = Server(directory)
    with Member((), directory) as receiver, Member((), directory) as other:
        for each in (receiver, other):
            each("rx = shmtensor.Subscriber('c')")
        victim = sender_of_one(directory)
        assert other(RECV) == 1
        receiver(WAITS_FOR_EVER)
        server.kill()
        victim.kill()
        with pytest.raises(Refused, match="TimedOut"):
            receiver("rx.recv(timeout=1)")
        server = Server(directory)
        assert receiver(RECV) == 1
        for each in (receiver, other):
            with pytest.raises(Refused, match="EndOfStream"):
                each(RECV)
            each("rx.close()")
        nothing_left(other)
    server.close()


def test_a_task_that_receives_leaves_the_loop_to_others_without_a_server(directory):
    server = Server(directory)
    with Member((), directory) as receiver:
        receiver("rx = shmtensor.Subscriber('c')")
        victim = sender_of_one(directory)
        assert receiver(RECV) == 1
        receiver(WAITS_FOR_EVER)
        server.kill()
        victim.kill()
        with pytest.raises(Refused, match="EndOfStream"):
            receiver("import asyncio; asyncio.run(rx.arecv())")
        receiver("rx.close()")
    assert {*os.listdir(directory)} <= {"segments", "segments.lock"}


@pytest.fixture
def counted(monkeypatch):
    """The requests of this process, by operation. A server has a moment only to answer what is asked at once."""
    monkeypatch.setattr(served, "_AT_ONCE", 0.05)
    asked: list[int] = []
    real = Served._try

    def count(self, connection, packet, *args):
        asked.append(packet[10])
        return real(self, connection, packet, *args)

    monkeypatch.setattr(Served, "_try", count)
    return asked


def test_a_server_that_is_stopped_is_asked_once_by_a_clean_up(directory, channel, counted):
    """What it could not do is done by the next one that comes."""
    server = Server(directory)
    publisher = shmtensor.Publisher(channel, slots=2, slot_bytes=4096)
    publisher.send(np.arange(3))
    assert len(segment.listing()) == 4
    server.signal(signal.SIGSTOP)
    counted.clear()
    publisher.close()
    assert len(counted) == 1
    server.signal(signal.SIGCONT)
    assert len(segment.listing()) >= 3  # it may do what it was asked before, or not
    with shmtensor.Publisher(f"{channel}-other"):
        assert not [name for name in segment.listing() if parse_file(name)[0] == channel]
    assert segment.listing() == []
    server.close()


def test_a_name_that_cannot_be_removed_now_is_left_to_the_next_clean_up(server, channel, monkeypatch):
    """Not forgotten with the entry of its member: there is no descriptor for a socket, or the server awaits others."""
    publisher = shmtensor.Publisher(channel, slots=2, slot_bytes=4096)
    publisher.send(np.arange(3))
    before = segment.listing()
    real = Served._open

    def fail(self, *args):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Served, "_open", fail)
    publisher.close()
    monkeypatch.setattr(Served, "_open", real)
    assert segment.listing() == before
    with shmtensor.Publisher(f"{channel}-other"):
        pass
    assert segment.listing() == []


def test_gc_says_what_the_server_has_not_removed(server, monkeypatch):
    """It is no other user's. Who runs gc from a script runs it again."""
    segment.create(f"/shmtensor.dead,{1:016x},0", 4096, "free some").close()
    real = SegmentServer._answer

    def answer(self, client, request, beside):
        if request.op == served.Op.UNLINK:
            return served.Reply(request.op, errno.EAGAIN, self._space(0)), None
        return real(self, client, request, beside)

    monkeypatch.setattr(served, "_AT_ONCE", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(SegmentServer, "_answer", answer)
        done = CliRunner().invoke(app, ["gc"])
        assert done.exit_code == 1
        assert "the segment server has not answered: run gc again" in done.output
        assert "removed nothing" in done.output
        done = CliRunner().invoke(app, ["gc", "--json"])
        assert done.exit_code == 1
        assert len(json.loads(done.output)["failed"]) == 1
    done = CliRunner().invoke(app, ["gc"])
    assert done.exit_code == 0
    assert "removed 1 files" in done.output
    assert segment.listing() == []


# --- forks


@pytest.fixture
def grandchild():
    """Code that forks a child, which runs `child`, and forks a child of its own, which runs `grandchild`."""

    def code(child: str, grandchild: str) -> str:
        return (
            "import os, select\n"
            "ready, into = os.pipe()\n"
            "if not (pid := os.fork()):\n"
            "    try:\n"
            f"        {child}\n"
            "        if not os.fork():\n"
            f"            {grandchild}\n"
            "            os.write(into, b'%d ' % os.getpid())\n"
            "            select.select([], [], [])\n"
            "        select.select([], [], [])\n"
            "    finally:\n"
            "        os._exit(1)\n"
        )

    return code


def test_a_child_of_a_child_has_segments_of_its_own(directory, grandchild):
    """Its parent was a child that had some, too. A new server awaits each of the three, and is given all."""
    server = Server(directory)
    with Member((), directory) as member:
        member("tx = shmtensor.Publisher('p')")
        member(grandchild("mine = shmtensor.Publisher('child')", "own = shmtensor.Publisher('grandchild')"))
        last = int(member("os.read(ready, 100)")[2:-2])
        try:
            assert {f"shmtensor.{name}" for name in ("p", "child", "grandchild")} <= set(names(member))
            server.kill()
            server = Server(directory)
            assert "awaiting 3" in server.said
            assert {f"shmtensor.{name}" for name in ("p", "child", "grandchild")} <= set(names(member))
        finally:
            os.kill(last, signal.SIGKILL)
            member("os.kill(pid, 9); os.waitpid(pid, 0)[0] == pid")
        member("tx.close(); shmtensor.Publisher('q').close()")  # sweeps what the children have left
        nothing_left(member)
    server.close()


def test_a_forked_child_keeps_no_connection_to_the_server(server):
    """The server would take its parent for present, and its parent's reservations for wanted, as long as it lives."""
    segment.create("/shmtensor.c", 4096, "free some").close()
    with segment.attach("/shmtensor.c") as mine:
        place = placement.current()
        assert isinstance(place, Served)
        wait_until(lambda: any(client.is_present for client in list(server._clients.values())))
        with place.room("shmtensor.c", mine.fd, 4096, 4096):
            wait_until(lambda: all(each.fileno() >= 0 for each in place._connections) and len(place._connections) == 3)
            open_now = {os.readlink(f"/proc/self/fd/{each.fileno()}") for each in place._connections}
            assert len(open_now) == 3
            pid = os.fork()
            if not pid:
                found = set()
                for fd in os.listdir("/proc/self/fd"):
                    with contextlib.suppress(OSError):
                        found.add(os.readlink(f"/proc/self/fd/{fd}"))
                os._exit(len(found & open_now))
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    segment.unlink("/shmtensor.c")


def test_what_was_reserved_ends_although_a_child_has_a_copy_of_the_connection(server):
    """One that was forked just as it was closed: nobody knows its number any more."""
    segment.create("/shmtensor.c", 4096, "free some").close()
    before = segment.free_bytes()
    with segment.attach("/shmtensor.c") as mine, contextlib.ExitStack() as copies:
        with mine.place.room("shmtensor.c", mine.fd, 4096, 30 << 20):
            for each in list(mine.place._connections):
                if each.fileno() >= 0:
                    copies.callback(os.close, os.dup(each.fileno()))
            wait_until(lambda: segment.free_bytes() == before - (30 << 20))
        wait_until(lambda: segment.free_bytes() == before)
    segment.unlink("/shmtensor.c")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("when", ["received", "found"])
def test_a_child_keeps_nothing_that_another_thread_is_looking_at(server, monkeypatch, when):
    """It was passed the descriptor just now, or has it and not opened it yet."""
    segment.create("/shmtensor.c", 4096, "free some").close()
    part, name = (served, "receive") if when == "received" else (Served, "find")
    real, forked = getattr(part, name), []

    def fork_after(*args, **options):
        found = real(*args, **options)
        if threading.current_thread() is looking:
            pid = os.fork()
            if not pid:
                left = 255
                try:
                    left = len(open_segments("memfd:shmtensor.c"))
                finally:
                    os._exit(left)
            forked.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return found

    def look():
        with segment.look_at("/shmtensor.c", is_regular=True):
            pass

    kept = len(open_segments("memfd:shmtensor.c"))  # that of the server, which runs in this process
    looking = threading.Thread(target=look)
    monkeypatch.setattr(part, name, fork_after)
    looking.start()
    looking.join()
    monkeypatch.undo()
    assert forked
    assert forked[0] <= kept
    segment.unlink("/shmtensor.c")


def open_segments(name: str) -> list[str]:
    """The descriptors of this process that lead to a segment."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if name in os.readlink(f"/proc/self/fd/{fd}"):
                found.append(fd)
    return found


# --- the proof of life, and the thread that speaks for it


def followers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shmtensor-segments"]


@pytest.fixture
def locked(directory):
    """The bytes that processes have locked."""
    with contextlib.closing(LockFile(f"{directory}/segments.lock", os.O_CREAT)) as locks:
        yield lambda: locked_bytes(locks.fd, 1, 1 + ID_END)


def test_an_exception_at_any_point_leaves_no_proof_without_a_thread(directory, locked):
    """There is no server: a thread finds at once that nothing is held."""
    places = [Served(directory)]
    for _ in each_boundary(lambda: places[0]._be_present()):
        wait_until(lambda: not locked() and not followers())
        places[0] = Served(directory)


def test_a_signal_handler_at_any_point_leaves_one_proof(directory, locked):
    """It opens a segment where its process is just about to prove that it lives."""
    places = [Served(directory)]

    def come():
        places[0]._wanting[places[0]] = "shmtensor.c"
        places[0]._be_present()

    for attempt in each_boundary(come, act=lambda: places[0]._be_present()):
        assert len(locked()) == 1, attempt
        wait_until(lambda: len(followers()) == 1)
        places[0]._wanting.clear()
        wait_until(lambda: not locked() and not followers())
        places[0] = Served(directory)


@pytest.mark.parametrize("error", ["MemoryError()", "SystemExit()", "RuntimeError('x')"])
def test_whatever_its_thread_meets_a_process_gives_the_next_server_what_it_has(directory, error):
    """A server would wait for it, and all others for the server. What it would log may fail as well."""
    server = Server(directory)
    with Member((), directory) as member, Member((), directory) as other:
        member("tx = shmtensor.Publisher('c', slots=2, slot_bytes=4096)")
        before = sorted(names(other))
        member(
            "from shmtensor.memory import served\n"
            "class Log:\n"
            "    def log(self, *_): raise MemoryError\n"
            "def fail(self, *_):\n"
            "    served.Served._report = real\n"
            f"    raise {error}\n"
            "real, served.Served._report, served.log = served.Served._report, fail, Log()\n"
        )
        server.kill()
        server = Server(directory)
        assert sorted(names(other)) == before
        member("tx.close()")
        nothing_left(other)
    server.close()


def test_a_thread_that_has_died_is_started_again(server, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Served, "_follow", lambda self, follower: follower.release())
        made = segment.create("/shmtensor.c", 4096, "free some")
        wait_until(lambda: not followers())
    with made, segment.attach("/shmtensor.c"):
        wait_until(lambda: any(client.is_present for client in list(server._clients.values())))
    segment.unlink("/shmtensor.c")


def test_a_process_that_has_closed_everything_is_awaited_no_more(server, locked, monkeypatch):
    """So nobody waits for it if it is stopped."""
    monkeypatch.setattr(served, "_IDLE_S", 0.01, raising=False)
    with segment.create("/shmtensor.c", 4096, "free some"):
        assert len(locked()) == 1
    wait_until(lambda: not locked() and not followers())
    with segment.attach("/shmtensor.c"):  # and it may come again
        assert len(locked()) == 1
        wait_until(lambda: any(client.is_present for client in list(server._clients.values())))
    segment.unlink("/shmtensor.c")
    wait_until(lambda: not locked() and not followers())


def test_a_default_time_out_of_sockets_does_not_end_its_connections(server, monkeypatch):
    """With each of them it would give the server everything again: names of the dead that were removed, too."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(0.01)
    try:
        with segment.create("/shmtensor.c", 4096, "free some"):
            wait_until(lambda: any(client.is_present for client in list(server._clients.values())))
            ends = [each for each in list(placement.current()._connections) if each.fileno() >= 0]
            assert [end.gettimeout() for end in ends] == [None, None]
    finally:
        socket.setdefaulttimeout(before)
    segment.unlink("/shmtensor.c")


def test_no_exception_is_lost_as_a_segment_is_found_and_opened(server):
    """Not in a finalizer of an open file, of which some die at each request."""

    def use():
        with segment.attach("/shmtensor.c"):
            pass
        with segment.look_at("/shmtensor.c"):
            pass

    with segment.create("/shmtensor.c", 4096, "free some"):  # so that it is present, and its lock file open, throughout
        lost = [attempt.at for attempt in each_boundary(use) if attempt.swallowed]
    assert not lost
    segment.unlink("/shmtensor.c")


def test_names_that_come_back_end_with_the_next_join(directory, channel):
    """A receiver gives another server the ring of a sender that has closed meanwhile: no member owns its names then."""
    with Member((), directory) as receiver:
        with running(directory):
            receiver(f"rx = shmtensor.Subscriber('{channel}')")
            with shmtensor.Publisher(channel) as sender:
                sender.send(np.arange(3))
                receiver(f"view = rx.recv(timeout={PATIENCE}).value")
        with running(directory):
            receiver("del view; rx.close()")
            assert [name for name in segment.listing() if parse_file(name)[1]]
            shmtensor.Publisher(channel).close()
            assert segment.listing() == []


# --- what runs out


def test_a_process_that_may_open_no_more_files_follows_the_next_server(directory):
    """By a socket that it has made before. The server after that one it follows as soon as it may."""
    server = Server(directory)
    with Member((), directory) as member:
        member("tx = shmtensor.Publisher('c', slots=2, slot_bytes=4096)")
        member("import logging, pathlib, resource, threading")
        member(
            "tried = threading.Event(); handler = logging.Handler(); log = logging.getLogger('shmtensor.memory')\n"
            "handler.emit = lambda it: tried.set() if 'Too many open files' in it.getMessage() else None\n"
            "log.addHandler(handler)"
        )
        before = sorted(names(member))
        member("limits = resource.getrlimit(resource.RLIMIT_NOFILE)")
        member("links = lambda: [it.readlink() for it in pathlib.Path('/proc/self/fd').iterdir() if it.is_symlink()]")
        # the connection that stands, and the socket for the next one
        wait_until(lambda: member("sum(str(link).startswith('socket') for link in links())") == 2)
        member("resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))")
        server.kill()
        server = Server(directory)
        with Member((), directory) as other:
            assert sorted(names(other)) == before
        assert not member("tried.is_set()")
        server.kill()
        assert member(f"tried.wait({PATIENCE})")
        server = Server(directory)
        assert "awaiting 1" in server.said
        member("resource.setrlimit(resource.RLIMIT_NOFILE, limits)")
        assert sorted(names(member)) == before
        member("tx.close()")
        nothing_left(member)
    server.close()


def test_a_process_that_can_start_no_thread_holds_nothing(server, directory, monkeypatch):
    """Else the next server would await it in vain."""

    def fail(*_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(served._thread, "start_new_thread", fail)
        with pytest.raises(shmtensor.ResourceError, match=r"can't start new thread.*ulimit -u") as found:
            segment.create("/shmtensor.c", 4096, "free some")
    assert found.value.errno == errno.EAGAIN
    with contextlib.closing(LockFile(f"{directory}/segments.lock")) as locks:
        assert locked_bytes(locks.fd, 1, 1 + ID_END) == set()
        with segment.create("/shmtensor.c", 4096, "free some"):
            assert len(locked_bytes(locks.fd, 1, 1 + ID_END)) == 1
    segment.unlink("/shmtensor.c")


@pytest.mark.parametrize(("code", "remedy"), [(errno.EMFILE, "ulimit -n"), (errno.ENOMEM, "ulimit -v")])
def test_a_semaphore_that_cannot_be_opened_or_mapped_is_a_clear_error(server, monkeypatch, code, remedy):
    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    semaphores.create_semaphore("/shmtensor.s", 0)
    with monkeypatch.context() as patch:
        part, name = (semaphores, "Descriptor") if code == errno.EMFILE else (semaphores.SharedMap, "of_segment")
        patch.setattr(part, name, fail)
        with pytest.raises(shmtensor.ResourceError, match=rf"cannot open semaphore /shmtensor\.s.*{remedy}"):
            semaphores.Sleeper("/shmtensor.s", create=False)
    semaphores.unlink_semaphore("/shmtensor.s")
    with pytest.raises(FileNotFoundError):
        semaphores.Sleeper("/shmtensor.s", create=False)


def test_a_directory_that_was_removed_is_named(directory, monkeypatch):
    """Not /dev/shm, which has no part in it."""
    os.rmdir(directory)
    monkeypatch.setenv("SHMTENSOR_SEGMENTS", "server")
    for make in (lambda: segment.create("/shmtensor.c", 4096, "free some"), lambda: SegmentServer(directory)):
        with pytest.raises(shmtensor.ResourceError, match=r"segments\.lock: No such file.*make directory /") as found:
            make()
        assert "/dev/shm" not in str(found.value)
    os.mkdir(directory)


def test_a_directory_whose_file_system_is_full_is_named(directory, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("shmtensor.memory.segment_server.LockFile", fail)
    monkeypatch.setattr(served, "LockFile", fail)
    monkeypatch.setenv("SHMTENSOR_SEGMENTS", "server")
    for make in (lambda: segment.create("/shmtensor.c", 4096, "free some"), lambda: SegmentServer(directory)):
        with pytest.raises(shmtensor.ResourceError, match=r"segments\.lock: No space.*file system of /") as found:
            make()
        assert "/dev/shm" not in str(found.value)


def test_a_server_that_may_open_too_few_files_says_so_while_it_is_awaiting(directory):
    server = Server(directory)
    with Member((), directory) as member, Member((), directory) as other:
        member("import shmtensor.memory.segment as segment")
        member("held = [segment.create(f'/shmtensor.c{n}', 4096, 'free some') for n in range(100)]")
        other("from shmtensor.memory.served import Served; Served._ask.__kwdefaults__['patience'] = 0.5")
        server.kill()
        server = Server(directory, files=80)
        assert "may open too few files (80)" in server.next_line()
        with pytest.raises(Refused, match=r"does not serve: it may open too few files \(80\).*ulimit -n"):
            other("tx = shmtensor.Publisher('d')")
        server.stop()
        server = Server(directory)
        assert len(names(member)) == 100
        member("for n in range(100): segment.unlink(f'/shmtensor.c{n}')")
        member("del held")
        nothing_left(member)
    server.close()


class _Connection:
    """One on which a packet came whose descriptor the kernel has kept back."""

    def recvmsg(self, *_):
        return b"a packet", [], socket.MSG_CTRUNC, None


def test_a_descriptor_that_may_not_be_passed(monkeypatch):
    """By SELinux, say. The kernel shows no other difference to a process that may open no more."""
    with pytest.raises(PermissionError, match="security labels"):
        served.receive(_Connection(), 100)
    monkeypatch.setattr("shmtensor.memory.shortage.may_open", lambda count: False)
    with pytest.raises(OSError, match="Too many open files"):
        served.receive(_Connection(), 100)


def test_a_refusal_by_security_labels_reaches_the_user(server, monkeypatch):
    def refuse(connection, most):
        connection.recv(most)  # as the kernel: who ends a connection with a packet unread takes the reply back
        raise PermissionError(errno.EACCES, "security labels")

    with monkeypatch.context() as patch:
        patch.setattr("shmtensor.memory.segment_server.receive", refuse)  # the server is passed none
        with pytest.raises(shmtensor.ResourceError, match=r"the segment server in .*: security labels"):
            segment.create("/shmtensor.c", 4096, "free some")
    with monkeypatch.context() as patch:
        patch.setattr(served, "receive", refuse)
        with pytest.raises(shmtensor.ResourceError, match=r"the segment server in .*: security labels"):
            segment.attach("/shmtensor.c")


# --- a server that fails


def test_a_request_that_fails_in_the_server_ends_its_connection_alone(server, directory, monkeypatch, caplog):
    monkeypatch.setattr(SegmentServer, "_in_order", lambda self: 1 // 0)
    with connect(directory) as connection:
        connection.send(served.Request(served.Op.LIST).pack())
        assert connection.recv(1000) == b""
    monkeypatch.undo()
    assert [record.levelno for record in caplog.records if "has failed" in record.message] == [logging.ERROR]


@pytest.mark.parametrize("fails", ["epoll", "rename"])
def test_a_server_that_does_not_come_up_leaves_no_socket(directory, monkeypatch, fails):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    where = "shmtensor.memory.segment_server."
    monkeypatch.setattr(f"{where}select.epoll" if fails == "epoll" else f"{where}os.rename", fail)
    with pytest.raises(shmtensor.ResourceError, match=r"cannot make socket /.*: the file system of /.* is full"):
        SegmentServer(directory)
    monkeypatch.undo()
    assert os.listdir(directory) == ["segments.lock"]


def test_the_lock_file_is_removed_while_it_is_in_use(server, directory):
    """No server starts beside the living one, and each process locks the new file at the next segment that it opens."""
    with segment.create("/shmtensor.c", 4096, "free some"):
        wait_until(lambda: any(client.is_present for client in list(server._clients.values())))
        os.unlink(f"{directory}/segments.lock")
        with pytest.raises(shmtensor.ResourceError, match=r"segments\.lock was removed: end it first"):
            SegmentServer(directory)
        with contextlib.closing(LockFile(f"{directory}/segments.lock")) as locks:
            assert locked_bytes(locks.fd, 1, 1 + ID_END) == set()
            with segment.attach("/shmtensor.c"):
                assert len(locked_bytes(locks.fd, 1, 1 + ID_END)) == 1
    segment.unlink("/shmtensor.c")
