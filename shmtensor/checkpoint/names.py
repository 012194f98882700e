"""Names of checkpoints, and of a writer's channel, by which other processes find its shared memory; and the checks of
a `CheckpointWriter`'s other arguments."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Set
from typing import Any, Final

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError, DependencyError
from ..options import how_to_install
from .directory import Best, Directory, highest_number
from .index import INDEX, LATEST, MAX_METRICS, read, version
from .manifest import MAX_RANKS
from .remote import OBJECT_STORES, ONLY_READ, REDIS, check_host, is_url, register, url_of, without_secrets

PREFIX: Final = "ckpt"
MAX_STEP: Final = 10**18 - 1
MAX_METRIC_NAME: Final = 200  # characters
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+-]{0,199}")


def channels_of(directory: str) -> str:
    """The common start of the channel names of all writers of a directory."""
    info = os.stat(directory)
    key = hashlib.sha256(f"{info.st_dev}:{info.st_ino}".encode()).hexdigest()[:16]
    return f"{PREFIX}-{key}-"


def channel_of(directory: str, writer: str, *, ranks: bool = False) -> str:
    """The channel of one writer. A rank's name differs, because its channel never has a whole state."""
    return f"{channels_of(directory)[:-1]}r-{writer}" if ranks else channels_of(directory) + writer


def check_local(path: str | os.PathLike[str], what: str) -> None:
    """Raise `ArgumentError` if a path is a URL: `what` needs a mounted file system."""
    if is_url(path):
        raise ArgumentError(f"{without_secrets(os.fsdecode(path))!r} is a URL, and {what}: pass a local path")


def check_directory(directory: str | os.PathLike[str]) -> str:
    """The absolute path of a directory for checkpoints; `ArgumentError` if it is a URL or no path."""
    path = os.fsdecode(directory)
    if is_url(path):
        raise ArgumentError(
            f"directory {without_secrets(path)!r} is a URL, and a CheckpointWriter writes to mounted file systems "
            "only: pass a local directory, and upload= the URL"
        )
    if not path or "\0" in path:
        raise ArgumentError(f"directory {path!r}: pass the path of a directory")
    return os.path.abspath(path)


def check_name(name: object, what: str = "name") -> str:
    """Check a checkpoint's name."""
    if not isinstance(name, str):
        raise ArgumentTypeError(f"{what} must be a string, not {type(name).__name__}")
    if not _NAME.fullmatch(name) or name == LATEST:
        raise ArgumentError(
            f"checkpoint {what} {name!r}: use 1 to 200 of the characters A-Z a-z 0-9 . _ = + -, not a dot, dash or "
            f'sign first, and not "{LATEST}"'
        )
    return name


def check_upload(url: object) -> str | None:
    """The URL that `upload=` means. Raises `ArgumentError`, `ArgumentTypeError`, `DependencyError`."""
    if url is None:
        return None
    if not isinstance(url, str):
        raise ArgumentTypeError(f"upload must be a URL, such as 's3://bucket/runs/a', not {type(url).__name__}")
    if not is_url(url):
        raise ArgumentError(f"upload={url!r} is no URL, such as 's3://bucket/runs/a'")
    check_host(url)
    shown = without_secrets(url)
    *chain, last = url.split("::")
    protocol = (chain[0] if chain else last).partition(":")[0]
    if protocol == "dir":
        raise ArgumentError(
            f"upload={shown!r}: what dir:: leads to has the directory in its URL: pass {without_secrets(last)!r}"
        )
    if last.partition(":")[0] in OBJECT_STORES and "?" in last:
        raise ArgumentError(f"upload={shown!r}, with more behind it: '?' is no part of a name there: leave it out")
    try:
        from fsspec import get_filesystem_class

        register()
        get_filesystem_class(protocol)  # without a connection: that is the writing process's business
        if protocol in REDIS:
            from .redis_files import split_url

            split_url(url)
    except ImportError as error:
        raise DependencyError(
            f"upload={shown!r}: {error}: {how_to_install('remote')}, and fsspec's package for {protocol}",
            name=error.name,
        ) from None
    except ValueError as error:
        raise ArgumentError(f"upload={shown!r}: {error}") from None
    if protocol in ("file", "local"):
        raise ArgumentError(f"upload={shown!r} is a directory of this machine: let the CheckpointWriter save there")
    if protocol in (*ONLY_READ, "memory"):
        raise ArgumentError(
            f"upload={shown!r}: nothing can be uploaded there by another process: pass the URL of an object store"
        )
    return url


class Namer:
    """Chooses names of checkpoints in one directory, so that nothing is overwritten."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def call(self, name: str | None, step: int | None) -> contextlib.AbstractContextManager[None]:
        """For `with`, around a call of `save`. name: the user's; step: that in the state."""
        return contextlib.nullcontext()

    def took(self, name: str) -> None:
        """Count a save of this name, which `choose` has returned, whether or not it succeeds."""

    def check_alias(self, alias: str | None, name: str, taken: Set[str]) -> str:
        """Check an alias, which another checkpoint may have now; "" for None. Only links are replaced."""
        if alias is None:
            return ""
        path = self._directory.at(check_name(alias, "alias"))
        if alias == name or alias in taken or (os.path.lexists(path) and not os.path.islink(path)):
            raise ArgumentError(f"alias {alias!r}: {path} is a checkpoint of its own, or somebody's file: pass another")
        return alias

    def choose(self, name: str | None, step: int | None, ending: str, taken: Set[str], count: int) -> tuple[str, int]:
        """The name with its suffix, and the step for `keep_every`.

        name: the user's; step: in the state; taken: names of saves in flight; count: which save of the writer it is.
        """
        if name is not None:
            full = check_name(name) + ending
            if full in taken or self._directory.is_taken(full):
                raise ArgumentError(f"checkpoint {self._place(full)} exists: pass another name, or remove it")
            return full, count if step is None else step
        if step is None:
            step = highest_number({*self._directory.names(), *taken}, "save-") + 1
            stem = f"save-{step:08d}"
        else:
            stem = _of_step(step)
        full, again = stem + ending, 1
        while full in taken or self._directory.is_taken(full):
            again += 1
            full = f"{stem}-{again}{ending}"
        return full, step

    def _place(self, name: str) -> str:
        """The place of a checkpoint, as text for errors."""
        return self._directory.at(name)


class UrlNamer(Namer):
    """Names of checkpoints that are at a URL alone: those that the directory's list has are taken, which the writing
    process also changes. It looks at the URL as well."""

    def __init__(self, directory: Directory, url: str) -> None:
        super().__init__(directory)
        self._url = url
        self._listed: set[str] = set()
        self._read: object = None

    def choose(self, name: str | None, step: int | None, ending: str, taken: Set[str], count: int) -> tuple[str, int]:
        """As `Namer.choose`."""
        now = version(self._directory.at(INDEX))
        if now != self._read:
            self._listed, self._read = {entry.name for entry in read(self._directory.path)}, now
        return super().choose(name, step, ending, taken | self._listed, count)

    def _place(self, name: str) -> str:
        return url_of(self._url, name)


class RankNamer(Namer):
    """Names on which all ranks agree without communication: from the state, and the number of saves of this writer.

    Ranks count alike as long as each call of `save` makes a save. One that raises may have made one or not, and may be
    tried again, so that this rank's next save could get the number of another moment of the other ranks. From then on
    no name is given by that count.
    """

    def __init__(self, directory: Directory) -> None:
        super().__init__(directory)
        self._given: set[str] = set()
        self._calls: list[str] = []  # of `save` that have not returned: they run, or have raised; "" without a step

    @contextlib.contextmanager
    def call(self, name: str | None, step: int | None) -> Iterator[None]:
        """As `Namer.call`. A call that raises stays among the calls that have not returned."""
        call = "" if name is not None or step is None else _of_step(step)
        self._calls.append(call)
        yield
        self._calls.remove(call)

    def took(self, name: str) -> None:
        """As `Namer.took`."""
        self._given.add(name)

    def choose(self, name: str | None, step: int | None, ending: str, taken: Set[str], count: int) -> tuple[str, int]:
        """As `Namer.choose`. Another check for an existing name follows when the parts become one checkpoint."""
        if name is not None:
            if self._directory.is_taken(check_name(name)):
                raise ArgumentError(f"checkpoint {self._directory.at(name)} exists: pass another name, or remove it")
            if name in self._given:
                raise ArgumentError(f"this rank has saved {name!r} before: pass another name")
            return name, count if step is None else step
        stem = f"save-{count:08d}" if step is None else _of_step(step)
        key, again = stem, 1
        while key in self._given:
            again += 1
            key = f"{stem}-{again}"
        if step is None and len(self._calls) > 1:
            self._refuse(key, "save() of this rank", "have an int `step` in the state or in meta=")
        if again > 1 and self._calls.count(stem) > 1:
            self._refuse(key, f"save() of step {step} of this rank", "another step")
        return key, count if step is None else step

    @staticmethod
    def _refuse(key: str, calls: str, instead: str) -> None:
        raise ArgumentError(
            f"the name would be {key}, by the number of saves, but another {calls} has raised, or has not returned: "
            "other ranks may count it, and one checkpoint would have parts of two moments. Pass name=, or "
            f"{instead}; or open new writers on all ranks"
        )


def _of_step(step: int) -> str:
    return f"step-{step:08d}"


def check_metrics(metrics: object) -> dict[str, float]:
    """Metrics as floats by name. Raises `ArgumentTypeError`, `ArgumentError`."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise ArgumentTypeError('metrics takes a dict of numbers by name, such as metrics={"loss": 0.25}')
    if len(metrics) > MAX_METRICS or any(len(name) > MAX_METRIC_NAME for name in metrics):
        raise ArgumentError(
            f"metrics has {len(metrics)} names: at most {MAX_METRICS} are allowed, of at most {MAX_METRIC_NAME} "
            "characters each"
        )
    found = {}
    for name, value in metrics.items():
        try:
            if isinstance(value, (str, bytes, bytearray)):
                raise TypeError(f"{type(value).__name__} is no number")
            found[name] = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # a tensor of several elements
            raise ArgumentTypeError(f"metrics[{name!r:.80}] is no number: {error}") from None
    return found


def check_best(keep_best: object, keep_last: int | None) -> Best | None:
    """Check `keep_best=`."""
    if keep_best is None:
        return None
    match keep_best:
        case (str() as name, ("min" | "max") as mode, int() as count) if type(count) is int and count > 0:
            if keep_last is None:
                raise ArgumentError("keep_best says what stays besides keep_last: pass keep_last as well")
            return name, mode, count
    raise ArgumentError(
        f'keep_best={keep_best!r:.80}: pass the name of a metric, "min" or "max", and how many stay: ("loss", "min", 3)'
    )


def step_of(state: Any, meta: Any) -> int | None:
    """The step in `meta`, or else in the state; None if there is none."""
    for place in (meta, state):
        step = place.get("step") if isinstance(place, dict) else None
        if isinstance(step, (int, np.integer)) and not isinstance(step, bool) and step >= 0:
            step = int(step)
            if step > MAX_STEP:
                digits = step.bit_length() * 30103 // 100_000  # or one more
                raise ArgumentError(
                    f'"step" has {digits + (step >= 10**digits)} digits, and names the checkpoint: pass '
                    'meta={"step": ...} with at most 18 digits'
                )
            return step
    return None


def check_not_local(upload: object, upload_keep_last: object, rank: object, key: object) -> None:
    """Check what `local=False` needs, and what it does not allow."""
    if upload is None:
        raise ArgumentError("local=False keeps no copy in the directory: pass upload=, the URL that is to have it")
    if upload_keep_last is not None:
        raise ArgumentError("upload_keep_last= with local=False: keep_last= says what stays at the URL, pass that")
    if rank is not None:
        raise ArgumentError("rank= with local=False: ranks vote by their local parts: leave out local=False")
    if key is not None:
        raise ArgumentError(
            "key= with local=False: files are encrypted on the local disk: leave out local=False, or let the server "
            "encrypt"
        )


def check_ranks(rank: object, world_size: object, busy: str, max_shard: object) -> None:
    """Check `rank=` and `world_size=`, and that the other options allow them."""
    if rank is None and world_size is None:
        return
    for name, value in (("rank", rank), ("world_size", world_size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ArgumentTypeError(f"rank= and world_size= go together: {name} is a {type(value).__name__}, pass ints")
    match rank, world_size:
        case int(), int() if 0 <= rank < world_size <= MAX_RANKS:
            pass
        case _:
            raise ArgumentError(f"rank={rank}, world_size={world_size}: ranks are 0 to world_size - 1 < {MAX_RANKS}")
    if busy != "block":
        raise ArgumentError(f'busy={busy!r} with rank=: one rank would leave out what others save: pass "block"')
    if max_shard is not None:
        raise ArgumentError("max_shard= with rank=: each rank's part is one file already, leave it out")
