"""`Forwarder`, which forwards TCP connections to the pod that has the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import logging

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 5.0  # seconds that the other pod has to accept a connection
CHUNK = 256 << 10  # bytes to read at once


class Forwarder:
    """Listens on a port, and forwards each connection to the same port of another pod."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
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
        for connection in list(self._connections):
            connection.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        with contextlib.closing(writer):
            if self.target is None:
                return
            try:
                opening = asyncio.open_connection(self.target, self._port, limit=CHUNK)
                there_reader, there_writer = await asyncio.wait_for(opening, CONNECT_TIMEOUT)
            except (OSError, asyncio.TimeoutError) as error:
                logger.warning("the gateway's pod %s does not accept a connection: %s", self.target, error)
                return
            with contextlib.closing(there_writer):
                await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy one direction of a connection until its end. The other direction may go on."""
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError, RuntimeError):
        writer.write_eof()
