"""Names, the socket directory, membership, and sweeping what the dead leave."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import shmtensor
from shmtensor.channel import cleanup, membership
from shmtensor.channel import control as ctl
from shmtensor.channel.names import SERVER_FILES, control_name, parse_file, socket_dir
from shmtensor.memory import placement
from shmtensor.memory import segment as shm
from shmtensor.memory.words import store
from shmtensor.ring.layout import L_VERSION, R_VERSION
from shmtensor.ring.layout import VERSION as RING_VERSION
from shmtensor.rpc.request import record_of
from shmtensor.wire import record, spec

from ..conftest import FILES_ONLY, left_files, shared_files
from ..scenes import PAIRS, unswept
from ..waiting import PATIENCE, wait_until

ENDPOINTS = [shmtensor.Publisher, shmtensor.Subscriber, shmtensor.Producer, shmtensor.Consumer]


def killed(channel: str, body: str) -> None:
    """Run a program that leaves everything behind. Any other user of the library may sweep it at any time."""
    source = f"""
import os, sys, numpy as np, shmtensor
channel = sys.argv[1]
{body}
print([name for name in shmtensor.memory.segment.listing() if channel in name], flush=True)
os.kill(os.getpid(), 9)"""
    done = subprocess.run([sys.executable, "-c", source, channel], timeout=PATIENCE, stdout=subprocess.PIPE)
    assert done.returncode == -signal.SIGKILL
    assert b"shmtensor." in done.stdout, "left nothing behind"


@pytest.mark.parametrize("make", ENDPOINTS)
def test_the_last_to_leave_removes_everything(channel, make, socket_directory):
    endpoint = make(channel)
    assert shared_files()
    endpoint.close()
    assert not left_files()
    assert not set(os.listdir(socket_directory)) - SERVER_FILES


@pytest.mark.parametrize("make", ["Publisher", "Subscriber", "Producer", "Consumer"])
def test_the_next_user_sweeps_what_the_dead_left(channel, make):
    killed(channel, f"x = shmtensor.{make}(channel)\nif hasattr(x, 'send'): x.send(np.zeros(100))")
    getattr(shmtensor, make)(channel).close()
    assert not left_files()


def test_any_create_sweeps_other_dead_channels(channel):
    killed(channel + "-a", "x = shmtensor.Publisher(channel); x.send(np.zeros(100)); s = shmtensor.Subscriber(channel)")

    def are_swept() -> bool:
        with shmtensor.Publisher(channel + "-b"):
            return not [name for name in shared_files() if "-a" in name]

    wait_until(are_swept)  # a create passes by what another process is sweeping


@pytest.fixture
def looked_at(channel, monkeypatch):
    """What this process lists, opens and asks the status of, of this test's files in `/dev/shm`. It sees no others."""
    calls, listing = [], placement.Files.listing

    def listed(self):
        calls.append("listing")
        return [name for name in listing(self) if channel in name]

    def noted(call):
        def note(path, *rest, **options):
            if isinstance(path, str) and path.startswith(f"/dev/shm/shmtensor.{channel}"):
                calls.append(path)
            return call(path, *rest, **options)

        return note

    monkeypatch.setattr(placement.Files, "listing", listed)
    monkeypatch.setattr(os, "lstat", noted(os.lstat))
    monkeypatch.setattr(os, "open", noted(os.open))
    monkeypatch.setattr(cleanup, "_FRESH_NS", 0)  # as if all inboxes were old
    return calls


@FILES_ONLY
@pytest.mark.parametrize("make", ENDPOINTS)
def test_a_join_looks_once_at_each_other_channel_whose_members_live(channel, make, looked_at):
    with contextlib.ExitStack() as stack:
        for number in range(4):
            for each in ENDPOINTS[number // 2 * 2 :][:2]:
                stack.enter_context(each(f"{channel}-{number}"))
        del looked_at[:]
        with make(f"{channel}-new"):
            others = [call for call in looked_at if f"{channel}-new" not in call]
        assert sorted(others) == [*(f"/dev/shm/shmtensor.{channel}-{number}" for number in range(4)), "listing"]


@FILES_ONLY
def test_a_join_asks_in_one_channel_what_closed_senders_have_left(channel, looked_at):
    """There the receivers remove it, once they have taken it."""
    with contextlib.ExitStack() as stack:
        receivers = [stack.enter_context(shmtensor.Subscriber(f"{channel}-{number}")) for number in range(4)]
        for receiver in receivers:
            with shmtensor.Publisher(receiver.name) as tx:
                tx.send(np.zeros(9))
        before = shared_files()
        for _ in range(2):
            del looked_at[:]
            shmtensor.Producer(f"{channel}-new").close()
            asked = {found[0] for call in looked_at if (found := parse_file(os.path.basename(call))) and found[1]}
            assert len(asked - {f"{channel}-new"}) == 1
        assert shared_files() == before
        for receiver in receivers:
            assert receiver.recv(timeout=PATIENCE).value.size == 9
            with pytest.raises(shmtensor.EndOfStream):
                receiver.recv(timeout=PATIENCE)
        assert not [name for name in left_files() if "," in name]


@FILES_ONLY
def test_a_join_sees_the_dead_of_a_channel_with_many_members(channel):
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(shmtensor.Publisher(channel))
        before = shared_files()
        killed(channel, "x = shmtensor.Publisher(channel); x.send(np.zeros(100))")

        def is_swept() -> bool:
            shmtensor.Publisher(channel + "-b").close()
            return shared_files() == before

        wait_until(is_swept)


@FILES_ONLY
def test_a_create_waits_a_moment_for_who_else_has_the_lock(channel, monkeypatch):
    """So that what the dead left is removed, though somebody looked at it right then."""
    monkeypatch.setattr(membership, "_MOMENT", PATIENCE)
    dead = channel + "-a"
    with contextlib.ExitStack() as held:
        for _ in range(50):  # until nobody else sweeps in between
            open(f"/dev/shm/shmtensor.{dead}", "w").close()
            with contextlib.suppress(FileNotFoundError):
                held.enter_context(unswept(dead))
                if f"shmtensor.{dead}" in shared_files():
                    break
                held.close()  # it was swept before it was locked
        assert f"shmtensor.{dead}" in shared_files()
        threading.Timer(0.1, held.pop_all().close).start()
        with shmtensor.Publisher(channel + "-b"):
            assert not [name for name in shared_files() if dead in name]


def test_a_sweep_leaves_the_living_alone(channel):
    """What a dead publisher sent to a living subscriber is still needed; what nobody needs goes."""
    with shmtensor.Publisher(channel) as pub:
        for _ in range(50):  # until nobody else sweeps in between
            killed(channel, "x = shmtensor.Publisher(channel); x.send(np.zeros(9)); s = shmtensor.Subscriber(channel)")
            before = shared_files()
            doomed = [it for it in cleanup.sweep_all(socket_dir(), dry_run=True, patience=2) if channel in it.path]
            if doomed and shared_files() == before:
                break
        assert doomed
        assert shared_files() == before
        with shmtensor.Subscriber(channel) as sub:
            killed(channel, "x = shmtensor.Publisher(channel); x.send(np.zeros(7))")
            assert not [it for it in cleanup.sweep_all(socket_dir(), patience=2) if channel in it.path]
            pub.send(np.zeros(8))
            assert sorted(sub.recv(timeout=PATIENCE).value.size for _ in range(2)) == [7, 8]
        assert not any(os.path.exists(leftover.path) for leftover in doomed)
        assert pub.send(np.zeros(8)) == 2


@pytest.mark.filterwarnings("ignore:.*that no consumer has finished:ResourceWarning")  # on purpose
def test_control_segments_of_dead_kinds_are_taken_over(channel):
    killed(channel, "x = shmtensor.Publisher(channel)")
    with shmtensor.Producer(channel) as tx:
        assert tx.send(np.array(1)) == 1


def test_strays_without_a_control_segment_are_swept(channel):
    with shm.create(f"/shmtensor.{channel},{5:016x},0", 4096, "x"):
        pass
    shmtensor.Publisher(channel + "-other").close()
    assert not left_files()


def test_an_interrupted_creation_is_taken_over(channel):
    open(f"/dev/shm/shmtensor.{channel}", "w").close()
    with shmtensor.Publisher(channel) as pub:
        assert pub.send(np.array(1)) == 1


def test_another_version_is_a_clear_error_and_left_alone(channel):
    with shmtensor.Publisher(channel) as pub:
        words = pub._member.control.words
        store(words, ctl.W_VERSION, 99)
        with pytest.raises(shmtensor.WireError, match="version 99"):
            shmtensor.Subscriber(channel)
        cleanup.sweep_all(socket_dir())
        assert shared_files()
        store(words, ctl.W_VERSION, ctl.VERSION)


@FILES_ONLY
@pytest.mark.parametrize("content", [b"x" * 100, b"\xff" * (4096 + 256 * 256)])
def test_a_foreign_file_under_the_name_is_a_clear_error(channel, content):
    path = f"/dev/shm/shmtensor.{channel}"
    with open(f"/dev/shm/{channel}", "wb") as file:
        file.write(content)
    os.rename(file.name, path)  # an empty file would look like one that its maker died over, to whoever sweeps
    with pytest.raises(shmtensor.WireError, match="another"):
        shmtensor.Publisher(channel)
    os.unlink(path)


def test_too_many_members_is_a_clear_error(channel):
    with shmtensor.Publisher(channel) as pub, shm.attach(control_name(channel)) as segment:
        control, lives = pub._member.control, segment.locks()
        for index in range(1, ctl.CAPACITY):
            assert lives.try_exclusive(ctl.LIFE + index)
            store(control.words, ctl.base(index) + ctl.M_OWNER, index)
        with pytest.raises(shmtensor.ResourceError, match="256 members"):
            shmtensor.Subscriber(channel)
        with pytest.raises(shmtensor.ResourceError, match="256 members"):
            shmtensor.Subscriber(channel, group="workers")
        lives.unlock(ctl.LIFE + 1)
        store(control.words, ctl.base(1) + ctl.M_OWNER, 0)
        with pytest.raises(
            shmtensor.ResourceError, match=r'255 members of .* group "workers" takes an entry of its own'
        ):
            shmtensor.Subscriber(channel, group="workers")
        shmtensor.Subscriber(channel).close()
        for index in range(1, ctl.CAPACITY):
            store(control.words, ctl.base(index) + ctl.M_OWNER, 0)
        lives.close()


def test_the_socket_directory_must_be_ours(channel, tmp_path, monkeypatch):
    path = tmp_path / "sockets"
    path.mkdir(mode=0o755)
    monkeypatch.setenv("SHMTENSOR_DIR", str(path))
    with pytest.raises(shmtensor.ResourceError, match="chmod 700"):
        shmtensor.Publisher(channel)
    path.chmod(0o700)
    shmtensor.Publisher(channel).close()
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
        with pytest.raises(shmtensor.ResourceError, match="belongs to user 12345"):
            shmtensor.Publisher(channel)
    monkeypatch.setenv("SHMTENSOR_DIR", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    with pytest.raises(shmtensor.ResourceError, match="SHMTENSOR_DIR"):
        shmtensor.Publisher(channel)
    monkeypatch.setenv("SHMTENSOR_DIR", str(tmp_path / ("long" * 30)))
    with pytest.raises(shmtensor.ResourceError, match="too long"):
        shmtensor.Publisher(channel)


@FILES_ONLY
def test_members_with_another_socket_directory_are_refused(channel, tmp_path, monkeypatch):
    with shmtensor.Publisher(channel):
        path = tmp_path / "sockets"
        path.mkdir(mode=0o700)
        monkeypatch.setenv("SHMTENSOR_DIR", str(path))
        with pytest.raises(shmtensor.ResourceError, match="another directory"):
            shmtensor.Subscriber(channel)


@FILES_ONLY
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_is_told_whose_channel_it_is(channel, tmp_path):
    with shmtensor.Publisher(channel):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setgid(65534)
                os.setuid(65534)
                os.environ["SHMTENSOR_DIR"] = f"/tmp/shmt-other-{os.getpid()}"
                try:
                    shmtensor.Subscriber(channel)
                except shmtensor.ResourceError as error:
                    code = 0 if "belongs to user 0" in str(error) else 2
                with shmtensor.Publisher(channel + "-nobody") as pub:
                    pub.send(np.array(1))
                os.rmdir(os.environ["SHMTENSOR_DIR"])
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_full_dev_shm_is_a_clear_error_and_leaves_nothing(channel):
    with shmtensor.Publisher(channel) as pub:
        with pytest.raises(shmtensor.ResourceError, match=r"needs .*free: send smaller messages, or give"):
            pub._pool.add(shm.free_bytes())
        assert pub.send(np.array(1)) == 1
        assert pub.statistics().rings == 1


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("shmtensor.a", ("a", None)),
        ("shmtensor.a.b-c,00000000000000ff,3", ("a.b-c", 255)),
        ("sem.shmtensor.a,00000000000000ff", ("a", 255)),
        ("shmtensor.a,xyz", None),
        ("other", None),
    ],
)
def test_file_names(name, parsed):
    assert parse_file(name) == parsed


def test_a_sweep_removes_the_sockets_of_a_channel_that_keeps_them_elsewhere(channel, tmp_path, monkeypatch):
    path = tmp_path / "sockets"
    path.mkdir(mode=0o700)
    with monkeypatch.context() as patch:
        patch.setenv("SHMTENSOR_DIR", str(path))
        killed(channel, "s = shmtensor.Subscriber(channel); assert os.listdir(os.environ['SHMTENSOR_DIR'])")

    def swept():
        shmtensor.Publisher(channel + "-other").close()  # or whoever is sweeping that channel just now
        return not os.listdir(path)

    wait_until(swept)


@FILES_ONLY
def test_a_removal_of_rings_that_was_interrupted_can_be_repeated(channel, socket_directory, monkeypatch):
    uid, removed = 7, []
    paths = [f"/dev/shm/shmtensor.{channel},{uid:016x},{index}" for index in range(3)]
    unlink = os.unlink

    def unlink_one(path):
        if path in paths:
            if removed:
                raise KeyboardInterrupt
            removed.append(path)
        unlink(path)

    with shmtensor.Publisher(channel), unswept(channel):  # these files are nobody's: another program's sweep passes by
        for path in paths:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, "unlink", unlink_one)
            cleanup.unlink_member(channel, uid, socket_directory)
        assert sum(map(os.path.exists, paths)) == 2
        cleanup.unlink_member(channel, uid, socket_directory)
    assert not any(map(os.path.exists, paths))


OTHER_VERSION = r"process {pid} .*layout version 99, this library reads [12]"


@pytest.mark.parametrize(
    "pair", [(shmtensor.Publisher, shmtensor.Subscriber), (shmtensor.Producer, shmtensor.Consumer)]
)
def test_a_living_sender_of_another_version_is_no_end_of_stream(channel, pair, caplog):
    said = OTHER_VERSION.format(pid=os.getpid())
    with pair[0](channel, slots=2) as stranger, pair[0](channel, slots=2) as known:
        store(stranger._words, L_VERSION, 99)
        with pair[1](channel) as rx:
            known.send(np.array(1))
            rx.recv(timeout=100).release()  # who can be read is read
            with pytest.raises(shmtensor.TimedOut, match=f"of process {os.getpid()} nothing can be read"):
                rx.recv(timeout=0)
            known.close()
            for timeout in (30, 0, None):
                with pytest.raises(shmtensor.WireError, match=said):
                    rx.recv(timeout=timeout)
            assert caplog.text.count("cannot attach") == rx.statistics().bad_records == 1
            stranger.close()
            with pytest.raises(shmtensor.EndOfStream):
                rx.recv(timeout=100)


OURS = {"record": record.VERSION, "description": spec.VERSION, "ring": RING_VERSION}


def write_versions(sender, where: str, version: int) -> None:
    """Let a sender's ring, or the records or the descriptions of all its messages, be of a version."""
    for ring in sender._rings:
        if where == "ring":
            store(ring.words, R_VERSION, version)
        for slot in range(ring.slots):
            at = ring.records + slot * record.SIZE
            if where != "ring" and ring.words[at // 8]:
                ring.view[at + {"record": record.CONSTANT_OFFSET, "description": record.INLINE_OFFSET}[where]] = version


@pytest.mark.filterwarnings("ignore:.*no consumer has finished:ResourceWarning")
@pytest.mark.parametrize("where", ["record", "description", "ring"])
@pytest.mark.parametrize(
    "pair", [(shmtensor.Publisher, shmtensor.Subscriber), (shmtensor.Producer, shmtensor.Consumer)]
)
def test_a_living_sender_whose_messages_are_of_another_version(channel, pair, where, caplog):
    """It is named as one whose sequence table is; a work queue's messages stay for consumers that can read them."""
    with pair[0](channel, slots=4) as stranger, pair[0](channel, slots=4) as known, pair[1](channel) as rx:
        for number in range(3):
            stranger.send(np.array(number))
        write_versions(stranger, where, 99)
        for number in range(2):
            known.send(np.array(10 + number))
            message = rx.recv(timeout=100)
            assert message.value == 10 + number  # who can be read is read
            message.release()
        known.close()
        for timeout in (30, 0, None):
            with pytest.raises(shmtensor.WireError, match=OTHER_VERSION.format(pid=os.getpid())):
                rx.recv(timeout=timeout)
        assert caplog.text.count("cannot attach") == rx.statistics().bad_records == 1
        assert "passed over" not in caplog.text
        if pair[1] is shmtensor.Consumer:
            write_versions(stranger, where, OURS[where])
            with pair[1](channel) as reader:
                got = [reader.recv(timeout=100) for _ in range(3)]
                assert [int(message.value) for message in got] == [0, 1, 2]
                for message in got:
                    message.release()
                got = message = None
        stranger.close()
        with pytest.raises(shmtensor.EndOfStream):
            rx.recv(timeout=100)


def test_a_damaged_record_of_a_sender_that_was_read_is_passed_over(channel, caplog):
    """A version does not change on the way."""
    with shmtensor.Publisher(channel, slots=4) as tx, shmtensor.Subscriber(channel) as rx:
        for number in range(4):
            tx.send({"number": number})
            if number == 2:
                write_versions(tx, "record", 99)
            if number != 2:
                assert rx.recv(timeout=100).value == {"number": number}
        assert (rx.statistics().bad_records, rx.statistics().senders) == (1, 1)
        assert caplog.text.count("passed over") == 1


def test_a_reply_of_another_version_is_named(channel):
    with shmtensor.Server(channel) as server, shmtensor.Client(channel) as client:
        future = client.submit(np.array(1))
        # the client's thread does not look before the version is there
        with server.recv(timeout=100) as request, client._in_flight.leading:
            replies = server._taken.replies_for(record_of(request))
            store(replies._words, L_VERSION, 99)
            request.reply(np.array(2))
        with pytest.raises(shmtensor.WireError, match=OTHER_VERSION.format(pid=os.getpid())):
            future.result(100)


@pytest.mark.parametrize(("sender", "receiver"), PAIRS)
def test_a_receiver_waits_for_a_sender_that_is_joining(channel, monkeypatch, sender, receiver):
    """Whatever it sees of the table of members while the first sender enters: that is no end of the stream."""
    looks = 0
    with getattr(shmtensor, receiver)(channel) as rx:

        def stored(words, index, value):
            nonlocal looks
            store(words, index, value)
            with pytest.raises(shmtensor.TimedOut):
                rx.recv(timeout=0)
            looks += 1

        with monkeypatch.context() as patch:
            patch.setattr(membership.words, "store", stored)
            patch.setattr(ctl, "store", stored)
            tx = getattr(shmtensor, sender)(channel)
        assert looks > 5
        with tx:
            tx.send({"number": 1})
            with rx.recv(timeout=PATIENCE) as msg:
                assert msg.value == {"number": 1}
        with pytest.raises(shmtensor.EndOfStream):
            rx.recv(timeout=PATIENCE)
