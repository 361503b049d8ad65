"""Hosts of their own on one machine: network namespaces on a bridge, and a line between them and a laptop.

::

    laptop ══ line ══ bridge ── gateway
                        ├────── worker0
                        ├────── worker1
                        └────── …

A line is a pair of TAP devices, between which this process carries every Ethernet frame after a delay: the kernel
may have no netem. The workers may be behind lines, too. Loss (nftables), a narrow line (``tc tbf``) and an outage
(link down) are the kernel's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import itertools
import os
import secrets
import select
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Literal

import pytest

import loom
from loom.process.child import Child, python
from tests.support.network.netns import run, why_not

__all__ = ["FarCluster", "Hosts", "missing"]

SUBNET = "10.77.0"

WORKERS = ("worker0", "worker1", "worker2")

GATEWAY_PORT = 8470
WORKER_PORT = 26600

STARTED_IN_TIME = 60.0
GRACE = 10.0
"""Seconds that the gateway and a worker may take to start, and to end."""

_HOSTS = {
    **{"gateway": 2, "worker0": 11, "worker1": 12, "worker2": 13, "laptop": 100},
    **{"service": 20, "gateway0": 21, "gateway1": 22, "weaver": 30, "host0": 31, "host1": 32},
    **{"laptop0": 101, "laptop1": 102, "laptop2": 103},
}
"""The hosts, and the last number of their addresses."""

_numbers = itertools.count()

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_FRAME = 2048
_QUEUE = 4096
"""Frames that are on the line at most, in each direction; more are lost, as on any line."""


@functools.cache
def missing() -> str:
    """What this machine lacks for namespaces; empty if nothing."""
    return why_not([("ip", "iproute2"), ("tc", "iproute2"), ("nft", "nftables")], _make_devices)


def _make_devices(namespace: str) -> None:
    run("ip", "-n", namespace, "link", "add", "b0", "type", "bridge")
    run("ip", "-n", namespace, "link", "add", "v0", "type", "veth", "peer", "name", "v1")
    run("ip", "-n", namespace, "tuntap", "add", "dev", "t0", "mode", "tap")


def _enter(namespace: int) -> None:
    """Put this thread, and what it starts from now on, into a network namespace, given as a descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):  # os.setns is Python 3.12's
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class Hosts:
    """A laptop, a gateway and some workers, each with a network of its own. A context manager.

    Args:
        delay: seconds from the laptop to the others, and as many back.
        workers: how many hosts for workers, at most three.
        apart: seconds from each worker to the others, and as many back.
        others: further hosts, of those that have an address.
    """

    def __init__(
        self, delay: float = 0.0, workers: int = 2, apart: float = 0.0, others: Sequence[str] = ()
    ) -> None:
        self.workers = WORKERS[:workers]
        self._hosts = ("gateway", *self.workers, "laptop", *others)
        self._prefix = f"loom-{os.getpid()}-{next(_numbers)}"
        self._delays = {"laptop": delay, **(dict.fromkeys(self.workers, apart) if apart else {})}
        self._lines: list[_Line] = []

    def name(self, host: str) -> str:
        """The name of a host's namespace, as ``ip netns`` has it."""
        return f"{self._prefix}-{host}"

    @staticmethod
    def address(host: str) -> str:
        """The address of a host."""
        return f"{SUBNET}.{_HOSTS[host]}"

    @contextlib.contextmanager
    def on(self, host: str) -> Iterator[None]:
        """Run this thread, and the threads and processes that it starts meanwhile, on a host."""
        here = f"/proc/self/task/{threading.get_native_id()}/ns/net"
        with _opened(here) as outside, _opened(f"/run/netns/{self.name(host)}") as inside:
            _enter(inside)
            try:
                yield
            finally:
                _enter(outside)

    def lose(self, percent: int) -> None:
        """Lose so many of a hundred packets on the laptop's line, in each direction."""
        for host, source in (("laptop", "gateway"), ("gateway", "laptop")):
            self._lose(host, f"ip saddr {self.address(source)}", percent)

    def lose_everywhere(self, percent: int) -> None:
        """Lose so many of a hundred packets between any two hosts, in each direction."""
        for host in self._hosts:
            self._lose(host, 'iifname != "lo"', percent)

    def _lose(self, host: str, packets: str, percent: int) -> None:
        # Where they come in: to drop what goes out would tell its sender.
        rules = (
            "add table inet loss\n"
            "add chain inet loss in { type filter hook input priority 0; }\n"
            f"add rule inet loss in {packets} numgen random mod 100 < {percent} counter drop\n"
        )
        run("ip", "netns", "exec", self.name(host), "nft", "-f", "-", given=rules)

    def lost(self) -> list[int]:
        """Packets that have been lost on the way to the laptop, and on the way to the gateway."""
        listed = [run("ip", "netns", "exec", self.name(host), "nft", "list", "table", "inet", "loss")
                  for host in ("laptop", "gateway")]  # fmt: skip
        return [int(text.partition("counter packets ")[2].split()[0]) for text in listed]

    def narrow(self, megabits: int) -> None:
        """Let so many million bits a second through the line, in each direction."""
        for host, device in (("laptop", "eth0"), ("bridge", "laptop")):
            run("tc", "-n", self.name(host), "qdisc", "add", "dev", device, "root", "tbf",
                 "rate", f"{megabits}mbit", "burst", "32kbit", "latency", "50ms")  # fmt: skip

    @contextlib.contextmanager
    def cut(self, host: str, other: str, how: Literal["drop", "reset", "refuse"] = "drop") -> Iterator[None]:
        """Cut two hosts off from each other meanwhile.

        ``drop``: no packet passes. ``reset``: connections are reset, and new ones can be made. ``refuse``: new ones
        are reset, too.
        """
        verdict, kinds = "drop", ("", "")
        if how != "drop":
            verdict = "reject with tcp reset"
            kinds = (
                ("meta l4proto tcp ct state established", "tcp flags & syn == 0")
                if how == "reset"
                else ("meta l4proto tcp",) * 2
            )
        with self._ruled(
            other,
            input=f"ip saddr {self.address(host)} {kinds[0]} {verdict}",
            output=f"ip daddr {self.address(host)} {kinds[1]} {verdict}",
        ):
            yield

    @contextlib.contextmanager
    def one_way(self, host: str, other: str) -> Iterator[None]:
        """Lose meanwhile what another host sends to a host, and nothing of what the host sends."""
        with self._ruled(host, input=f"ip saddr {self.address(other)} drop"):
            yield

    @contextlib.contextmanager
    def _ruled(self, host: str, **rules: str) -> Iterator[None]:
        """Have a host follow nftables' rules meanwhile, one for each hook, beside those that it has."""
        table = f"inet cut{next(_numbers)}"
        text = f"add table {table}\n"
        for hook, rule in rules.items():
            text += f"add chain {table} {hook} {{ type filter hook {hook} priority 0; }}\n"
            text += f"add rule {table} {hook} {rule}\n"
        inside = ("ip", "netns", "exec", self.name(host), "nft")
        run(*inside, "-f", "-", given=text)
        try:
            yield
        finally:
            run(*inside, "delete", "table", *table.split())

    def reset(self, host: str, ours: tuple[str, int], theirs: tuple[str, int]) -> bool:
        """Reset one TCP connection of a host, at both ends. Return whether it was there."""
        ends = ("src", "{}:{}".format(*ours), "dst", "{}:{}".format(*theirs))
        return "ESTAB" in run("ip", "netns", "exec", self.name(host), "ss", "--kill", "--tcp", *ends)

    @contextlib.contextmanager
    def silence(self, host: str) -> Iterator[None]:
        """Lose every packet to and from a host meanwhile, without a word to its senders."""
        others = [other for other in self._hosts if other != host]
        dropped = {host: 'iifname != "lo"', **dict.fromkeys(others, f"ip saddr {self.address(host)}")}
        with contextlib.ExitStack() as silenced:
            for where, packets in dropped.items():
                silenced.enter_context(self._ruled(where, input=f"{packets} drop"))
            yield

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """The laptop's link is down meanwhile."""
        self._ip("laptop", "link", "set", "eth0", "down")
        try:
            yield
        finally:
            self._ip("laptop", "link", "set", "eth0", "up")

    def _ip(self, host: str, *command: str) -> None:
        run("ip", "-n", self.name(host), *command)

    def _make(self) -> None:
        for host in ("bridge", *self._hosts):
            run("ip", "netns", "add", self.name(host))
            self._ip(host, "link", "set", "lo", "up")
        self._ip("bridge", "link", "add", "bridge", "type", "bridge")
        self._ip("bridge", "link", "set", "bridge", "up")
        for host, delay in self._delays.items():
            with self.on(host):
                near = _make_tap("eth0")
            with self.on("bridge"):
                far = _make_tap(host)
            self._lines.append(_Line(near, far, delay))
        for host in self._hosts:
            if host not in self._delays:
                self._ip("bridge", "link", "add", host, "type", "veth",
                         "peer", "name", "eth0", "netns", self.name(host))  # fmt: skip
            self._ip("bridge", "link", "set", host, "master", "bridge", "up")
            self._ip(host, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            self._ip(host, "link", "set", "eth0", "up")

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Remove everything. A namespace in which a process still runs goes with it."""
        for line in self._lines:
            line.close()
        for host in (*self._hosts, "bridge"):
            subprocess.run(["ip", "netns", "delete", self.name(host)], capture_output=True, timeout=30.0)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _make_tap(name: str) -> int:
    """Make a TAP device, which is gone when the descriptor is closed."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return descriptor


class _Line:
    """Carries frames between two TAP devices, each a fixed time after it came."""

    def __init__(self, near: int, far: int, delay: float) -> None:
        self._delay = delay
        self._under_way: dict[int, deque[tuple[float, bytes]]] = {near: deque(), far: deque()}
        self._other = {near: far, far: near}
        self._end, self._ended = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="line", daemon=True)
        self._thread.start()

    def _carry(self) -> None:
        poll = select.poll()
        for descriptor in (*self._other, self._end):
            poll.register(descriptor, select.POLLIN)
        while True:
            first = min((line[0][0] for line in self._under_way.values() if line), default=None)
            wait = None if first is None else max(0.0, first - time.monotonic()) * 1000
            for descriptor, _ in poll.poll(wait):
                if descriptor == self._end:
                    return
                self._take(descriptor)
            now = time.monotonic()
            for descriptor, line in self._under_way.items():
                while line and line[0][0] <= now:
                    # The device may be down: what comes then is lost.
                    with contextlib.suppress(OSError):
                        os.write(self._other[descriptor], line.popleft()[1])

    def _take(self, descriptor: int) -> None:
        line = self._under_way[descriptor]
        with contextlib.suppress(OSError):  # until there is nothing more, or the device is down
            while True:
                frame = os.read(descriptor, _FRAME)
                if len(line) < _QUEUE:
                    line.append((time.monotonic() + self._delay, frame))

    def close(self) -> None:
        os.close(self._ended)
        self._thread.join()
        for descriptor in (self._end, *self._other):
            os.close(descriptor)


class FarCluster:
    """A gateway and its workers on hosts of their own, with a laptop elsewhere. A context manager.

    Args:
        delay: seconds from the laptop to the others, and as many back.
        gateway_options: more command-line options for the gateway.
        workers: how many hosts with a worker, at most three.
        apart: seconds from each worker to the others, and as many back.
    """

    def __init__(
        self, delay: float = 0.0, gateway_options: Sequence[str] = (), workers: int = 2, apart: float = 0.0
    ) -> None:
        self.hosts = Hosts(delay, workers, apart)
        self.token = secrets.token_hex(8)
        self.url = f"ws://{Hosts.address('gateway')}:{GATEWAY_PORT}"
        self._options = list(gateway_options)
        self._children: list[Child] = []
        self._insecure = pytest.MonkeyPatch()

    def _start(self) -> None:
        options = ["--host", Hosts.address("gateway"), "--port", str(GATEWAY_PORT), *self._options]
        for host in self.hosts.workers:
            address = f"tcp://{Hosts.address(host)}:{WORKER_PORT}"
            options += ["--worker", address]
            self._child(host, "loom_gateway.workers.host", ["--address", address])
        self._child("gateway", "loom_gateway", options)
        for child in self._children:
            child.ready.result(STARTED_IN_TIME)

    def _child(self, host: str, module: str, arguments: Sequence[str]) -> None:
        environment = {**os.environ, "LOOM_TOKEN": self.token} if host == "gateway" else dict(os.environ)
        with self.hosts.on(host):
            self._children.append(Child(host, python(module, *arguments, "--exit-with-parent"), environment))

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, then of the gateway."""
        return [child.pid for child in self._children]

    def __enter__(self) -> FarCluster:
        self._insecure.setenv("LOOM_INSECURE", "1")  # nobody else is on this network
        try:
            self.hosts.__enter__()
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    @contextlib.contextmanager
    def connected(self) -> Iterator[loom.Job]:
        """A session from the laptop, which prints none of its output."""
        with self.hosts.on("laptop"), loom.connect(self.url, self.token) as job:
            job.print_logs = False
            yield job

    def close(self) -> None:
        """End the gateway, then the workers, and remove the hosts."""
        try:
            for child in reversed(self._children):
                child.ask_to_end()
                child.end(GRACE)
        finally:
            self._insecure.undo()
            self.hosts.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
