"""What lies in `/dev/shm` and in the socket directory and is not the library's stops nobody, whoever made it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import socket
import stat
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import shmtensor
from shmtensor.channel import control as ctl
from shmtensor.channel.cleanup import foreign
from shmtensor.memory import segment as shm
from shmtensor.memory import semaphores

from ..commands import app
from ..scenes import PAIRS, PATIENCE, files, own_shm, pair_of, play, refused, works
from .test_users import OTHER, as_other, as_users_are, own_directory

pytestmark = pytest.mark.slow


def others_can_read(path: str) -> bool:
    """Whether every directory above it may be entered by everybody."""
    return all(parent.stat().st_mode & 1 for parent in Path(path).absolute().parents)


needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(others_can_read, (__file__, sys.executable))),
    reason="only root can be two users, and the other one has to read the package and the interpreter",
)
SHM = "/dev/shm"
UID = "00000000000000ff"


def _socket(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path)


def _device(path: str) -> None:
    if os.geteuid() == 0:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero


def _file(content: bytes = b"", nbytes: int = 0, mode: int = 0o666):
    def make(path: str) -> None:
        with open(path, "wb") as file:
            file.write(content)
            file.truncate(max(nbytes, len(content)))
        os.chmod(path, mode)

    return make


def _head(version: int) -> bytes:
    return struct.pack("<4Q", ctl.MAGIC, version, 1, ctl.CAPACITY)


CONTROL = ctl.Control.nbytes()
KINDS = {
    "directory": lambda path: os.mkdir(path, 0o777),
    "closed-directory": lambda path: os.mkdir(path, 0),
    "fifo": lambda path: os.mkfifo(path, 0o666),
    "socket": _socket,
    "device": _device,
    "dangling": lambda path: os.symlink("/nowhere", path),
    "to-directory": lambda path: os.symlink("/", path),
    "to-device": lambda path: os.symlink("/dev/zero", path),
    "loop": lambda path: os.symlink(os.path.basename(path), path),
    "empty": _file(),
    "huge": _file(nbytes=1 << 40),
    "sparse": _file(nbytes=CONTROL),
    "sparse-head": _file(_head(ctl.VERSION), CONTROL),
    "text": _file(b"hello"),
    "garbage": _file(b"\xff" * CONTROL),
    "other-version": _file(_head(99) + bytes(CONTROL - 32)),
    "other-layout": _file(_head(99) + bytes(100_000)),
    "hostile": _file(_head(ctl.VERSION) + b"\xff" * (CONTROL - 32)),
    "hostile-path": _file(_head(ctl.VERSION) + bytes(96) + b"/a\0b" * 32 + b"\1" * (CONTROL - 256)),
    "no-mode": _file(b"x" * CONTROL, mode=0),
    "no-mode-empty": _file(mode=0),
}
NAMES = [
    b"shmtensor.", b"sem.shmtensor.", b"shmtensor.\xff\xfe", b"shmtensor.\x1b[31mred\n", b"shmtensor.a,b",
    b"shmtensor.a,b,c", b"shmtensor." + b"x" * 240, b"shmtensor.a," + UID.encode() + b",zero", b"shmtensor.\xc3\xa4",
    b"sem.shmtensor.a,,", b"shmtensor.a," + UID.encode() + b"," + b"9" * 200,
]  # fmt: skip


def clutter_shm() -> None:
    for kind, make in KINDS.items():
        for name in (f"shmtensor.{kind}", f"shmtensor.m-{kind},{UID}", f"shmtensor.m-{kind},{UID},0"):
            make(f"{SHM}/{name}")
        make(f"{SHM}/sem.shmtensor.m-{kind},{UID}")
    for number, name in enumerate(NAMES):
        path = os.path.join(SHM.encode(), name)
        if number % 2:
            os.mkdir(path)
        else:
            Path(os.fsdecode(path)).touch()


def clutter_sockets(directory: str) -> None:
    """The entries of a socket directory: only its user can make any."""
    for number, (kind, make) in enumerate(KINDS.items()):
        make(f"{directory}/{number:016x}")
        make(f"{directory}/{kind}")
    for name in (b"0x00000000000000", b"\xff" * 16, b"0_0_0_0_0_0_0_00", b"x" * 200):
        os.mkdir(os.path.join(os.fsencode(directory), name))


def entries(directory: str) -> dict[str, int]:
    return {name: os.lstat(f"{directory}/{name}").st_mode for name in os.listdir(directory)}


def report(*command: str) -> dict:
    for options in ([], ["--json"]):
        run = CliRunner().invoke(app, [*command, *options])
        assert run.exit_code in (0, 1 if command[0] == "doctor" else 0), (run.exception, run.stdout)
        assert run.exception is None or isinstance(run.exception, SystemExit), run.exception
    return json.loads(run.stdout)


def everything() -> None:
    """Each thing that a user does."""
    for names in PAIRS:
        works(names)
    queue = shmtensor.Queue()
    queue.put(np.arange(3))
    assert queue.get(timeout=60).tolist() == [0, 1, 2]
    queue.close()
    with shmtensor.ProcessPoolExecutor(1) as pool:
        assert pool.submit(np.arange, 4).result(60).tolist() == [0, 1, 2, 3]
    with shmtensor.Server("service") as server, shmtensor.Client("service") as client:
        future = client.submit(np.arange(2))
        with server.recv(timeout=60) as request:
            request.reply(request.value + 1)
        assert future.result(60).tolist() == [1, 2]
    del future, request
    report("gc")


def is_file(mode: int) -> bool:
    return stat.S_ISREG(mode)


def among(who: str) -> None:
    """`who` makes all kinds of entries; both users go on as ever, and what is no file of theirs stays."""
    if os.geteuid() == 0:
        as_users_are()
    else:
        os.environ["SHMTENSOR_DIR"] = "/mnt/mine"
    shmtensor.Publisher("warm-up").close()
    (as_other if who == "other" else lambda body: body())(clutter_shm)
    directory = shmtensor.channel.names.socket_dir()
    clutter_sockets(directory)
    before, sockets = entries(SHM), entries(directory)

    def check() -> None:
        everything()
        left = entries(SHM)
        mine = {name for name in left if os.lstat(f"{SHM}/{name}").st_uid == os.geteuid()}
        assert set(left) <= set(before), set(left) - set(before)
        gone = set(before) - set(left)
        assert all(is_file(before[name]) for name in gone), gone
        assert not {name for name in mine if name in files() and name.removeprefix("shmtensor.") == "empty"}
        said = report("ls")
        paths = {it["path"]: it for it in said["foreign"]}
        assert paths[f"{SHM}/shmtensor.directory"]["what"] == "a directory"
        assert paths[f"{SHM}/shmtensor.fifo"]["what"] == "a FIFO"
        assert paths[f"{SHM}/shmtensor.\\udcff\\udcfe"]["what"].startswith("a file, not a name")
        assert f"{SHM}/shmtensor.\\x1b[31mred\\n" in paths
        assert all(it["path"].isprintable() for it in said["foreign"])
        (other,) = (it for it in said["channels"] if it["name"] == "other-version")
        assert other["living"] is None
        assert any("99" in note for note in other["notes"]) or os.geteuid()
        findings = {it["name"]: it for it in report("doctor")["findings"]}
        assert findings["not ours"]["status"] == "warn"
        assert not [it for it in findings.values() if "broke" in it["meaning"]]

    check()
    assert {name for name, mode in sockets.items() if not (stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode))} <= set(
        entries(directory)
    )
    if os.geteuid() == 0:

        def other() -> None:
            own_directory()
            check()

        as_other(other)


@pytest.mark.parametrize("who", ["same", pytest.param("other", marks=needs_root)])
def test_all_kinds_of_entries_stop_nobody(who):
    play(among, who, mounts=(own_shm("size=64m"), "mode=0755 tmpfs /mnt"))


TAKING = ["text", "directory", "dangling"]


@contextlib.contextmanager
def root_beside():
    """A process of root's, who is another user: `told(kind, path)` has it make an entry, with "gone" remove one."""
    asked, ask = os.pipe()
    done, answer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ask)
        with os.fdopen(asked) as lines:
            for line in lines:
                kind, path = line.split()
                if kind != "gone":
                    KINDS[kind](path)
                else:
                    (os.rmdir if stat.S_ISDIR(os.lstat(path).st_mode) else os.unlink)(path)
                os.write(answer, b".")
        os._exit(0)

    def told(kind: str, path: str) -> None:
        os.write(ask, f"{kind} {path}\n".encode())
        assert os.read(done, 1) == b"."

    yield told
    os.close(ask)
    assert os.waitpid(child, 0)[1] == 0


def as_victim(body: str, *args) -> None:
    """Run the function of that name, with `told` and `args`, as an ordinary user, who cannot remove what root makes."""
    as_users_are()
    with root_beside() as told:
        as_other(lambda: (own_directory(), globals()[body](told, *args)))


def next_name(told, names, kind: str) -> None:
    """The error says whose it is, and what needs no other ring goes on; so does a sender that is made anew, and this
    one when the name is free."""
    make, take = pair_of(names)
    small, large = np.arange(3), np.zeros(1000)
    with make("c", slots=2, slot_bytes=64, full="grow") as tx, take("c") as rx:

        def goes_through(tx, value):
            tx.send(value, timeout=PATIENCE)
            with rx.recv(timeout=PATIENCE) as message:
                assert message.value.tolist() == value.tolist()

        goes_through(tx, small)
        (ring,) = (name for name in files() if name.endswith(",0"))
        path = f"{SHM}/{ring.removesuffix('0')}"
        told(kind, path + "1")
        for _ in range(2):
            refused(lambda: tx.send(large), errno.EEXIST, f"{path}1 is a .* of user 0, you are user {OTHER}", "anew")
        goes_through(tx, small)
        with make("c", slots=2, slot_bytes=64, full="grow") as anew:
            goes_through(anew, large)
        told("gone", path + "1")
        goes_through(tx, large)
        told(kind, path + "2")
    assert files() == {os.path.basename(path) + "2"}


def next_name_of_a_queue(told, kind: str) -> None:
    q = shmtensor.Queue()
    q.put(b"small")
    (ring,) = (name for name in files() if name.endswith(",0") and not name.startswith("sem."))
    path = f"{SHM}/{ring.removesuffix('0')}1"
    told(kind, path)
    refused(lambda: q.put(np.zeros(1 << 20)), errno.EEXIST, f"{path} is a .* of user 0", "anew")
    q.put(b"still")
    assert [q.get(timeout=PATIENCE) for _ in range(2)] == [b"small", b"still"]
    q.close()
    assert files() == {os.path.basename(path)}


def name_of_a_newcomer(told, what: str) -> None:
    """Somebody who watches `/dev/shm` may be fast enough to take the second name of what is being made."""
    make = {"sender": lambda: shmtensor.Publisher("c"), "queue": lambda: shmtensor.Queue(ctx="spawn")}[what]
    taken = []

    def take(name: str) -> None:
        taken.append(f"sem.{name.removeprefix('/')}")
        told("text", f"{SHM}/{taken[-1]}")

    with pytest.MonkeyPatch.context() as patch:
        create, make_semaphore = shm.create, semaphores.create_semaphore
        if what == "sender":
            patch.setattr(shm, "create", lambda name, *args: (create(name, *args), take(name))[0])
        else:
            patch.setattr(semaphores, "create_semaphore", lambda *args: (take(args[0]), make_semaphore(*args))[1])
        refused(make, errno.EEXIST, f"{SHM}/sem.* is a file of user 0", "anew")
    assert files() == set(taken)
    make().close()
    assert files() == set(taken)


NAMESPACE = (own_shm("size=64m"), "mode=0755 tmpfs /mnt")


@needs_root
@pytest.mark.parametrize("kind", TAKING)
@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_the_name_of_the_next_ring_is_another_users(names, kind):
    play(as_victim, "next_name", names, kind, mounts=NAMESPACE)


@needs_root
@pytest.mark.parametrize("kind", TAKING)
def test_the_name_of_a_queues_next_ring_is_another_users(kind):
    play(as_victim, "next_name_of_a_queue", kind, mounts=NAMESPACE)


@needs_root
@pytest.mark.parametrize("what", ["sender", "queue"])
def test_a_name_of_a_newcomer_is_another_users(what):
    play(as_victim, "name_of_a_newcomer", what, mounts=NAMESPACE)


class Created:
    """The names of the files that come into a directory, by `inotify(7)`: also of those that are gone at once."""

    _CREATE, _MOVED_TO = 0x100, 0x80

    def __init__(self, path: str) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert libc.inotify_add_watch(self._fd, path.encode(), self._CREATE | self._MOVED_TO) > 0, ctypes.get_errno()

    def names(self) -> list[str]:
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                data = os.read(self._fd, 1 << 16)
                while data:
                    length = struct.unpack_from("4I", data)[3]
                    found.append(data[16 : 16 + length].rstrip(b"\0").decode())
                    data = data[16 + length :]
        return found


def attributed_from_the_start() -> None:
    """Who is killed at any moment leaves names of channels alone, which the next sweep removes."""
    created = Created(SHM)
    for names in PAIRS:
        works(names)
    for method in ("fork", "spawn", "forkserver"):
        context = shmtensor.get_context(method)
        for make in (context.Queue, context.SimpleQueue, context.JoinableQueue):
            queue = make()
            queue.put(1)
            assert queue.get() == 1
            queue.close()
        with context.Pool(1) as pool:
            assert pool.apply(abs, [-1]) == 1
        with shmtensor.ProcessPoolExecutor(1, context) as executor:
            assert executor.submit(abs, -1).result(PATIENCE) == 1
    with shmtensor.WorkerPool(abs, name="abs", workers=1), shmtensor.Client("abs") as client:
        assert client.request(-1, timeout=PATIENCE) == 1
    names = created.names()
    assert sum(name.startswith("sem.shmtensor.") for name in names) > 10, names
    others = [name for name in names if not name.startswith(("shmtensor.", "sem.shmtensor."))]
    assert not others, others


def test_every_file_has_a_name_of_a_channel_from_the_start():
    play(attributed_from_the_start, mounts=NAMESPACE)


def test_what_is_foreign(tmp_path):
    os.mkfifo(tmp_path / UID)
    (tmp_path / "a\nb").touch()
    (found,) = (it for it in foreign(str(tmp_path)) if it.path.startswith(str(tmp_path)))
    assert (found.path, found.what, found.owner) == (f"{tmp_path}/a\\nb", "a file", os.geteuid())


def taken(make) -> None:
    """Another user has made the default socket directory: that is said, and what needs none goes on."""
    os.environ.pop("SHMTENSOR_DIR", None)
    path = f"/tmp/shmtensor-{os.geteuid()}"
    as_other(lambda: KINDS[make](path))
    for name in ("Publisher", "Subscriber", "Queue"):
        with pytest.raises(shmtensor.ResourceError, match=f"socket directory {path} .*SHMTENSOR_DIR"):
            getattr(shmtensor, name)(*(["c"] if name != "Queue" else []))
    assert not files()
    report("ls")
    findings = {it["name"]: it for it in report("doctor")["findings"]}
    assert path in findings["socket directory"]["value"]
    os.environ["SHMTENSOR_DIR"] = "/mnt/mine"
    works(PAIRS[0])


@needs_root
@pytest.mark.parametrize("make", ["closed-directory", "fifo", "to-directory", "dangling"])
def test_a_socket_directory_that_another_user_made_first(make):
    play(taken, make, mounts=(own_shm("size=16m"), "mode=1777 tmpfs /tmp", "mode=0755 tmpfs /mnt"))
