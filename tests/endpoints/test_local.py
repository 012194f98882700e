"""What belongs to a process is not pickled: the error says what to pass instead."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

import shmtensor

from ..waiting import PATIENCE


@pytest.mark.parametrize("kind", ["Publisher", "Subscriber", "Producer", "Consumer", "Client", "Server"])
@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"])
def test_an_endpoint_says_that_its_channels_name_is_to_be_passed(channel, kind, how):
    with getattr(shmtensor, kind)(channel) as endpoint:
        text = f'{kind} belongs to this process .* pass the channel\'s name, "{channel}"'
        with pytest.raises(shmtensor.ArgumentTypeError, match=text) as caught:
            how(endpoint)
        assert isinstance(caught.value, TypeError)  # what pickle raises for what it does not know
        with pytest.raises(TypeError, match="pass the channel's name"):
            pickle.dumps({"in a": [endpoint]})
        del caught


def test_an_endpoint_as_an_argument_of_a_spawned_process(channel):
    with shmtensor.Publisher(channel) as pub:
        process = shmtensor.get_context("spawn").Process(target=print, args=(pub,))
        with pytest.raises(TypeError, match="pass the channel's name"):
            process.start()


def test_an_endpoint_as_an_argument_of_an_executor(channel):
    with (
        shmtensor.Publisher(channel) as pub,
        shmtensor.ProcessPoolExecutor(1) as executor,
        pytest.raises(TypeError, match="pass the channel's name"),
    ):
        executor.submit(print, pub).result(60)


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"])
def test_a_checkpoint_writer_and_its_saves(tmp_path, how):
    with shmtensor.CheckpointWriter(tmp_path) as writer:
        handle = writer.save({"a": 1})
        for it, instead in ((writer, "directory of its own"), (handle, "path"), (handle.durable, "result")):
            with pytest.raises(shmtensor.ArgumentTypeError, match=f"neither copied nor pickled: .*{instead}"):
                how(it)
        assert how(handle.durable.result(60))


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"])
def test_a_worker_pool(how):
    pool = shmtensor.WorkerPool.__new__(shmtensor.WorkerPool)
    with pytest.raises(shmtensor.ArgumentTypeError, match="neither copied nor pickled: pass the service's name"):
        how(pool)


def test_messages_loans_and_requests(channel):
    with shmtensor.Publisher(channel) as pub, shmtensor.Subscriber(channel) as sub:
        with pub.loan(3, np.int64) as loan:
            loan.array[...] = 7
            with pytest.raises(TypeError, match=r"Loan belongs .* pass it the channel's name"):
                pickle.dumps(loan)
        msg = sub.recv(timeout=PATIENCE)
        with pytest.raises(TypeError, match=r"Message belongs .* pass msg.copy\(\), or the channel's name"):
            pickle.dumps(msg)
        assert pickle.loads(pickle.dumps(msg.copy())).tolist() == [7, 7, 7]
        msg.release()
        with pytest.raises(TypeError, match="belongs to this process"):
            copy.copy(msg)
    with shmtensor.Server(f"{channel}-s") as server, shmtensor.Client(f"{channel}-s") as client:
        future = client.submit(torch.ones(1))
        req = server.recv(timeout=PATIENCE)
        with pytest.raises(TypeError, match=r"Request belongs .* pass req.value"):
            pickle.dumps(req)
        req.reply(req.value)
        del req
        assert future.result(100).item() == 1


@pytest.mark.parametrize("shape", [5, np.int64(5), (5,), [5], torch.Size([5]), torch.tensor(5)], ids=repr)
@pytest.mark.parametrize("dtype", [np.float32, torch.float32], ids=["numpy", "torch"])
def test_a_loan_takes_an_int_for_a_shape(channel, shape, dtype):
    with shmtensor.Publisher(channel) as pub, shmtensor.Subscriber(channel) as sub:
        with pub.loan(shape, dtype) as loan:
            assert "shape=(5,)" in repr(loan)
            view = loan.array if dtype is np.float32 else loan.tensor
            view[:] = 2
            del view
        value = sub.recv(timeout=PATIENCE).value
        assert tuple(value.shape) == (5,)
        assert value.sum() == 10


def test_an_empty_and_a_wrong_shape_of_a_loan(channel):
    with shmtensor.Publisher(channel) as pub:
        with pub.loan(0, np.int8) as loan:
            assert loan.array.shape == (0,)
        with pub.loan((), np.int8) as loan:
            assert loan.array.shape == ()
        for shape, error in ((2.5, TypeError), ("ab", TypeError), ((2, None), TypeError), (-1, ValueError)):
            with pytest.raises(error, match="shape="):
                pub.loan(shape, np.int8)
        assert pub.send(np.zeros(1)) == 3
