"""`NativeCluster`: the soak's sessions by Monarch alone, on workers of its own, for what Monarch keeps of each.

Loom's settings of Monarch hold (`loom_gateway.workers.monarch_env`). A worker keeps the connection to each client
and process that it has had, with room for as many messages as went over it, and the settings say how many they are.
A client is ``python -m tests.support.native_sessions PAUSE SECONDS,… ADDRESS…``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import psutil

from loom.process.listen import free_ports
from loom_gateway.workers.host import UNDELIVERABLE_AFTER
from loom_gateway.workers.monarch_env import MONARCH_ENVIRONMENT

__all__ = ["NativeCluster"]

WORKER = """
import os
import sys
from monarch.actor import ChannelTransport, enable_transport, run_worker_loop_forever

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

ATTEMPTS = 5
"""A worker may never answer a new client (see `loom.WorkersSilent`); `loom.connect` tries another then, too."""

NOT_ATTACHED = 3
"""Exit code of a client that no worker answered."""


class NativeCluster:
    """Two workers of Monarch's own; a context manager. ``environment``: more variables of theirs."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._addresses = [f"tcp://127.0.0.1:{port}" for port in free_ports(2)]
        self._clients = {
            **os.environ,
            **MONARCH_ENVIRONMENT,
            "HYPERACTOR_MESH_ATTACH_CONFIG_TIMEOUT": ATTACH_TIMEOUT,
        }
        # Otherwise a client that has not taken every message at its end ends the worker of all.
        delivery = {"HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": UNDELIVERABLE_AFTER}
        self._environment = {**os.environ, **MONARCH_ENVIRONMENT, **delivery, **environment}
        self._workers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> NativeCluster:
        nothing = subprocess.DEVNULL
        self._workers = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER, address],
                stdin=subprocess.PIPE,
                stdout=nothing,
                stderr=nothing,
                env=self._environment,
            )
            for address in self._addresses
        ]
        for worker, address in zip(self._workers, self._addresses, strict=True):
            wait_until_listens(psutil.Process(worker.pid), int(address.rpartition(":")[2]))
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._workers:
            worker.kill()
            worker.communicate()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.pid for worker in self._workers]

    def settle(self) -> None:
        """Wait until no session's process is left on the workers."""
        deadline = time.monotonic() + BOUND
        while any(psutil.Process(pid).children() for pid in self.pids):
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def session(self, rounds: Sequence[float], pause: float) -> None:
        """Run a client whose rounds of work take so many seconds, with ``pause`` seconds from one to the next."""
        arguments = [str(pause), ",".join(map(str, rounds)), *self._addresses]
        command = [sys.executable, "-m", "tests.support.native_sessions", *arguments]
        for _ in range(ATTEMPTS):
            code = subprocess.run(command, env=self._clients, timeout=BOUND * len(rounds)).returncode
            if code != NOT_ATTACHED:
                break
        assert code == 0


def wait_until_listens(process: psutil.Process, port: int) -> None:
    deadline = time.monotonic() + BOUND
    while not any(connection.laddr.port == port for connection in process.net_connections("tcp")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def client(pause: float, rounds: Sequence[float], addresses: Sequence[str]) -> None:
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
    for number, seconds in enumerate(rounds):
        until = time.monotonic() + seconds
        procs = hosts.spawn_procs(per_host={"gpus": 1})
        counters = procs.spawn("counters", Counter, number)
        answers = counters.add.call(1).get(timeout=BOUND)
        assert [answer for _, answer in answers] == [number + 1] * len(addresses)
        assert counters.slice(hosts=1).echo.call_one(data).get(timeout=BOUND) == data
        time.sleep(max(0.0, until - time.monotonic()))
        procs.stop().get(timeout=BOUND)
        if number < len(rounds) - 1:
            time.sleep(pause)


if __name__ == "__main__":
    client(float(sys.argv[1]), [float(seconds) for seconds in sys.argv[2].split(",")], sys.argv[3:])
    sys.stdout.flush()
    os._exit(0)  # Monarch's threads may keep a root client
