"""Every error that the library raises, by who must act.

| class | who must act |
|---|---|
| `ClosedError`, `ForkedError`, `ReleasedError` | you: this object was closed, released, or belongs to another process |
| `LoopError`, `ReentrantError` | you: the call came from the wrong event loop, or from inside another call |
| `ArgumentError`, `ArgumentTypeError` | you: the call's arguments are wrong |
| `TimedOut`, `RingFull` | no one yet: the call would have to wait longer than `timeout=` allows |
| `EndOfStream` | no one: every sender has left and everything is received |
| `PeerDied` | the operator of the peer |
| `RemoteError` | the author of the server's handler |
| `WireError` | the operator of the peer: it sends data that this version cannot read |
| `CheckpointError` | the owner of the files: a checkpoint is damaged, truncated, foreign or not to be trusted |
| `DependencyError` | the installer of the program: an optional package is missing |
| `ResourceError`, `AccessDenied`, `PlatformError`, `CudaError` | the administrator: memory, permissions, kernel, GPU |
"""

from __future__ import annotations


class ShmTensorError(Exception):
    """Base of every error of this library.

    Where a built-in exception fits, such as `TimeoutError` or `OSError`, an error inherits from it as well, so that
    existing `except` clauses keep working.
    """


class ClosedError(ShmTensorError, ValueError):
    """The endpoint, client, server, queue or checkpoint writer was closed in this process.

    Cause: `close()` was called or its `with` block was left, perhaps by another thread while this call was waiting.
    Remedy: create a new one.
    """


class ForkedError(ClosedError):
    """The object belongs to the parent process of a `fork`.

    Cause: the process forked after the object was created. Locks and leases stay with the parent.
    Remedy: create a new one in the child, or start the child with `spawn` or `forkserver`.
    """


class ReleasedError(ClosedError):
    """The message was released.

    Cause: `msg.value` was used after `msg.release()` or after its `with` block.
    Remedy: keep the value itself, or `msg.copy()`, before releasing.
    """


class LoopError(ShmTensorError, RuntimeError):
    """Tasks of another event loop are waiting at this endpoint.

    Cause: two event loops use one endpoint at the same time.
    Remedy: use it from one loop at a time, or create an endpoint for each loop.
    """


class ReentrantError(ShmTensorError, RuntimeError):
    """A signal handler or finalizer used an endpoint from inside another call of the same thread.

    Cause: the handler interrupted a call of this endpoint and called it again, waited for a reply that the interrupted
    thread was to receive, or created an endpoint of a channel that the interrupted call is joining or leaving. Waiting
    would be a deadlock.
    Remedy: in a handler, call only `close()` or `stop()`, or set a flag that the main code reads.
    """


class ArgumentError(ShmTensorError, ValueError):
    """An argument has a wrong value.

    Cause: a number out of range, an unknown choice, a channel name that is in use for another pattern, and so on.
    Remedy: the message names the argument and what is allowed.
    """


class ArgumentTypeError(ShmTensorError, TypeError):
    """An argument, or a leaf of a value to send, has a wrong type.

    Cause: most often an object in the value that is not a tensor, array or plain scalar.
    Remedy: the message names the place, such as `value["a"][3]`, and where there is one what to send instead.
    """


class TimedOut(ShmTensorError, TimeoutError):
    """The call took longer than its `timeout=`.

    Cause: no message, reply, member or slot came in time. With `timeout=0`: there is none now.
    Remedy: call again, or pass a longer `timeout=`. The object works as before, and nothing is lost.
    """


class RingFull(TimedOut):
    """No slot was free: at once with `full="error"`, or after `timeout=` with `full="block"` or `"grow"`.

    Cause: receivers are slower than the sender, stopped, or keep views of earlier messages. The message names them.
    Remedy: drop or copy what receivers keep, use `delivery="latest"` or `full="drop"`, or pass more `slots=`.
    """


class EndOfStream(ShmTensorError, EOFError):
    """Every sender has closed or died, and everything they sent is received.

    Cause: the regular end of a stream. Iteration ends instead of raising it.
    Remedy: leave the loop, or call `recv` again when new senders have come.
    """


class PeerDied(ShmTensorError, ConnectionError):
    """A peer died, and no other one can do its work.

    Cause: a server died, or closed, with a request that may not be repeated, a worker of a `Pool` died while it ran a
    task, a publisher in device memory died, or the writing process of a checkpoint died repeatedly.
    Remedy: find out why that process died; send the request again if running it twice does no harm.
    """


class RemoteError(ShmTensorError):
    """A server could not answer a request, or a new worker of a pool could not start.

    Cause: its handler raised, or dropped the request without an answer. `type_name` is the type's name, or
    `"Failed"` for `req.fail("text")`, `"Unanswered"` for a dropped request, `"NoRoom"` for a reply without
    room, or for a request for which a relay's far host has none.
    Remedy: read `remote_traceback`. The exception itself is not sent: nothing is unpickled.
    """

    def __init__(self, type_name: str, text: str, remote_traceback: str = "", where: str = "server") -> None:
        super().__init__(type_name, text, remote_traceback, where)
        self.type_name = type_name
        """Name of the exception's type, such as `"ValueError"` or `"mypackage.errors.BadImage"`."""
        self.text = text
        """`str()` of the exception."""
        self.remote_traceback = remote_traceback
        """The traceback in the other process, as text; empty if there was none."""
        self.where = where
        """Which process that is: `"server"`, or `"worker"` of a pool that `reload` could not start."""

    def __str__(self) -> str:
        what = f"{self.type_name}: {self.text}" if self.text else self.type_name
        return f"{what}\n\nIn the {self.where}:\n{self.remote_traceback}" if self.remote_traceback else what


class WireError(ShmTensorError, ValueError):
    """Data that a peer wrote cannot be read.

    Cause: the peer runs another version of the library, or its shared memory is damaged. The message names the process
    and the versions.
    Remedy: run one version in every process of a channel.
    """


class CheckpointError(WireError):
    """A checkpoint cannot be read.

    Cause: the file is damaged, truncated, of an unknown kind, or contradicts itself. The message names the file, the
    tensor and the offset.
    Remedy: load another checkpoint (`load_newest` skips damaged ones), and look at this one with
    `shmtensor checkpoint verify`.
    """


class WrongKey(CheckpointError):
    """A checkpoint is encrypted, and no key or a wrong one was given; or it is not encrypted, and a key was given.

    Cause: `key=` (of `load_into` `encryption_key=`; of commands `--key-file` or `--passphrase`) is not what the
    checkpoint was saved with, or somebody has changed the file's header.
    Remedy: pass that key. A file that is not encrypted is loaded without one, if you trust it. `load_newest` does not
    skip such a checkpoint for an older one.
    """


class DependencyError(ShmTensorError, ImportError):
    """An optional package is needed and not installed; its `name` says which.

    Cause: shmtensor was installed without the extra that has the package, such as `torch`. Also raised by `recv` for a
    message with tensors that comes to a process without torch, and by a call whose reply has tensors.
    Remedy: the text has the command, such as `pip install '.[torch]'` in a checkout. A message of a work queue or a
    request stays for another process that has torch.
    """


class ResourceError(ShmTensorError, OSError):
    """A resource of the machine is missing: shared memory, disk space, open files, permission.

    Cause: the message says which resource, how much is needed and how much is free.
    Remedy: it is in the message, too, such as a larger `--shm-size` of a container; `shmtensor doctor` checks the rest.
    The call has changed nothing, and may be repeated.
    """


class AccessDenied(ResourceError, PermissionError):
    """A server refuses access to a checkpoint at a URL.

    Cause: there are no credentials, or they are wrong or have expired, or the account may not do this: an HTTP or S3
    server answered 401 or 403, or a Redis server refused the user, the password or a command.
    Remedy: set the credentials where fsspec, or the provider's own tools, look for them, and grant the account access
    on the server. The library does not retry.
    """


class CudaError(ResourceError):
    """CUDA is needed and missing, or a CUDA call failed.

    Cause: no CUDA build of torch, no device, an old driver, no device memory, a copy that failed, a graph capture.
    Remedy: the message says what is missing; `shmtensor doctor` shows what was found.
    """

    number = 0
    """CUDA's number of the error, 0 if it has none."""


class PlatformError(ResourceError):
    """This operating system, kernel or interpreter lacks something that the library needs.

    Cause: not Linux; a kernel without `membarrier` on a processor that needs it; or queues with a segment server and a
    C library other than glibc.
    Remedy: run `shmtensor doctor` and see Compatibility in the documentation.
    """
