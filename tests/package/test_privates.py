"""No module reaches for what another one's class keeps for itself: `other._name` across files."""

from __future__ import annotations

import ast
from pathlib import Path

from .test_layers import MODULES, PACKAGE, name_of

# names that are public in spite of their underscore
PUBLIC = {"_replace", "_asdict", "_exit", "_getframe"}  # of namedtuple, os and sys

# module -> privates of other libraries, where every version that is supported has no public way
FOREIGN: dict[str, set[str]] = {
    # s3fs: what its own methods call the server by, with its retries and credentials
    "checkpoint/bodies.py": {"_call_s3"},
    # torch: the parts of nested and quantized tensors, and how they are made of their parts
    "checkpoint/objects.py": {"_nested_tensor_size", "_nested_tensor_storage_offsets", "_nested_tensor_strides"},
    "codec/composites.py": {
        "_empty_affine_quantized", "_empty_per_channel_affine_quantized", "_indices", "_metadata_cache",
        "_nested_tensor_size", "_nested_view_from_buffer", "_ragged_idx", "_values",
    },
    "codec/torch.py": {"_empty_affine_quantized", "_is_zerotensor"},
    # torch: the functions of DLPack without their Python wrappers
    "codec/implementation.py": {"_C", "_from_dlpack", "_to_dlpack"},
    # torch: whether CUDA was used before this process was forked; shared storages, a rival in the demo
    "cuda/runtime.py": {"_is_in_bad_fork"},
    "cli/demo/transports.py": {"_new_shared"},
    # torch and multiprocessing: the reducers that its pickler knows, which objects of storages it would share
    "mp/pickling.py": {"_extra_reducers", "_storage_classes", "_untyped_storage"},
    # asyncio: the running loop, or None, without an exception
    "endpoints/wait_queue.py": {"_get_running_loop"},
    "rpc/async_request.py": {"_get_running_loop"},
    # concurrent.futures: the executor is its own with other queues
    "executor/executor.py": {"_WorkItem", "_global_shutdown", "_is_owned"},
    "executor/transport.py": {
        "_CallItem", "_ResultItem", "_call_queue", "_max_workers", "_on_queue_feeder_error", "_result_queue", "_writer",
    },
    # multiprocessing: the queue by which its pool's threads wake each other
    "mp/pool.py": {"_reader"},
    # multiprocessing: what its `DupFd` registers, with an action when the descriptor has been sent
    "mp/queue_handle.py": {"_resource_sharer"},
    # multiprocessing: the end of a worker, semaphores by a name, how a child's interpreter is started
    "executor/worker.py": {"_flush_std_streams"},
    "memory/counters.py": {"_get_value", "_rebuild"},
    "rpc/spawn.py": {"_args_from_interpreter_flags", "_name", "_resource_tracker"},
}  # fmt: skip

# module -> names of a class of this package, in another module
EXCEPTIONS: dict[str, set[str]] = {
    # a message is filled, or emptied, beside the record of it: an exception could come between, at a call
    "endpoints/receiver.py": {"_hold", "_lease"},
    "endpoints/async_receiver.py": {"_hold", "_lease"},
    "endpoints/devices.py": {"_hold", "_lease"},
    "rpc/taken.py": {"_empty", "_lease", "_receiver"},
    "rpc/client_endpoints.py": {"_lease"},
    # the compiled reader puts the receiver into the message, which gives itself back to it
    "endpoints/message.py": {"_acknowledge", "_reject", "_to_device"},
}


def crossings(path: Path) -> set[str]:
    """The names after `other._` that no class or function of this file defines or sets on itself."""
    tree = ast.parse(path.read_text())
    own, used = set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                own.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                own.add(name)
            case ast.Constant(value=str(name)):  # of __slots__
                own.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                if isinstance(node.ctx, ast.Store):
                    own.add(name)
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super"))):
                pass
            case ast.Attribute(attr=name):
                used.add(name)
    return {name for name in used - own if name.startswith("_") and not name.startswith("__")} - PUBLIC


def test_no_privates_of_others():
    found = {name_of(path): crossings(path) for path in MODULES}
    wrong = {name: names - FOREIGN.get(name, set()) - EXCEPTIONS.get(name, set()) for name, names in found.items()}
    assert not any(wrong.values()), {name: names for name, names in wrong.items() if names}


def test_the_exceptions_are_used():
    unused = {name: names - crossings(PACKAGE / name) for name, names in (*FOREIGN.items(), *EXCEPTIONS.items())}
    assert not any(unused.values()), unused


def test_a_crossing_is_found(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text(
        "class A:\n    def f(self, other):\n        self._mine = other._theirs + other._mine + super()._own\n"
    )
    assert crossings(path) == {"_theirs"}
