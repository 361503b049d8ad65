"""A TCP proxy that delivers every byte a fixed time after it was sent, in both directions."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import TracebackType

__all__ = ["DelayProxy"]


class DelayProxy:
    """Forwards connections to ``port`` of this machine, ``delay`` seconds late in each direction.

    The delay is that of a long line, not of a narrow one: what is sent together arrives together.
    """

    def __init__(self, port: int, delay: float) -> None:
        self._target = port
        self._delay = delay
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))
        self.port = 0
        """Where the proxy listens, on 127.0.0.1."""

    async def _run(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._target)
        await asyncio.gather(self._forward(reader, upstream_writer), self._forward(upstream_reader, writer))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        deliver = asyncio.ensure_future(self._deliver(line, writer))
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                line.put_nowait((self._loop.time() + self._delay, data))
        line.put_nowait((self._loop.time() + self._delay, b""))
        await deliver

    async def _deliver(self, line: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        while True:
            due, data = await line.get()
            await asyncio.sleep(due - self._loop.time())
            if not data:
                writer.close()
                return
            writer.write(data)

    def __enter__(self) -> DelayProxy:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()
