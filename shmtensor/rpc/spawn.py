"""Starting a worker: a spawned process that searches the standard library for modules first, user directories last."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Callable
from multiprocessing import context, popen_spawn_posix, reduction, resource_tracker, spawn, util
from typing import Any

from ..children import python_command, python_environment, safe_path
from ..errors import ArgumentError


class _Spawned(popen_spawn_posix.Popen):
    """A spawned process of `multiprocessing`, started by another command and with another `sys.path`.

    The command of `multiprocessing` searches the current directory first, and then, as in this process, the script's.
    """

    _fds: list[int]
    _process: subprocess.Popen[bytes]

    def _launch(self, process: Any) -> None:
        prepared = spawn.get_preparation_data(process._name)
        prepared["sys_path"] = safe_path(prepared["sys_path"])
        pickled = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(prepared, pickled)
            reduction.dump(process, pickled)
        finally:
            context.set_spawning_popen(None)
        tracker = getattr(resource_tracker._resource_tracker, "_fd", None)  # shared, if there is one: none is needed
        ends: list[int] = []
        try:
            ends += (*os.pipe(), *os.pipe())
            sentinel, its_sentinel, read, write = ends  # the first is readable when the process has ended
            passed = [*self._fds, its_sentinel, read, *([] if tracker is None else [tracker])]
            command = python_command(_enter(tracker, read), "--multiprocessing-fork")
            command[1:1] = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
            self._process = subprocess.Popen(
                command, executable=spawn.get_executable(), env=python_environment(), pass_fds=passed
            )
            self.pid = self._process.pid
            with open(write, "wb", closefd=False) as pipe:
                pipe.write(pickled.getbuffer())
            self.sentinel = sentinel
            self.finalizer = util.Finalize(self, _close, (sentinel, write))  # the process sees the end of `write`
            del ends[:], sentinel, write
            _close(its_sentinel, read)
        finally:
            _close(*ends)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            self.returncode = self._process.poll() if flag == os.WNOHANG else self._process.wait()
        return self.returncode


def _enter(tracker: int | None, pipe: int) -> str:
    """The code that a worker runs first. It restores `PYTHONPATH` for programs that the worker starts."""
    path = os.environ.get("PYTHONPATH")
    restore = "" if path is None else f"import os; os.environ['PYTHONPATH'] = {path!r}; "
    return restore + (
        f"from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd={tracker}, pipe_handle={pipe})"
    )


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class SpawnedProcess(context.SpawnProcess):
    """`multiprocessing.get_context("spawn").Process` for workers."""

    _Popen = _Spawned


def process_class(chosen: Any) -> Any:
    """The class of a context's processes; for plain `"spawn"` contexts `SpawnedProcess`."""
    plain = type(chosen) in (context.SpawnContext, context.DefaultContext)
    return SpawnedProcess if plain and chosen.get_start_method() == "spawn" else chosen.Process


def check_picklable(handler: Callable[..., Any], what: str = "handler") -> None:
    """Raise `ArgumentError` unless a function can be pickled and unpickled by a worker that is not a fork."""
    names = _MainNames(io.BytesIO())
    try:
        names.dump(handler)
    except Exception as error:
        raise ArgumentError(
            f"the {what} cannot be sent to a worker ({type(error).__name__}: {error}): define it at the top of a "
            'module, pass its name as "module:name", or mp_context="fork"'
        ) from None
    if names.found and not _can_import_main():
        raise ArgumentError(
            f"the {what} needs {names.found[0]} of __main__, which workers cannot import: it is a notebook, an "
            "interactive interpreter, python -c or standard input. Put it into a module, and pass that module's "
            'function or its name as "module:name", or pass mp_context="fork"'
        )


class _MainNames(pickle.Pickler):
    """Collects the names of `__main__` that a pickle refers to."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.found: list[str] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__":
            self.found.append(obj.__qualname__)
        return NotImplemented


def _can_import_main() -> bool:
    """Whether a worker can import this process's `__main__`, by its module's name or its file."""
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None:
        return True
    path = getattr(main, "__file__", None)
    return path is not None and os.path.isfile(path)
