"""`shmtensor ls`, `gc` and `doctor`: on live channels, on the dead, and on damaged segments."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import shmtensor
from shmtensor.cli import doctor
from shmtensor.cli.doctor import FAIL, Finding
from shmtensor.cli.output import prepare_output
from shmtensor.errors import ResourceError
from shmtensor.memory import placement, served
from shmtensor.memory import segment as shm

from ..commands import app
from ..scenes import own_shm, play, unswept

PATIENCE = 120.0


def cli(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout


def script() -> str:
    """What the script `shmtensor` runs."""
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    module, function = re.search(r'^shmtensor = "([\w.]+):(\w+)"$', project, re.MULTILINE).groups()
    return f"import sys; from {module} import {function}; sys.exit({function}())"


@pytest.mark.parametrize("how", ["module", "script"])
def test_control_c_while_it_is_imported(tmp_path, how):
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    path = os.pathsep.join([str(tmp_path), str(Path(shmtensor.__file__).parents[1])])
    command = [sys.executable, *(["-m", "shmtensor"] if how == "module" else ["-c", script()]), "ls"]
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "")


def seen(channel: str) -> dict:
    (found,) = json.loads(cli("ls", channel, "--json"))["channels"]
    assert found["name"] == channel
    return found


def hold_one(channel: str, pipe) -> None:
    """Take one message, keep its view, and wait to be killed."""
    rx = shmtensor.Subscriber(channel)
    pipe.send("joined")
    value = rx.recv(timeout=PATIENCE).value
    pipe.send(int(value[0]))
    signal.pause()


@pytest.fixture
def victim(channel):
    """A subscriber in a process of its own: (process, pipe)."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold_one, args=(channel, theirs))
    process.start()
    theirs.close()
    assert ours.poll(PATIENCE)
    assert ours.recv() == "joined"
    yield process, ours
    process.kill()
    process.join()
    process.close()
    ours.close()


def test_help_and_version():
    assert "ls" in cli("--help")
    for command in ("ls", "gc", "doctor", "demo"):
        assert "--json" in cli(command, "--help")
    assert shmtensor.__version__ in cli("--version")
    run = subprocess.run([sys.executable, "-m", "shmtensor", "--version"], capture_output=True, text=True, check=True)
    assert shmtensor.__version__ in run.stdout


@pytest.mark.parametrize(("group", "label"), [("", 64), ("g" * 64, 64), ("g" * 36, 20)])
def test_ls_of_long_names_cuts_two_columns(channel, group, label):
    with (
        shmtensor.Publisher(channel),
        shmtensor.Subscriber(channel, group=group or None, label="l" * label),
    ):
        result = CliRunner().invoke(app, ["ls", channel], env={"COLUMNS": "80"})
    lines = result.output.splitlines()
    (header,) = (line for line in lines if line.split()[:1] == ["member"])
    assert header.split() == ["member", "delivery", "pid", "life", "published", "joined", "process"]
    assert sum(str(os.getpid()) in line.split() for line in lines) >= 2
    assert all("alive" in line for line in lines if line.split()[:1] in (["sender"], ["receiver"]))


def test_labels_are_no_emoji(channel):
    with shmtensor.Publisher(channel, label="rig:b:1"):
        assert "rig:b:1" in CliRunner().invoke(app, ["ls", channel], env={"COLUMNS": "200"}).output


def test_output_without_a_buffer_gets_one(monkeypatch):
    """A write to a bare descriptor may be cut short, as by a stop, and counts as whole."""
    reader, writer = os.pipe()
    raw = io.TextIOWrapper(io.FileIO(writer, "w"), "ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", raw)
    monkeypatch.setattr(sys, "__stdout__", raw)
    prepare_output()
    with sys.stdout as made, open(reader) as got:
        assert isinstance(made.buffer, io.BufferedWriter)
        assert sys.__stdout__ is made
        print("\xe9")
        assert got.readline() == "\\xe9\n"


def test_arguments_that_nothing_can_be_done_with_exit_with_code_2(tmp_path):
    for command in (
        ["relay", "x", "--pattern", "foo"], ["relay", "x"], ["share", str(tmp_path / "d"), "--limit", "none"],
    ):  # fmt: skip
        assert CliRunner().invoke(app, command).exit_code == 2


def doctor_without_room() -> None:
    found = json.loads(cli("doctor", "--json", code=1))
    print([it["name"] for it in found["findings"] if it["status"] == "fail"])


@pytest.mark.slow
def test_doctor_fails_where_no_channel_has_room():
    assert "shared-memory segment" in play(doctor_without_room, mounts=(own_shm("size=8k"),))


def test_ls_fan_out(channel):
    with (
        shmtensor.Publisher(channel, slots=8, slot_bytes=4096) as pub,
        shmtensor.Subscriber(channel) as sub,
        shmtensor.Subscriber(channel, delivery="latest") as late,
    ):
        for number in range(3):
            pub.send(np.full(100, number))
        first, newest = sub.recv(timeout=PATIENCE), late.recv(timeout=PATIENCE)
        before = {name: os.stat(f"/dev/shm/{name}").st_mtime_ns for name in os.listdir("/dev/shm") if channel in name}
        found = seen(channel)
        after = {name: os.stat(f"/dev/shm/{name}").st_mtime_ns for name in os.listdir("/dev/shm") if channel in name}
        assert before == after
        assert found["kind"] == "fan-out"
        assert found["living"] == 3
        assert found["notes"] == []
        assert found["bytes"] == sum(os.stat(path).st_size for path in found["files"])
        roles = [(m["role"], m["delivery"], m["pid"], m["alive"], m["leaving"]) for m in found["members"]]
        me = os.getpid()
        assert roles == [
            ("sender", None, me, True, False),
            ("receiver", "all", me, True, False),
            ("receiver", "latest", me, True, False),
        ]
        (ring,) = found["members"][0]["rings"]
        assert (ring["slots"], ring["slot_bytes"], ring["slots_used"], ring["bytes_used"]) == (8, 4096, 3, 2400)
        assert found["members"][0]["published"] == 3
        messages = {m["seq"]: m for m in found["messages"]}
        assert [messages[seq]["state"] for seq in (1, 2, 3)] == ["leased", "unread", "leased"]
        assert messages[1]["holders"][0]["uid"] == found["members"][1]["uid"]
        assert {holder["how"] for holder in messages[3]["holders"]} == {"unread", "leased"}
        assert messages[1]["age"] >= messages[3]["age"] >= 0
        text = cli("ls", channel)
        assert channel in text
        assert "leased" in text
        del first, newest
        sub.recv(timeout=PATIENCE).release()
        sub.recv(timeout=PATIENCE).release()
        assert seen(channel)["messages"] == []


@pytest.mark.filterwarnings("ignore:.*that no consumer has finished:ResourceWarning")  # on purpose
def test_ls_work_queue(channel):
    with shmtensor.Producer(channel, slots=4) as tx, shmtensor.Consumer(channel, acknowledge="release") as rx:
        for number in range(3):
            tx.send(np.full(100, number))
        claimed, done = rx.recv(timeout=PATIENCE), rx.recv(timeout=PATIENCE)
        view = done.value
        done.release()
        found = seen(channel)
        assert found["kind"] == "work queue"
        messages = {m["seq"]: m for m in found["messages"]}
        assert [messages[seq]["state"] for seq in (1, 2, 3)] == ["claimed", "done", "waiting"]
        assert messages[1]["attempt"] == 1
        assert messages[1]["holders"] == [
            {"uid": found["members"][1]["uid"], "pid": os.getpid(), "how": "claimed", "alive": True, "group": None}
        ]
        assert "none yet" in cli("ls", channel)
        del view
        claimed.release()
        assert [m["seq"] for m in seen(channel)["messages"]] == [3]


def test_ls_history(channel):
    with shmtensor.Publisher(channel, slots=4, slot_bytes=4096, history=1) as pub:
        pub.send(np.zeros(10))
        pub.send(np.zeros(10))
        (message,) = seen(channel)["messages"]
        assert (message["seq"], message["state"], message["span"]) == (2, "history", 1)


def test_ls_long_messages(channel):
    with shmtensor.Publisher(channel, slots=9, slot_bytes=4096) as pub, shmtensor.Subscriber(channel):
        pub.send(np.zeros(1500))
        (message,) = seen(channel)["messages"]
        assert (message["seq"], message["state"], message["span"], message["bytes"]) == (1, "unread", 3, 12000)


@pytest.mark.slow
def test_the_dead(channel, victim):
    process, pipe = victim
    with shmtensor.Publisher(channel, slots=4) as pub:
        pub.wait_for_subscribers(1, timeout=PATIENCE)
        pub.send(np.full(100, 5))
        assert pipe.poll(PATIENCE)
        assert pipe.recv() == 5
        with unswept(channel):
            process.kill()
            process.join()
            found = seen(channel)
            assert "dead" in cli("ls", channel)
        assert found["living"] == 1
        (member,) = (m for m in found["members"] if m["role"] == "receiver")
        assert (member["pid"], member["alive"]) == (process.pid, False)
        (message,) = found["messages"]
        assert message["holders"] == [
            {"uid": member["uid"], "pid": process.pid, "how": "leased", "alive": False, "group": None}
        ]
        cli("gc")
        found = seen(channel)  # the live publisher stays, the dead subscriber goes
        assert [m["role"] for m in found["members"]] == ["sender"]
        assert found["messages"] == []


@pytest.mark.slow
def test_gc_after_a_death():
    """In a `/dev/shm` of its own: any other program that makes an endpoint sweeps, too."""
    play(gc_after_a_death, mounts=(own_shm("size=64m"),))


def gc_after_a_death() -> None:
    script = (
        "import signal, sys, numpy, shmtensor\n"
        "tx = shmtensor.Producer(sys.argv[1]); rx = shmtensor.Consumer(sys.argv[1])\n"
        "tx.send(numpy.zeros(1000)); print('sent', flush=True); signal.pause()\n"
    )
    with shmtensor.Publisher("live", slots=2, slot_bytes=64) as pub:
        process = subprocess.Popen([sys.executable, "-c", script, "dead"], stdout=subprocess.PIPE, text=True)
        with process:
            assert process.stdout.readline() == "sent\n"
            process.kill()
        files = seen("dead")["files"]
        assert len(files) == 4  # control, sequences, semaphore, ring
        dry, text = json.loads(cli("gc", "--dry-run", "--json")), cli("gc", "--dry-run")
        assert all(map(os.path.exists, files))
        assert dry["dry_run"]
        assert set(files) <= {it["path"] for it in dry["removed"]}
        assert "would remove" in text
        swept = json.loads(cli("gc", "--json"))
        assert not any(map(os.path.exists, files))
        cli("ls", "dead", code=1)
        removed = {it["path"]: it for it in swept["removed"]}
        assert set(files) <= set(removed)
        assert all(removed[path]["channel"] == "dead" for path in files)
        assert swept["bytes"] == sum(it["bytes"] for it in swept["removed"]) > 8000
        (left,) = (it for it in swept["left"] if it["channel"] == "live")
        assert str(os.getpid()) in left["why"]
        pub.send(np.zeros(4))


def test_ls_damaged_segments():
    play(ls_damaged_segments, mounts=(own_shm("size=64m"),))


def look_for_channels_that_are_not_there() -> None:
    def look() -> list[str]:
        listed = CliRunner().invoke(app, ["ls", "frontt"])
        assert listed.exit_code == 1
        return [
            " ".join(found.split()) for found in (listed.stderr, cli("top", "frontt", "--once").partition("held")[2])
        ]

    assert look() == ['error: there is no channel "frontt": there is no other either', "no channels"]
    beginnings = ['error: there is no channel "frontt"', "no channel has such a name"]
    with shmtensor.Publisher("front"), contextlib.ExitStack() as stack:
        assert look() == [f"{it}: there is front" for it in beginnings]
        names = [f"back{number}" for number in range(10)]
        for name in names:
            stack.enter_context(shmtensor.Publisher(name))
        assert look() == [f"{it}: there are {', '.join(names)} and 1 more" for it in beginnings]


@pytest.mark.slow
def test_commands_name_the_channels_that_there_are():
    play(look_for_channels_that_are_not_there, mounts=(own_shm("size=64m"),))


def ls_damaged_segments() -> None:
    with shmtensor.Publisher("c", slots=4) as pub, shmtensor.Subscriber("c") as sub:
        pub.send(np.zeros(10))
        uid = seen("c")["members"][0]["uid"]
        os.rename(f"/dev/shm/shmtensor.c,{uid},0", f"/dev/shm/shmtensor.c,{uid},9")
        found = seen("c")
        assert "ring 0" in found["notes"][0]
        os.rename(f"/dev/shm/shmtensor.c,{uid},9", f"/dev/shm/shmtensor.c,{uid},0")
        assert seen("c")["notes"] == []
        sub.recv(timeout=PATIENCE).release()
    for size in (0, 100, 1 << 20):  # no control segment at all
        notes, text = seen_file("c", "/dev/shm/shmtensor.c", size)
        assert notes
        assert "note:" in text
    notes, _ = seen_file("c", f"/dev/shm/shmtensor.c,{1:016x}", 0)
    assert "no control segment" in notes[0]


def seen_file(channel: str, path: str, size: int) -> tuple[list[str], str]:
    """What `ls` says of a file that nobody owns."""
    with open(path, "wb") as file:
        file.truncate(size)
    found = cli("ls", channel, "--json"), cli("ls", channel)
    os.unlink(path)
    return json.loads(found[0])["channels"][0]["notes"], found[1]


def test_ls_while_a_segment_is_cut(channel, monkeypatch):
    with shmtensor.Publisher(channel, slots=4) as pub, shmtensor.Subscriber(channel):
        pub.send(np.zeros(10))
        real = os.pread
        calls, intact = [], [0]

        def short(fd: int, size: int, offset: int) -> bytes:
            calls.append(size)
            return real(fd, size, offset)[: size // 2 if len(calls) > intact[0] else size]

        monkeypatch.setattr(shm.os, "pread", short)
        for number in range(8):
            calls.clear()
            intact[0] = number
            seen(channel)  # never raises, whichever read is cut short


def test_other_users_segments(channel, monkeypatch):
    with shmtensor.Publisher(channel) as pub:

        def denied(name: str, **_: bool) -> shm.Glance:
            raise ResourceError(13, f"segment {name} belongs to user 4242, you are user 1: use another channel name")

        monkeypatch.setattr(shm, "look_at", denied)
        assert "belongs to user 4242" in seen(channel)["notes"][0]
        monkeypatch.undo()
        pub.close()


def test_ls_of_a_name_that_is_not_ours(channel):
    path = f"/dev/shm/shmtensor.{channel}"
    os.mkdir(path)
    try:
        run = CliRunner().invoke(app, ["ls", channel])
        assert (run.exit_code, "what lies under its name is not the library's" in run.output) == (1, True)
        assert f"not ours: {path}: a directory" in run.output
        (found,) = json.loads(cli("ls", channel, "--json", code=1))["foreign"]
        assert (found["path"], found["what"]) == (path, "a directory")
        assert "not ours" not in cli("ls", channel + "-x", code=1)
    finally:
        os.rmdir(path)


def test_ls_names(channel):
    cli("ls", channel, code=1)
    cli("ls", "no/such", code=2)
    cli("ls", "no-such-*", code=1)
    with shmtensor.Publisher(channel), shmtensor.Publisher(f"{channel}-b"):
        for pattern in (f"{channel}*", f"{channel[:-1]}?*"):
            names = [it["name"] for it in json.loads(cli("ls", pattern, "--json"))["channels"]]
            assert {channel, f"{channel}-b"} <= set(names), pattern
        assert f"{channel}-b" in cli("ls", f"{channel}-[ab]")
    assert isinstance(json.loads(cli("ls", "--json"))["channels"], list)


def test_doctor():
    report = json.loads(cli("doctor", "--json"))
    assert report["ok"] is True
    names = {it["name"] for it in report["findings"]}
    assert {"/dev/shm", "OFD locks", "membarrier", "POSIX semaphores", "socket directory", "leftovers"} <= names
    assert all(it["status"] in ("ok", "warn", "fail") and it["meaning"] for it in report["findings"])
    assert "checks" in cli("doctor")


def test_doctor_fails_and_survives_broken_checks(monkeypatch):
    def broken():
        raise RuntimeError("no such thing")

    monkeypatch.setattr(doctor, "MACHINE", (broken, lambda: iter([Finding("x", FAIL, "1", "2")])))
    monkeypatch.setattr(doctor, "SOFTWARE", ())
    report = json.loads(cli("doctor", "--json", code=1))
    assert [it["status"] for it in report["findings"]] == ["fail", "fail"]


def test_doctor_waits_once_for_a_segment_server_that_has_ended(monkeypatch, tmp_path):
    now = [1e6]

    def sleep(seconds: float) -> None:
        if threading.current_thread() is threading.main_thread():
            now[0] += seconds
        else:  # that which looks for the next server
            time.sleep(seconds)

    monkeypatch.setattr(served, "time", types.SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    tmp_path.chmod(0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as ended:
        ended.bind(f"{tmp_path}/{placement.SOCKET}")
    monkeypatch.setenv("SHMTENSOR_DIR", str(tmp_path))
    report = json.loads(cli("doctor", "--json", code=1))
    assert now[0] - 1e6 < 1.5 * served.PATIENCE
    found = {it["name"]: it for it in report["findings"]}
    assert found["segment server"]["status"] == "fail"
    assert "shmtensor share" in found["segment server"]["meaning"]
    assert found["NumPy"]["status"] == "ok"


def test_doctor_tries_the_socket_directory(monkeypatch, tmp_path):
    """It may be full: all endpoints fail then."""

    def full(path: str, mode: int) -> None:
        assert os.path.dirname(path) == str(tmp_path)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tmp_path.chmod(0o700)
    monkeypatch.setenv("SHMTENSOR_DIR", str(tmp_path))
    assert not [it for it in json.loads(cli("doctor", "--json"))["findings"] if it["status"] == "fail"]
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "mkfifo", full)
    report = json.loads(cli("doctor", "--json", code=1))
    assert [(it["name"], it["value"]) for it in report["findings"] if it["status"] == "fail"] == [
        ("socket directory", f"{tmp_path}: No space left on device")
    ]


def test_doctor_bad_socket_directory(monkeypatch, tmp_path):
    tmp_path.chmod(0o755)
    monkeypatch.setenv("SHMTENSOR_DIR", str(tmp_path))
    report = json.loads(cli("doctor", "--json", code=1))
    (finding,) = (it for it in report["findings"] if it["name"] == "socket directory")
    assert finding["status"] == "fail"
    assert "chmod 700" in finding["value"]
    result = CliRunner().invoke(app, ["gc"])
    assert result.exit_code == 1
    assert "chmod 700" in result.stderr


def test_interrupt(monkeypatch):
    def interrupted() -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(shm, "listing", interrupted)
    cli("ls", code=130)


def test_options_that_cannot_be_are_code_2():
    for options in (["nope"], ["json:loads", "--max-bytes", "much"], ["json:loads", "--name", "x/y"]):
        run = CliRunner().invoke(app, ["serve", *options, *([] if "--name" in options else ["--name", "x"])])
        assert (run.exit_code, run.stderr.startswith("error: ")) == (2, True)


def test_bench_of_more_than_there_is():
    for size in ("1024TiB", "100000000TiB"):
        run = CliRunner().invoke(app, ["bench", "--size", size])
        assert (run.exit_code, "choose a smaller --size" in run.stderr.replace("\n", " ")) == (1, True)


def test_errors_have_no_number(monkeypatch):
    def refused() -> list[str]:
        raise ResourceError(errno.EMFILE, "too many open files\x1b[2J")

    monkeypatch.setattr(shm, "listing", refused)
    run = CliRunner().invoke(app, ["ls"])
    assert (run.exit_code, run.stderr) == (1, "error: too many open files\\x1b[2J\n")
