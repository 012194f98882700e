"""The results of `statistics()`: frozen snapshots, each field documented."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SenderStatistics:
    """A sender's counters since it was created."""

    sent: int
    """Messages that `send` or a loan published."""
    sent_bytes: int
    """Payload bytes of these."""
    dropped: int
    """Messages that `full="drop"` threw away because no slot was free."""
    waits: int
    """How often a send had to sleep until a slot was free."""
    doorbells: int
    """Wake-ups sent to sleeping receivers."""
    rings: int
    """Rings that the sender has created."""
    slots: int
    """Slots of all rings together."""
    slots_busy: int
    """Slots whose message a receiver still needs, and slots on loan. Not those whose message only a subscriber with
    `delivery="latest"` may still read: a newer message may replace it."""
    ring_bytes: int
    """Shared memory of all rings, bytes."""
    receivers: int
    """Members that receive what is sent now."""
    dead_receivers: int
    """Receivers that were found dead while this sender waited for them."""
    pinned_bytes: int = 0
    """Bytes of the rings that are pinned for CUDA copies in this process."""
    pin_failure: str = ""
    """Why CUDA copies are pageable although pinning was wanted; empty if they are not."""
    copying: int = 0
    """Copies from or to a CUDA device in flight."""


@dataclass(frozen=True)
class ReceiverStatistics:
    """A receiver's counters since it was created."""

    received: int
    """Messages that `recv` returned."""
    received_bytes: int
    """Payload bytes of these."""
    missed: int
    """With `delivery="latest"`: messages that were skipped because a newer one was there."""
    redelivered: int
    """Work queues and groups: messages received with `attempt` above 1."""
    abandoned: int
    """Work queues and groups: messages dropped here because they had used up `max_attempts`."""
    bad_records: int
    """Messages that were skipped because their slot descriptor is damaged; fan-out: also those with tensors, where
    torch is not installed."""
    bad_doorbells: int
    """Wake-up messages in the inbox that were not valid."""
    sleeps: int
    """How often `recv` went to sleep."""
    ticks: int
    """How often such a sleep ended by the regular liveness check (every 0.25 s) instead of a wake-up."""
    late: int
    """Liveness checks that found a message: a wake-up was lost, or a sender died before it sent one."""
    senders: int
    """Senders attached now."""
    behind: int
    """Messages published and not received so far, of the senders that this receiver is attached to."""
    leases: int
    """Messages whose slots are held by living views."""
    pinned_bytes: int = 0
    """Bytes of the rings that are pinned for CUDA copies in this process."""
    pin_failure: str = ""
    """Why CUDA copies are pageable although pinning was wanted; empty if they are not."""
    copying: int = 0
    """Copies from or to a CUDA device in flight."""


@dataclass(frozen=True)
class ClientStatistics:
    """A client's counters since it was created."""

    requests: int
    """Requests that were sent."""
    replies: int
    """Of these, answered with a value."""
    errors: int
    """Ended by an error that a server sent, or by a server's death."""
    cancelled: int
    """Cancelled by a future, by Ctrl-C or by a `map` that ended early."""
    expired: int
    """Ended by their time-out."""
    duplicates: int
    """Replies that were dropped: to cancelled requests, or from a second server after the first one had died."""
    outstanding: int
    """Requests without a reply so far."""
    servers: int
    """Servers that are alive now. A killed server is not counted, so this may be used for health checks."""
    request_bytes: int
    """Payload bytes of all requests."""
    reply_bytes: int
    """Payload bytes of all replies."""


@dataclass(frozen=True)
class ServerStatistics:
    """A server's counters since it was created."""

    taken: int
    """Requests taken, those that were not started included."""
    replied: int
    """Of these, answered with a value."""
    failed: int
    """Answered with an error."""
    expired: int
    """Not started, because their time-out had passed."""
    cancelled: int
    """Not started, or not answered, because the client had cancelled them."""
    dropped: int
    """Dropped without an answer, or with an answer that had no room; their clients get an error."""
    retried: int
    """Taken after another server died with them."""
    unfinished: int
    """Taken and not answered yet."""
    clients: int
    """Clients that this server has replied to and that are still there."""


@dataclass(frozen=True)
class WorkerStatistics:
    """One worker of a `WorkerPool`, all its processes so far together."""

    worker: int
    """Its index in the pool, from 0."""
    pid: int
    """Process id of its process, 0 while there is none: it died, and is restarted later."""
    alive: bool
    """Whether it has a process that has not ended."""
    ready: bool
    """Whether its process takes requests: `setup` has returned."""
    restarts: int
    """How often a process of this index was started again after one had died, or could not start. Not by reloads."""
    generation: int
    """Reloads of the pool before its process was started: 0 for one of the first."""
    handled: int
    """Requests that were answered, by all processes that have had this index: restarts and reloads go on counting.
    Those of a batch are counted one by one."""
    errors: int
    """Of these, answered with an error."""
    busy: float | None
    """Seconds since it began its current request; None if it has none."""
    last_error: str
    """What the handler raised last, or how a process died, or why it could not start, of all processes that have had
    this index; empty if nothing has happened."""


@dataclass(frozen=True)
class PoolStatistics:
    """The state of a `WorkerPool`."""

    workers: tuple[WorkerStatistics, ...]
    """One entry for each worker, by index."""
    ready: int
    """How many of them take requests."""
    waiting: int
    """Requests to the service that no worker has taken: of all living clients, whichever pool or server they wait
    for."""
    reloads: int
    """Reloads that were begun."""
    reloading: bool
    """Whether a reload is in progress."""


@dataclass(frozen=True)
class WriterStatistics:
    """A checkpoint writer's counters since it was created."""

    saves: int
    """Saves that were staged, or are being staged."""
    durable: int
    """Of these, safe on disk."""
    complete: int
    """Of these, complete under their name, but not known to be safe: `SaveHandle.durable` says why."""
    failed: int
    """Of these, not written: `SaveHandle.durable` says why."""
    replaced: int
    """Of these, taken back by `busy="replace"` before they were written."""
    skipped: int
    """Calls of `save` that saved nothing, by `busy="skip"`."""
    deleted: int
    """Old checkpoints that were removed by the rules `keep_last`, `keep_every` and `keep_best`."""
    restarts: int
    """How often the writing process was started again."""
    memory_bytes: int
    """Shared memory of the slots, bytes."""
    pid: int
    """Process id of the writing process, 0 while there is none."""
    uploaded: int = 0
    """With `upload=`: checkpoints that were uploaded, those of earlier writers included."""
    uploading: int = 0
    """Saves that are durable, and being uploaded or waiting for that."""


@dataclass(frozen=True)
class RelayStatistics:
    """The counters of one channel of a relay since it was made."""

    state: str
    """Near: `"seeking"` (no far relay has answered), `"refused"`, `"open"`, `"failed"` or `"closed"`. Far:
    `"listening"`, or `"open"` if a near relay is there."""
    messages: int
    """Near: messages or requests that were taken to be sent. Far: those that were put into rings here."""
    nbytes: int
    """Payload bytes of these."""
    acknowledged: int
    """Messages that lie in a ring of the far host; of a work queue: that a consumer there has done; of a service:
    requests that have ended."""
    in_flight: int
    """Near: messages that are not acknowledged, and hold their slots, or requests that have not ended. Far: of a work
    queue, those that no consumer has done."""
    resent: int
    """Near: messages that were sent again after a reconnection."""
    duplicates: int
    """Far: messages that came again and were dropped."""
    connections: int
    """Near: how often a far relay was found. Far: how many near relays have come."""
    reason: str
    """Near: why it is `"refused"` or `"failed"`, or looks for its far relay again, or which resource it lacks, such as
    open files, and waits for; else empty."""
    refused: int
    """Far: how often a near relay was refused."""
    bad_frames: int
    """Frames, or messages in them, that were damaged or hostile, and were dropped."""
