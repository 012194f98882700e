"""Why a call has no value: the errors that a client raises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import PeerDied, RemoteError, TimedOut, WireError
from .notes import DIED, DROPPED, NO_ROOM, ONCE

if TYPE_CHECKING:
    from .asking import Requests
    from .call import Call


def from_reply(value: Any) -> Exception:
    """The error that a reply is."""
    try:
        return RemoteError(str(value["type"]), str(value["text"]), str(value["traceback"]))
    except (KeyError, TypeError, IndexError):
        return WireError("a reply says that it is an error, and is none")


def unanswered(requests: Requests, call: Call, unread: WireError | None = None) -> Exception:
    """Of a request that is done and has no reply. `unread`: of the replies of a living server that cannot be read."""
    code, attempt = requests.verdict(call)
    what = f'service "{requests.name}": '
    if code == DROPPED:
        return RemoteError("Unanswered", what + "the server let go of this request without an answer")
    if code == NO_ROOM:
        return RemoteError(
            "NoRoom", what + "the server found no room for the reply: let go of earlier replies, or give it more"
        )
    if not code and unread is not None:
        return unread
    if code == DIED or call.bits & ONCE or not attempt:
        return PeerDied(what + "the server that had this request died")
    deaths = attempt - 1  # who takes it once more than may die with it does not start it
    each = f"each of the {deaths} servers that had this request" if deaths > 1 else "the server that had this request"
    return PeerDied(what + f"{each} died (max_attempts={deaths})")


def late(requests: Requests, call: Call) -> TimedOut:
    """Of a request that has expired."""
    if not requests.was_taken(call):
        state = "no server took it"
    elif requests.is_done(call):  # its lock may still be held
        state = "its server has just finished with it"
    elif requests.is_held(call):
        state = "a server has it"
    else:
        state = "the server that had it died or closed, and no other has taken it since"
    return TimedOut(f'service "{requests.name}": no reply in time ({state})')
