"""A TCP proxy over a narrow line, each of whose connections has a queue of its own."""

from __future__ import annotations

import asyncio
import contextlib

from tests.support.network.delay_proxy import DelayProxy

__all__ = ["NarrowProxy"]

PIECE = 16 << 10
"""Bytes of which the connections take turns on the line."""


class NarrowProxy(DelayProxy):
    """Forwards connections to ``port`` of this machine, over a line for each direction that all share in turns.

    Args:
        rate: bytes a second.
        queue: bytes that wait for the line in each direction of a connection, beside those in the kernel.
        most: connections at a time; more are turned away.
    """

    def __init__(self, port: int, rate: float, queue: int, most: int = 1000) -> None:
        super().__init__(port, delay=0)
        self._rate = rate
        self._pieces = max(1, queue // PIECE)
        self._most = most
        self._lines = (asyncio.Lock(), asyncio.Lock())
        self.open = 0
        """Connections that there are."""
        self.refused = 0
        """Connections that were turned away."""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.open >= self._most:
            self.refused += 1
            writer.transport.abort()
            return
        self.open += 1
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
            await asyncio.gather(self._pass(reader, back, 0), self._pass(there, writer, 1))
        except (OSError, asyncio.CancelledError):  # or the proxy is told to stop
            writer.transport.abort()
        finally:
            self.open -= 1

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: int) -> None:
        queue: asyncio.Queue[bytes] = asyncio.Queue(self._pieces)

        async def fill() -> None:
            with contextlib.suppress(OSError):
                while data := await reader.read(PIECE):
                    await queue.put(data)
            await queue.put(b"")

        filling = asyncio.ensure_future(fill())
        try:
            while data := await queue.get():
                async with self._lines[way]:  # in turns
                    await asyncio.sleep(len(data) / self._rate)
                writer.write(data)
                await writer.drain()
        finally:
            filling.cancel()
            writer.close()
