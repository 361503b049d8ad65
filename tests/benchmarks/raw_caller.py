"""The least that a call over a WebSocket can cost: a message there and back, nothing pickled, nothing called.

Run with the argument ``asyncio`` or ``sync``: which client of the ``websockets`` library makes the calls.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import websockets.asyncio.client
import websockets.sync.client

from loom.process.child import Child
from tests.benchmarks.caller import Caller, Payload, seconds_each, serve

MESSAGE = bytes(100)
"""What one call sends and receives: about as much as a small call's header and arguments."""

OPTIONS: dict[str, Any] = {"compression": None, "max_size": None, "max_queue": None, "ping_interval": None}


class EchoServer:
    """The process that the messages go to."""

    def __init__(self) -> None:
        self._child = Child(
            "the echo server", [sys.executable, "-m", "tests.benchmarks.echo_server", "--exit-with-parent"]
        )
        self.url: str = self._child.ready.result(timeout=30)["url"]

    def close(self) -> None:
        self._child.ask_to_end()
        self._child.end(grace=2.0)


class AsyncioCaller:
    """Calls with the asyncio client, on asyncio's own loop, which is what a laptop has."""

    def __init__(self) -> None:
        self._server = EchoServer()
        self._loop = asyncio.new_event_loop()
        self._socket = self._loop.run_until_complete(self._connect())

    async def _connect(self) -> websockets.asyncio.client.ClientConnection:
        return await websockets.asyncio.client.connect(self._server.url, **OPTIONS)

    def one_call(self, count: int) -> list[float]:
        return self._loop.run_until_complete(self._each(MESSAGE, count))

    def pipelined(self, count: int) -> float:
        async def run() -> float:
            async def receive() -> None:
                for _ in range(count):
                    await self._socket.recv()

            start = time.perf_counter()
            receiving = asyncio.ensure_future(receive())
            for _ in range(count):
                await self._socket.send(MESSAGE)
            await receiving
            return time.perf_counter() - start

        return self._loop.run_until_complete(run())

    def echo(self, payload: Payload, size: int, count: int) -> list[float]:
        return self._loop.run_until_complete(self._each(os.urandom(size), count))

    async def _each(self, message: bytes, count: int) -> list[float]:
        async def there_and_back() -> None:
            await self._socket.send(message)
            assert len(await self._socket.recv()) == len(message)

        return await _seconds_each(there_and_back, count)

    def close(self) -> None:
        self._loop.run_until_complete(self._socket.close())
        self._loop.close()
        self._server.close()


async def _seconds_each(function: Callable[[], Awaitable[None]], count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        await function()
        seconds.append(time.perf_counter() - start)
    return seconds


class SyncCaller:
    """Calls with the threaded client."""

    def __init__(self) -> None:
        self._server = EchoServer()
        self._socket = websockets.sync.client.connect(self._server.url, **OPTIONS)

    def _there_and_back(self, message: bytes) -> None:
        self._socket.send(message)
        assert len(self._socket.recv()) == len(message)

    def one_call(self, count: int) -> list[float]:
        return seconds_each(lambda: self._there_and_back(MESSAGE), count)

    def pipelined(self, count: int) -> float:
        def send() -> None:
            for _ in range(count):
                self._socket.send(MESSAGE)

        sending = threading.Thread(target=send)
        start = time.perf_counter()
        sending.start()
        for _ in range(count):
            self._socket.recv()
        sending.join()
        return time.perf_counter() - start

    def echo(self, payload: Payload, size: int, count: int) -> list[float]:
        message = os.urandom(size)
        return seconds_each(lambda: self._there_and_back(message), count)

    def close(self) -> None:
        self._socket.close()
        self._server.close()


CALLERS: dict[str, Callable[[], Caller]] = {"asyncio": AsyncioCaller, "sync": SyncCaller}

if __name__ == "__main__":
    serve(CALLERS[sys.argv[1]])
