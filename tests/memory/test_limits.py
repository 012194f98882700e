"""A process at its limits: open files, address space, the size of a file.

Each is a `ResourceError` with a remedy, leaves nothing half-made, loses no message and ends no stream, and when there
is room again the same endpoint goes on. The scenes run in processes of their own; see `tests/scenes.py`.
"""

from __future__ import annotations

import errno
import resource

import numpy as np
import pytest

import shmtensor

from ..scenes import (
    PAIRS,
    PATIENCE,
    Fellow,
    address_space,
    come_and_go,
    few_files,
    files,
    is_refused,
    limited,
    own_shm,
    pair_of,
    play,
    refused,
    works,
)
from ..waiting import wait_until

pytestmark = pytest.mark.slow

# --- no descriptors


def joining_without_files(names) -> None:
    for name in names:
        refusals = 0
        for left in range(24):
            with few_files(left):
                refusals += is_refused(lambda name=name: come_and_go(name), errno.EMFILE, "ulimit -n")
            assert not files()
        assert 0 < refusals < 24
    works(names)


LISTENER = """
import sys, shmtensor
rx = getattr(shmtensor, sys.argv[2])(sys.argv[1])
print("joined", flush=True)
for number in range(40):
    assert int(rx.recv(timeout=60).value) == number
    print("got", flush=True)
rx.close()
"""


def sending_without_files(names) -> None:
    """No socket for a doorbell: the message is published all the same, and its sleeper finds it at a tick."""
    make, _ = pair_of(names)
    with make("c", slots=2, slot_bytes=64) as tx:
        for left in range(10):
            listener = Fellow(LISTENER.replace("40", "2"), "c", names[1])
            listener.listen("joined")
            tx._wait_for_receivers(1, PATIENCE, "receivers")
            asleep = tx._recipients.listeners[0].asleep
            wait_until(lambda words=tx._control_words, asleep=asleep: words[asleep] & 1)
            with few_files(left):
                tx.send(np.array(0), timeout=PATIENCE)
                listener.listen("got")
            tx.send(np.array(1), timeout=PATIENCE)
            listener.listen("got")
            listener.end()
    assert not files()


TALKER = """
import sys, numpy, shmtensor
tx = getattr(shmtensor, sys.argv[2])(sys.argv[1], slots=8, slot_bytes=64)
print("joined", flush=True)
number = 0
while sys.stdin.readline() == "go\\n":
    tx.send(numpy.array(number), timeout=60)
    number += 1
    print("sent", flush=True)
tx.close()
"""


def attaching_without_files(names) -> None:
    """What cannot be attached now is neither passed over nor the end of the stream."""
    _, take = pair_of(names)
    for left in (0, 1, 2, 3, 4, 5, 6, 8, 12):
        with take("c") as rx:
            talker = Fellow(TALKER, "c", names[0])
            talker.listen("joined")
            for _ in range(4):
                talker.say()
                talker.listen("sent")
            talker.end()  # it has closed: to lose it would be the end of the stream
            got = []
            with few_files(left):
                is_refused(lambda rx=rx, got=got: got.append(rx.recv(timeout=PATIENCE)), errno.EMFILE, "ulimit -n")
            assert bool(got) == (left > 0) or 0 < left < 12
            got += rx
            assert [int(msg.value) for msg in got] == [0, 1, 2, 3]
    assert not files()


def sleeping_without_files(names) -> None:
    """Who rings cannot be accepted: the receiver looks for itself."""
    _, take = pair_of(names)
    for left in range(5):
        talker = Fellow(TALKER, "c", names[0])
        talker.listen("joined")
        with take("c") as rx:
            talker.say()
            rx.recv(timeout=PATIENCE).release()
            talker.listen("sent")
            for number in range(1, 4):
                with few_files(left):
                    with pytest.raises(shmtensor.TimedOut):
                        rx.recv(timeout=0.3)
                    talker.say()
                    assert int(rx.recv(timeout=PATIENCE).value) == number
                    talker.listen("sent")
            with few_files(0):
                rx.close()
        talker.end()
    assert not files()


def the_dead_are_kept_without_files(names) -> None:
    """A member that cannot look into a dead sender's ring must not take it for empty."""
    _, take = pair_of(names)
    with take("c") as rx:
        talker, other = Fellow(TALKER, "c", names[0]), take("c")
        talker.listen("joined")
        for _ in range(3):
            talker.say()
            talker.listen("sent")
        talker.kill()
        with few_files(0):
            other.close()
        assert [int(msg.value) for msg in rx] == [0, 1, 2]
    assert not files()


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
@pytest.mark.parametrize(
    "scene",
    [
        joining_without_files, sending_without_files, attaching_without_files, sleeping_without_files,
        the_dead_are_kept_without_files,
    ],
)  # fmt: skip
def test_no_descriptors_left(scene, names):
    play(scene, names, mounts=(own_shm("size=64m"),))


# --- no address space, no large files


def without_address_space(names) -> None:
    make, take = pair_of(names)
    works(names)  # whatever is loaded at first use is loaded
    with limited(resource.RLIMIT_AS, address_space() + (24 << 20)):
        said = "raise ulimit -v or vm.max_map_count"
        refused(lambda: make("c", slots=64, slot_bytes="1MiB"), errno.ENOMEM, "cannot map 64.0 MiB", said)
        assert not files()
        works(names)
    talker = Fellow(TALKER.replace("slot_bytes=64", "slot_bytes=8 << 20"), "c", names[0])
    talker.listen("joined")
    with take("c") as rx:
        for _ in range(2):
            talker.say()
            talker.listen("sent")
        with limited(resource.RLIMIT_AS, address_space() + (24 << 20)):
            refused(lambda: rx.recv(timeout=PATIENCE), errno.ENOMEM, "cannot map 64.0 MiB", said)
        assert [int(rx.recv(timeout=PATIENCE).value) for _ in range(2)] == [0, 1]
        talker.end()
    assert not files()


def without_large_files(names) -> None:
    make, _ = pair_of(names)
    with limited(resource.RLIMIT_FSIZE, 4 << 20):
        refused(lambda: make("c", slots=16, slot_bytes="1MiB"), errno.EFBIG, r"needs 16\.\d MiB", "ulimit -f")
        assert not files()
        works(names)


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
@pytest.mark.parametrize("scene", [without_address_space, without_large_files])
def test_limits_of_memory_and_files(scene, names):
    play(scene, names, mounts=(own_shm("size=256m"),))
