"""Bulk on a connection of its own: a small call is never behind it, and nothing is lost or overtaken."""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

import loom
from loom import Actor, endpoint
from loom_proxy.local import LocalCluster
from tests.integration.session.http_sessions import lose_tunnel
from tests.support.gateways import attach
from tests.support.network.delay_proxy import Link
from tests.support.network.gate import Gate
from tests.support.network.http_proxy import HttpProxy, without_websockets
from tests.support.network.narrow_proxy import NarrowProxy

BOUND = 30.0
MIB = 1 << 20


class Notes(Actor):
    """Notes what comes, in order."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    @endpoint
    async def note(self, number: int, payload: bytes = b"") -> int:
        self.numbers.append(number)
        return len(payload)

    @endpoint
    async def all(self) -> list[int]:
        return self.numbers

    @endpoint
    async def echo(self, value: Any) -> Any:
        return value

    @endpoint
    async def make(self, size: int) -> bytes:
        return bytes(size)


class Lines(Gate):
    """A gate that knows its connections in the order in which they came."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.all: list[Link] = []

    async def _forward(self, link: Link) -> None:
        self.all.append(link)
        await super()._forward(link)

    def cut_one(self, number: int) -> None:
        self._loop.call_soon_threadsafe(self.all[number].reset)


def until(condition: Callable[[], bool], step: float = 0.01) -> None:
    deadline = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(step)


def has_two(job: loom.Job) -> bool:
    return job._connection._stream.apart


def port_of(cluster: LocalCluster) -> int:
    port = urlsplit(cluster.url).port
    assert port is not None
    return port


@contextmanager
def through(port: int, cluster: LocalCluster) -> Iterator[loom.Job]:
    with loom.connect(f"ws://127.0.0.1:{port}", cluster.token) as job:
        yield job


@pytest.fixture
def lines(cluster: LocalCluster) -> Iterator[Lines]:
    with Lines(port_of(cluster)) as lines:
        yield lines


@pytest.fixture
def far_job(lines: Lines, cluster: LocalCluster) -> Iterator[loom.Job]:
    with through(lines.port, cluster) as job:
        until(lambda: has_two(job))
        yield job


def spawn(job: loom.Job, count: int = 1) -> Any:
    """Actors in processes of their own."""
    procs = job.hosts.slice(hosts=0).spawn_procs(per_host={"gpus": count}, name="procs")
    return procs.spawn("notes", Notes)


def disconnected(job: loom.Job) -> int:
    return sum(event.name == "disconnected" for event in job.events(timeout=0))


def test_two_connections_are_one_client(job: loom.Job, cluster: LocalCluster) -> None:
    until(lambda: has_two(job))
    url = cluster.url.replace("ws://", "http://").split("/ws")[0]
    headers = {"Authorization": f"Bearer {cluster.token}"}

    def connected() -> bool:
        sessions = httpx.get(f"{url}/api/v1/sessions", headers=headers).raise_for_status().json()["sessions"]
        (session,) = [one for one in sessions if one["name"] == job.session]
        return bool(session["client_connected"])

    assert connected()
    job.detach()
    until(lambda: not connected())
    with loom.connect(cluster.url, cluster.token, session=job.session):
        pass


def test_one_lane_can_be_asked_for(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOM_LANES", "1")
    with loom.connect(cluster.url, cluster.token) as job:
        assert spawn(job).echo.call_one(bytes(2 * MIB)).get(BOUND) == bytes(2 * MIB)
        assert job._connection._stream.bulk is None


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_every_actor_gets_its_messages_in_order(job: loom.Job, seed: int) -> None:
    until(lambda: has_two(job))
    chance = random.Random(seed)
    actors = spawn(job, 2)
    each = [actors.slice(gpus=0), actors.slice(gpus=1)]
    sent: tuple[list[int], list[int]] = ([], [])
    futures = []
    for number in range(60):
        payload = bytes(chance.choice([0, 0, 10, 600 << 10, 2 * MIB]))
        which = chance.choice([0, 1, 2])
        if which == 2:
            futures.append(actors.note.call(number, payload))
        elif chance.random() < 0.3:  # by a slice that is made before
            futures.append(actors.slice(gpus=which).note.call_one(number, payload))
        else:
            futures.append(each[which].note.call_one(number, payload))
        for index in (0, 1):
            if which in (index, 2):
                sent[index].append(number)

    for future in futures:
        future.get(BOUND)
    assert [one.all.call_one().get(BOUND) for one in each] == list(sent)


def test_a_mesh_spawned_with_a_large_argument_is_there_for_the_call_behind(job: loom.Job) -> None:
    until(lambda: has_two(job))
    for number in range(4):
        procs = job.hosts.slice(hosts=0).spawn_procs(name=f"procs{number}")
        notes = procs.spawn(f"notes{number}", Kept, bytes(3 * MIB))
        assert notes.kept.call_one().get(BOUND) == 3 * MIB


class Kept(Actor):
    def __init__(self, payload: bytes) -> None:
        self.payload = payload

    @endpoint
    async def kept(self) -> int:
        return len(self.payload)


def test_large_results_are_awaited_in_every_way(job: loom.Job) -> None:
    until(lambda: has_two(job))
    notes = spawn(job)
    assert notes.make.call_one(3 * MIB).get(BOUND) == bytes(3 * MIB)
    came = threading.Event()
    notes.make.call_one(3 * MIB).add_done_callback(lambda future: came.set())
    assert came.wait(BOUND)

    async def ask() -> bytes:
        return await notes.make.call_one(3 * MIB)

    assert asyncio.run(asyncio.wait_for(ask(), BOUND)) == bytes(3 * MIB)
    both = loom.wait([notes.make.call_one(3 * MIB), notes.note.call_one(1)], BOUND)
    assert not both.not_done


def test_where_one_connection_is_allowed_one_carries_all(cluster: LocalCluster) -> None:
    with (
        NarrowProxy(port_of(cluster), rate=1 << 30, queue=MIB, most=1) as proxy,
        through(proxy.port, cluster) as job,
    ):
        notes = spawn(job)
        until(lambda: proxy.refused > 1)
        large = notes.echo.call_one(bytes(20 * MIB))
        assert notes.note.call_one(1).get(BOUND) == 0
        assert large.get(BOUND) == bytes(20 * MIB)
        assert not has_two(job)
        assert proxy.open == 1


def test_where_there_is_no_websocket_one_connection_carries_all(cluster: LocalCluster) -> None:
    with Gate(port_of(cluster)) as gate:
        job = loom.connect(f"ws://127.0.0.1:{gate.port}", cluster.token)
        until(lambda: has_two(job))
    with HttpProxy(port_of(cluster), without_websockets(403), listen=gate.port), job:
        notes = spawn(job)
        assert notes.echo.call_one(bytes(3 * MIB)).get(BOUND) == bytes(3 * MIB)
        assert job.transport == "http"
        assert not has_two(job)


def test_a_second_connection_is_made_when_there_is_a_websocket_at_last(cluster: LocalCluster) -> None:
    blocked = without_websockets(403)
    with HttpProxy(port_of(cluster), blocked) as proxy:
        job = loom.connect(f"ws://127.0.0.1:{proxy.port}", cluster.token)
        assert job.transport == "http"
    with Gate(port_of(cluster), listen=proxy.port), job:
        lose_tunnel(job)
        until(lambda: has_two(job))
        assert spawn(job).echo.call_one(bytes(3 * MIB)).get(BOUND) == bytes(3 * MIB)
        assert job.transport == "websocket"


def transfer_and(job: loom.Job, cut: Callable[[], None]) -> None:
    """Send 48 MiB there and back, and cut connections meanwhile; small calls to the same actor stay behind it."""
    sent = bytes(range(256)) * (48 << 12)
    notes = spawn(job)
    large = notes.echo.call_one(sent)
    behind = [notes.note.call_one(number) for number in range(10)]
    cuts = 0
    while not large.done() and cuts < 15:
        cut()
        cuts += 1
        loom.wait([large], timeout=0.1)

    assert large.get(BOUND) == sent
    for future in behind:
        future.get(BOUND)
    assert notes.all.call_one().get(BOUND) == list(range(10))


def test_the_second_connection_is_lost_in_the_middle(lines: Lines, far_job: loom.Job) -> None:
    transfer_and(far_job, lambda: lines.cut_one(-1) if len(lines.all) > 1 else None)

    assert disconnected(far_job) == 0
    until(lambda: has_two(far_job))


def test_the_first_connection_is_lost_in_the_middle(lines: Lines, far_job: loom.Job) -> None:
    first = lines.all[0]
    transfer_and(far_job, lambda: lines._loop.call_soon_threadsafe(first.reset))

    assert disconnected(far_job) == 1
    until(lambda: has_two(far_job))


def test_both_connections_are_lost_in_the_middle(lines: Lines, far_job: loom.Job) -> None:
    transfer_and(far_job, lines.cut)

    assert disconnected(far_job) >= 1
    until(lambda: has_two(far_job))


@pytest.mark.parametrize("seed", range(3))
def test_any_connection_is_lost_at_any_time(lines: Lines, far_job: loom.Job, seed: int) -> None:
    chance = random.Random(seed)
    transfer_and(far_job, lambda: lines.cut_one(chance.randrange(len(lines.all))))


def test_a_large_result_of_which_some_had_come_to_a_program_is_found_by_the_next(cluster: LocalCluster) -> None:
    """Over a narrow line, in the middle of the result."""
    with NarrowProxy(port_of(cluster), 16 * MIB, MIB) as line:
        job = loom.connect(f"ws://127.0.0.1:{line.port}", cluster.token)
        notes = spawn(job)
        notes.note.call_one(1).get(BOUND)
        notes.make.call_one(32 * MIB)
        until(lambda: job._calls.moving()[1] > 6 * MIB)
    with loom.connect(cluster.url, cluster.token, session=job.session) as other:
        (call,) = other.undelivered()
        assert (call.mesh, call.endpoint) == ("notes", "make")
        assert len(call.future.get(BOUND)) == 32 * MIB
        assert other.meshes["notes"].all.call_one().get(BOUND) == [1]
    job.detach()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["there", "back"])
def test_small_calls_are_not_behind_what_moves_over_a_narrow_line(cluster: LocalCluster, way: str) -> None:
    with NarrowProxy(port_of(cluster), 4 * MIB, 2 * MIB) as proxy, through(proxy.port, cluster) as job:
        procs = job.hosts.slice(hosts=0).spawn_procs(per_host={"gpus": 2}, name="procs")
        # Not slices of one mesh: what goes to one mesh keeps its order.
        busy, idle = (procs.slice(gpus=gpu).spawn(f"notes{gpu}", Notes) for gpu in (0, 1))
        for one in (busy, idle):
            one.note.call_one(0).get(BOUND)
        until(lambda: has_two(job))
        if way == "there":
            moving = busy.note.call_one(1, bytes(32 * MIB))
        else:
            moving = busy.make.call_one(32 * MIB)
            until(lambda: job._calls.moving()[1] > 4 * MIB)
        for number in range(20):  # with one connection, each would be behind 2 MiB: half a second
            idle.note.call_one(number).get(BOUND)
            assert not moving.done()
        moving.get(2 * BOUND)


def test_a_detached_run_with_a_large_argument_is_begun_though_its_program_ends(cluster: LocalCluster) -> None:
    program = f"""
import loom
job = loom.connect({cluster.url!r}, {cluster.token!r})
job.run(len, bytes({16 * MIB}), detach=True, name="late")
print(job.session)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=BOUND)
    assert ended.stderr == ""
    with attach(cluster, ended.stdout.strip()) as job:
        assert job.runs()["late"].result(BOUND) == 16 * MIB


@pytest.mark.slow
def test_a_job_that_detaches_over_a_narrow_line_sends_what_was_asked_for(cluster: LocalCluster) -> None:
    with NarrowProxy(port_of(cluster), 4 * MIB, MIB) as line:
        job = loom.connect(f"ws://127.0.0.1:{line.port}", cluster.token)
        job.run(len, bytes(32 * MIB), detach=True, name="late")
        job.detach()
        with attach(cluster, job.session) as after:
            assert after.runs()["late"].result(BOUND) == 32 * MIB
