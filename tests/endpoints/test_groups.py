"""Groups of subscribers: who gets what, when a group begins and ends, and what it holds up.

What is the same on a work queue is in test_claims.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import os
import signal

import numpy as np
import pytest

import shmtensor
from shmtensor import Publisher, Subscriber
from shmtensor.channel import control as ctl

from ..conftest import shared_files
from ..forkservers import preloaded
from ..scenes import unswept
from ..spawned import hold_in_group
from ..waiting import PATIENCE, wait_for_end, wait_until

Member = functools.partial(Subscriber, group="them")


def numbers(rx, count):
    return [int(rx.recv(timeout=PATIENCE).value) for _ in range(count)]


def has_nothing(rx, timeout=0.0):
    with pytest.raises(shmtensor.TimedOut):
        rx.recv(timeout=timeout)
    return True


@contextlib.contextmanager
def processes(channel, count, take=1):
    """Members in processes of their own, which take so many messages, send their numbers, and keep them."""
    with preloaded("tests.spawned") as context, contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=hold_in_group, args=(theirs, channel, "them", take))
            process.start()
            theirs.close()
            stack.callback(process.join, PATIENCE)
            stack.callback(process.kill)
            made.append((process, ours))
        for _, pipe in made:
            assert pipe.recv() == "joined"
        yield made


def kill(process):
    process.kill()
    process.join(PATIENCE)


def test_each_message_goes_to_every_plain_subscriber_and_to_one_of_each_group(channel):
    with contextlib.ExitStack() as stack:
        pub = stack.enter_context(Publisher(channel, slots=32))
        plain = [stack.enter_context(Subscriber(channel)) for _ in range(2)]
        them = [stack.enter_context(Member(channel)) for _ in range(3)]
        alone = stack.enter_context(Subscriber(channel, group="alone"))
        for number in range(24):
            pub.send(np.array(number))
        for rx in (*plain, alone):
            assert numbers(rx, 24) == list(range(24))
        got = [number for rx in them for number in numbers(rx, 8)]
        assert sorted(got) == list(range(24))
        assert all(has_nothing(rx) for rx in (*plain, *them, alone))
        assert pub.statistics().receivers == 6


def test_all_read_the_same_bytes(channel):
    with Publisher(channel, slots=4) as pub, Subscriber(channel) as plain, Member(channel) as rx:
        pub.send(np.arange(1000))
        assert pub.statistics().slots_busy == 1
        one, two = plain.recv(timeout=PATIENCE), rx.recv(timeout=PATIENCE)
        assert one.value.tolist() == two.value.tolist() == list(range(1000))
        assert pub.statistics().slots_busy == 1
        with pytest.raises(ValueError, match="read-only"):
            two.value[0] = 1


def test_its_name_and_class(channel):
    class Mine(Subscriber):
        """Of a user."""

    with Member(channel) as one, Mine(channel, group="them") as two, Mine(channel) as plain, Publisher(channel) as pub:
        assert [type(rx).__name__ for rx in (one, two, plain)] == ["Subscriber", "Mine", "Mine"]
        assert isinstance(one, Subscriber)
        assert isinstance(two, Mine)
        pub.send(np.array(1))
        with one.recv(timeout=PATIENCE) as msg:
            assert int(msg.value) == 1
        assert has_nothing(two)
        assert numbers(plain, 1) == [1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"group": "them", "delivery": "latest"}, "does not go with group="),
        ({"group": "a b"}, "group name 'a b'"),
        ({"group": ""}, "group name ''"),
        ({"group": 5}, "a group name is a string"),
        ({"acknowledge": "next"}, "goes with group="),
        ({"max_attempts": 5}, "goes with group="),
        ({"group": "them", "max_attempts": 101}, "max_attempts"),
        ({"group": "them", "acknowledge": "never"}, "acknowledge"),
    ],
)
def test_what_is_refused(channel, options, says):
    with pytest.raises((shmtensor.ArgumentError, shmtensor.ArgumentTypeError), match=says):
        Subscriber(channel, **options)


def test_a_group_holds_its_publisher_back_as_a_subscriber_does(channel):
    with Publisher(channel, slots=2, full="error") as pub, Member(channel) as one, Member(channel) as two:
        pub.send(np.array(1))
        pub.send(np.array(2))
        with pytest.raises(shmtensor.RingFull):
            pub.send(np.array(3))
        assert numbers(one, 1) + numbers(two, 1) == [1, 2]
        has_nothing(one)  # by asking it has said that its message is done
        pub.send(np.array(3))
        with pytest.raises(shmtensor.RingFull):
            pub.send(np.array(4))


def test_a_member_that_joins_later_shares_what_nobody_has_taken(channel):
    with Publisher(channel, slots=16) as pub, Member(channel) as one:
        for number in range(8):
            pub.send(np.array(number))
        assert numbers(one, 3) == [0, 1, 2]
        with Member(channel) as two:
            assert numbers(two, 5) == [3, 4, 5, 6, 7]
            assert has_nothing(one)
            assert has_nothing(two)


def test_a_group_begins_with_its_first_member_and_ends_with_its_last(channel):
    with Publisher(channel, slots=4, full="error") as pub:
        pub.send(np.array(0))
        with Member(channel):
            pub.send(np.array(1))
        for number in range(2, 20):
            pub.send(np.array(number))  # nobody is waited for
        with Member(channel) as rx:
            assert has_nothing(rx)
            pub.send(np.array(20))
            assert numbers(rx, 1) == [20]


def test_what_a_dead_member_had_goes_to_another(channel):
    with Publisher(channel, slots=8) as pub, processes(channel, 1) as [(process, pipe)]:
        pub.send(np.array(1))
        assert pipe.recv() == 1
        with Member(channel) as rx:
            pub.send(np.array(2))
            assert numbers(rx, 1) == [2]
            kill(process)
            msg = rx.recv(timeout=PATIENCE)
            assert (int(msg.value), msg.attempt) == (1, 2)
            assert rx.statistics().redelivered == 1


def test_a_message_that_a_dead_member_was_done_with_gives_its_slot_back(channel):
    """It held a view; nobody but its group can say that the slot is free."""
    with Publisher(channel, slots=2) as pub, processes(channel, 1, take=-1) as [(process, pipe)]:
        pub.send(np.array(1))
        assert pipe.recv() == 1  # and is done with it
        with Member(channel) as rx:
            pub.send(np.array(2))
            assert numbers(rx, 1) == [2]
            kill(process)
            assert has_nothing(rx, 0.6)
            for number in range(3, 12):
                pub.send(np.array(number), timeout=PATIENCE)
                assert numbers(rx, 1) == [number]
            assert pub.statistics().slots_busy <= 2
            assert rx.statistics().redelivered == 0


def test_a_group_whose_members_all_die_holds_nobody_up(channel):
    with Publisher(channel, slots=2) as pub, processes(channel, 2) as made:
        pub.send(np.array(1))
        pub.send(np.array(2))
        assert sorted(pipe.recv() for _, pipe in made) == [1, 2]
        with unswept(channel):  # whoever sweeps notices the deaths as well
            for process, _ in made:
                kill(process)
            for number in range(6):
                pub.send(np.array(number), timeout=PATIENCE)
                pub.wait_for_subscribers(0)  # looks again, while they cannot be removed: each dies once
            assert pub.statistics().dead_receivers == 2
        assert pub.statistics().dead_receivers == 2
        assert pub.statistics().receivers == 0


def test_a_stopped_member_is_not_dead(channel):
    with Publisher(channel, slots=4) as pub, processes(channel, 1) as [(process, pipe)], Member(channel) as rx:
        seen = []
        for number in range(40):
            pub.send(np.array(number), timeout=PATIENCE)
            wait_until(lambda: pipe.poll() or rx.statistics().behind)
            if pipe.poll():
                break
            seen.append(int(rx.recv(timeout=PATIENCE).value))
        held = pipe.recv()
        os.kill(process.pid, signal.SIGSTOP)
        with contextlib.suppress(shmtensor.TimedOut):
            while True:
                seen.append(int(rx.recv(timeout=0.6).value))
        assert held not in seen
        assert rx.statistics().redelivered == 0
        os.kill(process.pid, signal.SIGCONT)


def test_a_view_outlives_its_group(channel):
    """The publisher waits for the view, and for nothing else that the group had not taken."""
    with Publisher(channel, slots=3) as pub:
        rx = Member(channel)
        for number in range(3):
            pub.send(np.full(9, number))
        view = rx.recv(timeout=PATIENCE).value
        rx.close()
        for number in range(3, 20):
            pub.send(np.full(9, number), timeout=PATIENCE)
        assert view.tolist() == [0] * 9
        assert pub.statistics().slots_busy == 1
        with Member(channel) as other:  # another group of that name
            pub.send(np.array(20), timeout=PATIENCE)
            assert numbers(other, 1) == [20]
        del view


def test_what_is_left_of_a_group_does_not_take_what_it_cannot(channel):
    """One member has closed and keeps a view, the other one dies: what nobody took holds the publisher up no longer."""
    with Publisher(channel, slots=3) as pub, processes(channel, 1) as [(process, pipe)]:
        rx = Member(channel)
        for number in range(3):
            pub.send(np.full(9, number))
        assert pipe.recv() is not None
        msg = rx.recv(timeout=PATIENCE)
        number, view = int(msg.value[0]), msg.value
        del msg
        rx.close()
        kill(process)
        for each in range(3, 12):
            pub.send(np.full(9, each), timeout=PATIENCE)
        assert view.tolist() == [number] * 9
        del view


@pytest.mark.parametrize("first", ["send", "history"])
def test_history_goes_to_one_of_a_group_that_joins_later(channel, first):
    """Whether the publisher has seen the group or not."""
    with Publisher(channel, slots=8, history=3) as pub:
        for number in range(5):
            pub.send(np.array(number))
        with Member(channel) as one, Member(channel) as two:
            if first == "send":
                pub.send(np.array(5))
            got = numbers(one, 2) + numbers(two, 1)
            if first == "history":
                assert sorted(got) == [2, 3, 4]
                assert has_nothing(one)
                assert has_nothing(two)
                pub.send(np.array(5))
            got += numbers(two, 1)
            assert sorted(got) == [2, 3, 4, 5]
            assert has_nothing(one, 0.6)
            assert has_nothing(two)
            for number in range(6, 30):
                pub.send(np.array(number), timeout=PATIENCE)
                assert numbers(two if number % 2 else one, 1) == [number]


def test_history_that_was_not_finished_comes_again(channel):
    """Taken under a shared lock, since the publisher has not seen the group yet."""
    with Publisher(channel, slots=8, history=2) as pub:
        pub.send(np.array(7))
        with Member(channel, acknowledge="release") as rx:
            assert rx.recv(timeout=PATIENCE).attempt == 1
            msg = rx.recv(timeout=PATIENCE)
            assert (int(msg.value), msg.attempt) == (7, 2)
            msg.release()
            assert has_nothing(rx, 0.6)


def test_the_end_of_the_stream(channel):
    with Member(channel) as one, Member(channel) as two:
        with Publisher(channel) as pub:
            for number in range(6):
                pub.send(np.array(number))
        assert sorted(numbers(one, 3) + numbers(two, 3)) == list(range(6))
        for rx in (one, two):  # each is done with its last one, then
            with contextlib.suppress(shmtensor.TimedOut, shmtensor.EndOfStream):
                rx.recv(timeout=0)
        for rx in (one, two):
            with pytest.raises(shmtensor.EndOfStream):
                rx.recv(timeout=PATIENCE)
        del rx
    assert not [name for name in shared_files() if channel in name]


def test_what_a_closed_publisher_left_waits_for_its_group(channel):
    with Member(channel) as rx:
        with Publisher(channel) as pub, Subscriber(channel) as plain:
            for number in range(4):
                pub.send(np.array(number))
            assert numbers(plain, 4) == [0, 1, 2, 3]
        assert [int(msg.value) for msg in rx] == [0, 1, 2, 3]


def test_one_member_is_woken_for_a_message(channel):
    with contextlib.ExitStack() as stack:
        pub = stack.enter_context(Publisher(channel))
        made = stack.enter_context(processes(channel, 3))
        words = pub._member.control.words
        asleep = [ctl.asleep_word(entry.index) for entry in pub._member.peers() if entry.role == ctl.RECEIVER]
        assert len(asleep) == 3
        # a send that finds all of them asleep; each of them wakes up by itself four times a second
        for _ in range(50):
            wait_until(lambda: all(words[at] & 1 for at in asleep))
            before, numbers_of = pub.statistics().doorbells, [words[at] for at in asleep]
            pub.send(np.array(1), timeout=PATIENCE)
            rung = pub.statistics().doorbells - before
            holder = multiprocessing.connection.wait([pipe for _, pipe in made], PATIENCE)
            assert len(holder) == 1
            holder[0].recv()
            holder[0].send("again")
            if all(n & 1 for n in numbers_of):
                break
        assert rung <= 1


def test_asyncio(channel):
    async def main():
        async with Publisher(channel) as pub, Member(channel) as one, Member(channel) as two:
            tasks = [asyncio.create_task(rx.arecv(timeout=PATIENCE)) for rx in (one, two)]
            await asyncio.sleep(0)
            for number in range(2):
                await pub.asend(np.array(number))
            got = sorted([int((await task).value) for task in tasks])
            assert got == [0, 1]

    asyncio.run(main())


def test_members_are_threads_of_one_program_too(channel):
    """A member says whether its own life lock is held by asking for others': its group's is not taken for free."""
    with Publisher(channel, slots=4) as pub, Member(channel) as rx:
        with Subscriber(channel) as other:
            pub.send(np.array(0))
            assert numbers(other, 1) == [0]
        rx._member.reap()
        pub._recipients.refresh()
        assert pub.statistics().receivers == 1
        assert numbers(rx, 1) == [0]
        pub.send(np.array(1))
        assert numbers(rx, 1) == [1]


def test_what_is_seen_from_outside(channel):
    with Publisher(channel, slots=8) as pub, Subscriber(channel) as plain, Member(channel, acknowledge="release") as rx:
        for number in range(4):
            pub.send(np.array(number))
        assert numbers(plain, 3) == [0, 1, 2]
        one, two = rx.recv(timeout=PATIENCE), rx.recv(timeout=PATIENCE)
        view = two.value
        two.release()
        seen = shmtensor.inspect(channel)
        assert [(it.role, it.delivery, it.group) for it in seen.members] == [
            ("sender", "", ""), ("receiver", "all", ""), ("receiver", "one", "them"),
        ]  # fmt: skip
        assert seen.depth == 2  # the group's; the plain one's is 1
        uid = seen.members[2].uid
        held = {(it.how, it.uid): it.messages for it in seen.holdings if it.how not in ("leased", "unread")}
        assert held == {("claimed", uid): 1, ("done", uid): 1, ("waiting", 0): 2}
        assert seen.senders[0].rings[0].slots_used == 4
        del one
        [held] = [it for it in shmtensor.inspect(channel, messages=True).held if it.seq == 1]
        assert (held.state, held.attempt) == ("abandoned", 1)
        assert view.tolist() == 1
        del view


def test_files_are_removed_with_the_last_one(channel):
    pub, rx = Publisher(channel), Member(channel)
    pub.send(np.array(1))
    pub.close()
    rx.close()
    assert not [name for name in shared_files() if channel in name]
    with processes(channel, 1) as [(process, _)]:
        kill(process)
        wait_for_end(process.pid)
    Publisher(channel).close()
    assert not [name for name in shared_files() if channel in name]


class Named(shmtensor.Subscriber):
    """Passes `group=` on by itself: the class's call does not see it."""

    def __init__(self, channel):
        super().__init__(channel, group="g")


def test_a_derived_class_that_chooses_the_group_is_a_member_of_it(channel):
    with shmtensor.Publisher(channel) as pub, Named(channel) as one, Named(channel) as other:
        assert isinstance(one, Named)
        for number in range(4):
            pub.send(np.array(number))
        found = []
        for sub in (one, other, one, other):
            with sub.recv(timeout=PATIENCE) as message:
                found.append(int(message.value))
        assert found == [0, 1, 2, 3]
        assert [it.delivery for it in shmtensor.inspect(channel).receivers] == ["one", "one"]
        for sub in (one, other):
            with pytest.raises(shmtensor.TimedOut):
                sub.recv(timeout=0)
