"""`shmtensor.dcp` reads from servers that fail: each fault that passes, that stays, a kill, a file that is replaced."""

from __future__ import annotations

import threading

import pytest

from shmtensor import CheckpointError
from shmtensor.checkpoint import remote

from ..waiting import PATIENCE
from . import servers
from .test_deaths import own_channels  # noqa: F401
from .test_remote import FAULTS, failing, limit_requests

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.metadata import MetadataIndex  # noqa: E402
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem  # noqa: E402
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys as load_all  # noqa: E402

from shmtensor.dcp import StorageReader, StorageWriter  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("own_channels"),
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)"),
]

STATE = {"w": torch.arange(700_000.0).reshape(1000, 700), "o": [1, "x"], "step": 3}
LARGE = 1 << 20
"""Requests of at least so many bytes are for the tensor."""


@pytest.fixture(params=["ours", "theirs"])
def served(request, tmp_path, monkeypatch):
    """(server, URL, file with the tensor) of a checkpoint of this library, or of `FileSystemWriter`."""
    monkeypatch.setattr(remote, "_PAUSE", 0.001)
    folder = tmp_path / "served"
    if request.param == "ours":
        with StorageWriter(tmp_path / "runs") as writer:
            dcp.save(STATE, storage_writer=writer)
        servers.copy(tmp_path / "runs" / "step-00000003", folder)
        file = folder / "rank-00000.distcp"
    else:
        dcp.save(STATE, checkpoint_id=folder, no_dist=True)
        file = folder / "__0_0.distcp"
    with servers.Server(folder) as server:
        yield server, f"{server.url}/", file


def is_all_there(reader: StorageReader) -> bool:
    found = load_all(storage_reader=reader)
    return torch.equal(found["w"], STATE["w"]) and (found["o"], found["step"]) == (STATE["o"], STATE["step"])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes(served, monkeypatch, fault):
    server, url, _ = served
    limit_requests(monkeypatch, fault)
    server.fault = failing(2, FAULTS[fault])
    assert is_all_there(StorageReader(url))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_stays(served, monkeypatch, fault):
    """While the tensor is read: an error says which bytes of which URL, without its secrets."""
    server, url, file = served
    limit_requests(monkeypatch, fault)
    begun = threading.Event()

    def stays(handler, path, start, data):
        if len(data) >= LARGE and path.endswith(file.name):
            begun.set()
        return FAULTS[fault](handler, start, data) if begun.is_set() and handler.command == "GET" else data

    server.fault = stays
    reader = StorageReader(url.replace("//", "//me:secret@", 1))
    with pytest.raises(CheckpointException, match=rf"{file.name}: bytes \d+ to \d+ of .*tried 5 times") as error:
        load_all(storage_reader=reader)
    assert "secret" not in f"{error.value}{reader!r}{reader.checkpoint_id}"


def test_the_server_is_killed_and_comes_back(served, monkeypatch):
    """While the tensor is read: the next attempts go on."""
    monkeypatch.setattr(remote, "_PAUSE", 0.2)
    server, url, file = served
    died, again = threading.Event(), []

    def die(handler, path, _start, data):
        if handler.command == "GET" and path.endswith(file.name) and len(data) >= LARGE:
            died.set()
            return None
        return data

    def restart():
        died.wait(PATIENCE)
        server.end()
        again.append(servers.Server(server.directory, port=server.server_port))

    server.fault = die
    helper = threading.Thread(target=restart)
    helper.start()
    try:
        assert is_all_there(StorageReader(url))
    finally:
        died.set()
        helper.join()
        again[0].end()


class Filled:
    """A planner with one tensor."""

    def __init__(self, *shape: int) -> None:
        self.tensor = torch.empty(shape)

    def resolve_tensor(self, item):
        return self.tensor

    def commit_tensor(self, item, tensor):
        pass


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("rows", [slice(0, 1000), slice(100, 900)])
@pytest.mark.parametrize("columns", [slice(0, 700), slice(5, 600), slice(7, 9)])
def test_the_file_is_replaced_before_the_tensor_is_read(served, rows, columns, replaced):
    """Digests tell, and where there are none, the server is asked whether it is still the same file."""
    _, url, file = served
    reader = StorageReader(url)
    reader.set_up_storage_reader(reader.read_metadata(), True)
    if replaced:
        data = file.read_bytes()
        file.unlink()
        file.write_bytes(data[: len(data) // 2] + b"x" + data[len(data) // 2 + 1 :])
    where = MetadataIndex("w", torch.Size([0, 0]))
    offsets, lengths = (
        torch.Size([rows.start, columns.start]),
        torch.Size([rows.stop - rows.start, columns.stop - columns.start]),
    )
    plan = LoadPlan([ReadItem(LoadItemType.TENSOR, where, torch.Size([0, 0]), where, offsets, lengths)])
    filled = Filled(*lengths)
    if replaced:
        with pytest.raises(CheckpointError, match=r"is damaged|was replaced"):
            reader.read_data(plan, filled)
    else:
        reader.read_data(plan, filled).wait()
        assert torch.equal(filled.tensor, STATE["w"][rows, columns])
