"""Lifelines: connections that end a session's processes with their driver, however it ends.

Monarch's hosts keep the processes of a root client that was killed (torchmonarch 0.7; seen for minutes). So every
process of a session first opens a connection to its driver and ends when the connection does. The kernel closes it
for a killed driver, and keep-alive probes notice a lost machine.

In the other direction, the driver learns at once that a process is gone. Monarch reports a process that died while
its host lives. It does not report a lost host, and pending calls would wait forever.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from loom.control.address import ADDRESS_VARIABLE
from loom_gateway.driver.code_sync.sys_path import OnPath
from loom_gateway.driver.monarch.results import send_large_results_apart
from loom_gateway.driver.output.capture import capture_output
from loom_gateway.workers.end_notice import heed_end_notice
from loom_gateway.workers.sources import WorkerAddress

CONNECT_TIMEOUT = 10.0  # seconds that the driver has to answer a new process
_PROBE_AFTER, _PROBE_EVERY, _PROBES = 10, 5, 4  # seconds of silence, seconds between, how many lost

DELIVERY_TIMEOUT = "30s"
"""The duration for which a process tries to deliver a message: Monarch's default. It is set explicitly because a
process would otherwise inherit the driver's `UNDELIVERABLE_AFTER`, and an actor that calls another on a dead host
would wait forever."""


async def _no_weaver() -> str:
    return ""


class LifelineServer:
    """The driver's end: accepts the connections of processes at ``host``, and reports when one breaks."""

    def __init__(self, host: str) -> None:
        self._socket = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]  # host and port to which processes connect
        self._server: asyncio.Server

    async def start(
        self,
        gone: Callable[[int, int], object],
        started: Callable[[int, int], object] = lambda procs, rank: None,
        prints: Callable[[int, int, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]] | None = None,
        weaver: Callable[[], Awaitable[str]] = _no_weaver,
    ) -> None:
        """Accept connections. Processes are reported by their proc mesh's id and rank, on the event loop.

        Args:
            prints: serves the separate connection on which a process's output arrives.
            weaver: returns the weaver's address, which a process gets before it does anything else.
        """
        self._gone, self._started, self._prints, self._weaver = gone, started, prints, weaver
        self._server = await asyncio.start_server(self._hold, sock=self._socket)

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            procs, rank, *use = json.loads(await reader.readline())
        except (ValueError, TypeError):
            writer.close()  # not a process of ours
            return
        if use and self._prints is not None:
            await self._prints(procs, rank, reader, writer)
            return
        self._started(procs, rank)
        try:
            writer.write(json.dumps(await self._weaver()).encode() + b"\n")
            while await reader.read(4096):
                pass
        except OSError:
            pass  # the process was killed, or its machine is gone
        writer.close()
        self._gone(procs, rank)


async def watch_host(address: WorkerAddress) -> None:
    """Return when a worker host is gone.

    Monarch keeps a silent connection open, so an idle one reveals the worker's end. The lifelines do not suffice: a
    process that is still being spawned has none yet.
    """
    try:
        reader, writer = await asyncio.open_connection(address.host, address.port)
    except OSError:
        return
    _keep_alive(writer.get_extra_info("socket"))
    try:
        while await reader.read(4096):
            pass
    except OSError:
        pass  # its machine is gone
    finally:
        writer.close()


class ReplicaPlace(NamedTuple):
    """The default identity of the replicas in a proc mesh, which a training program may override."""

    session: str
    group: str  # proc mesh's name
    marks: Mapping[str, str] = {}  # further environment variables from the client

    def environment(self, procs: int, rank: int, weaver: str) -> dict[str, str]:
        """Return the environment variables of one process, by which its threadlet finds the weaver."""
        return {
            ADDRESS_VARIABLE: weaver,
            "LOOM_SESSION": self.session,
            "LOOM_PROCS": str(procs),
            "LOOM_GROUP": self.group,
            "LOOM_RANK": str(rank),
            "LOOM_REPLICA": f"{self.group}_{rank}@{self.session}",
            **self.marks,
        }


Bootstrap = Callable[[], None] | Callable[[], Awaitable[None]]


def bootstrap_on(
    address: tuple[str, int],
    procs: int,
    bootstrap: Bootstrap | None,
    on_path: OnPath | None = None,
    replica: ReplicaPlace | None = None,
) -> Callable[[], Any]:
    """Return a bootstrap function for ``spawn_procs`` that ties a process to its driver, then runs the user's own.

    Arguments are unpickled in their order, so ``on_path`` completes the path before ``bootstrap`` is unpickled.
    """
    if bootstrap is not None and inspect.iscoroutinefunction(bootstrap):
        return functools.partial(_hold_on_async, address, procs, on_path, replica, bootstrap)
    return functools.partial(_hold_on, address, procs, on_path, replica, bootstrap)  # type: ignore[arg-type]


def hold_on(address: tuple[str, int], procs: int) -> tuple[int, str]:
    """Tie this process to the driver at ``address``. Return its rank and the weaver's address, perhaps empty."""
    from monarch.actor import current_rank

    lifeline = socket.create_connection(address, CONNECT_TIMEOUT)
    lifeline.settimeout(None)
    _keep_alive(lifeline)
    rank: int = current_rank().rank
    lifeline.sendall(json.dumps([procs, rank]).encode() + b"\n")
    # unbuffered, because another thread goes on reading the socket
    with lifeline.makefile("rb", buffering=0) as answers:
        answer = answers.readline()
    if not answer:
        os._exit(1)  # the driver is gone already
    threading.Thread(target=_end_with, args=(lifeline,), name="loom-lifeline", daemon=True).start()
    return rank, str(json.loads(answer))


def _hold_on(
    address: tuple[str, int],
    procs: int,
    on_path: OnPath | None,
    replica: ReplicaPlace | None,
    bootstrap: Callable[[], None] | None,
) -> None:
    from monarch.config import configure

    heed_end_notice()
    rank, weaver = hold_on(address, procs)
    if weaver and replica is not None:
        os.environ.update(replica.environment(procs, rank, weaver))
    if "HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT" not in os.environ:
        configure(message_delivery_timeout=DELIVERY_TIMEOUT)
    capture_output(address, procs, rank)
    send_large_results_apart()
    if on_path is not None:
        on_path.check()
    if bootstrap is not None:
        bootstrap()


async def _hold_on_async(
    address: tuple[str, int],
    procs: int,
    on_path: OnPath | None,
    replica: ReplicaPlace | None,
    bootstrap: Callable[[], Awaitable[None]],
) -> None:
    _hold_on(address, procs, on_path, replica, None)
    await bootstrap()


def _keep_alive(lifeline: socket.socket) -> None:
    lifeline.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # Linux
        lifeline.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER)
        lifeline.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY)
        lifeline.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


def _end_with(lifeline: socket.socket) -> None:
    try:
        while lifeline.recv(1):
            pass
    except OSError:
        pass  # the driver's machine is gone
    os._exit(1)
