"""Faults of networks, between two hosts that are network namespaces: what is sent there comes or does not."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loom.chaos.host import agent, network, records
from loom.errors import FaultRefused
from tests.support.needs import skipped_if
from tests.support.network.namespaces import Hosts, missing

pytestmark = skipped_if(missing())

PORT = 7000
OTHER = Hosts.address("worker1")
SOON = 0.3
"""Seconds in which a datagram that is not lost has come."""
BOUND = 30.0
_SO_RCVBUFFORCE = 33


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts() as made:
        yield made


@pytest.fixture
def here(hosts: Hosts) -> Iterator[None]:
    """The thread of the test is on worker0."""
    with hosts.on("worker0"):
        before = state()
        yield
        assert state() == before, "something is left behind"


def state() -> tuple[str, ...]:
    commands = (
        ["nft", "list", "tables"],
        ["tc", "qdisc", "show", "dev", "eth0"],
        ["ip", "-4", "route", "show", "table", "all"],
        ["ip", "rule"],
    )
    said = [subprocess.run(one, capture_output=True, text=True, check=True).stdout for one in commands]
    return (*said, *(name for _, name in socket.if_nameindex()))


class Pair:
    """A socket for datagrams on each of two hosts."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self._near, self._far = near, far
        self._numbers = itertools.count()

    def there_and_back(self, count: int = 1, size: int = 1) -> tuple[int, int]:
        """How many of so many datagrams come to the other host, and from there."""
        return self._sent(self._near, self._far, count, size), self._sent(self._far, self._near, count, size)

    def round_trip(self) -> float:
        """Seconds that a datagram takes to the other host and back."""
        began = time.monotonic()
        for by, to in ((self._near, self._far), (self._far, self._near)):
            by.sendto(b"?", to.getsockname())
            to.settimeout(BOUND)
            assert to.recv(2048) == b"?"
        return time.monotonic() - began

    def send(self, numbers: range) -> None:
        """Send a datagram to the other host for each number."""
        for number in numbers:
            self._near.sendto(number.to_bytes(4, "big"), self._far.getsockname())

    def receive(self, count: int) -> list[int]:
        """The numbers that come to the other host, in the order in which they do."""
        self._far.settimeout(BOUND)
        return [int.from_bytes(self._far.recv(2048), "big") for _ in range(count)]

    def quiet(self) -> bool:
        """Whether nothing comes to the other host for a while."""
        self._far.settimeout(SOON)
        try:
            self._far.recv(2048)
        except TimeoutError:
            return True
        return False

    def _sent(self, by: socket.socket, to: socket.socket, count: int, size: int) -> int:
        for _ in range(count):
            with contextlib.suppress(OSError):  # the sender may know
                by.sendto(bytes(size), to.getsockname())
        came = 0
        to.settimeout(SOON)
        with contextlib.suppress(TimeoutError):
            while came < count:
                to.recv(2048)
                came += 1
        return came


@pytest.fixture
def pair(hosts: Hosts, here: None) -> Iterator[Pair]:
    with paired(hosts, socket.AF_INET, Hosts.address("worker0"), OTHER) as made:
        yield made


@contextlib.contextmanager
def paired(hosts: Hosts, family: socket.AddressFamily, near_address: str, far_address: str) -> Iterator[Pair]:
    with socket.socket(family, socket.SOCK_DGRAM) as near:
        near.bind((near_address, PORT))
        with hosts.on("worker1"):
            far = socket.socket(family, socket.SOCK_DGRAM)
            far.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 1 << 26)
            far.bind((far_address, PORT))
        with far:
            made = Pair(near, far)
            made.round_trip()  # which takes a while where the hosts have yet to find each other
            yield made


def test_a_partition_cuts_both_ways_and_then_no_more(pair: Pair) -> None:
    assert network.try_partition() == {"peers": "all others"}

    with network.partition() as injected:
        assert pair.there_and_back() == (0, 0)

    assert injected.removal is not None
    assert injected.removal["dropped"] >= 2
    assert pair.there_and_back() == (1, 1)


def test_a_partition_may_be_from_some_hosts_only(pair: Pair) -> None:
    with network.partition([Hosts.address("gateway")]):
        assert pair.there_and_back() == (1, 1)
    with network.partition([Hosts.address("gateway"), f"{OTHER}/32"]):
        assert pair.there_and_back() == (0, 0)


def test_a_device_is_down_and_up_again_with_its_routes(pair: Pair) -> None:
    subprocess.run(["ip", "route", "add", "10.99.0.0/16", "via", OTHER], check=True)
    try:
        assert "UP" in network.try_link_down()["flags"]
        before = state()

        with network.link_down() as injected:
            assert injected.evidence["device"] == "eth0"
            assert "UP" not in injected.evidence["flags"]
            assert pair.there_and_back() == (0, 0)

        assert injected.removal is not None
        assert "UP" in injected.removal["flags"]
        wait_for(lambda: state() == before)
        assert pair.there_and_back() == (1, 1)
    finally:
        subprocess.run(["ip", "route", "del", "10.99.0.0/16"], check=True)


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_packets_are_lost_and_then_no_more(pair: Pair) -> None:
    with network.lose(50) as injected:
        there, back = pair.there_and_back(200)

        assert there == 200
        assert 50 < back < 150

    assert injected.removal is not None
    assert injected.removal["dropped"] == 200 - back
    assert pair.there_and_back(200) == (200, 200)


def test_a_device_is_narrow_and_then_no_more(pair: Pair, hosts: Hosts) -> None:
    with network.narrow(4.0) as injected:
        assert injected.evidence["qdisc"] == "tbf"
        slow = seconds_to_send(hosts, 200_000)

        with pytest.raises(FaultRefused, match="qdisc tbf already"):
            network.narrow(8.0)

    fast = seconds_to_send(hosts, 200_000)
    assert slow > 0.3 > fast  # 1.6 million bits at 4 million a second


def seconds_to_send(hosts: Hosts, size: int) -> float:
    """How long so many bytes take to worker1, over TCP."""
    return send_to_worker1(hosts, bytes(size))[0]


def send_to_worker1(hosts: Hosts, data: bytes) -> tuple[float, bytes]:
    """How long the data take to worker1 over TCP, from the connection on, and what came there."""
    with hosts.on("worker1"):
        listener = socket.create_server((OTHER, 0))
    came = bytearray()

    def receive() -> None:
        taken, _ = listener.accept()
        with taken:
            while len(came) < len(data):
                came.extend(taken.recv(1 << 16))
            taken.send(b"!")

    with listener:
        threading.Thread(target=receive, daemon=True).start()
        began = time.monotonic()
        with socket.create_connection(listener.getsockname(), BOUND) as sender:
            sender.sendall(data)
            assert sender.recv(1) == b"!"
        return time.monotonic() - began, bytes(came)


def test_what_goes_out_comes_later_and_then_no_more(pair: Pair, hosts: Hosts) -> None:
    with network.delay(50.0) as injected:
        assert injected.evidence["device"] == "eth0"
        assert pair.round_trip() >= 0.05
        assert seconds_to_send(hosts, 1) >= 0.1  # the connection, and what is sent on it

    assert pair.there_and_back() == (1, 1)


def test_a_delay_holds_for_ipv6_too(here: None, hosts: Hosts) -> None:
    addresses = {"worker0": "fd77::11", "worker1": "fd77::12"}
    with contextlib.ExitStack() as stack:
        for host, address in addresses.items():
            command = ["ip", "-n", hosts.name(host), "address", "add", f"{address}/64", "dev", "eth0", "nodad"]
            subprocess.run(command, check=True)
            command[command.index("add")] = "del"
            stack.callback(subprocess.run, command[:-1], check=True)
        with paired(hosts, socket.AF_INET6, *addresses.values()) as pair, network.delay_without_netem(50.0, "eth0"):
            assert pair.round_trip() >= 0.05


def test_what_is_delayed_stays_in_order_and_none_is_lost(pair: Pair) -> None:
    with network.delay_without_netem(100.0, "eth0") as injected:
        pair.send(range(3000))
        assert pair.receive(3000) == list(range(3000))

    assert injected.removal is not None
    assert injected.removal["delayed"] >= 3000
    assert injected.removal["dropped"] == injected.removal["lost"] == 0


HOLDER = """
import json, sys
from loom.chaos.host.network import delay_without_netem
injected = delay_without_netem(float(sys.argv[1]), "eth0")
print("there", flush=True)
sys.stdin.read()
print(json.dumps(injected.remove()))
"""


@contextlib.contextmanager
def held(milliseconds: float) -> Iterator[subprocess.Popen[str]]:
    """A process that delays, until its standard input ends."""
    command = [sys.executable, "-c", HOLDER, str(milliseconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "there\n"
        yield holder


def test_what_comes_faster_than_it_can_be_taken_is_dropped_and_counted(pair: Pair) -> None:
    with held(1.0) as holder:
        holder.send_signal(signal.SIGSTOP)
        pair.send(range(6000))
        holder.send_signal(signal.SIGCONT)
        assert pair.receive(4000) == list(range(4000))
        removal = json.loads(holder.communicate(timeout=BOUND)[0])

    assert removal["dropped"] > 0
    assert removal["delayed"] + removal["dropped"] >= 6000


def test_much_data_arrive_delayed_as_they_were(pair: Pair, hosts: Hosts) -> None:
    data = random.Random(1).randbytes(8_000_000)

    with network.delay(20.0):
        seconds, came = send_to_worker1(hosts, data)

    assert came == data
    assert seconds >= 0.04


def test_what_is_under_way_when_a_delay_is_removed_is_sent_at_once(pair: Pair) -> None:
    with network.delay_without_netem(60_000.0, "eth0"):
        pair.send(range(500))
        assert pair.quiet()

    assert pair.receive(500) == list(range(500))


def test_a_delay_of_our_own_leaves_nothing_behind(pair: Pair) -> None:
    with network.delay_without_netem(60_000.0, "eth0") as injected:
        pass

    assert injected.removal is not None
    assert injected.evidence["tap"] not in injected.removal["devices"]
    assert not [table for table in injected.removal["tables"] if injected.evidence["table"] in table]
    assert pair.there_and_back() == (1, 1)


def test_a_delay_of_our_own_is_gone_with_the_process_that_makes_it(pair: Pair) -> None:
    before = state()
    with held(60_000.0) as holder:
        pair.send(range(1))
        assert pair.quiet()

        holder.kill()
        wait_for(lambda: state() == before)

    assert pair.there_and_back() == (1, 1)


@pytest.mark.parametrize(
    ("kind", "params"),
    [("delay", {"milliseconds": 60_000.0, "device": "eth0"}), ("partition", {"peers": []})],
)
def test_a_fault_ends_when_its_time_is_over(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, params: dict[str, Any]
) -> None:
    monkeypatch.setenv(records.FOLDER_VARIABLE, str(tmp_path / "agents"))
    removals: queue.Queue[dict[str, Any]] = queue.Queue()
    _, strike = agent.keep("f1", kind, params, 0.05, os.getpid(), removals.put)
    if strike is not None:
        strike()

    assert removals.get(timeout=BOUND)["was"]
    assert pair.there_and_back() == (1, 1)


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("delay", {"milliseconds": 60_000.0, "device": "eth0"}),
        ("bandwidth", {"megabits": 0.01, "device": "eth0"}),
        ("partition", {"peers": []}),
        ("link_down", {"device": "eth0"}),
    ],
)
def test_a_fault_is_gone_with_the_agent_that_holds_it(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, params: dict[str, Any]
) -> None:
    monkeypatch.setenv(records.FOLDER_VARIABLE, str(tmp_path / "agents"))
    before = state()
    _, strike = agent.keep("f1", kind, params, None, os.getpid(), lambda _: None)
    if strike is not None:
        strike()
    wait_for(lambda: state() != before)

    pid, _ = records.HostFaultRecord.read(tmp_path / "agents" / "f1.json").agent
    os.kill(pid, signal.SIGKILL)

    wait_for(lambda: state() == before)
    assert pair.there_and_back() == (1, 1)


def test_a_device_may_be_narrow_and_delayed_at_once(pair: Pair, hosts: Hosts) -> None:
    with network.narrow(4.0), network.delay(50.0):
        assert pair.round_trip() >= 0.05
        assert seconds_to_send(hosts, 200_000) > 0.3


def test_a_device_is_delayed_once_at_a_time(pair: Pair) -> None:
    with network.delay(50.0):
        with pytest.raises(FaultRefused, match=r"delayed already|qdisc netem already"):
            network.delay(50.0)
        assert pair.round_trip() >= 0.05


@pytest.mark.parametrize(
    ("device", "said"),
    [("nosuch0", "there is no network device 'nosuch0'"), ("lo", "lo is no Ethernet device")],
)
def test_what_cannot_be_delayed_is_refused(here: None, device: str, said: str) -> None:
    with pytest.raises(FaultRefused, match=said):
        network.delay_without_netem(50.0, device)


@pytest.mark.parametrize("milliseconds", [0.0, -1.0, 60_001.0, float("nan")])
def test_a_delay_of_no_sense_is_refused(here: None, milliseconds: float) -> None:
    with pytest.raises(FaultRefused, match="more than 0 and at most 60000 milliseconds"):
        network.delay(milliseconds)


def test_a_host_without_tun_refuses_a_delay_in_words(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "TUN", "/dev/net/nosuch")

    with pytest.raises(FaultRefused, match="'/dev/net/nosuch', and this kernel has no netem: give the container"):
        network.TapForwarder("eth0", network.DelayQueue(0.05))


def test_what_is_no_address_is_refused(here: None) -> None:
    with pytest.raises(FaultRefused, match="'worker one' is no address of a host"):
        network.partition(["worker one"])
