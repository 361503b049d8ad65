"""Functions that `job.run` runs while nobody waits for them, or nobody is connected."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import loom
from loom.wire.messages import Kind
from loom_proxy.local import LocalCluster
from loom_proxy.runs import KnownRuns
from tests.integration.session.run_functions import (
    IN_TIME,
    until_it_prints,
    wait_for,
)
from tests.support.gateways import attach


def test_a_detached_run_is_a_handle_at_once(job: loom.Job, tmp_path: Path) -> None:
    path = tmp_path / "go"
    before = time.time()
    run = job.run(wait_for, str(path), detach=True, name="waiter")
    assert isinstance(run, loom.RunHandle)
    assert (run.name, run.status, run.finished) == ("waiter", "running", None)
    assert repr(run) == "<RunHandle 'waiter' running>"
    with pytest.raises(loom.WaitTimeout):
        run.result(timeout=0.05)
    assert job.runs() == {"waiter": run}

    path.touch()

    assert run.result(IN_TIME) == str(path)
    assert run.result(0) == str(path)
    assert run.exception() is None
    assert run.status == "done"
    assert run.started is not None
    assert run.finished is not None
    assert before - 60 < run.started <= run.finished < time.time() + 60


def test_a_detached_run_can_be_awaited(job: loom.Job) -> None:
    async def wait() -> int:
        return await job.run(lambda: 5, detach=True)  # type: ignore[no-any-return]

    assert asyncio.run(wait()) == 5


def test_a_run_goes_on_while_nobody_is_connected(cluster: LocalCluster, tmp_path: Path) -> None:
    path = tmp_path / "go"
    job = loom.connect(cluster.url, cluster.token)
    job.run(wait_for, str(path), detach=True, name="waiter")
    job.run(lambda: 1 / 0, detach=True, name="failing").exception(IN_TIME)
    job.detach()
    path.touch()

    with attach(cluster, job.session) as later:
        runs = later.runs()
        assert list(runs) == ["waiter", "failing"]
        assert runs["waiter"].result(IN_TIME) == str(path)
        assert runs["waiter"].output() == "waiting\nthere\n"
        assert runs["waiter"].status == "done"
        assert runs["failing"].status == "failed"
        with pytest.raises(ZeroDivisionError):
            runs["failing"].result(IN_TIME)


def test_a_run_that_was_waited_for_goes_on_without_the_connection(cluster: LocalCluster, tmp_path: Path) -> None:
    path = tmp_path / "go"
    job = loom.connect(cluster.url, cluster.token)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(job.run, wait_for, str(path), name="waiter")
        deadline = time.monotonic() + IN_TIME
        while "waiter" not in job.runs():
            assert time.monotonic() < deadline
        job.detach()
        with pytest.raises(loom.SessionClosed):
            waiting.result(IN_TIME)

    with attach(cluster, job.session) as later:
        run = later.runs()["waiter"]
        path.touch()
        assert run.result(IN_TIME) == str(path)
        assert run.output() == "waiting\nthere\n"


def test_a_run_that_ends_under_a_later_client_tells_it(cluster: LocalCluster, tmp_path: Path) -> None:
    path = tmp_path / "go"
    job = loom.connect(cluster.url, cluster.token)
    job.run(wait_for, str(path), detach=True, name="waiter")
    with pytest.raises(loom.WaitTimeout):
        job.runs()["waiter"].result(timeout=0.01)
    job.detach()

    with attach(cluster, job.session) as later:
        run = later.runs()["waiter"]
        assert run.status == "running"
        assert run.started is not None
        until_it_prints(run, "waiting")
        path.touch()
        assert "".join(run.follow()) == "waiting\nthere\n"
        assert run.result(IN_TIME) == str(path)
        assert run.status == "done"
        assert list(later.events(timeout=0.01)) == []


def test_a_name_is_taken_while_its_run_is_going(job: loom.Job, tmp_path: Path) -> None:
    path = tmp_path / "go"
    first = job.run(wait_for, str(path), detach=True, name="waiter")
    with pytest.raises(loom.RunNameTaken, match=r"run 'waiter' is still going \(id \d+\)"):
        job.run(print, name="waiter")

    job._runs = KnownRuns(job._calls)  # as another program, that has not heard of it
    job._connection.on(Kind.RUN_STATE, job._runs.receive)
    with pytest.raises(loom.RunNameTaken, match="wait for it, cancel it, or take another name"):
        job.run(print, detach=True, name="waiter").result(IN_TIME)
    going = job.runs()["waiter"]
    assert going.id == first.id

    path.touch()
    going.result(IN_TIME)
    second = job.run(lambda: 2, detach=True, name="waiter")
    assert second.result(IN_TIME) == 2
    assert job.runs()["waiter"] is second


def test_the_oldest_runs_are_forgotten(job: loom.Job) -> None:
    first = job.run(lambda: 0, detach=True)
    first.future.get(IN_TIME)
    first._answer = None
    rest = [job.run(lambda number=number: number, detach=True, name=f"run {number}") for number in range(256)]
    assert [run.result(IN_TIME) for run in rest] == list(range(256))

    assert list(job.runs()) == [f"run {number}" for number in range(256)]
    with pytest.raises(loom.NoSuchRun, match="the last 256 others"):
        first.result(IN_TIME)
    with pytest.raises(loom.NoSuchRun):
        first.output()
    with pytest.raises(loom.NoSuchRun):
        first.cancel()
