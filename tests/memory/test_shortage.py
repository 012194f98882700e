"""Nothing left of something: room or files in `/dev/shm`, a place for sockets (limits: `memory/test_limits.py`).

Each is a `ResourceError` with numbers and a remedy, leaves nothing half-made, and harms neither what was there before
nor what is done when there is room again. The scenes run in processes of their own; see `tests/scenes.py`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil
import tempfile
import threading

import numpy as np
import pytest
from typer.testing import CliRunner

import shmtensor

from ..commands import app
from ..scenes import PAIRS, PATIENCE, come_and_go, files, is_refused, own_shm, pair_of, play, refused, works

SMALL = own_shm("size=2m")
PAGE = resource.getpagesize()

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def all_taken_but(nbytes: int):
    """Within, `/dev/shm` has so many bytes free."""
    space = os.statvfs("/dev/shm")
    with open("/dev/shm/ballast", "wb") as ballast:
        os.posix_fallocate(ballast.fileno(), 0, space.f_bavail * space.f_frsize - nbytes)
    yield
    os.unlink("/dev/shm/ballast")


# --- no room in /dev/shm


def ring_too_large(names) -> None:
    make, _ = pair_of(names)
    room = r"needs 16\.\d MiB, /dev/shm has [\d.]+ \w+ free: pass fewer slots.*--shm-size"
    refused(lambda: make("c", slots=16, slot_bytes="1MiB"), errno.ENOSPC, room)
    assert not files()
    tx = make("c", slots=16)
    before = files()
    refused(lambda: tx.send(np.zeros(1 << 17)), errno.ENOSPC, room)
    refused(lambda: tx.loan((1 << 20,), np.uint8), errno.ENOSPC, room)
    large = {str(number): number for number in range(200_000)}  # its description spills into the slot
    refused(lambda: tx.send({"x": np.zeros(3), "rest": large}), errno.ENOSPC, "MiB free")
    assert files() == before
    works(names, tx)
    assert not files()


def defaults_in_64_mb() -> None:
    """What Docker gives to a container. A frame of 6 MiB goes through everything, with default arguments."""
    frame = np.arange(6 << 20, dtype=np.uint8)

    def arrives(message) -> None:
        with message:
            assert np.array_equal(message.value, frame)

    for names in PAIRS:
        with contextlib.ExitStack() as stack:
            pairs = []
            for channel in ("a", "b", "c"):  # three of them beside each other
                tx, rx = (getattr(shmtensor, name)(channel) for name in names)
                pairs.append((stack.enter_context(tx), stack.enter_context(rx)))
            for _ in range(20):
                for tx, rx in pairs:
                    tx.send(frame, timeout=PATIENCE)
                    arrives(rx.recv(timeout=PATIENCE))
            slots = [tx.statistics().slots for tx, _ in pairs]
            assert slots[0] == 3
            assert min(slots) >= 2
    with shmtensor.Server("m") as server, shmtensor.Client("m") as one, shmtensor.Client("m") as other:
        thread = threading.Thread(target=server.run, args=(lambda value: value,))
        thread.start()
        for client in (one, other) * 5:
            assert np.array_equal(client.request(frame, timeout=PATIENCE), frame)
        server.stop()
        thread.join(PATIENCE)
    queue = shmtensor.Queue()
    for _ in range(20):
        queue.put(frame)
        assert np.array_equal(queue.get(timeout=PATIENCE), frame)
    queue.close()
    with tempfile.TemporaryDirectory() as folder, shmtensor.CheckpointWriter(folder) as writer:
        for step in range(3):
            writer.save({"frame": frame, "step": step}).durable.result(PATIENCE)
    with shmtensor.Publisher("a") as pub:
        held = np.zeros(40 << 20, np.uint8)
        refused(
            lambda: pub.send(held), errno.ENOSPC, r"needs 80\.0 MiB, .*: send smaller messages, or give .*--shm-size"
        )


def test_defaults_in_the_dev_shm_of_a_container():
    play(defaults_in_64_mb, mounts=(own_shm("size=64m"),))


def what_does_not_fit_is_sent_from_a_smaller_ring() -> None:
    """A ring with larger slots would be better, but there is no room for it."""
    with shmtensor.Producer("a") as tx, shmtensor.Consumer("a") as rx:
        tx.send(np.zeros(6 << 20, np.uint8))
        rx.recv(timeout=PATIENCE).release()
        with all_taken_but(8 << 20):
            for _ in range(4):
                tx.send(np.zeros(7 << 20, np.uint8), timeout=PATIENCE)
                rx.recv(timeout=PATIENCE).release()
            assert tx.statistics().rings == 1


def test_a_message_for_which_no_ring_has_room():
    play(what_does_not_fit_is_sent_from_a_smaller_ring, mounts=(own_shm("size=64m"),))


def growing(names) -> None:
    make, take = pair_of(names)
    with make("c", slots=2, slot_bytes="64KiB", full="grow") as tx, take("c") as rx:
        before = files()
        while not is_refused(
            lambda: tx.send(np.full(8192, tx.statistics().sent)), errno.ENOSPC, "needs .* free: pass fewer slots"
        ):
            before = files()
        sent = tx.statistics().sent
        assert sent >= 4
        assert files() == before
        assert tx.statistics().rings == sum(name.count(",") == 2 for name in before)
        kept = [rx.recv(timeout=PATIENCE).value for _ in range(sent)]
        assert all((value == number).all() for number, value in enumerate(kept))  # every page is really there
        kept.clear()
        if names[0] == "Producer":
            with contextlib.suppress(shmtensor.TimedOut):
                rx.recv(timeout=0)  # which says that the one before is done
        tx.send(np.full(8192, -1), timeout=PATIENCE)
        assert (rx.recv(timeout=PATIENCE).value == -1).all()
    assert not files()


def no_room_for_a_channel(names) -> None:
    """Whichever page is the last one: what cannot be made leaves nothing, and the others go on."""
    refusals = [0, 0]
    with pair_of(names)[0]("other", slots=2, slot_bytes=64) as other, pair_of(names)[1]("other") as reader:
        before = files()
        for pages in range(0, 120, 3):
            for end, name in enumerate(names):
                with all_taken_but(pages * PAGE):
                    refusals[end] += is_refused(lambda name=name: come_and_go(name), errno.ENOSPC, "/dev/shm has")
                    assert files() == before
                    other.send(np.array(pages), timeout=PATIENCE)
                    assert int(reader.recv(timeout=PATIENCE).value) == pages
    assert 0 < refusals[1] < refusals[0] < 40
    works(names)


def no_files_left(names) -> None:
    for name in names:
        refusals = 0
        for left in range(6):
            ballast = []
            while os.statvfs("/dev/shm").f_favail > left:
                ballast.append(f"/dev/shm/ballast{len(ballast)}")
                open(ballast[-1], "w").close()
            said = r"/dev/shm has .* and \d of 20 files free:.*nr_inodes"
            refusals += is_refused(lambda name=name: come_and_go(name), errno.ENOSPC, said)
            assert not files()
            for path in ballast:
                os.unlink(path)
        assert 0 < refusals < 6
    works(names)


def no_room_for_a_queue(name: str, method: str) -> None:
    """Its semaphores are files, too."""
    make, refusals = getattr(shmtensor, name), 0
    for pages in range(40):
        with all_taken_but(pages * PAGE):
            refusals += is_refused(lambda: make(ctx=method).close(), errno.ENOSPC, "/dev/shm has .*--shm-size")
        assert os.listdir("/dev/shm") == []
    assert 17 < refusals < 40  # not even the control segment; that, but not all semaphores; all
    with contextlib.closing(make(ctx=method)) as queue:
        queue.put(1)
        assert queue.get() == 1
    assert not files()


def commands() -> None:
    """The tools that should explain it work there, and say it."""
    run = CliRunner().invoke
    with shmtensor.Publisher("c", slots=2, slot_bytes=64), all_taken_but(0):
        assert run(app, ["doctor"]).exit_code == 1
        report = run(app, ["doctor", "--json"]).stdout
        assert "broke" not in report
        assert "--shm-size" in report
        assert re.search("needs 4.0 KiB, /dev/shm has 0 [a-z]* ?free", report), report
        listed = run(app, ["ls", "c"])
        assert listed.exit_code == 0
        assert "sender" in listed.stdout
        assert run(app, ["gc"]).exit_code == 0
        ballast = 0
        while os.statvfs("/dev/shm").f_favail:
            open(f"/dev/shm/ballast{ballast}", "w").close()
            ballast += 1
        report = run(app, ["doctor", "--json"]).stdout
        assert "broke" not in report
        assert "nr_inodes" in report
        assert run(app, ["ls", "c"]).exit_code == 0


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
@pytest.mark.parametrize("scene", [ring_too_large, growing, no_room_for_a_channel])
def test_a_full_dev_shm(scene, names):
    play(scene, names, mounts=(SMALL,))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("name", ["Queue", "JoinableQueue", "SimpleQueue"])
def test_a_full_dev_shm_and_queues(name, method):
    play(no_room_for_a_queue, name, method, mounts=(SMALL,))


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_no_files_left_in_dev_shm(names):
    play(no_files_left, names, mounts=(own_shm("size=8m,nr_inodes=20"),))


def test_commands_in_a_full_dev_shm():
    play(commands, mounts=(own_shm("size=2m,nr_inodes=40"),))


def read_only() -> None:
    for make in (shmtensor.Subscriber, shmtensor.Publisher):
        refused(lambda make=make: make("c"), errno.EROFS, "/dev/shm writable")
    assert CliRunner().invoke(app, ["ls"]).exit_code == 0
    report = CliRunner().invoke(app, ["doctor", "--json"])
    assert report.exit_code == 1
    assert "broke" not in report.stdout


def test_a_read_only_dev_shm():
    play(read_only, mounts=(own_shm("ro"),))


# --- no place for sockets


def no_socket(code: int, said: str) -> None:
    directory = os.environ["SHMTENSOR_DIR"] = "/mnt/sockets"
    refused(lambda: shmtensor.Subscriber("c"), code, said, "SHMTENSOR_DIR")
    assert not files()
    if code == errno.ENOSPC:  # the directory is there, and senders have no socket
        ends = pytest.warns(ResourceWarning, match="1 message that no consumer has finished ends")
        with ends, shmtensor.Producer("c") as tx:
            tx.send(np.zeros(3))
            refused(lambda: shmtensor.Consumer("c"), code, said, directory)
            assert tx.statistics().receivers == 0
        assert not files()
    os.environ["SHMTENSOR_DIR"] = "/tmp"


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [("mode=0700,nr_inodes=1", errno.ENOSPC, "No space left"), ("ro", errno.EROFS, "Read-only file system")],
)
def test_a_full_or_read_only_socket_directory(options, code, said):
    place = "/mnt/sockets" if code == errno.ENOSPC else "/mnt"
    mounts = (own_shm("size=2m"), "mode=0700 tmpfs /mnt && mkdir /mnt/sockets") if place != "/mnt" else (SMALL,)
    play(no_socket, code, said, mounts=(*mounts, f"{options} tmpfs {place}"))


def test_a_socket_directory_that_cannot_be(channel, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    for path, code in (("file", errno.ENOTDIR), ("file/sockets", errno.ENOTDIR)):
        monkeypatch.setenv("SHMTENSOR_DIR", str(tmp_path / path))
        refused(lambda: shmtensor.Subscriber(channel), code, "set SHMTENSOR_DIR to a")


def test_a_socket_directory_that_goes_away(channel, monkeypatch, tmp_path):
    """Who is there wakes by its tick; who comes later learns why it cannot meet them."""
    monkeypatch.setenv("SHMTENSOR_DIR", str(tmp_path / "sockets"))
    with shmtensor.Publisher(channel, slots=2) as tx:
        with shmtensor.Subscriber(channel) as rx:
            old = os.open(tmp_path / "sockets", os.O_PATH)  # its inode is not to be found again
            shutil.rmtree(tmp_path / "sockets")
            for number in range(3):
                tx.send(np.array(number), timeout=PATIENCE)
                assert int(rx.recv(timeout=PATIENCE).value) == number
        refused(lambda: shmtensor.Subscriber(channel), errno.EINVAL, "sockets in another directory")
    with shmtensor.Subscriber(channel):
        pass
    os.rmdir(tmp_path / "sockets")
    os.close(old)
