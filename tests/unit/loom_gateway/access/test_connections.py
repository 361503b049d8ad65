"""The connections to a gateway's port: real sockets on loopback, and an application in place of the gateway's."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState

from loom.process.listen import listen
from loom_gateway.access import connections as module
from loom_gateway.access.connections import Acceptor, Connections, HttpProtocol, PortConnection, admit

BOUND = 30.0

HERE = "127.0.7.1"
"""Where the port is: a client of another test that looks for one on 127.0.0.1 would be a newcomer."""

GOOD = b"GET /good HTTP/1.1\r\nHost: gateway\r\n\r\n"
OPEN = b"GET /healthz HTTP/1.1\r\nHost: gateway\r\n\r\n"


class Client(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, request: bytes) -> bytes:
        """The body of the answer."""
        self.writer.write(request)
        await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), BOUND)
        return await asyncio.wait_for(self.reader.readexactly(2), BOUND)

    async def is_cut(self) -> None:
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(self.reader.read(), BOUND) == b""


class Listening(NamedTuple):
    connections: Connections
    port: int
    clients: list[Client]

    async def come(self, address: str = "127.0.0.1") -> Client:
        """A client that the gateway has accepted."""
        client = Client(*await asyncio.open_connection(HERE, self.port, local_addr=(address, 0)))
        self.clients.append(client)
        assert await client.ask(OPEN) == b"ok"
        return client


async def until(condition: Any) -> None:
    """Wait for something of which nothing tells."""
    deadline = asyncio.get_running_loop().time() + BOUND
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it never was so"
        await asyncio.sleep(0.001)


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Admits requests of one path, and holds back the answer of another until its client leaves."""
    if scope["path"] in ("/good", "/held"):
        await admit(scope, str(scope["client"]))  # each client is a user
    if scope["path"] == "/held":
        while (await receive())["type"] != "http.disconnect":
            pass
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.asynccontextmanager
async def listening(most: int = 0, of_address: int = 0, proxies: tuple[str, ...] = ()) -> AsyncIterator[Listening]:
    config = uvicorn.Config(app, timeout_keep_alive=3600)
    config.load()
    state = ServerState()
    connections = Connections(most, of_address, proxies)

    def protocol(connection: PortConnection) -> HttpProtocol:
        return HttpProtocol(connection, lambda headers: False, config=config, server_state=state, app_state={})

    clients: list[Client] = []
    listener = listen(HERE, 0)
    acceptor = Acceptor(listener, connections, protocol)
    try:
        yield Listening(connections, listener.getsockname()[1], clients)
    finally:
        acceptor.close()
        for client in clients:
            client.writer.close()
            with contextlib.suppress(OSError):
                await client.writer.wait_closed()
        await until(lambda: not len(connections))
        assert connections.waiting == 0


def run(work: Any) -> None:
    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(work)
    finally:
        loop.close()


@pytest.mark.guarantees(
    "strangers", "A connection on which no request comes, or a slow one, also after others, is closed"
)
@pytest.mark.parametrize("first", [OPEN, GOOD], ids=["after /healthz", "after a good one"])
def test_a_connection_on_which_a_request_comes_byte_by_byte_is_closed(
    monkeypatch: pytest.MonkeyPatch, first: bytes
) -> None:
    async def trickle() -> None:
        async with listening() as gateway:
            client = await gateway.come()
            assert await client.ask(first) == b"ok"

            async def send_slowly() -> None:
                for byte in b"GET / HTTP/1.1\r\nHost: " + b"x" * 10_000:
                    client.writer.write(bytes([byte]))
                    await asyncio.sleep(0.01)

            sending = asyncio.ensure_future(send_slowly())
            await client.is_cut()
            sending.cancel()

    monkeypatch.setattr(module, "REQUEST_TIMEOUT", 0.3)
    run(trickle())


def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait() -> None:
        async with listening() as gateway:
            silent = Client(*await asyncio.open_connection(HERE, gateway.port))
            gateway.clients.append(silent)
            await silent.is_cut()

    monkeypatch.setattr(module, "REQUEST_TIMEOUT", 0.1)
    run(wait())


def test_a_request_with_a_good_token_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def take_long() -> None:
        async with listening() as gateway:
            held, silent = await gateway.come(), await gateway.come()
            held.writer.write(b"GET /held HTTP/1.1\r\nHost: gateway\r\n\r\n")
            await silent.is_cut()
            await until(lambda: gateway.connections.waiting == 0)
            assert len(gateway.connections) == 1

    monkeypatch.setattr(module, "REQUEST_TIMEOUT", 0.3)
    run(take_long())


def test_the_oldest_waiting_connection_of_an_address_goes_for_a_newcomer() -> None:
    async def come() -> None:
        async with listening(of_address=3) as gateway:
            first, second, third = [await gateway.come() for _ in range(3)]
            other = await gateway.come("127.0.0.2")
            assert await first.ask(GOOD) == b"ok"  # it is the newest now

            newcomer = await gateway.come()

            await second.is_cut()
            for client in (newcomer, first, third, other):
                assert await client.ask(OPEN) == b"ok"

    run(come())


@pytest.mark.guarantees(
    "strangers", "Connections are bounded in all, and a connection in use is never closed for a newcomer"
)
def test_a_connection_whose_request_is_under_way_never_goes_for_a_newcomer() -> None:
    async def come() -> None:
        async with listening(most=3) as gateway:
            held = [await gateway.come() for _ in range(2)]
            for client in held:
                client.writer.write(b"GET /held HTTP/1.1\r\nHost: gateway\r\n\r\n")
            await until(lambda: gateway.connections.waiting == 0)

            for _ in range(20):  # each is closed for the next
                last = await gateway.come()
            assert await last.ask(OPEN) == b"ok"

            last.writer.write(b"GET /held HTTP/1.1\r\nHost: gateway\r\n\r\n")
            await until(lambda: gateway.connections.waiting == 0)
            refused = Client(*await asyncio.open_connection(HERE, gateway.port))
            gateway.clients.append(refused)
            await refused.is_cut()  # there is no room, and nobody goes
            assert len(gateway.connections) == 3

    run(come())


def test_a_trusted_proxy_has_the_connections_of_all_its_clients() -> None:
    async def come() -> None:
        async with listening(of_address=2, proxies=("127.0.0.0/30",)) as gateway:
            through = [await gateway.come("127.0.0.2") for _ in range(5)]
            for client in through:
                assert await client.ask(OPEN) == b"ok"

    run(come())


@pytest.mark.guarantees("strangers", "Silent connections are bounded by address, and keep no newcomer out")
def test_2000_silent_connections_keep_nobody_out() -> None:
    async def come() -> None:
        async with listening(of_address=100) as gateway:
            silent = []
            for _ in range(2000):
                sock = socket.socket()
                sock.setblocking(False)
                await asyncio.get_running_loop().sock_connect(sock, (HERE, gateway.port))
                silent.append(sock)
            newcomer = await gateway.come()
            assert await newcomer.ask(GOOD) == b"ok"
            assert len(gateway.connections) <= 101
            for sock in silent:
                sock.close()

    run(come())


def test_connections_that_are_closed_without_a_good_token_are_counted_by_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def come() -> None:
        async with listening(most=3, of_address=2) as gateway:
            refusals = gateway.connections.refusals
            malformed = await gateway.come()
            malformed.writer.write(b"\x16\x03\x01 no HTTP\r\n\r\n")
            await until(lambda: refusals == {"no_http": 1})
            await malformed.reader.read()
            await until(lambda: not len(gateway.connections))
            for address in ("127.0.0.1",) * 3 + ("127.0.0.2", "127.0.0.3"):
                await gateway.come(address)
            await until(lambda: refusals == {"no_http": 1, "too_many_of_address": 1, "too_many_connections": 1})

    run(come())


def test_a_good_client_that_has_been_idle_is_closed_and_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def come() -> None:
        async with listening() as gateway:
            good = await gateway.come()
            assert await good.ask(GOOD) == b"ok"
            silent = await gateway.come()
            await good.is_cut()
            await silent.is_cut()
            assert gateway.connections.refusals == {"no_token_in_time": 1}

    monkeypatch.setattr(module, "REQUEST_TIMEOUT", 0.2)
    run(come())
