"""`shmtensor top`, `hz`, `echo` and `metrics`: what they print, while members come, go and die."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import urllib.request
from types import SimpleNamespace

import numpy as np
import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

import shmtensor
from shmtensor.channel import inspect as looking
from shmtensor.channel.control import LOCK
from shmtensor.channel.inspect import Inspector
from shmtensor.channel.processes import name_of
from shmtensor.cli import output, top, watch
from shmtensor.codec.implementation import encode
from shmtensor.codec.outline import Outline, as_json, as_text
from shmtensor.errors import ResourceError
from shmtensor.memory import segment as shm
from shmtensor.observe import messages as reading
from shmtensor.observe.messages import Messages
from shmtensor.observe.rates import Rates

from ..commands import app
from ..implementations import once
from ..scenes import Fellow, unswept
from ..waiting import PATIENCE, wait_until

HOLDER = """
import sys, shmtensor
rx = shmtensor.Subscriber(sys.argv[1])
print("joined", flush=True)
value = rx.recv(timeout=120).value
print("taken", flush=True)
sys.stdin.readline()
"""
UNFINISHED = pytest.mark.filterwarnings("ignore:.*that no consumer has finished:ResourceWarning")


def cli(*args: str, code: int = 0, width: int = 80) -> str:
    result = CliRunner().invoke(app, list(args), env={"COLUMNS": str(width)})
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout


def only(channel: str):
    return lambda name: name == channel


# --- top


def test_rates_come_from_two_readings(channel):
    inspector, rates = Inspector(), Rates()
    with shmtensor.Publisher(channel, slots=8, slot_bytes=4096) as pub, shmtensor.Subscriber(channel) as sub:
        pub.send(np.zeros(100))
        rates.update(inspector.channels(only(channel)), 10.0)
        for _ in range(4):
            pub.send(np.zeros(100))
            sub.recv(timeout=PATIENCE).release()
        (found,) = inspector.channels(only(channel))
        assert rates.of_channel(found) is None
        rates.update([found], 12.0)
        (sender,), (receiver,) = found.senders, found.receivers
        assert (rates.of(sender).messages, rates.of(sender).nbytes) == (2.0, 1600.0)
        assert rates.of(receiver).messages == 2.0
        assert rates.of_channel(found) == rates.of(sender)
        sub.recv(timeout=PATIENCE).release()


def test_a_newest_message_that_is_overwritten_counts_as_large_as_before(channel):
    inspector, rates, windows = Inspector(), Rates(), watch.Windows(10.0)
    with shmtensor.Publisher(channel, slots=1, slot_bytes=4096) as pub:

        def look(at: float) -> shmtensor.MemberInfo:
            (found,) = inspector.channels(only(channel))
            rates.update([found], at)
            windows.add(found, at)
            return found.senders[0]

        pub.send(np.zeros(100))
        look(10.0)
        pub.send(np.zeros(100))
        with pub.loan((200,), np.float64):  # it takes the slot of the newest message
            sender = look(11.0)
            assert (sender.published, sender.newest_age) == (2, 0.0)
            assert rates.of(sender).nbytes == 800
            assert windows.rate(sender) == (1.0, 800.0)
        sender = look(12.0)
        assert rates.of(sender).nbytes == 1200
        assert windows.rate(sender) == (1.0, 1200.0)


@once("text")
@pytest.mark.parametrize("kind", ["directory", "link", "FIFO"])
def test_hz_of_a_name_that_is_no_channel(channel, kind):
    path = f"/dev/shm/shmtensor.{channel}"
    make, remove = {
        "directory": (os.mkdir, os.rmdir),
        "link": (lambda path: os.symlink("/nowhere", path), os.unlink),
        "FIFO": (os.mkfifo, os.unlink),
    }[kind]
    make(path)
    try:
        command = [sys.executable, "-m", "shmtensor", "hz", channel, "--count", "1"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    finally:
        remove(path)
    assert (run.returncode, "cannot be read" in run.stderr) == (1, True)


@once("text")
@pytest.mark.parametrize("width", [80, 140])
def test_top_fits(channel, width):
    name = channel + "-" + "x" * (44 - len(channel))
    with (
        shmtensor.Publisher(name, slots=8, slot_bytes=4096, label="left camera") as pub,
        shmtensor.Subscriber(name) as sub,
    ):
        pub.send(np.zeros(100))
        message = sub.recv(timeout=PATIENCE)
        pub.send(np.zeros(100))
        text = cli("top", name, "--once", "--interval", "0.1", width=width)
        lines = text.splitlines()
        assert max(map(len, lines)) <= width
        assert len(lines) == 5  # headings, the channel, two members, an empty line
        counted = ["counted"] if width == 140 else []
        assert lines[0].split() == ["channel", "msg/s", "bytes/s", "depth", "oldest", *counted, "held"]
        assert (name in text) == (width == 140)
        assert ("…" in lines[1]) == (width == 80)
        assert all(str(os.getpid()) in line for line in lines[2:4])
        assert "left camera" in lines[2]
        assert "left camera" in cli("hz", name, "--count", "1", "--interval", "0.1", width=200)
        assert "1 leased" in lines[3]
        del message
        sub.recv(timeout=PATIENCE).release()


@once("text")
@pytest.mark.parametrize("width", [80, 100, 140])
def test_top_cuts_what_matters_least(channel, width):
    """Long pids, groups and labels; and what the columns of numbers say is not said again."""

    def alike(it: shmtensor.MemberInfo) -> shmtensor.MemberInfo:
        return dataclasses.replace(it, pid=3139200 + it.index, process={"sender": "cam.py"}.get(it.role, "detector.py"))

    fans, jobs = channel + "-a", channel + "-b"
    with (
        shmtensor.Publisher(fans, label="left camera") as pub, shmtensor.Subscriber(fans) as plain,
        shmtensor.Subscriber(fans, group="detectors") as one, shmtensor.Subscriber(fans, delivery="latest"),
        shmtensor.Producer(jobs) as tx, shmtensor.Consumer(jobs) as rx,
    ):  # fmt: skip
        view = top.View(lambda name: name in (fans, jobs), top.Order.NAME)
        view.read()
        for _ in range(3):
            pub.send(np.zeros(100))
            tx.send(np.zeros(128))
        message = plain.recv(timeout=PATIENCE)
        look = view.read()
        message.release()
        for receiver, count in ((plain, 2), (one, 3), (rx, 3)):
            for _ in range(count):
                receiver.recv(timeout=PATIENCE).release()
    channels = [dataclasses.replace(it, members=tuple(map(alike, it.members))) for it in look.channels]
    look = dataclasses.replace(look, channels=channels)
    found = [line.plain for line in top.lines(look, width)]
    assert max(map(cell_len, found)) <= width
    sender, receiver, member, latest = found[2:6]
    assert sender.startswith(" > 3139200 cam.py left camera ")
    assert receiver.startswith(" < 3139201 detector.py ")
    assert " 1 leased" in receiver
    assert (" 800 bytes" in receiver) == (width > 80)
    assert member == " < 3139202 detector.py [detectors]"
    assert latest == " < 3139204 detector.py latest"
    *_, depth, _, _, how, number, unit = found[6].split()
    assert (depth, how, number, unit) == ("3", "waiting", "3.0", "KiB")
    waiting = dataclasses.replace(look.channels[1].holdings[0], messages=2)
    other = dataclasses.replace(look.channels[1], holdings=(waiting,))
    shown = top.lines(dataclasses.replace(look, channels=[other]), width)[1].plain
    assert " 2 waiting " in shown  # the number in the row is another


def test_top_prints_json_lines_by_order(channel):
    small, large = channel + "-a", channel + "-b"
    with (
        shmtensor.Publisher(small) as a, shmtensor.Subscriber(small) as reads_a,
        shmtensor.Publisher(large) as b, shmtensor.Subscriber(large) as reads_b,
    ):  # fmt: skip
        for publisher, count in ((a, 1), (b, 3)):
            for _ in range(count):
                publisher.send(b"1")
        for sort, first in (("name", small), ("depth", large)):
            out = cli("top", channel + "*", "--sort", sort, "--count", "2", "--interval", "0.1", "--json")
            readings = [json.loads(line) for line in out.splitlines()]
            assert len(readings) == 2
            assert readings[1]["channels"][0]["name"] == first
        members = next(it for it in readings[1]["channels"] if it["name"] == large)["members"]
        sender = members[0]
        assert (sender["pid"], sender["published"], sender["messages_per_second"]) == (os.getpid(), 3, 0.0)
        assert [it["messages"] for it in members[1]["holds"]] == [3]
        for receiver, count in ((reads_a, 1), (reads_b, 3)):
            for _ in range(count):
                receiver.recv(timeout=PATIENCE).release()
    assert json.loads(cli("top", channel + "*", "--once", "--interval", "0.1", "--json"))["channels"] == []


def test_what_members_have_counted_is_shown(channel):
    """A sender's waits and a receiver's sleeps: by `inspect` (test_senders.py has all of them), `top` and metrics."""
    prometheus_client = pytest.importorskip("prometheus_client")
    import shmtensor.metrics

    registry = prometheus_client.CollectorRegistry()
    registry.register(shmtensor.metrics.collector(channel))
    with shmtensor.Publisher(channel, slots=1) as pub, shmtensor.Subscriber(channel, delivery="latest") as latest:
        with shmtensor.Subscriber(channel) as sub:
            with pytest.raises(shmtensor.TimedOut):
                sub.recv(timeout=0.005)
            pub.send(b"1")
            with pytest.raises(shmtensor.RingFull):
                pub.send(b"2", timeout=0.01)
            sub.recv(timeout=PATIENCE).release()
        for _ in range(3):
            pub.send(b"3")
        latest.recv(timeout=PATIENCE).release()
        sender, receiver = cli("top", channel, "--once", "--interval", "0.1", width=140).splitlines()[2:4]
        assert "1 waits" in sender
        assert f"{latest.statistics().missed} missed" in receiver
        assert "waits" not in cli("top", channel, "--once", "--interval", "0.1", width=80)
        reading = json.loads(cli("top", channel, "--once", "--interval", "0.1", "--json"))
        of_sender, of_receiver = reading["channels"][0]["members"]
        assert (of_sender["waits"], of_sender["dropped"], of_receiver["sleeps"]) == (1, 0, 0)
        assert of_receiver["missed"] == latest.statistics().missed
        text = prometheus_client.generate_latest(registry).decode()
        found = samples(text, channel)
        assert found["shmtensor_slot_waits_total"] == 1
        assert found["shmtensor_messages_missed_total"] == latest.statistics().missed
        assert "# TYPE shmtensor_late_wakeups_total counter" in text


@pytest.mark.slow
def test_who_is_killed_is_marked_and_then_gone(channel):
    view = top.View(only(channel), top.Order.NAME)
    with shmtensor.Publisher(channel, slots=4) as pub:
        fellow = Fellow(HOLDER, channel)
        fellow.listen("joined")
        pub.send(np.zeros(100))
        fellow.listen("taken")
        shown = "\n".join(line.plain for line in top.lines(view.read(), 140))
        assert f"{fellow.process.pid} {name_of(os.getpid())}" in shown
        with unswept(channel):
            fellow.kill()
            shown = "\n".join(line.plain for line in top.lines(view.read(), 140))
            assert f"{fellow.process.pid} dead {name_of(os.getpid())}" in shown
            reading = view.read()
            shown = "\n".join(line.plain for line in top.lines(reading, 140))
            assert str(fellow.process.pid) not in shown
            assert "leased" not in shown
            assert len(reading.channels[0].members) == 1


@pytest.mark.slow
def test_a_death_does_not_wait_for_the_next_reading(channel):
    with shmtensor.Publisher(channel, slots=4):
        fellow = Fellow(HOLDER, channel)
        fellow.listen("joined")
        command = [sys.executable, "-m", "shmtensor", "top", channel, "--json", "--interval", "600"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            wait_until_watched(process.pid)
            other = Fellow(HOLDER, channel)
            other.listen("joined")
            with unswept(channel):
                fellow.kill()
                reading = json.loads(process.stdout.readline())
                lives = {it["pid"]: it["alive"] for it in reading["channels"][0]["members"]}
                assert lives == {os.getpid(): True, fellow.process.pid: False, other.process.pid: True}
                members = json.loads(process.stdout.readline())["channels"][0]["members"]
                assert fellow.process.pid not in [it["pid"] for it in members]
            other.kill()
            members = json.loads(process.stdout.readline())["channels"][0]["members"]
            assert other.process.pid not in [it["pid"] for it in members if it["alive"]]
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE) == 0


BLIND = """
import os, sys
from shmtensor.channel.processes import UNKNOWN, Processes
from shmtensor.cli.main import run
from shmtensor.observe.rates import Ends

def watch(self, channels, watch=Ends.watch):
    watch(self, channels)
    print("watching", file=sys.stderr, flush=True)

def refuse(pid):
    raise OSError(24, "Too many open files")

Ends.watch = watch
if sys.argv.pop(1) == "processes":
    Processes.find = lambda self, *_: UNKNOWN
else:
    os.pidfd_open = refuse
run()
"""


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["processes", "descriptors"])
def test_deaths_of_processes_that_cannot_be_watched(channel, missing):
    """Those of another pid namespace, or more than may be watched: they are looked for, and nothing else is shown."""
    assert top._LOOK_S + top._MARKED_S < 1
    with shmtensor.Publisher(channel, slots=4):
        fellow = Fellow(HOLDER, channel)
        fellow.listen("joined")
        command = [sys.executable, "-c", BLIND, missing, "top", channel, "--json", "--interval", "600"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr.readline() == "watching\n"
            with unswept(channel):
                fellow.kill()
                for lives in ({os.getpid(): True, fellow.process.pid: False}, {os.getpid(): True}):
                    members = json.loads(process.stdout.readline())["channels"][0]["members"]
                    assert {it["pid"]: it["alive"] for it in members} == lives
                    assert {it["host_pid"] for it in members if missing == "processes"} <= {None}
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE) == 0


def wait_until_watched(pid: int) -> None:
    """Until the process has a pidfd."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        links = []
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
            except OSError:
                continue
        if any("pidfd" in link for link in links):
            return
        time.sleep(0.01)
    raise AssertionError("it watches no process")


def test_how_long_a_message_has_been_held_is_seen_from_the_first_look_on(channel, monkeypatch):
    """A worker that hangs can be told from one that has just taken an old message."""
    clock = [1000.0]
    for module in (looking, top):
        fake = SimpleNamespace(monotonic=lambda: clock[0], monotonic_ns=time.monotonic_ns, time=time.time)
        monkeypatch.setattr(module, "time", fake)
    with shmtensor.Producer(channel, slots=4) as tx, shmtensor.Consumer(channel) as rx:
        tx.send(b"1")
        tx.send(b"2")
        view = top.View(only(channel), top.Order.NAME)
        message = rx.recv(timeout=PATIENCE)

        def look() -> tuple[list[tuple[int, float]], str]:
            shown = view.read()
            (found,) = shown.channels
            (members,) = [it["members"] for it in top.as_dict(shown)["channels"]]
            times = [it["held"] for member in members for it in member["holds"]]
            assert times == [it.held for it in found.holdings if it.how == "claimed"]
            return times, "\n".join(line.plain for line in top.lines(shown, 140))

        assert look()[0] == [0.0]
        clock[0] += 5
        times, text = look()
        assert times == [5.0]
        assert "1 claimed >5.0 s" in text
        message.release()
        message = rx.recv(timeout=PATIENCE)
        clock[0] += 2
        assert look()[0] == [0.0]
        clock[0] += 3
        times, text = look()
        assert times == [3.0]
        assert "1 claimed 3.0 s" in text
        assert [it.held for it in shmtensor.inspect(channel).holdings] == [0.0]
        message.release()


def sending(channel: str):
    """A publisher that sends until the block is left."""
    ended = threading.Event()

    def send() -> None:
        with shmtensor.Publisher(channel, slots=4) as pub:
            while not ended.wait(0.001):
                pub.send(b"1")

    @contextlib.contextmanager
    def block():
        thread = threading.Thread(target=send)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    return block()


@once("a program")
@pytest.mark.slow
@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize("command", ["top", "hz", "echo"])
def test_it_ends_when_nobody_reads_its_output(channel, command, form):
    """As in `| head -1`."""
    full = [sys.executable, "-m", "shmtensor", command, channel, *form]
    full += [] if command == "echo" else ["--interval", "0.1"]
    with (
        sending(channel),
        subprocess.Popen(full, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(PATIENCE) in (0, 1)
        assert "Traceback" not in process.stderr.read()


@once("a program")
@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [["top", "--once"], ["hz", "--count", "1"], ["echo", "--count", "1"]], ids=lambda it: it[0]
)
@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_full_disk_is_said(channel, command, form, unbuffered, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with sending(channel), open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "shmtensor", command[0], channel, *command[1:], *form],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "error: cannot write the output: No space left on device\n")


def test_how_long_to_wait_must_be_finite(channel):
    for command in (["top", "--interval"], ["hz", channel, "--interval"], ["trace", channel, "--seconds"]):
        for value in ("inf", "1e300"):
            run = CliRunner().invoke(app, [*command, value], env={"COLUMNS": "200"})
            assert (run.exit_code, f"Invalid value for '{command[-1]}'" in run.stderr) == (2, True), run.stderr


@once("a program")
@pytest.mark.slow
@pytest.mark.parametrize("command", [["top"], ["hz"], ["echo"]], ids="".join)
def test_control_c_ends_it_quietly(channel, command):
    with shmtensor.Publisher(channel) as pub:
        name = [channel] if command != ["top"] else ["test-*"]
        full = [sys.executable, "-m", "shmtensor", *command, *name, "--json"]
        if command != ["echo"]:
            full += ["--interval", "0.1"]
        with (
            shmtensor.Subscriber(channel) as sub,
            subprocess.Popen(full, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
        ):
            pub.send(b"1")
            assert json.loads(process.stdout.readline())
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=PATIENCE)
            assert (process.returncode, err) == (0, ""), out
            sub.recv(timeout=PATIENCE).release()


# --- hz


def test_hz(channel):
    with shmtensor.Publisher(channel) as pub:
        pub.send(np.zeros(100))
        for line in cli("hz", channel, "--count", "2", "--interval", "0.1", "--json").splitlines():
            (sender,) = json.loads(line)["senders"]
            assert (sender["pid"], sender["published"], sender["messages_per_second"]) == (os.getpid(), 1, 0.0)
        assert "0.00 msg/s" in cli("hz", channel, "--count", "1", "--interval", "0.1")


def test_rates_are_averaged_over_the_window(channel):
    windows = watch.Windows(10.0)
    with shmtensor.Publisher(channel, slots=4, slot_bytes=4096) as pub:

        def reading(at: float, count: int, nbytes: int = 800) -> tuple[float, float] | None:
            for _ in range(count):
                pub.send(np.zeros(nbytes // 8))
            found = shmtensor.inspect(channel)
            windows.add(found, at)
            return windows.rate(found.senders[0])

        assert reading(0.0, 1) is None
        assert reading(5.0, 10) == (2.0, 1600.0)
        assert reading(10.0, 30) == (4.0, 3200.0)
        assert reading(20.0, 0) == (0.0, 0.0)  # what was before its beginning counts no more
        assert reading(25.0, 5, 1600) == pytest.approx((5 / 15, 5 / 15 * (800 + 800 + 1600) / 3))
        (sender,) = shmtensor.inspect(channel).senders
        windows.add(dataclasses.replace(shmtensor.inspect(channel), members=()), 30.0)
        assert windows.rate(sender) is None  # it has left


def test_a_channel_that_does_not_come(channel):
    for command in ("hz", "echo"):
        run = CliRunner().invoke(app, [command, channel, "--timeout", "0.05"])
        assert run.exit_code == 1
        assert f'waiting for channel "{channel}"' in run.stderr.replace("\n", " ")
        assert "there is no channel" in run.stderr
        assert CliRunner().invoke(app, [command, "no/such"]).exit_code == 2


def being_made(path):
    """A control segment without contents, and its lock: without it, anybody's sweep would remove it."""
    file = open(path, "wb")  # noqa: SIM115
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, LOCK, 1, 0))
    return file


@once("no endpoint")
def test_a_channel_that_is_being_made(channel, monkeypatch):
    """It has no contents at first; if it stays so, that is an error."""
    path = f"/dev/shm/shmtensor.{channel}"
    for command in (["hz", channel, "--count", "1", "--interval", "0.1"], ["echo", channel, "--count", "1"]):
        file, real, made = being_made(path), output.time.sleep, []

        def make(seconds: float, file=file, real=real, made=made) -> None:
            if not made:
                os.unlink(path)
                file.close()
                made.append(shmtensor.Publisher(channel, slots=4, slot_bytes=64, history=1))
                made[0].send(b"1")
            real(seconds)

        with monkeypatch.context() as patch:
            patch.setattr(output, "time", SimpleNamespace(sleep=make, monotonic=time.monotonic))
            assert cli(*command)
        made[0].close()
        with being_made(path), monkeypatch.context() as patch:
            patch.setattr(output, "_MAKING_S", 0.0)
            run = CliRunner().invoke(app, command)
            os.unlink(path)
        assert (run.exit_code, "cannot be read" in run.stderr) == (1, True)


# --- echo


def digest_of(value) -> str:
    import xxhash

    encoded = encode(value)
    payload = np.zeros(encoded.nbytes, np.uint8)
    encoded.copy_into(payload)
    found = xxhash.xxh3_64()
    for start, end in Outline(encoded.description).extents():
        found.update(payload[start:end].tobytes())
    return found.hexdigest()


@UNFINISHED
def test_echo_takes_nothing_from_a_work_queue(channel):
    values = [{"image": np.arange(300.0).reshape(3, 100) + number, "id": number} for number in range(3)]
    with shmtensor.Producer(channel, slots=4) as tx, shmtensor.Consumer(channel) as rx:
        for number, value in enumerate(values):
            tx.send(value, meta={"ts": number + 0.5})
        found = [json.loads(line) for line in cli("echo", channel, "--count", "3", "--json").splitlines()]
        assert [it["seq"] for it in found] == [1, 2, 3]
        assert found[1]["value"] == {"image": {"dtype": "float64", "shape": [3, 100], "library": "numpy"}, "id": 1}
        assert found[1]["meta"] == {"ts": 1.5}
        assert [it["digest"] for it in found] == [digest_of(value) for value in values]
        text = cli("echo", channel, "--count", "1", width=200)
        assert "{'image': numpy.float64[3, 100], 'id': 0}  meta {'ts': 0.5}" in text
        for number in range(3):
            with rx.recv(timeout=PATIENCE) as message:
                assert (message.value["id"], message.attempt) == (number, 1)


SCALARS = [
    (np.int64(7), "numpy.int64(7)", 7),
    (np.uint64(2**64 - 1), f"numpy.uint64({2**64 - 1})", 2**64 - 1),
    (np.float32(1.1), "numpy.float32(1.1)", float(np.float32(1.1))),
    (np.float16("nan"), "numpy.float16(nan)", "nan"),
    (np.float64("-inf"), "numpy.float64(-inf)", "-inf"),
    (np.longdouble(1.5), "numpy.longdouble(1.5)", 1.5),
    (np.bool_(True), f"numpy.{np.bool_.__name__}(True)", True),
    (np.complex64(1 + 2j), "numpy.complex64(1+2j)", "(1+2j)"),
    (np.datetime64("2026-01-02"), "numpy.datetime64('2026-01-02')", "2026-01-02"),
    (np.datetime64(5, "ns"), "numpy.datetime64('1970-01-01T00:00:00.000000005')", "1970-01-01T00:00:00.000000005"),
    (np.timedelta64(5, "D"), "numpy.timedelta64(5,'D')", "5 days"),
    (np.str_("text"), "str('text')", None),
    (np.bytes_(b"text"), "bytes(numpy.uint8[4])", None),
    (np.array((1, 2.0), "i8,f4")[()], "a numpy.[('f0', '<i8'), ('f1', '<f4')]", None),
]


@pytest.mark.parametrize("digests", [True, False], ids=["digest", "no-digest"])
@pytest.mark.parametrize("size", [1, 100_000])
def test_echo_shows_what_numpy_scalars_hold(channel, digests, size):
    with shmtensor.Publisher(channel, slots=4, history=1) as pub:
        pub.send({"image": np.ones(size), "scalars": [value for value, _, _ in SCALARS], "many": [np.int8(3)] * 1000})
        with Messages(channel, digests=digests) as messages:
            (seen,) = messages.new()
        assert (seen.digest is not None) == digests
        shown = seen.value["scalars"]
        assert [str(it) for it in shown] == [text for _, text, _ in SCALARS]
        assert [as_json(it).get("value") for it in shown] == [plain for _, _, plain in SCALARS]
        many = [as_json(it)["value"] for it in seen.value["many"]]
        assert many[:900] == [3] * 900
        assert many[-1] is None
        json.dumps(as_json(seen.value), allow_nan=False)
        out = json.loads(cli("echo", channel, "--count", "1", "--json", *([] if digests else ["--no-digest"])))
        assert out["value"]["scalars"][0]["value"] == 7
        assert "numpy.float32(1.1)" in cli("echo", channel, "--count", "1", width=400)


def test_scalars_that_may_have_been_written_to_are_not_shown(channel):
    with shmtensor.Producer(channel, slots=4) as tx, shmtensor.Consumer(channel) as rx:
        tx.send([np.int64(7)])
        with rx.recv(timeout=PATIENCE), Messages(channel, digests=False) as messages:
            (seen,) = messages.new()
            assert as_text(seen.value) == "[a numpy.int64]"


def test_echo_of_a_message_that_is_being_worked_on_has_no_digest(channel):
    with shmtensor.Producer(channel, slots=4) as tx, shmtensor.Consumer(channel) as rx:
        tx.send(np.arange(3))
        with rx.recv(timeout=PATIENCE), Messages(channel) as messages:
            (seen,) = messages.new()
            assert (seen.seq, seen.digest, str(seen.value)) == (1, None, "numpy.int64[3]")


def test_echo_follows_a_fan_out(channel):
    with shmtensor.Publisher(channel, slots=4, slot_bytes=4096) as pub:
        with Messages(channel) as messages:
            assert messages.new() == []
            for number in range(3):
                pub.send(np.full(10, number))
                (seen,) = messages.new()
                assert (seen.seq, seen.missed, seen.digest) == (number + 1, 0, digest_of(np.full(10, number)))
            for number in range(10):  # into the same slot: nobody has subscribed
                pub.send(np.full(10, number))
            (seen,) = messages.new()
            assert (seen.seq, seen.missed, seen.digest) == (13, 9, digest_of(np.full(10, 9)))
            assert not messages.ended
        (member,) = shmtensor.inspect(channel).members
        assert member.role == "sender"


@pytest.mark.parametrize("size", [10, 1500, 100_000])
def test_what_is_overwritten_while_it_is_read_is_not_printed(channel, size, monkeypatch):
    """The sender sends again just when the payload has been read; each time into the same slots."""
    slot_bytes = 4096 if size < 2000 else None
    with shmtensor.Publisher(channel, slots=4, slot_bytes=slot_bytes) as pub, Messages(channel) as messages:
        messages.new()
        first, second = ([np.full(size, number), np.int64(number)] for number in (1, 2))
        pub.send(first)
        real, sent = reading.Outline, []

        def then_send(description):
            if not sent:
                sent.append(pub.send(second))
            return real(description)

        monkeypatch.setattr(reading, "Outline", then_send)
        for seen in messages.new():
            assert (seen.seq, seen.digest) in ((1, None), (1, digest_of(first)))
            assert as_json(seen.value[1])["value"] in (None, 1)
        last = messages.new()[-1]
        assert last.seq == 2
        assert last.digest in (None, digest_of(second))
        assert as_json(last.value[1])["value"] in (None, 2)


@pytest.mark.slow
def test_no_torn_read_is_printed(channel):
    """A sender overwrites as fast as it can: whatever digest there is, it is that of one of the two values."""
    values = [np.full(4000, 1, np.uint8), np.full(4000, 2, np.uint8)]
    good = {digest_of(value) for value in values}
    script = (
        "import sys, numpy, shmtensor\n"
        "pub = shmtensor.Publisher(sys.argv[1], slots=3, slot_bytes=1024); print('open', flush=True)\n"
        "values = [numpy.full(4000, 1, numpy.uint8), numpy.full(4000, 2, numpy.uint8)]\n"
        "sys.stdin.readline()\n"
        "for number in range(60_000): pub.send(values[number % 2], meta={'n': number % 2})\n"
        "print('sent', flush=True); sys.stdin.readline()\n"
    )
    fellow = Fellow(script, channel)
    fellow.listen("open")
    whole = 0
    with Messages(channel) as messages:
        messages.new()
        fellow.say()
        newest = 0
        deadline = time.monotonic() + PATIENCE
        while newest < 60_000 and time.monotonic() < deadline:
            for seen in messages.new():
                newest = seen.seq
                assert seen.meta == {"n": (seen.seq - 1) % 2}
                if seen.digest is not None:
                    whole += 1
                    assert seen.digest == digest_of(values[(seen.seq - 1) % 2])
                    assert seen.digest in good
    assert newest == 60_000
    fellow.listen("sent")
    fellow.end()


@once("text")
def test_outlines():
    value = {"a": [np.zeros((2, 3), np.float32), 1, "x\n"], "b": b"12345", 7: (None, float("nan")), "c": 1 << 100}
    outline = Outline(encode(value, {"k": [1, 2]}).description)
    assert as_text(outline.value) == (
        f"{{'a': [numpy.float32[2, 3], 1, 'x\\n'], 'b': bytes[5], 7: (None, nan), 'c': {1 << 100}}}"
    )
    assert outline.meta == {"k": [1, 2]}
    found = json.loads(json.dumps(as_json(outline.value), allow_nan=False))
    assert [key for key, _ in found] == ["a", "b", 7, "c"]
    assert found[2] == [7, [None, "nan"]]
    alike = {1: "int", "1": "text", None: "none", "None": "text"}
    assert as_json(Outline(encode(alike).description).value) == [list(item) for item in alike.items()]
    assert len(outline.extents()) == 2
    scalars = Outline(encode([np.int64(7), np.array(7), np.float32(1)]).description).value
    assert as_text(scalars) == "[a numpy.int64, numpy.int64[], a numpy.float32]"
    assert as_json(scalars[0])["value"] is None
    assert as_text(list(range(25))).endswith("19, ... 5 more]")


@once("text")
def test_no_text_of_a_message_reaches_the_terminal_as_it_is():
    text = "\x1b[2J\n#99 of 1"
    for value in (text, np.str_(text), {text: text}, {"meta": [np.str_(text)]}):
        assert as_text(Outline(encode(value).description).value).isprintable()


@pytest.mark.slow
def test_echo_follows_a_stream_and_rests_when_it_is_silent(channel, monkeypatch):
    pauses: list[float] = []
    fake = SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda seconds: pauses.append(seconds) or tick(seconds))
    clock = [100.0]

    def tick(seconds: float) -> None:
        clock[0] += seconds

    class Stream:
        ended = False

        def __init__(self) -> None:
            self.next, self.missed = 101.0, 0

        def new(self) -> list[int]:
            count = 0
            while self.next <= clock[0]:
                self.next, count = self.next + 1 / 60, count + 1
            self.missed += max(0, count - 1)
            return [1] * min(1, count)

    monkeypatch.setattr(watch, "time", fake)
    stream = Stream()
    for number, _ in enumerate(watch._until_ended(stream)):
        if number == 200:
            break
    assert stream.missed <= 1
    stream.next = 1000.0
    pauses.clear()
    next(watch._until_ended(stream))
    assert len(pauses) < 900 / 0.02 * 1.01


# --- what a terminal gets


class Screen:
    """What is typed at a terminal, and what it shows."""

    def __init__(self, file, process):
        self.file, self.process, self.shown, self.mode = file, process, b"", termios.tcgetattr(file)

    def until(self, text: bytes) -> bytes:
        """What it shows from now on until this."""
        begin = len(self.shown)
        while text not in self.shown[begin:]:
            self.shown += self.file.read(4096)
        return self.shown[begin:]


@contextlib.contextmanager
def top_on_a_terminal(channel, *, lines=24, interval=600.0, stdin=None):
    """`shmtensor top` on 80 columns. It ends within the block, and leaves the mode of the terminal as it was."""
    ours, theirs = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": str(lines)}
    command = [sys.executable, "-m", "shmtensor", "top", channel, "--interval", str(interval)]
    process = subprocess.Popen(
        command, stdin=theirs if stdin is None else stdin, stdout=theirs, stderr=theirs, env=environment
    )
    with os.fdopen(ours, "r+b", buffering=0) as file, process:
        screen = Screen(file, process)
        os.close(theirs)
        yield screen
        with contextlib.suppress(OSError):  # EIO: nobody writes to it any more
            while more := file.read(4096):
                screen.shown += more
        assert process.wait(PATIENCE) == 0
        assert termios.tcgetattr(file) == screen.mode


@pytest.mark.slow
@once("text")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_top_leaves_the_terminal_as_it_was(channel, number):
    with shmtensor.Publisher(channel), top_on_a_terminal(channel, interval=0.1) as screen:
        screen.until(channel.encode())
        assert not termios.tcgetattr(screen.file)[3] & termios.ECHO
        screen.process.send_signal(number)
    shown = screen.shown
    assert shown.count(b"\x1b[?1049h") == shown.count(b"\x1b[?1049l") == 1
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")


@pytest.mark.slow
@once("text")
def test_keys_of_top(channel):
    """A reading would come after ten minutes: keys do not wait for it."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(shmtensor.Publisher(channel, label="a label of its own"))
        for _ in range(12):
            stack.enter_context(shmtensor.Subscriber(channel))
        screen = stack.enter_context(top_on_a_terminal(channel, lines=8))
        assert b"a label of its own" in screen.until(b"lines 1 to 6 of 14 (up, down, PgUp, PgDn)  quit (q)")
        for typed, text in (
            (b"x\x1b[B", b"lines 2 to 7 of 14"), (b"\x1b[6~", b"lines 8 to 13"), (b"\x1bOB" * 3, b"lines 9 to 14"),
            (b"\x1b[A", b"lines 8 to 13"), (b"\x1b[5~\x1b[5~", b"lines 1 to 6"), (b"\x1b[6~", b"lines 7 to 12"),
            (b"s", b"by rate (s)  lines 1 to 6"),
        ):  # fmt: skip
            screen.file.write(typed)
            assert b"msg/s" in screen.until(text)
        screen.file.write(b"q")


@pytest.mark.slow
@once("text")
def test_top_without_keys(channel):
    """Where stdin is no top."""
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(shmtensor.Publisher(channel))
        screen = stack.enter_context(top_on_a_terminal(channel, lines=4, stdin=subprocess.DEVNULL))
        screen.until(b"... 3 more lines: name a PATTERN, or sort")
        assert termios.tcgetattr(screen.file) == screen.mode
        screen.process.send_signal(signal.SIGINT)


@once("no channel")
def test_the_mode_of_the_terminal_after_an_error(monkeypatch):
    ours, theirs = os.openpty()
    with os.fdopen(ours, "r+b", buffering=0) as typing, os.fdopen(theirs, "r", buffering=1) as stream:
        mode = termios.tcgetattr(stream)
        monkeypatch.setattr(sys, "stdin", stream)
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(ZeroDivisionError), top.keys_at_once() as fd:
            assert fd == stream.fileno()
            assert not termios.tcgetattr(fd)[3] & termios.ICANON
            typing.write(b"zq\x1b[6~\x1b[1;5C")
            assert top.read_keys(fd) == [top.Key.QUIT, top.Key.PAGE_DOWN]
            raise ZeroDivisionError
        assert termios.tcgetattr(stream) == mode


SHELL = """
import fcntl, os, signal, subprocess, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
command = [sys.executable, "-m", "shmtensor", "top", sys.argv[1], "--interval", "0.1"]
defaults = lambda: (os.setpgrp(), signal.signal(signal.SIGTTOU, signal.SIG_DFL))
job = subprocess.Popen(command, stdin=0, stdout=0, stderr=0, preexec_fn=defaults)
os.tcsetpgrp(0, job.pid)
mode = termios.tcgetattr(0)
_, status = os.waitpid(job.pid, os.WUNTRACED)
print(os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGTSTP, termios.tcgetattr(0) == mode, flush=True)
os.killpg(job.pid, signal.SIGCONT)
print(job.wait(), termios.tcgetattr(0) == mode, flush=True)
"""


@pytest.mark.slow
@once("text")
def test_control_z_gives_the_terminal_back(channel):
    """And `fg` takes it again."""
    ours, theirs = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    command = [sys.executable, "-c", SHELL, channel]
    shown = b""
    with (
        shmtensor.Publisher(channel), os.fdopen(ours, "r+b", buffering=0) as screen,
        subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, text=True, env=environment,
                         start_new_session=True) as shell,
    ):  # fmt: skip
        os.close(theirs)
        for typed in (b"\x1a", b"q"):
            part = b""
            while channel.encode() not in part[part.rfind(b"\x1b[?1049h") + 1 :] or b"\x1b[?1049h" not in part:
                part += screen.read(4096)
            shown += part
            screen.write(typed)
        with contextlib.suppress(OSError):
            while more := screen.read(4096):
                shown += more
        assert shell.stdout.read() == "True True\n0 True\n"
        assert shell.wait(PATIENCE) == 0
    ends = [b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?1049h", b"\x1b[?1049l"]
    assert re.findall(rb"\x1b\[\?1049[hl]", shown) == ends
    cursor = re.findall(rb"\x1b\[\?25[hl]", shown)
    assert (cursor.count(b"\x1b[?25h"), cursor[-1]) == (2, b"\x1b[?25h")


@pytest.mark.slow
@once("text")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_end_top_into_a_pipe(channel, number):
    command = [sys.executable, "-m", "shmtensor", "top", channel, "--json", "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline()
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (0, b"")


@once("text")
@pytest.mark.parametrize("width", [80, 140])
def test_characters_of_two_columns_shift_nothing(channel, width):
    with shmtensor.Publisher(channel, label="宽" * 21), shmtensor.Publisher(channel, label="x"):
        lines = cli("top", channel, "--once", "--interval", "0.1", width=width).splitlines()
    assert len({cell_len(line[: line.index("0.0")]) for line in lines[1:4]}) == 1
    assert max(map(cell_len, lines)) <= width


@pytest.mark.slow
@once("text")
@pytest.mark.parametrize("variables", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "POSIX", "PYTHONUTF8": "0"}])
def test_output_that_is_not_utf8(channel, variables):
    environment = {**os.environ, "PYTHONCOERCECLOCALE": "0", **variables}
    with shmtensor.Publisher(channel, label="宽ü"):
        for command in (["top", channel, "--once", "--interval", "0.1"], ["ls", channel], ["--help"]):
            full = [sys.executable, "-m", "shmtensor", *command]
            run = subprocess.run(full, env=environment, capture_output=True, timeout=PATIENCE)
            assert (run.returncode, run.stderr) == (0, b"")
            assert run.stdout.isascii()
            assert (b"\\u5bbd" in run.stdout) == (channel in command)


# --- metrics


def samples(text: str, channel: str) -> dict[str, float]:
    """Without the labels of members."""
    found = {}
    for line in text.splitlines():
        if f'channel="{channel}"' in line:
            name, value = line.rsplit(" ", 1)
            how = name.partition('how="')[2].partition('"')[0]
            found[name.partition("{")[0] + (f":{how}" if how else "")] = float(value)
    return found


def test_metrics_are_read_anew_for_each_scrape(channel):
    prometheus_client = pytest.importorskip("prometheus_client")
    import shmtensor.metrics

    registry = prometheus_client.CollectorRegistry()
    registry.register(shmtensor.metrics.collector("test-*"))
    with shmtensor.Publisher(channel, slots=4, slot_bytes=4096) as pub, shmtensor.Subscriber(channel) as sub:
        pub.send(np.zeros(100))
        pub.send(np.zeros(100))
        kept = sub.recv(timeout=PATIENCE)
        text = prometheus_client.generate_latest(registry).decode()
        found = samples(text, channel)
        assert found["shmtensor_messages_published_total"] == 2
        assert (found["shmtensor_slot_waits_total"], found["shmtensor_messages_missed_total"]) == (0, 0)
        assert (found["shmtensor_senders"], found["shmtensor_receivers"], found["shmtensor_depth"]) == (1, 1, 1)
        assert (found["shmtensor_held_messages:leased"], found["shmtensor_held_bytes:unread"]) == (1, 800)
        assert (found["shmtensor_slots"], found["shmtensor_slots_used"]) == (4, 2)
        assert f'pid="{os.getpid()}"' in text
        del kept
        sub.recv(timeout=PATIENCE).release()
    assert samples(prometheus_client.generate_latest(registry).decode(), channel) == {}


@pytest.mark.slow
def test_the_dead_are_gone_from_the_next_scrape(channel):
    prometheus_client = pytest.importorskip("prometheus_client")
    command = [sys.executable, "-m", "shmtensor", "metrics", "test-*", "--port", "0"]
    with (
        shmtensor.Publisher(channel, slots=4),
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server,
    ):
        url = server.stderr.readline().split()[-1]

        def scrape() -> str:
            request = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text"})
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return answer.read().decode()

        fellow = Fellow(HOLDER, channel)
        fellow.listen("joined")
        text = scrape()
        assert f'pid="{fellow.process.pid}"' in text
        assert text.endswith("# EOF\n")
        assert samples(text, channel)["shmtensor_receivers"] == 1
        with unswept(channel):
            fellow.kill()
            text = scrape()
        assert f'pid="{fellow.process.pid}"' not in text
        assert samples(text, channel)["shmtensor_receivers"] == 0
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0
    assert prometheus_client


@pytest.mark.slow
@once("HTTP")
def test_silent_connections_are_given_up():
    pytest.importorskip("prometheus_client")
    command = [sys.executable, "-m", "shmtensor", "metrics", "test-none", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            port = int(server.stderr.readline().split(":")[2].split("/")[0])
            with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as silent:
                silent.send(b"GET /metrics HTTP/1.1\r\nX: ")
                assert silent.recv(1) == b""
        finally:
            server.terminate()
        assert (server.wait(PATIENCE), server.stderr.read()) == (0, "")


@once("HTTP")
def test_an_address_that_cannot_be_is_not_a_matter_of_the_port():
    pytest.importorskip("prometheus_client")
    before = signal.getsignal(signal.SIGTERM)
    try:
        run = CliRunner().invoke(app, ["metrics", "--address", "2001:db8::1"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert run.exit_code == 1
    assert run.stderr.startswith("error: cannot listen at [2001:db8::1]:9464: ")
    assert "choose another --address" in run.stderr


def test_a_scrape_without_a_segment_server(channel, monkeypatch):
    """It says so at once, and a program's other metrics are there."""
    prometheus_client = pytest.importorskip("prometheus_client")
    import shmtensor.metrics

    registry = prometheus_client.CollectorRegistry()
    registry.register(shmtensor.metrics.collector(channel))
    assert b"shmtensor_readable 1.0" in prometheus_client.generate_latest(registry)

    def listing():
        raise ResourceError("the segment server does not serve")

    monkeypatch.setattr(shm, "listing", listing)
    text = prometheus_client.generate_latest(registry).decode()
    assert "shmtensor_readable 0.0" in text
    assert "shmtensor_channels " not in [line[: len("shmtensor_channels ")] for line in text.splitlines()]


@once("the package is missing")
def test_metrics_without_prometheus_client(monkeypatch):
    import shmtensor.metrics

    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(shmtensor.DependencyError, match=r"pip install '\.\[metrics\]'") as caught:
        shmtensor.metrics.collector()
    assert caught.value.name == "prometheus_client"
    run = CliRunner().invoke(app, ["metrics", "--port", "0"])
    assert run.exit_code == 1
    assert ".[metrics]" in run.stderr.replace("\n", "")


def test_members_of_groups_are_told_apart(channel):
    with (
        shmtensor.Publisher(channel) as pub,
        shmtensor.Subscriber(channel, group="detectors") as one,
        shmtensor.Subscriber(channel, delivery="latest") as newest,
        shmtensor.Subscriber(channel) as plain,
    ):
        for _ in range(2):
            pub.send(np.zeros(100))
            for sub in (one, newest, plain):
                sub.recv(timeout=PATIENCE).release()
        text = cli("top", channel, "--once", "--interval", "0.1", width=140)
        assert "[detectors]" in text
        assert f"{os.getpid()} {name_of(os.getpid())} [detectors]" in text
        assert f"{os.getpid()} {name_of(os.getpid())} latest" in text
        printed = json.loads(cli("top", channel, "--once", "--json", "--interval", "0.1"))["channels"][0]["members"]
        listed = json.loads(cli("ls", channel, "--json"))["channels"][0]["members"]
        for members in (printed, listed):
            sender, *receivers = members
            assert sender["published"] == 2
            found = {(it["group"], it["delivery"]): (it["received"], it["unread"]) for it in receivers}
            assert found == {("detectors", "one"): (None, None), (None, "latest"): (None, None), (None, "all"): (2, 0)}
            assert all(it["redelivered"] == 0 for it in receivers)
        assert printed[0]["bytes_per_second"] is not None
        assert {it["bytes_per_second"] for it in printed[1:]} == {None}


def test_a_narrow_terminal_cuts_no_number(channel):
    with (
        shmtensor.Publisher(channel, label="the left camera of the robot") as pub,
        shmtensor.Subscriber(channel, group="detectors-of-everything", label="the first of them") as sub,
    ):
        for _ in range(3):
            pub.send(np.zeros(10))
        sub.recv(timeout=PATIENCE).release()
        lines = cli("ls", channel, width=80).splitlines()
        assert max(map(len, lines)) <= 80
        heading, sender, receiver = (line.split() for line in lines[1:4])
        assert heading[:6] == ["member", "delivery", "pid", "life", "published", "joined"]
        assert str(os.getpid()) in sender
        assert {"sender", "alive", "3"} <= set(sender)
        assert {"receiver", str(os.getpid()), "alive"} <= set(receiver)


STOPS = """
import os, signal, sys, shmtensor
with shmtensor.Subscriber(sys.argv[1]):
    print(flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_stopped_process_is_shown_as_such(channel):
    with shmtensor.Publisher(channel):
        with subprocess.Popen([sys.executable, "-c", STOPS, channel], stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            try:
                wait_until(lambda: shmtensor.inspect(channel).receivers[0].stopped)
                assert not shmtensor.inspect(channel).senders[0].stopped
                assert "stopped" in cli("ls", channel, width=120)
                assert f"{process.pid} stopped" in cli("top", channel, "--once", "--interval", "0.1", width=120)
            finally:
                process.send_signal(signal.SIGCONT)
        assert not any(it.stopped for it in shmtensor.inspect(channel).members)
