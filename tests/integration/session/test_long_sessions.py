"""A session that makes and stops meshes for days holds no more than at its beginning."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections import Counter as Counts
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

import loom
from loom.rest_client import Gateway
from loom.wire.bodies import StreamCall
from loom_gateway.driver.handlers.runs import KEPT_RUNS
from loom_gateway.driver.monarch.mesh_table import KEPT_NAMES
from loom_gateway.driver.process_link.server import MOST_ENDS
from loom_gateway.driver.session.mesh_view import SHOWN_STOPPED
from loom_proxy.local import LocalCluster
from loom_proxy.session.calls import KEPT_STOPPED
from tests.support.actors import Counter, Hang

BOUND = 60.0

WARM = 70
"""Meshes that are made first: the names of the last 64 stopped ones are kept."""


def held() -> Counts[str]:
    """Count the objects of Loom and Monarch in this process, its threads and descriptors."""
    gc.collect()
    living = [kind for kind in map(type, gc.get_objects()) if str(kind.__module__).startswith(("loom", "monarch"))]
    counts = Counts(f"{kind.__module__}.{kind.__qualname__}" for kind in living)
    counts += lengths()
    counts["threads"] = threading.active_count()
    counts["descriptors"] = len(os.listdir("/proc/self/fd"))
    return counts


LIVING = 32  # meshes, parts of meshes, runs and processes that may live besides what is kept of the past

BOUNDS = {
    "loom_gateway.driver.handlers.runs.Runs._runs": KEPT_RUNS + LIVING,
    "loom_gateway.driver.process_link.server.ProcessLinkServer._ends": MOST_ENDS,
    "loom.control.process_end.ProcessEnd": MOST_ENDS + LIVING,
    "loom_gateway.driver.monarch.mesh_table.MeshTable._entries": KEPT_NAMES + LIVING,
    "loom_gateway.driver.monarch.mesh_table.MeshTable._unusable": KEPT_NAMES,
    "loom_gateway.driver.monarch.mesh_table.MeshEntry": KEPT_NAMES + LIVING,
    "loom_gateway.driver.monarch.mesh_table._Stopped": KEPT_NAMES + LIVING,
    # `Job.meshes` names the last stopped meshes, which keep their endpoints' operations.
    "loom_proxy.mesh.procs.ProcMeshProxy": KEPT_STOPPED + LIVING,
    "loom.wire.bodies.StreamCall": KEPT_STOPPED,
}
"""What is kept of the past, and grows until it is full."""


def lengths() -> Counts[str]:
    """Count what is in the containers of Loom's objects and modules in this process."""
    kinds = [(thing, type(thing)) for thing in gc.get_objects()]
    ours = [(thing, kind) for thing, kind in kinds if str(kind.__module__).startswith("loom")]
    holders = [(kind, vars(thing)) for thing, kind in ours if hasattr(thing, "__dict__")]
    named = [(f"{kind.__module__}.{kind.__qualname__}", content) for kind, content in holders]
    named += [(name, vars(module)) for name, module in sys.modules.copy().items()]
    counts: Counts[str] = Counts()
    for name, content in named:
        if name.startswith("loom") and not name.startswith("loom.wire.bodies"):
            for key, value in content.copy().items():
                bounded = getattr(value, "maxlen", None) is not None
                if isinstance(value, dict | list | set | deque) and not bounded:
                    counts[f"{name}.{key}"] += len(value)
    return counts


def grown(before: Counts[str], most: int) -> dict[str, tuple[int, int]]:
    return {
        name: (before[name], count)
        for name, count in held().items()
        if count >= before[name] + most and count > BOUNDS.get(name, 0)
    }


def await_no_growth(of: Callable[[], dict[str, tuple[int, int]]]) -> None:
    """Wait until nothing has grown: the last processes of a stopped mesh may still be ending."""
    until = time.monotonic() + BOUND
    while found := of():
        assert time.monotonic() < until, found
        threading.Event().wait(0.2)


def make_and_stop(procs: Any, name: str) -> None:
    actors = procs.spawn(name, Counter)
    assert actors.slice(hosts=0).add.call_one(1).get(timeout=BOUND) == 1  # by a reply channel
    assert len(actors.add.call(1).get(timeout=BOUND)) == len(procs)
    actors.stop().get(timeout=BOUND)


def remake_processes(job: loom.Job) -> None:
    procs = job.hosts.spawn_procs(name="processes")
    counters = procs.spawn("counters", Counter)
    assert len(counters.add.call(1).get(timeout=BOUND)) == len(procs)
    assert counters.slice(hosts=0).add.call_one(1).get(timeout=BOUND) == 2
    procs.stop().get(timeout=BOUND)


def send(port: Any, message: str) -> None:
    port.send(message)


def use_all(job: loom.Job, gateway: Gateway, procs: Any, name: str) -> None:
    """Use a session in the ways that keep something in a container while they last."""
    counters = procs.spawn(name, Counter)
    part = counters.slice(hosts=0)
    assert part.add.call_one(1).get(timeout=BOUND) == 1
    with pytest.raises(loom.ActorError):
        counters.fail.call("bad luck").get(timeout=BOUND)
    assert len([one.get(timeout=BOUND) for one in counters.add.stream(1)]) == len(procs)
    port, receiver = job.channel()
    job.run(send, port, name)
    assert receiver.recv().get(timeout=BOUND) == name
    job.run(print, name, name=name)
    with pytest.raises(TypeError):
        job.run(len, 1)
    assert name in job.meshes
    job.runs()
    assert name in {one["name"] for mesh in gateway.meshes(job.session)["hosts"]["procs"] for one in mesh["actors"]}
    gateway.runs(job.session)
    counters.stop().get(timeout=BOUND)


def check_that_nothing_grows(job: loom.Job, gateway: Gateway, actors: int, processes: int) -> None:
    standing = job.hosts.spawn_procs(name="standing")
    for number in range(WARM):
        make_and_stop(standing, f"warm {number}")
    for _ in range(2):
        use_all(job, gateway, standing, "used")
    for _ in range(2):
        remake_processes(job)
    await_no_growth(lambda: {"processes": (1, 2)} if len(job.run(running)) > 1 else {})
    there, here = job.run(held), held()
    most = max(processes // 2, 1)
    for number in range(actors):
        make_and_stop(standing, f"actors {number}")
        if number % 8 == 0:
            use_all(job, gateway, standing, "used")
    for _ in range(processes):
        remake_processes(job)
    await_no_growth(lambda: job.run(grown, there, most))
    await_no_growth(lambda: grown(here, most))
    named = {mesh._ident for mesh in job.meshes.values()}
    assert {call.mesh for call in gc.get_objects() if type(call) is StreamCall} <= named
    hosts = gateway.meshes(job.session)["hosts"]
    meshes = [*hosts["procs"], *(one for mesh in hosts["procs"] for one in mesh["actors"])]
    assert [one["name"] for one in meshes if not one["stopped"]] == ["standing"]
    assert len(meshes) <= 1 + SHOWN_STOPPED


def running() -> list[int]:
    """Return the ids of the proc meshes whose processes live, as the session's driver knows them."""
    from loom_gateway.driver.handlers.processes import Processes

    gc.collect()
    (processes,) = (found for found in gc.get_objects() if type(found) is Processes)
    return [ident for ident, ranks in processes._started.items() if ranks]


@pytest.mark.slow
def test_a_session_that_makes_and_stops_meshes_does_not_grow(job: loom.Job, cluster: LocalCluster) -> None:
    check_that_nothing_grows(job, Gateway(cluster.url, cluster.token), actors=50, processes=6)


@pytest.mark.guarantees(
    "nothing lost",
    "A session that makes and stops 2,000 meshes holds no more objects, entries of containers, threads "
    "and descriptors than before, on both sides",
)
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_session_that_makes_and_stops_2000_meshes_does_not_grow(job: loom.Job, cluster: LocalCluster) -> None:
    check_that_nothing_grows(job, Gateway(cluster.url, cluster.token), actors=1940, processes=60)


def test_a_stopped_mesh_says_so_and_may_be_stopped_again(job: loom.Job) -> None:
    procs = job.hosts.spawn_procs(name="brief")
    counters = procs.spawn("counters", Counter)
    part = counters.slice(hosts=0)
    assert part.add.call_one(1).get(timeout=BOUND) == 1
    procs.stop().get(timeout=BOUND)
    for call in (lambda: counters.add.call(1), lambda: part.add.call_one(1)):
        with pytest.raises(loom.SupervisionError, match="mesh 'counters' was stopped"):
            call().get(timeout=BOUND)
    procs.stop().get(timeout=BOUND)
    counters.stop().get(timeout=BOUND)


@pytest.mark.guarantees(
    "nothing lost", "A call on a stopped mesh says that it was stopped, also if it was under way"
)
def test_a_call_under_way_when_its_mesh_is_stopped_fails(job: loom.Job) -> None:
    procs = job.hosts.spawn_procs(name="brief")
    busy = procs.spawn("busy", Hang)
    assert len(busy.pid.call().get(timeout=BOUND)) == 2
    one, everyone = busy.slice(hosts=0).forever.call_one(), busy.forever.call()
    procs.stop().get(timeout=BOUND)
    for future in (one, everyone):
        with pytest.raises(loom.SupervisionError):
            future.get(timeout=BOUND)
