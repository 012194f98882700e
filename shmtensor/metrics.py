"""Metrics of every channel and service of this machine for Prometheus, read from outside: `collector()`.

Needs prometheus_client: `pip install '.[metrics]'` in a checkout. `shmtensor metrics` serves them over HTTP.
"""

from __future__ import annotations

import fnmatch
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .channel.info import ChannelInfo, MemberInfo
from .channel.inspect import Inspector
from .errors import DependencyError, ResourceError
from .memory import placement
from .observe.rates import has_newest
from .options import how_to_install

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["collector"]


def collector(pattern: str = "*") -> Any:
    """A collector for a registry of prometheus_client: each scrape inspects the channels of this machine anew.

    So the next scrape has no process that has died. The collector joins no channel and delays no member. Names that
    end with `_total` are what that member has counted since it joined; everything else is a gauge of this moment. A
    program that exports metrics of its own registers it once; for a machine, `shmtensor metrics` serves it.

        >>> import prometheus_client, shmtensor.metrics
        >>> registry = prometheus_client.CollectorRegistry()
        >>> registry.register(shmtensor.metrics.collector("camera*"))
        >>> b"shmtensor_channels" in prometheus_client.generate_latest(registry)
        True

    Args:
        pattern: only channels with such names.

    Raises `DependencyError` if prometheus_client is not installed.
    """
    _core()
    return _Collector(pattern)


def _core() -> Any:
    try:
        import prometheus_client.core
    except ImportError:
        raise DependencyError(
            f"metrics need prometheus_client, which is not installed: {how_to_install('metrics')}",
            name="prometheus_client",
        ) from None
    return prometheus_client.core


_CHANNEL = ("channel", "kind")
_MEMBER = (*_CHANNEL, "pid", "process", "label", "group", "member")

_GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "shmtensor_readable": ("1; 0 if no channel can be looked at: the segment server of this process is away.", ()),
    "shmtensor_channels": ("Channels that have files in /dev/shm.", ()),
    "shmtensor_channels_unreadable": ("Channels that cannot be read, such as another user's.", ()),
    "shmtensor_senders": ("Senders that live: publishers, producers, clients.", _CHANNEL),
    "shmtensor_receivers": ("Receivers that live: subscribers, consumers, servers.", _CHANNEL),
    "shmtensor_memory_bytes": ("Shared memory of a channel.", _CHANNEL),
    "shmtensor_depth": (
        "Messages that wait: of the subscriber or group that is furthest behind; of a work queue or service, for any "
        "consumer.",
        _CHANNEL,
    ),
    "shmtensor_oldest_unread_seconds": ("How long the oldest message waits that was not taken.", _CHANNEL),
    "shmtensor_held_messages": (
        "Messages whose slots are not free, by how they are held: counted once for each member that holds them.",
        (*_CHANNEL, "how"),
    ),
    "shmtensor_held_bytes": ("Payload of these, counted in the same way.", (*_CHANNEL, "how")),
    "shmtensor_oldest_held_seconds": ("Seconds since the oldest of these was sent.", (*_CHANNEL, "how")),
    "shmtensor_unread_messages": ("Messages that a subscriber has not taken.", _MEMBER),
    "shmtensor_slots": ("Slots of a sender's rings.", _MEMBER),
    "shmtensor_slots_used": ("Slots whose message is still needed.", _MEMBER),
    "shmtensor_newest_message_age_seconds": ("Seconds since a sender sent its newest message.", _MEMBER),
}
_OF_SENDERS: dict[str, tuple[str, str]] = {
    "shmtensor_messages_published": ("published", "Messages that a sender has sent."),
    "shmtensor_slot_waits": ("waits", "Sends that found no free slot at once, and waited for one."),
    "shmtensor_messages_dropped": ("dropped", "Messages that a sender dropped for lack of a slot."),
}
_OF_RECEIVERS: dict[str, tuple[str, str]] = {
    "shmtensor_sleeps": ("sleeps", "How often a receiver went to sleep to wait for a message."),
    "shmtensor_late_wakeups": ("late", "Messages that a receiver found when a sleep had timed out."),
    "shmtensor_messages_missed": ("missed", "Messages that a newest-only subscriber passed over."),
    "shmtensor_messages_redelivered": ("redelivered", "Messages that a receiver had before and did not finish."),
}
"""Counters: each name, without `_total`, with the field of a `MemberInfo` and a text."""


class _Collector:
    """What `collector` returns: prometheus_client calls `collect` for each scrape."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._inspector = pattern, Inspector()
        self._one_at_a_time = threading.Lock()  # a server may answer two scrapes at once

    def describe(self) -> list[Metric]:
        """The metrics without samples: registering this collector reads nothing."""
        return list(self._families().values())

    def collect(self) -> Iterator[Metric]:
        """Inspect the channels once, and yield the metrics."""
        families = self._families()

        def put(name: str, value: float, *labels: str) -> None:
            families[name].add_metric(labels, value)

        try:
            with self._one_at_a_time, placement.at_once():
                channels = self._inspector.channels(lambda name: fnmatch.fnmatchcase(name, self._pattern))
        except ResourceError:  # a program's other metrics are scraped nevertheless
            put("shmtensor_readable", 0)
            yield from families.values()
            return
        put("shmtensor_readable", 1)
        put("shmtensor_channels", len(channels))
        put("shmtensor_channels_unreadable", sum(not channel.readable for channel in channels))
        found: dict[tuple[str, str], list[ChannelInfo]] = {}
        for channel in channels:
            if channel.readable and channel.living:
                found.setdefault(_labels(channel), []).append(channel)
        for labels, those in found.items():
            _of_channels(put, labels, those)
        yield from families.values()

    @staticmethod
    def _families() -> dict[str, Any]:
        core = _core()
        families = {name: core.GaugeMetricFamily(name, text, labels=labels) for name, (text, labels) in _GAUGES.items()}
        for name, (_, text) in (_OF_SENDERS | _OF_RECEIVERS).items():
            families[name] = core.CounterMetricFamily(name, text, labels=_MEMBER)
        return families


def _labels(channel: ChannelInfo) -> tuple[str, str]:
    """The labels `channel` and `kind`. A service's reply channels, one per client, share one pair, since their names
    are never used again."""
    if channel.service and channel.kind == "fan-out":
        return channel.service, "replies"
    return channel.name, channel.kind


def _of_channels(put: Any, labels: tuple[str, str], channels: list[ChannelInfo]) -> None:
    put("shmtensor_senders", sum(len(channel.senders) for channel in channels), *labels)
    put("shmtensor_receivers", sum(len(channel.receivers) for channel in channels), *labels)
    put("shmtensor_memory_bytes", sum(channel.nbytes for channel in channels), *labels)
    put("shmtensor_depth", max(channel.depth for channel in channels), *labels)
    put("shmtensor_oldest_unread_seconds", max(channel.oldest_unread for channel in channels), *labels)
    hows = sorted({it.how for channel in channels for it in channel.holdings})
    for how in hows:
        those = [it for channel in channels for it in channel.holdings if it.how == how]
        put("shmtensor_held_messages", sum(it.messages for it in those), *labels, how)
        put("shmtensor_held_bytes", sum(it.nbytes for it in those), *labels, how)
        put("shmtensor_oldest_held_seconds", max(it.oldest for it in those), *labels, how)
    for channel in channels:
        for member in channel.members:
            if member.alive:
                whose = str(member.pid), member.process, member.label, member.group, f"{member.uid:016x}"
                _of_member(put, (*labels, *whose), member)


def _of_member(put: Any, labels: tuple[str, ...], member: MemberInfo) -> None:
    if member.delivery == "all":
        put("shmtensor_unread_messages", member.unread, *labels)
    for name, (field, _) in (_OF_SENDERS if member.role == "sender" else _OF_RECEIVERS).items():
        put(name, getattr(member, field), *labels)
    if member.role == "sender":
        put("shmtensor_slots", sum(ring.slots for ring in member.rings), *labels)
        put("shmtensor_slots_used", sum(ring.slots_used for ring in member.rings), *labels)
        if has_newest(member):
            put("shmtensor_newest_message_age_seconds", member.newest_age, *labels)
