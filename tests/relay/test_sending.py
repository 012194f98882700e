"""What is sent, and in which frames: without a network."""

from __future__ import annotations

import contextlib

from shmtensor.relay.frame_queue import FrameQueue
from shmtensor.relay.frames import Items, Part
from shmtensor.relay.sending import PART, ItemSender
from shmtensor.relay.window import Outgoing


class Link:
    """A sender with a window, and the frames that it has put."""

    def __init__(self, *waiting):
        self.frames, self.ended, self.credit = [], set(), 1 << 30
        self.window = Outgoing()
        self.window.begin(100, 1 << 30, 0)
        self.sender = ItemSender(
            (1, 2, 3), 0, self.window.add(waiting), self.window,
            lock=contextlib.nullcontext(), read=self.read, origin=lambda _: 7, claim=self.claim,
            put=lambda head, body: None,
        )  # fmt: skip

    def read(self, item):
        return None if item in self.ended else (memoryview(item), b"described")

    def claim(self, nbytes):
        self.credit -= nbytes
        return self.credit >= 0


def recorded(monkeypatch):
    """The places of the frames that are made: `after`, and the numbers, or the number and the offset."""
    found = []
    head = {Items: Items.head, Part: Part.head}
    monkeypatch.setattr(
        Items,
        "head",
        lambda it, body=b"": (found.append((it.after, [each.number for each in it.items])), head[Items](it, body))[1],
    )
    monkeypatch.setattr(
        Part, "head", lambda it, body=b"": (found.append((it.after, it.number, it.offset)), head[Part](it, body))[1]
    )
    return found


def test_what_has_ended_is_not_sent(monkeypatch):
    """A request may end while it waits, for the first time or to be sent again: its message is released then."""
    found, link = recorded(monkeypatch), Link(b"one", b"two", b"three", b"four")
    link.ended |= {b"one", b"three"}
    link.sender.send()
    assert found == [(0, [2, 4])]
    assert [number for number, _ in link.window.numbered()] == [2, 4], "the others have left the window"
    assert not len(link.sender)


def test_nothing_is_left_of_what_has_ended(monkeypatch):
    found, link = recorded(monkeypatch), Link(b"one")
    link.ended.add(b"one")
    link.sender.send()
    assert (found, len(link.sender), len(link.window)) == ([], 0, 0)


def test_a_large_one_behind_what_has_ended_goes_in_parts(monkeypatch):
    found, link = recorded(monkeypatch), Link(b"one", b"two", bytes(3 * PART), b"four")
    link.ended |= {b"one", b"two"}
    link.sender.send()
    assert found == [(0, 3, 0), (0, 3, PART), (0, 3, 2 * PART), (3, [4])]


def test_what_does_not_go_into_the_frame_is_not_asked_for(monkeypatch):
    """A request that was asked for may be there; behind a large one, none is."""
    _, link = recorded(monkeypatch), Link(bytes(3 * PART), b"two")
    asked, read = [], link.sender._read
    monkeypatch.setattr(link.sender, "_read", lambda item: (asked.append(item), read(item))[1])
    link.credit = PART + 100
    link.sender.send()
    assert b"two" not in asked


def test_what_ends_between_two_parts_is_given_up(monkeypatch):
    large = bytes(3 * PART)
    found, link = recorded(monkeypatch), Link(large, b"two")
    claim = link.claim

    def end_at_the_second(nbytes):
        if len(found) == 1:
            link.ended.add(large)
        return claim(nbytes)

    monkeypatch.setattr(link.sender, "_claim", end_at_the_second)
    link.sender.send()
    assert found == [(0, 1, 0), (0, 1, PART), (0, [2])]
    assert [number for number, _ in link.window.numbered()] == [2]


def test_a_large_one_goes_on_where_credit_was_missing(monkeypatch):
    found, link = recorded(monkeypatch), Link(bytes(3 * PART), b"two")
    link.credit = PART + 100
    link.sender.send()
    assert found == [(0, 1, 0)]
    link.credit = 1 << 30
    link.sender.send()
    assert found[1:] == [(0, 1, PART), (0, 1, 2 * PART), (1, [2])]


# --- what waits at the far relay


def test_of_status_in_a_row_the_newest_waits():
    waiting = FrameQueue(100_000, 0)
    assert waiting.put(b"items", b"x")
    for number in range(10_000):
        assert waiting.put(b"status %d" % number, b"", status=(1, number))
    assert waiting.put(b"more items", b"x")  # behind the senders that it needs
    assert waiting.put(b"status", b"", status=(1, 10_000))
    assert waiting.put(b"a replay", b"", status=(1, 5))
    found = []
    while not waiting.empty():
        frame = waiting.get(0)
        found.append(frame[0])
        waiting.note_done(*frame)
    assert found == [b"items", b"status 9999", b"more items", b"status"]


def test_a_status_that_was_taken_is_not_replaced():
    waiting = FrameQueue(100_000, 0)
    waiting.put(b"first", b"", status=(1, 0))
    assert waiting.get(0) == (b"first", b"")
    waiting.put(b"second", b"", status=(1, 0))
    assert waiting.get(0) == (b"second", b"")


def test_frames_count_with_what_they_take():
    """So that many small ones have a bound that is one of memory; what was handled makes room."""
    waiting = FrameQueue(10_000, 0)
    count = 0
    while waiting.put(b"head", b""):
        count += 1
    assert count <= 20
    for _ in range(count):
        waiting.note_done(*waiting.get(0))
    assert waiting.put(b"head", b"")


def test_a_window_of_small_frames_has_room():
    waiting = FrameQueue(10_000, 256)
    assert all(waiting.put(b"h" * 90, b"body") for _ in range(256))


def test_waking():
    waiting = FrameQueue(10_000, 0)
    waiting.wake()
    assert waiting.get(100) is None
    assert waiting.get(0) is None
