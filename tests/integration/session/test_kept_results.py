"""Results for a program that is away or has died: they wait, within bounds, and what is dropped is named."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import loom
from loom import Actor, endpoint
from loom_gateway.driver.clients.client import AWAY_CROWD
from loom_proxy.local import LocalCluster
from tests.integration.session.test_resume import await_event
from tests.support.actors import open_gate
from tests.support.gateways import TOKEN, Gateway, await_true, gateway_of
from tests.support.network.gate import Gate

BOUND = 60.0
MIB = 1 << 20
ROOM = 4
"""MiB on the disk."""

CALLS = AWAY_CROWD // MIB + ROOM + 12


class Bulk(Actor):
    """Gives large results."""

    @endpoint
    def wait(self, pipe: str) -> None:
        with open(pipe) as opened:
            opened.read()

    @endpoint
    def make(self, number: int, size: int) -> bytes:
        return bytes([number]) * size


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[str]:
    path = str(tmp_path / "gate")
    os.mkfifo(path)
    yield path
    os.close(os.open(path, os.O_RDWR))  # lets go of whoever still waits there


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


def driver_output(gateway: Gateway) -> str:
    return "".join(path.read_text() for path in gateway.state.rglob("driver-*.out"))


@pytest.mark.guarantees(
    "nothing lost", "A result for which there is no room is named to the program that comes back"
)
def test_a_result_without_room_is_named_to_the_program_that_comes_back(cluster: LocalCluster, pipe: str) -> None:
    with gateway_of(cluster, "--keep-results", str(ROOM * MIB)) as gateway, Gate(port_of(gateway.url)) as gate:
        job = loom.connect(f"ws://127.0.0.1:{gate.port}", TOKEN)
        bulk = job.hosts.slice(hosts=0).spawn_procs(name="procs").spawn("bulk", Bulk)
        bulk.wait.call_one(pipe)
        futures = [bulk.make.call_one(number, MIB) for number in range(CALLS)]
        job.flush_logs(BOUND)  # the calls have been started
        gate.shut()
        await_event(job, "disconnected")
        open_gate(pipe)
        await_true(lambda: "is dropped" in driver_output(gateway))
        gate.open()

        errors = [future.exception(BOUND) for future in futures]
        lost = [error for error in errors if error is not None]
        assert 1 <= len(lost) <= CALLS - AWAY_CROWD // MIB
        for error in lost:
            assert isinstance(error, loom.ResultDropped)
            assert "the result of bulk.make.call_one(), 1,048," in str(error)
            assert f"--keep-results {ROOM * MIB:,}" in str(error)
        for number, (future, error) in enumerate(zip(futures, errors, strict=True)):
            if error is None:
                assert future.get() == bytes([number]) * MIB
        assert bulk.make.call_one(1, 10).get(BOUND) == b"\x01" * 10
        job.close()


@pytest.mark.guarantees(
    "nothing lost",
    "A result that has arrived in part, or was not read, when its program died is found by the next one; "
    "of those that had been delivered only so many are kept",
)
def test_a_large_result_of_which_a_part_had_arrived_is_found_by_the_next_program(cluster: LocalCluster) -> None:
    size = 96 * MIB
    with Gate(port_of(cluster.url)) as gate:
        for _ in range(10):  # until the network goes away in the middle
            job = loom.connect(f"ws://127.0.0.1:{gate.port}", cluster.token)
            bulk = job.hosts.slice(hosts=0).spawn_procs(name="procs").spawn("bulk", Bulk)
            future = bulk.make.call_one(7, size)
            while not job._calls.moving()[1] and not future.done():
                os.sched_yield()
            gate.shut()
            await_event(job, "disconnected")
            in_the_middle = not future.done()
            if in_the_middle:
                with loom.connect(cluster.url, cluster.token, session=job.session) as other:
                    (call,) = other.undelivered()
                    assert (call.mesh, call.endpoint) == ("bulk", "make")
                    assert call.future.get(BOUND) == bytes([7]) * size
            gate.open()
            job.close()
            if in_the_middle:
                return
        raise AssertionError("the network never went away in the middle of the result")
