"""`shmtensor.inspect`: what is seen of channels from outside, while members come, go, die and are damaged."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import errno
import gc
import inspect
import itertools
import os
import pickle
import random
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import shmtensor
from shmtensor.channel import inspect as looking
from shmtensor.channel import processes, published, reads
from shmtensor.cli import channels
from shmtensor.endpoints.sender import holders_text
from shmtensor.memory import segment as shm

from ..commands import app
from ..conftest import descriptors
from ..implementations import once
from ..scenes import Fellow, unswept
from ..waiting import PATIENCE, wait_until

INFOS = [shmtensor.ChannelInfo, shmtensor.MemberInfo, shmtensor.RingInfo, shmtensor.Holding, shmtensor.HeldMessage]

HOLDER = """
import sys, shmtensor
rx = shmtensor.Subscriber(sys.argv[1])
print("joined", flush=True)
value = rx.recv(timeout=120).value
print("taken", flush=True)
sys.stdin.readline()
"""


def seen(channel: str, *, messages: bool = False) -> shmtensor.ChannelInfo:
    found = shmtensor.inspect(channel, messages=messages)
    assert found is not None
    return found


def test_what_a_subscriber_has_taken_and_has_not(channel):
    with shmtensor.Publisher(channel, slots=8, slot_bytes=4096) as pub, shmtensor.Subscriber(channel) as sub:
        for number in range(5):
            pub.send(np.full(100, number))
        kept = sub.recv(timeout=PATIENCE)
        sub.recv(timeout=PATIENCE).release()
        found = seen(channel)
        assert (found.name, found.kind, found.service, found.living, found.readable) == (
            channel,
            "fan-out",
            "",
            2,
            True,
        )
        (sender,), (receiver,) = found.senders, found.receivers
        assert (sender.published, sender.received, sender.unread) == (5, 0, 0)
        assert (receiver.received, receiver.unread, found.depth) == (2, 3, 3)
        assert 0 < receiver.oldest_unread == found.oldest_unread
        held = {(it.how, it.messages, it.nbytes, it.uid, it.alive) for it in found.holdings}
        assert held == {("leased", 1, 800, receiver.uid, True), ("unread", 3, 2400, receiver.uid, True)}
        assert sender.rings[0].slots_used == 4
        assert found.held == ()
        assert sorted(it.seq for it in seen(channel, messages=True).held) == [1, 3, 4, 5]
        del kept
        for _ in range(3):
            sub.recv(timeout=PATIENCE).release()
        found = seen(channel)
        assert (found.depth, found.oldest_unread, found.holdings) == (0, 0.0, ())
        assert found.receivers[0].received == 5


@pytest.mark.filterwarnings("ignore:.*that no consumer has finished:ResourceWarning")  # on purpose
def test_what_waits_in_a_work_queue(channel):
    with shmtensor.Producer(channel, slots=4) as tx, shmtensor.Consumer(channel) as rx:
        for number in range(4):
            tx.send(np.full(100, number))
        message = rx.recv(timeout=PATIENCE)
        found = seen(channel)
        assert (found.kind, found.depth) == ("work queue", 3)
        assert found.oldest_unread > 0
        assert {(it.how, it.messages) for it in found.holdings} == {("claimed", 1), ("waiting", 3)}
        message.release()


def test_the_process_of_a_member(channel):
    with shmtensor.Publisher(channel) as pub:
        (member,) = seen(channel).members
        assert (member.pid, member.host_pid) == (os.getpid(), os.getpid())
        assert member.process == processes.name_of(os.getpid()) != ""
        assert member.alive
        pub.send(b"1")


def test_a_label_that_a_relay_made_of_none_begins_with_no_blank(channel):
    with shmtensor.Publisher(channel, label=" via 0123abcd"):
        (member,) = seen(channel).members
        assert channels.program(member) == f"{member.process} via 0123abcd"


def test_the_label_of_a_member(channel):
    with (
        shmtensor.Publisher(channel, label="left camera") as pub,
        shmtensor.Subscriber(channel, label="Kü[red]" * 7) as sub,
        shmtensor.Subscriber(channel) as other,
    ):
        assert [it.label for it in seen(channel).members] == ["left camera", "Kü[red]" * 7, ""]
        pub.send(b"1")
        for each in (sub, other):
            each.recv(timeout=PATIENCE).release()


@once("names of processes")
@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["/usr/bin/python3", "-u", "/home/ada/camera.py", "--fast"], "camera.py"),
        (["python3.12", "-X", "dev", "-m", "robot.camera"], "robot.camera"),
        (["python", "-c", "import time"], "python -c"),
        (["python"], "python"),
        (["/opt/bin/camera", "x.py"], "camera"),
    ],
)
def test_what_a_process_is_called(arguments, name, tmp_path, monkeypatch):
    (tmp_path / "cmdline").write_bytes(b"\0".join(map(os.fsencode, arguments)) + b"\0")
    (tmp_path / "comm").write_text("other\n")
    real = open
    monkeypatch.setattr(
        processes, "open", lambda path, *args: real(path.replace("/proc/7", str(tmp_path)), *args), raising=False
    )
    assert processes.name_of(7) == name


@once("names of processes")
def test_a_worker_is_called_as_the_program_that_started_it(tmp_path, monkeypatch):
    """Of multiprocessing's workers, the command lines say `python -c` only."""
    programs = {
        2: (["bash", "run.sh"], 1),
        3: (["python3", "/home/ada/train.py"], 2),
        4: (["python3", "-c", "from multiprocessing.forkserver import main"], 3),
        5: (["python3", "-c", "from multiprocessing.spawn import spawn_main"], 4),
        6: (["python3", "-c", "import time"], 2),
        7: (["python3", "-c", "import time"], 99),
    }
    for pid, (arguments, parent) in programs.items():
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "cmdline").write_bytes(b"\0".join(map(os.fsencode, arguments)) + b"\0")
        (folder / "comm").write_text("other\n")
        (folder / "stat").write_text(f"{pid} (a) b) S {parent} 1 1")
    real = open
    monkeypatch.setattr(
        processes, "open", lambda path, *args: real(path.replace("/proc", str(tmp_path)), *args), raising=False
    )
    names = ["bash", "train.py", "train.py", "train.py", "python3 -c", "python3 -c"]
    assert [processes.name_of(pid) for pid in programs] == names


@pytest.mark.slow
def test_a_member_that_is_killed_while_it_is_inspected(channel):
    inspector = looking.Inspector()
    with shmtensor.Publisher(channel, slots=4) as pub:
        fellow = Fellow(HOLDER, channel)
        fellow.listen("joined")
        pub.send(np.zeros(100))
        fellow.listen("taken")
        (member,) = inspector.channel(channel).receivers
        assert (member.pid, member.process) == (fellow.process.pid, processes.name_of(os.getpid()))
        with unswept(channel):
            fellow.kill()
            found = inspector.channel(channel)
            (dead,) = (it for it in found.members if it.role == "receiver")
            assert (dead.alive, dead.host_pid, dead.process) == (False, 0, member.process)
            assert found.receivers == ()
            assert [(it.how, it.alive, it.uid) for it in found.holdings] == [("leased", False, dead.uid)]


def test_nothing_is_written_and_nobody_joins(channel):
    with shmtensor.Publisher(channel) as pub, shmtensor.Subscriber(channel) as sub:
        pub.send(b"1")

        def contents() -> dict[str, tuple[bytes, int]]:
            paths = [Path("/dev/shm", name) for name in os.listdir("/dev/shm") if channel in name]
            return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}

        before = contents()
        for _ in range(3):
            shmtensor.inspect(channel, messages=True)
            shmtensor.inspect()
        assert contents() == before
        sub.recv(timeout=PATIENCE).release()


def test_a_channel_that_vanishes_meanwhile_is_passed_over(channel, monkeypatch):
    pub = shmtensor.Publisher(channel)
    listing = shm.listing

    def then_it_ends() -> list[str]:
        found = listing()
        pub.close()
        return found

    monkeypatch.setattr(shm, "listing", then_it_ends)
    assert channel not in [it.name for it in shmtensor.inspect()]
    assert shmtensor.inspect(channel) is None


def test_a_channel_that_vanishes_just_before_it_is_opened_is_passed_over(channel, monkeypatch):
    pub = shmtensor.Publisher(channel)
    real = shm.look_at

    def ends(name: str, **options: bool) -> shm.Glance:
        pub.close()
        return real(name, **options)

    monkeypatch.setattr(shm, "look_at", ends)
    assert shmtensor.inspect(channel) is None


def test_names():
    assert shmtensor.inspect("there-is-none") is None
    with pytest.raises(shmtensor.ArgumentError):
        shmtensor.inspect("no/such")
    with pytest.raises(shmtensor.ArgumentTypeError):
        shmtensor.inspect(3)


def test_a_service_and_its_replies(channel):
    with shmtensor.Server(channel) as server, shmtensor.Client(channel) as client:
        future = client.submit(np.arange(3))
        found = seen(channel)
        assert (found.kind, found.service, found.depth) == ("service", channel, 1)
        with server.recv(timeout=PATIENCE) as request:
            request.reply(request.value.copy())
        assert future.result(PATIENCE).tolist() == [0, 1, 2]
        services = {it.name: it.service for it in shmtensor.inspect() if it.name.startswith(channel)}
        assert len(services) == 2
        assert set(services.values()) == {channel}


@pytest.mark.slow
def test_200_members(channel):
    with shmtensor.Publisher(channel) as pub:
        subs = [shmtensor.Subscriber(channel) for _ in range(199)]
        pub.send(b"1")
        subs[7].recv(timeout=PATIENCE).release()
        found = seen(channel)
        assert (found.living, len(found.receivers), found.depth) == (200, 199, 1)
        assert sum(member.unread for member in found.members) == 198
        assert sum(it.messages for it in found.holdings) == 198
        for sub in subs:
            sub.close()


@pytest.mark.parametrize("slots", [4, 100])
def test_the_newest_message_of_a_sender_that_reuses_its_slots_meanwhile(channel, slots, monkeypatch):
    """It sends between the look at how many it has sent and the one at the record of the last of them."""
    with shmtensor.Publisher(channel, slots=slots, slot_bytes=4096) as pub:
        pub.send(np.zeros(100))
        real = published._Sender

        def then_it_sends(*args):
            found = real(*args)
            for _ in range(2 * slots):
                pub.send(np.zeros(100))
            return found

        monkeypatch.setattr(published, "_Sender", then_it_sends)
        (sender,) = seen(channel).senders
        assert (sender.published, sender.newest_bytes) == (1, 800)
        assert sender.newest_age > 0


class Finishes:
    """The holder of a message finishes it as soon as a private function of a ring is called, or has returned."""

    def __init__(self, monkeypatch, message, name: str, *, first: bool) -> None:
        real = getattr(published._Ring, name)

        def call(ring, *args, **options):
            if first:
                message.release()
            try:
                return real(ring, *args, **options)
            finally:
                message.release()

        monkeypatch.setattr(published._Ring, name, call)


@pytest.mark.parametrize("first", [True, False])
def test_what_a_consumer_finishes_while_it_is_inspected(channel, first, monkeypatch):
    """Neither abandoned nor claimed: those were never true together."""
    with shmtensor.Producer(channel, slots=4) as tx, shmtensor.Consumer(channel) as rx:
        tx.send(b"1")
        Finishes(monkeypatch, rx.recv(timeout=PATIENCE), "_locked", first=first)
        assert seen(channel).holdings == ()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", ["_row", "_group"])
def test_what_a_member_of_a_group_finishes_while_it_is_inspected(channel, first, name, monkeypatch):
    with shmtensor.Publisher(channel, slots=4) as pub, shmtensor.Subscriber(channel, group="g") as sub:
        pub.send(b"1")
        Finishes(monkeypatch, sub.recv(timeout=PATIENCE), name, first=first)
        if name == "_group" and not first:
            assert [it.how for it in seen(channel).holdings] == ["claimed"]  # it was finished afterwards
        else:
            assert seen(channel).holdings == ()


def test_what_a_member_of_a_group_gives_back_is_abandoned(channel):
    with (
        shmtensor.Publisher(channel, slots=4) as pub,
        shmtensor.Subscriber(channel, group="g") as sub,
        shmtensor.Subscriber(channel, group="g") as other,
    ):
        pub.send(b"1")
        with contextlib.suppress(KeyError), sub.recv(timeout=PATIENCE):
            raise KeyError
        found = seen(channel)
        assert [(it.how, it.uid, it.group) for it in found.holdings] == [("abandoned", 0, "g")]
        assert (found.depth, found.oldest_unread > 0) == (1, True)
        other.recv(timeout=PATIENCE).release()
        assert (seen(channel).depth, seen(channel).holdings) == (0, ())


@pytest.mark.slow
def test_what_a_member_of_a_group_died_with_is_abandoned(channel):
    with shmtensor.Publisher(channel, slots=4) as pub:
        fellow = Fellow(HOLDER.replace("(sys.argv[1])", "(sys.argv[1], group='g')"), channel)
        fellow.listen("joined")
        with shmtensor.Subscriber(channel, group="g") as other:
            pub.send(np.zeros(10))
            fellow.listen("taken")
            assert [(it.how, it.alive) for it in seen(channel).holdings] == [("claimed", True)]
            fellow.kill()
            found = seen(channel)
            assert [(it.how, it.group) for it in found.holdings] == [("abandoned", "g")]
            assert found.depth == 1
            assert other.recv(timeout=PATIENCE).attempt == 2


def test_the_group_that_is_behind_is_named(channel):
    with (
        shmtensor.Publisher(channel, slots=4) as pub,
        shmtensor.Subscriber(channel, group="fast") as fast,
        shmtensor.Subscriber(channel, group="slow"),
    ):
        for _ in range(4):
            pub.send(1)
            fast.recv(timeout=PATIENCE).release()
        found = seen(channel, messages=True)
        assert [(it.how, it.messages, it.group) for it in found.holdings] == [("waiting", 4, "slow")]
        assert {(it.how, it.group) for message in found.held for it in message.holders} == {("waiting", "slow")}
        assert "held by group slow: 4 waiting" in holders_text(channel, found.senders[0].uid)
        assert "group slow: none yet" in CliRunner().invoke(app, ["ls", channel]).output
        assert "slow: 4 waiting" in CliRunner().invoke(app, ["top", channel, "--once"]).output


def test_many_held_messages_do_not_multiply_the_work(channel, monkeypatch):
    """The locks of a process are read once for a ring, not once for a message."""
    with shmtensor.Producer(channel, slots=64) as tx, shmtensor.Consumer(channel, acknowledge="release") as rx:
        for number in range(50):
            tx.send(number)
        held = [rx.recv(timeout=PATIENCE) for _ in range(50)]
        reads, real = [], processes._locks
        monkeypatch.setattr(processes, "_locks", lambda *args: reads.append(args) or real(*args))
        assert [(it.how, it.messages, it.pid) for it in seen(channel).holdings] == [("claimed", 50, os.getpid())]
        assert len(reads) < 25
        for message in held:
            message.release()


def test_only_segments_of_a_process_are_looked_at(monkeypatch, tmp_path):
    """What else it has open may lie on a file system that hangs."""
    with open(tmp_path / "other", "w") as file:
        real, path = os.stat, f"/proc/{os.getpid()}/fd/{file.fileno()}"
        looked: list[str] = []
        monkeypatch.setattr(os, "stat", lambda path, **options: looked.append(str(path)) or real(path, **options))
        processes.Processes().locked(os.getpid(), os.fstat(file.fileno()))
    assert path not in looked


@once("what is remembered")
def test_a_channel_that_is_inspected_again_and_again_keeps_nothing_of_senders_that_left(channel):
    inspector = looking.Inspector()
    with shmtensor.Subscriber(channel) as sub:
        for number in range(5):
            with shmtensor.Publisher(channel) as pub:
                pub.send(number)
                sub.recv(timeout=PATIENCE).release()
                inspector.channel(channel)
        inspector.channel(channel)
        assert set(inspector._kept) == {f"/shmtensor.{channel}"}
        assert len(inspector._processes._found) == 1
    assert inspector.channel(channel) is None
    assert (inspector._kept, inspector._processes._found, inspector._looks) == ({}, {}, {})


class Again:
    """An inspector that looks at a channel again and again sees what one sees that looks for the first time."""

    def __init__(self, channel: str) -> None:
        self._channel, self._inspector = channel, looking.Inspector(messages=True)
        self.kept: Counter[str] = Counter()
        """How many parts of a look were found in the one before, and not: of the members, a sender, or the whole."""

    def _parts(self) -> dict[str, object]:
        look = self._inspector._looks.get(self._channel)
        if look is None or not look._parts:
            return {}
        members, *senders = look._parts
        return {"members": members, "whole": look._whole, **{f"sender {sent.uid}": sent for sent in senders}}

    def look(self) -> shmtensor.ChannelInfo | None:
        before = self._parts()
        found = self._inspector.channel(self._channel)
        for name, part in self._parts().items():
            if name in before:
                self.kept[f"{name.split()[0]} {'again' if part is before[name] else 'anew'}"] += 1
        while True:
            anew, after = shmtensor.inspect(self._channel, messages=True), self._inspector.channel(self._channel)
            if without_times(found) == without_times(after):  # nobody else has swept it meanwhile
                break
            found = after
        if found is None or anew is None:
            assert found is anew
            return None
        names = {member.uid: member.process for member in found.members if not member.alive}  # only it knows them
        members = [dataclasses.replace(it, process=names.get(it.uid, it.process)) for it in anew.members]
        assert without_times(found) == without_times(dataclasses.replace(anew, members=tuple(members)))
        for field in ("kind", "files", "nbytes", "notes", "readable"):
            assert getattr(found, field) == getattr(anew, field)
        return found


@pytest.mark.parametrize(
    ("kind", "limits"),
    [
        ("fan-out", {}),
        ("groups", {}),
        ("work queue", {}),
        ("fan-out", {"_MOST": 60_000}),
        ("fan-out", {"_MOST_KEPT": 1}),
    ],
)
def test_looking_again_finds_what_a_first_look_finds(channel, kind, limits, monkeypatch):
    """Random traffic between members that come and go; rings are added, and messages are held and given back."""
    for name, value in limits.items():
        monkeypatch.setattr(reads, name, value)
    chance, again = random.Random(kind), Again(channel)
    senders, receivers, held = [], [], []

    def send() -> None:
        if senders:
            chance.choice(senders).send(np.zeros(chance.choice([1, 10, 1000])))

    def take() -> None:
        if receivers:
            with contextlib.suppress(shmtensor.TimedOut):
                held.append(chance.choice(receivers).recv(timeout=0))

    def release() -> None:
        if held:
            held.pop(chance.randrange(len(held))).release()

    def join_to_send() -> None:
        if len(senders) < 3:
            senders.append(SENDERS[kind](channel))

    def join_to_receive() -> None:
        if len(receivers) < 3:
            receivers.append(chance.choice(RECEIVERS[kind])(channel))

    def leave() -> None:
        of = chance.choice([senders, receivers])
        if len(of) > 1:
            of.pop(chance.randrange(len(of))).close()

    acts = [send, send, send, take, take, release, join_to_send, join_to_receive, leave, lambda: None, lambda: None]
    try:
        for _ in range(100):
            chance.choice(acts)()
            again.look()
    finally:
        join_to_receive()
        while held:
            release()
            take()
        for each in (*receivers, *senders):
            each.close()
    assert again.look() is None
    parts = {f"{name} {how}" for name in ("members", "sender", "whole") for how in ("again", "anew")}
    assert {it for it in parts if not again.kept[it]} <= ({"sender again", "whole again"} if limits else set())


SENDERS = {
    "fan-out": lambda channel: shmtensor.Publisher(channel, slots=4, slot_bytes=4096, full="grow"),
    "groups": lambda channel: shmtensor.Publisher(channel, slots=4, slot_bytes=4096, full="grow", history=2),
    "work queue": lambda channel: shmtensor.Producer(channel, slots=4, slot_bytes=4096, full="grow"),
}
RECEIVERS = {
    "fan-out": [shmtensor.Subscriber],
    "groups": [
        lambda channel: shmtensor.Subscriber(channel, group="one"),
        lambda channel: shmtensor.Subscriber(channel, group="two"),
        lambda channel: shmtensor.Subscriber(channel, delivery="latest"),
    ],
    "work queue": [lambda channel: shmtensor.Consumer(channel, acknowledge="release")],
}

SENDER = """
import sys, numpy as np, shmtensor
with shmtensor.Publisher(sys.argv[1], slots=4, slot_bytes=4096) as pub:
    for _ in range(int(sys.argv[2])):
        pub.send(np.zeros(100))
    print("sent", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_sender_takes_the_place_of_a_dead_one_between_two_looks(channel):
    """Its entry has the same index, and it has sent as many messages."""
    again = Again(channel)
    with shmtensor.Publisher(channel) as pub:  # no receiver: nobody needs what the dead one has sent

        def sender() -> tuple[Fellow, shmtensor.MemberInfo]:
            fellow = Fellow(SENDER, channel, "2")
            fellow.listen("sent")
            (found,) = (it for it in again.look().senders if it.uid != pub._member.uid)
            return fellow, found

        fellow, before = sender()
        fellow.kill()
        other, after = sender()
        other.kill()
        assert (after.index, after.published, after.pid) == (before.index, 2, other.process.pid)
        assert after.uid != before.uid


def test_a_channel_that_is_made_again_between_two_looks(channel):
    again = Again(channel)
    uids = set()
    for _ in range(3):
        with shmtensor.Publisher(channel, slots=4, slot_bytes=4096) as pub, shmtensor.Subscriber(channel) as sub:
            pub.send(np.zeros(100))
            found = again.look()
            uids |= {member.uid for member in found.members}
            assert [it.messages for it in found.holdings] == [1]
            sub.recv(timeout=PATIENCE).release()
    assert len(uids) == 6
    assert set(again.kept) == {"members anew", "whole anew"}


def test_a_message_changes_only_what_its_sender_has_sent(channel):
    inspector = looking.Inspector()
    with (
        shmtensor.Publisher(channel) as pub,
        shmtensor.Publisher(channel) as other,
        shmtensor.Subscriber(channel) as sub,
    ):
        other.send(b"1")
        inspector.channel(channel)
        members, quiet = inspector._looks[channel]._parts[0], inspector._looks[channel]._parts[2]
        for count in range(1, 4):
            pub.send(b"1")
            found = inspector.channel(channel)
            assert ([it.published for it in found.senders], found.depth) == ([count, 1], count + 1)
            parts = inspector._looks[channel]._parts
            assert (parts[0] is members, parts[2] is quiet) == (True, True)
        for _ in range(4):
            sub.recv(timeout=PATIENCE).release()
        assert inspector.channel(channel).depth == 0
        assert inspector._looks[channel]._parts[2] is not quiet


def test_what_a_member_counts_changes_nothing_that_was_sent(channel):
    """A receiver falls asleep, and is woken, with nearly every message."""
    inspector = looking.Inspector()
    with shmtensor.Publisher(channel) as pub, shmtensor.Subscriber(channel) as sub:
        pub.send(b"1")
        sub.recv(timeout=PATIENCE).release()
        inspector.channel(channel)
        members, sent = inspector._looks[channel]._parts

        def has_slept() -> bool:
            with contextlib.suppress(shmtensor.TimedOut):
                sub.recv(timeout=0.01)
            return inspector.channel(channel).receivers[0].sleeps > 0

        wait_until(has_slept)
        after = inspector._looks[channel]._parts
        assert (after[0] is members, after[1] is sent) == (False, True)


def test_where_nothing_changes_only_ages_do(channel):
    inspector = looking.Inspector(messages=True)
    with shmtensor.Publisher(channel) as pub, shmtensor.Subscriber(channel) as sub:
        pub.send(b"1")
        pub.send(b"2")
        held = sub.recv(timeout=PATIENCE)
        first = inspector.channel(channel)
        whole = inspector._looks[channel]._whole
        kept = pickle.dumps(first)
        wait_until(lambda: inspector.channel(channel).holdings[0].held > 0)
        later = inspector.channel(channel)
        assert inspector._looks[channel]._whole is whole
        assert without_times(first) == without_times(later)
        assert pickle.dumps(first) == kept  # what was returned is not written to
        for ages in (
            lambda it: [it.oldest_unread, it.senders[0].newest_age, it.receivers[0].oldest_unread],
            lambda it: [holding.oldest for holding in it.holdings],
            lambda it: [message.age for message in it.held],
        ):
            assert all(one < other for one, other in zip(ages(first), ages(later), strict=True))
        held.release()
        assert [it.how for it in inspector.channel(channel).holdings] == ["unread"]


STOPS = """
import os, signal, sys, shmtensor
with shmtensor.Subscriber(sys.argv[1]):
    print("joined", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_process_that_is_stopped_between_two_looks(channel):
    """Nothing that is in shared memory changes."""
    inspector = looking.Inspector()
    with shmtensor.Publisher(channel):
        fellow = Fellow(STOPS, channel)
        fellow.listen("joined")
        assert not inspector.channel(channel).receivers[0].stopped
        whole = inspector._looks[channel]._whole
        os.kill(fellow.process.pid, signal.SIGSTOP)
        wait_until(lambda: inspector.channel(channel).receivers[0].stopped)
        assert inspector._looks[channel]._whole is whole
        fellow.kill()


def test_reading_few_records_sees_what_reading_all_sees(channel, monkeypatch):
    """Random traffic of two subscribers; messages of a slot each."""
    chance = random.Random(1)
    with (
        shmtensor.Publisher(channel, slots=8, slot_bytes=4096, full="grow") as pub,
        shmtensor.Subscriber(channel) as one,
        shmtensor.Subscriber(channel) as two,
    ):
        kept: list[shmtensor.Message] = []
        some = False
        for _ in range(300):
            what = chance.random()
            if what < 0.6:
                pub.send(np.zeros(10))
            else:
                take(one if what < 0.8 else two, kept)
            if kept and chance.random() < 0.5:
                kept.pop(chance.randrange(len(kept))).release()
            few = seen(channel, messages=True)
            with monkeypatch.context() as patch:
                patch.setattr(published, "_wanted", lambda *_: None)
                every = seen(channel, messages=True)
            assert without_times(few) == without_times(every)
            some = some or few.depth > published.FEW
        assert some  # and many, which are read together
        kept.clear()


def take(sub: shmtensor.Subscriber, kept: list[shmtensor.Message]) -> None:
    try:
        kept.append(sub.recv(timeout=0))
    except shmtensor.TimedOut:
        pass


def without_times(found: shmtensor.ChannelInfo | None) -> object:
    if found is None:
        return None
    members = [dataclasses.replace(member, oldest_unread=0.0, newest_age=0.0) for member in found.members]
    holdings = [dataclasses.replace(it, oldest=0.0, held=0.0) for it in found.holdings]
    held = [dataclasses.replace(it, age=0.0) for it in sorted(found.held, key=lambda it: (it.sender, it.ring, it.seq))]
    return members, holdings, held, found.depth


def test_a_process_of_another_pid_namespace_is_found(channel, monkeypatch):
    """It calls itself 7, and this process calls it as the kernel does here."""
    with shmtensor.Publisher(channel) as pub, shmtensor.Subscriber(channel) as sub:
        (member,) = seen(channel).senders
        monkeypatch.setattr(processes, "_in_namespaces", lambda: {7: [1, os.getpid()]})
        with shm.look_at(f"/shmtensor.{channel}") as segment:
            found = processes.Processes().find(member.uid, 7, segment.info, 1 + member.index)
            nobody = processes.Processes().find(member.uid, 8, segment.info, 1 + member.index)
        assert found == (os.getpid(), member.process)
        assert nobody == processes.UNKNOWN
        pub.send(b"1")
        sub.recv(timeout=PATIENCE).release()


def test_a_process_that_cannot_be_looked_at_for_want_of_files_is_found_later(channel, monkeypatch):
    listdir, inspector = os.listdir, looking.Inspector()

    def without_files(path: str) -> list[str]:
        if str(path).endswith("/fd"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return listdir(path)

    with shmtensor.Publisher(channel):
        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", without_files)
            assert "Too many open files" in inspector.channel(channel).notes[0]
        for _ in range(2):
            found = inspector.channel(channel)
            assert (found.notes, [it.host_pid for it in found.members]) == ((), [os.getpid()])


def test_few_files_are_kept_open_where_a_process_may_open_few(channel, monkeypatch):
    monkeypatch.setattr(reads.resource, "getrlimit", lambda which: (12, 12))
    inspector = looking.Inspector()
    with contextlib.ExitStack() as stack:
        for number in range(4):
            stack.enter_context(shmtensor.Publisher(f"{channel}-{number}")).send(1)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            assert len(inspector.channels(lambda name: name.startswith(channel))) == 4
            assert len(os.listdir("/proc/self/fd")) <= before + 3


def test_an_unread_message_grows_older(channel):
    with shmtensor.Publisher(channel) as pub, shmtensor.Subscriber(channel) as sub:
        pub.send(b"1")
        first = seen(channel).oldest_unread
        wait_until(lambda: seen(channel).oldest_unread > first)
        sub.recv(timeout=PATIENCE).release()


@once("source text")
def test_every_field_is_described():
    for kind in (*INFOS, shmtensor.Holder):
        body = ast.parse(inspect.cleandoc(inspect.getsource(kind))).body[0].body[1:]
        fields = [each.target.id for each in body if isinstance(each, ast.AnnAssign)]
        described = [one.target.id for one, other in itertools.pairwise(body) if isinstance(other, ast.Expr)
                     and isinstance(one, ast.AnnAssign)]  # fmt: skip
        assert fields == described == [field.name for field in dataclasses.fields(kind)]


def test_a_look_leaves_nothing_open_for_the_garbage_collector(channel):
    """A health check that asks once a second must not pile up descriptors."""
    with shmtensor.Publisher(channel) as pub, shmtensor.Subscriber(channel):
        pub.send(np.zeros(3))
        gc.collect()
        gc.disable()
        try:
            before = descriptors()
            for _ in range(3):
                assert shmtensor.inspect(channel) is not None
                assert len(shmtensor.inspect()) >= 1
            assert descriptors() == before
        finally:
            gc.enable()
