"""What nobody takes is not read, and a length is not believed: both ends of the relay, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import h11
import pytest
import uvicorn
import uvloop
from starlette.requests import Request
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import Frame, Opcode

from loom.process.listen import listen
from loom.wire.length_prefix import LENGTH, MAX_FRAME
from loom.wire.messages import Buffer
from loom_gateway.access.connections import Acceptor, Connections, HttpProtocol, PortConnection
from loom_gateway.relay.endpoint import MAX_HELLO
from loom_gateway.relay.links import MAX_DRIVER_FRAME, DriverLink
from loom_gateway.relay.websocket import RelaySocket
from loom_gateway.sessions.session import Traffic
from tests.support.garbage import pieces

BOUND = 20.0
UNREAD = 2 << 20
"""Bytes that the kernel and one read may hold, far under what is sent."""


def run(work: Coroutine[Any, Any, None]) -> None:
    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(asyncio.wait_for(work, BOUND))
    finally:
        loop.close()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something of which nothing tells."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def linked(path: Path) -> AsyncIterator[tuple[DriverLink, socket.socket, Traffic]]:
    """The gateway's link to a driver, and the driver's end, which does not block."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path / "driver"))
    listener.listen()
    traffic = Traffic()
    loop = asyncio.get_running_loop()
    _, link = await loop.create_unix_connection(lambda: DriverLink(traffic), str(path / "driver"))
    driver, _ = listener.accept()
    driver.setblocking(False)
    try:
        yield link, driver, traffic
    finally:
        link.close()
        driver.close()
        listener.close()


class Client:
    """A client's connection that remembers what it was sent."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send_frame(self, *parts: Buffer) -> None:
        self.frames.append(b"".join(parts))

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


async def send_all(driver: socket.socket, data: bytes) -> int:
    """Send what is taken until nothing is for a moment; return how much was."""
    sent = still = 0
    while sent < len(data) and still < 20:
        try:
            sent += driver.send(data[sent : sent + (1 << 18)])
            still = 0
        except BlockingIOError:
            still += 1
            await asyncio.sleep(0.005)
    return sent


def frames(seed: int) -> list[bytes]:
    chance = random.Random(seed)
    return [chance.randbytes(chance.choice((0, 1, 3, 300, 70_000, 1 << 20))) for _ in range(60)]


@pytest.mark.parametrize("length", [MAX_DRIVER_FRAME + 1, 1 << 30, (1 << 32) - 1])
@pytest.mark.parametrize("before", [b"", LENGTH.pack(3) + b"abc", LENGTH.pack(0)])
def test_a_driver_that_announces_too_much_is_cut_off_before_it_has_come(
    tmp_path: Path, length: int, before: bytes
) -> None:
    async def announce() -> None:
        async with linked(tmp_path) as (link, driver, _):
            link.relay_to(Client())  # type: ignore[arg-type]
            driver.send(before + LENGTH.pack(length) + b"x" * 1000)
            await link.closed

            assert f"a frame of {length} bytes, over the limit of {MAX_DRIVER_FRAME}" in str(link.error)
            assert link._pieces == []

    run(announce())


@pytest.mark.parametrize("seed", range(3))
def test_garbage_of_a_driver_is_relayed_or_cut_off_and_never_collected(tmp_path: Path, seed: int) -> None:
    async def babble() -> None:
        for number, piece in enumerate(pieces(seed)):
            (tmp_path / str(number)).mkdir()
            async with linked(tmp_path / str(number)) as (link, driver, _):
                link.relay_to(Client())  # type: ignore[arg-type]
                with contextlib.suppress(OSError):
                    await send_all(driver, piece)
                driver.close()
                await link.closed
                assert sum(map(len, link._pieces)) <= MAX_DRIVER_FRAME

    run(babble())


@pytest.mark.parametrize("seed", range(5))
def test_what_a_driver_sends_before_its_client_takes_it_waits_in_the_driver(tmp_path: Path, seed: int) -> None:
    async def flood() -> None:
        sent = frames(seed)
        data = b"".join(LENGTH.pack(len(frame)) + frame for frame in sent)
        async with linked(tmp_path) as (link, driver, traffic):
            begun = await send_all(driver, data)

            assert traffic.bytes_out < UNREAD < len(data)
            assert await link.next() == sent[0]
            assert await send_all(driver, data[begun:]) == 0

            client = Client()
            link.relay_to(client)  # type: ignore[arg-type]
            while begun < len(data):
                begun += await send_all(driver, data[begun:])
            await until(lambda: len(client.frames) == len(sent) - 1)
            assert client.frames == sent[1:]

    run(flood())


def test_a_client_that_takes_nothing_stops_its_driver_also_if_it_stopped_before(tmp_path: Path) -> None:
    async def stop() -> None:
        frame = LENGTH.pack(1 << 20) + bytes(1 << 20)
        async with linked(tmp_path) as (link, driver, traffic):
            link.pause_reading()
            link.relay_to(Client())  # type: ignore[arg-type]
            await send_all(driver, frame * 20)
            assert traffic.bytes_out == 0

            link.resume_reading()
            await send_all(driver, frame)
            assert traffic.bytes_out > 0

    run(stop())


# -- a client's WebSocket -----------------------------------------------------------------------------------


class Listening:
    """A gateway's port whose application takes a hello and relays to a link, as the gateway's does."""

    def __init__(self) -> None:
        self.sockets: list[RelaySocket] = []
        self.came: list[bytes] = []
        self.port = 0
        self._writers: list[asyncio.StreamWriter] = []

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "websocket":
            if scope["method"] == "POST":
                self.came.append(await Request(scope, receive).body())
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})
            return
        scope["loom.principal"] = type("One", (), {"user": scope["path"]})()
        await receive()
        await send({"type": "websocket.accept"})
        socket = scope["loom.socket"]
        self.sockets.append(socket)
        while (event := await receive())["type"] != "websocket.disconnect":
            if event.get("bytes") == b"relay":
                socket.relay_to(self)
                await send({"type": "websocket.send", "bytes": b"relayed"})

    # the parts of a link that a client's connection uses

    def write(self, *parts: Buffer) -> None:
        self.came.append(b"".join(parts))

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading

    async def connect(self, user: str, relays: bool = False) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers.append(writer)
        writer.write(
            f"GET /{user} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        await reader.readuntil(b"\r\n\r\n")
        if relays:
            writer.write(message(Opcode.BINARY, b"relay"))
            await reader.readexactly(2 + len(b"relayed"))
        return reader, writer

    def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[Listening]:
    opened = Listening()
    config = uvicorn.Config(
        opened.app, interface="asgi3", ws=RelaySocket, ws_max_size=MAX_HELLO, ws_per_message_deflate=False
    )
    config.load()
    state = ServerState()
    listener = listen("127.0.0.1", 0)
    opened.port = listener.getsockname()[1]

    def protocol(connection: PortConnection) -> HttpProtocol:
        return HttpProtocol(connection, lambda headers: False, config=config, server_state=state, app_state={})

    acceptor = Acceptor(listener, Connections(), protocol)
    try:
        yield opened
    finally:
        acceptor.close()
        opened.close()
        for one in opened.sockets:
            one.abort()
        await until(lambda: all(one.gone.done() for one in opened.sockets))


def message(opcode: Opcode, data: bytes) -> bytes:
    return Frame(opcode, data).serialize(mask=True)


async def flood(writer: asyncio.StreamWriter, data: bytes, seconds: float) -> None:
    """Send the same bytes for a while, and read nothing."""
    over = asyncio.get_running_loop().time() + seconds
    with contextlib.suppress(OSError, asyncio.TimeoutError):
        while (left := over - asyncio.get_running_loop().time()) > 0:
            writer.write(data)
            await asyncio.wait_for(writer.drain(), left)


@pytest.mark.parametrize("relays", [False, True])
def test_pongs_that_are_not_read_do_not_pile_up_and_the_last_one_comes(relays: bool) -> None:
    async def ping() -> None:
        async with listening() as opened:
            reader, writer = await opened.connect("a", relays)
            reader._limit = 1 << 10  # type: ignore[attr-defined]  # so that it stops to read
            await flood(writer, message(Opcode.PING, bytes(125)) * 1000, 1.0)
            (socket,) = opened.sockets
            assert socket.transport.get_write_buffer_size() + len(socket._pong) < UNREAD

            writer.write(message(Opcode.PING, b"the last one"))
            with contextlib.suppress(asyncio.TimeoutError):
                while b"the last one" not in await asyncio.wait_for(reader.read(1 << 20), BOUND):
                    pass

    run(ping())


@pytest.mark.parametrize("relays", [False, True])
@pytest.mark.parametrize("tiny", [b"", b"x"])
def test_a_message_in_tiny_pieces_takes_no_more_than_its_bytes(tiny: bytes, relays: bool) -> None:
    async def send_pieces() -> None:
        async with listening() as opened:
            _, writer = await opened.connect("a", relays)
            piece = Frame(Opcode.CONT, tiny, fin=False).serialize(mask=True)
            writer.write(Frame(Opcode.BINARY, b"first", fin=False).serialize(mask=True) + piece * 20_000)
            writer.write(message(Opcode.PING, b""))
            (socket,) = opened.sockets
            if tiny:
                await until(lambda: sum(map(len, socket.frames)) == 5 + 20_000)
            assert len(socket.frames) <= 1

            writer.write(message(Opcode.CONT, b"last"))
            if relays:
                await until(lambda: bool(opened.came))
                assert opened.came == [b"first" + tiny * 20_000 + b"last"]

    run(send_pieces())


TINY = {
    "pings": message(Opcode.PING, b"") * 40_000,
    "pongs": message(Opcode.PONG, b"") * 40_000,
    "messages": message(Opcode.BINARY, b"x") * 40_000,
    "pieces": Frame(Opcode.BINARY, b"x", fin=False).serialize(mask=True)
    + Frame(Opcode.CONT, b"", fin=False).serialize(mask=True) * 40_000,
}


@pytest.mark.parametrize("relays", [False, True])
@pytest.mark.parametrize("kind", TINY)
def test_what_one_user_sends_fast_does_not_take_the_loop_from_others(
    kind: str, relays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled = 0
    parse = WebSocketsSansIOProtocol.data_received

    def count(self: WebSocketsSansIOProtocol, data: bytes) -> None:
        nonlocal handled
        handled += 1 + len(data) // 6
        parse(self, data)

    monkeypatch.setattr(WebSocketsSansIOProtocol, "data_received", count)

    async def share() -> None:
        nonlocal handled
        async with listening() as opened:
            for _ in range(5):
                _, writer = await opened.connect("greedy", relays)
                writer.write(TINY[kind])
            handled, most, rounds = 0, 0, 0
            while rounds < 500:  # of the event loop
                before = handled + len(opened.came)
                await asyncio.sleep(0)
                most = max(most, handled + len(opened.came) - before)
                rounds += 1
            assert handled + len(opened.came) > 2000
            assert most < 2000

    run(share())


def test_the_chunks_of_a_body_do_not_take_the_loop_and_come_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    handled = 0
    parse = h11.Connection.next_event

    def count(self: h11.Connection) -> Any:
        nonlocal handled
        handled += 1
        return parse(self)

    monkeypatch.setattr(h11.Connection, "next_event", count)

    async def send() -> None:
        nonlocal handled
        async with listening() as opened:
            reader, writer = await asyncio.open_connection("127.0.0.1", opened.port)
            writer.write(b"POST /body HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            writer.write(b"1\r\nx\r\n" * 40_000 + b"0\r\n\r\n")
            answered = asyncio.ensure_future(reader.readuntil(b"ok"))
            most = 0
            while not answered.done():
                before = handled
                await asyncio.sleep(0)
                most = max(most, handled - before)
            assert opened.came == [b"x" * 40_000]
            assert most < 1000
            writer.close()

    run(send())


@pytest.mark.parametrize("seed", range(5))
def test_messages_keep_their_order_however_they_come(seed: int) -> None:
    async def send() -> None:
        chance = random.Random(seed)
        sent = [chance.randbytes(chance.choice((1, 2, 20, 3000, 100_000))) for _ in range(500)]
        data = b"".join(message(Opcode.BINARY, one) for one in sent)
        async with listening() as opened:
            _, writer = await opened.connect("a", relays=True)
            while data:
                size = chance.choice((1, 100, 10_000, 1 << 20))
                writer.write(data[:size])
                data = data[size:]
                await writer.drain()
            await until(lambda: len(opened.came) == len(sent))
            assert opened.came == sent

    run(send())


def test_a_message_over_the_limit_of_a_hello_is_refused_before_it_is_read() -> None:
    async def send() -> None:
        async with listening() as opened:
            reader, writer = await opened.connect("a")
            writer.write(message(Opcode.BINARY, os.urandom(MAX_HELLO + 1))[:100])
            assert (await reader.read(100))[2:4] == (1009).to_bytes(2, "big")

            reader, writer = await opened.connect("a", relays=True)
            writer.write(message(Opcode.BINARY, os.urandom(MAX_FRAME)))
            await until(lambda: [len(one) for one in opened.came] == [MAX_FRAME])

    run(send())
