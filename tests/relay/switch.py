"""A network of several hosts on this machine: a process that carries the packets between their namespaces, and loses,
delays and reorders them as it is told. It needs no `netem` in the kernel, and nothing of it is left when it ends.

Each host has a `tun` device; what leaves one is read here and written to the device of the host it is for. Links of
both ways are told apart: `[from, to, {"loss": 0.01, "delay": 0.005, "jitter": 0.002, "rate": 1e6, "cut": false}]`, one
JSON line each, to which it says "done"; and "over" at the end of an outage."""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from dataclasses import dataclass

PREFIX = "10.77.0."
MTU = 9000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
_BACKLOG_S = 0.5
"""Seconds of packets that a link with a rate holds; what comes more is lost, as at a router."""


@dataclass
class Link:
    """What happens to packets of one way. Seconds, bytes per second."""

    loss: float = 0.0
    delay: float = 0.0
    jitter: float = 0.0
    """A packet comes up to so much later: those behind it may overtake it."""
    rate: float = 0.0
    cut: bool = False
    outage: float = 0.0
    """Cut for so long."""
    back_at: float = 0.0
    """When an outage ends."""
    free_at: float = 0.0
    """When the packets before have gone over a link with a rate."""


def open_device(pid: int, address: str) -> int:
    """The `tun` device of a host, which is made in the network namespace of that process."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as space:
        if libc.setns(space.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"net0", _IFF_TUN | _IFF_NO_PI))
    for command in (
        "ip link set lo up",
        f"ip address add {address}/24 dev net0",
        f"ip link set net0 up mtu {MTU} multicast on",
        "ip route add 224.0.0.0/4 dev net0",
    ):
        subprocess.run(command.split(), check=True)
    return device


def targets(packet: bytes, own: int, count: int) -> list[int]:
    """The hosts that a packet is for."""
    if packet[0] >> 4 != 4:
        return []
    if packet[16] >= 224:
        return [host for host in range(count) if host != own]
    host = packet[19] - 1
    return [host] if 0 <= host < count and host != own else []


def main(pids: list[int]) -> None:
    devices = [open_device(pid, f"{PREFIX}{number + 1}") for number, pid in enumerate(pids)]
    links = {(a, b): Link() for a in range(len(pids)) for b in range(len(pids)) if a != b}
    noise, waiting, order = random.Random(1), list[tuple[float, int, int, bytes]](), 0
    poll = select.poll()
    for each in (*devices, 0):
        poll.register(each, select.POLLIN)
    by_descriptor = {descriptor: host for host, descriptor in enumerate(devices)}
    commands = b""
    print("up", flush=True)

    def deliver(host: int, packet: bytes) -> None:
        try:
            os.write(devices[host], packet)
        except OSError:  # its queue is full, or it is down: lost, as packets are
            pass

    while True:
        times = [it.back_at for it in links.values() if it.outage] + [it[0] for it in waiting[:1]]
        ready = poll.poll(max(0.0, 1000 * (min(times) - time.monotonic())) if times else None)
        now = time.monotonic()
        for link in links.values():
            if link.outage and link.back_at <= now:
                link.outage = 0.0
                print("over", flush=True)
        while waiting and waiting[0][0] <= now:
            _, _, host, packet = heapq.heappop(waiting)
            deliver(host, packet)
        for descriptor, _ in ready:
            if descriptor == 0:
                data = os.read(0, 65536)
                if not data:
                    return  # whoever made this network has ended
                *lines, commands = (commands + data).split(b"\n")
                for line in lines:
                    a, b, changes = json.loads(line)
                    vars(links[a, b]).update(changes)
                    links[a, b].back_at = now + links[a, b].outage
                    print("done", flush=True)
                continue
            own = by_descriptor[descriptor]
            for _ in range(64):
                try:
                    packet = os.read(descriptor, 65536)
                except BlockingIOError:
                    break
                for host in targets(packet, own, len(devices)):
                    link = links[own, host]
                    if link.cut or link.outage or (link.loss and noise.random() < link.loss):
                        continue
                    due = now + link.delay + (noise.random() * link.jitter if link.jitter else 0.0)
                    if link.rate:
                        link.free_at = max(link.free_at, now)
                        if link.free_at - now > _BACKLOG_S:
                            continue
                        link.free_at += len(packet) / link.rate
                        due += link.free_at - now
                    if due <= now:
                        deliver(host, packet)
                    else:
                        order += 1
                        heapq.heappush(waiting, (due, order, host, packet))


if __name__ == "__main__":
    main([int(pid) for pid in sys.argv[1:]])
