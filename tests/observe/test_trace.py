"""`shmtensor trace`: what members write for a tracer, what it reads, and what is left on when it dies (nothing)."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

import shmtensor
from shmtensor.channel import membership
from shmtensor.cli import watch
from shmtensor.memory.words import store
from shmtensor.observe import trace
from shmtensor.observe.trace import Tracer, every_that_fits
from shmtensor.ring import events as ev

from ..commands import app
from ..conftest import shared_files
from ..implementations import once, only
from ..scenes import Fellow
from ..waiting import PATIENCE, wait_until

SENDER = """
import sys, numpy, shmtensor
tx = shmtensor.Publisher(sys.argv[1], slots=4, label="left")
print("joined", flush=True)
for line in sys.stdin:
    for number in range(int(line)):
        tx.send(numpy.zeros(100))
    print("sent", flush=True)
"""
TRACER = """
import sys
from shmtensor.observe.trace import Tracer
with Tracer(sys.argv[1], size=64) as tracer:
    print("traces", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(params=["fan-out", "group", "work queue"])
def pair(request):
    if request.param == "fan-out":
        return shmtensor.Publisher, shmtensor.Subscriber
    if request.param == "group":
        return shmtensor.Publisher, functools.partial(shmtensor.Subscriber, group="g")
    return shmtensor.Producer, shmtensor.Consumer


def rows(tracer: Tracer) -> list[tuple[int, ...]]:
    """Kind, sequence number, sender, begin, middle, end, bytes, member and pid of each event, in the order of ends."""
    found = tracer.trace.events().tolist()
    return [(row[0] & 0xFF, row[0] >> 8, *row[1:]) for row in found]


def exchange(tx, rx, count: int) -> None:
    for number in range(count):
        tx.send(np.full(100, number))
        rx.recv(timeout=PATIENCE).release()


def uid(endpoint) -> int:
    return next(it.uid for it in shmtensor.inspect(endpoint.name).members if it.uid == endpoint._member.uid)


def test_each_send_take_and_release_is_seen(channel, pair):
    with pair[0](channel, slots=4) as tx, pair[1](channel) as rx:
        exchange(tx, rx, 2)
        before = time.monotonic_ns()
        with Tracer(channel) as tracer:
            exchange(tx, rx, 3)
            tracer.poll()
            after = time.monotonic_ns()
            found = rows(tracer)
            assert len(found) == 9
            assert {row[8] for row in found} == {os.getpid()}
            assert {row[2] for row in found} == {uid(tx)}
            for seq in (3, 4, 5):
                sent, taken, released = sorted(row for row in found if row[1] == seq)
                assert [row[0] for row in (sent, taken, released)] == [ev.SEND, ev.TAKE, ev.RELEASE]
                assert (sent[7], taken[7], released[7]) == (uid(tx), uid(rx), uid(rx))
                assert before <= sent[3] <= sent[4] <= sent[5] <= taken[5] <= released[5] <= after
                assert taken[3] <= taken[5]
                assert (sent[6], taken[6], taken[4]) == (800, 800, 1)
            assert tracer.trace.lost == 0


def test_the_time_of_a_send_is_that_of_its_message(channel):
    with shmtensor.Publisher(channel) as pub, shmtensor.Subscriber(channel) as sub, Tracer(channel) as tracer:
        pub.send(np.zeros(10))
        message = sub.recv(timeout=PATIENCE)
        tracer.poll()
        (sent, _) = rows(tracer)
        assert sent[5] == round(message.sent_monotonic * 1e9)
        message.release()


def test_a_wait_for_a_slot_is_part_of_the_send(channel, pair):
    with pair[0](channel, slots=1) as tx, pair[1](channel) as rx, Tracer(channel) as tracer:
        tx.send(np.zeros(10))
        thread = threading.Thread(target=tx.send, args=(np.zeros(10),))
        thread.start()
        wait_until(lambda: tx.statistics().waits)
        waited_until = time.monotonic_ns()
        rx.recv(timeout=PATIENCE).release()
        thread.join(PATIENCE)
        rx.recv(timeout=PATIENCE).release()
        tracer.poll()
        (sent,) = [row for row in rows(tracer) if row[:2] == (ev.SEND, 2)]
        assert sent[3] < waited_until < sent[4] <= sent[5]


def test_a_loan_is_a_send(channel):
    with shmtensor.Publisher(channel) as pub, shmtensor.Subscriber(channel) as sub, Tracer(channel) as tracer:
        with pub.loan(10, np.float64) as loan:
            lent = time.monotonic_ns()
            loan.array[...] = 1
        sub.recv(timeout=PATIENCE).release()
        tracer.poll()
        sent = rows(tracer)[0]
        assert sent[3] <= sent[4] <= lent <= sent[5]


def test_nothing_is_written_before_and_after(channel, pair):
    with pair[0](channel) as tx, pair[1](channel) as rx:
        with Tracer(channel) as tracer:
            exchange(tx, rx, 1)
        assert tracer.trace.count == 3  # closing reads the rest
        log = tx._recipients.events
        written = log.words[ev.A_WRITTEN]
        exchange(tx, rx, 5)
        assert tx._recipients.events is None
        assert log.words[ev.A_WRITTEN] == written
        assert not [name for name in shared_files() if f"{tracer.trace.channel},{log.limits[ev.T_UID]:016x}" in name]
        assert [it.role for it in shmtensor.inspect(channel).members] == ["sender", "receiver"]


def test_what_was_overwritten_is_counted(channel):
    with shmtensor.Publisher(channel, slots=4) as pub, Tracer(channel, size=64) as tracer:
        for number in range(200):
            pub.send(np.array(number))
        tracer.poll()
        assert tracer.trace.count == 63  # the oldest could be being overwritten just now
        assert tracer.trace.lost == 200 - 63
        assert [row[1] for row in rows(tracer)] == list(range(138, 201))
        for number in range(50):
            pub.send(np.array(number))
        assert tracer.poll() == 50


def test_every_nth_message(channel, pair):
    with pair[0](channel) as tx, pair[1](channel) as rx, Tracer(channel, every=3) as tracer:
        exchange(tx, rx, 10)
        tracer.poll()
        assert [row[:2] for row in sorted(rows(tracer), key=lambda row: row[1::-1])] == [
            (kind, seq) for seq in (3, 6, 9) for kind in (ev.SEND, ev.TAKE, ev.RELEASE)
        ]


def test_a_fast_channel_is_traced_by_samples(channel, pair):
    """As many messages as fit, by the rate and the receivers that the channel has when the trace begins."""
    assert every_that_fits(channel, 5, 10) == 1  # there is no such channel
    with pair[0](channel, slots=64) as tx, pair[1](channel) as rx, pair[1](channel) as other:
        assert every_that_fits(channel, 5, 10) == 1  # nothing is sent
        each = 3 if len(shmtensor.inspect(channel).receivers[0].group) or pair[0] is shmtensor.Producer else 5

        def read(pause: float) -> None:
            """In place of the pause between the two readings: 10 messages in one second."""
            times.append(1.0)
            for number in range(10):
                tx.send(np.array(number))

        times = [0.0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trace, "time", SimpleNamespace(monotonic=lambda: sum(times), sleep=read))
            assert every_that_fits(channel, 5, 1000) == 1
            times[:] = [0.0]
            assert every_that_fits(channel, 100, 100) == 10 * each
        for receiver in rx, other:
            with contextlib.suppress(TimeoutError):
                while True:
                    receiver.recv(timeout=0).release()


def test_each_receiver_has_its_takes(channel):
    with (
        shmtensor.Publisher(channel) as pub,
        shmtensor.Subscriber(channel) as one,
        shmtensor.Subscriber(channel, delivery="latest") as two,
        Tracer(channel) as tracer,
    ):
        pub.send(np.zeros(1))
        for sub in (one, two):
            sub.recv(timeout=PATIENCE).release()
        tracer.poll()
        assert [row[7] for row in rows(tracer) if row[0] == ev.TAKE] == [uid(one), uid(two)]


def test_an_attempt_is_told(channel):
    with shmtensor.Producer(channel) as tx, shmtensor.Consumer(channel) as rx, Tracer(channel) as tracer:
        tx.send(np.zeros(1))
        with pytest.raises(KeyError), rx.recv(timeout=PATIENCE):
            raise KeyError
        rx.recv(timeout=PATIENCE).release()
        tracer.poll()
        assert [row[4] for row in rows(tracer) if row[0] == ev.TAKE] == [1, 2]


def test_requests_are_traced(channel):
    with shmtensor.Server(channel) as server, shmtensor.Client(channel) as client, Tracer(channel) as tracer:
        thread = threading.Thread(target=server.run, args=(np.negative,))
        thread.start()
        assert client.request(np.ones(2), timeout=PATIENCE).tolist() == [-1, -1]
        server.stop()
        thread.join(PATIENCE)
        tracer.poll()
        assert [row[0] for row in rows(tracer)] == [ev.SEND, ev.TAKE, ev.RELEASE]


# --- deaths


def test_what_a_killed_member_had_written_is_seen(channel):
    with shmtensor.Subscriber(channel):
        fellow = Fellow(SENDER, channel)
        fellow.listen("joined")
        with Tracer(channel) as tracer:
            fellow.say("3")
            fellow.listen("sent")
            fellow.kill()
            shmtensor.Publisher(channel).close()  # sweeps what it has left, its entry included
            tracer.poll()
            assert [row[1] for row in rows(tracer) if row[8] == fellow.process.pid] == [1, 2, 3]


def test_a_newcomer_does_not_overwrite_what_a_former_member_has_written(channel):
    with shmtensor.Subscriber(channel) as sub, Tracer(channel) as tracer:
        uids = []
        for _ in range(3):
            with shmtensor.Publisher(channel) as pub:
                index = pub._member.index
                exchange(pub, sub, 2)
                uids.append(uid(pub))
        assert index == 2  # the same each time
        tracer.poll()
        assert [row[7] for row in rows(tracer) if row[0] == ev.SEND] == [each for each in uids for _ in range(2)]


@pytest.mark.slow
def test_a_killed_tracer_leaves_nothing(channel):
    with shmtensor.Publisher(channel) as pub, shmtensor.Subscriber(channel) as sub:
        fellow = Fellow(TRACER, channel)
        fellow.listen("traces")
        exchange(pub, sub, 3)
        log = pub._recipients.events
        assert log.words[ev.A_WRITTEN] == 3
        fellow.kill()
        shmtensor.Subscriber(channel).close()  # any join, departure and `shmtensor gc` sweeps
        assert {it.role for it in shmtensor.inspect(channel).members} == {"sender", "receiver"}
        exchange(pub, sub, 3)
        assert pub._recipients.events is None
        assert log.words[ev.A_WRITTEN] == 3


def test_members_stop_when_the_tracer_does_not_renew(channel):
    """It was killed, and no other process comes that would sweep; or it was stopped, and goes on."""
    with shmtensor.Publisher(channel) as pub, shmtensor.Subscriber(channel) as sub, Tracer(channel) as tracer:
        exchange(pub, sub, 1)
        store(tracer._limits, ev.T_UNTIL, time.monotonic_ns())
        tracer._until = 1
        exchange(pub, sub, 3)
        assert pub._recipients.events.words[ev.A_WRITTEN] == 1
        tracer.poll()
        assert tracer.trace.count == 3
        exchange(pub, sub, 1)
        tracer.poll()
        assert [row[:2] for row in rows(tracer)[3:]] == [(ev.SEND, 5), (ev.TAKE, 5), (ev.RELEASE, 5)]


def test_a_channel_is_traced_once_at_a_time(channel):
    with shmtensor.Publisher(channel), Tracer(channel):
        with pytest.raises(shmtensor.ResourceError, match=f"traced by process {os.getpid()}"):
            Tracer(channel)
        assert [it.role for it in shmtensor.inspect(channel).members] == ["sender", "tracer"]


def test_a_member_without_room_for_its_events_goes_on(channel, monkeypatch, caplog):
    def attach(*_):
        raise shmtensor.ResourceError(28, "no room")

    monkeypatch.setattr(membership.EventLog, "attach", attach)
    with shmtensor.Publisher(channel) as pub, shmtensor.Subscriber(channel) as sub, Tracer(channel) as tracer:
        exchange(pub, sub, 3)
        tracer.poll()
        assert tracer.trace.count == 0
    assert [record.name for record in caplog.records] == ["shmtensor.channel"] * 2  # each once
    assert "is traced, but for this member: " in caplog.text


@pytest.mark.parametrize("word", [ev.T_MAGIC, ev.T_SIZE, ev.T_EVERY, ev.T_UID, ev.T_VERSION])
def test_a_damaged_trace_is_not_written_to(channel, word):
    with shmtensor.Publisher(channel) as pub, shmtensor.Subscriber(channel) as sub, Tracer(channel) as tracer:
        store(tracer._limits, word, 1 << 60)
        exchange(pub, sub, 1)
        assert pub._recipients.events is None


@only("pure", "the compiled one writes an event without a boundary")
def test_an_event_that_meets_another_is_skipped_and_counted(channel):
    with shmtensor.Publisher(channel) as pub, Tracer(channel) as tracer:
        pub.send(b"1")
        with pub._recipients.events._busy:
            pub.send(b"2")
        pub.send(b"3")
        tracer.poll()
        assert [row[1] for row in rows(tracer)] == [1, 3]
        assert tracer.trace.lost == 1


def test_a_forked_child_writes_nothing(channel):
    with shmtensor.Publisher(channel) as pub, shmtensor.Subscriber(channel) as sub, Tracer(channel) as tracer:
        pub.send(np.zeros(10))
        value = sub.recv(timeout=PATIENCE).value
        process = shmtensor.get_context("fork").Process(target=int)
        process.start()
        process.join(PATIENCE)
        assert process.exitcode == 0
        tracer.poll()
        assert tracer.trace.count == 2
        del value
        tracer.poll()
        assert {row[8] for row in rows(tracer)} == {os.getpid()}
        assert tracer.trace.count == 3


@pytest.mark.slow
def test_reading_beside_a_fast_writer(channel):
    """Every event that is read is whole, and what is not read is counted."""
    fellow = Fellow(SENDER, channel)
    fellow.listen("joined")
    with Tracer(channel, size=64) as tracer:
        fellow.say("20000")
        reader = threading.Thread(target=fellow.listen, args=("sent",))
        reader.start()
        while reader.is_alive():
            tracer.poll()
        tracer.poll()
        found = rows(tracer)
        seqs = [row[1] for row in found]
        assert seqs == sorted(set(seqs))
        assert {row[0] for row in found} == {ev.SEND}
        assert {row[6] for row in found} == {800}
        assert len(found) + tracer.trace.lost == 20_000
    fellow.end()


# --- the file


def test_flows_lead_from_process_to_process(channel, tmp_path):
    with (
        shmtensor.Publisher(channel, label="left") as pub,
        shmtensor.Subscriber(channel) as one,
        shmtensor.Subscriber(channel) as two,
    ):
        with Tracer(channel) as tracer:
            for number in range(4):
                pub.send(np.array(number))
                for sub in (one, two):
                    sub.recv(timeout=PATIENCE).release()
            pub.send(np.array(4))
            kept = one.recv(timeout=PATIENCE)
        with open(tmp_path / "t.json", "w") as file:
            assert trace.write_chrome(tracer.trace, file, "0") == 5
        made = json.loads((tmp_path / "t.json").read_text())
        check_chrome(made)
        slices = [it for it in made["traceEvents"] if it["ph"] == "X"]
        assert {it["name"] for it in slices} >= {"send", "take", "release"}
        chains: dict[str, str] = {}
        for it in made["traceEvents"]:
            if it["ph"] in "stf":
                chains[it["id"]] = chains.get(it["id"], "") + it["ph"]
        assert sorted(chains.values()) == ["stf"] * 9  # 4 to each of two, and one that is held still
        names = {it["args"]["name"] for it in made["traceEvents"] if it["name"] == "thread_name"}
        assert "sender left" in names
        assert len(names) == 3
        assert sum(it["ph"] == "b" for it in made["traceEvents"]) == 8
        kept.release()
        two.recv(timeout=PATIENCE).release()


def check_chrome(made: dict) -> None:
    """Each flow event lies within a slice of its thread; each asynchronous slice ends."""
    assert made["displayTimeUnit"] == "ns"
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for it in made["traceEvents"]:
        assert {"name", "ph", "pid", "tid"} <= set(it)
        if it["ph"] == "X":
            slices.setdefault((it["pid"], it["tid"]), []).append((it["ts"], it["ts"] + it["dur"]))
    for it in made["traceEvents"]:
        if it["ph"] in "stf":
            around = slices[it["pid"], it["tid"]]
            assert any(begin - 0.001 <= it["ts"] <= end + 0.001 for begin, end in around), it
    begun = sorted(it["id"] for it in made["traceEvents"] if it["ph"] == "b")
    assert begun == sorted(it["id"] for it in made["traceEvents"] if it["ph"] == "e")


# --- the command


def run(*args: str, code: int = 0):
    result = CliRunner().invoke(app, ["trace", *args])
    assert result.exit_code == code, (result.output, result.exception)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_command_traces_other_processes(channel, number, tmp_path):
    path = tmp_path / "trace.json"
    with shmtensor.Subscriber(channel) as sub:
        fellow = Fellow(SENDER, channel)
        fellow.listen("joined")
        full = [sys.executable, "-m", "shmtensor", "trace", channel, "--seconds", "0", "-o", str(path), "--json"]
        with subprocess.Popen(full, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            wait_until(lambda: "tracer" in [it.role for it in shmtensor.inspect(channel).members])
            fellow.say("3")
            for _ in range(3):
                sub.recv(timeout=PATIENCE).release()
            fellow.listen("sent")
            process.send_signal(number)
            out, err = process.communicate(timeout=PATIENCE)
            assert (process.returncode, err) == (0, "")
        fellow.end()
    said = json.loads(out)
    assert (said["channel"], said["events"], said["messages"], said["members"]) == (channel, 9, 3, 2)
    assert (said["lost"], said["end"], said["file"]) == (0, "interrupted", str(path))
    made = json.loads(path.read_text())
    check_chrome(made)
    assert len({it["pid"] for it in made["traceEvents"]}) == 2
    assert os.listdir(tmp_path) == ["trace.json"]


@once("no endpoint")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_it_waits_for_the_channel_leaves_no_file(channel, number, tmp_path):
    def kill() -> None:
        wait_until(lambda: os.listdir(tmp_path))
        wait_until(lambda: signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=kill)
    thread.start()
    run(channel, "--timeout", "100", "-o", str(tmp_path / "trace.json"), code=130)
    thread.join()
    assert os.listdir(tmp_path) == []


@once("no endpoint")
def test_the_first_control_c_interrupts_nothing():
    with pytest.raises(KeyboardInterrupt), watch.until_second_interrupt() as interrupted:
        signal.raise_signal(signal.SIGINT)
        assert interrupted == [signal.SIGINT]
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_command_ends_by_itself(channel, tmp_path):
    path = tmp_path / "trace.json"
    with shmtensor.Publisher(channel) as pub:
        result = run(channel, "--seconds", "0.05", "-o", str(path))
        assert "0 events of 0 messages" in result.stdout.replace("\n", " ")
        assert json.loads(path.read_text())["otherData"]["kind"] == "fan-out"
        ended = threading.Event()

        def send() -> None:
            while not ended.is_set():
                pub.send(b"1")

        thread = threading.Thread(target=send)
        thread.start()
        try:
            text = run(channel, "--seconds", "600", "-o", str(path), "--most", "10", "--every", "2").stdout
        finally:
            ended.set()
            thread.join()
        assert "one of 2 messages was traced: see --every" in text.replace("\n", " ")
        sent = [it["args"]["seq"] for it in json.loads(path.read_text())["traceEvents"] if it["name"] == "send"]
        assert len(sent) >= 10
        assert not [seq for seq in sent if seq % 2]


def test_the_command_writes_to_stdout(channel, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with shmtensor.Publisher(channel):
        result = run(channel, "--seconds", "0.05", "-o", "-")
        assert json.loads(result.stdout)["otherData"]["channel"] == channel
        assert "stdout: 0 events" in result.stderr
        assert "choose another --output" in run(channel, "-o", "-", "--json", code=2).stderr
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_said(channel):
    with shmtensor.Publisher(channel):
        said = run(channel, "--seconds", "0.05", "-o", "/dev/full", code=1).stderr
        assert "cannot write /dev/full: No space left on device: choose another --output" in said.replace("\n", " ")


@once("no endpoint")
def test_the_command_refuses(channel, tmp_path):
    path = str(tmp_path / "trace.json")
    assert "there is no channel" in run(channel, "-o", path, code=1).stderr
    assert "use 1 to 64" in run("no/such", "-o", path, code=2).stderr.replace("\n", " ")
    assert "cannot write" in run(channel, "-o", str(tmp_path / "no" / "such"), code=2).stderr
    assert "is a directory" in run(channel, "-o", str(tmp_path), code=2).stderr.replace("\n", " ")
    with shmtensor.Publisher(channel), Tracer(channel):
        assert "is traced by process" in run(channel, "-o", path, code=1).stderr.replace("\n", " ")
    assert os.listdir(tmp_path) == []


def test_messages_that_end_with_the_trace_are_told(channel, tmp_path):
    """A producer that leaves while its channel is traced is not the last member: the tracer is."""
    with shmtensor.Producer(channel) as tx, Tracer(channel) as tracer:
        tx.send(np.zeros(1))
        tx.close()
        assert tracer.close() == 1


def test_the_output_may_be_a_fifo_or_a_link(channel, tmp_path):
    """What stands at the path is not replaced by a file: it may be /dev/null."""
    fifo, target, link = (tmp_path / name for name in ("fifo", "target", "link"))
    os.mkfifo(fifo)
    link.symlink_to(target)
    found = []
    reader = threading.Thread(target=lambda: found.append(fifo.read_text()))
    reader.start()
    with shmtensor.Publisher(channel):
        for path in (fifo, link):
            assert CliRunner().invoke(app, ["trace", channel, "--seconds", "0.1", "-o", str(path)]).exit_code == 0
    reader.join(PATIENCE)
    assert json.loads(found[0])["otherData"]["channel"] == channel
    assert fifo.is_fifo()
    assert link.is_symlink()
    assert json.loads(target.read_text())["otherData"]["channel"] == channel
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fifo", "link", "target"]
