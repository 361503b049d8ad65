"""``python -m tests.support.native_sessions SESSIONS ROUNDS``: what clients that come and go cost workers.

The soak's sessions without Loom: root clients, each a process of its own, eight at a time, attach to two workers
of Monarch's own, spawn, call, echo 4 MiB and stop, and leave. ROUNDS are all rounds of all clients, dealt evenly.
Prints by how many bytes each worker has grown a round.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil

from loom.process.listen import free_ports

AT_ONCE = 8

WARM_UP = 2 * AT_ONCE
"""Clients before the measured ones: what is made once is made then."""

WORKER = """
import os
import sys
from monarch.actor import ChannelTransport, enable_transport, run_worker_loop_forever

from loom.process.listen import free_ports
from loom.process.parent_pipe import when_parent_ends
from loom_gateway.workers.monarch_env import service_address

when_parent_ends(lambda: os._exit(1))
enable_transport(ChannelTransport.TcpWithLocalhost)
run_worker_loop_forever(address=service_address(sys.argv[1]), ca="trust_all_connections")
"""

BOUND = 120.0
"""Seconds that an operation may take while eight clients start at once on two cores."""

ATTACH_TIMEOUT = "30s"
"""How long a worker has to answer a client that attaches: Monarch's 10 s are too few for eight at once."""

ATTEMPTS = 3
"""A worker may never answer a new client (see `loom.WorkersSilent`); `loom.connect` tries another then, too."""

NOT_ATTACHED = 3
"""Exit code of a client that no worker answered."""


def main(sessions: int, rounds: int) -> None:
    ports = free_ports(2)
    addresses = [f"tcp://127.0.0.1:{port}" for port in ports]
    nothing = subprocess.DEVNULL
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, address], stdin=subprocess.PIPE, stdout=nothing, stderr=nothing
        )
        for address in addresses
    ]
    try:
        held = [psutil.Process(worker.pid) for worker in workers]
        for process, port in zip(held, ports, strict=True):
            wait_until_listens(process, port)
        sizes = []
        with ThreadPoolExecutor(AT_ONCE) as pool:
            dealt = [rounds * (n + 1) // sessions - rounds * n // sessions for n in range(sessions)]
            for each in ([1] * WARM_UP, dealt):
                list(pool.map(lambda own: session(addresses, own), each))
                for process in held:
                    wait_until_alone(process)
                sizes.append([process.memory_info().rss for process in held])
        before, after = sizes
        print(*((is_now - was) // rounds for was, is_now in zip(before, after, strict=True)))
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def wait_until_listens(process: psutil.Process, port: int) -> None:
    deadline = time.monotonic() + BOUND
    while not any(connection.laddr.port == port for connection in process.net_connections("tcp")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_until_alone(process: psutil.Process) -> None:
    """Wait until none of the worker's procs is left."""
    deadline = time.monotonic() + BOUND
    while process.children():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def session(addresses: list[str], rounds: int) -> None:
    """Run a client in a process of its own."""
    command = [sys.executable, "-m", "tests.support.native_sessions", "client", str(rounds), *addresses]
    environment = {**os.environ, "HYPERACTOR_MESH_ATTACH_CONFIG_TIMEOUT": ATTACH_TIMEOUT}
    for _ in range(ATTEMPTS):
        code = subprocess.run(command, env=environment, timeout=BOUND * rounds).returncode
        if code != NOT_ATTACHED:
            break
    assert code == 0


def client(rounds: int, addresses: list[str]) -> None:
    from monarch.actor import ChannelTransport, attach_to_workers, enable_transport

    from loom_gateway.workers.monarch_env import service_address
    from tests.support.actors import Counter

    enable_transport(ChannelTransport.TcpWithLocalhost)
    hosts = attach_to_workers(
        ca="trust_all_connections", workers=list(map(service_address, addresses)), name="hosts"
    )
    try:
        hosts.initialized.get(timeout=BOUND)
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(NOT_ATTACHED)
    data = os.urandom(4 << 20)
    for number in range(rounds):
        procs = hosts.spawn_procs(per_host={"gpus": 1})
        counters = procs.spawn("counters", Counter, number)
        answers = counters.add.call(1).get(timeout=BOUND)
        assert [answer for _, answer in answers] == [number + 1] * len(addresses)
        assert counters.slice(hosts=1).echo.call_one(data).get(timeout=BOUND) == data
        procs.stop().get(timeout=BOUND)


if __name__ == "__main__":
    if sys.argv[1] == "client":
        client(int(sys.argv[2]), sys.argv[3:])
    else:
        main(int(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # Monarch's threads may keep a root client
