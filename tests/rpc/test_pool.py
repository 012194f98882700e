"""Worker pools: `WorkerPool`, `serve` and the command, their restarts, their ends and what they log."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import math
import multiprocessing.context
import multiprocessing.util
import os
import re
import signal
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest

import shmtensor
from shmtensor import ArgumentError, ClosedError, PeerDied, RemoteError, TimedOut
from shmtensor.rpc import supervisor, worker

from ..forkservers import preloaded
from ..implementations import once
from ..waiting import complaints, runs, wait_for_end, wait_until
from . import services

PATIENCE = services.PATIENCE


@pytest.fixture(scope="module")
def forks():
    with preloaded("tests.rpc.services", "shmtensor.rpc.worker", "shmtensor.rpc.client") as context:
        yield context


@pytest.fixture
def pool_of(forks, channel, caplog):
    """Makes a pool that is ready, and stops it."""
    caplog.set_level(logging.INFO, "shmtensor.serve")
    with contextlib.ExitStack() as stack:

        def make(handler, **options):
            pool = shmtensor.WorkerPool(handler, name=channel, mp_context=forks, **options)
            stack.enter_context(pool)
            pool.wait_ready(timeout=PATIENCE)
            return pool

        yield make


@contextlib.contextmanager
def warnings_of_forks_ignored():
    """Python 3.12 and later warn where a process with threads forks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def events(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "shmtensor.serve"]


pytestmark = pytest.mark.slow


def test_a_pool_answers(pool_of, channel, caplog):
    with pool_of(services.negate, workers=2) as pool, shmtensor.Client(channel) as client:
        assert len(set(pool.pids)) == 2
        assert repr(pool) == f'<WorkerPool "{channel}" running ready=2 workers=2>'
        got = [int(reply[0]) for reply in client.map([np.full(3, number) for number in range(50)], timeout=PATIENCE)]
        assert got == [-number for number in range(50)]
    assert pool.exit_code == 0
    assert repr(pool) == f'<WorkerPool "{channel}" ended ready=0 workers=2>'
    said = events(caplog)
    assert [sum(word in line for line in said) for word in ("started", "ready", "stopping", "ended (pid")] == [
        2,
        2,
        1,
        2,
    ]
    assert said[-1] == f"pool {channel}: ended with exit code 0"
    assert len(said) == 8


@pytest.mark.parametrize("handler", [services.Model, "tests.rpc.services:Model"])
def test_a_class_is_made_in_each_worker(pool_of, channel, handler):
    with pool_of(handler), shmtensor.Client(channel) as client:
        assert client.request(5, timeout=PATIENCE) == 5


def test_a_pool_takes_batches(pool_of, channel):
    with pool_of(services.rows, max_batch=4, max_wait=0.2), shmtensor.Client(channel) as client:
        counts = list(client.map([np.zeros(2)] * 8, timeout=PATIENCE, window=8))
        assert all(1 <= count <= 4 for count in counts)


def test_a_request_that_kills_its_worker_costs_none_beside_it(pool_of, channel):
    options = {"max_batch": 4, "max_wait": PATIENCE, "max_attempts": 2}
    with pool_of(services.fragile_rows, **options), shmtensor.Client(channel) as client:
        futures = [client.submit(np.full(2, number), timeout=PATIENCE) for number in (1, 0, 2, 3)]
        with pytest.raises(PeerDied, match="max_attempts=2"):
            futures.pop(1).result(PATIENCE)
        assert [int(future.result(PATIENCE)) for future in futures] == [1, 1, 1]
        futures = [client.submit(np.full(2, number), timeout=PATIENCE) for number in range(1, 5)]
        assert [int(future.result(PATIENCE)) for future in futures] == [4, 4, 4, 4]


def test_a_dead_worker_is_replaced(pool_of, channel, caplog):
    with pool_of(services.fragile, workers=1) as pool, shmtensor.Client(channel) as client:
        before = client.request(1, timeout=PATIENCE)
        assert pool.pids == [before]
        with pytest.raises(PeerDied):
            client.request(0, timeout=PATIENCE, retry=False)
        after = client.request(1, timeout=PATIENCE)
        assert after != before
        os.kill(after, signal.SIGKILL)
        assert client.request(1, timeout=PATIENCE) not in (before, after)
    died = [line for line in events(caplog) if "died" in line]
    assert "exit code 7), restart 1 of 10 in 0.1 s" in died[0]
    assert "SIGKILL), restart 2 of 10 in 0.2 s" in died[1]


def test_a_pool_that_cannot_live_gives_up(forks, channel, caplog):
    caplog.set_level(logging.INFO, "shmtensor.serve")
    pool = shmtensor.WorkerPool(services.Broken, name=channel, workers=2, max_restarts=1, mp_context=forks)
    with pytest.raises(ClosedError, match="died 2 times"):
        pool.wait_ready(timeout=PATIENCE)
    assert pool.join(timeout=PATIENCE) == 1
    assert pool.exit_code == 1
    assert any("giving up" in line for line in events(caplog))
    assert pool.pids == []


@once("by the code that decides, without waiting for them")
def test_delays_rise_up_to_a_limit():
    place = supervisor.Worker(0)
    delays = [round(place.died(0.0), 3) for _ in range(10)]
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30]
    assert [place.died(0.0) for _ in range(2000)][-1] == 30
    assert place.died(supervisor.STEADY) == 0.1  # it had been well for long


def test_a_stopping_pool_finishes_what_was_taken(pool_of, channel, tmp_path):
    with shmtensor.Client(channel) as client:
        pool = pool_of(services.patient)
        job = {"begun": str(tmp_path / "begun"), "go on": str(tmp_path / "go on")}
        future = client.submit(job)
        wait_until((tmp_path / "begun").exists)
        waiting = client.submit(job)
        pool.stop()
        with pytest.raises(TimedOut):
            pool.join(timeout=0.1)
        (tmp_path / "go on").touch()
        assert pool.join(timeout=PATIENCE) == 0
        assert future.result(timeout=PATIENCE)
        assert not waiting.done()  # it was not taken: another pool may have it


def test_a_worker_that_does_not_finish_is_killed(forks, channel, tmp_path, caplog):
    with shmtensor.Client(channel) as client:
        pool = shmtensor.WorkerPool(services.patient, name=channel, grace=0.1, mp_context=forks)
        future = client.submit({"begun": str(tmp_path / "begun"), "go on": str(tmp_path / "never")}, retry=False)
        wait_until((tmp_path / "begun").exists)
        pool.stop()
        assert pool.join(timeout=PATIENCE) == supervisor.KILLED
        with pytest.raises(PeerDied):
            future.result(timeout=PATIENCE)
    assert sum("killed before it had finished" in line for line in events(caplog)) == 1


def test_a_pool_whose_workers_cannot_start_has_failed(forks, channel, caplog, monkeypatch):
    def refuse(*_):
        raise RuntimeError("not from here")

    monkeypatch.setattr(forks.Process, "start", refuse)
    pool = shmtensor.WorkerPool(services.negate, name=channel, mp_context=forks)
    assert pool.join(timeout=PATIENCE) == 1
    assert pool.exit_code == 1
    assert "not from here" in caplog.text
    with pytest.raises(ClosedError, match="failed: RuntimeError: not from here"):
        pool.wait_ready(timeout=PATIENCE)


@pytest.mark.parametrize("has_child", [False, True])
def test_workers_end_when_their_pool_dies(forks, channel, has_child):
    """Killed, it can tell them nothing: its end of their pipes closes, unless a child that it forked has it, too."""
    script = (
        "import multiprocessing, sys, shmtensor\n"
        "from tests.rpc import services\n"
        "context = multiprocessing.get_context('fork')\n"
        f"pool = shmtensor.WorkerPool(services.negate, name={channel!r}, workers=2, mp_context=context)\n"
        "pool.wait_ready(timeout=90)\n"
        "import os, signal\n"
        f"child = os.fork() if {has_child} else None\n"
        "if child == 0:\n"
        "    os.close(1)\n"
        "    signal.pause()\n"
        "print(*pool.pids, *([child] if child else []), flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        child = pids.pop() if has_child else 0
        assert len(pids) == 2
        process.kill()
    wait_until(lambda: not any(runs(pid) for pid in pids))
    if child:
        os.kill(child, signal.SIGKILL)
        wait_until(lambda: not runs(child))
    shmtensor.Client(channel).close()  # whoever comes next removes what they left


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)"])
def test_a_program_that_forgets_its_pool_ends(channel, end):
    script = f"""
import operator, shmtensor
if __name__ == "__main__":
    pool = shmtensor.WorkerPool(operator.neg, name={channel!r}, workers=2)
    pool.wait_ready(timeout={PATIENCE})
    print(*pool.pids, flush=True)
    {end}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")
    assert not any(os.path.exists(f"/proc/{pid}") for pid in done.stdout.split())


def test_a_pool_that_has_ended_leaves_nothing_for_the_exit(forks, channel):
    with shmtensor.WorkerPool("operator:neg", name=channel, mp_context=forks):
        pass  # what the first pool of a process makes stays
    before = len(multiprocessing.util._finalizer_registry)
    with shmtensor.WorkerPool("operator:neg", name=channel, mp_context=forks):
        assert len(multiprocessing.util._finalizer_registry) > before

    def is_forgotten():
        gc.collect()
        return len(multiprocessing.util._finalizer_registry) <= before

    wait_until(is_forgotten)


def test_a_pool_that_the_program_drops_ends(forks, channel, caplog):
    """As by a notebook's cell that is run again: the old pool would go on answering, with the old code."""
    caplog.set_level(logging.INFO, "shmtensor.serve")
    pool = shmtensor.WorkerPool("operator:neg", name=channel, mp_context=forks)
    pool.wait_ready(timeout=PATIENCE)
    thread, (old,) = pool._thread, pool.pids
    pool = shmtensor.WorkerPool("operator:pos", name=channel, mp_context=forks)
    with pool:
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert not runs(old)
        assert f"pool {channel}: stopping (the program dropped it)" in events(caplog)
        assert f"pool {channel}: ended with exit code 0" in events(caplog)
        pool.wait_ready(timeout=PATIENCE)
        with shmtensor.Client(channel) as client:
            assert list(client.map([1] * 20, timeout=PATIENCE)) == [1] * 20


def test_arguments(channel):
    with pytest.raises(shmtensor.ArgumentTypeError, match="callable"):
        shmtensor.WorkerPool(7, name=channel)
    with pytest.raises(ArgumentError, match="cannot be sent"):
        shmtensor.WorkerPool(lambda value: value, name=channel)
    with pytest.raises(ArgumentError, match="needs max_batch="):
        shmtensor.WorkerPool(services.negate, name=channel, max_wait=0.1)
    with pytest.raises(ArgumentError, match="workers"):
        shmtensor.WorkerPool(services.negate, name=channel, workers=0)
    with pytest.raises(ArgumentError, match="max_bytes='foo' is not a size"):
        shmtensor.WorkerPool(services.negate, name=channel, max_bytes="foo")
    with pytest.raises(shmtensor.ArgumentTypeError, match="async function"):
        shmtensor.WorkerPool(services.later, name=channel)
    with pytest.raises(shmtensor.ArgumentTypeError, match="instances cannot be called"):
        shmtensor.WorkerPool(services.Mute, name=channel)
    for path in ("operator", "operator:", ":neg"):
        with pytest.raises(ArgumentError, match=f"handler '{path}': name it as module:function"):
            shmtensor.WorkerPool(path, name=channel)
        for what in ("setup", "teardown"):
            with pytest.raises(ArgumentError, match=f"{what} '{path}': name it as module:function"):
                shmtensor.WorkerPool("operator:neg", name=channel, **{what: path})


def test_handlers_by_name(monkeypatch, tmp_path):
    assert worker.resolve("tests.rpc.services:negate") is services.negate
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "lonely_handler.py").write_text("class A:\n    @staticmethod\n    def f(x): return x\n")
    assert worker.resolve("lonely_handler:A.f")(3) == 3
    monkeypatch.delitem(sys.modules, "lonely_handler")
    for path, text in (
        ("nothing", "module:function"), ("no_such_module:f", "no module 'no_such_module'"),
        ("tests.rpc.services:nothing", "has no 'nothing'"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=text):
            worker.resolve(path)


HOSTILE = ["json", "socket", "signal", "pickle", "struct", "random", "selectors", "multiprocessing", "runpy", "logging",
           "numpy", "zmq", "xxhash", "posix_ipc", "ml_dtypes", "shmtensor", "sitecustomize"]  # fmt: skip


@once("what is found where, before there is an endpoint")
@pytest.mark.parametrize("how", ["name", "function", "PYTHONPATH"])
def test_a_worker_looks_for_its_handler_last(channel, tmp_path, how):
    """A directory where somebody may leave a json.py comes after all others; the handler is found there."""
    here, program, said = tmp_path / "here", tmp_path / "program", tmp_path / "said"
    for directory in (here, program):
        directory.mkdir()
    for name in HOSTILE:
        (here / f"{name}.py").write_text(
            f"open({str(said)!r}, 'a').write(__name__)\nraise SystemExit('foreign code')\n"
        )
    (here / "own_handler.py").write_text(
        "import json, os, random, sys\ndef where(value): return [os.environ.get('PYTHONPATH', ''), *sys.path]\n"
    )
    handler = "own_handler.where" if how == "function" else "'own_handler:where'"
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    (program / "program.py").write_text(
        f"import sys\nsys.path.append({root!r})\nimport shmtensor\nsys.path.append({str(here)!r})\n"
        "import own_handler\n"
        "if __name__ == '__main__':\n"
        f"    pool, client = shmtensor.WorkerPool({handler}, name={channel!r}), shmtensor.Client({channel!r})\n"
        f"    with pool, client:\n        pool.wait_ready(timeout={PATIENCE})\n"
        f"        print(*client.request(None, timeout={PATIENCE}), sep='\\n')\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if how == "PYTHONPATH":
        environment["PYTHONPATH"] = "/nowhere"
    done = subprocess.run(
        [sys.executable, str(program / "program.py")], cwd=here, env=environment, capture_output=True,
        text=True, timeout=2 * PATIENCE, check=False,
    )  # fmt: skip
    assert not said.exists(), said.read_text()
    assert done.returncode == 0, done.stderr
    inherited, *path = done.stdout.splitlines()
    assert inherited == environment.get("PYTHONPATH", "")
    standard = path.index(os.path.dirname(os.__file__))
    assert all(standard < path.index(str(place)) for place in (root, here))
    assert path[-1] == str(here)


@once("which start methods are refused")
@pytest.mark.parametrize("how", ["-c", "-"])
def test_a_handler_that_workers_cannot_import_is_refused_at_once(channel, how):
    """Of a notebook, an interactive interpreter, `python -c` or standard input."""
    text = (
        "import shmtensor\nclass Scale:\n    def __call__(self, value): return value\n"
        "def negate(value): return -value\n"
        "for handler in (negate, Scale, Scale()):\n    for context in (None, 'spawn', 'forkserver'):\n"
        f"        try: shmtensor.WorkerPool(handler, name={channel!r}, mp_context=context)\n"
        "        except shmtensor.ArgumentError as error: print(error)\n"
        f"with shmtensor.WorkerPool(negate, name={channel!r}, mp_context='fork') as pool:\n"
        f"    pool.wait_ready(timeout={PATIENCE})\n"
        f"    with shmtensor.Client({channel!r}) as client: print(client.request(5, timeout={PATIENCE}))\n"
    )
    given = {"args": [text], "input": None} if how == "-c" else {"args": [], "input": text}
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", how, *given["args"]], input=given["input"],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert (done.returncode, complaints(done.stderr)) == (0, "")
    *refused, answer = done.stdout.splitlines()
    assert len(refused) == 9
    assert all("of __main__, which workers cannot import" in line and 'mp_context="fork"' in line for line in refused)
    assert answer == "-5"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_start_method_by_name(channel, method):
    with warnings_of_forks_ignored(), shmtensor.WorkerPool(services.negate, name=channel, mp_context=method) as pool:
        pool.wait_ready(timeout=PATIENCE)
        with shmtensor.Client(channel) as client:
            assert client.request(5, timeout=PATIENCE) == -5
    assert pool.exit_code == 0


def test_a_start_method_that_there_is_not(channel):
    with pytest.raises(ArgumentError, match="mp_context='nonsense'"):
        shmtensor.WorkerPool(services.negate, name=channel, mp_context="nonsense")
    with pytest.raises(shmtensor.ArgumentTypeError, match="mp_context must be"):
        shmtensor.WorkerPool(services.negate, name=channel, mp_context=5)


# --- the command


@contextlib.contextmanager
def command(*arguments, cwd=None):
    process = subprocess.Popen(
        [sys.executable, "-W", "error::UserWarning:shmtensor", "-m", "shmtensor", "serve", *arguments],
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=cwd,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_until_a_signal(channel, tmp_path, number):
    with shmtensor.Client(channel) as client, command("tests.rpc.services:patient", "--name", channel) as process:
        future = client.submit({"begun": str(tmp_path / "begun"), "go on": str(tmp_path / "go on")})
        wait_until((tmp_path / "begun").exists)
        process.send_signal(number)
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "stopping" in line:
                break
        (tmp_path / "go on").touch()
        assert future.result(timeout=PATIENCE)
        assert process.wait(PATIENCE) == 0
        lines += process.stderr.readlines()
    assert [sum(word in line for line in lines) for word in ("started", "ready", "stopping", "ended (pid")] == [1] * 4
    assert len(lines) == 5, lines


@once("arguments, before there is an endpoint")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("nothing", "--name", "x"), "module:function"),
        (("no_such_module:f", "--name", "x"), "no_such_module"),
        (("tests.rpc.services:negate", "--name", "x", "--max-bytes", "foo"), "max_bytes='foo' is not a size"),
        (("tests.rpc.services:negate", "--name", "x", "--max-wait", "0.1"), "needs max_batch="),
    ],
)
def test_the_command_says_what_is_wrong(arguments, text):
    with command(*arguments) as process:
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert text in err
    assert not out
    assert "Traceback" not in err


@once("the handler is looked for before there is an endpoint")
@pytest.mark.parametrize("name", ["no_such_name", "PATIENCE", "Mute", "later"])
def test_a_handler_that_cannot_serve_ends_the_pool_at_once(channel, name):
    with command(f"tests.rpc.services:{name}", "--name", channel, "--workers", "2") as process:
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert err.count(f"handler 'tests.rpc.services:{name}'") >= 1
    assert " ERROR " in err
    assert "restart" not in err
    assert "Traceback" not in err


def test_an_error_in_a_worker_reaches_the_client(pool_of, channel):
    with pool_of(services.negate), shmtensor.Client(channel) as client, pytest.raises(RemoteError, match="TypeError"):
        client.request("text", timeout=PATIENCE)


def test_a_worker_logs_the_traceback_of_its_handler_once(channel):
    """One line says when, which worker, and what; the traceback follows it."""
    with shmtensor.Client(channel) as client, command("tests.rpc.services:negate", "--name", channel) as process:
        with pytest.raises(RemoteError, match="TypeError"):
            client.request("text", timeout=PATIENCE)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE)
    line = next(line for line in err.splitlines() if "raised" in line)
    assert re.fullmatch(
        rf'\d{{4}}-\d\d-\d\d [\d:,]+ WARNING worker 0: service "{channel}": the handler raised TypeError', line
    )
    assert err.count("Traceback") == err.count("bad operand type") == err.count("in negate") == 1


def test_a_handlers_own_logging_is_left_alone(channel, tmp_path):
    (tmp_path / "loud_handler.py").write_text(
        "import logging\nlogging.basicConfig(format='mine: %(message)s')\ndef fail(value): raise ValueError(value)\n"
    )
    with shmtensor.Client(channel) as client, command("loud_handler:fail", "--name", channel, cwd=tmp_path) as process:
        with pytest.raises(RemoteError, match="ValueError"):
            client.request("text", timeout=PATIENCE)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE)
    assert (
        err.count(f'mine: service "{channel}": the handler raised ValueError') == err.count("the handler raised") == 1
    )


@once("its workers never come to an endpoint")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_program_without_a_main_guard_is_told_so(channel, tmp_path, method):
    """Each worker imports the program, which would start a pool in it."""
    program = tmp_path / "unguarded.py"
    program.write_text(
        "import logging, multiprocessing, sys\nimport shmtensor\nfrom tests.rpc.services import negate\n"
        "logging.basicConfig(level=logging.INFO)\n"
        f"context = multiprocessing.get_context({method!r})\n"
        f"sys.exit(shmtensor.serve(negate, name={channel!r}, mp_context=context, workers=2))\n"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((root, os.environ.get("PYTHONPATH", "")))}
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 1
    assert 'put the call below a line `if __name__ == "__main__":`' in done.stderr
    assert "restart" not in done.stderr


# --- children of workers, lost signals, long time-outs, and a creation that is interrupted


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_death_of_a_worker_that_has_forked_is_noticed(channel, tmp_path, method):
    """Its child has every descriptor that it had, and lives on."""
    child = tmp_path / "child"
    with warnings_of_forks_ignored(), shmtensor.WorkerPool(services.leave_a_child, name=channel, mp_context=method):
        try:
            with shmtensor.Client(channel) as client:
                assert client.request(str(child), timeout=PATIENCE) == 2
        finally:
            pid = int(child.read_text())
            os.kill(pid, signal.SIGKILL)
            wait_for_end(pid)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_dead_worker_is_replaced_where_sigchld_is_ignored(channel, caplog, method):
    """The kernel keeps no exit code then."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with warnings_of_forks_ignored(), shmtensor.Client(channel) as client:
            pool = shmtensor.WorkerPool(services.fragile, name=channel, mp_context=method)
            try:
                pid = client.request(1, timeout=PATIENCE)
                os.kill(pid, signal.SIGKILL)
                assert client.request(1, timeout=PATIENCE) != pid
                pool.stop()
                assert pool.join(timeout=PATIENCE) == 0
            finally:
                pool.kill()
                pool.join(timeout=PATIENCE)
    finally:
        signal.signal(signal.SIGCHLD, before)
    how = "exit code unknown" if method == "fork" else ""
    assert f"died (pid {pid}, {how}" in caplog.text


class LateProcess(multiprocessing.context.ForkProcess):
    """A worker that begins after it was told to end."""

    told = ""

    def run(self):
        wait_until(lambda: os.path.exists(self.told))
        super().run()

    def terminate(self):
        super().terminate()
        open(self.told, "x").close()


class LateContext(multiprocessing.context.ForkContext):
    Process = LateProcess


@pytest.fixture
def restored_sigterm():
    handler, mask = signal.getsignal(signal.SIGTERM), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.signal(signal.SIGTERM, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.mark.parametrize("how", ["blocked", "ignored", "handled"])
def test_a_stop_reaches_a_worker_that_does_not_get_sigterm(channel, tmp_path, monkeypatch, restored_sigterm, how):
    """Workers inherit that it is blocked or ignored in the pool's process, and forked ones the handler that it has."""
    monkeypatch.setattr(LateProcess, "told", str(tmp_path / "told"))
    if how == "blocked":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN if how == "ignored" else lambda *_: None)
    with warnings_of_forks_ignored():
        pool = shmtensor.WorkerPool(services.negate, name=channel, grace=None, mp_context=LateContext())
        try:
            wait_until(lambda: pool.pids)
            pool.stop()
            assert pool.join(timeout=PATIENCE) == 0
        finally:
            pool.kill()
            pool.join()


def test_a_stop_ends_a_setup_where_sigterm_is_blocked(channel, tmp_path, restored_sigterm):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    setup = functools.partial(services.endless, str(tmp_path / "begun"))
    with warnings_of_forks_ignored():
        pool = shmtensor.WorkerPool(services.negate, name=channel, setup=setup, grace=None, mp_context="fork")
        try:
            wait_until((tmp_path / "begun").exists)
            pool.stop()
            assert pool.join(timeout=PATIENCE) == 0
        finally:
            pool.kill()
            pool.join()


def test_seconds_without_end(pool_of, channel, tmp_path):
    """More than the system's calls take are as good as no limit."""
    with shmtensor.Client(channel) as client:
        pool = pool_of(services.patient, grace=1e7)
        pool.wait_ready(timeout=1e10)
        pool.reload(timeout=math.inf)
        job = {"begun": str(tmp_path / "begun"), "go on": str(tmp_path / "go on")}
        future = client.submit(job, retry=False)
        wait_until((tmp_path / "begun").exists)
        pool.stop()
        with pytest.raises(TimedOut):
            pool.join(timeout=0.1)
        (tmp_path / "go on").touch()
        assert pool.join(timeout=1e10) == 0
        assert future.result(timeout=PATIENCE)


def test_a_pool_whose_creation_is_interrupted_ends(forks, channel, monkeypatch):
    """Its caller did not get it, and cannot stop it."""
    start, threads = threading.Thread.start, []

    def interrupted(thread):
        start(thread)
        threads.append(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            shmtensor.WorkerPool(services.negate, name=channel, mp_context=forks)
    assert [thread.name for thread in threads] == ["shmtensor worker pool"]
    threads[0].join(PATIENCE)
    assert not threads[0].is_alive()
