"""The part of Zenoh that a relay uses: a session, keys, puts that wait instead of dropping, liveliness tokens.

The only module that imports `zenoh`, when the first relay is made.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from ..errors import ArgumentError, ArgumentTypeError, DependencyError, ResourceError
from ..options import how_to_install
from .frames import MOST_FRAME
from .threads import own

log = logging.getLogger("shmtensor.relay")

_LEASE_S: Final = 2.0
"""Seconds without a sign of life after which a connection counts as broken. TCP would try again only 3 s after what was
lost first, when it has tried three times."""
_OPEN_S: Final = 1.9
"""Seconds for an attempt to connect. A host that comes back sees an attempt within a second: TCP tries each second, and
the next attempt begins 0.1 s after this one."""
_ENDPOINT = re.compile(r"(?P<protocol>[a-z][a-z0-9_+.-]*)/(?P<address>[^\s#?]+)(?P<rest>[#?]\S*)?")
_THREADS: Final = "(rx: (worker_threads: 8))"
"""Closing a broken TCP connection keeps one of the threads that read, until what was not sent is acknowledged or 10 s
are over: of Zenoh's two, the other one often waits for it, and with them the connection that has come in its place."""
_QUEUED: Final = 16
"""Batches of 64 KiB, as many as Zenoh allows, that wait for the thread that writes to a connection. With Zenoh's two, a
put of 1 MiB waits for that thread eight times."""
_WITH_PORT: Final = {"tcp", "udp", "tls", "quic", "ws"}
_OVER_TCP: Final = {"tcp", "tls", "ws"}
_KNOCK_S: Final = 1.0
_FILES: Final = ("_certificate", "_private_key")
"""Ends of the settings for TLS that name files."""

OnFrame = Callable[[bytes, Any], None]
"""(head, body): the body has a length and `to_bytes()`."""

# what Zenoh does unless the user's configuration says something else than Zenoh's own default
_DEFAULTS: Final[dict[str, Any]] = {
    "mode": "peer",
    "scouting/gossip/enabled": False,
    "scouting/delay": 0,
    "connect/timeout_ms": -1,
    "connect/exit_on_failure": False,
    "connect/retry": {"period_init_ms": 100, "period_max_ms": 100, "period_increase_factor": 1.0},
    "transport/link/tx/lease": round(_LEASE_S * 1000),
    "transport/unicast/open_timeout": round(_OPEN_S * 1000),
    "transport/unicast/accept_timeout": round(_OPEN_S * 1000),
    "transport/link/rx/max_message_size": MOST_FRAME,
    "transport/link/tx/queue/size/data": _QUEUED,
}


def zenoh_module() -> Any:
    """The package. Raises `DependencyError` if it is missing."""
    os.environ.setdefault("ZENOH_RUNTIME", _THREADS)  # it looks when it is first used
    try:
        import zenoh
    except ImportError:
        raise DependencyError(
            f"a relay needs Zenoh: {how_to_install('relay')} (or: pip install eclipse-zenoh)", name="zenoh"
        ) from None
    return zenoh


def check_endpoint(endpoint: object, what: str) -> str:
    """Return an endpoint such as `tcp/192.0.2.7:7447`. Raises `ArgumentError` or `ArgumentTypeError`."""
    if not isinstance(endpoint, str):
        raise ArgumentTypeError(f"{what} is an endpoint like 'tcp/192.0.2.7:7447', not {type(endpoint).__name__}")
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None:
        raise ArgumentError(f"{what}={endpoint!r}: an endpoint is PROTOCOL/ADDRESS, like tcp/192.0.2.7:7447")
    if match["protocol"] in _WITH_PORT:
        host, colon, port = match["address"].rpartition(":")
        if not colon or not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise ArgumentError(
                f"{what}={endpoint!r}: {match['protocol']} needs a host and a port from 1 to 65535, like "
                f"{match['protocol']}/192.0.2.7:7447 or {match['protocol']}/[2001:db8::7]:7447"
            )
    return endpoint


def why_silent(endpoint: str) -> str:
    """Why no relay answers at an endpoint, as far as a connection can tell.

    It takes up to a second, or as long as looking up the host's name does.
    """
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or match["protocol"] not in _OVER_TCP:
        return f"nothing has come from {endpoint}"
    host, _, port = match["address"].rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S):
            pass
    except socket.gaierror:
        return f"{endpoint}: the name of this host is not known"
    except ConnectionRefusedError:
        return f"{endpoint}: nothing listens there"
    except OSError as error:
        return f"{endpoint} cannot be reached: {error.strerror or error}"
    return (
        f"{endpoint}: something listens there, and is no relay of this channel, or speaks another protocol, or its "
        "certificates are refused"
    )


class Sender:
    """Sends frames under one key, which it withdraws with its last reference, or when no other thread sends by it: by
    `close`."""

    def __init__(self, publisher: Any, error: type[Exception]) -> None:
        self._publisher, self._error = publisher, error

    def send(self, head: bytes, body: bytes = b"") -> None:
        """Send a frame; wait while Zenoh's queue is full. It may be lost with a connection."""
        with contextlib.suppress(self._error):  # the session is closed
            self._publisher.put(body, attachment=head)

    def close(self) -> None:
        """Withdraw the key. Idempotent. While another thread sends, Zenoh refuses it."""
        with contextlib.suppress(self._error):
            self._publisher.undeclare()


class Session:
    """A Zenoh session. Its callbacks come in Zenoh's threads; they must not wait, and must not raise.

    Args:
        to, listen: endpoints to connect to, and to listen at.
        scout: whether to look for peers by multicast.
        config: path of a Zenoh configuration file (JSON5), or None.
    """

    def __init__(
        self, *, to: Sequence[str], listen: Sequence[str], scout: bool, config: str | os.PathLike[str] | None
    ) -> None:
        zenoh = zenoh_module()
        self._zenoh, self.to = zenoh, tuple(to)
        settings = _configuration(zenoh, to=to, listen=listen, scout=scout, config=config)
        try:
            self._session = zenoh.open(settings)
        except zenoh.ZError as error:
            where = ", ".join([*listen, *to]) or "scouting"
            raise ResourceError(
                errno.EADDRNOTAVAIL,
                f"no relay at {where}: {_in_one_line(error)}: is the address this host's, and free?",
            ) from None
        self._kept: list[Any] = []
        self._callbacks: list[_Guarded] = []

    def sender(self, key: str) -> Sender:
        """A `Sender` for a key."""
        zenoh = self._zenoh
        publisher = self._session.declare_publisher(
            key, congestion_control=zenoh.CongestionControl.BLOCK, priority=zenoh.Priority.DATA,
            reliability=zenoh.Reliability.RELIABLE,
        )  # fmt: skip
        return Sender(publisher, zenoh.ZError)

    def answer(self, key: str, head: bytes, body: bytes = b"") -> None:
        """Send one frame under a key, or lose it if Zenoh's queue is full: so a callback may call this."""
        zenoh = self._zenoh
        with contextlib.suppress(zenoh.ZError):  # the session is closed
            self._session.put(
                key,
                body,
                attachment=head,
                congestion_control=zenoh.CongestionControl.DROP,
                priority=zenoh.Priority.DATA,
            )

    def receive(self, key: str, call: OnFrame) -> None:
        """Call `call(head, body)` for each frame under a key."""

        def receive(sample: Any) -> None:
            head = sample.attachment
            call(b"" if head is None else head.to_bytes(), sample.payload)

        self._kept.append(self._session.declare_subscriber(key, self._guarded(receive)))

    def appear(self, key: str) -> None:
        """Declare a token: others see it as long as this session lives and can be reached."""
        self._kept.append(self._session.liveliness().declare_token(key))

    def watch(self, key: str, call: Callable[[str, bool], None]) -> None:
        """Call `call(key, is_there)` for each token that comes or goes, and for those that are there."""
        put = self._zenoh.SampleKind.PUT

        def changed(sample: Any) -> None:
            call(str(sample.key_expr), sample.kind == put)

        self._kept.append(self._session.liveliness().declare_subscriber(key, self._guarded(changed), history=True))

    def _guarded(self, call: Callable[[Any], None]) -> _Guarded:
        self._callbacks.append(_Guarded(call))
        return self._callbacks[-1]

    def close(self) -> None:
        """End the session. Idempotent."""
        with contextlib.suppress(self._zenoh.ZError):
            self._session.close()
        while self._callbacks:
            self._callbacks.pop().end()
        self._kept.clear()


class _Guarded:
    """A callback that logs what it raises: nobody could catch it in Zenoh's thread.

    Zenoh may keep it for a while after the session was closed, and may be calling it: `end` waits for that, and drops
    the callback.
    """

    def __init__(self, call: Callable[[Any], None]) -> None:
        self._call: Callable[[Any], None] | None = call
        self._running = threading.RLock()  # again in a finalizer that closes the session

    def __call__(self, sample: Any) -> None:
        with self._running, own():
            self._handle(sample)

    def _handle(self, sample: Any) -> None:
        try:
            if self._call is not None:
                self._call(sample)
        except Exception:
            log.exception("relay: a frame was lost by an error")

    def end(self) -> None:
        """Call nothing more. When this returns, nothing is called any more."""
        with self._running:
            self._call = None


def _in_one_line(error: Exception) -> str:
    """What Zenoh says, without the place in its own source: of a picture of a file, the place and what is wrong."""
    lines = str(error).partition(" at /")[0].splitlines()
    return " ".join(dict.fromkeys(line.lstrip(" ->=") for line in (lines[0], lines[-1])))


def _configuration(
    zenoh: Any, *, to: Sequence[str], listen: Sequence[str], scout: bool, config: str | os.PathLike[str] | None
) -> Any:
    """The user's configuration with what a relay needs. Raises `ArgumentError`, `ResourceError`."""
    if config is None:
        made = zenoh.Config()
    else:
        path = os.fspath(config)
        if not os.path.isfile(path):
            raise ResourceError(errno.ENOENT, f"config={path!r}: there is no such file")
        try:
            made = zenoh.Config.from_file(path)
        except zenoh.ZError as error:
            raise ArgumentError(f"config={path!r} is no Zenoh configuration: {_in_one_line(error)}") from None

        for key, value in (json.loads(made.get_json("transport/link/tls")) or {}).items():
            if key.endswith(_FILES) and isinstance(value, str) and not os.access(value, os.R_OK):
                raise ResourceError(errno.ENOENT, f"config={path!r}: {key} names {value!r}, which cannot be read")

    def insert(key: str, value: Any) -> None:
        try:
            made.insert_json5(key, json.dumps(value))
        except zenoh.ZError as error:
            raise ArgumentError(f"Zenoh does not take {key} = {value!r}: {_in_one_line(error)}") from None

    own = zenoh.Config()
    for key, value in _DEFAULTS.items():
        if made.get_json(key) == own.get_json(key):
            insert(key, value)
    insert("transport/shared_memory/enabled", False)  # its files would stay in /dev/shm after a kill
    if scout or config is None or made.get_json("scouting/multicast/enabled") == "null":
        insert("scouting/multicast/enabled", scout)
    if to:
        insert("connect/endpoints", list(to))
    if listen:
        insert("listen/endpoints", list(listen))
    elif made.get_json("listen/endpoints") == own.get_json("listen/endpoints"):
        insert("listen/endpoints", [])  # Zenoh would listen at a port of each interface, without TLS
    return made
