"""Workers of a pool: what their handlers get, `setup`, `teardown`, statistics, reloads, and deaths in each of them."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import signal
import subprocess
import sys
import termios
import threading

import numpy as np
import pytest

import shmtensor
from shmtensor import ClosedError, PeerDied, RemoteError, TimedOut
from shmtensor.rpc.pool import waiting_requests
from shmtensor.rpc.server import check_handler, takes_argument, takes_context

from ..forkservers import preloaded
from ..implementations import once
from ..waiting import once as as_soon_as
from ..waiting import wait_for_end, wait_until
from . import services

PATIENCE = services.PATIENCE
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def forks():
    with preloaded("tests.rpc.services", "shmtensor.rpc.worker", "shmtensor.rpc.client") as context:
        yield context


@pytest.fixture
def pool_of(forks, channel, caplog):
    """Makes a pool, which is ready unless that is not wanted, and stops it."""
    caplog.set_level(logging.INFO, "shmtensor.serve")
    with contextlib.ExitStack() as stack:

        def make(handler, *, ready=True, **options):
            pool = stack.enter_context(shmtensor.WorkerPool(handler, name=channel, mp_context=forks, **options))
            if ready:
                pool.wait_ready(timeout=PATIENCE)
            return pool

        yield make


@pytest.fixture
def file(tmp_path):
    """Paths by attribute, as strings."""

    class Files:
        def __getattr__(self, name):
            return str(tmp_path / name)

    return Files()


def partial(function, *arguments):
    return functools.partial(function, *arguments)


def touch(path):
    open(path, "x").close()


def lines_of(path) -> list[str]:
    if not os.path.exists(path):
        return []
    with open(path) as text:
        return text.read().splitlines()


def events(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "shmtensor.serve"]


# --- the context


def test_a_handler_with_a_context(pool_of, channel):
    with pool_of(services.tell) as pool, shmtensor.Client(channel) as client:
        told = client.request(1, meta={"id": 7}, timeout=PATIENCE)
        assert 0 < told.pop("remaining") <= PATIENCE
        assert told == {
            "meta": {"id": 7}, "cancelled": False, "attempt": 1, "worker": 0, "state": None, "pid": pool.pids[0]
        }  # fmt: skip
        told = client.request(np.zeros(3))
        assert (told["meta"], told["remaining"]) == (None, None)


def test_a_handler_of_batches_with_a_context(pool_of, channel):
    with pool_of(services.tell_rows, max_batch=4, max_wait=0.05), shmtensor.Client(channel) as client:
        futures = [client.submit(np.zeros(2), {"number": number}, timeout=PATIENCE) for number in range(10)]
        replies = [future.result(PATIENCE) for future in futures]
        assert [int(reply["number"]) for reply in replies] == list(range(10))
        assert not any(reply["late"] for reply in replies)


@pytest.mark.parametrize("how", ["cancel", "expire", "kill"])
def test_a_handler_notices_that_its_client_has_given_up(pool_of, forks, channel, file, how):
    job = {"begun": file.begun, "noticed": file.noticed}
    with pool_of(services.until_cancelled):
        if how == "kill":
            ours, theirs = forks.Pipe()
            process = forks.Process(target=services.submit_one, args=(theirs, channel, job))
            process.start()
            wait_until(lambda: os.path.exists(file.begun))
            process.kill()
            process.join()
            ours.close()
            theirs.close()
            wait_until(lambda: os.path.exists(file.noticed))
            return
        with shmtensor.Client(channel) as client:
            if how == "expire":
                while not os.path.exists(file.begun):  # it may expire before a worker takes it
                    with pytest.raises(TimedOut):
                        client.request(job, timeout=0.5)
            else:
                future = client.submit(job)
                wait_until(lambda: os.path.exists(file.begun))
                assert future.cancel()
            wait_until(lambda: os.path.exists(file.noticed))


def test_a_server_notices_the_death_of_a_client_without_another_call(forks, channel):
    with shmtensor.Server(channel) as server:
        ours, theirs = forks.Pipe()
        process = forks.Process(target=services.submit_one, args=(theirs, channel, 1))
        process.start()
        request = server.recv(timeout=PATIENCE)
        assert not request.cancelled
        process.kill()
        process.join()
        ours.close()
        theirs.close()
        assert request.cancelled
        request.reply(2)  # which no one gets
        assert request.answered
    shmtensor.Client(channel).close()  # whoever comes next removes what it left


def test_the_attempt_after_a_worker_was_killed_in_its_handler(pool_of, channel):
    with pool_of(services.die_once) as pool, shmtensor.Client(channel) as client:
        assert client.request(1, timeout=PATIENCE) == 2
        wait_until(lambda: pool.statistics().workers[0].handled)
        seen = pool.statistics().workers[0]
        assert (seen.restarts, seen.handled, seen.errors) == (1, 1, 0)
        assert "SIGKILL" in seen.last_error


class Callable2:
    def __call__(self, value, context):
        return value


def wrapped(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


def closed(function):
    @functools.wraps(function)
    def call(value):
        return function(value, None)

    return call


@once("no process")
def test_which_handlers_take_a_context():
    taking = [
        services.tell, lambda value, context: value, lambda value, context=None: value, lambda value, other: value,
        Callable2(), Callable2().__call__, wrapped(services.tell), partial(lambda scale, value, context: 0, 2),
        lambda value, context, *more: value, lambda value, context, scale=2: value,
    ]  # fmt: skip
    not_taking = [
        services.negate, services.one_value, np.negative, abs, wrapped(services.negate), closed(services.tell),
        lambda *values: values, lambda value, *, context=None: value, services.Model(), partial(services.tell, 1),
    ]  # fmt: skip
    assert [takes_context(each) for each in taking] == [True] * len(taking)
    assert [takes_context(each) for each in not_taking] == [False] * len(not_taking)
    assert takes_argument(lambda worker: 0)
    assert not takes_argument(lambda path="weights": 0)
    for bad in (lambda value, context, scale: value, type("C", (), {"__call__": lambda self, a, b, c: a})):
        with pytest.raises(shmtensor.ArgumentTypeError, match="needs 3 arguments"):
            check_handler(bad, arguments=2)
    check_handler(Callable2, arguments=2)
    by_name = lambda value, *, context: value  # noqa: E731
    for arguments in (1, 2):
        with pytest.raises(shmtensor.ArgumentTypeError, match="needs 'context' by name"):
            check_handler(by_name, arguments=arguments)
    check_handler(functools.partial(by_name, context=None))
    not_passed = lambda value, *, context=None: value  # noqa: E731
    check_handler(not_passed)  # of a server: there is no context
    check_handler(functools.partial(not_passed, context=1), arguments=2)
    with pytest.raises(shmtensor.ArgumentTypeError, match="takes 'context' by name only"):
        check_handler(not_passed, arguments=2)


# --- setup and teardown


def test_setup_and_teardown_run_once_in_each_worker(pool_of, channel, file, caplog):
    pool = pool_of(services.tell, setup=services.index_of, teardown=partial(services.note, file.ended), workers=2)
    with shmtensor.Client(channel) as client:
        told = list(client.map([1] * 20, timeout=PATIENCE))
    assert {each["state"] for each in told} == {f"state of {each['worker']}" for each in told}
    assert {each["pid"] for each in told} <= set(pool.pids)
    assert not os.path.exists(file.ended)
    pool.stop()
    assert pool.join(timeout=PATIENCE) == 0
    assert sorted(lines_of(file.ended)) == ["", ""], "it has a default, so the state is not passed"


def test_teardown_gets_what_setup_returned(pool_of, channel, file):
    pool = pool_of("operator:neg", setup=services.index_of, teardown=partial(services.note_state, file.ended))
    pool.stop()
    assert pool.join(timeout=PATIENCE) == 0
    assert lines_of(file.ended) == ["state of 0"]


def test_a_worker_is_ready_after_its_setup(pool_of, channel, file):
    touch(file.wait)
    pool = pool_of(services.negate, setup=partial(services.waiting_if, file.wait, file.begun), ready=False)
    wait_until(lambda: lines_of(file.begun))
    assert pool.ready == 0
    with pytest.raises(TimedOut, match="0 of 1 workers are ready"):
        pool.wait_ready(timeout=0)
    seen = pool.statistics().workers[0]
    assert (seen.alive, seen.ready, str(seen.pid)) == (True, False, lines_of(file.begun)[0])
    os.unlink(file.wait)
    pool.wait_ready(timeout=PATIENCE)
    assert (pool.ready, pool.statistics().workers[0].ready) == (1, True)


def test_a_worker_whose_setup_raises_is_started_again(pool_of, channel, file, caplog):
    pool = pool_of(services.negate, setup=partial(services.raising, file.weights), ready=False)
    wait_until(lambda: any("restart 2 of 10 in 0.2 s" in line for line in events(caplog)))
    assert pool.statistics().workers[0].last_error == "LookupError: no weights there"
    touch(file.weights)
    pool.wait_ready(timeout=PATIENCE)
    assert pool.statistics().workers[0].restarts >= 2
    said = next(line for line in events(caplog) if "cannot start" in line)
    assert "LookupError: no weights there\nTraceback" in said
    with shmtensor.Client(channel) as client:
        assert client.request(1, timeout=PATIENCE) == -1


def test_a_setup_that_always_raises_ends_the_pool(forks, channel, file):
    setup = partial(services.raising, file.never)
    pool = shmtensor.WorkerPool(services.negate, name=channel, setup=setup, max_restarts=1, mp_context=forks)
    with pytest.raises(ClosedError, match="worker 0 died 2 times, the last time: LookupError: no weights there"):
        pool.wait_ready(timeout=PATIENCE)
    assert pool.join(timeout=PATIENCE) == 1
    with pytest.raises(ClosedError, match="no weights there"):
        pool.reload()
    assert pool.statistics().workers[0].last_error == "LookupError: no weights there"


@pytest.mark.parametrize("what", ["setup", "teardown"])
@pytest.mark.parametrize(
    ("name", "why"), [("nothing", ": tests.rpc.services has no 'nothing'"), ("later", " is an async function")]
)
def test_functions_that_cannot_be_called_end_the_pool_at_once(forks, channel, what, name, why):
    options = {what: f"tests.rpc.services:{name}"}
    pool = shmtensor.WorkerPool(services.negate, name=channel, mp_context=forks, **options)
    with pytest.raises(ClosedError, match=f"{what} 'tests.rpc.services:{name}'{why}"):
        pool.wait_ready(timeout=PATIENCE)
    assert pool.join(timeout=PATIENCE) == 1


@once("arguments, before there is an endpoint")
def test_arguments(channel):
    with pytest.raises(shmtensor.ArgumentTypeError, match="setup must be callable"):
        shmtensor.WorkerPool(services.negate, name=channel, setup=7)
    for what in ("setup", "teardown"):
        with pytest.raises(shmtensor.ArgumentTypeError, match=f"{what} is an async function"):
            shmtensor.WorkerPool(services.negate, name=channel, **{what: services.later})
    with pytest.raises(shmtensor.ArgumentError, match="the teardown cannot be sent"):
        shmtensor.WorkerPool(services.negate, name=channel, teardown=lambda: None)


def test_a_worker_killed_in_its_setup_is_started_again(pool_of, channel, file):
    pool = pool_of(services.negate, setup=partial(services.killed_unless, file.once))
    assert pool.statistics().workers[0].restarts == 1
    assert "SIGKILL" in pool.statistics().workers[0].last_error


def test_a_stop_ends_a_setup(pool_of, channel, file):
    """What it has begun is given up, and there is nothing to tear down."""
    pool = pool_of(
        services.negate, setup=partial(services.endless, file.begun), teardown=partial(services.note, file.ended),
        grace=None, ready=False,
    )  # fmt: skip
    wait_until(lambda: lines_of(file.begun))
    pool.stop()
    assert pool.join(timeout=PATIENCE) == 0
    assert not os.path.exists(file.ended)


def test_a_teardown_that_does_not_end_is_killed(pool_of, channel, file, caplog):
    pool = pool_of(services.negate, teardown=partial(services.endless, file.begun), grace=0.5)
    pool.stop()
    assert pool.join(timeout=PATIENCE) == 3
    assert sum("killed before it had finished" in line for line in events(caplog)) == 1


@pytest.mark.parametrize(("teardown", "how"), [("killing", "SIGKILL"), ("failing", "exit code 1")])
def test_a_worker_that_dies_in_its_teardown(pool_of, channel, caplog, teardown, how):
    pool = pool_of(services.negate, teardown=getattr(services, teardown))
    with shmtensor.Client(channel) as client:
        assert client.request(1, timeout=PATIENCE) == -1
    pool.stop()
    assert pool.join(timeout=PATIENCE) == 0
    assert sum("ended (pid" in line and how in line for line in events(caplog)) == 1


# --- statistics


def test_statistics_of_each_worker(pool_of, channel, file):
    with pool_of(services.patient_or_bad, workers=2) as pool, shmtensor.Client(channel) as client:
        seen = pool.statistics()
        assert [each.worker for each in seen.workers] == [0, 1]
        assert [each.pid for each in seen.workers] == pool.pids
        assert all(
            (each.alive, each.ready, each.busy, each.last_error) == (True, True, None, "") for each in seen.workers
        )
        assert (seen.ready, seen.waiting, seen.reloads, seen.reloading) == (2, 0, 0, False)
        futures = [client.submit({"begun": getattr(file, f"begun{n}"), "go on": file.go}) for n in range(5)]
        wait_until(lambda: sum(each.busy is not None for each in pool.statistics().workers) == 2)
        wait_until(lambda: pool.statistics().waiting == 3)
        assert all(each.busy >= 0 for each in pool.statistics().workers)
        touch(file.go)
        for future in futures:
            future.result(PATIENCE)
        with pytest.raises(RemoteError, match="bad image"):
            client.request("bad image é" + 1000 * "x", timeout=PATIENCE)
        wait_until(lambda: sum(each.handled for each in pool.statistics().workers) == 6)
        wait_until(lambda: not any(each.busy for each in pool.statistics().workers))
        seen = pool.statistics()
        assert sum(each.errors for each in seen.workers) == 1
        assert seen.waiting == 0
        assert max(each.last_error for each in seen.workers).startswith("ValueError: bad image éxxx")
    ended = pool.statistics()
    assert [(each.pid, each.alive, each.ready) for each in ended.workers] == [(0, False, False)] * 2
    assert sum(each.handled for each in ended.workers) == 6
    assert ended.ready == pool.ready == 0


def test_a_reply_that_cannot_be_sent_counts_as_an_error(pool_of, channel):
    with pool_of(services.unsendable) as pool, shmtensor.Client(channel) as client:
        with pytest.raises(RemoteError):
            client.request(1, timeout=PATIENCE)
        wait_until(lambda: pool.statistics().workers[0].errors == 1)


def test_requests_that_wait(channel):
    """Of each client, in each of its rings; not those that a living server has, nor those that are not wanted."""
    assert waiting_requests(channel) == 0
    with shmtensor.Client(channel, slots=4, full="grow") as one, shmtensor.Client(channel) as other:
        assert waiting_requests(channel) == 0
        futures = [one.submit(np.zeros(8)) for _ in range(10)] + [other.submit(np.zeros(8)) for _ in range(3)]
        assert waiting_requests(channel) == 13
        assert futures.pop().cancel()
        assert waiting_requests(channel) == 12
        with pytest.raises(TimedOut):
            one.request(np.zeros(8), timeout=0)
        assert waiting_requests(channel) == 12
        server = shmtensor.Server(channel)
        taken = [server.recv(timeout=PATIENCE) for _ in range(4)]
        assert waiting_requests(channel) == 8
        for request in taken[:2]:
            request.reply(1)
        assert waiting_requests(channel) == 8
        server.close()  # as its death would, this leaves what it has taken to others
        assert waiting_requests(channel) == 10
        del request, taken
        with shmtensor.Server(channel) as server:
            for _ in range(10):
                server.recv(timeout=PATIENCE).reply(2)
            assert waiting_requests(channel) == 0
        assert sorted(future.result(PATIENCE) for future in futures) == [1] * 2 + [2] * 10
        large = one.submit(np.zeros(100_000))
        assert waiting_requests(channel) == 1
        assert large.cancel()
    assert waiting_requests(channel) == 0
    with shmtensor.Subscriber(channel):  # another kind of channel
        assert waiting_requests(channel) == 0


def test_requests_of_a_killed_client_do_not_wait(forks, channel):
    ours, theirs = forks.Pipe()
    process = forks.Process(target=services.ask, args=(theirs, channel, 3))
    process.start()
    assert [ours.recv(), ours.recv()] == ["here", "sent"]
    assert waiting_requests(channel) == 3
    process.kill()
    process.join()
    ours.close()
    theirs.close()
    assert waiting_requests(channel) == 0
    shmtensor.Client(channel).close()


# --- reloading


def test_a_reload_replaces_each_worker_and_loses_no_request(pool_of, channel, caplog):
    with pool_of(services.tell, workers=2) as pool:
        before, wrong, got, over = set(pool.pids), [], [], threading.Event()
        reloaded = []  # a reply to a request that was sent before the reload may come from either

        def ask():
            with shmtensor.Client(channel) as client:
                while not over.is_set():
                    begun = len(reloaded)
                    told = client.request(1, timeout=PATIENCE)
                    got.append((begun, told["pid"]))
                    if told["attempt"] != 1:
                        wrong.append(told)

        def of_new():
            return {pid for begun, pid in got if begun}

        askers = [threading.Thread(target=ask) for _ in range(3)]
        for each in askers:
            each.start()
        try:
            wait_until(lambda: got)
            pool.reload(timeout=PATIENCE)
            after = set(pool.pids)
            reloaded.append(True)
            wait_until(of_new)
        finally:
            over.set()
            for each in askers:
                each.join()
        assert wrong == []
        assert not after & before
        assert of_new() <= after
        assert len(after) == 2
        seen = pool.statistics()
        assert [(each.generation, each.restarts, each.last_error) for each in seen.workers] == [(1, 0, "")] * 2
        assert (seen.reloads, seen.reloading) == (1, False)
        said = events(caplog)
        order = [word for line in said for word in ("started", "ready", "replaced") if f": {word} (pid" in line]
        assert order == ["started", "started", "ready", "ready", *(2 * ["started", "ready", "replaced"])]
        pool.reload(timeout=PATIENCE)
        assert pool.statistics().workers[0].generation == 2
    assert pool.exit_code == 0
    with pytest.raises(ClosedError):
        pool.reload()
    assert not any("killed" in line or "died" in line for line in events(caplog))


def test_what_was_taken_before_a_reload_is_answered(pool_of, channel, file):
    with pool_of(services.patient) as pool, shmtensor.Client(channel) as client:
        old = pool.pids[0]
        future = client.submit({"begun": file.begun, "go on": file.go}, retry=False)
        wait_until(lambda: os.path.exists(file.begun))
        pool.reload(wait=False)
        wait_until(lambda: pool.pids != [old] and pool.ready == 1)
        assert pool.statistics().reloading
        touch(file.go)
        assert future.result(PATIENCE) == old
        wait_until(lambda: not pool.statistics().reloading)
        wait_for_end(old)


def test_a_reload_kills_a_worker_that_does_not_finish(pool_of, channel, file, caplog):
    """Its request goes to another."""
    with pool_of(services.patient_at_first, grace=0.5) as pool, shmtensor.Client(channel) as client:
        future = client.submit({"begun": file.begun, "go on": file.never})
        wait_until(lambda: os.path.exists(file.begun))
        pool.reload(timeout=PATIENCE)
        assert future.result(PATIENCE) == 2
        assert sum("killed before it had finished" in line for line in events(caplog)) == 1
        assert not any("died" in line for line in events(caplog))


@pytest.mark.parametrize(
    ("setup", "error", "text"),
    [
        ("raising_if", RemoteError, "worker 0, after 0 of 2 were replaced.*cannot start: the new weights are bad"),
        ("dying_if", PeerDied, "worker 0, after 0 of 2 were replaced.*died before it was ready .*exit code 5"),
    ],
)
def test_a_reload_whose_new_worker_fails_leaves_the_old_ones(pool_of, channel, file, setup, error, text, caplog):
    setup = partial(getattr(services, setup), file.bad)
    with pool_of(services.tell, setup=setup, workers=2) as pool, shmtensor.Client(channel) as client:
        before = pool.pids
        touch(file.bad)
        with pytest.raises(error, match=f"(?s){text}") as caught:
            pool.reload(timeout=PATIENCE)
        assert ("In the worker:\n" in str(caught.value)) is (error is RemoteError)
        assert (pool.pids, pool.ready) == (before, 2)
        assert client.request(1, timeout=PATIENCE)["pid"] in before
        seen = pool.statistics()
        assert [each.restarts for each in seen.workers] == [0, 0]
        assert "bad" in seen.workers[0].last_error or "exit code 5" in seen.workers[0].last_error
        assert any("reload stopped" in line for line in events(caplog))
        os.unlink(file.bad)
        pool.reload(timeout=PATIENCE)
        assert not set(pool.pids) & set(before)


def test_a_new_worker_that_is_killed_ends_the_reload(pool_of, channel, file):
    with pool_of(services.tell, setup=partial(services.waiting_if, file.wait, file.begun)) as pool:
        before = pool.pids
        touch(file.wait)
        kill = functools.partial(lambda: os.kill(int(lines_of(file.begun)[0]), signal.SIGKILL))
        with as_soon_as(lambda: lines_of(file.begun), kill), pytest.raises(PeerDied, match="SIGKILL"):
            pool.reload(timeout=PATIENCE)
        assert (pool.pids, pool.ready) == (before, 1)


def test_an_old_worker_that_is_killed_is_followed_by_its_new_one(pool_of, channel, file, caplog):
    with pool_of(services.tell, setup=partial(services.waiting_if, file.wait, file.begun)) as pool:
        (before,) = pool.pids
        touch(file.wait)

        def act():
            os.kill(before, signal.SIGKILL)
            wait_until(lambda: pool.pids != [before] and pool.pids)
            os.unlink(file.wait)

        with as_soon_as(lambda: lines_of(file.begun), act):
            pool.reload(timeout=PATIENCE)
        assert [str(pid) for pid in pool.pids] == lines_of(file.begun)
        assert pool.ready == 1
        assert any("its new process goes on" in line for line in events(caplog))
        with shmtensor.Client(channel) as client:
            assert client.request(1, timeout=PATIENCE)["pid"] == pool.pids[0]


def test_a_reload_begins_although_a_worker_is_down(pool_of, channel, file):
    """It need not wait for its restart."""
    pool = pool_of(services.negate, setup=partial(services.raising, file.weights), ready=False)
    wait_until(lambda: pool.statistics().workers[0].restarts >= 3)
    touch(file.weights)
    pool.reload(timeout=PATIENCE)
    assert pool.ready == 1


@pytest.mark.parametrize("how", ["timeout", "Ctrl-C"])
def test_a_reload_that_is_given_up(pool_of, channel, file, how):
    with pool_of(services.tell, setup=partial(services.waiting_if, file.wait, file.begun), workers=2) as pool:
        before = pool.pids
        touch(file.wait)
        if how == "timeout":
            with pytest.raises(TimedOut, match="not every worker"):
                pool.reload(timeout=0.5)
        else:
            act = functools.partial(os.kill, os.getpid(), signal.SIGINT)
            with as_soon_as(lambda: lines_of(file.begun), act), pytest.raises(KeyboardInterrupt):
                pool.reload(timeout=PATIENCE)
        wait_until(lambda: not pool.statistics().reloading)
        for pid in lines_of(file.begun):
            wait_for_end(int(pid))
        assert (pool.pids, pool.ready) == (before, 2)
        os.unlink(file.wait)
        pool.reload(timeout=PATIENCE)
        assert not set(pool.pids) & set(before)
        assert [each.last_error for each in pool.statistics().workers] == ["", ""]


def test_reloads_at_once_are_one_after_the_other(pool_of, channel, file):
    """A call that comes during a reload gets one that begins after it: what it wants may be newer."""
    with pool_of(services.tell, setup=partial(services.waiting_if, file.wait, file.begun)) as pool:
        touch(file.wait)
        pool.reload(wait=False)
        wait_until(lambda: lines_of(file.begun))
        calls = [threading.Thread(target=pool.reload, kwargs={"timeout": PATIENCE}) for _ in range(2)]
        for each in calls:
            each.start()
        os.unlink(file.wait)
        for each in calls:
            each.join()
        assert 2 <= pool.statistics().reloads <= 3


def test_a_stop_ends_a_reload(pool_of, channel, file):
    with pool_of(services.tell, setup=partial(services.waiting_if, file.wait, file.begun)) as pool:
        touch(file.wait)
        with as_soon_as(lambda: lines_of(file.begun), pool.stop), pytest.raises(ClosedError, match="asked to"):
            pool.reload(timeout=PATIENCE)
        assert pool.join(timeout=PATIENCE) == 0


@pytest.mark.parametrize("where", ["reload", "setup", "teardown", "endless teardown"])
def test_workers_end_when_their_pool_is_killed(forks, channel, file, where):
    """In the midst of a reload; in a setup, which is given up; in a teardown, which has as long as the pool allowed."""
    setup = f"functools.partial(services.waiting_if, {file.wait!r}, {file.begun!r})"
    teardown = {
        "teardown": f"functools.partial(services.note, {file.ending!r})",
        "endless teardown": f"functools.partial(services.endless, {file.ending!r})",
    }.get(where)
    grace = 1.0 if where == "endless teardown" else PATIENCE
    script = (
        "import functools, multiprocessing, sys, shmtensor\n"
        "from tests.rpc import services\n"
        "context = multiprocessing.get_context('fork')\n"
        f"pool = shmtensor.WorkerPool(services.negate, name={channel!r}, workers=2, mp_context=context,\n"
        f"    setup={setup}, teardown={teardown}, grace={grace})\n"
        f"if {where != 'setup'}:\n"
        "    pool.wait_ready(timeout=90)\n"
        "print(*pool.pids, flush=True)\n"
        f"open({file.wait!r}, 'a').close()\n"
        f"if {where == 'reload'}:\n"
        "    pool.reload()\n"
        "import signal\nsignal.pause()\n"
    )
    if where == "setup":
        touch(file.wait)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        if "teardown" not in where:
            wait_until(lambda: len(lines_of(file.begun)) == (2 if where == "setup" else 1))
            pids += [int(pid) for pid in lines_of(file.begun)]
        process.kill()
    assert len(pids) >= 2
    for pid in pids:
        wait_for_end(pid)
    if where == "teardown":
        assert len(lines_of(file.ending)) == 2
    shmtensor.Client(channel).close()  # whoever comes next removes what they left


# --- the command


@contextlib.contextmanager
def command(*arguments, prepare=lambda: None, **options):
    def begin():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under `nohup`, these tests inherit that it is ignored
        prepare()

    process = subprocess.Popen(
        [sys.executable, "-m", "shmtensor", "serve", *arguments],
        stderr=subprocess.PIPE, text=True, preexec_fn=begin, **options,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def lines_until(process, word) -> list[str]:
    lines = []
    for line in process.stderr:
        lines.append(line)
        if word in line:
            return lines
    raise AssertionError(lines)


def test_the_command_reloads_on_sighup(channel, tmp_path):
    module = tmp_path / "versioned_handler.py"
    text = (
        "def load(): return 'version {0}'\n"
        "def predict(value, context): return context.state\n"
        "def end(state): open(state, 'x').close()\n{1}"
    )
    module.write_text(text.format("one", ""))
    options = ["--setup", "versioned_handler:load", "--teardown", "versioned_handler:end"]
    with (
        shmtensor.Client(channel) as client,
        command("versioned_handler:predict", "--name", channel, *options, cwd=tmp_path) as process,
    ):
        assert client.request(1, timeout=PATIENCE) == "version one"
        module.write_text(text.format("number two", ""))
        process.send_signal(signal.SIGHUP)
        lines_until(process, "reloaded")
        assert client.request(1, timeout=PATIENCE) == "version number two"
        assert (tmp_path / "version one").exists()
        module.write_text(text.format("number two", "raise ImportError('half written')\n"))
        process.send_signal(signal.SIGHUP)
        said = lines_until(process, "reload stopped")
        assert any("ImportError: half written" in line for line in said)
        assert client.request(1, timeout=PATIENCE) == "version number two"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    assert (tmp_path / "version number two").exists()


def test_the_command_stops_when_its_terminal_is_closed(channel):
    ours, theirs = os.openpty()

    def take_terminal():
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    with command("operator:neg", "--name", channel, prepare=take_terminal) as process:
        os.close(theirs)
        lines_until(process, "ready")
        os.close(ours)
        lines_until(process, "stopping (its terminal was closed)")
        assert process.wait(PATIENCE) == 0


def test_the_command_leaves_sighup_ignored(channel):
    def ignore():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with command("operator:neg", "--name", channel, prepare=ignore) as process:
        lines_until(process, "ready")
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert "reloading" not in err


def test_a_worker_is_not_ended_by_a_terminal(channel):
    """Ctrl-C and a hang-up reach every process of its group."""
    with command("operator:neg", "--name", channel, start_new_session=True) as process:
        lines = lines_until(process, "ready")
        old = int(lines[-1].rpartition("pid ")[2].rstrip(")\n"))
        os.killpg(process.pid, signal.SIGHUP)
        lines = lines_until(process, "reloaded")
        assert any(f"replaced (pid {old}, exit code 0)" in line for line in lines)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE) == 0
