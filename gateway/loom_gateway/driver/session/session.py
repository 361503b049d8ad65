"""An open session: its clients, its operations, and its end."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from loom.beside import enter
from loom.wire.bodies import SessionEnded
from loom.wire.handshake import CAPABILITIES, Hello, Welcome
from loom.wire.mux import MAX_MESSAGE
from loom_gateway.driver.clients.client import Client
from loom_gateway.driver.clients.connection import ClientConnection
from loom_gateway.driver.clients.registry import Clients
from loom_gateway.driver.lifetime import Lifetime
from loom_gateway.driver.monarch.errors import replace_fault_hook
from loom_gateway.driver.monarch.liveness import LifelineServer
from loom_gateway.driver.monarch.root_client import address_towards
from loom_gateway.driver.output.spool import LogSpool
from loom_gateway.driver.session.context import Context
from loom_gateway.driver.session.dispatcher import Dispatcher
from loom_gateway.driver.weaver_link import WeaverLink
from loom_gateway.workers.sources import WorkerList


class Session:
    """The session of a driver. Created on a client's thread while the event loop runs on another.

    Args:
        name: the session's name.
        host_mesh: the Monarch host mesh of its workers.
        workers: the workers it was opened on.
        read_workers: returns the gateway's current list of workers; None if there is none.
        loop: the driver's event loop.
        lifetime: ends the driver when it is no longer needed.
        end: ends the session for a given reason; called on the event loop.
        weaver_folder: the weaver's folder; None if there is no weaver.
        log_spool: the file that keeps the session's log.
        max_message: bytes of the largest message that a client may send.
        max_in_flight: the maximum number of unanswered operations; 0 for no limit.
    """

    def __init__(
        self,
        name: str,
        host_mesh: Any,
        workers: WorkerList,
        read_workers: Callable[[], WorkerList | None],
        loop: asyncio.AbstractEventLoop,
        lifetime: Lifetime,
        end: Callable[[str], object],
        weaver_folder: str | None = None,
        log_spool: LogSpool | None = None,
        max_message: int = MAX_MESSAGE,
        max_in_flight: int = 0,
    ) -> None:
        self.name = name
        self._workers = workers
        self._loop = loop
        self._lifetime = lifetime
        self._max_message = max_message
        self._clients = Clients(max_message)
        self._lifeline = LifelineServer(address_towards(workers.addresses))
        self._context = Context(
            host_mesh,
            workers.addresses,
            self._lifeline.address,
            WeaverLink(weaver_folder, name, loop),
            loop,
            self._clients.send,
            self._clients.flush,
            self._clients.has_room,
        )
        self._dispatcher = Dispatcher(self._context, end, log_spool, max_in_flight)
        replace_fault_hook(self._context.failures.report)
        enter(self._dispatcher.local_session)
        asyncio.run_coroutine_threadsafe(self._start(read_workers), loop).result()

    async def _start(self, read_workers: Callable[[], WorkerList | None]) -> None:
        await self._lifeline.start(self._dispatcher)
        self._dispatcher.hosts.start(read_workers)
        reports = self._context.weaver.report_calls(self._context.replies.latencies)
        self._reporting = self._loop.create_task(reports)

    def admit(self, connection: ClientConnection, hello: Hello) -> tuple[Client, bool]:
        """Return the greeting client, and whether it is new.

        Raises:
            LoomError: the client is refused.
        """
        admitted = self._clients.admit(connection, hello, self._dispatcher)
        if not hello.lane:  # the second connection of a client does not keep a session alive
            self._lifetime.client_came(connection)
        return admitted

    def welcome(self, client: Client, hello: Hello) -> Welcome:
        """Return the answer to a client's greeting."""
        return Welcome(
            session=self.name,
            workers=self._workers.addresses,
            meshes=self._workers.meshes,
            capabilities=[name for name in hello.capabilities if name in CAPABILITIES],
            versions=_versions(),
            next_id=client.first_id,
            linger=self._lifetime.opened(hello.persist),
            mode=client.mode,
            stream=client.name,
            received=client.stream.received,
            max_message=self._max_message,
            received_bulk=0 if client.stream.bulk is None else client.stream.bulk.received,
        )

    def connected(self, client: Client) -> None:
        """Send a new client the notices about processes that earlier clients got."""
        send = functools.partial(self._clients.send_to, client)
        self._loop.call_soon_threadsafe(self._dispatcher.processes.send_all, send)

    def disconnected(self, client: Client, connection: ClientConnection) -> None:
        """Note that a connection is gone. The session goes on, and the client may come back."""
        self._clients.disconnected(client, connection)
        self._lifetime.client_left(connection)

    async def close(self, reason: str) -> None:
        """Stop the session's meshes and tell the clients. On the event loop."""
        await self._dispatcher.close()
        await self._loop.run_in_executor(None, self._clients.say_goodbye, SessionEnded(reason).message())


def _versions() -> dict[str, str]:
    versions = {"python": sys.version.split()[0]}
    for package in ("monarch-loom", "torchmonarch", "torch"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
