"""A weaver's server and its client in one process, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from loom.control.frame import MAX_FRAME, pack, unpack_all
from loom.token_file import ADMIN
from loom.weaver.client import WeaverClient
from loom.weaver.keys import Keys
from loom.weaver.server.server import Server, monotonic_clock
from loom.weaver.server.users import Users
from loom.weaver.storage.store import Store
from loom.wire.length_prefix import FrameSplitter
from tests.unit.loom.weaver.raw_threadlet import BOUND, hello_of

KEYS = Keys(b"secret")


class Link:
    """A threadlet's end of its connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._splitter = FrameSplitter(MAX_FRAME)
        self._frames: list[list[Any]] = []

    def send(self, *frame: Any) -> None:
        self._writer.write(pack(frame))

    async def receive(self, kind: str) -> list[Any]:
        """The next frame of a kind; others are passed over."""
        while True:
            while self._frames:
                frame = self._frames.pop(0)
                if frame[0] == kind:
                    return frame
            data = await asyncio.wait_for(self._reader.read(1 << 16), BOUND)
            if not data:
                raise EOFError
            self._frames += unpack_all(self._splitter.feed(data))

    def close(self) -> None:
        self._writer.close()


class AdminClient(WeaverClient):
    """The gateway, which acts for the admin if a test names nobody else."""

    async def ask(self, operation: str, within: float = BOUND, /, user: str | None = None, **arguments: Any) -> Any:
        return await super().ask(operation, within, user=user or ADMIN, **arguments)


class Running:
    """A server, a client of it, and where it listens."""

    def __init__(self, server: Server, client: WeaverClient, port: int) -> None:
        self.server, self.client, self.port = server, client, port
        self.admin = server.users.of(ADMIN)
        self.links: list[Link] = []

    async def connect(self, **options: Any) -> Link:
        self.links.append(Link(*await asyncio.open_connection("127.0.0.1", self.port, **options)))
        return self.links[-1]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something is so that the weaver tells nobody."""
        for _ in range(1000):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it did not come to that")

    async def threadlet(self, replica: str = "train_0", **hello: Any) -> Link:
        link = await self.connect()
        link.send("hello", hello_of(KEYS.of(ADMIN), replica, f"instance of {replica}", **hello))
        await link.receive("welcome")
        return link


@contextlib.asynccontextmanager
async def running(port: int = 0, over_tcp: bool = False, **options: Any) -> AsyncIterator[Running]:
    """A server on a port, any by default; with ``over_tcp``, without a unix socket."""
    users = Users(lambda user: Store(":memory:"), [ADMIN], KEYS, monotonic_clock(), "tcp://h:1")
    server = Server(users, **options)
    with tempfile.TemporaryDirectory(prefix="loom-test-") as folder:
        tcp, unix = socket.create_server(("127.0.0.1", port)), None
        place = f"127.0.0.1:{tcp.getsockname()[1]}"
        if not over_tcp:
            unix, place = socket.socket(socket.AF_UNIX), str(Path(folder) / "sock")
            unix.bind(place)
            unix.listen()
        await server.start(tcp, unix)
        client = AdminClient(place, KEYS.gateway, 1.0)
        client.came()
        weaver = Running(server, client, tcp.getsockname()[1])
        try:
            yield weaver
        finally:
            for link in weaver.links:
                link.close()
            client.close()
            await server.stop()
