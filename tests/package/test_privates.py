"""No module reaches for what another one's class keeps for itself: `other._name` across files, and no class overrides
what a base class in another file keeps for itself: pieces are put together by composition."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from .test_layers import MODULES, PACKAGE, name_of

# names that are public in spite of their underscore
PUBLIC = {"_replace", "_asdict", "_exit", "_getframe"}  # of namedtuple, os and sys

# module -> privates of other libraries, where every version that is supported has no public way
FOREIGN: dict[str, set[str]] = {
    # s3fs: what its own methods call the server by, with its retries and credentials
    "checkpoint/answers.py": {"_call_s3"},
    # torch: what a module does with a state before its tensors are filled
    "checkpoint/load.py": {"_load_from_state_dict", "_load_state_dict_pre_hooks"},
    # torch: the parts of nested and quantized tensors, and how they are made of their parts; the flag of COO tensors
    "checkpoint/formats/torch.py": {"_nested_tensor_size", "_nested_tensor_storage_offsets", "_nested_tensor_strides"},
    "codec/composites.py": {
        "_coalesced_", "_empty_affine_quantized", "_empty_per_channel_affine_quantized", "_indices", "_metadata_cache",
        "_nested_tensor_size", "_nested_view_from_buffer", "_ragged_idx", "_values",
    },
    "codec/torch.py": {"_empty_affine_quantized", "_is_zerotensor"},
    # torch: the functions of DLPack without their Python wrappers
    "codec/implementation.py": {"_C", "_from_dlpack", "_to_dlpack"},
    # torch: whether CUDA was used before this process was forked; shared storages, a rival in the demo
    "cuda/runtime.py": {"_is_in_bad_fork"},
    "cli/demo.py": {"_new_shared"},
    # torch and multiprocessing: the reducers that its pickler knows, which objects of storages it would share
    "mp/pickling.py": {"_extra_reducers", "_storage_classes", "_untyped_storage"},
    # asyncio: the running loop, or None, without an exception
    "endpoints/wait_queue.py": {"_get_running_loop"},
    # concurrent.futures: the executor is its own with other queues
    "executor/calls.py": {"_RemoteTraceback"},
    "executor/executor.py": {"_ExecutorManagerThread", "_WorkItem", "_global_shutdown", "_is_owned", "_python_exit"},
    "executor/transport.py": {
        "_CallItem", "_ResultItem", "_call_queue", "_max_workers", "_result_queue", "_writer",
    },
    # multiprocessing: the queue by which its pool's threads wake each other
    "mp/pool.py": {"_reader"},
    # threading: whether this thread is inside a call already, which a handler has interrupted
    "mp/queue.py": {"_is_owned"},
    # multiprocessing: what its `DupFd` registers, with an action when the descriptor has been sent
    "mp/queue_handle.py": {"_resource_sharer"},
    # multiprocessing: the end of a worker, semaphores by a name, how a child's interpreter is started;
    # threading: the class of the main thread, which a thread of the library is in a process that it has forked
    "executor/worker.py": {"_MainThread", "_flush_std_streams"},
    "memory/semaphores.py": {"_get_value", "_rebuild"},
    # threading: what is called before the interpreter waits for threads at its end, as `atexit` is not, by which
    # concurrent.futures ends its own: Zenoh's threads, which are no daemons, end with their sessions
    "relay/relay.py": {"_register_atexit"},
    # multiprocessing: also the exit code of a process for which other code has waited
    "rpc/supervisor.py": {"_args_from_interpreter_flags", "_name", "_popen", "_resource_tracker"},
}  # fmt: skip

# module -> names of a class of this package, in another module
EXCEPTIONS: dict[str, set[str]] = {
    # a message is filled, or emptied, beside the record of it: an exception could come between, at a call
    "endpoints/receiver.py": {"_hold", "_lease"},
    "endpoints/asyncio.py": {"_hold", "_lease"},
    "endpoints/devices.py": {"_hold", "_lease"},
    # the compiled reader puts the receiver into the message, which gives itself back to it
    "endpoints/message.py": {"_acknowledge", "_reject", "_to_device"},
}

# base class -> its private methods that classes in other files override
HOOKS: dict[str, set[str]] = {
    # what the error of an object that cannot be pickled says to pass instead: words, and nothing but words
    "Local": {"_instead"},
    # how both kinds of endpoints end with their process, and what they drop in a forked child: `Endpoint` calls these
    # when the interpreter does, and no user should find them
    "Endpoint": {"_at_exit", "_drop_in_child", "_outlast"},
    # a relay's ends, by a mixin: messages stay bytes, and what came from the far channel is left to others
    # and a near relay of a service lets the servers of this host take a request first; a far one's attempts count on
    "Receiver": {"_attach", "_reception", "_poll", "_refresh", "_sleep"},
    # and a client of a service leaves when none of its threads has a lock on a request
    "Sender": {"_depart", "_publish"},
    # walks over a description or a state: the same walk that makes something else of a leaf
    "Encoder": {"_array", "_tensor"},
    # the directory of several ranks: other locks
    "Directory": {"_own", "_try_write"},
}

Classes = dict[str, list[tuple[Path, list[str], set[str]]]]


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


def classes_of(paths: list[Path]) -> Classes:
    """Every class, by name: its file, the names of its bases, its private methods."""
    found: Classes = {}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
                names = [base.id for base in bases if isinstance(base, ast.Name)]
                methods = {it.name for it in node.body if isinstance(it, ast.FunctionDef | ast.AsyncFunctionDef)}
                private = {name for name in methods if name.startswith("_") and not name.startswith("__")}
                found.setdefault(node.name, []).append((path, names, private))
    return found


def overrides(classes: Classes) -> set[tuple[str, str, str]]:
    """(class, base class in another file, private method of it that the class overrides), also as a mixin."""

    @functools.cache
    def lineage(name: str) -> set[str]:
        return {name}.union(*(lineage(base) for _, bases, _ in classes.get(name, ()) for base in bases if base != name))

    pairs = set()
    for name, versions in classes.items():
        for _, bases, _ in versions:
            pairs |= {(name, base) for base in lineage(name) - {name}}
            for at, mixin in enumerate(bases):
                later = set().union(*map(lineage, bases[at + 1 :])) - lineage(mixin)
                pairs |= {(own, base) for own in lineage(mixin) for base in later if own not in lineage(base)}
    return {
        (name, base, method)
        for name, base in pairs
        for path, _, methods in classes.get(name, ())
        for other, _, of_base in classes.get(base, ())
        if other != path
        for method in methods & of_base
    }


def test_no_privates_of_bases_are_overridden():
    found = overrides(classes_of(MODULES))
    wrong = {each for each in found if each[2] not in HOOKS.get(each[1], set())}
    assert not wrong, sorted(wrong)
    assert {(base, method) for _, base, method in found} == {(base, it) for base in HOOKS for it in HOOKS[base]}


def test_an_override_is_found(tmp_path):
    (tmp_path / "base.py").write_text("class A:\n    def _f(self): ...\n    def g(self): ...\nclass B(A): ...\n")
    (tmp_path / "bad.py").write_text(
        "class C(B):\n    def _f(self): ...\n    def g(self): ...\n"
        "class Mixin:\n    def _f(self): ...\nclass D(Mixin, B): ...\n"
    )
    assert overrides(classes_of(sorted(tmp_path.iterdir()))) == {("C", "A", "_f"), ("Mixin", "A", "_f")}
