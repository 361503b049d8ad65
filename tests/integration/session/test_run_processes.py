"""Processes that functions of `job.run` start, and sessions that they open."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

import loom
from loom_proxy.local import LocalCluster
from tests.integration.calls.test_failures import driver_pid
from tests.integration.session.run_functions import (
    IN_TIME,
)
from tests.support.actors import Counter
from tests.support.gateways import await_true


def start_and_wait(path: str, detached: bool) -> int:
    """Start a process that starts another, and wait for it."""
    script = f"sleep 1000 & echo $$ $! > {path}.new; mv {path}.new {path}; wait"
    return subprocess.run(["sh", "-c", script], start_new_session=detached, check=False).returncode


async def start_and_wait_async(path: str, detached: bool) -> int | None:
    return await asyncio.to_thread(start_and_wait, path, detached)


def started(path: Path) -> list[psutil.Process]:
    await_true(path.exists)
    return [psutil.Process(int(pid)) for pid in path.read_text().split()]


@pytest.mark.guarantees(
    "nothing lost",
    "The processes that runs have started end when the run is cancelled, with the session, or with a "
    "driver that is killed",
)
@pytest.mark.parametrize("function", [start_and_wait, start_and_wait_async])
def test_the_processes_of_a_run_end_when_it_is_cancelled(job: loom.Job, tmp_path: Path, function: Any) -> None:
    other = job.run(start_and_wait, str(tmp_path / "other"), False, detach=True, name="other")
    run = job.run(function, str(tmp_path / "pids"), True, detach=True)
    processes, others = started(tmp_path / "pids"), started(tmp_path / "other")
    assert run.cancel()
    assert psutil.wait_procs(processes, IN_TIME)[1] == []
    with pytest.raises(loom.OperationCancelled):
        run.result(IN_TIME)
    assert all(process.is_running() for process in others)
    assert other.status == "running"


@pytest.mark.guarantees(
    "nothing lost",
    "The processes that runs have started end when the run is cancelled, with the session, or with a "
    "driver that is killed",
)
@pytest.mark.parametrize("detached", [False, True])
def test_the_processes_of_a_run_end_with_the_session(cluster: LocalCluster, tmp_path: Path, detached: bool) -> None:
    with loom.connect(cluster.url, cluster.token) as job:
        job.run(start_and_wait, str(tmp_path / "pids"), detached, detach=True)
        processes = started(tmp_path / "pids")
    assert psutil.wait_procs(processes, IN_TIME)[1] == []


def test_the_processes_of_a_run_end_with_a_driver_that_is_killed(cluster: LocalCluster, tmp_path: Path) -> None:
    job = loom.connect(cluster.url, cluster.token)
    job.run(start_and_wait, str(tmp_path / "pids"), False, detach=True)
    processes = started(tmp_path / "pids")
    os.kill(driver_pid(cluster, job), signal.SIGKILL)
    assert psutil.wait_procs(processes, IN_TIME)[1] == []
    job.close()


# -- code in the cluster that opens sessions ----------------------------------------------------------------------


def add_apart(url: str, token: str | None) -> tuple[str, int]:
    with loom.connect(url, token) as own:
        counters = own.hosts.slice(hosts=0).spawn_procs().spawn("counters", Counter)
        return own.session, counters.add.call_one(2).get(IN_TIME)


class Opens(loom.Actor):
    @loom.endpoint
    def add_apart(self, url: str, token: str | None) -> tuple[str, int]:
        return add_apart(url, token)


@pytest.mark.parametrize("where", ["a run", "an actor"])
def test_code_in_the_cluster_opens_a_session_with_the_token_that_it_is_given_and_none_without(
    cluster: LocalCluster, where: str
) -> None:
    with loom.connect(cluster.url, cluster.token) as job:
        if where == "a run":
            opened = job.run(add_apart, cluster.url, cluster.token)
            with pytest.raises(loom.AuthenticationError, match="needs a token: pass token="):
                job.run(add_apart, cluster.url, None)
        else:
            opens = job.hosts.slice(hosts=0).spawn_procs().spawn("opens", Opens)
            opened = opens.add_apart.call_one(cluster.url, cluster.token).get(IN_TIME)
            with pytest.raises(loom.ActorError, match="needs a token: pass token="):
                opens.add_apart.call_one(cluster.url, None).get(IN_TIME)
    assert opened[0] != job.session
    assert opened[1] == 2
