"""What lies among the library's files and is none of them: whoever made it, it is passed by, and named to people."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from typing import Final

from ..memory import segment as shm
from .names import PREFIX, is_socket_name, parse_file

_PREFIXES: Final = (PREFIX[1:], f"sem.{PREFIX[1:]}")


@dataclass(frozen=True)
class Foreign:
    """Something under one of the library's names that is not the library's. It is passed by, and disturbs nobody."""

    path: str
    """Characters that cannot be printed are written as escapes."""
    owner: int
    """User id, -1 if that cannot be told."""
    what: str


def foreign(directory: str | None = None) -> list[Foreign]:
    """What lies in `/dev/shm` under names like the library's, and in a socket directory, and is not the library's."""
    found = []
    for name in sorted(shm.listing()):
        if name.startswith(_PREFIXES):
            known = parse_file(name) is not None
            info = shm.status("/" + name)
            if info is None or not (known and stat.S_ISREG(info.st_mode)):
                found.append(_foreign(f"{shm.SHM_DIR}/{name}", info, "" if known else ", not a name of this library's"))
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(directory) if directory is not None else []):
            path = f"{directory}/{name}"
            try:
                info = os.lstat(path)
            except OSError:
                continue
            if not (is_socket_name(name) and (stat.S_ISSOCK(info.st_mode) or stat.S_ISFIFO(info.st_mode))):
                found.append(_foreign(path, info, ""))
    return found


def _foreign(path: str, info: os.stat_result | None, more: str) -> Foreign:
    printable = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in path)
    what = "cannot be looked at" if info is None else f"{shm.kind_of(info.st_mode)}{more}"
    return Foreign(printable, -1 if info is None else info.st_uid, what)
