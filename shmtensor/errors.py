"""Every error that the library raises, by who must act.

| class | who must act |
|---|---|
| `ClosedError`, `ForkedError`, `ReleasedError` | you: this object was closed, forked away or released |
| `LoopError` | you: tasks of another event loop wait at this endpoint |
| `ReentrantError` | you: a signal handler or finalizer called, or made, what it had interrupted |
| `ArgumentError`, `ArgumentTypeError` | you: the call's arguments are wrong |
| `TimedOut`, `RingFull` | nobody yet: it would have blocked, or took longer than `timeout=` |
| `EndOfStream` | nobody: every sender has closed and everything is received |
| `PeerDied` | whoever runs the peer |
| `RemoteError` | whoever wrote the server's handler: it raised, or gave no answer |
| `WireError` | whoever wrote the bytes: they are not a valid message or segment |
| `CheckpointError` | whoever keeps the files: a checkpoint is damaged, truncated, foreign or not to be trusted |
| `ResourceError`, `PlatformError`, `CudaError` | whoever runs the machine: memory, permissions, limits, kernel, GPU |
"""

from __future__ import annotations


class ShmTensorError(Exception):
    """Base of every error of this library."""


class ClosedError(ShmTensorError, ValueError):
    """The endpoint was closed by its own process."""


class ForkedError(ClosedError):
    """The endpoint belongs to the parent process of a fork; create a new one in the child."""


class ReleasedError(ClosedError):
    """The message's own reference was released; keep the value, or copy it, before releasing."""


class LoopError(ShmTensorError, RuntimeError):
    """Tasks of another event loop wait at this endpoint; use it from one loop at a time, or make one for each."""


class ReentrantError(ShmTensorError, RuntimeError):
    """A signal handler or finalizer called an endpoint that its own thread is inside a call of (`close()` may be), or
    made one of a channel that its own thread holds the lock of."""


class ArgumentError(ShmTensorError, ValueError):
    """An argument has a wrong value."""


class ArgumentTypeError(ShmTensorError, TypeError):
    """An argument, or a leaf of a value to send, has a wrong type."""


class TimedOut(ShmTensorError, TimeoutError):
    """The call took longer than its `timeout=`."""


class RingFull(TimedOut):
    """No slot was free: at once with `full="error"`, or after `timeout=` with `full="block"`."""


class EndOfStream(ShmTensorError, EOFError):
    """Every sender has closed or died, and everything they sent is received."""


class PeerDied(ShmTensorError, ConnectionError):
    """A peer died and what was asked of it cannot be had from another."""


class RemoteError(ShmTensorError):
    """A server could not answer a request: its handler raised, or let go of the request without an answer.

    Nothing of it was unpickled: all that is known of the server's exception is text.
    """

    def __init__(self, type_name: str, text: str, remote_traceback: str = "") -> None:
        super().__init__(type_name, text, remote_traceback)
        self.type_name = type_name
        """Name of the exception's type, such as `"ValueError"` or `"mypackage.errors.BadImage"`."""
        self.text = text
        """What `str()` of the exception was."""
        self.remote_traceback = remote_traceback
        """The traceback in the server's process, as text; empty if there was none."""

    def __str__(self) -> str:
        what = f"{self.type_name}: {self.text}" if self.text else self.type_name
        return f"{what}\n\nIn the server:\n{self.remote_traceback}" if self.remote_traceback else what


class WireError(ShmTensorError, ValueError):
    """Bytes written by a peer are not a valid descriptor, record or segment."""


class CheckpointError(WireError):
    """A checkpoint is damaged, truncated, of another kind, or says what cannot be."""


class ResourceError(ShmTensorError, OSError):
    """A resource of the machine is missing: memory, space, permission, a limit."""


class CudaError(ResourceError):
    """CUDA is needed and missing, or a call of it failed."""

    number = 0
    """CUDA's number of the error, 0 if it has none."""


class PlatformError(ResourceError):
    """This operating system, kernel or interpreter lacks something the library needs."""
