"""Hosts of native Monarch, without Loom: a root client attached to one worker, both on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from loom.process.child import Child, python
from loom.process.listen import free_ports
from loom_gateway.workers.monarch_env import MONARCH_ENVIRONMENT, set_monarch_environment

__all__ = ["native_hosts", "native_procs"]

GRACE = 5.0
"""Seconds that the worker has to end."""


def native_hosts(*, tuned: bool = False) -> tuple[Any, Callable[[], None]]:
    """A host mesh of one host, and what ends its worker.

    Args:
        tuned: with Loom's worker and settings, not stock Monarch's worker loop and defaults.
    """
    address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    end = _tuned_worker(address) if tuned else _stock_worker(address)
    from monarch.actor import ChannelTransport, attach_to_workers, enable_transport

    from loom_gateway.workers.monarch_env import service_address

    enable_transport(ChannelTransport.TcpWithLocalhost)
    return attach_to_workers(ca="trust_all_connections", workers=[service_address(address)]), end


def native_procs(gpus: int, *, tuned: bool = False) -> tuple[Any, Callable[[], None]]:
    """A proc mesh of one host with that many processes, and what ends it and its worker."""
    hosts, end = native_hosts(tuned=tuned)
    procs = hosts.spawn_procs(per_host={"gpus": gpus}, name="procs")

    def close() -> None:
        procs.stop().get()
        end()

    return procs, close


def _stock_worker(address: str) -> Callable[[], None]:
    command = [sys.executable, "-m", "tests.benchmarks.native_worker", address]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE)

    def end() -> None:
        assert worker.stdin
        worker.stdin.close()
        worker.wait(GRACE)

    return end


def _tuned_worker(address: str) -> Callable[[], None]:
    set_monarch_environment()
    environment = os.environ | MONARCH_ENVIRONMENT
    command = python("loom_gateway.workers.host", "--address", address, "--exit-with-parent")
    worker = Child("the worker", command, environment)
    worker.ready.result(timeout=60)

    def end() -> None:
        worker.ask_to_end()
        worker.end(grace=GRACE)

    return end
