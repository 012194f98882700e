"""The driver of a test's cluster: starts it, and calls functions of a module as it is told, line by line."""

from __future__ import annotations

import array
import ctypes
import fcntl
import importlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import traceback
from typing import Any

_CLONE_NEWNS = 0x20000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_STORE_BYTES = 80 << 20


def mount(where: str) -> None:
    """A tmpfs that no other namespace sees."""
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", where], check=True)


def raise_loopback() -> None:
    """The network of this namespace: 127.0.0.1."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = array.array("b", struct.pack("16sH14s", b"lo", 0, b""))
        fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request)
        flags = struct.unpack("16sH14s", request)[1] | _IFF_UP
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", flags, b""))


class Nodes:
    """The cluster. `head` and `there` are nodes with a `/dev/shm` each."""

    def __init__(self, directory: str, hook: str) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self.ray, self._directory, self._count = ray, directory, 0
        self._options = {"node_ip_address": "127.0.0.1", "include_dashboard": False, "num_cpus": 4}
        self._options["object_store_memory"] = _STORE_BYTES
        self._set_directory()
        config = {"automatic_object_spilling_enabled": False}
        self.cluster = Cluster(
            initialize_head=True, shutdown_at_exit=False, head_node_args={**self._options, "_system_config": config}
        )
        self.add("there", own_shm=True)
        environment = {"worker_process_setup_hook": hook} if hook else None
        ray.init(address=self.cluster.address, logging_level="ERROR", runtime_env=environment)
        self.address = self.cluster.address
        self.head = self.id_of(self.cluster.head_node)
        self.there = self.by_resource("there")

    def _set_directory(self) -> None:
        os.environ["SHMTENSOR_DIR"] = f"{self._directory}/sockets{self._count}"
        os.mkdir(os.environ["SHMTENSOR_DIR"], 0o700)
        self._count += 1

    def add(self, name: str, *, own_shm: bool, hidden: str = "") -> Any:
        """Start a node with a resource of that name: on the head's machine, or on one of its own, where a folder may
        be hidden."""
        before = os.environ.get("SHMTENSOR_DIR", "")
        found: list[Any] = []

        def start() -> None:
            if own_shm:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.unshare(_CLONE_NEWNS):  # this thread's, and its children's
                    raise OSError(ctypes.get_errno(), "unshare")
                for where in filter(None, ("/dev/shm", hidden)):
                    mount(where)
                self._set_directory()
            found.append(self.cluster.add_node(**self._options, resources={name: 1}))

        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        os.environ["SHMTENSOR_DIR"] = before
        return found[0]

    def id_of(self, node: Any) -> str:
        return str(node.node_id)

    def by_resource(self, name: str) -> str:
        return str(next(it["NodeID"] for it in self.ray.nodes() if it["Alive"] and name in it["Resources"]))

    def on(self, node: str, **options: Any) -> dict[str, Any]:
        """Options of an actor or a task for one node."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return {
            "num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False), **options
        }  # fmt: skip


def main() -> None:
    directory, module, hook = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray writes there
    raise_loopback()
    for where in (directory, "/dev/shm"):
        mount(where)
    os.environ["RAY_TMPDIR"] = directory
    nodes = Nodes(directory, hook)
    plays = importlib.import_module(f"tests.ray.{module}")
    for line in sys.stdin:
        name, *args = json.loads(line)
        try:
            answer = {"result": getattr(plays, name)(nodes, *args)}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
    nodes.ray.shutdown()
    nodes.cluster.shutdown()


if __name__ == "__main__":
    main()
