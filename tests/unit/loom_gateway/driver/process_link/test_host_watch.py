"""The watch over a worker host: what ends it, and what does not."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator

import pytest

from loom_gateway.driver.handlers import hosts
from loom_gateway.driver.handlers.hosts import HostEnd, watch_host
from loom_gateway.driver.process_link.link import REFUSED_FOR, Refusals
from loom_gateway.workers.sources import parse_worker_address
from tests.support.network.gate import Gate
from tests.unit.loom_gateway.driver.process_link.processes import BOUND


class Worker:
    """What listens in a worker's place."""

    def __init__(self) -> None:
        self.connections: list[asyncio.StreamWriter] = []
        self._connected = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer)
        self._connected.set()
        try:
            with contextlib.suppress(OSError):
                await reader.read()
        finally:
            writer.transport.abort()

    async def connected(self, times: int) -> None:
        while len(self.connections) < times:
            self._connected.clear()
            await asyncio.wait_for(self._connected.wait(), BOUND)


@contextlib.asynccontextmanager
async def worker() -> AsyncIterator[tuple[Worker, asyncio.Server, int]]:
    """A worker, its server and its port."""
    made = Worker()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    try:
        yield made, server, server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for _ in range(10):  # one that has just come is served a few rounds of the loop later
            await asyncio.sleep(0)
            for writer in made.connections:
                writer.transport.abort()


def watched(port: int, patience: float = 10 * BOUND, lives: bool = True) -> asyncio.Task[HostEnd]:
    return asyncio.ensure_future(
        watch_host(parse_worker_address(f"tcp://127.0.0.1:{port}"), patience, lambda: lives)
    )


async def cancel(watch: asyncio.Task[HostEnd]) -> None:
    """Cancel a watch and wait for its end. Before Python 3.12, `asyncio.wait_for` may lose a cancellation."""
    while not watch.done():
        watch.cancel()
        await asyncio.wait([watch], timeout=0.1)


async def test_a_worker_that_ends_is_gone_at_once() -> None:
    async with worker() as (made, server, port):
        watch = watched(port)
        await made.connected(1)
        server.close()
        made.connections[0].close()
        assert await asyncio.wait_for(watch, BOUND) == HostEnd.ENDED


async def test_a_worker_outlives_resets_and_closed_connections() -> None:
    async with worker() as (made, _, port):
        with Gate(port) as gate:
            watch = watched(gate.port)
            await made.connected(1)
            gate.cut()
            await made.connected(2)
            gate.cut()
            await made.connected(3)
            made.connections[2].close()
            await made.connected(4)
            assert not watch.done()
            await cancel(watch)


async def test_a_worker_outlives_a_network_that_is_away_for_less_than_the_patience() -> None:
    async with worker() as (made, _, port):
        with Gate(port) as gate:
            watch = watched(gate.port)
            await made.connected(1)
            gate.shut()
            assert await asyncio.to_thread(gate.knocked.wait, BOUND)
            gate.open()
            await made.connected(2)
            assert not watch.done()
            await cancel(watch)


@pytest.mark.parametrize(
    ("host", "clean", "seconds"),
    [("10.0.0.1", False, REFUSED_FOR), ("10.0.0.1", True, 0.0), ("127.0.0.1", False, 0.0), ("::1", False, 0.0)],
)
def test_only_another_machine_refuses_for_a_while_after_a_reset(host: str, clean: bool, seconds: float) -> None:
    refusals = Refusals(host, clean)

    assert not seconds or not refusals.refused(5.0)
    assert refusals.refused(5.0 + seconds)


async def test_a_worker_of_this_machine_that_refuses_after_a_reset_is_gone_at_once() -> None:
    async with worker() as (made, server, port):
        watch = watched(port)
        await made.connected(1)
        server.close()
        made.connections[0].transport.abort()
        assert await asyncio.wait_for(watch, BOUND) == HostEnd.ENDED


async def test_a_worker_is_gone_when_the_patience_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "RETRY", 0.01)
    async with worker() as (made, _, port):
        with Gate(port) as gate:
            watch = watched(gate.port, patience=1.0)
            await made.connected(1)
            gate.shut()
            assert await asyncio.wait_for(watch, BOUND) in (HostEnd.SILENT, HostEnd.UNREACHABLE)


@pytest.fixture
def known_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "SAME_AFTER", 0.1)


@pytest.mark.guarantees("process link", "A worker that was restarted before it was missed is known as another one")
@pytest.mark.usefixtures("known_soon")
async def test_a_worker_in_the_place_of_one_that_ended_is_another_one() -> None:
    async with worker() as (made, _, port):
        watch = watched(port, lives=False)
        await made.connected(1)
        made.connections[0].close()
        assert await asyncio.wait_for(watch, BOUND) == HostEnd.RESTARTED


@pytest.mark.usefixtures("known_soon")
async def test_a_worker_whose_processes_do_not_come_back_after_a_reset_is_another_one() -> None:
    async with worker() as (made, _, port):
        with Gate(port) as gate:
            living = [True]
            address = parse_worker_address(f"tcp://127.0.0.1:{gate.port}")
            watch = asyncio.ensure_future(watch_host(address, 10 * BOUND, lambda: bool(living)))
            await made.connected(1)
            living.clear()
            gate.cut()
            assert await asyncio.wait_for(watch, BOUND) == HostEnd.RESTARTED


async def test_a_connection_that_is_closed_before_it_is_looked_at_has_broken() -> None:
    async with worker() as (_, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.transport.abort()
        await asyncio.sleep(0)  # now its socket is closed

        assert not await asyncio.wait_for(hosts._ends_cleanly(reader, writer, 10 * BOUND), BOUND)


async def test_a_connection_that_breaks_at_once_does_not_vouch_for_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with worker() as (made, _, port):
        with Gate(port) as gate:
            living, broken = [True], asyncio.Event()

            def lives() -> bool:
                if broken.is_set():
                    monkeypatch.setattr(hosts, "SAME_AFTER", 0.1)
                return bool(living)

            monkeypatch.setattr(hosts, "SAME_AFTER", BOUND)
            address = parse_worker_address(f"tcp://127.0.0.1:{gate.port}")
            watch = asyncio.ensure_future(watch_host(address, 10 * BOUND, lives))
            await made.connected(1)
            living.clear()
            gate.cut()
            await made.connected(2)
            broken.set()
            gate.cut()
            assert await asyncio.wait_for(watch, BOUND) == HostEnd.RESTARTED


@pytest.mark.usefixtures("known_soon")
async def test_a_worker_without_processes_outlives_a_reset() -> None:
    async with worker() as (made, _, port):
        with Gate(port) as gate:
            watch = watched(gate.port, lives=False)
            await made.connected(1)
            gate.cut()
            await made.connected(2)
            gate.cut()
            await made.connected(3)
            assert not watch.done()
            await cancel(watch)


@pytest.mark.usefixtures("known_soon")
async def test_a_worker_that_is_started_again_after_a_reset_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = asyncio.Event()

    def note(self: Refusals, now: float) -> bool:
        refused.set()
        return False

    monkeypatch.setattr(Refusals, "refused", note)
    async with worker() as (made, server, port):
        watch = watched(port, lives=False)
        await made.connected(1)
        server.close()
        sock: socket.socket = made.connections[0].get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        made.connections[0].transport.abort()
        await asyncio.wait_for(refused.wait(), BOUND)
        async with await asyncio.start_server(made.serve, "127.0.0.1", port):
            assert await asyncio.wait_for(watch, BOUND) == HostEnd.RESTARTED
