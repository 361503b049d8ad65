"""The gateway's end of an HTTP tunnel, with a real unix socket in place of the driver's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from loom.errors import ConnectionLost
from loom.token_file import TokenFile
from loom.wire.length_prefix import TUNNELS, behind_length, split_batch
from loom_gateway.access import budgets
from loom_gateway.access.control import AccessControl
from loom_gateway.access.middleware import AccessMiddleware
from loom_gateway.access.token_authority import TokenAuthority
from loom_gateway.app import create_app
from loom_gateway.relay import http_tunnel as polling
from loom_gateway.relay.driver_lines import DriverLines
from loom_gateway.relay.http_tunnel import BATCH, Tunnel
from loom_gateway.relay.links import DriverLink
from loom_gateway.sessions.manager import SessionManager
from loom_gateway.sessions.session import Traffic
from loom_gateway.weaver_process import WeaverSupervisor

BOUND = 30.0

KIB = 2**10


def batch(*frames: bytes) -> bytes:
    return b"".join(behind_length([frame]) for frame in frames)


class Tunnelled(NamedTuple):
    tunnel: Tunnel
    reader: asyncio.StreamReader
    """What the driver reads from."""
    writer: asyncio.StreamWriter
    closed: asyncio.Event
    """Set when the tunnel has been closed."""

    async def driver_reads(self, count: int) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(count), BOUND)


@contextlib.asynccontextmanager
async def tunnelled(folder: Path, idle: float = BOUND) -> AsyncIterator[Tunnelled]:
    """A tunnel that is connected to a driver's socket."""
    loop = asyncio.get_running_loop()
    came: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = loop.create_future()
    server = await asyncio.start_unix_server(lambda *streams: came.set_result(streams), str(folder / "driver"))
    _, link = await loop.create_unix_connection(lambda: DriverLink(Traffic()), str(folder / "driver"))
    reader, writer = await came
    closed = asyncio.Event()
    tunnel = Tunnel(idle, closed.set)
    await tunnel.receive()  # the connection
    tunnel.relay_to(link)
    link.relay_to(tunnel)
    yield Tunnelled(tunnel, reader, writer, closed)
    tunnel.close()
    link.close()
    writer.close()
    server.close()


# -- to the driver ------------------------------------------------------------------------------------------


async def test_a_batch_that_comes_twice_is_passed_on_once(tmp_path: Path) -> None:
    async with tunnelled(tmp_path) as ends:
        tunnel = ends.tunnel
        assert await tunnel.take(1, batch(b"a", b"bc")) == 1
        assert await tunnel.take(1, batch(b"a", b"bc")) == 1
        assert await tunnel.take(2, batch(b"d")) == 2
        assert await tunnel.take(1, batch(b"a", b"bc")) == 2, "one that was late"
        assert await ends.driver_reads(len(batch(b"a", b"bc", b"d"))) == batch(b"a", b"bc", b"d")


async def test_a_batch_before_which_one_is_missing_is_refused(tmp_path: Path) -> None:
    async with tunnelled(tmp_path) as (tunnel, *_):
        with pytest.raises(ConnectionLost, match="batch 2 came where batch 1"):
            await tunnel.take(2, batch(b"a"))


async def fill(tunnel: Tunnel, monkeypatch: pytest.MonkeyPatch) -> int:
    """Send batches that the driver does not read, until there is no room; how many were taken."""
    monkeypatch.setattr(polling, "POLL", 0.01)
    number = 1
    while await tunnel.take(number, batch(bytes(256 * KIB))) == number:
        number += 1
    return number - 1


async def test_what_the_driver_does_not_take_is_not_taken_from_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tunnelled(tmp_path) as ends:
        tunnel = ends.tunnel
        taken = await fill(tunnel, monkeypatch)
        assert taken * 256 * KIB < 4 * 2**20, "bounded by what sockets and buffers hold"
        monkeypatch.setattr(polling, "POLL", BOUND)
        repeated = [asyncio.ensure_future(tunnel.take(taken + 1, batch(b"last"))) for _ in range(3)]
        frames = len(batch(bytes(256 * KIB))) * taken
        assert (await ends.driver_reads(frames))[-1:] == b"\x00"
        assert await asyncio.gather(*repeated) == [taken + 1] * 3
        assert await tunnel.take(taken + 2, batch(b"after")) == taken + 2
        expected = batch(b"last", b"after")
        assert await ends.driver_reads(len(expected)) == expected


async def test_whoever_waits_for_room_is_let_go_when_the_tunnel_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tunnelled(tmp_path) as (tunnel, *_):
        taken = await fill(tunnel, monkeypatch)
        monkeypatch.setattr(polling, "POLL", BOUND)
        waiting = asyncio.ensure_future(tunnel.take(taken + 1, batch(b"more")))
        await asyncio.sleep(0)
        tunnel.end()
        assert await asyncio.wait_for(waiting, BOUND) == taken + 1


# -- to the client ------------------------------------------------------------------------------------------


async def test_a_batch_is_kept_until_the_next_is_asked_for(tmp_path: Path) -> None:
    async with tunnelled(tmp_path) as (tunnel, _, writer, _):
        writer.write(batch(b"a"))
        assert await tunnel.poll(1) == (batch(b"a"), False)
        writer.write(batch(b"b"))
        assert await tunnel.poll(1) == (batch(b"a"), False)
        assert await tunnel.poll(2) == (batch(b"b"), False)
        for number in (1, 4):
            with pytest.raises(ConnectionLost, match=f"batch {number} was asked for; the last one is 2"):
                await tunnel.poll(number)


async def test_polls_at_the_same_time_get_the_same_batch(tmp_path: Path) -> None:
    async with tunnelled(tmp_path) as (tunnel, _, writer, _):
        polls = [asyncio.ensure_future(tunnel.poll(1)) for _ in range(3)]
        await asyncio.sleep(0)
        writer.write(batch(b"a"))
        assert await asyncio.wait_for(asyncio.gather(*polls), BOUND) == [(batch(b"a"), False)] * 3


async def test_a_poll_that_nothing_comes_for_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "POLL", 0.01)
    async with tunnelled(tmp_path) as (tunnel, *_):
        assert await tunnel.poll(1) == (b"", False)
        tunnel.send_frame(b"a")
        assert await tunnel.poll(1) == (batch(b"a"), False)


async def test_what_came_before_the_end_is_still_delivered(tmp_path: Path) -> None:
    async with tunnelled(tmp_path) as (tunnel, *_):
        tunnel.send_frame(b"a")
        tunnel.end()
        tunnel.send_frame(b"too late")
        assert await tunnel.poll(1) == (batch(b"a"), True)
        assert await tunnel.poll(1) == (batch(b"a"), True)
        assert await tunnel.poll(2) == (b"", True)


async def test_no_more_is_read_from_the_driver_than_a_client_takes(tmp_path: Path) -> None:
    frame = bytes(300 * KIB)
    async with tunnelled(tmp_path) as (tunnel, _, writer, _):

        async def flood() -> None:
            for _ in range(100):
                writer.write(batch(frame))
                await writer.drain()

        flooding = asyncio.ensure_future(flood())
        received, most, number = 0, 0, 0
        while received < 100:
            number += 1
            data, _ = await asyncio.wait_for(tunnel.poll(number), BOUND)
            assert len(data) <= BATCH
            received += len(list(split_batch(data)))
            for _ in range(50):  # for as long as it goes on reading
                await asyncio.sleep(0)
                most = max(most, tunnel._waiting_bytes)
        await flooding
        assert received == 100
        assert most < BATCH + 2 * len(frame)


async def test_a_client_that_does_not_poll_is_gone_and_one_that_does_is_not(tmp_path: Path) -> None:
    async with tunnelled(tmp_path, idle=0.05) as (tunnel, _, _, closed):
        polling_now = asyncio.ensure_future(tunnel.poll(1))
        await asyncio.sleep(0.2)
        assert not closed.is_set()
        tunnel.send_frame(b"a")
        assert await polling_now == (batch(b"a"), False)
        await asyncio.wait_for(closed.wait(), BOUND)
        assert (await tunnel.receive())["type"] == "websocket.disconnect"


# -- over HTTP ----------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def gateway(tokens: TokenFile | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway without workers, whose routes are called in this process."""
    manager = SessionManager([])
    access = AccessControl(TokenAuthority("token", tokens))
    supervisor = WeaverSupervisor(manager.folder.weaver, manager.worker_watch.there)
    app = create_app(manager, DriverLines(manager), access, supervisor)
    transport = httpx.ASGITransport(AccessMiddleware(app, access))
    headers = {"Authorization": "Bearer token"}
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as client:
        yield client
    app.state.tunnels.close()
    await manager.close()


async def test_answers_are_not_cached() -> None:
    async with gateway() as client:
        opened = await client.post(TUNNELS)
        assert opened.headers["cache-control"] == "no-store, no-transform"
        tunnel = opened.json()["tunnel"]
        taken = await client.post(f"{TUNNELS}/{tunnel}/up?n=1", content=batch(b"no hello"))
        polled = await client.get(f"{TUNNELS}/{tunnel}/down?n=1")
        assert [answer.headers["cache-control"] for answer in (taken, polled)] == ["no-store, no-transform"] * 2
        assert polled.headers["loom-ended"] == "1"


async def test_names_of_tunnels_cannot_be_guessed() -> None:
    async with gateway() as client:
        names = {(await client.post(TUNNELS)).json()["tunnel"] for _ in range(20)}
    assert len(names) == 20
    assert min(map(len, names)) >= 32


@pytest.mark.guarantees("strangers", "The HTTP tunnels of a user are bounded")
async def test_the_tunnels_of_a_user_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(budgets, "MAX_TUNNELS", (3, 5))
    tokens = TokenFile(tmp_path / "tokens")
    _, other = tokens.create("ann", "drive")
    async with gateway(tokens) as client:
        opened = [(await client.post(TUNNELS)).json()["tunnel"] for _ in range(3)]
        refused = await client.post(TUNNELS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "limit_reached")
        of_another = await client.post(TUNNELS, headers={"Authorization": f"Bearer {other}"})
        assert of_another.status_code == 201
        await client.delete(f"{TUNNELS}/{opened[0]}")
        assert (await client.post(TUNNELS)).status_code == 201
