"""What the library is to reach, judged by the rows of one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from . import savers
from .measure import Row, ratios, summarize
from .sizes import KIB, MIB
from .transports import PICKLE, SHMTENSOR_QUEUE
from .workloads import (
    cuda_copies,
    cuda_handover,
    cuda_prefetch,
    cuda_saving,
    default_arguments,
    executor,
    messages,
    observing,
    pools,
    queue,
    queue_items,
    relay,
    remote,
    saving,
)
from .workloads.default_arguments import (
    BUSY,
    FAN_OUT,
    JOBS,
    ONE,
    QUEUE,
    RATE,
    SIXTEEN,
    SOCKETS,
    SPINNING,
    STANDARD,
    TRIP,
    TWO,
)

Key = tuple[str, str]
"""Workload and row."""


@dataclass(frozen=True)
class Target:
    """A row, or its ratio to another one, and the limit."""

    what: str
    row: Key
    relation: str | None
    """`"<="`, `">="`; None: it is only reported."""
    limit: float | None
    against: Key | None = None
    every: bool = False
    """Whether it holds for each round, so that the worst one is judged, not the median of all."""

    def met(self, value: float) -> bool | None:
        if self.relation is None or self.limit is None:
            return None
        return value <= self.limit if self.relation == "<=" else value >= self.limit

    @property
    def text(self) -> str:
        if self.relation is None:
            return "report it"
        unit = "" if self.against is None else " ×"
        each = " in every round" if self.every else ""
        return f"{'≤' if self.relation == '<=' else '≥'} {self.limit:g}{unit}{each}"

    def judged(self, median: float, rounds: Sequence[float]) -> float:
        """The value that counts: the median, or the worst one of the rounds."""
        if not self.every:
            return median
        return max(rounds) if self.relation == "<=" else min(rounds)


@dataclass(frozen=True)
class Verdict:
    """What became of a target."""

    what: str
    target: str
    measured: float | None
    beside: float | None
    """The median of the row that it is compared with."""
    against: str | None
    unit: str
    value: float | None
    """What is judged: the median of the rounds' ratios, or the worst of them, or `measured`."""
    rounds: list[float] = field(default_factory=list)
    """The ratio, or the median, of each round."""
    met: bool | None = None
    open: str | None = None
    """Why it could not be judged."""
    workload: str = ""


_TRIP, _ASLEEP, _ONE_WAY, _LARGE, _DICT, _FAN = "round-trip", "asleep", "throughput", "large", "dict", "fan-out"
_RPC = "request-reply"
_TRIP_1K = (_TRIP, "shmtensor, 1 KiB")
_RATE = "thousand messages/s: "
_MAPPED, _USED = "call, page cache: shmtensor, mapped, ", "call + sum of every element, "


def _queue(metric: str, transport: str, item: str = queue.TENSOR) -> Key:
    return "queue", f"{metric}, {transport}, {item}"


def _save(metric: str, what: str, way: str = saving.OURS) -> Key:
    return "saving", saving.row_name(metric, way, what)


def _relay(what: str, nbytes: int, network: str) -> Key:
    return "relay", relay.row_name(what, nbytes, network)


def _rivals_of_relay(nbytes: int, network: str) -> list[tuple[str, float]]:
    """Rivals and the ratio that is wanted beside each; Ray's nodes are joined by loopback."""
    rivals = [(relay.BARE, 0.7 if nbytes == KIB else 0.9)]
    if network == relay.LOOPBACK and nbytes in (KIB, 16 * MIB):
        rivals += [(call, 5 if nbytes == KIB else 1.5) for call in (relay.CALL_FAR, relay.CALL)]
    return rivals


def _copy(way: str, metric: str) -> Key:
    return "cuda-copies", cuda_copies.row_name(way, metric, cuda_copies.QUICK)


_UNASKED = executor.arena_line("segment pool")
_CALLS: tuple[tuple[str, str, Callable[[str], str]], ...] = (
    (executor.LOOP, executor.LOOP, str),
    (executor.PIPELINE, executor.PIPELINE, str),
    (executor.LOOP, "map in chunks", executor.map_line),
)
"""How calls are given, and which line of the tables that is."""

_DEFAULTS: tuple[tuple[str, str, default_arguments.Kind, default_arguments.Kind, str, float], ...] = (
    (TWO, RATE, FAN_OUT, SOCKETS, ">=", 2),
    (TWO, RATE, JOBS, SOCKETS, ">=", 2),
    (TWO, RATE, SIXTEEN, SOCKETS, ">=", 1),
    (BUSY, RATE, FAN_OUT, SOCKETS, ">=", 1),
    (BUSY, RATE, JOBS, SOCKETS, ">=", 1),
    (ONE, RATE, FAN_OUT, SOCKETS, ">=", 0.8),
    (ONE, RATE, JOBS, SOCKETS, ">=", 0.8),
    (ONE, RATE, QUEUE, STANDARD, ">=", 1.2),
    (ONE, TRIP, FAN_OUT, SOCKETS, "<=", 1.25),
    (ONE, TRIP, SPINNING, SOCKETS, "<=", 4),
)

_START = "open + first send + first recv: ring of 256 MiB, "

TARGETS: tuple[Target, ...] = (
    Target("1 KiB round trip, awake", _TRIP_1K, "<=", 0.5, (_TRIP, "iceoryx2, 1 KiB")),
    Target("1 KiB round trip, awake", _TRIP_1K, "<=", 0.2, (_TRIP, "vLLM MessageQueue, 1 KiB")),
    Target("1 KiB round trip, awake", _TRIP_1K, "<=", 0.05, (_TRIP, "torch Queue, file_descriptor, 1 KiB")),
    Target("1 KiB round trip, awake", _TRIP_1K, "<=", 0.05, (_TRIP, "torch Queue, file_system, 1 KiB")),
    Target("1 KiB one way, sustained", (_ONE_WAY, f"{_RATE}shmtensor, 1 KiB"), ">=", 400),
    Target(
        "1 KiB one way, sustained", (_ONE_WAY, f"{_RATE}shmtensor, 1 KiB"), ">=", 3,
        (_ONE_WAY, f"{_RATE}faster-fifo, 1 KiB"),
    ),
    Target("1 KiB round trip, asleep", (_ASLEEP, "shmtensor, 1 KiB"), "<=", 1.1, (_ASLEEP, "pyzmq ipc, 1 KiB")),
    *(
        Target(
            f"1 KiB, default arguments, {where}, {what}: {kind.name}",
            ("default-arguments", default_arguments.case_name(where, what, kind)), relation, limit,
            ("default-arguments", default_arguments.case_name(where, what, beside)),
        )
        for where, what, kind, beside, relation, limit in _DEFAULTS
    ),
    *(
        Target(
            f"1 KiB, default arguments, {TWO}, {RATE}: {kind.name}, slowest",
            ("default-arguments", default_arguments.case_name(TWO, RATE, kind)), ">=", 1,
            ("default-arguments", default_arguments.case_name(TWO, RATE, SOCKETS)), every=True,
        )
        for kind in (FAN_OUT, JOBS)
    ),
    *(
        target
        for kind in messages.KINDS
        for target in (
            *(
                Target(
                    f"{kind}, one way", ("messages", messages.rate_name(kind, "shmtensor")), ">=", 3,
                    ("messages", messages.rate_name(kind, rival)),
                )
                for rival in messages.rivals(kind)
            ),
            Target(
                f"{kind}, in one process, of what it may cost", ("messages", messages.here_name(kind, messages.SHARE)),
                "<=", 1,
            ),
        )
    ),
    *(
        Target(
            f"Queue, {kind}", ("queue-items", queue_items.row_name(kind, SHMTENSOR_QUEUE)), ">=", limit,
            ("queue-items", queue_items.row_name(kind, rival)),
        )
        for kinds, rivals, limit in (
            ((*queue_items.KINDS, queue_items.BACKLOG), (PICKLE,), 1.5), (queue_items.TENSORS, queue_items.TORCHS, 20)
        )
        for kind in kinds
        for rival in rivals
    ),
    Target("64 MiB send, 1 torch thread", (_LARGE, "send, 1 thread"), "<=", 1.05, (_LARGE, "bare copy_, 1 thread")),
    Target("64 MiB send, 2 torch threads", (_LARGE, "send, 2 threads"), "<=", 1.05, (_LARGE, "bare copy_, 2 threads")),
    Target("64 MiB send, 2 torch threads: cores in use", (_LARGE, "cores that send uses, 2 threads"), ">=", 1.5),
    Target("dict of 300 tensors, send + recv", (_DICT, "send + recv, 300"), "<=", 2, (_DICT, "copy_ one by one, 300")),
    Target(
        "dict of 300 tensors, round trip", (_DICT, "round trip, shmtensor, 300"), "<=", 0.05,
        (_DICT, "round trip, torch Queue, file_descriptor, 300"),
    ),
    Target("fan-out of 6 MiB to 8, CPU", (_FAN, "cpu, shmtensor, 8"), "<=", 1.2, (_FAN, "cpu, shmtensor, 1")),
    Target("fan-out of 6 MiB to 8, wall time", (_FAN, "wall, shmtensor, 8"), "<=", 1.2, (_FAN, "wall, shmtensor, 1")),
    Target("first message, ring of 256 MiB", ("cold", f"{_START}slot_bytes given"), None, None),
    Target("first message, ring of 256 MiB made by it", ("cold", f"{_START}made at the first send"), None, None),
    Target("recv of 64 MiB, beside 1 KiB", (_LARGE, "recv 64 MiB"), "<=", 1.25, (_LARGE, "recv 1 KiB")),
    Target("loan of 64 MiB, beside 1 KiB", (_LARGE, "loan 64 MiB"), "<=", 1.25, (_LARGE, "loan 1 KiB")),
    Target("request of 1 KiB, awake", (_RPC, "request, 1 KiB"), "<=", 2, (_RPC, "bare fan-out round trip, 1 KiB")),
    Target(
        "request of 1 KiB, awake", (_RPC, "request, 1 KiB"), "<=", 0.1,
        (_RPC, "pyzmq ROUTER/DEALER + torch.save, 1 KiB"),
    ),
    Target("request of 1 KiB, awake", (_RPC, "request, 1 KiB"), "<=", 0.1, (_RPC, "multiprocessing manager, 1 KiB")),
    Target("4 clients, 2 servers of 1 ms: efficiency", (_RPC, "efficiency, 4 clients, 2 servers, 1 ms"), ">=", 95),
    Target(
        "batched server of a small model, images/s", (_RPC, "batched server, small convolution"), ">=", 0.9,
        (_RPC, "loop that batches in one process"),
    ),
    *(
        target
        for what, text in ((saving.LARGE, "1 GiB"), (saving.MODEL, "GPT-2 and its optimizer"))
        for target in (
            Target(
                f"save of {text} into warm slots", _save("stall", what), "<=", 1.2, _save("copy", what)
            ),
            *(
                Target(f"save of {text} into warm slots", _save("stall", what), "<=", 0.2, _save("stall", what, way))
                for way in (savers.THREADS, savers.PROCESS)
            ),
            Target(f"{text} until it is durable: speed", _save("dd", what), ">=", 0.85, _save("durable", what)),
        )
    ),
    *(
        target
        for what, text in ((saving.LARGE, "1 GiB"), (saving.MODEL, "GPT-2 and its optimizer"))
        for target in (
            Target(
                f"DCP async_save of {text} with shmtensor: the caller", _save("stall", what, saving.DCP), "<=", 1.2,
                _save("copy", what, saving.DCP),
            ),
            Target(
                f"DCP async_save of {text} with shmtensor: the caller", _save("stall", what, saving.DCP), "<=", 0.35,
                _save("stall", what, savers.PROCESS),
            ),
            *(
                Target(
                    f"DCP async_save of {text} with shmtensor: until it is durable", _save("durable", what, saving.DCP),
                    "<=", 1, _save("durable", what, way),
                )
                for way in (savers.THREADS, savers.PROCESS)
            ),
        )
    ),
    Target(
        "encrypted save of 1 GiB: speed beside a plain one", ("saving", saving.encrypted_row("plain")), ">=", 0.7,
        ("saving", saving.encrypted_row("encrypted")),
    ),
    *(
        Target(
            f"one slice of 1 % of {what} checkpoint of 1 GiB: read of the file",
            ("saving", saving.encrypted_row(f"slice, {way}")), "<=", 2,
        )
        for what, way in (("an encrypted", "encrypted"), ("a plain", "plain"))
    ),
    Target(
        "ten training steps after a save", ("saving", "ten training steps after a save"), "<=", 1.1,
        ("saving", "ten training steps alone"),
    ),
    Target(
        "saving 1 GiB with memory=256 MiB: memory above the idle writer",
        ("saving", "above the idle writer: memory, 1024 MiB through 256 MiB"), "<=", 256 + 64,
    ),
    Target(
        "mapped checkpoint of 1 GiB, beside 16 MiB", ("loading", f"{_MAPPED}1024 MiB"), "<=", 1.5,
        ("loading", f"{_MAPPED}16 MiB"),
    ),
    *(
        Target(
            f"checkpoint of 1 GiB {how} and used, {place}",
            ("loading", f"{_USED}{place}: shmtensor, {how}, 1024 MiB"), "<=", 1,
            ("loading", f"{_USED}{place}: {rival}, 1024 MiB"),
        )
        for place, how, rival in (
            ("page cache", "mapped", "safetensors load_file"), ("page cache", "read", "safetensors load_file, cloned"),
            ("page cache", "read", "tensorizer"),
            ("disk", "mapped", "safetensors load_file"), ("disk", "read", "safetensors load_file"),
            ("disk", "read", "safetensors load_file, cloned"), ("disk", "read", "tensorizer"),
        )
    ),
    Target(  # which copies nothing: like with like is what is mapped beside it, and what is read beside its clones
        "checkpoint of 1 GiB read and used, page cache: a copy beside a mapping",
        ("loading", f"{_USED}page cache: shmtensor, read, 1024 MiB"), None, None,
        ("loading", f"{_USED}page cache: safetensors load_file, 1024 MiB"),
    ),
    Target(
        "checkpoint of 1 GiB read, disk, beside the disk's own speed",
        ("loading", "call, disk: shmtensor, read, 1024 MiB"), None, None, ("loading", "call, disk: dd, 1024 MiB"),
    ),
    *(
        Target(
            f"load from the {kind} server of this machine, {way.split()[-1]}, beside {rival}: time",
            ("remote", remote.row_name(kind, way)), "<=", 1, ("remote", remote.row_name(kind, rival)),
        )
        for kind, way, rival in (
            (remote.HTTP, remote.LOAD, remote.GET), (remote.HTTP, remote.INTO, remote.GET),
            (remote.HTTP, remote.LOAD, remote.TENSORIZER),
            (remote.S3, remote.LOAD, remote.GET), (remote.S3, remote.INTO, remote.GET),
            (remote.S3, remote.LOAD, remote.TENSORIZER),
        )
    ),
    *(
        Target(
            f"{relay.row_name(relay.OURS, nbytes, name)}: messages/s", _relay(relay.OURS, nbytes, name), ">=", limit,
            _relay(rival, nbytes, name),
        )
        for name in (relay.LOOPBACK, relay.VETH)
        for nbytes in relay.SIZES
        for rival, limit in _rivals_of_relay(nbytes, name)
    ),
    *(
        Target(f"relay, {relay.idle_name(1, side)}", ("relay", relay.idle_name(1, side)), "<=", 0.5)
        for side in ("near", "far")
    ),
    Target(f"relay, {relay.BESIDE}", ("relay", relay.BESIDE), ">=", 0.8, ("relay", relay.ALONE)),
    Target(remote.BESIDE, ("remote", remote.BESIDE), "<=", 1.05, ("remote", remote.ALONE)),
    Target(remote.MEMORY, ("remote", remote.MEMORY), "<=", 128),
    *(
        Target(
            f"{observing.traced(nbytes)}: rate beside that without",
            ("observing", observing.traced(nbytes)), ">=", 0.95, ("observing", observing.plain(nbytes)),
        )
        for nbytes in observing.SIZES
    ),
    *(
        Target(
            f"{observing.traced_whole(nbytes)}: rate beside that without",
            ("observing", observing.traced_whole(nbytes)), None, None, ("observing", observing.plain(nbytes)),
        )
        for nbytes in observing.SIZES
    ),
    *(
        Target(
            f"{pools.row_name(pools.OURS, way, kind)}: {what}",
            ("pools", pools.row_name(pools.OURS, way, kind)), None, None,
            ("pools", pools.row_name(pools.STANDARD, way, kind)),
        )
        for way, what in ((pools.APPLY, "time"), (pools.IMAP, "rate"), (pools.ROUND_TRIP, "time"))
        for kind in pools.KINDS
    ),
    Target(observing.TOP, ("observing", observing.TOP), "<=", 1.0),
    Target(observing.TOP_ACTIVE, ("observing", observing.TOP_ACTIVE), "<=", 1.0),
    Target(observing.DEATH, ("observing", observing.DEATH), "<=", 1.0),
    Target("4 idle consumers together", ("idle", "4 consumers"), "<=", 1.0),
    Target(
        "Queue, tensor of 1 MiB, one way", _queue("rate", "shmtensor.Queue"), ">=", 5,
        _queue("rate", "multiprocessing.Queue"),
    ),
    Target(
        "Queue, tensor of 1 MiB, one way", _queue("rate", "shmtensor.Queue"), ">=", 2,
        _queue("rate", "torch Queue, file_descriptor"),
    ),
    Target(
        "Queue, tensor of 1 MiB, round trip", _queue("round trip", "shmtensor.Queue"), "<=", 0.2,
        _queue("round trip", "multiprocessing.Queue"),
    ),
    Target(
        "Queue, tensor of 1 MiB, round trip", _queue("round trip", "shmtensor.Queue"), "<=", 0.5,
        _queue("round trip", "torch Queue, file_descriptor"),
    ),
    Target(
        "Queue, plain objects, one way", _queue("rate", "shmtensor.Queue", queue.OBJECTS), ">=", 0.833,
        _queue("rate", "multiprocessing.Queue", queue.OBJECTS),
    ),
    Target(
        "Queue, plain objects, round trip", _queue("round trip", "shmtensor.Queue", queue.OBJECTS), "<=", 1.2,
        _queue("round trip", "multiprocessing.Queue", queue.OBJECTS),
    ),
    Target(
        "DataLoader, 2 workers, batches of 32 MiB", ("dataloader", "shmtensor.get_context, 32 MiB"), ">=", 1.5,
        ("dataloader", "default, 32 MiB"),
    ),
    Target(
        "DataLoader, 2 workers, batches of 32 MiB, beside the bound by memory",
        ("dataloader", "shmtensor.get_context, 32 MiB"), None, None, ("dataloader", "stack and one copy, 32 MiB"),
    ),
    *(
        Target(
            f"ProcessPoolExecutor, npy sample, {how}, {job}",
            ("executor", executor.row_name(way, line(executor.OURS), job)), ">=", limit,
            ("executor", executor.row_name(way, line(rival), job)),
        )
        for rival, limit, jobs in (
            (executor.STANDARD, 3, executor.JOBS),
            (executor.RESULTS_BY_POOLS, 1, executor.JOBS),
            (executor.ALL_BY_POOLS, 1, (executor.BYTES,)),
        )
        for way, how, line in _CALLS
        for job in jobs
    ),
    *(
        Target(
            f"Producer in one process that loads by itself, npy sample, {way}, {job}",
            ("executor", executor.row_name(way, executor.PRODUCER, job)), ">=", 1,
            ("executor", executor.row_name(way, _UNASKED, job)),
        )
        for way in executor.LOOPS
        for job in executor.JOBS
    ),
    *(
        Target(
            f"ProcessPoolExecutor, beside a process that is asked for nothing, npy sample, {how}, {job}",
            ("executor", executor.row_name(way, line(executor.OURS), job)), None, None,
            ("executor", executor.row_name(way, _UNASKED, job)),
        )
        for way, how, line in _CALLS
        for job in executor.JOBS
    ),
    *(
        Target(f"CUDA, 64 MiB {what}, beside the link", _copy(way, cuda_copies.SLOT), ">=", 0.9, _copy(way, "link"))
        for way, what in (("receive", "from a pinned slot to the device"), ("send", "from the device into a slot"))
    ),
    *(
        Target("CUDA, 64 MiB from a slot to the device", _copy("receive", cuda_copies.SLOT), None, None, rival)
        for rival in (_copy("receive", cuda_copies.PAGEABLE), _copy("receive", "pin_memory"))
    ),
    *(
        Target(
            "CUDA, hand-over on one GPU",
            ("cuda-handover", cuda_handover.row_name(cuda_handover.OURS, nbytes)), None, None,
            ("cuda-handover", cuda_handover.row_name(cuda_handover.THEIRS, nbytes)),
        )
        for nbytes in cuda_handover.SIZES
    ),
    Target(
        "CUDA, prefetched messages, copy hidden behind computing",
        ("cuda-prefetch", cuda_prefetch.row_name(cuda_prefetch.AHEAD_OF)), ">=", 0.9,
        ("cuda-prefetch", cuda_prefetch.row_name(cuda_prefetch.IDEAL)),
    ),
    *(
        Target(
            f"CUDA, save of {what}: the caller stands still",
            ("cuda-saving", cuda_saving.row_name("stall", cuda_saving.OURS, what)), None, None,
            ("cuda-saving", cuda_saving.row_name("stall", cuda_saving.THEIRS, what)),
        )
        for what in (cuda_saving.SMALL, cuda_saving.LARGE)
    ),
)  # fmt: skip


def judge(rows: Iterable[Row], targets: Sequence[Target] = TARGETS) -> list[Verdict]:
    """A verdict on each target whose workload was run."""
    found: dict[Key, Row] = {(row.workload, row.name): row for row in rows}
    workloads = {workload for workload, _ in found}
    return [_judge(target, found) for target in targets if target.row[0] in workloads]


def _judge(target: Target, rows: Mapping[Key, Row]) -> Verdict:
    row = rows.get(target.row)
    other = None if target.against is None else rows.get(target.against)
    name = None if target.against is None else target.against[1].removeprefix(_RATE)
    unit = "" if row is None else row.unit
    missing = _missing(row) or (_missing(other) and f"{name}: {_missing(other)}" if target.against else None)
    if row is None or missing:
        median = row and row.median
        return Verdict(target.what, target.text, median, None, name, unit, None, open=missing, workload=target.row[0])
    if other is None:
        value = None if row.median is None else target.judged(row.median, row.rounds)
        return Verdict(
            target.what, target.text, row.median, None, None, unit, value, row.rounds,
            None if value is None else target.met(value), workload=target.row[0],
        )  # fmt: skip
    rounds = ratios(row.rounds, other.rounds)
    value = target.judged(summarize(rounds).median, rounds)
    return Verdict(
        target.what, target.text, row.median, other.median, name, unit, value, rounds, target.met(value),
        workload=target.row[0],
    )  # fmt: skip


def _missing(row: Row | None) -> str | None:
    return "not run" if row is None else row.skipped
