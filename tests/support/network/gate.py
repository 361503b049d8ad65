"""A TCP proxy that can be shut: a network that is away for as long as a test wants."""

from __future__ import annotations

import asyncio
import threading

from tests.support.network.delay_proxy import DelayProxy, Link

__all__ = ["Gate"]


class Gate(DelayProxy):
    """Forwards connections to ``port`` of this machine while it is open."""

    def __init__(self, port: int, listen: int = 0) -> None:
        super().__init__(port, delay=0, listen=listen)
        self._links: set[Link] = set()
        self._making: set[asyncio.Task[None] | None] = set()
        """The tasks that connect to the server. The connection may be there already, and a cut is for it too."""
        self._shut = False
        self.knocked = threading.Event()
        """Set when a client has been turned away."""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._shut:
            writer.transport.abort()
            self.knocked.set()
            return
        making = asyncio.current_task()
        self._making.add(making)
        try:
            await super()._serve(reader, writer)
        finally:
            self._making.discard(making)

    async def _forward(self, link: Link) -> None:
        if asyncio.current_task() not in self._making:
            link.reset()
            return
        self._making.discard(asyncio.current_task())
        self._links.add(link)
        try:
            await super()._forward(link)
        finally:
            self._links.discard(link)

    def cut(self) -> None:
        """Cut every connection, and take new ones."""
        self._loop.call_soon_threadsafe(self._reset)

    def shut(self) -> None:
        """Cut every connection, and take no more until `open`."""
        self._shut = True
        self.knocked.clear()
        self.cut()

    def hold_answers(self) -> None:
        """From now on pass on nothing of what the server sends on the connections that there are."""
        self._loop.call_soon_threadsafe(lambda: [link.answers.clear() for link in self._links])

    def open(self) -> None:
        """Take connections again."""
        self._shut = False

    def _reset(self) -> None:
        self._making.clear()
        for link in self._links:
            link.reset()
