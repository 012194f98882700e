"""Two users on one machine: the same channel name, each other's directories, each other's dead. Needs to be root."""

from __future__ import annotations

import errno
import json
import os
import re
import signal

import numpy as np
import pytest
from typer.testing import CliRunner

import shmtensor
from shmtensor.channel import cleanup
from shmtensor.channel.names import socket_dir

from ..commands import app
from ..scenes import PAIRS, PATIENCE, files, own_shm, pair_of, play, refused, works

OTHER = 65534
OWN = own_shm("size=16m")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users"),
    pytest.mark.parametrize("names", PAIRS, ids="-".join),
]


def become(user: int) -> None:
    """This process is somebody else's from now on, with the socket directory that this user gets by itself."""
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)


def as_other(body, *, end: int = 0) -> None:
    """Run `body` in a forked child of another user; `end` is how it must end."""
    child = os.fork()
    if child == 0:
        try:
            become(OTHER)
            body()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == end


def as_users_are() -> None:
    """Every user with a socket directory of its own, as without `SHMTENSOR_DIR`; both lie in this scene's `/mnt`."""
    for user in (0, OTHER):
        os.mkdir(f"/mnt/{user}", 0o700)
        os.chown(f"/mnt/{user}", user, user)
    own_directory()
    for command in ("ls", "gc"):
        report(command)  # imports what the other user may not be able to read


def own_directory() -> None:
    os.environ["SHMTENSOR_DIR"] = f"/mnt/{os.geteuid()}"


def everything(names) -> None:
    """A channel of one's own, end to end, and nothing left."""
    works(names)
    mine = {name for name in files() if os.stat(f"/dev/shm/{name}").st_uid == os.geteuid()}
    assert not mine, mine


def report(*command: str) -> dict:
    run = CliRunner().invoke(app, [*command, "--json"])
    assert run.exit_code == 0, run.exception
    return json.loads(run.stdout)


def the_same_name(names) -> None:
    """Whoever comes second is told whose it is, root included; the first one is not disturbed."""
    as_users_are()
    make, take = pair_of(names)
    with make("c", slots=2) as tx, take("c") as rx:

        def other() -> None:
            own_directory()
            for name in names:
                said = f"belongs to user 0, you are user {OTHER}: use another channel name"
                refused(lambda name=name: getattr(shmtensor, name)("c"), errno.EACCES, said)
            everything(names)
            assert re.search("belongs to user 0", report("ls")["channels"][0]["notes"][0])
            swept = report("gc")
            assert swept["removed"] == []
            assert swept["left"][0]["why"] == "belongs to user root"

        as_other(other)
        tx.send(np.arange(3))
        assert rx.recv(timeout=PATIENCE).value.tolist() == [0, 1, 2]
    assert not files()

    def first() -> None:
        own_directory()
        keep = make("c", slots=2, slot_bytes=64), take("c")
        for name in files():
            os.chmod(f"/dev/shm/{name}", 0o666)  # even if it lets everybody in
        assert keep
        os.kill(os.getpid(), signal.SIGKILL)

    as_other(first, end=-signal.SIGKILL)
    before = files()
    for name in names:
        said = f"belongs to user {OTHER}, you are user 0: use another channel name"
        refused(lambda name=name: getattr(shmtensor, name)("c"), errno.EACCES, said)
    everything(names)
    cleanup.sweep_all(socket_dir())
    swept = report("gc")
    assert swept["removed"] == []
    assert "belongs to user" in swept["left"][0]["why"]
    assert report("ls")["channels"][0]["living"] == 0  # root may look
    assert files() == before

    def next_one() -> None:
        own_directory()
        everything(names)
        assert not files()  # its first endpoint has removed what its own dead had left

    as_other(next_one)


def no_entry(names) -> None:
    """A socket directory of another user, one that may not be written, a `/dev/shm` that may not."""
    as_users_are()

    def other() -> None:
        for name in names:
            refused(lambda name=name: getattr(shmtensor, name)("c"), errno.EPERM, "belongs to user 0, you are user")
        own_directory()
        os.chmod(os.environ["SHMTENSOR_DIR"], 0o500)
        refused(lambda: getattr(shmtensor, names[1])("c"), errno.EACCES, "cannot make a socket", "SHMTENSOR_DIR")
        assert not files()
        os.chmod(os.environ["SHMTENSOR_DIR"], 0o700)
        everything(names)

    as_other(other)
    os.chmod("/dev/shm", 0o755)

    def shut_out() -> None:
        own_directory()
        for name in names:
            refused(lambda name=name: getattr(shmtensor, name)("c"), errno.EACCES, "no permission .* /dev/shm")

    as_other(shut_out)


@pytest.mark.parametrize("scene", [the_same_name, no_entry])
def test_another_user(scene, names):
    play(scene, names, mounts=(OWN, "mode=0755 tmpfs /mnt"))
