"""Workers that are found while the gateway runs, and sessions whose workers come back at other addresses."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import loom
from tests.support.actors import Counter
from tests.support.gateways import TOKEN
from tests.support.listed_workers import Listed, gateway_on, listed
from tests.support.processes import read_json, run_loom, start

__all__ = ["listed"]

BOUND = 60.0


class Environment(loom.Actor):
    @loom.endpoint
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)


def await_event(job: loom.Job, name: str, count: int = 1) -> None:
    for event in job.events(timeout=BOUND):
        count -= event.name == name
        if not count:
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
def test_hosts_that_join_are_used_by_the_sessions_that_live(listed: Listed, tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "brought.py").write_text("def where():\n    return __file__\n")
    listed.add()
    listed.write()
    with gateway_on("--workers", f"file:{listed.path}") as gateway, gateway.connect(persist=True) as job:
        job.sync(tmp_path / "project")
        alone = job.hosts
        listed.add()
        listed.write()
        await_event(job, "host_joined")
        assert len(job.hosts) == 1
        assert job.refresh_hosts() == [1]
        assert job.refresh_hosts() == []

        assert len(job.state().workers) == 2
        both = job.hosts.spawn_procs(per_host={"gpus": 2}).spawn("both", Importing)
        assert sorted(both.where.call().get(BOUND).values()) == [True] * 4
        assert len(alone.spawn_procs().spawn("alone", Counter).add.call(1).get(BOUND)) == 1
        second = job.hosts.slice(hosts=1).spawn_procs().spawn("second", Counter)
        assert second.add.call_one(1).get(BOUND) == 1
        assert job.run(spawned_on, job.hosts) == 2

        listed.kill(0)
        await_event(job, "host_lost")
        listed.add()
        listed.write()
        await_event(job, "host_joined", 2)
        assert job.refresh_hosts() == [2]
        left = job.hosts.slice(hosts=slice(1, 3)).spawn_procs().spawn("left", Counter)
        assert list(left.add.call(1).get(BOUND).values()) == [1, 1]
        assert second.add.call_one(1).get(BOUND) == 2
        with pytest.raises(loom.SupervisionError, match="worker host 0 at"):
            job.hosts.spawn_procs().initialized.get(BOUND)
        living = job.living_hosts()
        assert dict(living.extent) == {"hosts": 2}
        those = living.spawn_procs(per_host={"gpus": 2}).spawn("those", Counter)
        assert list(those.add.call(1).get(BOUND).values()) == [1] * 4
        last = living.slice(hosts=1).spawn_procs()
        assert last.host_mesh.spawn_procs().spawn("last", Counter).add.call_one(1).get(BOUND) == 1
        assert job.run(spawned_on, living) == 2

        listed.kill(2)
        await_event(job, "host_lost", 2)
        with pytest.raises(loom.SupervisionError, match="worker host 2 at"):
            living.slice(hosts=1).spawn_procs().initialized.get(BOUND)
        assert "is gone" in living._repr_html_()
        alone = job.living_hosts().spawn_procs().spawn("alone", Counter)
        assert alone.add.call_one(1).get(BOUND) == 1
        listed.add(2)
        listed.write()
        await_event(job, "host_back")
        assert list(living.spawn_procs().spawn("again", Counter).add.call(1).get(BOUND).values()) == [1, 1]
        job.detach()
        with gateway.connect(session=job.session) as again:
            assert len(again.hosts) == 3
            there = again.hosts.slice(hosts=2).spawn_procs().spawn("there", Counter)
            assert there.add.call_one(1).get(BOUND) == 1


def spawned_on(hosts: Any) -> int:
    procs = hosts.spawn_procs()
    procs.initialized.get()
    return len(procs)


class Importing(loom.Actor):
    @loom.endpoint
    def where(self) -> bool:
        import brought

        return brought.where().endswith("brought.py")


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
