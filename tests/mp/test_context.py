"""`get_context`: a context of the standard library but for its queues, and torch's DataLoader on top of it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import gc
import multiprocessing
import multiprocessing.pool
import os
import signal
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import shmtensor
from shmtensor.mp import context

from ..conftest import left_files
from ..forkservers import preloaded
from ..waiting import complaints

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

METHODS = ["fork", "forkserver", "spawn"]
LONG = 120


@pytest.fixture(scope="module", autouse=True)
def server():
    with preloaded("torch.utils.data", "shmtensor.mp.context"):
        yield


@pytest.fixture(autouse=True)
def no_queue_is_left():
    yield
    gc.collect()
    assert sorted(left_files("queue")) == []


class Images(Dataset):
    def __init__(self, count=24, shape=(3, 64, 64)):
        self.count, self.shape = count, shape

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.full(self.shape, float(index)), index


def load(data, method="fork", workers=2, batch=4, **options):
    if workers:
        options.update(multiprocessing_context=shmtensor.get_context(method), timeout=LONG)
    return DataLoader(data, batch_size=batch, num_workers=workers, **options)


def check(loader, count=24):
    seen = []
    for images, indices in loader:
        assert (images.amin((1, 2, 3)) == indices).all()
        assert (images.amax((1, 2, 3)) == indices).all()
        seen += indices.tolist()
    assert seen == list(range(count))


# --- the context


@pytest.mark.parametrize("method", METHODS)
def test_it_is_the_standard_context_but_for_its_queues(method):
    ctx = shmtensor.get_context(method)
    standard = multiprocessing.get_context(method)
    assert isinstance(ctx, type(standard))
    assert ctx is shmtensor.get_context(method)
    assert ctx.get_start_method() == method
    assert ctx.get_context() is ctx
    assert ctx.get_context("fork") is shmtensor.get_context("fork")
    for kind in (ctx.Queue, ctx.JoinableQueue, ctx.SimpleQueue):
        q = kind()
        assert type(q) is getattr(shmtensor, type(q).__name__)
        q.put(torch.ones(2))
        assert q.get().tolist() == [1, 1]
    assert ctx.Queue(3)._maxsize == 3
    event = ctx.Event()
    child = ctx.Process(target=event.set)
    child.start()
    assert event.wait(LONG)
    child.join(LONG)
    assert child.exitcode == 0


def test_the_default_method_and_an_unknown_one():
    assert shmtensor.get_context().get_start_method() == multiprocessing.get_start_method()
    with pytest.raises(ValueError, match="cannot find context"):
        shmtensor.get_context("telepathy")


@pytest.mark.parametrize("method", METHODS)
def test_the_standard_librarys_own_executor_and_pool_work_with_it(method):
    """They wait on the pipes of their queues, so these are standard ones."""
    ctx = shmtensor.get_context(method)
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=ctx) as executor:
        assert list(executor.map(abs, [-1, -2, -3])) == [1, 2, 3]
    with multiprocessing.pool.Pool(2, context=ctx) as pool:
        assert pool.map(abs, [-1, -2, -3]) == [1, 2, 3]
        pool.close()
        pool.join()
    with contextlib.closing(ctx.SimpleQueue()) as queue:
        assert type(queue) is shmtensor.SimpleQueue


# --- DataLoader


@pytest.mark.parametrize("method", METHODS)
def test_batches_arrive(method):
    check(load(Images(), method))


@pytest.mark.parametrize("workers", [0, 1])
def test_no_worker_and_one(workers):
    check(load(Images(), workers=workers))


@pytest.mark.parametrize(
    "options", [{"persistent_workers": True}, {"prefetch_factor": 5}, {"in_order": False}], ids=str
)
def test_several_epochs(options):
    if "in_order" in options and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6):
        pytest.skip("this torch has no in_order")
    loader = load(Images(), **options)
    for _ in range(3):
        if options.get("in_order", True):
            check(loader)
        else:
            assert sorted(index for _, indices in loader for index in indices.tolist()) == list(range(24))


def test_an_early_break():
    loader = load(Images(), persistent_workers=True)
    for _ in range(3):
        for images, indices in loader:
            assert images[0, 0, 0, 0] == indices[0]
            break
    check(loader)
    for _ in load(Images()):
        break


def test_batches_that_are_kept_stay_as_they_were():
    kept = list(load(Images(96, (3, 128, 128))))  # 192 KiB a sample: more than any ring starts with
    for number, (images, indices) in enumerate(kept):
        assert indices.tolist() == list(range(4 * number, 4 * number + 4))
        assert (images.mean((1, 2, 3)) == indices).all()
        images += 1  # writable, and nobody else's
    assert [images[0, 0, 0, 0].item() for images, _ in kept] == [4 * number + 1 for number in range(24)]


def test_batches_that_are_kept_hold_few_descriptors():
    """With torch's own context this program ends at "Too many open files": it holds one for each tensor."""
    script = """
import os, resource, torch, shmtensor
from torch.utils.data import DataLoader, Dataset

class Images(Dataset):
    def __len__(self):
        return 600
    def __getitem__(self, index):
        return torch.full((4096,), float(index)), index

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    before = set(os.listdir("/proc/self/fd"))
    loader = DataLoader(Images(), batch_size=2, num_workers=2, multiprocessing_context=shmtensor.get_context("fork"))
    kept = list(loader)
    added = set(os.listdir("/proc/self/fd")) - before
    for number, (images, indices) in enumerate(kept):
        assert indices.tolist() == [2 * number, 2 * number + 1]
        assert (images == indices[:, None]).all()
    print(len(kept), len(added))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script],
        capture_output=True, text=True, timeout=LONG, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (done.returncode, complaints(done.stderr)) == (0, "")
    batches, descriptors = map(int, done.stdout.split())
    assert batches == 300
    assert descriptors <= 64, "two for each ring of a worker, each of which is larger than the one before"


@dataclasses.dataclass
class Pair:
    image: torch.Tensor
    label: int


class Structured(Images):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return {"image": image, "label": label, "name": f"n{label}", "more": (np.full(3, label), [image[0], 1.5])}


def as_pairs(samples):
    return [Pair(image, label) for image, label in samples]


def test_structured_batches():
    for number, batch in enumerate(load(Structured())):
        assert batch["label"].tolist() == list(range(4 * number, 4 * number + 4))
        assert batch["name"] == [f"n{label}" for label in batch["label"].tolist()]
        array, (rows, halves) = batch["more"]
        assert array[:, 0].tolist() == batch["label"].tolist()
        assert torch.equal(rows, batch["image"][:, 0])
        assert halves.dtype == torch.float64
    assert number == 5
    batches = list(load(Images(), collate_fn=as_pairs))
    assert [[type(pair) for pair in batch] for batch in batches] == [[Pair] * 4] * 6
    assert [pair.image.mean().item() for batch in batches for pair in batch] == list(range(24))
    assert [image.mean().item() for image, _ in load(Images(), batch=None)] == list(range(24))


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        for index in range(info.id, 24, info.num_workers):
            yield torch.full((3, 64, 64), float(index)), index


def test_iterable_datasets():
    loader = load(Stream(), persistent_workers=True)
    for _ in range(2):
        assert sorted(index for _, indices in loader for index in indices.tolist()) == list(range(24))


class Unlike(Images):
    def __getitem__(self, index):
        return torch.zeros(index + 1)


class Mixed(Images):
    def __getitem__(self, index):
        image = torch.full((64, 64), float(index))
        return {
            "small": image[0, :2],
            "half": image.half(),
            "bool": image > 3,
            "scalar": torch.tensor(index),
            "strided": image.t(),
            "sparse": index,
        }


def test_batches_are_collated_as_torch_does():
    for ours, theirs in zip(load(Mixed()), DataLoader(Mixed(), batch_size=4), strict=True):
        for name, tensor in theirs.items():
            assert ours[name].dtype == tensor.dtype
            assert torch.equal(ours[name], tensor)
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        list(load(Unlike()))


class Raises(Images):
    def __getitem__(self, index):
        if index == 9:
            raise LookupError("sample nine")
        return super().__getitem__(index)


def test_an_exception_in_a_worker_is_raised_with_its_traceback():
    with pytest.raises(LookupError, match=r"(?s)Caught LookupError in DataLoader worker process 0.*sample nine"):
        list(load(Raises()))


class Dies(Images):
    def __getitem__(self, index):
        if index == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_death_of_a_worker_is_reported_as_torch_does(method):
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid.* exited unexpectedly|killed by signal: Killed"):
        list(load(Dies(), method))


def test_no_worker_uses_torchs_shared_memory():
    """The buffers of collated batches are used again, so that no page is made, and zeroed, for each batch."""
    addresses = {tuple(each.tolist()) for images, _ in load(Where(40), workers=1) for each in [images[-1, :2]]}
    assert len(addresses) <= context._KEPT


class Where(Images):
    """A sample names the buffers that were in use when it was made."""

    def __getitem__(self, index):
        first = next(iter(context._spare), 0)
        sample = torch.zeros(5000, dtype=torch.int64)
        sample[:2] = first
        return sample, index


def test_pinned_memory():
    if not torch.cuda.is_available():
        pytest.skip("pinning needs CUDA")
    for images, indices in load(Images(), pin_memory=True):
        assert images.is_pinned()
        assert (images.cuda().mean((1, 2, 3)).cpu() == indices).all()


def test_pinning_without_cuda_changes_nothing():
    if torch.cuda.is_available():
        pytest.skip("there is CUDA")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it finds no accelerator
        check(load(Images(), pin_memory=True))
