"""Requests over TCP: of gateways and drivers elsewhere, to a weaver whose address stays and whose host may not."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

import loom
from loom.control.frame import pack
from loom.token_file import ADMIN
from loom.weaver.client import WeaverClient
from loom.weaver.keys import Keys
from tests.unit.loom.weaver.raw_threadlet import BOUND
from tests.unit.loom.weaver.running import KEYS, running


async def test_threadlets_the_gateway_and_sessions_connect_to_one_port() -> None:
    async with running(over_tcp=True) as weaver:
        await weaver.threadlet("train_0")
        session = WeaverClient(weaver.client.place, lambda: KEYS.of(ADMIN, "s"))
        session.came()

        assert [one["id"] for one in await weaver.client.ask("replicas")] == ["train_0"]
        assert [one["id"] for one in await session.ask("replicas")] == ["train_0"]
        async with weaver.client.watch(ADMIN) as watch:
            assert (await watch.next())[0] == "snapshot"
        assert len(weaver.client.descriptors()) == 1
        session.close()
        weaver.client.close()
        await weaver.until(lambda: not weaver.server.peers.callers)
        assert len(weaver.server.peers.links) == 1


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (KEYS.of(ADMIN), "the key is one for threadlets"),
        (Keys(b"another").gateway(), "the key is not of this weaver"),
    ],
)
async def test_over_tcp_too_only_the_gateway_and_sessions_ask(key: str, said: str) -> None:
    async with running(over_tcp=True) as weaver:
        client = WeaverClient(weaver.client.place, lambda: key)
        client.came()

        with pytest.raises(loom.AuthenticationError, match=said):
            await client.ask("status", user=ADMIN)
        with pytest.raises(loom.AuthenticationError, match=said):
            await client.stay_connected(BOUND, lambda: None)


async def test_a_weaver_with_a_socket_takes_no_requests_over_tcp() -> None:
    async with running() as weaver:
        client = WeaverClient(f"127.0.0.1:{weaver.port}", KEYS.gateway)
        client.came()

        with pytest.raises(loom.ProtocolMismatch):
            await client.ask("status", user=ADMIN)


async def test_a_hello_that_comes_byte_by_byte_is_one_all_the_same() -> None:
    async with running(over_tcp=True) as weaver:
        link = await weaver.connect()
        for byte in pack(["hello", KEYS.gateway()]) + pack(["ask", 1, ADMIN, "policies", {}]):
            link._writer.write(bytes([byte]))
            await link._writer.drain()

        assert await link.receive("answer") == ["answer", 1, {}]


async def test_a_name_is_looked_up_anew_for_each_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    leads_to, found = ["127.0.0.1"], socket.getaddrinfo
    asked = []

    def look_up(host: Any, *rest: Any, **more: Any) -> Any:
        if host != "weaver.test":
            return found(host, *rest, **more)
        asked.append(leads_to[0])
        return found(leads_to[0], *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    async with running(over_tcp=True) as weaver:
        client = WeaverClient(f"weaver.test:{weaver.port}", KEYS.gateway, 0.2)
        client.came()
        assert await client.ask("policies", user=ADMIN) == {}

        leads_to[0] = "127.0.0.3"  # where nobody listens yet
        for link in list(weaver.server.peers.callers):
            link.abort()
        await client._link.over.wait()  # type: ignore[union-attr]
        with pytest.raises(loom.WeaverUnavailable, match=r"the weaver is away: .*; replicas go on meanwhile"):
            await client.ask("command", user=ADMIN)
        leads_to[0] = "127.0.0.1"
        assert await client.ask("policies", user=ADMIN) == {}
        client.close()

    assert set(asked) == {"127.0.0.1", "127.0.0.3"}


async def test_one_that_takes_a_connection_and_says_nothing_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = WeaverClient(f"127.0.0.1:{silent.getsockname()[1]}", KEYS.gateway)

        with pytest.raises(loom.WeaverUnavailable, match=r"it did not answer within 0\.1 s"):
            await client.stay_connected(0.1, lambda: None)
        assert client.descriptors() == []


async def test_a_host_that_takes_no_connection_is_waited_for_no_longer_than_asked() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        place = full.getsockname()
        held = [socket.socket() for _ in range(4)]  # as a stand-in for a host that is gone: its queue is full
        for one in held:
            one.setblocking(False)
            one.connect_ex(place)
        client = WeaverClient(f"{place[0]}:{place[1]}", KEYS.gateway, 0.1)
        client.came()

        asked = [client.ask("status") for _ in range(100)]
        answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), BOUND)

        assert {type(answer) for answer in answers} == {loom.WeaverUnavailable}
        assert "nobody takes a connection at" in str(answers[0])
        for one in held:
            one.close()
