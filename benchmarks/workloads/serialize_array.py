"""One array to a model endpoint and back: the rows of a public article, and further encodings."""

from __future__ import annotations

import base64
import http.client
import importlib.util
import io
import json
import pickle
import socket
import time
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from ..measure import RowSpec, Samples
from ..processes import NO_TORCH, Role, fresh_name, pipes, run_roles
from ..transports import PICKLE, SHMTENSOR
from .base import Case, Effort, Workload

SHAPE = (9, 128, 64, 3)
DTYPE = np.float64


class Encoding(NamedTuple):
    """An array to the bytes of a request body and back."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]
    module: str | None = None
    """Needed, beside NumPy."""
    published: float | None = None
    """Seconds, as the article says."""


def _base64_json(array: Any) -> bytes:
    return base64.b64encode(json.dumps(array.tolist()).encode())


def _from_base64_json(body: bytes) -> Any:
    return np.array(json.loads(base64.b64decode(body)), DTYPE)


def _msgpack_list(array: Any) -> bytes:
    import msgpack

    return msgpack.packb(array.tolist())


def _from_msgpack_list(body: bytes) -> Any:
    import msgpack

    return np.array(msgpack.unpackb(body), DTYPE)


def _msgpack_bytes(array: Any) -> bytes:
    import msgpack

    return msgpack.packb({"shape": array.shape, "dtype": array.dtype.str, "data": array.tobytes()})


def _from_msgpack_bytes(body: bytes) -> Any:
    import msgpack

    found = msgpack.unpackb(body)
    return np.frombuffer(found["data"], found["dtype"]).reshape(found["shape"])


def _raw(array: Any) -> bytes:
    return array.tobytes()  # the shape goes into a header


def _from_raw(body: bytes) -> Any:
    return np.frombuffer(body, DTYPE).reshape(SHAPE)


def _base64_bytes(array: Any) -> bytes:
    return base64.b64encode(array.tobytes())


def _from_base64_bytes(body: bytes) -> Any:
    return _from_raw(base64.b64decode(body))


def _pickle_out_of_band(array: Any) -> bytes:
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(array, 5, buffer_callback=buffers.append)
    return b"".join([len(head).to_bytes(8, "little"), head, *buffers])


def _from_pickle_out_of_band(body: bytes) -> Any:
    size = int.from_bytes(body[:8], "little")
    view = memoryview(body)[8:]
    return pickle.loads(view[:size], buffers=[view[size:]])


def _npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def _from_npy(body: bytes) -> Any:
    return np.load(io.BytesIO(body), allow_pickle=False)


def _safetensors(array: Any) -> bytes:
    import safetensors.numpy

    return safetensors.numpy.save({"x": array})


def _from_safetensors(body: bytes) -> Any:
    import safetensors.numpy

    return safetensors.numpy.load(body)["x"]


def _arrow(array: Any) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    pyarrow.ipc.write_tensor(pyarrow.Tensor.from_numpy(array), sink)
    return sink.getvalue().to_pybytes()


def _from_arrow(body: bytes) -> Any:
    import pyarrow

    return pyarrow.ipc.read_tensor(pyarrow.BufferReader(body)).to_numpy()


ENCODINGS = {
    "base64(JSON(tolist))": Encoding(_base64_json, _from_base64_json, published=0.192),
    "msgpack(tolist)": Encoding(_msgpack_list, _from_msgpack_list, "msgpack", 0.156),
    "msgpack(tobytes)": Encoding(_msgpack_bytes, _from_msgpack_bytes, "msgpack", 0.000051),
    "raw bytes, shape in a header": Encoding(_raw, _from_raw),
    "base64(tobytes)": Encoding(_base64_bytes, _from_base64_bytes),
    "pickle 4": Encoding(lambda array: pickle.dumps(array, 4), pickle.loads),
    "pickle 5 out of band": Encoding(_pickle_out_of_band, _from_pickle_out_of_band),
    "npy": Encoding(_npy, _from_npy),
    "safetensors": Encoding(_safetensors, _from_safetensors, "safetensors"),
    "Arrow IPC": Encoding(_arrow, _from_arrow, "pyarrow"),
}
OURS = "shmtensor, Publisher and Subscriber"


def _array() -> Any:
    return np.random.default_rng(0).uniform(size=SHAPE)


def measure(name: str, effort: Effort) -> Samples:
    """Seconds to encode, to decode, and of a request that carries the array to another process, decoded there."""
    with pipes(1) as [(ours, theirs)]:
        return run_roles([Role(_ask, (name, effort, ours), NO_TORCH), Role(_serve, (name, theirs), NO_TORCH)])[0]


def _ask(meet: Callable[[], object], name: str, effort: Effort, control: Connection) -> Samples:
    array, encoding = _array(), ENCODINGS[name]
    clock = time.perf_counter
    samples: Samples = {"encode": [], "decode": [], "end to end": []}
    meet()
    connection = http.client.HTTPConnection("127.0.0.1", control.recv(), timeout=60)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    spent, turns = 0.0, -1
    while turns < effort.least or (spent < 2 * effort.seconds and turns < effort.most):
        begin = clock()
        body = encoding.encode(array)
        encoded = clock()
        value = encoding.decode(body)
        decoded = clock()
        if turns < 0 and not (np.array_equal(value, array) and value.dtype == array.dtype):
            raise AssertionError("other values came back")
        del value
        start = clock()
        connection.request("POST", "/", encoding.encode(array), {"X-Shape": ",".join(map(str, SHAPE))})
        answer = connection.getresponse().read()
        end = clock()
        if float(answer) != array[-1, -1, -1, -1]:
            raise AssertionError("the endpoint saw other values")
        if turns >= 0:
            samples["encode"].append(encoded - begin)
            samples["decode"].append(decoded - encoded)
            samples["end to end"].append(end - start)
        spent += end - begin
        turns += 1
    connection.close()
    meet()
    return samples | {"size": [float(len(body))]}


def _serve(meet: Callable[[], object], name: str, control: Connection) -> None:
    decode = ENCODINGS[name].decode

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            answer = repr(float(decode(body)[-1, -1, -1, -1])).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.timeout = 60
        meet()
        control.send(server.server_address[1])
        server.handle_request()  # one connection, kept alive: until the other side closes it
    meet()


def measure_ours(effort: Effort) -> Samples:
    """Seconds of `send` and `recv` in one process, and of a request and its answer between two."""
    name = fresh_name()
    return run_roles([Role(_our_ask, (name, effort), NO_TORCH), Role(_our_serve, (name,), NO_TORCH)])[0]


def _our_ask(meet: Callable[[], object], name: str, effort: Effort) -> Samples:
    import shmtensor

    array, clock = _array(), time.perf_counter
    samples: Samples = {"encode": [], "decode": [], "end to end": []}
    own, there, back = f"{name}-own", f"{name}-there", f"{name}-back"
    with (
        shmtensor.Publisher(own, slots=4) as pub,
        shmtensor.Subscriber(own) as sub,
        shmtensor.Subscriber(back) as answers,
        shmtensor.Publisher(there, slots=4) as requests,
    ):
        meet()
        for turn in range(-20, effort.count(2e-3)):
            begin = clock()
            pub.send(array)
            sent = clock()
            message = sub.recv(timeout=60)
            value = message.value
            received = clock()
            if turn == -20 and not np.array_equal(value, array):
                raise AssertionError("other values came back")
            size = float(message.nbytes)
            del value, message
            start = clock()
            requests.send(array)
            answer = answers.recv(timeout=60).value["answer"]
            end = clock()
            if answer != array[-1, -1, -1, -1]:
                raise AssertionError("the endpoint saw other values")
            if turn >= 0:
                samples["encode"].append(sent - begin)
                samples["decode"].append(received - sent)
                samples["end to end"].append(end - start)
        requests.close()
        meet()
    return samples | {"size": [size]}


def _our_serve(meet: Callable[[], object], name: str) -> None:
    import shmtensor

    with shmtensor.Subscriber(f"{name}-there") as requests, shmtensor.Publisher(f"{name}-back", slots=4) as answers:
        meet()
        for message in requests:
            answers.send({"answer": float(message.value[-1, -1, -1, -1])})
            del message
        meet()


def _missing(module: str | None) -> str | None:
    return None if module is None or importlib.util.find_spec(module) else f"{module} is not installed"


_METRICS = (
    ("encode", "encode (send)"),
    ("decode", "decode (recv)"),
    ("end to end", "end to end, two processes"),
)


def _rows(name: str, transport: str, published: float | None) -> tuple[RowSpec, ...]:
    return (
        *(
            RowSpec(
                f"{metric}, {name}", transport, name, metric, "ms", 1e3,
                None if name == OURS else f"{metric}, {OURS}", "ms", name, column,
                published=published * 1e3 if published and metric == "encode" else None,
            )
            for metric, column in _METRICS
        ),
        RowSpec(f"size, {name}", transport, name, "size", "KB", 1 / 1024, None, "body, KB", name, "size"),
    )  # fmt: skip


WORKLOAD = Workload(
    name="serialize-array",
    title="Serialization of one float64 array (9, 128, 64, 3), as for a model endpoint",
    what=(
        "encode and decode: in one process. End to end: HTTP POST over the loopback interface to a process "
        "that decodes the body and answers with its last value, one connection kept open; encoding is "
        "inside the clock. shmtensor: send and recv; end to end the same request and answer over two "
        "channels, asleep while waiting. The article names one time for each technique, which stands beside "
        "encode. Processes without torch."
    ),
    cases=(
        *(
            Case(
                name, PICKLE, partial(measure, name), quick=name == "msgpack(tobytes)", rounds=1,
                needs=partial(_missing, encoding.module),
            )
            for name, encoding in ENCODINGS.items()
        ),
        Case(OURS, SHMTENSOR, measure_ours, rounds=1),
    ),
    rows=(
        *_rows(OURS, SHMTENSOR.name, None),
        *(row for name, encoding in ENCODINGS.items() for row in _rows(name, name, encoding.published)),
    ),
    rounds={"full": 1},
)  # fmt: skip
