"""Batches: what is stacked with what, when a batch is given out, and whose reply is whose."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from concurrent.futures import CancelledError

import numpy as np
import pytest
import torch

import shmtensor
from shmtensor import ArgumentError, RemoteError, TimedOut
from shmtensor.rpc import batching

from ..waiting import wait_until
from . import services

PATIENCE = services.PATIENCE


@pytest.fixture
def make(channel):
    """A client, and a server of the options given."""
    ends: list = []

    def open_them(**options):
        ends.extend([shmtensor.Client(channel), shmtensor.Server(channel, **options)])
        return ends[-2:]

    yield open_them
    while ends:
        ends.pop().close()
    gc.collect()  # what refers to itself through an error's traceback ends its leases; its endpoint goes at the next


def all_fail(futures, text) -> None:
    """In a frame of its own: an error refers to it, and nothing that holds a slot should be in that circle."""
    for future in futures:
        with pytest.raises(RemoteError, match=text):
            future.result(timeout=PATIENCE)


def test_requests_are_stacked_and_replies_split(make):
    client, server = make(max_batch=4, max_wait=PATIENCE)
    futures = [client.submit(torch.full((2, 3), float(number))) for number in range(4)]
    batch = server.recv(timeout=PATIENCE)  # full: it waits for nothing more
    assert len(batch) == 4
    assert batch.value.shape == (4, 2, 3)
    assert batch.value[:, 0, 0].tolist() == [0, 1, 2, 3]
    assert repr(batch) == "<Batch of 4>"
    batch.reply(batch.value.sum((1, 2)))
    assert [future.result(timeout=PATIENCE).item() for future in futures] == [0, 6, 12, 18]


def test_a_batch_is_private_memory(make):
    client, server = make(max_batch=2, max_wait=PATIENCE)
    futures = [client.submit(torch.ones(3)) for _ in range(2)]
    batch = server.recv(timeout=PATIENCE)
    kept = batch.value
    batch.reply([kept, "both"])
    assert futures[1].result(timeout=PATIENCE)[1] == "both"
    first = futures[0].result(timeout=PATIENCE)[0]
    kept += 1
    assert first.tolist() == [1, 1, 1]
    assert kept.tolist() == [[2, 2, 2]] * 2


def test_trees_are_stacked_leaf_by_leaf(make):
    client, server = make(max_batch=2, max_wait=PATIENCE)
    values = [{"image": torch.full((2,), number), "rest": (np.full((), number), "mode", 7)} for number in range(2)]
    futures = [client.submit(value) for value in values]
    batch = server.recv(timeout=PATIENCE)
    assert batch.value["image"].tolist() == [[0, 0], [1, 1]]
    assert batch.value["rest"][0].tolist() == [0, 1]
    assert batch.value["rest"][1:] == ("mode", 7)
    batch.reply({"n": batch.value["image"][:, 0], "pair": (batch.value["rest"][0] * 2, None)})
    replies = [future.result(timeout=PATIENCE) for future in futures]
    assert [int(reply["n"]) for reply in replies] == [0, 1]
    assert [int(reply["pair"][0]) for reply in replies] == [0, 2]
    assert replies[0]["pair"][1] is None


DIFFERENT = {
    "shape": (torch.ones(2), torch.ones(3)),
    "dtype": (torch.ones(2), torch.ones(2, dtype=torch.float64)),
    "library": (torch.ones(2), np.ones(2, "f4")),
    "structure": ({"a": torch.ones(2)}, {"b": torch.ones(2)}),
    "kind": ([torch.ones(2)], (torch.ones(2),)),
    "scalar": ({"x": torch.ones(2), "mode": 1}, {"x": torch.ones(2), "mode": 2}),
    "type of scalar": ((torch.ones(2), 1), (torch.ones(2), True)),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_different_requests_form_separate_batches(make, what):
    client, server = make(max_batch=2, max_wait=PATIENCE)
    futures = [client.submit(value) for value in DIFFERENT[what] * 2]
    batches = [server.recv(timeout=PATIENCE) for _ in range(2)]
    assert [len(batch) for batch in batches] == [2, 2]
    assert {request.seq for request in batches[0]} == {1, 3}
    for batch, name in zip(batches, ("odd", "even"), strict=True):
        batch.reply(name)
    assert [future.result(timeout=PATIENCE) for future in futures] == ["odd", "even"] * 2


def test_what_cannot_be_stacked_goes_alone(make):
    client, server = make(max_batch=4, max_wait=PATIENCE)
    futures = [client.submit(torch.eye(3).to_sparse()) for _ in range(2)]
    for _ in range(2):
        batch = server.recv(timeout=PATIENCE)
        assert len(batch) == 1
        assert batch.value.is_sparse
        batch.reply("sparse")
    assert [future.result(timeout=PATIENCE) for future in futures] == ["sparse"] * 2


@pytest.mark.parametrize(
    "value", [torch.tensor(3.5), torch.zeros(0, 3), torch.zeros(2, 0), torch.ones(3, dtype=torch.bfloat16), 5, "text"]
)
def test_values_of_every_kind(make, value):
    client, server = make(max_batch=2, max_wait=PATIENCE)
    futures = [client.submit(value) for _ in range(2)]
    batch = server.recv(timeout=PATIENCE)
    assert len(batch) == 2
    batch.reply(batch.value)
    for future in futures:
        reply = future.result(timeout=PATIENCE)
        if isinstance(value, torch.Tensor):
            assert reply.shape == value.shape
            assert reply.dtype == value.dtype
            assert torch.equal(reply, value)
        else:
            assert reply == value


def test_a_batch_waits_for_no_more_than_max_wait(make):
    client, server = make(max_batch=100, max_wait=0.01)
    future = client.submit(1)
    batch = server.recv(timeout=PATIENCE)  # alone, though there is room
    assert len(batch) == 1
    batch.reply(2)
    assert future.result(timeout=PATIENCE) == 2


def test_max_wait_counts_from_the_first_request(make):
    """A trickle of others does not hold the first one back: each comes sooner than `max_wait` after the one before."""
    client, server = make(max_batch=1000, max_wait=0.3)
    stop = threading.Event()
    futures = []

    def trickle():
        while not stop.wait(0.05):
            futures.append(client.submit(1, timeout=PATIENCE))

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        batch = server.recv(timeout=PATIENCE)  # it would never come
    finally:
        stop.set()
        thread.join()
    assert len(batch) < 1000
    batch.reply(0)
    rest = len(futures) - len(batch)
    while rest:
        batch = server.recv(timeout=PATIENCE)
        batch.reply(0)
        rest -= len(batch)
    assert all(future.result(timeout=PATIENCE) == 0 for future in futures)


def test_full_batches_starve_nobody(make):
    """One request of another look, and always as many of one look as a batch takes."""
    client, server = make(max_batch=2, max_wait=0)
    futures = [client.submit(np.zeros(2 if number == 1 else 3), timeout=PATIENCE) for number in range(10)]
    batches = []
    while len(batches) < 3:
        batch = server.recv(timeout=PATIENCE)
        batches.append(batch.value.shape)
        batch.reply(batch.value)
    assert (1, 2) in batches
    assert futures[1].result(PATIENCE).shape == (2,)
    for future in futures:
        future.cancel()


DTYPES = {
    "big-endian": ">f4", "aligned": np.dtype([("x", "u1"), ("y", "f8")], align=True), "dates": "M8[ns]", "text": "U3",
    "gaps": {"names": ["x"], "formats": ["f4"], "offsets": [4], "itemsize": 16}, "bool": "?",
}  # fmt: skip


@pytest.mark.parametrize("kind", DTYPES)
def test_a_batch_has_the_dtype_of_its_values(make, kind):
    dtype = np.dtype(DTYPES[kind])
    client, server = make(max_batch=2, max_wait=PATIENCE)
    for shape in ((3,), ()):
        values = np.ones((2, *shape), dtype)
        futures = [client.submit(values[index, ...], timeout=PATIENCE) for index in range(2)]
        batch = server.recv(timeout=PATIENCE)
        assert (batch.value.dtype, batch.value.shape) == (dtype, values.shape)
        assert (batch.value == values).all()
        batch.reply(batch.value)
        del batch
        assert [future.result(PATIENCE).dtype for future in futures] == [dtype] * 2


def test_no_request_is_no_batch(make):
    _, server = make(max_batch=2, max_wait=PATIENCE)
    with pytest.raises(TimedOut):
        server.recv(timeout=0.02)


def test_a_timeout_does_not_cut_a_batch_short_of_its_wait(make):
    """`timeout` is how long to wait for a first request."""
    client, server = make(max_batch=2, max_wait=PATIENCE)
    first = client.submit(1)
    second: list = []
    late = threading.Timer(0.3, lambda: second.append(client.submit(1)))
    late.start()
    batch = server.recv(timeout=0.05)
    late.join()
    assert len(batch) == 2
    batch.reply(2)
    assert first.result(timeout=PATIENCE) == 2
    assert second[0].result(timeout=PATIENCE) == 2


def test_an_error_fails_every_request_of_its_batch_and_no_other(make):
    client, server = make(max_batch=2, max_wait=PATIENCE)
    bad = [client.submit(torch.ones(2)) for _ in range(2)]
    good = [client.submit(torch.ones(3)) for _ in range(2)]

    def handler(value):
        if value.shape == (2, 2):
            raise ValueError("two")
        return value

    for _ in range(2):
        server.answer(server.recv(timeout=PATIENCE), handler)
    all_fail(bad, "ValueError: two")
    for future in good:
        assert future.result(timeout=PATIENCE).tolist() == [1, 1, 1]
    assert server.statistics().failed == server.statistics().replied == 2


def test_leaving_a_batchs_block_by_an_exception_fails_what_is_unanswered(make):
    client, server = make(max_batch=2, max_wait=PATIENCE)
    futures = [client.submit(1) for _ in range(2)]
    with pytest.raises(ZeroDivisionError), server.recv(timeout=PATIENCE) as batch:
        batch.requests[0].reply("mine")
        batch.value / 0
    assert futures[0].result(timeout=PATIENCE) == "mine"
    all_fail(futures[1:], "ZeroDivisionError")


@pytest.mark.parametrize("reply", [torch.zeros(3), torch.tensor(1.0), {"x": [np.zeros((1, 2))]}])
def test_a_reply_of_another_first_dimension_is_refused(make, reply):
    client, server = make(max_batch=2, max_wait=PATIENCE)
    futures = [client.submit(1) for _ in range(2)]
    batch = server.recv(timeout=PATIENCE)
    with pytest.raises(ArgumentError, match="first dimension must be 2"):
        batch.reply(reply)
    batch.reply(torch.zeros(2))
    assert [future.result(timeout=PATIENCE).item() for future in futures] == [0, 0]
    with pytest.raises(shmtensor.ReleasedError):
        batch.reply(torch.zeros(2))


def test_requests_cancelled_meanwhile_are_not_in_the_batch(make):
    client, server = make(max_batch=3, max_wait=PATIENCE)
    first = client.submit(1)
    rest: list = []
    threading.Timer(0.2, lambda: (first.cancel(), rest.extend(client.submit(1) for _ in range(2)))).start()
    batch = server.recv(timeout=PATIENCE)
    assert len(batch) == 2
    batch.reply(0)
    with pytest.raises(CancelledError):
        first.result()
    assert [future.result(timeout=PATIENCE) for future in rest] == [0, 0]


def test_run_with_batches_of_many_clients(make, channel):
    _, server = make(max_batch=8, max_wait=0.002)
    seen: list[int] = []

    def handler(value):
        seen.append(len(value))
        return value * 2

    thread = threading.Thread(target=server.run, args=(handler,))
    thread.start()
    clients = [shmtensor.Client(channel) for _ in range(3)]
    futures = [(number, clients[number % 3].submit(torch.full((4,), number))) for number in range(90)]
    for number, future in futures:
        assert future.result(timeout=PATIENCE).tolist() == [2 * number] * 4
    server.stop()
    thread.join(PATIENCE)
    for client in clients:
        client.close()
    assert sum(seen) == 90
    assert max(seen) <= 8


def test_several_threads_take_batches(make):
    client, server = make(max_batch=3, max_wait=0.0003)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=server.run, args=(lambda value: value * 2,)) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(40):
            futures = [
                (size, client.submit(np.full(size, size), timeout=PATIENCE)) for _ in range(4) for size in (1, 2, 3)
            ]
            for size, future in futures:
                assert future.result(PATIENCE).tolist() == [2 * size] * size
    finally:
        sys.setswitchinterval(before)
        server.stop()
        for thread in threads:
            thread.join(PATIENCE)


def test_a_stopping_server_gives_out_what_it_has_taken(make):
    client, server = make(max_batch=4, max_wait=PATIENCE)
    futures = [client.submit(torch.ones(size)) for size in (1, 2, 1)]
    stopper = threading.Thread(target=lambda: (wait_until(lambda: server.statistics().unfinished == 3), server.stop()))
    stopper.start()
    got = [len(batch) for batch in _answered(server)]
    stopper.join(PATIENCE)
    assert sorted(got) == [1, 2]
    for future in futures:
        assert future.result(timeout=PATIENCE) == 0


def _answered(server):
    for batch in server:
        batch.reply(0)
        yield batch


def test_stacking_is_one_copy():
    """The views are read once, straight into the result: nothing between has their size."""
    import tracemalloc

    values = [np.ones(1 << 16) for _ in range(8)]
    tracemalloc.start()
    stacked = batching.stack(values)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert stacked.shape == (8, 1 << 16)
    assert peak < 1.1 * stacked.nbytes


def test_looks_are_equal_exactly_when_values_can_be_stacked():
    for values in DIFFERENT.values():
        first, second = map(batching.layout_of, values)
        assert first != second
        assert first == batching.layout_of(values[0])
    assert batching.layout_of([1.0]) != batching.layout_of([1])


OUT_OF_ORDER = np.dtype({"names": ["a", "b"], "formats": ["f4", "i4"], "offsets": [4, 0]})


@pytest.mark.parametrize("value", [{"n": 10**5000, "x": np.ones(2)}, np.zeros(3, OUT_OF_ORDER)], ids=["int", "dtype"])
def test_values_that_are_hard_to_describe_are_stacked(make, value):
    client, server = make(max_batch=2, max_wait=PATIENCE)
    futures = [client.submit(value) for _ in range(2)]
    batch = server.recv(timeout=PATIENCE)
    assert len(batch) == 2
    batch.reply("both")
    assert [future.result(timeout=PATIENCE) for future in futures] == ["both"] * 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", ["strided", "jagged"])
def test_a_nested_tensor_is_refused_and_the_server_goes_on(make, layout):
    """torch stacks none, not even one."""
    client, server = make(max_batch=2, max_wait=0)
    parts = [torch.ones(2, 3), torch.ones(4, 3)]
    refused = client.submit(torch.nested.nested_tensor(parts, layout=getattr(torch, layout)))
    future = client.submit(1)
    server.recv(timeout=PATIENCE).reply(2)
    assert future.result(timeout=PATIENCE) == 2
    all_fail([refused], f"cannot stack tensors of layout torch.{layout}")


def test_a_value_whose_layout_cannot_be_found_goes_alone(make, monkeypatch):
    """Whatever the reason: the server goes on."""

    def layout_of(value):
        raise LookupError

    client, server = make(max_batch=2, max_wait=PATIENCE)
    futures = [client.submit(1) for _ in range(2)]
    monkeypatch.setattr(batching, "layout_of", layout_of)
    for number in range(2):
        batch = server.recv(timeout=PATIENCE)
        assert len(batch) == 1
        batch.reply(number)
    assert [future.result(timeout=PATIENCE) for future in futures] == [0, 1]


@pytest.mark.parametrize("on_a_loop", [False, True], ids=["reply", "areply"])
def test_a_client_without_room_fails_alone(make, channel, monkeypatch, on_a_loop):
    """It keeps every reply; the other one, which is in the same batches, keeps none."""
    monkeypatch.setattr("shmtensor.rpc.endpoints.ROOM_S", 0.01)
    keeps, server = make(max_batch=2, max_wait=PATIENCE, slots=1, max_bytes="64KiB")
    value, kept = np.zeros(4), []

    async def answer(batch):
        await batch.areply(batch.value)

    with shmtensor.Client(channel) as other:
        failed = None
        while failed is None:
            asked = [client.submit(value, timeout=PATIENCE) for client in (keeps, other)]
            batch = server.recv(timeout=PATIENCE)
            asyncio.run(answer(batch)) if on_a_loop else batch.reply(batch.value)
            assert asked[1].result(PATIENCE).shape == (4,)
            failed = asked[0].exception(PATIENCE)
            if failed is None:
                kept.append(asked[0].result())
    assert isinstance(failed, RemoteError)
    assert failed.type_name == "NoRoom"
    assert kept
    assert server.statistics().dropped == 1
