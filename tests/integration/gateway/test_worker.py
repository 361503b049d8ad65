"""The worker process, as its parent, its terminal and Monarch's root clients see it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version

import psutil
import pytest

import loom
from loom.process.listen import free_ports
from tests.support.gateways import Gateway
from tests.support.processes import HIDDEN, read_json, run, start, still_there, tree

CLIENT = """
import json, os, subprocess, sys
os.environ["HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY"] = "250ms"
import monarch.actor
from monarch.actor import Actor, ChannelTransport, attach_to_workers, enable_transport, endpoint
from loom_gateway.workers.monarch_env import service_address

class Parent(Actor):
    @endpoint
    def pids(self):
        return [os.getpid(), subprocess.Popen(["sleep", "600"]).pid]

monarch.actor.unhandled_fault_hook = lambda failure: None
enable_transport(ChannelTransport.TcpWithLocalhost)
hosts = attach_to_workers(ca="trust_all_connections", workers=[service_address(worker) for worker in sys.argv[1:]])
actors = hosts.spawn_procs().spawn("parents", Parent)
print(json.dumps([pids for _, pids in actors.pids.call().get().items()]), flush=True)
sys.stdin.read()
os._exit(0)
"""


FAULTY = """
import sys, threading
from loom_gateway.workers.host import serve
from loom_gateway.workers.sources import parse_worker_address

threading.Thread(target=serve, args=(parse_worker_address(sys.argv[1]),), daemon=True).start()
sys.stdin.readline()
from monarch.actor import Actor, endpoint, this_host

class Careless(Actor):
    @endpoint
    def fail(self):
        raise ValueError("nobody waits for this")

this_host().spawn_procs().spawn("careless", Careless).fail.broadcast()
sys.stdin.read()
"""


OF_ANOTHER_MONARCH = """
import json, sys
from monarch.actor import ChannelTransport, enable_transport, start_worker_loop_forever

enable_transport(ChannelTransport.TcpWithLocalhost)
served = start_worker_loop_forever(address=f"service<2>@{sys.argv[1]}", ca="trust_all_connections")
print(json.dumps({"address": sys.argv[1]}), flush=True)
sys.stdin.read()
"""
"""A worker whose service has another identity, as those of Monarch's other versions have."""


@dataclass
class Host:
    """A worker, and what a root client has started on it: a proc, and a process that an actor started."""

    worker: subprocess.Popen[str]
    proc: psutil.Process
    grandchild: psutil.Process


def free_address() -> str:
    return f"tcp://127.0.0.1:{free_ports(1)[0]}"


def start_worker(address: str) -> subprocess.Popen[str]:
    return start("-m", "loom_gateway.workers.host", "--address", address, "--exit-with-parent")


@pytest.fixture(scope="module")
def busy_hosts() -> Iterator[list[Host]]:
    """Four workers on which one root client has started something."""
    workers = [start_worker(free_address()) for _ in range(4)]
    try:
        client = start("-c", CLIENT, *(read_json(worker)["address"] for worker in workers))
        pids = read_json(client)
        yield [Host(worker, *map(psutil.Process, pair)) for worker, pair in zip(workers, pids, strict=True)]
        client.kill()
        client.wait()
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def close_standard_input(worker: subprocess.Popen[str]) -> None:
    assert worker.stdin
    worker.stdin.close()


@pytest.mark.parametrize(
    ("host", "end"),
    [
        pytest.param(0, close_standard_input, id="its parent is gone"),
        pytest.param(1, lambda worker: worker.send_signal(signal.SIGTERM), id="SIGTERM"),
        pytest.param(2, lambda worker: worker.send_signal(signal.SIGINT), id="SIGINT"),
    ],
)
def test_a_worker_ends_with_all_that_runs_on_it(
    busy_hosts: list[Host], host: int, end: Callable[[subprocess.Popen[str]], None]
) -> None:
    busy = busy_hosts[host]

    end(busy.worker)

    assert busy.worker.wait(10) == 0
    assert still_there([busy.proc, busy.grandchild]) == []


def test_a_fault_that_nobody_handles_does_not_end_the_worker() -> None:
    address = free_address()
    worker = start("-c", FAULTY, address, stderr=subprocess.PIPE)
    try:
        assert read_json(worker)["address"] == address
        assert worker.stdin
        worker.stdin.write("go on\n")
        worker.stdin.flush()
        assert worker.stderr
        line = next(line for line in worker.stderr if line.startswith("Monarch: "))
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), 10):
            pass
    finally:
        left = tree(worker.pid)
        worker.kill()
        assert still_there(left) == []
    assert "careless" in line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_says_why_it_ends(number: signal.Signals) -> None:
    worker = start("-m", "loom_gateway.workers.host", "--address", free_address(), stderr=subprocess.PIPE)
    read_json(worker)

    worker.send_signal(number)

    assert f"the worker ends: {number.name}" in worker.communicate(timeout=10)[1]


def test_procs_end_with_a_worker_that_was_killed(busy_hosts: list[Host]) -> None:
    busy = busy_hosts[3]

    busy.worker.kill()

    assert still_there([busy.proc]) == []
    busy.grandchild.kill()  # nobody is left who knows it


def test_a_worker_announces_itself_when_it_can_be_connected_to() -> None:
    address = free_address()
    worker = start_worker(address)

    announcement = read_json(worker)

    assert announcement == {"event": "listening", "address": address, "pid": worker.pid}
    socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=1).close()
    worker.terminate()
    assert worker.wait(10) == 0


def test_a_worker_whose_parent_is_gone_at_once_ends_before_it_listens() -> None:
    worker = start_worker(free_address())

    output, _ = worker.communicate(timeout=20)

    assert worker.returncode == 0
    assert output == ""


def test_a_worker_survives_its_client() -> None:
    worker = start_worker(free_address())
    address = read_json(worker)["address"]
    first = start("-c", CLIENT, address)
    read_json(first)
    first.kill()
    first.wait()

    second = start("-c", CLIENT, address)

    assert read_json(second)
    second.kill()
    second.wait()
    everything = tree(worker.pid)
    close_standard_input(worker)
    assert still_there(everything) == []


@pytest.mark.slow
def test_a_worker_of_another_monarch_is_named_with_the_version_that_the_gateway_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("loom_proxy.session.open.ATTEMPTS", 1)  # each takes 8 s
    worker = start("-c", OF_ANOTHER_MONARCH, free_address())
    gateway = Gateway([read_json(worker)["address"]])
    try:
        gateway.start()
        with pytest.raises(loom.WorkersSilent) as raised:
            gateway.connect()
        assert "never one with another minor version of torchmonarch than the gateway's" in str(raised.value)
        assert str(raised.value).endswith(f"which is {version('torchmonarch')}.")
    finally:
        gateway.close()
        worker.kill()
        worker.communicate()


def test_a_taken_port_is_exit_code_3() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run("-m", "loom_gateway.workers.host", "--address", f"tcp://127.0.0.1:{port}")

    assert ended.returncode == 3
    assert ended.stderr.startswith(f"error: port {port} of 127.0.0.1 is in use")
    assert ended.stderr.count("\n") == 1
    assert ended.stdout == ""


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:26600", "tcp://HOST:PORT"),
        ("tcp://127.0.0.1", "tcp://HOST:PORT"),
        ("tcp://127.0.0.1:0", "tcp://HOST:PORT"),
        ("tcp://127.0.0.1:70000", "tcp://HOST:PORT"),
        ("tcp://*:26600", "tcp://HOST:PORT"),
        ("tcp://0.0.0.0:26600", "no address that a client could connect to"),
        ("tcp://no-such-host.invalid:26600", "'no-such-host.invalid' is not known"),
        ("tcp://192.0.2.250:26600", "give an address of this machine"),
    ],
)
def test_a_wrong_address_is_exit_code_2(address: str, message: str) -> None:
    ended = run("-m", "loom_gateway.workers.host", "--address", address)

    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ")
    assert message in ended.stderr


def test_missing_torchmonarch_is_exit_code_4() -> None:
    hide_and_run = HIDDEN.format(module="monarch") + (
        "from loom_gateway.workers.host import main; sys.exit(main(['--address', 'tcp://127.0.0.1:26600']))"
    )

    ended = run("-c", hide_and_run)

    assert ended.returncode == 4
    assert ended.stderr.startswith("error: a worker needs torchmonarch")
    assert "pip install 'monarch-loom[gateway]'" in ended.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_an_actor_that_reads_standard_input_gets_nothing() -> None:
    worker = start_worker(free_address())
    read_json(worker)

    assert os.readlink(f"/proc/{worker.pid}/fd/0") == os.devnull
    worker.kill()
    worker.wait()


OVERLOOKING = """
import os, subprocess, sys
import psutil
from loom_gateway.workers import host as worker

look, looks = psutil.Process.children, []

def overlook(process, recursive=False):
    looks.append(recursive)
    return [] if len(looks) == 1 else look(process, recursive)

psutil.Process.children = overlook
ignoring = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
)
willing = subprocess.Popen(["sleep", "600"])
stubborn = subprocess.Popen([sys.executable, "-c", ignoring], stdout=subprocess.PIPE)
stubborn.stdout.readline()
print(f"[{willing.pid}, {stubborn.pid}]", flush=True)
sys.stdin.read()
worker._end_with_descendants("the test is over")
sys.exit(7)  # never reached
"""


def test_a_descendant_that_one_look_misses_ends_all_the_same() -> None:
    worker = start("-c", OVERLOOKING)
    left = [psutil.Process(pid) for pid in read_json(worker)]
    assert worker.stdin
    worker.stdin.close()
    assert worker.wait(timeout=30) == 0
    assert still_there(left, timeout=5) == []
