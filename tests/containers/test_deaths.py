"""The crash points of a segment server and of its clients: who dies there, and what the others can still do."""

from __future__ import annotations

import os

import pytest

from ..faults import points
from ..waiting import PATIENCE
from .container import Member, Refused, names, nothing_left
from .servers import Server

SERVER_POINTS = ["share.listening", "share.opened", "share.sealed", "share.named", "share.unlinked"]
RESTARTED = ["share.given", "share.present"]
"""Points of a server that comes after another."""
CLIENT_POINTS = ["served.asked", "served.held"]


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "d"
    path.mkdir(mode=0o700)
    return str(path)


def test_every_point_is_here():
    assert {*SERVER_POINTS, *RESTARTED} == set(points.names("memory/segment_server.py"))
    assert set(CLIENT_POINTS) == set(points.names("memory/served.py"))


def goes_on(sender: Member, receiver: Member) -> None:
    """Messages pass, a ring is added, and all leave."""
    for size in (5, 70_000):
        sender(f"tx.send(np.arange({size}), timeout={PATIENCE})")
        assert receiver(f"int(rx.recv(timeout={PATIENCE}).value[-1])") == size - 1
    sender("tx.close()")
    receiver("rx.close()")
    nothing_left(sender)


@pytest.mark.parametrize("point", SERVER_POINTS[1:])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_server_dies_at_a_point(directory, point, nth):
    """While members come, grow and leave. Another one is started, and nothing is lost that a living process has."""
    first = Server(directory, crash=f"{point}:{nth}")
    with Member((), directory) as sender, Member((), directory) as receiver:
        if point == "share.unlinked":  # that is when somebody leaves
            sender("tx = shmtensor.Publisher('c', slots=2)")
            sender.start("for name in 'de': shmtensor.Publisher(name, slots=2, slot_bytes=64).close()")
        else:
            sender.start("tx = shmtensor.Publisher('c', slots=2)")
        first.wait_for_death()
        second = Server(directory)
        sender.result()
        receiver("rx = shmtensor.Subscriber('c')")
        goes_on(sender, receiver)
    assert second.stop().endswith(f"INFO the segment server of {second.directory} has ended\n")
    assert os.listdir(directory) == ["segments.lock"]


def test_a_server_dies_before_it_has_its_socket(directory):
    died = Server.__new__(Server)
    with pytest.raises(AssertionError):  # it never was ready
        died.__init__(directory, crash="share.listening")
    died.wait_for_death()
    assert "segments" not in os.listdir(directory)
    second = Server(directory)
    with Member((), directory) as sender, Member((), directory) as receiver:
        sender("tx = shmtensor.Publisher('c', slots=2)")
        receiver("rx = shmtensor.Subscriber('c')")
        goes_on(sender, receiver)
    second.stop()
    assert os.listdir(directory) == ["segments.lock"]


@pytest.mark.parametrize("point", RESTARTED)
@pytest.mark.parametrize("nth", [1, 2])
def test_a_server_dies_while_it_is_given_segments(directory, point, nth):
    first = Server(directory)
    with Member((), directory) as sender, Member((), directory) as receiver:
        sender("tx = shmtensor.Publisher('c', slots=2)")
        receiver("rx = shmtensor.Subscriber('c')")
        sender("tx.send(np.arange(3))")
        assert receiver(f"int(rx.recv(timeout={PATIENCE}).value[-1])") == 2
        before = sorted(names(sender))
        first.kill()
        second = Server(directory, crash=f"{point}:{nth}")
        second.wait_for_death()
        third = Server(directory)
        assert sorted(names(sender)) == before
        goes_on(sender, receiver)
    third.stop()
    assert os.listdir(directory) == ["segments.lock"]


@pytest.mark.parametrize("point", CLIENT_POINTS)
@pytest.mark.parametrize("nth", range(1, 7))
def test_a_client_dies_at_a_point(directory, point, nth):
    """While it joins, sends and grows: the next one finds a channel, and removes what is left."""
    server = Server(directory)
    with Member((), directory) as receiver:
        receiver("rx = shmtensor.Subscriber('c')")
        victim = Member((), directory, (point, str(nth)))
        victim.start("tx = shmtensor.Publisher('c', full='grow'); [tx.send(np.arange(10**n)) for n in range(1, 7)]")
        victim.wait_for_death()
        with Member((), directory) as sender:
            sender("tx = shmtensor.Publisher('c', slots=2)")
            sender("tx.send(np.full(3, -1))")
            receiver(f"while int(rx.recv(timeout={PATIENCE}).value[-1]) != -1: pass")
            receiver("rx.close(); rx = shmtensor.Subscriber('c')")  # what the dead has sent may come after that
            goes_on(sender, receiver)
    server.stop()
    assert os.listdir(directory) == ["segments.lock"]


@pytest.mark.parametrize(
    ("point", "first"),
    [("claim.locked", 0), ("claim.stored", 0), ("done.before", 0), ("done.stored", 1), ("release.ended", 1)],
)
def test_a_member_of_a_group_dies_and_then_the_server(directory, point, first):
    """Another member gets all that was not done, each once, from the memory that it has; the slots come back."""
    server = Server(directory)
    with Member((), directory) as sender, Member((), directory) as heir:
        sender("tx = shmtensor.Publisher('c', slots=4)")
        heir("rx = shmtensor.Subscriber('c', group='them')")
        victim = Member((), directory, (point, "1"), {"SHMTENSOR_PURE": "1"})
        victim("rx = shmtensor.Subscriber('c', group='them')")
        sender("[tx.send(np.full(3, n)) for n in range(4)]")
        victim.start("[int(rx.recv(timeout=60).value[0]) for n in range(4)]")
        victim.wait_for_death()
        server.kill()
        second = Server(directory)
        heir(f"take = lambda count: sorted(int(rx.recv(timeout={PATIENCE}).value[0]) for n in range(count))")
        assert heir(f"take({4 - first})") == list(range(first, 4))
        with pytest.raises(Refused, match="TimedOut"):  # while it waits it finds what the dead one had done
            heir("rx.recv(timeout=1)")
        for _ in range(4):
            sender(f"[tx.send(np.full(3, n), timeout={PATIENCE}) for n in range(3)]")  # one is still in hand there
            assert heir("take(3)") == [0, 1, 2]
        goes_on(sender, heir)
    second.stop()
    assert os.listdir(directory) == ["segments.lock"]
