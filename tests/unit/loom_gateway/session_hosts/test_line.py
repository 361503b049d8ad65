"""The line between a gateway and a session host: who knows the key comes in, and nobody stands between."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from loom.errors import (
    ConnectionLost,
    Denied,
    LoomError,
    ProtocolMismatch,
    SessionLost,
    TokenFileError,
    UnknownSession,
)
from loom.wire.handshake import refusal
from loom.wire.length_prefix import LENGTH, behind_length
from loom.wire.stream import unnumbered_frame
from loom_gateway.session_hosts import line as module
from loom_gateway.session_hosts.line import Line, LineServer, Request, open_line, read_key

KEY = "k" * 32

BOUND = 20.0

Served = Callable[[Line, Request], Awaitable[None]]


async def echo(line: Line, request: Request) -> None:
    """Send back what the line is for, and each frame."""
    line.send([request.line, request.about])
    with contextlib.suppress(ConnectionLost):
        while True:
            line.send(await line.take())


@contextlib.asynccontextmanager
async def served(serve: Served = echo, key: str = KEY) -> AsyncIterator[str]:
    """The address of a session host that knows a key."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = LineServer(key, serve)
    await server.start(listener)
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.close()


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


@pytest.mark.guarantees("strangers", "A gateway and a session host let each other in only if both know the key")
async def test_what_knows_the_key_is_served() -> None:
    async with served() as address:
        line = await open_line(address, KEY, Request("control", {"a": 1}))
        large = b"x" * (3 << 20)
        line.send(large)

        assert await line.take(BOUND) == ["control", {"a": 1}]
        assert await line.take(BOUND) == large
        line.close()


@pytest.mark.guarantees("strangers", "A gateway and a session host let each other in only if both know the key")
async def test_what_knows_another_key_is_not() -> None:
    asked: list[Request] = []

    async def note(line: Line, request: Request) -> None:
        asked.append(request)

    async with served(note) as address:
        with pytest.raises(Denied, match="has another --host-key"):
            await open_line(address, "another" * 6, Request("control", {}))

    assert asked == []


@pytest.mark.guarantees("strangers", "Nobody can stand between a gateway and its session host")
async def test_who_stands_between_is_noticed_by_both() -> None:
    between, _ = module._new_certificate()
    asked: list[Request] = []

    async def note(line: Line, request: Request) -> None:
        asked.append(request)

    async with served(note) as address:

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there = await asyncio.open_connection("127.0.0.1", port_of(address), ssl=module._context())

            async def copy(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
                with contextlib.suppress(OSError, ssl.SSLError):
                    while data := await source.read(4096):
                        to.write(data)
                to.close()

            await asyncio.gather(copy(reader, there[1]), copy(there[0], writer))

        middle = await asyncio.start_server(pass_on, "127.0.0.1", 0, ssl=between)
        with pytest.raises((Denied, ConnectionLost)):
            await open_line(f"tcp://127.0.0.1:{middle.sockets[0].getsockname()[1]}", KEY, Request("attach", {}))
        middle.close()

    assert asked == []


@pytest.mark.guarantees("strangers", "A gateway and a session host let each other in only if both know the key")
async def test_who_listens_in_the_place_of_a_host_gets_no_session() -> None:
    context, _ = module._new_certificate()

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line: Any = module.msgpack.packb({"nonce": module.new_nonce()})
        writer.write(LENGTH.pack(len(line)) + line)
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        await reader.readexactly(length)
        proof: Any = module.msgpack.packb({"proof": "0" * 64})
        writer.write(LENGTH.pack(len(proof)) + proof)

    server = await asyncio.start_server(pretend, "127.0.0.1", 0, ssl=context)
    with pytest.raises(Denied, match="does not prove"):
        await open_line(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", KEY, Request("attach", {}))
    server.close()


async def test_nothing_is_believed_of_who_has_not_proven_itself() -> None:
    context, _ = module._new_certificate()

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(behind_length(unnumbered_frame(refusal(SessionLost("its driver has died")))))
        await reader.read()

    server = await asyncio.start_server(pretend, "127.0.0.1", 0, ssl=context)
    with pytest.raises(ConnectionLost, match="no session host of this key answers"):
        await open_line(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", KEY, Request("attach", {}))
    server.close()


async def test_a_refusal_is_raised_at_the_gateway_as_it_was() -> None:
    async def refuse(line: Line, request: Request) -> None:
        raise UnknownSession("there is none")

    async with served(refuse) as address:
        line = await open_line(address, KEY, Request("attach", {}))
        with pytest.raises(UnknownSession, match="there is none"):
            await line.take(BOUND)


async def test_another_version_is_refused_in_words() -> None:
    async with served() as address:
        with pytest.raises(ProtocolMismatch, match=r"the gateway speaks version 99\.0"):
            await open_line(address, KEY, Request("control", {}, (99, 0)))


async def test_nobody_there_is_a_lost_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    with pytest.raises(ConnectionLost, match="does not answer"):
        await open_line(f"tcp://127.0.0.1:{port}", KEY, Request("control", {}))


@pytest.mark.guarantees("strangers", "Garbage on a session host's port is dropped, and others are served meanwhile")
@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", bytes(4096), LENGTH.pack(2**32 - 1)])
@pytest.mark.parametrize("encrypted", [False, True])
async def test_garbage_is_dropped(garbage: bytes, encrypted: bool) -> None:
    async with served() as address:
        context = module._context() if encrypted else None
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(address), ssl=context)
        writer.write(garbage)
        with contextlib.suppress(OSError):
            await asyncio.wait_for(reader.read(-1), BOUND)  # until the host closes
        writer.close()

        line = await open_line(address, KEY, Request("control", {}))
        assert await line.take(BOUND) == ["control", {}]
        line.close()


async def test_what_shows_no_key_sends_little() -> None:
    async with served() as address:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(address), ssl=module._context())
        writer.write(LENGTH.pack(module.MAX_STRANGE + 1))
        with contextlib.suppress(OSError):
            await asyncio.wait_for(reader.read(-1), BOUND)  # until the host closes, which waits for nothing
        writer.close()


async def test_who_shows_no_key_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECT_TIMEOUT", 0.2)
    async with served() as address:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(address), ssl=module._context())
        assert await asyncio.wait_for(reader.read(-1), BOUND)  # the challenge, the refusal, and the end
        writer.close()


@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [
        ("short", 0o600, "32 characters at least"),
        ("k" * 40, 0o622, "others may write"),
        (f"{KEY} {KEY}", 0o600, "one line"),
        (None, 0o600, "cannot read"),
    ],
)
def test_a_key_that_protects_nothing_is_refused(tmp_path: Path, content: str | None, mode: int, why: str) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)

    with pytest.raises(TokenFileError, match=why):
        read_key(path)


def test_a_key_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n")
    path.chmod(0o400)

    assert read_key(path) == KEY


def test_what_no_line_sends_is_no_value() -> None:
    for frame in (b"", b"\xc1", bytes(8), b"\x00\x00\x00\x02\x93\x00"):
        with pytest.raises(LoomError):
            module.read_frame(frame)
