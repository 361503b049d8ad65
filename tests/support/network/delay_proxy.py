"""A TCP proxy that delivers every byte a fixed time after it was sent, in both directions."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

__all__ = ["DelayProxy", "Link", "Passed"]

PIECE = 64 << 10
"""Bytes that are read at once."""

HELD = 1024
"""Pieces that a direction holds at most; after that its sender has to wait."""

Passed = tuple[bytes, Callable[[], None] | None]
"""What is passed on of a piece, and what happens once it has been."""

P = TypeVar("P", bound="DelayProxy")


class Link:
    """A client's connection and the one to the server that goes with it."""

    def __init__(
        self,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        delay: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._client, self._server = client, server
        self.delay = delay
        """Seconds by which what comes from now on is late, in each direction."""
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.answers = asyncio.Event()
        """Cleared: nothing is delivered to the client. For the proxy's thread."""
        self.answers.set()

    async def run(self, passed: Callable[[Link, bytes, bool], Passed]) -> None:
        """Forward until both connections are over; ``passed`` sees each piece and whether it goes to the server."""
        up, down = (self._client[0], self._server[1], True), (self._server[0], self._client[1], False)
        try:
            await asyncio.gather(*(self._forward(*way, passed) for way in (up, down)))
        except asyncio.CancelledError:  # the proxy is told to stop
            self.reset()

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        to_server: bool,
        passed: Callable[[Link, bytes, bool], Passed],
    ) -> None:
        line: asyncio.Queue[tuple[float, Passed]] = asyncio.Queue(HELD)

        async def read() -> None:
            with contextlib.suppress(OSError):
                while data := await reader.read(PIECE):
                    await line.put((self._loop.time() + self.delay, passed(self, data, to_server)))
            await line.put((self._loop.time() + self.delay, (b"", None)))

        reading = asyncio.ensure_future(read())
        try:
            await self._deliver(line, writer, to_server)
        finally:
            reading.cancel()  # it may wait for room in the line

    async def _deliver(
        self, line: asyncio.Queue[tuple[float, Passed]], writer: asyncio.StreamWriter, to_server: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while True:
                due, (data, then) = await line.get()
                await asyncio.sleep(due - self._loop.time())
                await self._flowing.wait()
                if not to_server:
                    await self.answers.wait()
                if not data or writer.is_closing():
                    break
                writer.write(data)
                await writer.drain()
                if then is not None:
                    then()
        writer.close()

    def stall(self, seconds: float) -> None:
        """Deliver nothing for so long, in either direction."""
        self._flowing.clear()
        self._loop.call_later(seconds, self._flowing.set)

    def finish(self) -> None:
        """End both connections in good form, once what has been written is sent: FIN."""
        for _, writer in (self._client, self._server):
            writer.close()

    def reset(self) -> None:
        """End both connections at once: RST, which also takes what is still in the kernel's queues."""
        for _, writer in (self._client, self._server):
            sock = writer.get_extra_info("socket")
            if not writer.is_closing() and sock is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


class DelayProxy:
    """Forwards connections to ``port`` of this machine, ``delay`` seconds late in each direction.

    The delay is that of a long line, not of a narrow one: what is sent together arrives together.

    Args:
        listen: port to listen on; 0 picks a free one.
    """

    def __init__(self, port: int, delay: float, listen: int = 0) -> None:
        self._target = port
        self._delay = delay
        self._listen = listen
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),), daemon=True)
        self.port = 0
        """Where the proxy listens, on 127.0.0.1."""

    async def _run(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", self._listen)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        await asyncio.sleep(0)  # a connection that has just come gets its task
        while tasks := [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)  # a transport is closed one round of the loop later

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server = await asyncio.open_connection("127.0.0.1", self._target)
        except BaseException as error:  # nobody listens there, or the proxy is told to stop
            writer.transport.abort()
            if isinstance(error, OSError):
                return
            raise
        await self._forward(Link((reader, writer), server, self._delay))

    async def _forward(self, link: Link) -> None:
        await link.run(self._passed)

    def _passed(self, link: Link, data: bytes, to_server: bool) -> Passed:
        """What to pass on of a piece that came, and what to do then. Called in the proxy's thread."""
        return data, None

    def __enter__(self: P) -> P:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()
