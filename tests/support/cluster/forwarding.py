"""Where ``kubectl port-forward`` leads: one WebSocket, in it SPDY, in it two streams for each connection to a pod.

This is what the kubelet and the API server do. The stand-in for kubectl asks for no such protocol, and has one
connection in a WebSocket of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import parse_qs, urlsplit

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from tests.support.cluster.network import NODE
from tests.support.cluster.spdy import Data, Decoder, Encoder, Opened, Ping, Reset
from tests.support.cluster.state import FRONT, INSTALLED, NotFound, State

__all__ = ["FORWARDING_PORT", "serve_forwards"]

FORWARDING_PORT = 8082
"""Where nginx reaches it."""

PROTOCOL = "SPDY/3.1+portforward.k8s.io"

_PATH = re.compile(r"/api/v1/namespaces/([^/]+)/pods/([^/]+)/portforward")


@dataclass(frozen=True)
class Target:
    """A pod, as far as ports are forwarded to it."""

    name: str
    address: str
    lost: asyncio.Event

    async def connect(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to a port, from the node: policies let that through."""
        here = None if self.name == FRONT else (NODE, 0)
        return await asyncio.open_connection(self.address, port, local_addr=here)


async def serve_forwards(state: State, host: str) -> Server:
    """Listen, until the server is closed."""
    speaking_spdy: set[ServerConnection] = set()

    def offered(socket: ServerConnection, request: Request) -> Response | None:
        try:
            _target(state, request.path)
        except NotFound as error:
            return socket.respond(HTTPStatus.NOT_FOUND, str(error))
        if request.headers.get("Sec-WebSocket-Protocol") == PROTOCOL:
            # Its slash makes it a name that the standard does not allow, and websockets would refuse.
            del request.headers["Sec-WebSocket-Protocol"]
            speaking_spdy.add(socket)
        return None

    def accepted(socket: ServerConnection, request: Request, response: Response) -> None:
        if socket in speaking_spdy:
            response.headers["Sec-WebSocket-Protocol"] = PROTOCOL

    async def forward(socket: ServerConnection) -> None:
        assert socket.request is not None
        pod, port = _target(state, socket.request.path)
        if socket in speaking_spdy:
            speaking_spdy.discard(socket)
            how = _Streams(socket, pod).run
        else:
            how = _Whole(socket, pod, port).run
        tasks = [asyncio.create_task(how()), asyncio.create_task(pod.lost.wait())]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for task in done:
            with contextlib.suppress(ConnectionClosed, OSError):
                task.result()

    return await serve(
        forward,
        host,
        FORWARDING_PORT,
        process_request=offered,
        process_response=accepted,
        compression=None,
        max_size=None,
        close_timeout=1.0,
    )


def _target(state: State, path: str) -> tuple[Target, int]:
    url = urlsplit(path)
    match = _PATH.fullmatch(url.path)
    if match is None:
        raise NotFound(f"nothing is served at {url.path}")
    port = int(parse_qs(url.query).get("port", ["0"])[0])
    if match[1] == INSTALLED and match[2] == FRONT:
        return Target(FRONT, "127.0.0.1", asyncio.Event()), port
    pod = state.pod(match[1], match[2])
    return Target(pod.name, pod.address, pod.lost), port


class _Whole:
    """One connection, whole in binary messages."""

    def __init__(self, socket: ServerConnection, pod: Target, port: int) -> None:
        self._socket, self._pod, self._port = socket, pod, port

    async def run(self) -> None:
        try:
            reader, writer = await self._pod.connect(self._port)
        except OSError as error:
            await self._socket.close(1011, str(error)[:120])
            return

        async def out() -> None:
            while data := await reader.read(65536):
                await self._socket.send(data)
            await self._socket.close()

        sending = asyncio.create_task(out())
        try:
            async for message in self._socket:
                assert isinstance(message, bytes)
                writer.write(message)
                await writer.drain()
        finally:
            sending.cancel()
            writer.close()


class _Streams:
    """SPDY: of each connection a stream for its bytes, and one for what went wrong with it."""

    def __init__(self, socket: ServerConnection, pod: Target) -> None:
        self._socket, self._pod = socket, pod
        self._encoder = Encoder()
        self._errors: dict[str, int] = {}
        """The stream for errors of each request, by the number that kubectl has given it."""
        self._received: dict[int, asyncio.Queue[bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        decoder = Decoder()
        try:
            async for message in self._socket:
                assert isinstance(message, bytes)
                for event in decoder.feed(message):
                    await self._handle(event)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _handle(self, event: Opened | Data | Reset | Ping) -> None:
        if isinstance(event, Ping):
            await self._socket.send(self._encoder.pong(event.number))
        elif isinstance(event, Opened):
            await self._open(event)
        elif event.stream in self._received:
            if isinstance(event, Data) and event.body:
                self._received[event.stream].put_nowait(event.body)
            if isinstance(event, Reset) or event.last:
                self._received.pop(event.stream).put_nowait(b"")

    async def _open(self, opened: Opened) -> None:
        await self._socket.send(self._encoder.accept(opened.stream))
        request = opened.headers["requestid"]
        if opened.headers["streamtype"] == "error":
            self._errors[request] = opened.stream
            return
        received: asyncio.Queue[bytes] = asyncio.Queue()
        self._received[opened.stream] = received
        port, errors = int(opened.headers["port"]), self._errors.pop(request)
        task = asyncio.create_task(self._connection(opened.stream, errors, port, received))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connection(self, stream: int, errors: int, port: int, received: asyncio.Queue[bytes]) -> None:
        said = b""
        try:
            reader, writer = await self._pod.connect(port)
        except OSError as error:
            said = f"error forwarding port {port} to pod {self._pod.name}: {error}".encode()
        else:
            await self._copy(stream, reader, writer, received)
        self._received.pop(stream, None)
        await self._socket.send(self._encoder.data(errors, said, last=True))
        await self._socket.send(self._encoder.data(stream, b"", last=True))

    async def _copy(
        self,
        stream: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        received: asyncio.Queue[bytes],
    ) -> None:
        async def inwards() -> None:
            while body := await received.get():
                writer.write(body)
                await writer.drain()
            writer.write_eof()

        writing = asyncio.create_task(inwards())
        try:
            with contextlib.suppress(ConnectionError):
                while body := await reader.read(65536):
                    await self._socket.send(self._encoder.data(stream, body))
        finally:
            writing.cancel()
            writer.close()
