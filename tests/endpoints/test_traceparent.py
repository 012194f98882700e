"""`traceparent` in the meta of messages, where OpenTelemetry is active: of the span that is current at `send`."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

import shmtensor
from shmtensor.endpoints.traceparent import SWITCH

from ..waiting import PATIENCE

trace: Any = None
tracecontext: Any = None
TRACER: Any = None


@pytest.fixture(scope="module", autouse=True)
def opentelemetry():
    """Imported for these tests alone: senders that are made while it is carry the context."""
    global trace, tracecontext, TRACER
    before = set(sys.modules)
    trace = pytest.importorskip("opentelemetry.trace")
    tracecontext = pytest.importorskip("opentelemetry.trace.propagation.tracecontext")
    TRACER = pytest.importorskip("opentelemetry.sdk.trace").TracerProvider().get_tracer("tests")
    yield
    for name in set(sys.modules) - before:
        if name.startswith("opentelemetry"):
            del sys.modules[name]


@pytest.fixture(params=["fan-out", "work queue"])
def pair(request):
    if request.param == "fan-out":
        return shmtensor.Publisher, shmtensor.Subscriber
    return shmtensor.Producer, shmtensor.Consumer


def span_of(meta):
    """The span whose context a message carries, as a receiver continues the trace."""
    found = tracecontext.TraceContextTextMapPropagator().extract(meta)
    return trace.get_current_span(found).get_span_context()


def is_of(meta, span) -> bool:
    here, there = span.get_span_context(), span_of(meta)
    return (here.trace_id, here.span_id, here.trace_flags) == (there.trace_id, there.span_id, there.trace_flags)


@pytest.mark.parametrize("meta", [None, {"k": [1, 2]}, OrderedDict(k=[1, 2])])
def test_the_current_span_goes_along(channel, pair, meta):
    with pair[0](channel) as tx, pair[1](channel) as rx:
        for _ in range(2):
            with TRACER.start_as_current_span("work") as span:
                tx.send(np.zeros(3), meta)
                with tx.loan(3, np.float64, meta) as loan:
                    loan.array[...] = 1
            for _ in range(2):
                with rx.recv(timeout=PATIENCE) as message:
                    assert is_of(message.meta, span)
                    assert {key: message.meta[key] for key in message.meta if key != "traceparent"} == (meta or {})
        assert meta in (None, {"k": [1, 2]})  # the user's is as it was


def test_without_a_span_nothing_is_added(channel, pair):
    with pair[0](channel) as tx, pair[1](channel) as rx:
        for meta in (None, {"k": 1}):
            tx.send(np.zeros(3), meta)
            with rx.recv(timeout=PATIENCE) as message:
                assert message.meta == meta


def test_what_the_user_passes_stays(channel, pair):
    with pair[0](channel) as tx, pair[1](channel) as rx, TRACER.start_as_current_span("work"):
        tx.send(np.zeros(3), {"traceparent": "mine"})
        with rx.recv(timeout=PATIENCE) as message:
            assert message.meta == {"traceparent": "mine"}
        with pytest.raises(shmtensor.ArgumentTypeError):
            tx.send(np.zeros(3), [1])


def test_a_tracestate_goes_along(channel):
    context = trace.SpanContext(1, 2, False, trace.TraceFlags(1), trace.TraceState([("vendor", "x")]))
    with (
        shmtensor.Publisher(channel) as pub,
        shmtensor.Subscriber(channel) as sub,
        trace.use_span(trace.NonRecordingSpan(context)),
    ):
        pub.send(np.zeros(3))
        meta = sub.recv(timeout=PATIENCE).meta
    assert meta == {"traceparent": f"00-{1:032x}-{2:016x}-01", "tracestate": "vendor=x"}
    assert span_of(meta).trace_state.get("vendor") == "x"


def test_tasks_that_wait_send_their_own(channel):
    async def main() -> None:
        with shmtensor.Publisher(channel, slots=1) as pub, shmtensor.Subscriber(channel) as sub:
            pub.send(np.zeros(1))
            spans = {}

            async def send(number: int) -> None:
                with TRACER.start_as_current_span(str(number)) as span:
                    spans[number] = span
                    await pub.asend(np.array(number))

            tasks = [asyncio.create_task(send(number)) for number in range(3)]
            await asyncio.sleep(0)
            for number in (None, *range(3)):
                with await sub.arecv(timeout=PATIENCE) as message:
                    if number is not None:
                        assert is_of(message.meta, spans[int(message.value)])
            await asyncio.gather(*tasks)

    asyncio.run(main())


def test_a_request_carries_it_and_its_reply_does_not(channel):
    seen = []

    with shmtensor.Server(channel) as server, shmtensor.Client(channel) as client:

        def answer() -> None:
            for request in server:
                seen.append(request.meta)
                with TRACER.start_as_current_span("answer"):
                    request.reply(request.value + 1)

        thread = threading.Thread(target=answer)
        thread.start()
        with TRACER.start_as_current_span("ask") as span:
            assert client.request(np.ones(2), timeout=PATIENCE).tolist() == [2, 2]
        server.stop()
        thread.join(PATIENCE)
    assert is_of(seen[0], span)


def test_it_can_be_switched_off(channel, monkeypatch):
    monkeypatch.setenv(SWITCH, "0")
    with shmtensor.Publisher(channel) as pub, shmtensor.Subscriber(channel) as sub:
        with TRACER.start_as_current_span("work"):
            pub.send(np.zeros(3))
        assert sub.recv(timeout=PATIENCE).meta is None


def test_without_opentelemetry_nothing_of_it_is_imported(channel):
    """Nor is a value described in any other way than without this feature."""
    code = (
        "import sys, shmtensor\n"
        "with shmtensor.Publisher(sys.argv[1]) as pub: pub.send(b'1'); assert '_describe' not in vars(pub)\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", code, channel], check=True, timeout=PATIENCE)
