"""Workers that are found while the gateway runs, and sessions whose workers come back at other addresses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import loom
from loom.process.listen import free_ports
from tests.support.actors import Counter
from tests.support.gateways import TOKEN, Gateway
from tests.support.processes import read_json, run_loom, start

BOUND = 60.0


class Environment(loom.Actor):
    @loom.endpoint
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)


class Listed:
    """Workers in a file, which this starts, ends and replaces."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._workers: list[tuple[str, subprocess.Popen[str]]] = []

    def add(self, place: int | None = None) -> None:
        """Start a worker, at the end or in the place of one."""
        (port,) = free_ports(1)
        address = f"tcp://127.0.0.1:{port}"
        process = start("-m", "loom_gateway.workers.host", "--address", address, "--exit-with-parent")
        read_json(process)
        if place is None:
            self._workers.append((address, process))
        else:
            self._workers[place] = address, process

    def kill(self, place: int) -> None:
        _, process = self._workers[place]
        process.kill()
        process.communicate(timeout=BOUND)

    def write(self) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text("".join(f"{address}\n" for address, _ in self._workers))
        fresh.replace(self.path)

    def close(self) -> None:
        for _, process in self._workers:
            process.kill()
            process.communicate(timeout=BOUND)


@pytest.fixture
def listed(tmp_path: Path) -> Iterator[Listed]:
    workers = Listed(tmp_path / "workers")
    try:
        yield workers
    finally:
        workers.close()


@contextmanager
def gateway_on(*options: str) -> Iterator[Gateway]:
    gateway = Gateway([], *options)
    try:
        yield gateway.start()
    finally:
        gateway.close()


def await_event(job: loom.Job, name: str) -> None:
    for event in job.events(timeout=BOUND):
        if event.name == name:
            return
    raise AssertionError(f"no event {name}")


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_session_uses_a_worker_that_has_taken_the_place_of_another(listed: Listed) -> None:
    listed.add()
    listed.add()
    listed.write()
    with gateway_on("--workers", f"file:{listed.path}") as gateway, gateway.connect() as job:
        old = job.hosts.spawn_procs().spawn("old", Counter)
        assert list(old.add.call(1).get(BOUND).values()) == [1, 1]

        listed.kill(1)
        await_event(job, "host_lost")
        listed.add(1)
        listed.write()
        await_event(job, "host_back")

        assert job.refresh_hosts() == [1], "a program that waits for the host until it is told of it would wait on"
        assert job.refresh_hosts() == []
        new = job.hosts.spawn_procs().spawn("new", Counter, 5)
        assert list(new.add.call(1).get(BOUND).values()) == [6, 6]
        alone = job.hosts.slice(hosts=1).spawn_procs(per_host={"gpus": 2}).spawn("alone", Counter)
        assert list(alone.add.call(1).get(BOUND).values()) == [1, 1]
        assert old.slice(hosts=0).add.call_one(1).get(BOUND) == 2
        with pytest.raises(loom.SupervisionError):
            old.slice(hosts=1).add.call_one(1).get(BOUND)
        with gateway.connect() as another:
            counters = another.hosts.spawn_procs().spawn("counters", Counter)
            assert list(counters.add.call(1).get(BOUND).values()) == [1, 1]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_mesh_with_another_python_has_it_on_a_worker_that_has_moved(listed: Listed, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nWRAPPED=yes exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    listed.add()
    listed.add()
    listed.write()
    with gateway_on("--workers", f"file:{listed.path}") as gateway, gateway.connect() as job:
        other = job.hosts.with_python_executable(str(python))
        before = other.spawn_procs().spawn("before", Environment)
        assert list(before.variable.call("WRAPPED").get(BOUND).values()) == ["yes", "yes"]

        listed.kill(1)
        await_event(job, "host_lost")
        listed.add(1)
        listed.write()
        await_event(job, "host_back")

        after = other.spawn_procs().spawn("after", Environment)
        assert list(after.variable.call("WRAPPED").get(BOUND).values()) == ["yes", "yes"]
        alone = other.slice(hosts=1).spawn_procs().spawn("alone", Environment)
        assert alone.variable.call_one("WRAPPED").get(BOUND) == "yes"


@pytest.mark.slow
def test_a_session_waits_for_workers_that_are_not_there_yet(listed: Listed) -> None:
    listed.path.write_text("# none yet\n")
    with gateway_on("--workers", f"file:{listed.path}", "--workers-timeout", "60") as gateway:
        status = gateway.rest("/status")
        assert status["workers"] == []
        assert status["workers_missing"].startswith("0 of 1 workers of workers have been found in the file")
        said = run_loom("status", env={**os.environ, "LOOM_URL": gateway.url, "LOOM_TOKEN": TOKEN}).stdout
        assert status["workers_missing"] in said
        waiting = start("-c", CONNECTS, gateway.url, TOKEN)
        try:
            listed.add()
            listed.write()
            assert read_json(waiting) == [1]
            assert gateway.rest("/status")["workers_missing"] == ""
        finally:
            waiting.kill()
            waiting.communicate()


CONNECTS = """
import json, sys, loom
from tests.support.actors import Counter
with loom.connect(*sys.argv[1:]) as job:
    counters = job.hosts.spawn_procs().spawn("counters", Counter)
    print(json.dumps(list(counters.add.call(1).get(60).values())), flush=True)
    sys.stdin.read()
"""


def test_a_session_says_which_workers_are_missing(tmp_path: Path) -> None:
    (tmp_path / "workers").write_text("# none\n")
    with (
        gateway_on("--workers", f"file:{tmp_path}/workers", "--workers-timeout", "0.2") as gateway,
        pytest.raises(loom.WorkerUnreachable, match="0 of 1 workers of workers have been found"),
    ):
        gateway.connect()


@pytest.mark.slow
def test_named_meshes_are_the_jobs_state(listed: Listed) -> None:
    for _ in range(3):
        listed.add()
    first, *others = [address for address, _ in listed._workers]
    named = ["--worker", f"loaders={first}"]
    named += [option for address in others for option in ("--worker", f"trainers={address}")]
    with gateway_on(*named) as gateway, gateway.connect() as job:
        state = job.state()

        assert job.hosts.extent.nelements == 3
        assert (state.loaders.extent.nelements, state.trainers.extent.nelements) == (1, 2)
        counters = state.trainers.spawn_procs().spawn("counters", Counter)
        assert list(counters.add.call(1).get(BOUND).values()) == [1, 1]
        with pytest.raises(AttributeError, match="no host mesh 'workers'; it has loaders, trainers"):
            state.workers
