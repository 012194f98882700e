"""The control groups whose limits apply to this process: its own groups and their parents, of versions 1 and 2."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from .descriptors import OpenFile

OWN: Final = Path("/proc/self/cgroup")
GROUPS: Final = Path("/sys/fs/cgroup")


def groups_of(controller: str, own: Path = OWN, groups: Path = GROUPS) -> Iterator[tuple[int, Path]]:
    """The version and the folder of each group of a controller; none if that is unknown.

    In a container a group's path may be the host's: then only the last folder, which is the container's own group, can
    be read.
    """
    try:
        lines = read_text(own).splitlines()
    except OSError:
        return
    for line in lines:  # "0::/path" of version 2, "4:cpu,cpuacct:/path" of version 1
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            yield from ((2, folder) for folder in _upwards(groups, path))
        elif controller in controllers.split(","):
            for mount in dict.fromkeys((controllers, controller)):
                yield from ((1, folder) for folder in _upwards(groups / mount, path))


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """A group and its parents, up to the root."""
    folder = root / path.lstrip("/")
    while folder != root:
        yield folder
        folder = folder.parent
    yield root


def read_text(path: Path) -> str:
    """Read a short file of the kernel. It is closed even if an exception of a signal handler interrupts this."""
    file = OpenFile()
    try:
        file.open(os.open, str(path), os.O_RDONLY | os.O_CLOEXEC)
        return os.read(file.fd, 1 << 16).decode()
    finally:
        file.close()
