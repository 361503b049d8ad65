"""A pod that passes on connections to the gateway's port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from loom_gateway.pod.forwarding import Forwarder

HERE, THERE = "127.0.0.1", "127.0.0.2"


@pytest.fixture
async def echo() -> AsyncIterator[int]:
    """A server at another address, which answers when it has been told all; its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read())[::-1])
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, THERE, 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


class Local(Forwarder):
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
