"""Processes of native Monarch, without Loom: a root client attached to one worker, both on this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from loom.process.child import Child
from loom_gateway.workers.monarch_env import MONARCH_ENVIRONMENT, set_monarch_environment

__all__ = ["free_port", "native_procs"]


def native_procs(gpus: int) -> tuple[Any, Callable[[], None]]:
    """A proc mesh of one host with that many processes, and what ends it and its worker."""
    set_monarch_environment()
    from monarch.actor import ChannelTransport, attach_to_workers, enable_transport

    address = f"tcp://127.0.0.1:{free_port()}"
    worker = Child(
        "the worker", "loom_gateway.workers.host", ["--address", address], os.environ | MONARCH_ENVIRONMENT
    )
    worker.ready.result(timeout=60)
    enable_transport(ChannelTransport.TcpWithLocalhost)
    hosts = attach_to_workers(ca="trust_all_connections", workers=[address])
    procs = hosts.spawn_procs(per_host={"gpus": gpus}, name="procs")

    def close() -> None:
        procs.stop().get()
        worker.ask_to_end()
        worker.end(grace=3.0)

    return procs, close


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
