"""A pod that passes on connections to the gateway's port."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from loom_gateway.pod import forwarding
from loom_gateway.pod.forwarding import PortForwarder

HERE, THERE = "127.0.0.1", "127.0.0.2"


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def served(serve: Serve) -> tuple[asyncio.Server, int]:
    """A server at the other address, and its port, which is free at this one."""
    while True:
        server = await asyncio.start_server(serve, THERE, 0)
        port = int(server.sockets[0].getsockname()[1])
        with socket.socket() as here:
            here.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):  # another program has the port
                here.bind((HERE, port))
                return server, port
        server.close()


@pytest.fixture
async def echo() -> AsyncIterator[int]:
    """A server at another address, which answers when it has been told all; its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read())[::-1])
        await writer.drain()
        writer.close()

    server, port = await served(answer)
    async with server:
        yield port


class Local(PortForwarder):
    """One that leaves the other address of this machine to the server."""

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, HERE, self._port)


async def asked(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(HERE, port)
    writer.write(data)
    writer.write_eof()
    try:
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionResetError:  # it was closed before what was sent was read
        return b""
    finally:
        writer.close()


async def test_what_comes_is_passed_on_and_so_is_the_answer(echo: int) -> None:
    forwarder = Local(echo)
    forwarder.target = THERE
    await forwarder.listen()

    answers = await asyncio.gather(asked(echo, b"loom"), asked(echo, bytes(range(256)) * 40_000))
    await forwarder.close()

    assert answers == [b"mool", (bytes(range(256)) * 40_000)[::-1]]


async def test_without_a_target_a_connection_is_closed(echo: int) -> None:
    forwarder = Local(echo)
    await forwarder.listen()

    answer = await asked(echo, b"loom")
    await forwarder.close()

    assert answer == b""


async def test_a_target_that_does_not_accept_closes_the_connection(echo: int) -> None:
    forwarder = Local(echo)
    forwarder.target = "127.0.0.3"
    await forwarder.listen()

    answer = await asked(echo, b"loom")
    await forwarder.close()

    assert answer == b""
    with pytest.raises(ConnectionRefusedError):
        await asked(echo, b"loom")


async def test_a_connection_that_comes_just_before_the_end_is_closed(echo: int, come: Come) -> None:
    forwarder = Local(echo)
    forwarder.target = THERE
    await forwarder.listen()
    client = await come(forwarder)
    await forwarder.close()

    await is_closed(client)


class Gateway:
    """In the gateway's place: it answers the first byte, and holds connections until it is told to close them."""

    def __init__(self) -> None:
        self.held: list[asyncio.StreamWriter] = []

    async def start(self) -> int:
        self._server, port = await served(self._serve)
        return port

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.held.append(writer)
        with contextlib.suppress(OSError):
            while said := await reader.read(1):
                writer.write(b"HTTP/1.1 101 x" if said == b"g" else b"HTTP/1.1 401 x")
        writer.close()

    async def close(self) -> None:
        self._server.close()
        for writer in self.held:
            writer.transport.abort()
        await asyncio.sleep(0)  # a transport is closed one round of the loop later


@pytest.fixture
async def forwarded() -> AsyncIterator[tuple[Gateway, Local]]:
    gateway = Gateway()
    forwarder = Local(await gateway.start())
    forwarder.target = THERE
    await forwarder.listen()
    yield gateway, forwarder
    await forwarder.close()
    await gateway.close()


Come = Callable[..., Awaitable[asyncio.StreamReader]]


@pytest.fixture
async def writers() -> AsyncIterator[list[asyncio.StreamWriter]]:
    """Those of the test's clients."""
    opened: list[asyncio.StreamWriter] = []
    yield opened
    for writer in opened:
        writer.transport.abort()
    await asyncio.sleep(0)  # a transport is closed one round of the loop later


@pytest.fixture
def come(writers: list[asyncio.StreamWriter]) -> Come:
    """Makes a client's connection; with something said, after the answer."""

    async def make(forwarder: Local, said: bytes = b"", host: str = HERE) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection(HERE, forwarder._port, local_addr=(host, 0))
        writers.append(writer)
        if said:
            writer.write(said)
            assert (await asyncio.wait_for(reader.readexactly(14), 10)).startswith(b"HTTP/1.1")
        return reader

    return make


async def is_closed(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), 10) == b""


async def until_none_is_left(forwarder: Local) -> None:
    while forwarder._tasks:
        await asyncio.wait(set(forwarder._tasks), timeout=10)
    assert len(forwarder._connections) == 0


@pytest.mark.guarantees(
    "ports",
    "A pod that passes clients on holds so many connections and no more, and none that the gateway has closed",
)
async def test_connections_without_a_good_answer_are_bounded_for_each_address(
    come: Come, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "MOST_OF_ADDRESS", 5)
    gateway = Gateway()
    forwarder = Local(await gateway.start())
    forwarder.target = THERE
    await forwarder.listen()
    sessions = [await come(forwarder, b"g") for _ in range(8)]
    crowd = [await come(forwarder, b"b") for _ in range(40)]

    for one in crowd[:35]:
        await is_closed(one)
    assert len(forwarder._connections) == 8 + 5
    other, newcomer = await come(forwarder, b"g", host="127.0.0.9"), await come(forwarder, b"g")
    await is_closed(crowd[35])  # for the newcomer
    for one in (*sessions, *crowd[36:], other, newcomer):
        assert not one.at_eof()
    await forwarder.close()
    await gateway.close()


async def test_a_connection_to_which_nothing_good_is_answered_is_closed(
    come: Come, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "UNANSWERED", 0.2)
    gateway = Gateway()
    forwarder = Local(await gateway.start())
    forwarder.target = THERE
    await forwarder.listen()
    session = await come(forwarder, b"g")

    for said in (b"", b"b"):
        await is_closed(await come(forwarder, said))
    assert len(forwarder._connections) == 1
    assert not session.at_eof()
    await forwarder.close()
    await gateway.close()


@pytest.mark.guarantees(
    "ports",
    "A pod that passes clients on holds so many connections and no more, and none that the gateway has closed",
)
async def test_what_the_gateway_has_closed_is_closed(come: Come, forwarded: tuple[Gateway, Local]) -> None:
    """Also if the client goes on sending."""
    gateway, forwarder = forwarded
    clients = [await come(forwarder, b"g") for _ in range(3)]
    for writer in gateway.held:
        writer.close()

    for client in clients:
        await is_closed(client)
    await until_none_is_left(forwarder)


async def test_a_client_that_closed_its_side_and_is_not_answered_is_closed(
    come: Come,
    writers: list[asyncio.StreamWriter],
    forwarded: tuple[Gateway, Local],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forwarding, "CLOSING", 0.1)
    _, forwarder = forwarded
    monkeypatch.setattr(Gateway, "_serve", _say_nothing)
    client = await come(forwarder)
    writers[0].write_eof()

    await is_closed(client)
    await until_none_is_left(forwarder)


async def _say_nothing(self: Gateway, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    self.held.append(writer)


async def test_a_client_that_does_not_read_is_closed(
    writers: list[asyncio.StreamWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "UNANSWERED", 0.2)
    monkeypatch.setattr(forwarding, "CLOSING", 0.1)

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(b"HTTP/1.1 200 x")
            while True:
                writer.write(bytes(1 << 20))
                await writer.drain()

    server = await asyncio.start_server(flood, THERE, 0)
    forwarder = Local(server.sockets[0].getsockname()[1])
    forwarder.target = THERE
    await forwarder.listen()
    reader, writer = await asyncio.open_connection(HERE, forwarder._port, limit=1)
    writers.append(writer)
    await asyncio.wait_for(reader.readexactly(1), 10)
    await until_none_is_left(forwarder)
    await forwarder.close()
    server.close()
