"""A session's driver: attaches to the workers when the first client comes, and serves until it is ended."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import sys
import threading
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from loom.beside import enter
from loom.errors import ReadOnlySession, WorkersSilent
from loom.wire.handshake import CAPABILITIES, Hello, Welcome, check_protocol
from loom.wire.messages import READING, Kind, Message
from loom.wire.mux import MAX_MESSAGE
from loom.wire.texts import pack_texts
from loom_gateway.driver.clients.connection import ClientConnection
from loom_gateway.driver.clients.registry import Client, Clients
from loom_gateway.driver.lifetime import Lifetime
from loom_gateway.driver.monarch.errors import replace_fault_hook
from loom_gateway.driver.monarch.liveness import LifelineServer
from loom_gateway.driver.monarch.root_client import address_towards, attach, probe, use_transport
from loom_gateway.driver.output.spool import LogSpool
from loom_gateway.driver.session.failures import read_fault
from loom_gateway.driver.session.operations import Operations
from loom_gateway.driver.weaver_link import WeaverLink
from loom_gateway.workers.registry_file import WorkerList

__all__ = ["DriverServer", "prepare"]

logger = logging.getLogger(__name__)

WEAVER_TIMEOUT = 1.0
"""Seconds that the weaver has to be told, when the session ends, of what has been stopped."""


class DriverServer:
    """Serves one session to its clients.

    Made on the event loop, which lives for as long as the driver and does what is not on the path of a call.
    """

    def __init__(
        self,
        workers: Sequence[str],
        listener: socket.socket,
        log_spool: LogSpool,
        lifetime: Lifetime,
        max_message: int = MAX_MESSAGE,
        max_in_flight: int = 0,
        weaver_folder: str | None = None,
        workers_file: str | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._workers = WorkerList(list(workers))
        self._workers_file = workers_file
        self._listener = listener
        self._lifeline = LifelineServer(
            address_towards(workers),
            self._process_gone,
            self._process_started,
            self._process_prints,
            self._weaver_address,
        )
        self._log_spool = log_spool
        self._lifetime = lifetime
        self._max_message = max_message
        self._max_in_flight = max_in_flight
        self._weaver_folder = weaver_folder
        self._operations: Operations | None = None
        self._opening = threading.Lock()
        self._clients = Clients(
            self._take, self._take_reading, self._left, self._orphan, self._next_id, max_message
        )
        self._ending: asyncio.Task[None] | None = None
        self.ended = asyncio.Event()
        """Set when the session is over and its meshes have been stopped."""
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # the listener was closed
            connection = ClientConnection(self, sock)
            threading.Thread(target=connection.run, name="client", daemon=True).start()

    # -- the session ----------------------------------------------------------------------------------------

    def _open(self, session: str) -> Operations:
        """Attach to the workers, the first time. Raises `WorkerUnreachable`."""
        with self._opening:
            if self._operations is None:
                self._workers = self._read_workers() or self._workers
                workers = self._workers.addresses
                probe(workers)
                replace_fault_hook(self._fault)
                host_mesh = attach(workers, session)
                try:
                    host_mesh.initialized.get()
                except RuntimeError as error:
                    reason = str(error).partition("\n\n")[0]
                    raise WorkersSilent(
                        f"the workers accept connections but do not answer: {reason}. Look at their output; an "
                        f"overloaded worker may answer later."
                    ) from error
                lifeline = self._on_loop(self._lifeline.start())
                self._operations = Operations(
                    host_mesh,
                    workers,
                    lifeline,
                    WeaverLink(self._weaver_folder, session, self._loop),
                    self._loop,
                    self._clients.send,
                    self._clients.flush,
                    self._log_spool,
                    self._clients.has_room,
                    self._max_in_flight,
                )
                enter(self._operations.beside)
                self._loop.call_soon_threadsafe(self._operations.hosts.watch, self._read_workers)
                calls = self._operations.weaver.tell_calls(self._operations.latencies)
                self._telling = asyncio.run_coroutine_threadsafe(calls, self._loop)
            return self._operations

    def _read_workers(self) -> WorkerList | None:
        """What the gateway says now; None: nothing. They are as many as this session's hosts, or more."""
        return None if self._workers_file is None else WorkerList.read(self._workers_file)

    def _on_loop(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _process_started(self, procs: int, rank: int) -> None:
        if self._operations is not None:
            self._operations.processes.started(procs, rank)

    async def _process_prints(
        self, procs: int, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._operations is not None:
            await self._operations.logs.serve(procs, rank, reader, writer)

    async def _weaver_address(self) -> str:
        return "" if self._operations is None else await self._operations.weaver.address()

    def _process_gone(self, procs: int, rank: int) -> None:
        if self._operations is not None:
            self._operations.process_gone(procs, rank)

    def _event(self, name: str, details: dict[str, Any]) -> None:
        logger.warning("%s: %s", name, details)
        self._clients.send(Message(Kind.EVENT, 0, [name], [pack_texts(details)]))

    def _fault(self, name: str, details: dict[str, Any]) -> None:
        self._event(name, details)
        fault = read_fault(details["report"])
        if fault is not None and self._operations is not None:
            asyncio.run_coroutine_threadsafe(self._operations.fault(fault), self._loop)

    # -- clients --------------------------------------------------------------------------------------------

    def admit(self, connection: ClientConnection, hello: Hello, session: str) -> tuple[Client, bool]:
        """Open the session for a client that has said hello; as `Clients.admit`.

        Raises:
            LoomError: the session cannot be opened, or the client is refused.
        """
        check_protocol(hello.protocol, ours="driver", theirs="client")
        self._lifetime.check_goes_on(session)
        self._open(session)
        admitted = self._clients.admit(connection, hello)
        if not hello.lane:  # the second connection of a client does not keep a session alive
            self._lifetime.client_came(connection)
        return admitted

    def welcome(self, client: Client, hello: Hello, session: str) -> Welcome:
        """What to answer a client."""
        return Welcome(
            session=session,
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

    def connected(self, client: Client, is_new: bool) -> None:
        """Note that a client has been welcomed."""
        if self._operations is not None and is_new:
            tell = functools.partial(self._clients.send_to, client)
            self._loop.call_soon_threadsafe(self._operations.processes.tell_everything, tell)

    def _take(self, message: Message) -> None:
        """Take an operation from the client that drives."""
        if message.kind == Kind.END:
            self._loop.call_soon_threadsafe(self.end, "the client closed it")
        elif self._operations is not None and self._ending is None:
            self._operations.start(message)

    def _take_reading(self, message: Message) -> None:
        """Take an operation from a client that watches."""
        if self._operations is None or self._ending is not None:
            return
        if message.kind in READING:
            self._operations.read(message)
        else:
            error = ReadOnlySession("this client watches the session: attach with mode='drive' to change something")
            self._operations.fail(message.id, time.perf_counter(), error)

    def _left(self, unsent: Sequence[Message]) -> None:
        """A client that drove has been let go of, and has not received these."""
        if self._operations is not None:
            self._operations.client_left(unsent)

    def _orphan(self, message: Message) -> None:
        """An answer has come for a client that was let go of."""
        if self._operations is not None:
            self._operations.undelivered.take(message)

    def _next_id(self) -> int:
        return 1 if self._operations is None else self._operations.highest_id + 1

    def disconnected(self, client: Client, connection: ClientConnection) -> None:
        """Note that a connection is gone; the session goes on, and the client may come back."""
        self._clients.disconnected(client, connection)
        self._lifetime.client_left(connection)

    def end(self, reason: str) -> None:
        """Stop the session's meshes, tell the client, and set `ended`. On the event loop."""
        if self._ending is None:
            self._lifetime.ends(reason)
            self._ending = self._loop.create_task(self._end(reason))

    async def _end(self, reason: str) -> None:
        if self._operations is not None:
            await self._operations.stop_meshes()
            await self._operations.logs.end()
            await self._operations.weaver.flush(WEAVER_TIMEOUT)
        await self._loop.run_in_executor(None, self._clients.say_goodbye, Message(Kind.ENDED, 0, [reason]))
        self._listener.close()
        self.ended.set()


def _versions() -> dict[str, str]:
    versions = {"python": sys.version.split()[0]}
    for package in ("monarch-loom", "torchmonarch", "torch"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def prepare(workers: Sequence[str], port: int) -> None:
    """Do what a spare driver can do before it has a session: import Monarch and start the root client.

    Args:
        port: what Monarch is to listen on, see `loom_gateway.sessions.driver_ports`.
    """
    import monarch.actor

    use_transport(address_towards(workers), port)
    monarch.actor.context()
    _keep_source_loaders_out()


def _keep_source_loaders_out() -> None:
    """Undo Monarch's patch that has functions by value ask their root client for their source.

    The source is on the laptop, not here, so there is nothing to answer with; and the answer, coming in while an
    actor imports torch, breaks that import (torchmonarch 0.7: ``partially initialized module 'torch'``).
    """
    import cloudpickle
    from monarch._src.actor import pickle as monarch_pickle

    original = getattr(monarch_pickle, "_orig_function_getstate", None)
    if original is not None:
        cloudpickle.cloudpickle._function_getstate = original
