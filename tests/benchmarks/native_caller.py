"""Monarch without Loom: a root client attached to one worker, both on this machine."""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import os
import socket
from typing import Any

from loom_gateway.monarch_env import MONARCH_ENVIRONMENT, set_monarch_environment
from loom_proxy.child import Child
from tests.benchmarks.caller import MeshCaller, serve, wait_one_by_one


def make_caller() -> MeshCaller:
    set_monarch_environment()
    from monarch.actor import Actor, ChannelTransport, attach_to_workers, enable_transport, endpoint

    class Counter(Actor):
        def __init__(self) -> None:
            self.number = 0

        @endpoint
        def add(self, amount: int) -> int:
            self.number += amount
            return self.number

        @endpoint
        def echo(self, value: Any) -> Any:
            return value

    address = f"tcp://127.0.0.1:{_free_port()}"
    worker = Child("the worker", "loom_gateway.worker", ["--address", address], os.environ | MONARCH_ENVIRONMENT)
    worker.ready.result(timeout=60)
    enable_transport(ChannelTransport.TcpWithLocalhost)
    hosts = attach_to_workers(ca="trust_all_connections", workers=[address])
    procs = hosts.spawn_procs(per_host={"gpus": 1}, name="procs")
    counter = procs.spawn("counters", Counter).slice(hosts=0, gpus=0)

    def close() -> None:
        procs.stop().get()
        worker.ask_to_end()
        worker.end(grace=3.0)

    return MeshCaller(counter.add.call_one, counter.echo.call_one, wait_one_by_one, close)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


if __name__ == "__main__":
    serve(make_caller)
