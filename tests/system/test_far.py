"""Laptop, gateway and workers as hosts of their own; the laptop's line is long, lossy, narrow or down."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

import loom
from loom import Actor, endpoint
from loom.wire.stream import Stream
from tests.support.actors import BadLuck, Counter
from tests.support.needs import skip_because
from tests.support.network.namespaces import FarCluster, missing
from tests.support.processes import still_there, tree

BOUND = 30.0

LATE = 150.0
"""Seconds that answers may take after an outage: TCP tries again after twice as long each time."""

OUTAGE = 30.0

LARGE = bytes(range(256)) * (4 << 12)
"""4 MiB."""

resumes = pytest.mark.skipif(not hasattr(Stream, "resume"), reason="waits for clients that reconnect by themselves")


class Place(Actor):
    """Knows which network it is in."""

    @endpoint
    def network(self) -> str:
        return network()


def network() -> str:
    return os.readlink("/proc/thread-self/ns/net")


@pytest.fixture
def namespaces() -> None:
    if reason := missing():
        skip_because(reason)


@pytest.fixture
def far(namespaces: None, request: pytest.FixtureRequest) -> Iterator[FarCluster]:
    """A cluster on hosts of its own; its delay is the test's parameter. The test runs on the laptop."""
    with FarCluster(delay=getattr(request, "param", 0.0)) as cluster, cluster.hosts.on("laptop"):
        yield cluster


def counters(job: loom.Job, name: str = "counters") -> Any:
    return job.hosts.spawn_procs(per_host={"gpus": 1}).spawn(name, Counter)


def namespaces_of_this_process() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"loom-{os.getpid()}-")]


def test_a_session_across_four_hosts_leaves_nothing_behind(namespaces: None) -> None:
    outside = network()
    with FarCluster() as far:
        with far.connected() as job:
            procs = job.hosts.spawn_procs(per_host={"gpus": 1})
            mesh, places = procs.spawn("counters", Counter), procs.spawn("places", Place)
            assert list(mesh.add.call(2).get(timeout=BOUND).values()) == [2, 2]
            assert mesh.slice(hosts=1).add.call_one(3).get(timeout=BOUND) == 5
            assert mesh.slice(hosts=1).echo.call_one(LARGE).get(timeout=BOUND) == LARGE
            with pytest.raises(loom.ActorError) as caught:
                mesh.slice(hosts=0).fail.call_one("no luck").get(timeout=BOUND)
            assert isinstance(caught.value.exception, BadLuck)
            networks = {*places.network.call().get(timeout=BOUND).values(), job.run(network), network(), outside}
            assert len(networks) == 5
            processes = [process for pid in far.pids for process in tree(pid)]
            assert len(processes) >= 6  # a gateway, a driver, two workers and a process on each
        assert len(namespaces_of_this_process()) == 5
    assert not still_there(processes)
    assert not namespaces_of_this_process()
    assert network() == outside


def test_hosts_that_cannot_be_made_leave_nothing_behind(namespaces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.network.namespaces.WORKER_PORT", 0)  # no worker listens there
    before = set(psutil.Process().children())  # another test's cluster, perhaps
    with pytest.raises(loom.LoomError):
        FarCluster().__enter__()
    assert not namespaces_of_this_process()
    assert not [child for child in psutil.Process().children() if child not in before]


@pytest.mark.slow
@pytest.mark.parametrize("far", [0.04], indirect=True)
def test_a_session_on_a_line_of_80_milliseconds(far: FarCluster) -> None:
    with loom.connect(far.url, far.token) as job:
        mesh = counters(job)
        one = mesh.slice(hosts=0)
        assert [one.add.call_one(1).get(timeout=BOUND) for _ in range(10)] == list(range(1, 11))
        pending = [one.add.call_one(1) for _ in range(500)]
        assert [future.get(timeout=BOUND) for future in pending] == list(range(11, 511))
        assert mesh.slice(hosts=1).echo.call_one(LARGE).get(timeout=BOUND) == LARGE
        assert job.run(sum, [1, 2]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("far", [0.04], indirect=True)
def test_a_session_on_a_line_that_loses_two_packets_of_a_hundred(far: FarCluster) -> None:
    far.hosts.lose(2)
    with loom.connect(far.url, far.token) as job:
        one = counters(job).slice(hosts=0)
        for base in range(0, 1000, 100):
            pending = [one.add.call_one(1) for _ in range(100)]
            assert [future.get(timeout=BOUND) for future in pending] == list(range(base + 1, base + 101))
        assert one.echo.call_one(LARGE).get(timeout=LATE) == LARGE
    assert min(far.hosts.lost()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("far", [0.04], indirect=True)
def test_a_small_call_passes_a_large_one_on_a_narrow_line(far: FarCluster) -> None:
    far.hosts.narrow(megabits=20)
    with loom.connect(far.url, far.token) as job:
        procs = job.hosts.spawn_procs(per_host={"gpus": 1})
        large, small = procs.spawn("large", Counter), procs.spawn("small", Counter)
        assert large.slice(hosts=0).add.call_one(1).get(timeout=BOUND) == 1
        echo = large.slice(hosts=0).echo.call_one(LARGE * 2)
        passed = 0
        while not echo.done():
            passed += 1
            assert small.slice(hosts=1).add.call_one(1).get(timeout=BOUND) == passed
        assert echo.get(timeout=BOUND) == LARGE * 2
    assert passed > 1


@resumes
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("far", [0.04], indirect=True)
def test_what_was_asked_before_and_during_an_outage_is_answered_after_it(far: FarCluster) -> None:
    with loom.connect(far.url, far.token) as job:
        mesh = counters(job)
        one, other = mesh.slice(hosts=0), mesh.slice(hosts=1)
        assert one.add.call_one(1).get(timeout=BOUND) == 1
        echo = other.echo.call_one(LARGE)
        pending = [one.add.call_one(1) for _ in range(200)]
        with far.hosts.outage():
            pending += [one.add.call_one(1) for _ in range(200)]
            time.sleep(OUTAGE)
        pending += [one.add.call_one(1) for _ in range(200)]
        assert [future.get(timeout=LATE) for future in pending] == list(range(2, 602))
        assert echo.get(timeout=LATE) == LARGE
