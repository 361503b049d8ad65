"""`PortForwarder`, which forwards TCP connections to the pod that has the gateway.

Connections are bounded as the gateway's own are (`loom_gateway.access.connections`). The gateway, which sees
tokens, closes the connections that show none; the forwarder learns from its answers which may stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

from loom_gateway.access.connections import Connections, PortConnection

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 5.0  # seconds that the other pod has to accept a connection
CHUNK = 256 << 10  # bytes to read at once

MOST_OF_ADDRESS = 512
"""Connections of one address to which the gateway has given no good answer. The oldest goes for a newcomer."""

UNANSWERED = 120.0
"""Seconds in which the gateway has to give a connection a good answer, and either end has to take something."""

CLOSING = 60.0
"""Seconds without a byte after which a connection is closed if its client has closed its side already."""

GOOD = (b"HTTP/1.1 1", b"HTTP/1.1 2")
"""The beginnings of answers after which a connection stays: a WebSocket, or a good answer."""


class PortForwarder:
    """Listens on a port, and forwards each connection to the same port of another pod."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server: asyncio.Server | None = None
        self._connections = Connections(most_of_address=MOST_OF_ADDRESS, timeout=UNANSWERED)
        self._tasks: set[asyncio.Task[None]] = set()
        self.target: str | None = None
        """The address of the other pod; None: new connections are closed at once."""

    async def listen(self) -> None:
        """Start to listen, unless it does. Raise `OSError` if the port is taken."""
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, None, self._port, limit=CHUNK)

    async def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:  # it came just before the end
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        address = str(writer.get_extra_info("peername")[0])
        connection = self._connections.add(writer.get_extra_info("socket"), address)
        try:
            if connection is not None:
                connection.abort = task.cancel
                await self._forward(connection, reader, writer)
                writer.close()
                await asyncio.wait_for(writer.wait_closed(), CLOSING)
        except (OSError, asyncio.TimeoutError, asyncio.CancelledError):
            pass  # the client takes nothing any more, or has to go
        finally:
            writer.transport.abort()
            if connection is not None:
                connection.closed()

    async def _forward(
        self, connection: PortConnection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self.target is None:
            return
        try:
            opening = asyncio.open_connection(self.target, self._port, limit=CHUNK)
            there_reader, there_writer = await asyncio.wait_for(opening, CONNECT_TIMEOUT)
        except (OSError, asyncio.TimeoutError) as error:
            logger.warning("the gateway's pod %s does not accept a connection: %s", self.target, error)
            return
        try:
            for end in (writer, there_writer):
                end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            await _forward_both(_Direction(reader, there_writer), _Direction(there_reader, writer, connection))
        finally:
            there_writer.transport.abort()


class _Direction:
    """One direction of a connection. The answers to a ``client`` show whether it may stay."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, client: PortConnection | None = None
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._client = client
        self.chunks = 0
        """The number passed on."""

    @property
    def waits_for_reader(self) -> bool:
        """True if the other end does not take what is there for it."""
        return self._writer.transport.get_write_buffer_size() > 0

    async def copy(self) -> None:
        """Copy until the end. The other direction may go on."""
        with contextlib.suppress(OSError):
            while data := await self._reader.read(CHUNK):
                if self._client is not None and data.startswith(GOOD):
                    self._client.admit()
                self._writer.write(data)
                await self._writer.drain()
                self.chunks += 1
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write_eof()


async def _forward_both(there: _Direction, back: _Direction) -> None:
    """Forward until the gateway's end, or until nothing moves any more."""
    tasks = {asyncio.ensure_future(one.copy()): one for one in (there, back)}
    pending = set(tasks)
    try:
        while back in (going := [tasks[task] for task in pending]):
            before = [one.chunks for one in going]
            closing = there not in going
            done, pending = await asyncio.wait(
                pending, timeout=CLOSING if closing else UNANSWERED, return_when=asyncio.FIRST_COMPLETED
            )
            still = [one for one, chunks in zip(going, before, strict=True) if one.chunks == chunks]
            if not done and any(closing or one.waits_for_reader for one in still):
                return
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
