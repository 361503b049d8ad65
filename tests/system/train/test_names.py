"""Of two jobs with one name in two sessions of a user, only one trains: their replicas could not be told apart."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import loom
from loom_proxy.local import LocalCluster
from tests.system.train.trainers import BOUND, RATE, Watched, a_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.fixture
def other(cluster: LocalCluster) -> Iterator[loom.Job]:
    """Another session of the same user."""
    with loom.connect(cluster.url, cluster.token) as connected:
        yield connected


@pytest.mark.guarantees(
    "weaver",
    "A session's key registers replicas of that session only, and of two jobs with one name in two "
    "sessions only one trains",
)
def test_a_job_is_refused_while_another_session_has_one_of_its_name(job: loom.Job, other: loom.Job) -> None:
    watched = Watched(job, a_job(steps=100_000))
    watched.await_steps()
    pids = watched.pids()

    run = a_job(steps=5).start(other)
    error = run.exception(BOUND)
    other_name = Watched(other, a_job(steps=5, name="second")).run.result(BOUND)
    watched.await_steps()
    after = watched.pids()
    summary = watched.stop()
    again = a_job(steps=5).start(other).result(BOUND)

    assert isinstance(error, loom.errors.Conflict)
    assert error.code == "replica_taken"
    assert "a job 'train' of yours runs already: give this one another name, or end that one" in str(error)
    assert other_name.ending == again.ending == "finished"
    assert after == pids
    assert summary.failures == 0
    assert summary.metrics["weight"] == -RATE * summary.steps


def test_the_job_of_a_session_that_was_closed_leaves_its_name(cluster: LocalCluster, job: loom.Job) -> None:
    with loom.connect(cluster.url, cluster.token) as before:
        Watched(before, a_job(steps=100_000)).await_steps()

    summary = a_job(steps=5).start(job).result(BOUND)

    assert summary.ending == "finished"
    assert summary.metrics["weight"] == -RATE * 5
