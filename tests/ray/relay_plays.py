"""What the driver of `test_relays.py` does, and the actors that it does it with. Without torch: they start faster."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray

import shmtensor
import shmtensor.ray

from ..waiting import PATIENCE, wait_until

COUNT = 50


@ray.remote(num_cpus=0)
class Member:
    """One endpoint of a channel, on some node."""

    def __init__(self, kind: str, channel: str, **options: Any) -> None:
        self.end = getattr(shmtensor, kind)(channel, **options)
        self.kept: list[Any] = []

    def wait_for(self, who: str, count: int) -> None:
        getattr(self.end, f"wait_for_{who}")(count, timeout=PATIENCE)

    def send(self, first: int, count: int) -> None:
        for number in range(first, first + count):
            self.end.send({"number": number, "data": np.full(1000, number)})

    def recv(self, count: int) -> list[tuple[int, bool, str]]:
        """Of each message: its number, whether its data are right, its sender's label."""
        found = []
        for _ in range(count):
            with self.end.recv(timeout=PATIENCE) as message:
                number = message.value["number"]
                found.append((number, bool((message.value["data"] == number).all()), message.sender.name))
        return found

    def is_quiet(self) -> bool:
        """Whether nothing more comes."""
        try:
            self.end.recv(timeout=0.3)
        except shmtensor.TimedOut:
            return True
        return False

    def keep(self, count: int) -> None:
        """Take messages and do not finish them."""
        self.kept += [self.end.recv(timeout=PATIENCE) for _ in range(count)]

    def serve(self, count: int, name: str) -> None:
        for _ in range(count):
            with self.end.recv(timeout=PATIENCE) as request:
                request.reply({"by": name, "twice": request.value * 2})

    def request(self, value: int) -> Any:
        reply = self.end.request(np.array(value), timeout=PATIENCE)
        return reply["by"], int(reply["twice"])

    def close(self) -> None:
        self.kept.clear()
        self.end.close()


@contextlib.contextmanager
def members(nodes: Any, *which: tuple[Any, ...]) -> Iterator[list[Any]]:
    """Actors with an endpoint each: (node, kind, channel, options)."""
    made = [
        Member.options(**nodes.on(node)).remote(kind, channel, **(options[0] if options else {}))
        for node, kind, channel, *options in which
    ]
    try:
        yield made
        ray.get([member.close.remote() for member in made], timeout=PATIENCE)
    finally:
        for member in made:
            ray.kill(member)


def relay_processes() -> list[int]:
    """The processes of relays' actors, on all nodes: they share a namespace of processes."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/cmdline") as file:
            if file.read().startswith("ray::NodeRelays"):
                found.append(int(name))
    return found


def left(nodes: Any) -> list[str]:
    """Files of the library at the two hosts."""
    found: list[str] = []
    for node in (nodes.head, nodes.there):
        found += ray.get(files_there.options(**nodes.on(node)).remote())
    return found


@ray.remote(num_cpus=0)
def files_there() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if "shmtensor." in name]


def numbers(found: list[tuple[int, bool, str]]) -> list[int]:
    assert all(is_right for _, is_right, _ in found), found
    return [number for number, _, _ in found]


# --- relays


def fan_out(nodes: Any) -> None:
    """Senders on both nodes, receivers on both, one name: each message arrives everywhere, once."""
    with shmtensor.ray.relays(["frames", "more"]) as relays:
        relays.wait(PATIENCE)
        for channel in ("frames", "more"):
            ends = [(node, kind, channel) for kind in ("Publisher", "Subscriber") for node in (nodes.head, nodes.there)]
            with members(nodes, *ends) as (*senders, here, there):
                ray.get([it.wait_for.remote("subscribers", 2) for it in senders])  # one here, and the relay
                ray.get([it.wait_for.remote("publishers", 2) for it in (here, there)])
                ray.get([it.send.remote(1000 * index, COUNT) for index, it in enumerate(senders)])
                for receiver in (here, there):
                    found = ray.get(receiver.recv.remote(2 * COUNT))
                    assert sorted(numbers(found)) == [*range(COUNT), *range(1000, 1000 + COUNT)]
                    for first in (0, 1000):
                        own = [number for number in numbers(found) if first <= number < first + COUNT]
                        assert own == list(range(first, first + COUNT))
                    assert ray.get(receiver.is_quiet.remote())
        ways = (nodes.head, nodes.there), (nodes.there, nodes.head)

        def counts() -> list[set[int]]:
            found = relays.statistics()
            sent = [{it.messages for it in found[node].sent[other].values()} for node, other in ways]
            return sent + [{it.messages for it in found[node].received.values()} for node, _ in ways]

        wait_until(lambda: counts() == [{COUNT}] * 4, counts)
        found = relays.statistics()
        assert set(found) == {nodes.head, nodes.there}
        for it in found.values():
            assert (it.state, it.problem, it.starts) == ("open", "", 1)
            assert it.address.startswith("tcp/127.0.0.1:2")
        assert found[nodes.head].host != found[nodes.there].host
        assert len(relay_processes()) == 2
        assert repr(relays) == "<Relays fan-out of frames, more: 2 nodes>"
    assert repr(relays) == "<Relays fan-out of frames, more: closed>"
    relays.close()
    for call in (lambda: relays.wait(0), relays.__enter__):
        with raises(shmtensor.ClosedError):
            call()
    wait_until(lambda: not relay_processes())
    wait_until(lambda: not left(nodes), lambda: left(nodes))


@contextlib.contextmanager
def raises(kind: type[BaseException], *texts: str) -> Iterator[None]:
    raised = None
    try:
        yield
    except kind as error:
        raised = error
    assert all(text in str(raised) for text in texts), (kind, texts, raised)
    assert raised is not None, f"no {kind.__name__}"


def is_at_head(pid: int) -> bool:
    """Whether a process has the driver's `/dev/shm`."""
    return os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt")


def fan_out_restarted(nodes: Any) -> None:
    """A relay that receives is killed while messages come: none is lost, and the relays of others stay."""
    with shmtensor.ray.relays("frames") as relays:
        relays.wait(PATIENCE)
        ends = (nodes.head, "Publisher", "frames"), (nodes.there, "Subscriber", "frames", {"until": "closed"})
        with members(nodes, *ends) as (sender, receiver):
            ray.get(receiver.wait_for.remote("publishers", 1))  # it is there: else it misses the first messages
            sent = sender.send.remote(0, 20 * COUNT)
            found = set(numbers(ray.get(receiver.recv.remote(COUNT))))
            before = relays.statistics()[nodes.there].address
            (pid,) = (it for it in relay_processes() if not is_at_head(it))
            os.kill(pid, signal.SIGKILL)
            while len(found) < 20 * COUNT:
                found |= set(numbers(ray.get(receiver.recv.remote(1))))
            assert found == set(range(20 * COUNT))
            ray.get(sent)
        wait_until(lambda: relays.statistics()[nodes.there].starts == 2)
        relays.wait(PATIENCE)
        after = relays.statistics()
        assert after[nodes.there].address == before
        assert after[nodes.head].starts == 1
        assert after[nodes.head].sent[nodes.there]["frames"].connections == 2
    wait_until(lambda: not left(nodes), lambda: left(nodes))


def queue(nodes: Any) -> None:
    """What a producer here sends goes to whoever is there; what a relay's death interrupts is done all the same."""
    with shmtensor.ray.relays("jobs", pattern="work-queue") as relays:
        relays.wait(PATIENCE)
        with members(nodes, (nodes.head, "Producer", "jobs")) as (producer,):
            with members(nodes, (nodes.there, "Consumer", "jobs", {"until": "closed"})) as (consumer,):
                ray.get(producer.send.remote(0, COUNT))
                assert sorted(numbers(ray.get(consumer.recv.remote(COUNT)))) == list(range(COUNT))
            ray.get(producer.send.remote(0, COUNT))
            with members(nodes, (nodes.there, "Consumer", "jobs", {"until": "closed"})) as (consumer,):
                done = set(numbers(ray.get(consumer.recv.remote(5))))
                for pid in relay_processes():
                    os.kill(pid, signal.SIGKILL)
                while len(done) < COUNT:
                    done |= set(numbers(ray.get(consumer.recv.remote(1))))
            wait_until(lambda: [it.starts for it in relays.statistics().values()] == [2, 2])
            relays.wait(PATIENCE)
    wait_until(lambda: not left(nodes), lambda: left(nodes))


def queue_without_consumers(nodes: Any) -> None:
    """What a node has taken goes elsewhere when its consumers are gone."""
    with shmtensor.ray.relays("jobs", pattern="work-queue", window=8) as relays:
        relays.wait(PATIENCE)
        with members(nodes, (nodes.head, "Producer", "jobs")) as (producer,):
            ends = (nodes.there, "Consumer", "jobs", {"acknowledge": "release"})
            with members(nodes, ends) as (consumer,):
                ray.get(producer.send.remote(0, COUNT))
                ray.get(consumer.keep.remote(1))
                wait_until(lambda: relays.statistics()[nodes.there].received["jobs"].in_flight == 8)
            with members(nodes, (nodes.head, "Consumer", "jobs")) as (consumer,):
                assert sorted(numbers(ray.get(consumer.recv.remote(COUNT)))) == list(range(COUNT))
    wait_until(lambda: not left(nodes), lambda: left(nodes))


def service(nodes: Any) -> None:
    """Servers there answer clients here."""
    with shmtensor.ray.relays("model", pattern="service") as relays:
        relays.wait(PATIENCE)
        ends = (nodes.head, "Client", "model"), (nodes.there, "Client", "model"), (nodes.there, "Server", "model")
        with members(nodes, *ends) as (here, there, server):
            served = server.serve.remote(2 * COUNT, "there")
            ray.get(here.wait_for.remote("servers", 1))
            for number in range(COUNT):
                assert ray.get(here.request.remote(number)) == ("there", 2 * number)
                assert ray.get(there.request.remote(number)) == ("there", 2 * number)
            ray.get(served)
    wait_until(lambda: not left(nodes), lambda: left(nodes))


def nodes_come_and_go(nodes: Any) -> None:
    """A third host and a second node of the first one join, the third host leaves: each message arrives once."""
    with shmtensor.ray.relays("frames") as relays:
        relays.wait(PATIENCE)
        third, twin = nodes.add("third", own_shm=True), nodes.add("twin", own_shm=False)
        far, near = nodes.by_resource("third"), nodes.by_resource("twin")
        wait_until(lambda: {far, near} <= set(relays.statistics()))
        relays.wait(PATIENCE)
        found = relays.statistics()
        assert sorted(found[it].state for it in (nodes.head, near)) == ["open", "shared"]
        assert (found[nodes.there].state, found[far].state) == ("open", "open")
        places = nodes.head, nodes.there, far, near
        ends = [(node, "Subscriber", "frames", {"until": "closed"}) for node in places]
        with members(nodes, (nodes.there, "Publisher", "frames"), *ends) as (sender, *receivers):
            ray.get(sender.wait_for.remote("subscribers", 3))  # one there, and two relays
            ray.get([it.wait_for.remote("publishers", 1) for it in receivers])
            ray.get(sender.send.remote(0, COUNT))
            for receiver in receivers:
                assert numbers(ray.get(receiver.recv.remote(COUNT))) == list(range(COUNT))
                assert ray.get(receiver.is_quiet.remote())
        nodes.cluster.remove_node(third)
        wait_until(lambda: far not in relays.statistics())
        relays.wait(PATIENCE)
        wait_until(lambda: all(far not in it.sent for it in relays.statistics().values()))
        nodes.cluster.remove_node(twin)
        wait_until(lambda: near not in relays.statistics())
        relays.wait(PATIENCE)
    wait_until(lambda: not left(nodes), lambda: left(nodes))


def node_without_the_library(nodes: Any) -> None:
    """The error names the node, and what to install there."""
    bare = nodes.add("bare", own_shm=True, hidden=os.path.dirname(shmtensor.__file__))
    try:
        node = nodes.by_resource("bare")
        with shmtensor.ray.relays("frames") as relays:
            with raises(shmtensor.DependencyError, node, "No module named", "pip install '.[ray]'"):
                relays.wait(PATIENCE)
            assert relays.statistics()[node].state == "failed"
    finally:
        nodes.cluster.remove_node(bare)


DRIVER = """
import os, signal, sys
import ray, shmtensor.ray
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
relays = shmtensor.ray.relays("frames")
relays.wait(120)
print("ready", flush=True)
sys.stdin.readline()
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "shutdown":
    ray.shutdown()
    try:
        while True:
            relays.wait(1)
    except shmtensor.ClosedError as error:
        assert "shut down" in str(error), error
"""


def driver_ends(nodes: Any, how: str) -> None:
    """The relays end with the driver that made them."""
    command = [sys.executable, "-c", DRIVER, nodes.address, how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
        assert len(relay_processes()) == 2
        driver.communicate("go\n", timeout=PATIENCE)
    assert driver.returncode == (-signal.SIGKILL if how == "killed" else 0)
    wait_until(lambda: not relay_processes())


@ray.remote(num_cpus=0)
class Owner:
    """An actor that relays are of."""

    def begin(self) -> int:
        self.relays = shmtensor.ray.relays("frames")
        self.relays.wait(PATIENCE)
        return os.getpid()


def actor_ends(nodes: Any) -> None:
    """The relays end with the actor that made them."""
    owner = Owner.options(**nodes.on(nodes.there)).remote()
    pid = ray.get(owner.begin.remote())
    assert len(relay_processes()) == 2
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not relay_processes())


def refusals(nodes: Any) -> None:
    """What is wrong on a node is said, with its name."""
    with shmtensor.ray.relays("frames", nodes=["0" * 56]) as relays, raises(shmtensor.TimedOut, "none of nodes="):
        relays.wait(0.5)
    with shmtensor.Publisher("frames"), shmtensor.ray.relays("frames", pattern="work-queue") as relays:
        wait_until(lambda: relays.statistics().get(nodes.head) and relays.statistics()[nodes.head].problem)
        with raises(shmtensor.TimedOut, nodes.head, 'channel "frames" is a fan-out, not a work-queue'):
            relays.wait(0.5)
    with shmtensor.ray.relays("frames", ports=range(29999, 30000)) as relays:  # both have one address here
        wait_until(lambda: "failed" in {it.state for it in relays.statistics().values()})
        with raises(shmtensor.TimedOut, "is the address this host's, and free?", "127.0.0.1:29999"):
            relays.wait(0.5)
    with shmtensor.ray.relays("frames", nodes=[nodes.head]) as relays:
        relays.wait(PATIENCE)
        assert set(relays.statistics()) == {nodes.head}
        assert relays.statistics()[nodes.head].sent == {}


def example(nodes: Any, source: str) -> str:
    """Run a program as a driver of this cluster, and return what it printed."""
    environment = {**os.environ, "RAY_ADDRESS": nodes.address}
    done = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
