"""The segment server itself: hostile and broken clients, limits, seals; and how a process finds its place of names."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import select
import shutil
import signal
import socket
import struct
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shmtensor
from shmtensor.errors import WireError
from shmtensor.memory import placement, segment
from shmtensor.memory.locks import LockFile
from shmtensor.memory.segment_server import SegmentServer
from shmtensor.memory.served import PATIENCE as WAITS
from shmtensor.memory.served import Served, new_id, pid_of
from shmtensor.wire import segment_packets as packets
from shmtensor.wire.segment_packets import Op, Reply, Request, Space, Status

from ..conftest import descriptors
from ..waiting import PATIENCE, wait_until
from .container import Member, nothing_left
from .servers import Server

SEALS = 1034  # F_GET_SEALS
ADD_SEALS = 1033
SHRINK, GROW, WRITE, SEAL = 2, 4, 8, 1


@contextlib.contextmanager
def running(directory, **options):
    """A server in a thread."""
    with SegmentServer(directory, **{"limit": "64MiB", **options}) as server:
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            yield server
        finally:
            server.stop()
            thread.join(PATIENCE)
            assert not thread.is_alive()


@pytest.fixture
def server(directory):
    with running(directory) as server:
        yield server


def connect(directory) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(PATIENCE)
    connection.connect(f"{directory}/segments")
    return connection


def ask(directory, packet: bytes, *fds: int) -> tuple[Reply, list[int]]:
    """One packet on a connection of its own."""
    with connect(directory) as connection:
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
        connection.sendmsg([packet], beside)
        data, found, _, _ = connection.recvmsg(packets.MOST, socket.CMSG_SPACE(64))
        return Reply.unpack(data), [number for _, _, raw in found for number in struct.unpack("i", raw)]


def is_serving(directory) -> bool:
    return segment.status("/shmtensor.no") is None and ask(directory, Request(Op.SPACE).pack())[0].error == 0


@contextlib.contextmanager
def memory(*seals: int, flags: int = os.MFD_ALLOW_SEALING):
    fd = os.memfd_create("shmtensor.x", flags)
    try:
        for seal in seals:
            fcntl.fcntl(fd, ADD_SEALS, seal)
        yield fd
    finally:
        os.close(fd)


# --- packets


@given(st.binary(max_size=200))
def test_bytes_that_are_no_packet_are_refused(data):
    for kind in (Request, Reply):
        with contextlib.suppress(WireError):
            kind.unpack(data)
    with contextlib.suppress(WireError):
        list(packets.listing(data))


@given(
    st.sampled_from(Op), st.from_regex(r"\A[A-Za-z0-9._,-]{1,200}\Z"), st.integers(0, 2**63 - 1),
)  # fmt: skip
def test_a_request_arrives_as_it_was_sent(op, name, value):
    request = Request(op, name, value)
    assert Request.unpack(request.pack()) == request
    for cut in range(len(request.pack())):
        with pytest.raises(WireError):
            Request.unpack(request.pack()[:cut])


@given(st.lists(st.tuples(st.text("abc.-,", min_size=1, max_size=60), st.builds(Status, *[st.integers(0, 2**63)] * 6))))
def test_a_listing_arrives_as_it_was_sent(found):
    assert list(packets.listing(packets.pack_listing(found))) == found


def test_the_head_of_a_request_is_that_of_the_table():
    raw = b"SHMTSEGS" + struct.pack("<HHIQ", 1, 6, 11, 4096) + b"shmtensor.c"
    assert Request(Op.RESERVE, "shmtensor.c", 4096).pack() == raw


# --- hostile and broken clients


BAD = {
    "nothing that is a request": b"GET / HTTP/1.1\r\n",
    "another version": Request(Op.SPACE).pack()[:8] + b"\x63" + Request(Op.SPACE).pack()[9:],
    "an unknown request": Request(Op.SPACE).pack()[:10] + b"\x63\0" + Request(Op.SPACE).pack()[12:],
    "a name with a slash": Request(Op.STATUS, "../../etc/passwd").pack(),
    "no name": Request(Op.UNLINK).pack(),
    "a name that is cut": Request(Op.UNLINK, "shmtensor.c").pack()[:-1],
    "a name that is too long": Request(Op.UNLINK, "x" * 201).pack(),
    "a packet that is too long": Request(Op.UNLINK, "x" * 40_000).pack(),
    "no descriptor": Request(Op.OPEN, "shmtensor.c", packets.EXCLUSIVE).pack(),
    "nothing to give": Request(Op.GIVE, "shmtensor.c", 7).pack(),
}


@pytest.mark.parametrize("packet", BAD.values(), ids=BAD.keys())
def test_a_request_that_makes_no_sense(server, directory, packet):
    assert ask(directory, packet)[0].error == errno.EBADMSG
    assert is_serving(directory)
    assert segment.listing() == []


def test_a_serial_number_that_leaves_no_room_for_more(server, directory):
    """The server counts on from the highest, within 64 bits."""
    packet = bytearray(Request(Op.GIVE, "shmtensor.c", 7).pack())
    packet[16:24] = b"\xff" * 8
    with memory() as fd:
        assert ask(directory, bytes(packet), fd)[0].error == errno.EBADMSG
        assert ask(directory, Request(Op.GIVE, "shmtensor.c", 2**63 - 1).pack(), fd)[0].error == 0
    with segment.create("/shmtensor.d", 4096, "free some"):
        assert segment.listing() == ["shmtensor.c", "shmtensor.d"]
    for name in segment.listing():
        segment.unlink(f"/{name}")


@pytest.mark.parametrize("changed_ns", [-1, -(2**62), 2**63 - 1])
def test_a_segment_that_was_changed_at_an_impossible_time(server, directory, changed_ns):
    with segment.create("/shmtensor.c", 4096, "free some") as made:
        os.utime(made.fd, ns=(0, changed_ns))
        assert segment.status("/shmtensor.c").st_size == 4096
        assert segment.listing() == ["shmtensor.c"]
        with segment.attach("/shmtensor.c"):
            pass
    segment.unlink("/shmtensor.c")
    assert is_serving(directory)


def test_a_descriptor_that_is_not_asked_for(server, directory):
    with memory() as fd:
        for fds in ([fd], [fd, fd], [fd] * 4):
            assert ask(directory, Request(Op.SPACE).pack(), *fds)[0].error == errno.EBADMSG
        assert ask(directory, Request(Op.OPEN, "shmtensor.c", packets.EXCLUSIVE).pack(), fd, fd)[0].error
    assert is_serving(directory)
    assert not descriptors()  # the server, in this process, has closed them all


@pytest.mark.parametrize("op", [Op.OPEN, Op.GIVE])
def test_a_descriptor_of_something_else(server, directory, tmp_path, op):
    """What cannot be sealed against shrinking, or cannot be written, is no segment."""
    request = Request(op, "shmtensor.c", packets.EXCLUSIVE).pack()
    reading, writing = os.pipe()
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    place = os.open(tmp_path, os.O_RDONLY)
    with memory() as good, memory(GROW) as small, memory(WRITE) as dead, memory(SEAL) as fixed, memory(flags=0) as no:
        os.ftruncate(good, 100)
        read_only = os.open(f"/proc/self/fd/{good}", os.O_RDONLY)
        path = os.open(f"/proc/self/fd/{good}", os.O_PATH)
        for fd in (reading, writing, file, place, small, dead, fixed, no, read_only, path):
            reply, _ = ask(directory, request, fd)
            assert reply.error == errno.EBADMSG, os.readlink(f"/proc/self/fd/{fd}")
            assert is_serving(directory)
        assert segment.listing() == []
        assert not ask(directory, request, good)[0].error
        assert segment.listing() == ["shmtensor.c"]
    for fd in (reading, writing, file, place, read_only, path):
        os.close(fd)


def test_nobody_can_cut_a_segment_or_seal_more(server, directory):
    with segment.create("/shmtensor.c", 8192, "free some") as made:
        for cut in (lambda: os.ftruncate(made.fd, 0), lambda: os.ftruncate(made.fd, 4096)):
            with pytest.raises(PermissionError):
                cut()
        for seal in (GROW, WRITE):
            with pytest.raises(PermissionError):
                fcntl.fcntl(made.fd, ADD_SEALS, seal)
        made.reserve(16384, "free some")  # it may grow
        assert fcntl.fcntl(made.fd, SEALS) & (SHRINK | SEAL | GROW | WRITE) == SHRINK | SEAL
        with segment.attach("/shmtensor.c") as other:
            assert other.nbytes == 16384
            with pytest.raises(PermissionError):
                os.ftruncate(other.fd, 0)
            mine, theirs = made.locks(), other.locks()  # no two share locks, not even with the server
            assert mine.try_exclusive(3)
            assert theirs.held_by_other(3)
            mine.close()
            assert not theirs.held_by_other(3)
            theirs.close()
    segment.unlink("/shmtensor.c")


def test_another_user_is_refused(server, directory):
    if os.geteuid() != 0:
        pytest.skip("it takes root to be another user")
    os.chmod(directory, 0o711)
    os.chmod(f"{directory}/segments", 0o666)  # the directory and the socket would refuse it, too
    parent = directory
    while (parent := os.path.dirname(parent)) != "/":
        os.chmod(parent, os.stat(parent).st_mode | 0o011)
    answer, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        with contextlib.suppress(BaseException):
            os.setresuid(12345, 12345, 12345)
            reply, _ = ask(directory, Request(Op.SPACE).pack())
            os.write(theirs, f"{reply.error} {reply.text.decode()}".encode())
            code = 0
        os._exit(code)
    os.close(theirs)
    said = os.read(answer, 1000).decode()
    os.close(answer)
    assert os.waitpid(pid, 0)[1] == 0
    assert said.startswith(f"{errno.EPERM} ")
    assert "you are user 12345" in said
    assert is_serving(directory)


def test_clients_that_do_not_read_or_go_on_block_nobody(server, directory):
    idle = [connect(directory) for _ in range(20)]
    deaf = connect(directory)
    deaf.setblocking(False)
    with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
        while True:  # until the server has ended it: there was no room for a reply
            deaf.send(Request(Op.SPACE).pack())
    assert is_serving(directory)
    for each in (*idle, deaf):
        each.close()


def test_who_has_not_read_a_reply_gets_no_other(server, directory):
    """The kernel allows few descriptors on their way, for all processes of a user together."""
    request = Request(Op.OPEN, "shmtensor.c", packets.EXISTING).pack()
    with segment.create("/shmtensor.c", 4096, "free some"), connect(directory) as connection:
        for _ in range(3):  # one after the other is fine
            connection.send(request)
            assert Reply.unpack(connection.recv(1000)).error == 0
        connection.send(request)
        select.select([connection], [], [], PATIENCE)
        connection.send(request)
        ended = select.poll()
        ended.register(connection, select.POLLHUP)
        assert ended.poll(PATIENCE * 1000)
        assert Reply.unpack(connection.recv(1000)).error == 0
        assert connection.recv(1000) == b""
    segment.unlink("/shmtensor.c")


def test_of_too_many_connections_the_oldest_idle_ones_are_closed(directory, monkeypatch):
    monkeypatch.setattr("shmtensor.memory.segment_server.MOST_CONNECTIONS", 16)
    with running(directory), contextlib.ExitStack() as stack:
        present = stack.enter_context(connect(directory))
        present.send(Request(Op.PRESENT, value=new_id()).pack())
        assert Reply.unpack(present.recv(1000)).error == 0
        idle = [stack.enter_context(connect(directory)) for _ in range(40)]
        assert is_serving(directory)
        assert idle[0].recv(1) == b""  # ended
        present.send(Request(Op.SPACE).pack())  # that one is not
        assert Reply.unpack(present.recv(1000)).error == 0


def test_names_have_a_limit(directory, monkeypatch):
    monkeypatch.setattr("shmtensor.memory.segment_server.MOST_NAMES", 10)
    with running(directory):
        for number in range(10):
            segment.create(f"/shmtensor.c{number}", 4096, "free some").close()
        with pytest.raises(shmtensor.ResourceError, match=r"keeps 10 names, which is the limit: shmtensor gc"):
            segment.create("/shmtensor.more", 4096, "free some")
        assert len(segment.listing()) == 10
        for number in range(10):
            segment.unlink(f"/shmtensor.c{number}")
        segment.create("/shmtensor.more", 4096, "free some").close()
        segment.unlink("/shmtensor.more")


def test_long_listings_come_in_parts(server):
    names = sorted(f"shmtensor.{'x' * 60}{number:04}" for number in range(1500))
    for name in names:
        segment.open_or_create(f"/{name}").close()
    assert segment.listing() == names
    for name in names:
        segment.unlink(f"/{name}")
    assert segment.listing() == []


# --- room


def test_a_segment_beyond_the_limit_is_a_clear_error_at_creation(server, directory):
    assert segment.total_bytes() == 64 << 20
    with segment.create("/shmtensor.a", 60 << 20, "free some"):
        with pytest.raises(
            shmtensor.ResourceError,
            match=rf"needs 5.0 MiB, the segment server in {directory} has 4.0 MiB free: free some, or start .*--limit",
        ):
            segment.create("/shmtensor.b", 5 << 20, "free some")
        assert segment.listing() == ["shmtensor.a"]  # nothing half-made
        segment.create("/shmtensor.b", 4 << 20, "free some").close()
        wait_until(lambda: segment.free_bytes() == 0)
    segment.unlink("/shmtensor.a")
    segment.unlink("/shmtensor.b")
    wait_until(lambda: segment.free_bytes() == 64 << 20)


def test_what_is_being_reserved_counts_until_its_process_is_gone(server, directory):
    segment.open_or_create("/shmtensor.a").close()
    with connect(directory) as connection:
        connection.send(Request(Op.RESERVE, "shmtensor.a", 60 << 20).pack())
        assert Reply.unpack(connection.recv(1000)).error == 0
        assert ask(directory, Request(Op.RESERVE, "shmtensor.a", 5 << 20).pack())[0].error == errno.ENOSPC
    wait_until(lambda: ask(directory, Request(Op.SPACE).pack())[0].space.used == 0)
    segment.unlink("/shmtensor.a")


def test_the_publisher_names_the_server_when_there_is_no_room(server, channel):
    with (
        shmtensor.Publisher(channel, slots=2, slot_bytes="1MiB") as pub,
        pytest.raises(shmtensor.ResourceError, match=r"segment server in .* free"),
    ):
        pub.send(np.zeros(100 << 20, np.uint8))
    assert segment.listing() == []


@pytest.fixture
def sums(monkeypatch):
    """The times that a server of this process has looked at the size of each segment."""
    found, real = [], SegmentServer._used

    def used(self):
        found.append(real(self))
        return found[-1]

    monkeypatch.setattr(SegmentServer, "_used", used)
    return found


def test_a_reservation_does_not_look_at_all_segments(server, sums):
    """But where it would not fit otherwise, so that what was removed is free."""
    names = [f"/shmtensor.c{number}" for number in range(60)]
    for name in names:
        segment.create(name, 1 << 20, "free some").close()
    assert len(sums) < 30
    for name in names:
        segment.unlink(name)
    sums.clear()
    segment.create(names[0], 60 << 20, "free some").close()
    assert len(sums) == 1
    with pytest.raises(shmtensor.ResourceError, match="free some"):
        segment.create(names[1], 5 << 20, "free some")
    segment.unlink(names[0])


def test_what_comes_without_a_reservation_counts(server, directory):
    """A segment that was given, or has pages before it has a name."""
    segment.create("/shmtensor.a", 1 << 20, "free some").close()
    give = Request(Op.GIVE, "shmtensor.b", 7).pack(), Request(Op.OPEN, "shmtensor.c", packets.EITHER).pack()
    with memory() as given, memory() as made:
        for fd, packet in zip((given, made), give, strict=True):
            os.posix_fallocate(fd, 0, 30 << 20)
            assert ask(directory, packet, fd)[0].error == 0
    with pytest.raises(shmtensor.ResourceError, match=r"has 3\.0 MiB free"):
        segment.create("/shmtensor.d", 4 << 20, "free some")
    for name in segment.listing():
        segment.unlink(f"/{name}")


def test_who_has_to_wait_costs_no_look_at_all_segments(directory, sums):
    with contextlib.closing(LockFile(f"{directory}/segments.lock", os.O_CREAT)) as locks:
        assert locks.try_exclusive(1 + new_id())
        with running(directory):
            reply, _ = ask(directory, Request(Op.STATUS, "shmtensor.c").pack())
            assert (reply.error, reply.space.awaited) == (errno.EAGAIN, 1)
            assert not sums
            assert ask(directory, Request(Op.SPACE).pack())[0].space.awaited == 1


@pytest.mark.parametrize("limit", ["much", 0, -1, True])
def test_a_limit_that_is_none(directory, limit):
    with pytest.raises((ValueError, TypeError), match="limit"):
        SegmentServer(directory, limit)
    assert os.listdir(directory) == []


# --- one server, and another one


def test_one_server_is_enough(server, directory):
    with pytest.raises(shmtensor.ResourceError, match=f"another segment server runs in {re.escape(directory)}"):
        SegmentServer(directory)
    assert is_serving(directory)


@pytest.mark.parametrize("anew", [True, False], ids=["made anew", "without its socket"])
def test_a_server_that_nobody_can_reach_ends(directory, monkeypatch, anew):
    """Else there are two, each with half of the segments."""
    monkeypatch.setattr("shmtensor.memory.segment_server._LOOK_S", 0.01, raising=False)
    ended = []

    def run(server):
        with server, pytest.raises(shmtensor.ResourceError, match="was removed or replaced") as found:
            server.run()
        ended.append(found.value.errno)

    thread = threading.Thread(target=run, args=(SegmentServer(directory),))
    thread.start()
    with segment.create("/shmtensor.c", 4096, "free some"):
        if anew:
            shutil.rmtree(directory)
            os.mkdir(directory, 0o700)
        else:
            os.unlink(f"{directory}/segments")
            thread.join(PATIENCE)  # the next one would be refused before: they have one lock file
        with running(directory) as server:
            thread.join(PATIENCE)
            assert ended == [errno.ESTALE]
            assert os.path.exists(f"{directory}/segments")  # that of the next one
            wait_until(lambda: "shmtensor.c" in server._names)
            segment.unlink("/shmtensor.c")


def test_a_server_whose_directory_is_called_otherwise_goes_on(directory, monkeypatch):
    """Containers that have it mounted reach it all the same."""
    looks, real = [], SegmentServer._has_name

    def has_name(self):
        looks.append(real(self))
        return looks[-1]

    monkeypatch.setattr(SegmentServer, "_has_name", has_name)
    monkeypatch.setattr("shmtensor.memory.segment_server._LOOK_S", 0.01)
    with running(directory):
        os.rename(directory, f"{directory}-otherwise")
        looks.clear()
        wait_until(lambda: len(looks) > 1)
        os.rename(f"{directory}-otherwise", directory)
        assert is_serving(directory)
    assert all(looks)


def test_the_higher_serial_number_wins(directory, caplog):
    """Two segments with one name, from two processes that have nothing to do with each other."""
    with running(directory), memory() as old, memory() as new:
        os.ftruncate(new, 100)
        give = Request(Op.GIVE, "shmtensor.c", 5).pack(), Request(Op.GIVE, "shmtensor.c", 9).pack()
        assert ask(directory, give[0], old)[0].error == 0
        assert ask(directory, give[0], old)[0].error == 0  # the same once more
        assert ask(directory, give[1], new)[0].error == 0
        reply, _ = ask(directory, give[0], old)
        assert reply.error == errno.ESTALE
        assert segment.status("/shmtensor.c").st_size == 100
        again, fds = ask(directory, Request(Op.OPEN, "shmtensor.d", packets.EITHER).pack(), old)
        assert again.serial > 9
        assert fds == []
        for name in ("/shmtensor.c", "/shmtensor.d"):
            segment.unlink(name)


def test_a_server_that_is_stopped_is_a_clear_error(directory, monkeypatch):
    monkeypatch.setattr("shmtensor.memory.served._AT_ONCE", 0.05)
    server = Server(directory)
    assert segment.listing() == []
    server.process.send_signal(signal.SIGSTOP)
    place = placement.current()
    assert isinstance(place, Served)
    with pytest.raises(shmtensor.ResourceError, match="does not answer: it is probably stopped"):
        place.space(patience=0.05)
    server.process.send_signal(signal.SIGCONT)
    assert isinstance(place.space(), Space)
    server.close()


def test_a_number_of_a_process_has_its_pid():
    assert pid_of(new_id()) == os.getpid() & ((1 << 22) - 1)
    assert new_id() != new_id()


# --- which place


def test_the_place_is_decided_by_the_directory(directory, monkeypatch, channel):
    monkeypatch.delenv("SHMTENSOR_DIR")
    assert placement.current() is placement.FILES
    monkeypatch.setenv("SHMTENSOR_DIR", directory)
    assert placement.current() is placement.FILES
    with running(directory):
        placement.check_for_server()  # nothing was joined so far
        assert isinstance(placement.current(), Served)
        with shmtensor.Publisher(channel):
            assert f"shmtensor.{channel}" not in os.listdir("/dev/shm")
            assert f"shmtensor.{channel}" in segment.listing()
    assert isinstance(placement.current(), Served)  # never back to files
    assert os.listdir(directory) == ["segments.lock"]


def steps(call, at):
    """Start a call in a thread, which stops before its `at`-th line of placement.py. What goes on with it, and raises
    what the call has raised, if it has so many lines; else None."""
    arrived, go, lines, raised = threading.Event(), threading.Event(), [], []

    def trace(frame, event, _):
        if frame.f_code.co_filename != placement.__file__:
            return None
        if event == "line":
            lines.append(frame.f_lineno)
            if len(lines) == at:
                arrived.set()
                go.wait(PATIENCE)
        return trace

    def run():
        sys.settrace(trace)
        try:
            call()
        except BaseException as error:
            raised.append(error)
        finally:
            sys.settrace(None)
            arrived.set()

    def end():
        go.set()
        thread.join(PATIENCE)
        if raised:
            raise raised[0]

    thread = threading.Thread(target=run)
    thread.start()
    arrived.wait(PATIENCE)
    if len(lines) >= at:
        return end
    end()
    return None


@pytest.mark.parametrize("appears", [False, True])
def test_threads_decide_at_any_time_beside_each_other(directory, monkeypatch, appears):
    """Two that join, and one that looks for a name, each stopped at any point; perhaps a server has just come."""
    if appears:
        with open(f"{directory}/segments", "w"):
            pass
    for first in itertools.count(1):
        for second in itertools.count(1):
            for third in (placement.current, placement.check_for_server):
                monkeypatch.setattr(placement, "_decided", {directory: placement.FILES})
                monkeypatch.setattr(placement, "_servers", {}, raising=False)
                monkeypatch.setattr(placement, "_by_files", set())
                ends = steps(placement.check_for_server, first), steps(third, second)
                for end in ends:
                    if end is not None:
                        end()
                assert (placement.current() is placement.FILES) is not appears
                placement.check_for_server()
            if ends[1] is None:
                break
        if ends[0] is None:
            break
    assert first > 3
    assert second > 3


def test_a_server_that_comes_after_a_join_is_a_clear_error(directory, channel):
    with shmtensor.Publisher(channel), running(directory):
        with pytest.raises(shmtensor.ResourceError, match="start this process again, the server first"):
            shmtensor.Subscriber(channel)
        assert f"shmtensor.{channel}" in os.listdir("/dev/shm")  # what is open goes on, and is cleaned up
    assert not [name for name in os.listdir("/dev/shm") if channel in name]


def test_a_server_may_be_required(directory, monkeypatch, channel):
    monkeypatch.setenv("SHMTENSOR_SEGMENTS", "server")
    monkeypatch.setattr("shmtensor.memory.served.PATIENCE", 0.05)
    with pytest.raises(shmtensor.ResourceError, match="shmtensor share"):
        placement.current().space(patience=0.05)
    starting = threading.Event()

    def start() -> None:
        starting.wait(PATIENCE)
        with running(directory):
            done.wait(PATIENCE)

    done, thread = threading.Event(), threading.Thread(target=start)
    thread.start()
    starting.set()
    with shmtensor.Publisher(channel):  # waits for it
        assert not [name for name in os.listdir("/dev/shm") if channel in name]
    done.set()
    thread.join()
    assert WAITS > 1
    monkeypatch.delenv("SHMTENSOR_DIR")
    with pytest.raises(shmtensor.ArgumentError, match="needs SHMTENSOR_DIR"):
        placement.current()
    monkeypatch.setenv("SHMTENSOR_SEGMENTS", "sever")
    with pytest.raises(shmtensor.ArgumentError, match="SHMTENSOR_SEGMENTS='sever'"):
        placement.current()


def open_files(pid: int) -> list[str]:
    """What the descriptors of a process lead to. It may close them meanwhile."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


def test_a_forked_child_gives_back_nothing_of_its_parent(directory):
    """Nor does it keep its parent alive, for the next server."""
    server = Server(directory)
    with Member((), directory) as parent:
        parent("tx = shmtensor.Publisher('c'); tx.send(np.arange(3))")
        parent("import os\nchild = os.fork()\nif not child:\n    import select\n    select.select([], [], [])")
        child = parent("child")
        try:
            wait_until(lambda: not [target for target in open_files(child) if "segments" in target])
            parent.kill()
            server.kill()
            server = Server(directory)
            assert "serving" in server.said  # nobody is awaited
        finally:
            os.kill(child, signal.SIGKILL)
    server.close()


def test_a_child_may_come_with_segments_of_its_own(directory):
    server = Server(directory)
    with Member((), directory) as parent:
        parent("tx = shmtensor.Publisher('c', slots=2)")
        parent(
            "import os, sys\n"
            "child = os.fork()\n"
            "if not child:\n"
            "    code = 1\n"
            "    try:\n"
            "        rx = shmtensor.Subscriber('c')\n"
            f"        assert rx.recv(timeout={PATIENCE}).value.tolist() == [0, 1]\n"
            "        rx.close(); code = 0\n"
            "    finally:\n"
            "        os._exit(code)"
        )
        parent(f"tx.wait_for_subscribers(1, timeout={PATIENCE})")
        server.kill()
        server = Server(directory)
        parent("tx.send(np.arange(2))")
        assert parent("os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])") == 0
        parent("tx.close()")
        nothing_left(parent)
    server.close()
