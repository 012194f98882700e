"""Channels between containers that share a directory and no `/dev/shm`: each pattern, growth, deaths, tools."""

from __future__ import annotations

import json
import os
import signal

import pytest

from ..waiting import PATIENCE, wait_for_stop, wait_until
from .container import Container, Refused, names, nothing_left
from .servers import Server

PAIRS = [("Publisher", "Subscriber"), ("Producer", "Consumer")]
SEND = f"tx.send(np.full(100, n), timeout={PATIENCE})"
RECV = f"int(rx.recv(timeout={PATIENCE}).value[0])"


@pytest.fixture(scope="module")
def containers():
    with Container() as one, Container() as other:
        yield one, other


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "d"
    path.mkdir(mode=0o700)
    return str(path)


@pytest.fixture
def server(directory):
    made = Server(directory)
    yield made
    made.close()


def clean(containers, directory):
    """Nothing is left, neither where the directory is shared nor where it is not."""
    for container in containers:
        assert container.left() == []
    assert set(os.listdir(directory)) <= {"segments", "segments.lock"}


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0])
def test_messages_pass_and_rings_grow(containers, server, directory, pair):
    one, other = containers
    with one.python(directory) as sender, other.python(directory) as receiver:
        sender(f"tx = shmtensor.{pair[0]}('c', slots=2)")
        receiver(f"rx = shmtensor.{pair[1]}('c')")
        for size in (10, 1000, 100_000, 3, 1_000_000):
            sender(f"tx.send({{'a': np.arange({size}), 'n': {size}}}, timeout={PATIENCE})")
            receiver(f"m = rx.recv(timeout={PATIENCE})")
            assert receiver("[m.value['n'], int(m.value['a'].sum()), len(m.value['a'])]") == [
                size, size * (size - 1) // 2, size,
            ]  # fmt: skip
            receiver("m.release(); del m")
        assert names(sender)
        sender("tx.close()")
        receiver("rx.close()")
        nothing_left(sender)
    clean(containers, directory)


def test_a_full_ring_is_waited_for_and_sleepers_are_woken(containers, server, directory):
    one, other = containers
    with one.python(directory) as sender, other.python(directory) as receiver:
        sender("tx = shmtensor.Publisher('c', slots=2, slot_bytes=1024)")
        receiver("rx = shmtensor.Subscriber('c')")
        sender.start(f"[tx.send(np.full(10, n), timeout={PATIENCE}) for n in range(2000)][-1]")
        assert receiver(f"[{RECV} for n in range(2000)] == list(range(2000))")
        assert sender.result() == 2000
        sender.end()
        receiver.end()
    clean(containers, directory)


def test_requests_and_replies(containers, server, directory):
    one, other = containers
    with one.python(directory) as service, other.python(directory) as client:
        service("server = shmtensor.Server('s')")
        service(
            "import threading\n"
            "def serve():\n"
            "    for request in server:\n"
            "        request.reply(request.value * 2)\n"
            "thread = threading.Thread(target=serve); thread.start()"
        )
        client("client = shmtensor.Client('s')")
        for n in (1, 50_000):
            assert client(f"int(client.request(np.full({n}, {n}), timeout={PATIENCE}).sum())") == 2 * n * n
        client("client.close()")
        service("server.close(); thread.join()")
        nothing_left(service)
    clean(containers, directory)


def test_queues_of_the_standard_library(containers, server, directory):
    with containers[0].python(directory) as member:
        member(
            "import multiprocessing, os\n"
            "q = shmtensor.Queue(ctx='fork', maxsize=4)\n"
            "child = os.fork()\n"
            "if not child:\n"
            "    code = 1\n"
            "    try:\n"
            "        for n in range(20): q.put({'n': n, 'a': np.arange(n)})\n"
            "        q.close(); q.join_thread(); code = 0\n"
            "    finally:\n"
            "        os._exit(code)"
        )
        assert member(f"[q.get(timeout={PATIENCE})['n'] for n in range(20)]") == list(range(20))
        assert member("os.waitpid(child, 0)[1]") == 0
        member("q.close(); q.join_thread(); del q")
        nothing_left(member)


def test_a_user_who_has_another_number_in_its_container(containers, server, directory):
    """The same user of the host, by a mapping of users of its own."""
    one, other = containers
    with one.python(directory) as sender, other.python(directory, uid=1234) as receiver:
        assert receiver("__import__('os').geteuid()") == 1234
        receiver("rx = shmtensor.Subscriber('c')")
        sender("tx = shmtensor.Publisher('c')")
        sender(f"n = 7; {SEND}")
        assert receiver(RECV) == 7
        receiver("rx.close()")
        sender("tx.close()")
        nothing_left(receiver)


def test_a_killed_receiver_of_each_kind(containers, server, directory):
    one, other = containers
    with one.python(directory) as sender, other.python(directory) as heir:
        for pair in PAIRS:
            victim = other.python(directory)
            sender(f"tx = shmtensor.{pair[0]}('c', slots=8, slot_bytes=4096)")
            victim(f"rx = shmtensor.{pair[1]}('c')")
            sender(f"n = 1; {SEND}")
            assert victim(f"m = rx.recv(timeout={PATIENCE})") is None
            victim.kill()
            heir(f"rx = shmtensor.{pair[1]}('c')")
            sender(f"for n in (2, 3, 4): {SEND}" if pair[0] == "Publisher" else f"n = 2; {SEND}")
            expected = [2, 3] if pair[0] == "Publisher" else [1, 2]  # what was claimed is another's now
            heir.start(f"sorted([{RECV}, {RECV}])")
            assert heir.result() == expected
            heir("rx.close()")
            sender("tx.close()")
            nothing_left(sender)
    clean(containers, directory)


def test_a_killed_sender(containers, server, directory):
    """What it has sent is received; then it is removed by who is left."""
    one, other = containers
    with other.python(directory) as receiver:
        victim = one.python(directory)
        receiver("rx = shmtensor.Subscriber('c')")
        victim("tx = shmtensor.Publisher('c')")
        victim(f"for n in (1, 2, 3): {SEND}")
        victim.kill()
        assert receiver(f"[{RECV} for _ in range(3)]") == [1, 2, 3]
        with pytest.raises(Refused, match="EndOfStream"):
            receiver(RECV)
        receiver("rx.close()")
        nothing_left(receiver)
    clean(containers, directory)


def test_when_all_are_killed_the_next_one_sweeps(containers, server, directory):
    one, other = containers
    members = [one.python(directory), other.python(directory)]
    members[0]("tx = shmtensor.Publisher('c')")
    members[1]("rx = shmtensor.Subscriber('c')")
    members[0](f"n = 1; {SEND}")
    for member in members:
        member.kill()
    with one.python(directory) as later:
        assert names(later)
        dry = json.loads(other.run(directory, "gc", "--json", "--dry-run"))
        removed = json.loads(other.run(directory, "gc", "--json"))
        assert {it["path"] for it in removed["removed"]} == {it["path"] for it in dry["removed"]}
        assert all(it["path"].startswith(directory) for it in removed["removed"])
        assert removed["bytes"] > 0
        assert removed["failed"] == removed["left"] == []
        assert names(later) == []
    clean(containers, directory)


def test_the_tools_see_it_from_any_container(containers, server, directory):
    one, other = containers
    with one.python(directory) as sender, other.python(directory) as receiver:
        sender("tx = shmtensor.Publisher('c', label='eye')")
        receiver("rx = shmtensor.Subscriber('c')")
        sender(f"n = 1; {SEND}")
        pid = sender("__import__('os').getpid()")
        assert pid < 1000  # in its own pid namespace
        (channel,) = json.loads(other.run(directory, "ls", "--json"))["channels"]
        assert channel["name"] == "c"
        assert {member["pid"] for member in channel["members"]} == {pid, receiver("__import__('os').getpid()")}
        assert "eye" in other.run(directory, "top", "--once")
        said = other.run(directory, "doctor")
        assert "segment server" in said
        info = receiver(
            "[(m.role, m.alive, bool(m.host_pid), m.unread) for m in shmtensor.inspect('c').members]"
        )  # each process finds those of its own pid namespace, and no others
        assert sorted(info) == [["receiver", True, True, 1], ["sender", True, False, 0]]
    clean(containers, directory)


# --- the server ends


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_another_server_is_given_what_living_processes_have(containers, directory, how):
    one, other = containers
    first = Server(directory)
    with one.python(directory) as sender, other.python(directory) as receiver:
        sender("tx = shmtensor.Publisher('c', slots=2)")
        receiver("rx = shmtensor.Subscriber('c')")
        sender(f"n = 1; {SEND}")
        assert receiver(RECV) == 1
        before = sorted(names(sender))
        getattr(first, how)()
        assert os.path.exists(f"{directory}/segments")  # nobody goes by files meanwhile
        for n in range(2, 20):  # what is mapped goes on without a server
            sender(f"n = {n}; {SEND}")
            assert receiver(RECV) == n
        sender.start(f"tx.send(np.arange(100_000), timeout={PATIENCE})")  # a larger ring: this waits
        second = Server(directory)
        assert sender.result() == 20
        assert receiver(f"int(rx.recv(timeout={PATIENCE}).value[-1])") == 99_999
        assert set(before) < set(names(sender))
        with other.python(directory) as third:
            third("rx = shmtensor.Subscriber('c')")
            sender(f"n = 30; {SEND}")
            assert third(RECV) == receiver(RECV) == 30
            third("rx.close()")
        sender("tx.close()")
        receiver("rx.close()")
        nothing_left(sender)
        assert second.stop().endswith(f"INFO the segment server of {second.directory} has ended\n")
    clean(containers, directory)
    assert not os.path.exists(f"{directory}/segments")


def test_without_a_server_what_needs_a_name_says_what_to_do(containers, directory):
    one, other = containers
    first = Server(directory)
    with one.python(directory) as sender, other.python(directory) as receiver:
        sender("tx = shmtensor.Publisher('c', slots=2)")
        receiver("rx = shmtensor.Subscriber('c')")
        sender(f"n = 1; {SEND}")
        assert receiver(RECV) == 1
        first.kill()
        with pytest.raises(Refused, match=rf"ResourceError.*start it again with shmtensor share {directory}"):
            sender(f"tx.send(np.arange(100_000), timeout={PATIENCE})")
        sender(f"n = 2; {SEND}")  # and it goes on
        assert receiver(RECV) == 2
        sender("tx.close()")  # neither fails nor waits for names that are gone
        receiver("rx.close()")
    os.unlink(f"{directory}/segments")
    clean(containers, directory)


def test_a_process_that_is_stopped_keeps_the_next_server_waiting(containers, directory):
    """To go on without it would split its channels in two. The error names its pid; killed or continued, all go on."""
    one, other = containers
    first = Server(directory)
    with one.python(directory) as sender, other.python(directory) as other_sender:
        stopped = other.python(directory)
        sender("tx = shmtensor.Publisher('c')")
        stopped("rx = shmtensor.Subscriber('c')")
        own = stopped("__import__('os').getpid()")
        stopped.signal(signal.SIGSTOP)
        wait_for_stop(stopped.pid)
        first.kill()
        second = Server(directory)
        assert "awaiting" in second.said
        with pytest.raises(Refused, match=rf"pid {own} in its container.*continue it or kill it"):
            other_sender("tx = shmtensor.Publisher('d')")
        stopped.signal(signal.SIGCONT)
        other_sender("tx = shmtensor.Publisher('d')")
        sender(f"n = 1; {SEND}")
        assert stopped(RECV) == 1

        stopped.signal(signal.SIGSTOP)
        wait_for_stop(stopped.pid)
        second.kill()
        third = Server(directory)
        stopped.kill()
        with one.python(directory) as late:
            late("rx = shmtensor.Subscriber('c')")
            sender(f"n = 2; {SEND}")
            assert late(RECV) == 2
        sender("tx.close()")
        other_sender("tx.close()")
        wait_until(lambda: not names(sender))
        third.stop()
    clean(containers, directory)


def test_what_only_the_dead_had_is_lost_and_the_channel_goes_on(containers, directory):
    """A sender dies with a ring that nobody has opened, then the server."""
    one, other = containers
    first = Server(directory)
    with other.python(directory) as receiver:
        victim = one.python(directory)
        receiver("rx = shmtensor.Consumer('c')")
        victim("tx = shmtensor.Producer('c')")
        victim(f"n = 1; {SEND}")
        victim.kill()
        first.kill()
        second = Server(directory)
        with one.python(directory) as sender:
            sender("tx = shmtensor.Producer('c')")
            sender(f"n = 2; {SEND}")
            assert receiver(RECV) in (1, 2)  # 1, if it was awake and opened the ring in time
            sender("tx.close()")
            receiver("rx.close()")
            nothing_left(sender)
        second.stop()
    clean(containers, directory)


# --- the server in a container, too


def test_a_server_in_a_container_of_its_own(containers, directory):
    """As the guide's recipes for Docker and Kubernetes have it: with pid and user namespaces of its own."""
    one, other = containers
    with Container() as third, one.python(directory) as sender, other.python(directory, uid=1234) as receiver:
        first = Server(directory, enter=third.enter)
        assert "serving" in first.said
        sender("tx = shmtensor.Publisher('c', slots=2)")
        receiver("rx = shmtensor.Subscriber('c')")
        sender(f"n = 1; {SEND}")
        assert receiver(RECV) == 1
        victim = one.python(directory)
        victim("tx = shmtensor.Publisher('c')")
        victim(f"n = 2; {SEND}")
        victim.kill()
        assert receiver(RECV) == 2
        first.kill()
        second = Server(directory, enter=third.enter)
        sender("tx.send(np.arange(100_000))")
        assert receiver(f"int(rx.recv(timeout={PATIENCE}).value[-1])") == 99_999
        assert len(json.loads(one.run(directory, "ls", "--json"))["channels"]) == 1
        sender("tx.close()")
        receiver("rx.close()")
        nothing_left(sender)
        assert second.stop().endswith(f"INFO the segment server of {second.directory} has ended\n")
        assert third.left() == []
    clean(containers, directory)
