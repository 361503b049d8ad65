"""Hosts without network: the groups elsewhere go on without theirs, and take them back."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

import loom
from tests.support.needs import skipped_if
from tests.support.network.namespaces import FarCluster, missing
from tests.system.train.test_recovery import assert_exact
from tests.system.train.trainers import Watched, a_job

pytestmark = [skipped_if(missing()), pytest.mark.slow, pytest.mark.timeout(300)]

PATIENCE = 45.0


@pytest.fixture(scope="module")
def far() -> Iterator[FarCluster]:
    with FarCluster(gateway_options=["--worker-patience", str(PATIENCE)], workers=3) as cluster:
        yield cluster


@pytest.fixture
def job(far: FarCluster) -> Iterator[loom.Job]:
    with far.connected() as job:
        job.refresh_hosts()
        yield job


def trains_on(watched: Watched, host: int) -> str:
    return next(replica for replica, where in watched.hosts().items() if where == host)


def await_others(watched: Watched, silent: str, more: int = 30) -> None:
    """Wait until the other groups have made more steps."""
    least = {replica: step + more for replica, step in watched.steps().items() if replica != silent}
    watched.await_true(lambda: all(watched.steps().get(replica, 0) >= step for replica, step in least.items()))


def state_of(watched: Watched, replica: str) -> str:
    return str(watched.weaver.replica(replica).state)


@pytest.mark.guarantees(
    "training",
    "The groups on a host without network are left out, and taken back when it returns within the "
    "patience; no step is lost or made twice",
)
@pytest.mark.parametrize("host", [2, 0], ids=["host", "lighthouse"])
def test_a_silent_host_is_left_out_and_taken_back(far: FarCluster, job: loom.Job, host: int) -> None:
    watched = Watched(job, a_job(steps=100_000, groups=3))
    watched.await_steps()
    before, silent = watched.pids(), trains_on(watched, host)

    began = time.monotonic()
    with far.hosts.silence(f"worker{host}"):
        watched.await_event("group_silent")
        await_others(watched, silent)
        watched.await_true(lambda: state_of(watched, silent) == "failed")
        time.sleep(max(0.0, began + 0.75 * PATIENCE - time.monotonic()))  # the length of the cut is what is tested
    back = watched.await_event("group_back")
    watched.await_steps(10)
    watched.await_true(lambda: state_of(watched, silent) == "running")
    watched.await_true(lambda: {group.report.participants for group in watched.status().groups} == {3})
    after, failed, lighthouses = watched.pids(), watched.events("group_failed"), watched.events("lighthouse")
    summary = watched.stop()

    assert (back.replica, after, failed) == (silent, before, [])
    assert [event.data["host"] for event in lighthouses] == ([0] if host else [0, 1])
    assert_exact(summary, groups=3)


@pytest.mark.guarantees("training", "After the patience they go on elsewhere")
@pytest.mark.parametrize("host", [2, 0], ids=["host", "lighthouse"])
def test_a_host_that_stays_silent_is_lost_and_its_group_goes_on_elsewhere(
    far: FarCluster, job: loom.Job, host: int
) -> None:
    watched = Watched(job, a_job(steps=100_000, groups=3))
    watched.await_steps()
    silent = trains_on(watched, host)

    with far.hosts.silence(f"worker{host}"):
        failed = watched.await_event("group_failed")
        watched.await_event("group_restored")
        watched.await_steps(10)
        hosts = watched.hosts()
    summary = watched.stop()

    assert (failed.replica, summary.failures) == (silent, 1)
    assert set(hosts.values()) == {0, 1, 2} - {host}
    assert_exact(summary, groups=3)
