"""Relays between hosts whose network loses, delays, reorders and parts: nothing is lost, and order holds."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("zenoh", reason="a relay needs the extra `relay`")

from ..waiting import stop, wait_for_end, wait_until
from .hosts import ROOT, Network, Remote, networks_refusal

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(networks_refusal()), reason=f"no network namespaces here: {networks_refusal()}"),
]

SOAK = bool(os.environ.get("SHMTENSOR_SOAK"))
COUNT = 5000 if SOAK else 300
ENDS = {"fan-out": ("Publisher", "Subscriber"), "work-queue": ("Producer", "Consumer")}
PATTERNS = pytest.mark.parametrize("pattern", list(ENDS))
WEATHER = {
    "loss": {"loss": 0.02, "delay": 0.002},
    "delay": {"delay": 0.05},
    "reordering": {"delay": 0.002, "jitter": 0.01},
    "slow": {"rate": 200e3, "delay": 0.01},
}


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """Four hosts."""
    with Network(tmp_path_factory.mktemp("network"), 4) as made:
        yield made
        assert made.left() == []


@pytest.fixture
def fair(network):
    """The same, with a good network before and after."""
    good = {"loss": 0.0, "delay": 0.0, "jitter": 0.0, "rate": 0.0, "cut": False}
    network.set(**good)
    yield network
    network.set(**good)


class Scene:
    """Ways from hosts to hosts: relays, and ends of the channel."""

    def __init__(self, network, channel, pattern, stack):
        self.network, self.channel, self.pattern, self._stack = network, channel, pattern, stack
        self.make, self.take = ENDS[pattern]
        self.options, self.relays = {}, {}

    def start(self, host, **options):
        """Start, or start again, the relay of a host."""
        options = self.options.setdefault(host, {"name": self.channel, **options})
        self.relays[host] = relay = self._stack.enter_context(Remote("relay", host=self.network.hosts[host], **options))
        relay.wait_for("ready")
        return relay

    def far(self, host, **options):
        return self.start(host, listen=self.network.address(host), **options)

    def near(self, host, to, **options):
        return self.start(host, to=self.network.address(to), pattern=self.pattern, **options)

    def middle(self, host, to):
        """A host that takes from one side and passes on to the other."""
        return self.start(
            host, to=self.network.address(to), pattern=self.pattern,
            also={"name": self.channel, "listen": self.network.address(host)},
        )  # fmt: skip

    def send(self, host, first=0, count=COUNT, **options):
        end = Remote(
            "send", host=self.network.hosts[host], channel=self.channel, kind=self.make, first=first, count=count,
            **options,
        )  # fmt: skip
        self._stack.enter_context(end).wait_for("ready")
        return end

    def receive(self, host, count=COUNT, **options):
        end = Remote(
            "receive", host=self.network.hosts[host], channel=self.channel, kind=self.take, count=count, **options
        )
        self._stack.enter_context(end).wait_for("ready")
        return end


@contextlib.contextmanager
def scene(network, channel, pattern):
    with contextlib.ExitStack() as stack:
        yield Scene(network, channel, pattern, stack)


def is_in_order(numbers):
    """Whether each sender's numbers came in order, once."""
    return all(
        own == sorted(set(own)) for sender in range(4) for own in [[it for it in numbers if it // 100_000 == sender]]
    )


@PATTERNS
@pytest.mark.parametrize("weather", WEATHER)
def test_two_hosts_in_bad_weather(fair, channel, pattern, weather):
    """Zenoh's connection does not break of it: so each message comes once, in order."""
    with scene(fair, channel, pattern) as it:
        it.far(1)
        it.near(0, 1)
        rx, tx = it.receive(1), it.send(0, nbytes=2000)
        it.relays[0].wait_for("connected")
        fair.set(0, 1, **WEATHER[weather])
        tx.ask("go")
        assert rx.wait_for("got", COUNT) == list(range(COUNT))


@PATTERNS
def test_a_star(fair, channel, pattern):
    """Three hosts send to one, over links of which each is bad in its way, and one breaks."""
    with scene(fair, channel, pattern) as it:
        it.far(0)
        rx = it.receive(0, 3 * COUNT)
        senders = []
        for host in (1, 2, 3):
            it.near(host, 0)
            senders.append(it.send(host, host * 100_000, every=0.002))
        for host in (1, 2, 3):
            it.relays[host].wait_for("connected")
        fair.set(0, 1, **WEATHER["loss"])
        fair.set(0, 2, **WEATHER["reordering"])
        for tx in senders:
            tx.ask("go")
        rx.wait_for("got", COUNT // 2)
        fair.set(0, 3, cut=True)
        rx.wait_for("got", 2 * COUNT)
        fair.set(0, 3, cut=False)
        numbers = rx.wait_for("got", 3 * COUNT)
        assert set(numbers) == {host * 100_000 + number for host in (1, 2, 3) for number in range(COUNT)}
        assert is_in_order(numbers)


@PATTERNS
def test_a_chain(fair, channel, pattern):
    """Over four hosts, with a bad link in the middle that breaks; a receiver that does not take holds up the first
    sender."""
    with scene(fair, channel, pattern) as it:
        it.far(3, slots=4)
        for host in (2, 1):
            it.start(
                host, to=fair.address(host + 1), pattern=pattern,
                also={"name": channel, "listen": fair.address(host), "slots": 4},
            )  # fmt: skip
        it.near(0, 1)
        rx, tx = it.receive(3, waits=True), it.send(0, slots=4)
        for host in (2, 1, 0):
            it.relays[host].wait_for("connected")
        fair.set(1, 2, **WEATHER["loss"])
        tx.ask("go")
        full = tx.wait_for("full")[0]
        assert full <= 16  # a queue's messages lie in the first ring until they are done: 4; a fan-out's in four rings
        rx.ask("go")
        rx.wait_for("got", COUNT // 3)
        fair.set(1, 2, cut=True)
        wait_until(lambda: is_seeking(it.relays[1]))
        fair.set(1, 2, cut=False)
        assert rx.wait_for("got", COUNT) == list(range(COUNT))


@PATTERNS
def test_a_partition_loses_nothing(fair, channel, pattern):
    """Until both sides have given each other up; each message comes once all the same, in order."""
    with scene(fair, channel, pattern) as it:
        it.far(1)
        near = it.near(0, 1)
        rx, tx = it.receive(1), it.send(0, every=0.005)
        near.wait_for("connected")
        tx.ask("go")
        rx.wait_for("got", COUNT // 3)
        fair.set(0, 1, cut=True)
        wait_until(lambda: is_seeking(near))
        fair.set(0, 1, cut=False)
        assert rx.wait_for("got", COUNT) == list(range(COUNT))


def is_seeking(relay) -> bool:
    return all(it["state"] == "seeking" for it in relay.statistics().values())


@PATTERNS
def test_one_way_is_cut(fair, channel, pattern):
    """What the other side says does not come, while what it is sent does; and the other way round."""
    with scene(fair, channel, pattern) as it:
        it.far(1)
        near = it.near(0, 1)
        rx = it.receive(1, 2 * COUNT)
        near.wait_for("connected")
        for done, one, other in ((0, 1, 0), (COUNT, 0, 1)):
            it.send(0, done, every=0.005).ask("go")
            rx.wait_for("got", done + 20)
            fair.set_way(one, other, cut=True)
            wait_until(lambda: is_seeking(near))
            fair.set_way(one, other, cut=False)
            assert rx.wait_for("got", done + COUNT) == list(range(done + COUNT))


@pytest.mark.parametrize(("pattern", "victim"), [("fan-out", 1), ("work-queue", 1), ("work-queue", 0)])
def test_relays_are_restarted(fair, channel, pattern, victim):
    """Killed and started again, with a bad network between them: nothing is lost."""
    with scene(fair, channel, pattern) as it:
        it.far(1)
        it.near(0, 1)
        rx, tx = it.receive(1, 1 << 40), it.send(0, every=0.002)
        it.relays[0].wait_for("connected")
        fair.set(0, 1, **WEATHER["loss"])
        tx.ask("go")
        for _ in range(10 if SOAK else 2):
            rx.wait_for("got", min(COUNT, len(rx.all("got")) + COUNT // 8))
            it.relays[victim].kill()
            it.start(victim)
        wait_until(lambda: set(rx.all("got")) == set(range(COUNT)))
        rx.kill()


def test_a_near_relay_of_a_fan_out_is_restarted(fair, channel):
    """It is a subscriber that was killed: what its successor gets begins with its joining, and comes once, in order."""
    with scene(fair, channel, "fan-out") as it:
        it.far(1)
        near, rx = it.near(0, 1), it.receive(1, 1 << 40)
        fair.set(0, 1, **WEATHER["loss"])
        for number in range(3):
            near.wait_for("connected")
            it.send(0, number * 100_000).ask("go")
            wait_until(lambda number=number: number * 100_000 + COUNT - 1 in rx.all("got"))
            near.kill()
            near = it.start(0)
        assert rx.all("got") == [sender * 100_000 + number for sender in range(3) for number in range(COUNT)]
        rx.kill()


def test_a_slow_link_is_not_taken_for_silence(fair, channel):
    """Parts of large messages take seconds; answers come all the while."""
    with scene(fair, channel, "fan-out") as it:
        it.far(1)
        near = it.near(0, 1)
        rx, tx = it.receive(1, 2), it.send(0, count=2, nbytes=400_000)
        near.wait_for("connected")
        fair.set(0, 1, rate=90e3)
        tx.ask("go")
        assert rx.wait_for("got", 2) == [0, 1]
        near.end()
        assert near.all("statistics")[-1][channel]["connections"] == 1
        assert near.all("statistics")[-1][channel]["resent"] == 0


def test_scouting(fair, channel):
    """Relays that are given no address of the other find it by multicast, in a network of their own."""
    with scene(fair, channel, "fan-out") as it:
        it.start(1, listen=fair.address(1), scout=True)
        near = it.start(0, scout=True, pattern="fan-out")
        rx, tx = it.receive(1), it.send(0)
        near.wait_for("connected")
        tx.ask("go")
        assert rx.wait_for("got", COUNT) == list(range(COUNT))


class Asking(Scene):
    """Requests from the first host to a server on the second, through relays."""

    def __init__(self, network, channel, stack):
        self.network, self.channel, self.pattern, self._stack = network, channel, "service", stack
        self.options, self.relays = {}, {}
        self.far(1)
        self.near(0, 1)
        self.server = self.serve(1)
        self.relays[0].wait_for("connected")

    def serve(self, host, **options):
        end = Remote("serve", host=self.network.hosts[host], channel=self.channel, **options)
        self._stack.enter_context(end).wait_for("ready")
        return end

    def ask(self, count=COUNT, **options):
        end = Remote("ask", host=self.network.hosts[0], channel=self.channel, count=count, **options)
        self._stack.enter_context(end).wait_for("ready")
        return end


@contextlib.contextmanager
def asking(network, channel):
    with contextlib.ExitStack() as stack:
        yield Asking(network, channel, stack)


@pytest.mark.parametrize("weather", WEATHER)
def test_requests_in_bad_weather(fair, channel, weather):
    """Each is begun with once, and its reply comes."""
    with asking(fair, channel) as it:
        client = it.ask(nbytes=2000)
        fair.set(0, 1, **WEATHER[weather])
        client.ask("go")
        assert client.wait_for("got", COUNT) == list(range(COUNT))
        assert sorted(it.server.all("took")) == [[number, 1] for number in range(COUNT)]


def test_requests_through_partitions(fair, channel):
    """While the far host cannot be reached, requests wait; what is there already is not begun with again."""
    with asking(fair, channel) as it:
        client = it.ask()
        client.ask("go")
        for count in (COUNT // 4, COUNT // 2):
            client.wait_for("got", count)
            fair.set(0, 1, cut=True)
            wait_until(lambda: is_seeking(it.relays[0]))
            fair.set(0, 1, cut=False)
        assert client.wait_for("got", COUNT) == list(range(COUNT))
        assert sorted(it.server.all("took")) == [[number, 1] for number in range(COUNT)]


def test_a_server_here_takes_over_in_a_partition(fair, channel):
    """Also what a server there had begun with: it is run again, and the late reply is dropped."""
    with asking(fair, channel) as it:
        stuck = it.serve(1, waits=True)
        client = it.ask(10)
        stop(it.server.process.pid)  # else it may be the one that takes all
        client.ask("go")
        stuck.wait_for("took")
        os.kill(it.server.process.pid, signal.SIGCONT)
        fair.set(0, 1, cut=True)
        wait_until(lambda: is_seeking(it.relays[0]))
        here = it.serve(0)
        assert client.wait_for("got", 10) == list(range(10))
        again = [number for number, attempt in here.all("took") if attempt == 2]
        assert stuck.all("took")[0][0] in again
        fair.set(0, 1, cut=False)
        wait_until(lambda: not is_seeking(it.relays[0]))
        stuck.kill()


@pytest.mark.parametrize("victim", [0, 1])
def test_relays_of_requests_are_restarted(fair, channel, victim):
    """Killed and started again, with a bad network between them: each request has a reply."""
    with asking(fair, channel) as it:
        client = it.ask()
        fair.set(0, 1, **WEATHER["loss"])
        client.ask("go")
        for number in range(1, 3):
            client.wait_for("got", number * COUNT // 4)
            it.relays[victim].kill()
            it.start(victim)
        assert client.wait_for("got", COUNT) == list(range(COUNT))


MADE = """
import pathlib, sys, tempfile
from tests.relay.hosts import Network, Remote
network = Network(pathlib.Path(sys.argv[1]), 2)
far = Remote("relay", host=network.hosts[1], name=sys.argv[2], listen=network.address(1))
near = Remote("relay", host=network.hosts[0], name=sys.argv[2], to=network.address(1), pattern="fan-out")
near.wait_for("connected")
print(*(it.pid for it in (*network.hosts, network._switch, far.process, near.process)), flush=True)
sys.stdin.read()
"""


def test_a_killed_test_leaves_nothing(channel, tmp_path):
    """Hosts, their network and what runs there end with whoever made them."""
    made = subprocess.Popen(
        [sys.executable, "-c", MADE, str(tmp_path), channel],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        pids = [int(pid) for pid in made.stdout.readline().split()]
        assert len(pids) == 5
        assert os.listdir(f"/proc/{pids[0]}/task")
    finally:
        made.send_signal(signal.SIGKILL)
        made.communicate()
    for pid in pids:
        wait_for_end(pid)


@pytest.mark.skipif(not SOAK, reason="a long run: SHMTENSOR_SOAK=1")
@pytest.mark.timeout(1200)
@PATTERNS
def test_long(fair, channel, pattern, capsys):
    """Partitions of all lengths, and how long after each the first message came."""
    noise, times = random.Random(5), []
    with scene(fair, channel, pattern) as it:
        it.far(1)
        near = it.near(0, 1)
        rx, tx = it.receive(1, 1 << 40), it.send(0, count=1 << 40, every=0.005)
        near.wait_for("connected")
        tx.ask("go")
        for _ in range(30):
            cut = noise.choice([0.3, 1.0, 1.5, 2.0, 2.5, 3.0, 4.5, 6.0, 9.0]) * noise.uniform(0.8, 1.2)
            rx.wait_for("got", len(rx.all("got")) + 50)
            fair.outage(0, 1, cut)
            healed = time.monotonic()
            wait_until(lambda healed=healed: rx.said[-1][2] > healed)
            times.append((min(said[2] for said in rx.said if said[0] == "got" and said[2] > healed) - healed, cut))
        numbers = rx.all("got")
        assert numbers == list(range(len(numbers)))
        tx.kill()
        rx.kill()
    times.sort()
    with capsys.disabled():
        print(
            f"\n{pattern}: first message after the network's return, s: median {times[15][0]:.2f}, worst (cut) "
            f"{times[-3:]}"
        )
