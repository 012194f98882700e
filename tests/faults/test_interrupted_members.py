"""Endpoints whose constructor or departure an asynchronous exception interrupts, at any boundary: nothing is left."""

from __future__ import annotations

import gc
import os

import pytest

import shmtensor
from shmtensor.channel import control
from shmtensor.channel.inspect import view_of

from ..conftest import descriptors, shared_files
from ..implementations import once
from ..waiting import wait_until
from .interrupts import each_boundary, interrupted, stride

pytestmark = pytest.mark.slow

MAKERS = {
    "publisher": lambda name: shmtensor.Publisher(name, slots=2, slot_bytes=64),
    "publisher-lazy": lambda name: shmtensor.Publisher(name, slots=2),
    "subscriber": lambda name: shmtensor.Subscriber(name),
    "latest": lambda name: shmtensor.Subscriber(name, delivery="latest"),
    "group": lambda name: shmtensor.Subscriber(name, group="them"),
    "producer": lambda name: shmtensor.Producer(name, slots=2, slot_bytes=64),
    "consumer": lambda name: shmtensor.Consumer(name),
    "client": lambda name: shmtensor.Client(name),
    "server": lambda name: shmtensor.Server(name),
}
PEERS = {
    "publisher": shmtensor.Subscriber, "publisher-lazy": shmtensor.Subscriber, "subscriber": shmtensor.Publisher,
    "latest": shmtensor.Publisher, "group": shmtensor.Publisher, "producer": shmtensor.Consumer,
    "consumer": shmtensor.Producer, "client": shmtensor.Server, "server": shmtensor.Client,
}  # fmt: skip


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "with-a-peer"])
@pytest.mark.parametrize("kind", MAKERS)
def test_an_interrupted_constructor_leaves_nothing(channel, kind, alone, socket_directory):
    make, peer = MAKERS[kind], None if alone else PEERS[kind](channel)
    make(channel).close()
    gc.collect()
    before = shared_files(), set(os.listdir(socket_directory)), descriptors()
    for attempt in each_boundary(lambda: make(channel), step=stride(151)):
        made, attempt.result = attempt.result, None
        if made is not None:
            made.close()
        del made
        assert not control._holders
        assert not control._deferred
        after = shared_files(), set(os.listdir(socket_directory)), descriptors()
        assert after == before, (attempt, view_of(channel))
        if peer is not None:
            wait_until(lambda: not view_of(channel).locked)  # who sweeps beside us holds it for a moment
            seen = view_of(channel)
            alive = [member.alive for member in seen.members]
            assert alive == [True], attempt
    assert attempt.at > 300
    if peer is not None:
        peer.close()


@once("calls of a member, of which nothing is compiled")
@pytest.mark.parametrize("kind", ["publisher", "subscriber", "group", "producer", "consumer"])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "with-a-peer"])
@pytest.mark.parametrize("what", ["leave", "set_leaving", "reap"])
def test_an_interrupted_departure_is_complete(channel, kind, alone, what, socket_directory):
    """A call that is interrupted as it begins has not begun; else the member is gone, and nobody holds a lock."""
    make, peer = MAKERS[kind], None if alone else PEERS[kind](channel)
    before = shared_files(), set(os.listdir(socket_directory)), descriptors()
    at, reached = 1, True
    while reached:
        endpoint = make(channel)
        member = endpoint._member
        attempt = interrupted(getattr(member, what), at)
        at, reached = at + (1 if at < 8 else stride(23)), attempt.reached
        assert not control._holders
        assert not control._deferred
        wait_until(lambda: not view_of(channel).locked)
        if what == "leave" and attempt.at > 3:  # the first are those around the call
            assert member.control.locks.fd < 0, attempt
            assert not [it for it in view_of(channel).members if it.uid == member.uid], attempt
            left = {name for name in shared_files() if f"{member.uid:016x}" in name}
            assert not left, attempt
        endpoint._abandon()
        del endpoint, member
        assert (shared_files(), set(os.listdir(socket_directory)), descriptors()) == before, attempt
    assert at > 20
    if peer is not None:
        peer.close()
