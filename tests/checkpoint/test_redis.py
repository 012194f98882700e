"""Checkpoints in a Redis server: files and their parts, uploads, loads, and a server that fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from typer.testing import CliRunner

from shmtensor import (
    AccessDenied,
    ArgumentError,
    CheckpointError,
    CheckpointWriter,
    ResourceError,
    list_checkpoints,
    load_arrays,
    load_checkpoint,
    open_checkpoint,
)
from shmtensor.checkpoint import names, remote
from shmtensor.checkpoint.threads import Stopped
from shmtensor.checkpoint.upload import Target, put_file

from ..commands import app
from ..faults.interrupts import each_boundary, stride
from ..scenes import ROOT
from ..waiting import PATIENCE, wait_for_end, wait_until
from . import servers
from .servers import redis_server  # noqa: F401
from .test_deaths import own_channels, state_of  # noqa: F401
from .test_upload import there

fsspec = pytest.importorskip("fsspec")
redis = pytest.importorskip("redis")
redis_files = pytest.importorskip("shmtensor.checkpoint.redis_files")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_channels")]


@pytest.fixture
def client(redis_server):  # noqa: F811
    """A client of the server's, whose first database is emptied before and after."""
    with redis.Redis(port=redis_server.port) as found:
        found.config_set("maxmemory", 0)
        found.flushall()
        yield found
        if redis_server.process.poll() is None:
            found.flushall()


@pytest.fixture(params=["tcp", "unix"])
def url(request, redis_server, client):  # noqa: F811
    if request.param == "unix":
        return f"redis+unix://{redis_server.socket}/0/runs/a"
    return f"redis://127.0.0.1:{redis_server.port}/0/runs/a"


@pytest.fixture
def tcp(redis_server, client):  # noqa: F811
    return f"redis://127.0.0.1:{redis_server.port}/0/runs/a"


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(redis_files, "PART", 64 << 10)


def file_system(url):
    remote.register()
    return fsspec.core.url_to_fs(url)


def parts(client):
    return sorted(key for key in client.scan_iter() if b":" in key)


# --- checkpoints


def test_saved_and_loaded(url, tmp_path):
    with CheckpointWriter(tmp_path / "a", upload=url, keep_last=1, upload_keep_last=2) as writer:
        for step in (1, 2, 3):
            handle = writer.save(state_of(step), metrics={"loss": step})
            assert handle.uploaded.result(PATIENCE) == f"{url}/step-{step:08d}.safetensors"
    assert there(url) == [2, 3]
    assert (load_checkpoint(url)["w"] == 3).all()
    with open_checkpoint(url) as checkpoint:
        assert (checkpoint["w"].read(np.s_[5:10]) == 3).all()
    assert load_arrays(url, keys=["w"], slices={"w": np.s_[1:3]})["w"].shape[0] == 2
    assert [found.metrics["loss"] for found in list_checkpoints(url)] == [3, 2]


def test_saved_without_a_local_copy(url, tmp_path):
    with CheckpointWriter(tmp_path / "a", upload=url, local=False, keep_last=2) as writer:
        for step in (1, 2, 3):
            assert writer.save(state_of(step)).durable.result(PATIENCE).path == f"{url}/step-{step:08d}.safetensors"
    assert there(url) == [2, 3]
    assert not list((tmp_path / "a").glob("step*"))


def test_the_command_line(tcp, tmp_path):
    with CheckpointWriter(tmp_path / "a", upload=tcp) as writer:
        path = writer.save(state_of(1)).path
    run = CliRunner().invoke
    assert [
        each["step"] for each in json.loads(run(app, ["checkpoint", "ls", tcp, "--json"]).stdout)["checkpoints"]
    ] == [1]
    for command in ("info", "verify"):
        found = run(app, ["checkpoint", command, tcp])
        assert found.exit_code == 0, found.output
    target = tcp.replace("runs/a", "b/new.safetensors")
    found = run(app, ["checkpoint", "convert", str(path), target])
    assert found.exit_code == 0, found.output
    assert load_arrays(target)["step"] == 1
    found = run(app, ["checkpoint", "convert", str(path), target])
    assert found.exit_code != 0
    assert "exists" in found.output
    found = run(app, ["checkpoint", "convert", target, str(tmp_path / "back.npz")])
    assert found.exit_code == 0, found.output
    assert (load_arrays(tmp_path / "back.npz")["w"] == 1).all()


def test_shards_and_ranges_of_many_parts(tcp, tmp_path, small_parts):
    """Bit for bit, by ranges that end within parts, and only these are read."""
    state = {name: np.random.default_rng(n).random(60_000) for n, name in enumerate("abc")}
    fs, key = file_system(tcp)
    with CheckpointWriter(tmp_path / "a", max_shard=500_000) as writer:
        writer.save(state, name="x")
    for path in (tmp_path / "a" / "x").iterdir():
        fs.put_file(str(path), f"{key}/{path.name}")
    found = load_arrays(tcp)
    assert all((found[name] == state[name]).all() for name in state)
    found = load_arrays(tcp, slices={"b": np.s_[12_345:34_567]})
    assert (found["b"] == state["b"][12_345:34_567]).all()


# --- files


def test_files(url, client, small_parts):
    fs, key = file_system(f"{url}/x/file")
    data = np.random.default_rng(0).bytes(200_000)
    fs.pipe_file(key, data)
    assert len(parts(client)) == 4
    assert all(client.ttl(part) == -1 for part in parts(client))
    assert fs.cat_file(key) == data
    for start, end in (
        (0, 1),
        (65_535, 65_537),
        (65_536, 131_072),
        (1, 199_999),
        (199_999, 300_000),
        (5, 5),
        (-7, None),
    ):
        assert fs.cat_file(key, start, end) == data[start:end]
    info = fs.info(key)
    assert (info["size"], info["type"], fs.unstrip_protocol(key)) == (200_000, "file", f"{url}/x/file")
    assert abs(fs.modified(key).timestamp() - time.time()) < PATIENCE
    with fs.open(key, "rb") as file:
        file.seek(70_000)
        assert file.read(1000) == data[70_000:71_000]
    with pytest.raises(NotImplementedError, match="written as a whole"):
        fs.open(key, "wb")
    fs.pipe_file(key, b"short")
    assert fs.cat_file(key) == b"short"
    assert len(parts(client)) == 1
    assert fs.info(key)["ETag"] != info["ETag"]
    fs.pipe_file(f"{key}.empty", b"")
    assert fs.cat_file(f"{key}.empty") == b""
    folder = key.rpartition("/")[0]
    assert fs.ls(folder, detail=False) == [key, f"{key}.empty"]
    assert fs.ls("0/runs", detail=False) == ["0/runs/a"]
    assert sorted(fs.find("0")) == [key, f"{key}.empty"]
    with pytest.raises(OSError, match="not empty"):
        fs.rmdir(folder)
    fs.rm(folder, recursive=True)
    assert not fs.exists(folder)
    assert parts(client) == []
    with pytest.raises(FileNotFoundError):
        fs.cat_file(key)
    with pytest.raises(FileNotFoundError):
        fs.rm_file(key)


def test_a_directory_has_many_names(tcp, client):
    fs, key = file_system(tcp)
    for n in range(1500):
        fs.pipe_file(f"{key}/{n}", b"x")
    client.set("runs/a/somebody's", "not a file")
    client.sadd("runs/a/", "somebody's", "gone", "gone too/")
    assert len(fs.ls(key)) == 1500


def test_whoever_stops_leaves_no_parts(tcp, client, tmp_path, small_parts):
    path = remote.open_url(f"{tcp}/x")
    (tmp_path / "x").write_bytes(bytes(300_000))
    calls = iter([False, False, False, True])
    with pytest.raises(Stopped):
        put_file(str(tmp_path / "x"), path, 300_000, lambda: next(calls, True))
    assert client.keys() == []


def test_whoever_dies_leaves_parts_that_expire(tcp, client, tmp_path):
    code = f"""
        import os, fsspec
        from shmtensor.checkpoint import redis_files, remote
        remote.register()
        fs, key = fsspec.core.url_to_fs({tcp!r} + "/x")
        fs.pipe_file(key, b"old")
        redis_files.PART = 1 << 16
        redis_files.RedisFileSystem._commit = lambda *_: os._exit(7)
        fs.pipe_file(key, bytes(200_000))
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, env=environment, timeout=PATIENCE)
    assert done.returncode == 7
    fs, key = file_system(f"{tcp}/x")
    assert fs.cat_file(key) == b"old"
    assert sorted(client.ttl(part) > 0 for part in parts(client)) == [False, True, True, True, True]


def test_parts_that_the_server_lost(tcp, client, monkeypatch, small_parts):
    """It is not committed without them, whenever they go."""
    fs, key = file_system(f"{tcp}/x")
    commit = fs._commit

    def evict(*args):
        client.delete(*parts(client)[:1])
        return commit(*args)

    monkeypatch.setattr(type(fs), "_commit", staticmethod(evict))
    with pytest.raises(OSError, match="has lost parts"):
        fs.pipe_file(key, bytes(200_000))
    monkeypatch.undo()
    multi = redis.client.Pipeline.multi

    def evict_late(pipeline):
        client.delete(*parts(client)[:1])
        return multi(pipeline)

    monkeypatch.setattr(redis.client.Pipeline, "multi", evict_late)
    with pytest.raises(OSError, match="WatchError"):
        fs.pipe_file(key, bytes(200_000))
    assert not fs.exists(key)


def test_an_answer_that_was_lost(tcp, client, monkeypatch):
    """A commit that the server made although the writer was told of an error keeps its parts; one that comes after the
    writer has given up is refused."""
    fs, key = file_system(f"{tcp}/x")
    commit = fs._commit

    def lost(*args):
        commit(*args)
        raise OSError("the answer was lost")

    monkeypatch.setattr(type(fs), "_commit", staticmethod(lost))
    with pytest.raises(OSError, match="was lost"):
        fs.pipe_file(key, b"data")
    assert fs.cat_file(key) == b"data"
    late = []

    def never(*args):
        late.append(args)
        raise OSError("no answer")

    monkeypatch.setattr(type(fs), "_commit", staticmethod(never))
    with pytest.raises(OSError, match="no answer"):
        fs.pipe_file(key, b"other")
    with pytest.raises(OSError, match="has lost parts"):
        commit(*late[0])
    assert fs.cat_file(key) == b"data"


def test_it_is_replaced_while_it_is_read(tcp, small_parts):
    """Readers get the old bytes, the new ones, or an error; never both mixed."""
    fs, key = file_system(f"{tcp}/x")
    fs.pipe_file(key, bytes(200_000))
    ended, seen = threading.Event(), set()

    def read():
        while not ended.is_set():
            try:
                found = set(fs.cat_file(key))
            except OSError as error:
                found = {str(error).rpartition(", or ")[2]}
            seen.add(tuple(found))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for n in range(1, 40):
        fs.pipe_file(key, bytes([n]) * 200_000)
    ended.set()
    for reader in readers:
        reader.join()
    assert seen - {("was replaced meanwhile",)} <= {(n,) for n in range(40)}  # of one byte each
    assert len(seen) > 1


# --- values of others


@pytest.mark.timeout(1800)
def test_every_boundary_of_a_save_without_a_local_copy(tcp, tmp_path):
    """The next save is taken; what was reported is durable; each file is whole; nothing is left."""
    with CheckpointWriter(tmp_path / "a", upload=tcp, local=False, memory="4MiB", keep_last=3) as writer:
        writer.start(timeout=PATIENCE)
        state, handles = {"w": np.zeros(20_000), "step": 0}, []

        def save():
            handles.append(writer.save(state))

        for attempt in each_boundary(save, step=stride(5)):
            state["w"][:] = state["step"] = attempt.at  # whatever was not taken yet must not reach a file
            if attempt.at % 20 == 1 or not attempt.reached:
                writer.save(state, timeout=PATIENCE).durable.result(PATIENCE)
        for handle in handles:
            handle.durable.exception(PATIENCE)
            assert handle.status == "durable"
        assert attempt.at > 100
    counts = writer.statistics()
    assert (counts.failed, counts.restarts) == (0, 0)
    listed = list_checkpoints(tcp)
    assert len(listed) == 3
    for found in listed:
        back = load_arrays(found.path, verify="all")
        assert (back["w"] == back["step"]).all()
    assert sorted(os.listdir(tmp_path / "a")) == [".shmtensor.index", ".shmtensor.lock"]


@pytest.mark.parametrize(
    "value",
    [
        b"somebody's", b"shmtensor file 1 5 5 0 " + b"a" * 32, b"shmtensor file 1 5 5 1 " + b"a" * 32, b"\0" * 1000,
        b"shmtensor file 1 -5 5 65536 " + b"a" * 32, b"shmtensor file 1 " + b"9" * 30 + b" 5 65536 " + b"a" * 32,
        b"shmtensor file 2 5 5 65536 " + b"a" * 32, b"shmtensor file 1 " + b"9" * 18 + b" 5 65536 " + b"a" * 32,
    ],
)  # fmt: skip
def test_values_that_are_no_files(tcp, client, value):
    client.set("runs/a.safetensors", value)
    with pytest.raises((ResourceError, CheckpointError), match="is no file of shmtensor's"):
        load_checkpoint(f"{tcp}.safetensors")
    fs, key = file_system(f"{tcp}.safetensors")
    with pytest.raises(ValueError, match="is no file of shmtensor's"):
        fs.pipe_file(key, b"data")
    assert client.get("runs/a.safetensors") == value


def test_keys_of_other_types(tcp, client):
    client.rpush("runs/a.safetensors", "x")
    client.set("runs/b/", "x")
    for name in ("a.safetensors", "b"):
        with pytest.raises(ResourceError, match="value of another type"):
            load_checkpoint(tcp.replace("runs/a", f"runs/{name}"))


@pytest.mark.parametrize("folder", ["runs/", "runs/a/", "/"])
def test_a_directory_of_another_type(tcp, client, small_parts, folder):
    """A file that cannot be listed is not written at all, nor does it replace another one."""
    fs, _ = file_system(tcp)
    fs.pipe_file("0/runs/a/old", b"old")
    client.delete(folder)
    client.set(folder, "somebody's")
    before = {key: client.dump(key) for key in client.scan_iter()}
    for name in ("old", "new"):
        with pytest.raises(ValueError, match=f"the key '{folder}' has a value of the type string"):
            fs.pipe_file(f"0/runs/a/{name}", bytes(200_000))
    assert {key: client.dump(key) for key in client.scan_iter()} == before


def test_damaged_parts(tcp, client, tmp_path):
    with CheckpointWriter(tmp_path / "a", upload=tcp) as writer:
        writer.save(state_of(1))
    target = next(part for part in parts(client) if b"safetensors" in part)
    data = client.get(target)
    client.setrange(target, len(data) - 3, b"\xff\xee\xdd")
    with pytest.raises(CheckpointError):
        load_arrays(tcp, verify="all")
    for damaged in (data[:-1], None):
        client.delete(target) if damaged is None else client.set(target, damaged)
        with pytest.raises(ResourceError, match="missing or too short"):
            load_arrays(tcp)
    client.set("runs/a/step-00000001.safetensors", f"shmtensor file 1 {10**17} 1 65536 {'a' * 32}")
    with pytest.raises((ResourceError, CheckpointError)):
        load_arrays(f"{tcp}/step-00000001.safetensors")


# --- a server that fails


def test_the_server_stops(tcp, redis_server, tmp_path):  # noqa: F811
    """A load, and an upload, fail after their attempts or go on when the server does; nothing is lost."""
    with CheckpointWriter(tmp_path / "a", upload=tcp) as writer:
        writer.save(state_of(1)).uploaded.result(PATIENCE)
        redis_server.stop()
        try:
            handle = writer.save(state_of(2))
            assert handle.durable.result(PATIENCE)
            with pytest.raises(ResourceError, match="no answer in time"):
                load_arrays(tcp)
        finally:
            redis_server.go_on()
        writer.save(state_of(3)).uploaded.result(PATIENCE)
        wait_until(lambda: writer.statistics().uploaded == 3)
    assert there(tcp) == [1, 2, 3]


def test_the_server_goes_on_in_time(tcp, redis_server, tmp_path):  # noqa: F811
    with CheckpointWriter(tmp_path / "a", upload=tcp) as writer:
        writer.save(state_of(1)).uploaded.result(PATIENCE)
    redis_server.stop()
    timer = threading.Timer(3, redis_server.go_on)
    timer.start()
    try:
        assert load_arrays(tcp)["step"] == 1
    finally:
        timer.join()


def test_whether_a_server_is_away(tcp, redis_server, tmp_path):  # noqa: F811
    target = Target(tcp, lambda: False)
    assert not target.is_away()  # although nothing is there
    redis_server.stop()
    try:
        assert target.is_away()
    finally:
        redis_server.go_on()
    assert not target.is_away()


def test_the_server_is_killed_and_started_again(tcp, redis_server, tmp_path):  # noqa: F811
    with CheckpointWriter(tmp_path / "a", upload=tcp) as writer:
        writer.save(state_of(1)).uploaded.result(PATIENCE)
        redis_server.kill()
        try:
            handle = writer.save(state_of(2))
            with pytest.raises(ResourceError, match="no connection, or it was lost"):
                load_arrays(tcp)
            with pytest.raises(ResourceError, match="is durable, and was not uploaded"):
                handle.uploaded.result(PATIENCE)
        finally:
            redis_server.start()
        writer.save(state_of(3)).uploaded.result(PATIENCE)
        wait_until(lambda: writer.statistics().uploaded == 3)
    assert there(tcp) == [1, 2, 3]


def test_it_is_killed_while_much_is_uploaded(tcp, redis_server, client, tmp_path):  # noqa: F811
    """At a random moment of a write, ten times: the old file or the new one is there, and no part without time."""
    fs, key = file_system(f"{tcp}/x")
    fs.pipe_file(key, b"\0" * 20_000_000)
    for n in range(1, 11):
        timer = threading.Timer(0.01 * n, redis_server.kill)
        timer.start()
        error = None
        try:
            fs.pipe_file(key, bytes([n]) * 20_000_000)
        except OSError as found:
            error = found
        timer.join()
        redis_server.start()
        found = set(fs.cat_file(key))
        assert len(found) == 1
        assert found == {n} or error is not None
    kept = fs.info(key)["ETag"].encode()
    assert all(client.ttl(part) > 0 for part in parts(client) if kept not in part)


def test_out_of_memory(tcp, client, tmp_path):
    state = {"w": np.ones(3_000_000), "step": 1}
    client.config_set("maxmemory", 10 << 20)
    with CheckpointWriter(tmp_path / "a", upload=tcp, on_error="warn") as writer:
        handle = writer.save(state)
        with pytest.raises(ResourceError, match="out of memory"):
            handle.uploaded.result(PATIENCE)
        assert parts(client) == []
        with pytest.raises((CheckpointError, FileNotFoundError)):
            load_arrays(tcp)
        client.config_set("maxmemory", 0)
        assert writer.save({**state, "step": 2}).uploaded.result(PATIENCE)
        wait_until(lambda: writer.statistics().uploaded == 2)
    assert [found.step for found in list_checkpoints(tcp)] == [2, 1] or len(list_checkpoints(tcp)) == 2


def test_passwords(tmp_path, caplog, redis_server):  # noqa: F811
    server = servers.Redis(tmp_path / "data", "--requirepass", "right-one")
    try:
        place = f"127.0.0.1:{server.port}/0/a"
        for user in ("", "someone:wrong-one@", ":wrong-one@"):
            url = f"redis://{user}{place}"
            with pytest.raises(AccessDenied, match="refuses the user and password") as raised:
                load_checkpoint(url)
            assert "wrong-one" not in f"{raised.value} {raised.value.__context__} {raised.value.__cause__}"
            assert "someone" not in str(raised.value)
        with CheckpointWriter(tmp_path / "a", upload=f"redis://:wrong-one@{place}", on_error="warn") as writer:
            error = writer.save(state_of(1)).uploaded.exception(PATIENCE)
        assert "refuses the user and password" in str(error)
        with CheckpointWriter(tmp_path / "b", upload=f"redis://:right-one@{place}") as writer:
            assert writer.save(state_of(1)).uploaded.result(PATIENCE) == f"redis://{place}/step-00000001.safetensors"
        url = f"redis://:right-one@{place}"
        assert load_arrays(url)["step"] == 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(fsspec.config.conf, "redis", {"password": "right-one"})  # as FSSPEC_REDIS_PASSWORD
            assert there(f"redis://{place}") == [1]
        assert "right-one" not in repr(remote.open_url(url)) + repr(list_checkpoints(url)) + caplog.text
        assert "wrong-one" not in caplog.text
        with redis.Redis(port=server.port, password="right-one") as client:
            client.acl_setuser("reader", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@read"])
        assert load_arrays(f"redis://reader:pw@{place}")["step"] == 1
        fs, key = file_system(f"redis://reader:pw@{place}/x")
        with pytest.raises(PermissionError, match="access control"):
            fs.pipe_file(key, b"x")
    finally:
        server.end()


def test_the_trainer_dies(tcp, tmp_path):
    """Its writing process finishes the uploads."""
    code = f"""
        import os, signal
        from shmtensor.checkpoint import names
        from shmtensor.checkpoint.writer import CheckpointWriter
        from tests.checkpoint.test_deaths import state_of
        names.PREFIX = {names.PREFIX!r}
        writer = CheckpointWriter({str(tmp_path / "a")!r}, upload={tcp!r})
        for step in (1, 2):
            writer.save(state_of(step)).durable.result(120)
        print(writer.statistics().pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_for_end(int(done.stdout))
    assert there(tcp) == [1, 2]


# --- URLs


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://host/name", "number of a database"), ("redis://host:x/0/a", "host and port"),
        ("redis+unix:///run/redis/0/a", "ends in .sock"), ("redis://u:secret@host/0/a?db=1", "options are no part"),
        ("redis://u:secret@host", "number of a database"),
    ],
)  # fmt: skip
def test_bad_urls(tmp_path, url, said):
    for use in (load_checkpoint, lambda url: CheckpointWriter(tmp_path / "a", upload=url)):
        with pytest.raises(ArgumentError, match=said) as raised:
            use(url)
        assert "secret" not in str(raised.value)


def test_parts_of_urls():
    split = redis_files.split_url
    assert split("redis://u%40:p%2Fw@h:7/3/a/b/") == (
        {"host": "h", "port": 7, "username": "u@", "password": "p/w"}, "3/a/b",
    )  # fmt: skip
    assert split("rediss://[::1]/0") == ({"host": "::1", "port": 6379, "ssl": True}, "0")
    assert split("redis+unix://:pw@/run/x.sock/0/a") == ({"unix_socket_path": "/run/x.sock", "password": "pw"}, "0/a")
    assert split("0/a") == ({}, "0/a")


def test_a_database_that_is_not_there(tcp):
    with pytest.raises(ResourceError, match="no database of this number"):
        load_checkpoint(tcp.replace("/0/", "/99/"))


def test_without_redis_py(tmp_path):
    code = f"""
        import sys
        sys.modules["redis"] = None
        import shmtensor
        for use in (shmtensor.load_checkpoint, lambda url: shmtensor.CheckpointWriter({str(tmp_path)!r}, upload=url)):
            try:
                use("redis://:secret@host/0/a")
            except shmtensor.DependencyError as error:
                print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.stdout.count("pip install '.[redis]'") == 2, done.stderr
    assert "secret" not in done.stdout + done.stderr
