"""The driver's end of the unix socket: one gateway, one client at a time.

On the socket a frame is preceded by its length (4 bytes, big endian). The gateway opens a connection for each
client, says with an `Kind.OPEN` frame which session this is, and relays the client's frames from then on.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

from loom.errors import LoomError, ProtocolMismatch, SessionInUse
from loom.wire.frames import MAX_FRAME
from loom.wire.handshake import CAPABILITIES, Hello, Welcome, check_protocol, refusal
from loom.wire.messages import Buffer, Kind, Message
from loom.wire.stream import Stream, unnumbered_frame
from loom_gateway.driver.faults import replace_fault_hook
from loom_gateway.driver.lifeline import LifelineServer, watch_host
from loom_gateway.driver.operations import Operations
from loom_gateway.driver.root_client import address_towards, attach, probe, use_transport
from loom_gateway.workers import parse_worker_address

__all__ = ["DriverServer"]

logger = logging.getLogger(__name__)

HIGH_WATER = 64 << 20
"""Bytes of results waiting for the client, over which no more operations are read."""

_LENGTH = struct.Struct(">I")


class DriverServer:
    """A session's driver: attaches to the workers when the first client comes, serves until it is ended."""

    def __init__(self, workers: Sequence[str]) -> None:
        self._workers = list(workers)
        self._session: str | None = None
        self._lifeline = LifelineServer(address_towards(workers), self._process_gone)
        self._operations: Operations | None = None
        self._opening: asyncio.Future[Operations] | None = None
        self._client: ClientConnection | None = None
        self._ending: asyncio.Task[None] | None = None
        self.ended = asyncio.Event()
        """Set when the session is over and its meshes have been stopped."""

    def connection(self) -> ClientConnection:
        """A protocol for a new connection of the gateway."""
        return ClientConnection(self)

    async def open(self, session: str) -> Operations:
        """Attach to the workers, the first time; later calls give the same operations.

        Raises:
            WorkerUnreachable: a worker does not answer.
        """
        if self._opening is None:
            self._session = session
            self._opening = asyncio.ensure_future(self._open(session))
        return await asyncio.shield(self._opening)

    async def _open(self, session: str) -> Operations:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, probe, self._workers)
        replace_fault_hook(lambda name, details: loop.call_soon_threadsafe(self._event, name, details))
        host_mesh = await loop.run_in_executor(None, attach, self._workers, session)
        await host_mesh.initialized.as_asyncio()
        lifeline = await self._lifeline.start()
        self._operations = Operations(host_mesh, lifeline, self.send)
        self._watches = [
            asyncio.ensure_future(self._watch_host(number, address)) for number, address in enumerate(self._workers)
        ]
        return self._operations

    def send(self, message: Message) -> None:
        """Send a message to the client, if there is one."""
        if self._client is not None:
            self._client.send(message)

    def _event(self, name: str, details: dict[str, Any]) -> None:
        logger.warning("%s: %s", name, details)
        self.send(Message(Kind.EVENT, 0, [name, details]))

    async def _watch_host(self, number: int, address: str) -> None:
        await watch_host(parse_worker_address(address))
        if self._operations is not None:
            self._operations.host_gone(number)
            self._event("host_lost", {"host": number, "address": address})

    def _process_gone(self, procs: int, rank: int) -> None:
        if self._operations is not None:
            self._operations.process_gone(procs, rank)

    async def welcome(self, connection: ClientConnection, hello: Hello, session: str) -> Welcome:
        """Make a connection the session's client.

        Raises:
            SessionInUse: the session has a client already.
            LoomError: the session cannot be opened, or the client speaks another protocol.
        """
        check_protocol(hello.protocol, ours="driver", theirs="client")
        operations = await self.open(session)
        if self._client is not None:
            raise SessionInUse(
                f"another client is connected to session {session!r}; close or detach it there first"
            )
        self._client = connection
        return Welcome(
            session=session,
            workers=self._workers,
            capabilities=[name for name in hello.capabilities if name in CAPABILITIES],
            versions=_versions(),
            next_id=operations.highest_id + 1,
        )

    def receive(self, message: Message) -> None:
        """Take an operation from the client."""
        if message.kind == Kind.END:
            self.end("the client closed it")
        elif self._operations is not None and self._ending is None:
            self._operations.submit(message)

    def disconnected(self, connection: ClientConnection) -> None:
        """Note that a connection is gone; the session goes on."""
        if self._client is connection:
            self._client = None

    def end(self, reason: str) -> None:
        """Stop the session's meshes, tell the client, and set `ended`."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end(reason))

    async def _end(self, reason: str) -> None:
        if self._operations is not None:
            await self._operations.stop_meshes()
        if self._client is not None:
            await self._client.say_goodbye(Message(Kind.ENDED, 0, [reason]))
        self.ended.set()


class ClientConnection(asyncio.Protocol):
    """One connection of the gateway, which is one connection of a client."""

    def __init__(self, server: DriverServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._buffer = bytearray()
        self._stream: Stream | None = None
        self._session: str | None = None
        self._receive: Callable[[bytes], None] = self._receive_open
        self._flush_scheduled = False
        self._writable = True
        self._reading = True
        self._drained: asyncio.Future[None] | None = None

    # -- asyncio.Protocol -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._transport.set_write_buffer_limits(high=1 << 20)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        position = 0
        try:
            while len(buffer) - position >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(buffer, position)
                if length > MAX_FRAME:
                    raise ProtocolMismatch(f"a frame of {length} bytes is over the limit of {MAX_FRAME}")
                end = position + _LENGTH.size + length
                if end > len(buffer):
                    break
                frame = bytes(memoryview(buffer)[position + _LENGTH.size : end])
                position = end
                self._receive(frame)
        except LoomError as error:
            self._refuse(error)
        if position:
            del buffer[:position]

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.disconnected(self)
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._flush()

    # -- receiving ------------------------------------------------------------------------------------------

    def _receive_open(self, frame: bytes) -> None:
        (message,) = Stream().receive(frame)
        if message.kind != Kind.OPEN:
            raise ProtocolMismatch(f"a connection to a driver begins with OPEN, not with message {message.kind}")
        (self._session,) = message.body
        self._receive = self._receive_hello

    def _receive_hello(self, frame: bytes) -> None:
        self._stream = Stream()
        (message,) = self._stream.receive(frame)
        if message.kind != Kind.HELLO:
            raise ProtocolMismatch(f"a client begins with HELLO, not with message {message.kind}")
        self._receive = self._receive_operations
        # Nothing more is read before the session is open, so that operations find it so.
        self._transport.pause_reading()
        self._greeting = asyncio.ensure_future(self._greet(Hello.from_body(message.body)))

    async def _greet(self, hello: Hello) -> None:
        assert self._session is not None
        try:
            welcome = await self._server.welcome(self, hello, self._session)
        except LoomError as error:
            self._refuse(error)
            return
        self._write(unnumbered_frame(welcome.message()))
        self._flush()
        self._transport.resume_reading()

    def _receive_operations(self, frame: bytes) -> None:
        assert self._stream is not None
        for message in self._stream.receive(frame):
            self._server.receive(message)

    # -- sending --------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Queue a message; what was queued within one turn of the event loop shares a frame."""
        assert self._stream is not None
        self._stream.put(message)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        stream = self._stream
        if stream is None:
            return
        while self._writable and not self._transport.is_closing():
            frame = stream.next_frame()
            if frame is None:
                break
            self._write(frame)
        if self._drained is not None and not stream.outbox and not self._drained.done():
            self._drained.set_result(None)
        self._limit_reading(stream.outbox.pending_bytes)

    def _limit_reading(self, pending: int) -> None:
        if self._reading and pending > HIGH_WATER:
            self._reading = False
            self._transport.pause_reading()
        elif not self._reading and pending < HIGH_WATER // 2:
            self._reading = True
            self._transport.resume_reading()

    def _write(self, buffers: Sequence[Buffer]) -> None:
        length = sum(len(buffer) for buffer in buffers)
        self._transport.writelines([_LENGTH.pack(length), *buffers])

    def _refuse(self, error: LoomError) -> None:
        logger.warning("refusing the client: %s", error)
        self._write(unnumbered_frame(refusal(error)))
        self._transport.close()

    async def say_goodbye(self, message: Message) -> None:
        """Send what is queued, then a last message, and close."""
        self._drained = self._loop.create_future()
        self._flush()
        await self._drained
        if not self._transport.is_closing():
            self._write(unnumbered_frame(message))
            self._transport.close()


def _versions() -> dict[str, str]:
    versions = {"python": sys.version.split()[0]}
    for package in ("monarch-loom", "torchmonarch", "torch"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def prepare(workers: Sequence[str]) -> None:
    """Do what a spare driver can do before it has a session: import Monarch and start the root client."""
    import monarch.actor

    use_transport(address_towards(workers))
    monarch.actor.context()
