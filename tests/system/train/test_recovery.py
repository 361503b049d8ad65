"""Groups are lost, and the others go on: nothing is applied twice, and all agree in the end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import loom
from loom.train import JobSummary, RetryBudget
from loom_proxy.local import LocalCluster
from tests.system.train.trainers import BOUND, RATE, Watched, a_job

pytestmark = pytest.mark.timeout(200)


def assert_exact(summary: JobSummary, groups: int) -> None:
    """Every step was applied once, and the replicas agree bit for bit."""
    assert summary.metrics["weight"] == -RATE * summary.steps
    hashes = [report.hashes for report in summary.reports.values()]
    assert len(hashes) == groups
    common = set.intersection(*(set(one) for one in hashes))
    assert common, hashes
    assert all(len({one[step] for one in hashes}) == 1 for step in common)


def assert_finished(summary: JobSummary, steps: int, groups: int) -> None:
    """All came to the last step, too."""
    assert (summary.ending, summary.steps) == ("finished", steps)
    assert len(summary.hashes) == groups
    assert len(set(summary.hashes.values())) == 1
    assert_exact(summary, groups)


@pytest.mark.slow
def test_a_killed_group_takes_its_state_from_the_others_and_no_step_is_applied_twice(job: loom.Job) -> None:
    watched = Watched(job, a_job(steps=100_000))
    watched.await_steps()
    pids = watched.pids()

    killed = watched.kill("train_1")
    restored = watched.await_event("group_restored")
    watched.await_steps(10)
    after = watched.pids()
    failed = watched.events("group_failed")[0]
    summary = watched.stop()

    assert_exact(summary, groups=2)
    assert failed.time - killed < 1.0
    assert restored.replica == "train_1"
    assert restored.data["restored"].startswith("peers, at step ")
    assert after["train_0"] == pids["train_0"]
    assert after["train_1"] != pids["train_1"]


@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_killed_group_within_5_seconds_and_is_replaced(job: loom.Job) -> None:
    watched = Watched(job, a_job(steps=100_000, spares=1))
    watched.await_spare()
    (spare,) = watched.status().spares

    killed = watched.kill("train_1")
    restored = watched.await_event("group_restored")
    after = watched.pids()
    watched.await_spare()
    summary = watched.stop()

    assert after["train_1"] == spare.pids
    assert restored.time - killed < 5.0
    assert_exact(summary, groups=2)


@pytest.mark.slow
def test_when_all_groups_are_killed_the_last_checkpoint_is_taken(job: loom.Job, tmp_path: Path) -> None:
    watched = Watched(job, a_job(steps=100_000, checkpoints=str(tmp_path), checkpoint_every=20))
    watched.await_true(lambda: watched.status().step >= 50 and bool(watched.events("checkpoint_written")))
    _kill_all([pid for pids in watched.pids().values() for pid in pids])

    watched.await_event("group_restored")
    restored = watched.events("group_restored")[0]
    watched.await_steps(10)  # both have come back
    summary = watched.stop()

    assert_exact(summary, groups=2)
    assert restored.data["restored"].startswith("checkpoint 00000")
    assert restored.data["step"] >= 20
    assert restored.data["step"] % 20 == 0


def _kill_all(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_group_that_fails_again_and_again_is_given_up_and_the_job_goes_on_smaller(job: loom.Job) -> None:
    budget = RetryBudget(attempts=1, second_wait=0.1)

    watched = Watched(job, a_job(steps=100_000, flawed="train_1", retries=budget))
    smaller = watched.await_event("job_smaller")
    in_weaver = next(event for event in job.weaver.events(after=0, follow=True) if event.kind == "job_smaller")
    watched.change(learning_rate=RATE)
    summary = watched.stop()

    assert smaller.replica == in_weaver.replica == "train_1"
    assert smaller.data["left"] == in_weaver.data["left"] == ["train_0"]
    assert smaller.data["failures"] == 2
    assert "train_1 is flawed" in smaller.data["reason"]
    assert summary.failures == 2
    assert summary.reports["train_0"].participants == 1
    assert summary.ending == "stopped"


@pytest.mark.slow
def test_a_job_whose_groups_all_fail_says_why(job: loom.Job) -> None:
    watched = Watched(job, a_job(steps=10, groups=1, flawed="*", retries=RetryBudget(attempts=1, second_wait=0.1)))

    with pytest.raises(loom.TrainingFailed, match=r"(?s)lost all its groups.*train_0 is flawed"):
        watched.run.result(BOUND)


@pytest.mark.slow
def test_a_group_that_hangs_is_killed_and_replaced(job: loom.Job) -> None:
    watched = Watched(job, a_job(steps=100_000, spares=1, silence=2.0))
    watched.await_spare()
    watched.await_steps()

    watched.kill("train_0", signal.SIGSTOP)
    failed = watched.await_event("group_failed")
    watched.await_event("group_restored")
    watched.await_steps(10)
    summary = watched.stop()

    assert "not answered" in failed.data["reason"]
    assert_exact(summary, groups=2)


@pytest.mark.slow
def test_a_lighthouse_that_is_lost_is_replaced_and_nobody_starts_again(job: loom.Job) -> None:
    watched = Watched(job, a_job(steps=250))
    watched.await_steps()
    pids = watched.pids()

    _kill_all([watched.events("lighthouse")[0].data["pid"]])
    watched.await_event("lighthouse", 2)
    watched.await_steps()
    after = watched.pids()
    summary = watched.run.result(BOUND)

    assert after == pids
    assert summary.failures == 0
    assert_finished(summary, 250, groups=2)


@pytest.mark.slow
def test_a_step_whose_gradient_is_not_finite_is_left_out_by_all(job: loom.Job) -> None:
    summary = Watched(job, a_job(steps=60, nan_at=(20, 21, 40))).run.result(BOUND)

    assert summary.steps == 60
    assert {report.skipped for report in summary.reports.values()} == {3}
    assert summary.metrics["weight"] == -RATE * 57
    assert len(set(summary.hashes.values())) == 1
    assert summary.failures == 0


@pytest.mark.slow
def test_the_job_goes_on_without_the_program_that_began_it(cluster: LocalCluster) -> None:
    job = loom.connect(cluster.url, cluster.token)
    watched = Watched(job, a_job(steps=1000))
    watched.await_steps()
    pids = watched.pids()
    job.detach()
    os.kill(pids["train_0"][0], signal.SIGKILL)  # nobody is there to see it

    with loom.connect(cluster.url, cluster.token, session=job.session) as later:
        run = later.runs()["train"]
        summary = run.result(BOUND)

    assert_finished(summary, 1000, groups=2)
    assert summary.failures == 1
    assert [one.name for one in run.trains] == ["train"]


@pytest.mark.slow
def test_when_a_host_is_lost_its_groups_and_the_lighthouse_go_to_another(own_cluster: LocalCluster) -> None:
    with loom.connect(own_cluster.url, own_cluster.token) as job:
        watched = Watched(job, a_job(steps=100_000))
        watched.await_steps()
        pids, hosts = watched.pids(), watched.hosts()
        lost = next(replica for replica, host in hosts.items() if host == 0)
        (stays,) = pids.keys() - {lost}
        assert watched.events("lighthouse")[0].data["host"] == 0

        _kill_all([own_cluster.pids[1]])
        watched.await_event("group_restored")
        watched.await_steps(10)
        after = watched.status()
        summary = watched.stop()

    assert {group.host for group in after.groups} == {1}
    assert watched.training.groups == len(after.groups)
    assert [group.pids for group in after.groups if group.replica == stays] == [pids[stays]]
    assert summary.reports[lost].restored.startswith("peers, at step ")
    assert_exact(summary, groups=2)


@pytest.mark.slow
def test_a_lighthouse_does_not_wait_for_the_host_that_lost_it(own_cluster: LocalCluster) -> None:
    """That host may be going too, and to start a process there would take half a minute, and then fail."""
    with loom.connect(own_cluster.url, own_cluster.token) as job:
        watched = Watched(job, a_job(steps=100_000))
        watched.await_steps()
        pids = watched.pids()
        (lighthouse,) = watched.events("lighthouse")
        assert lighthouse.data["host"] == 0

        worker = own_cluster.pids[1]
        os.kill(worker, signal.SIGSTOP)
        try:
            _kill_all([lighthouse.data["pid"]])
            watched.await_true(lambda: len(watched.events("lighthouse")) == 2)
        finally:
            os.kill(worker, signal.SIGCONT)
        watched.await_steps(10)
        assert watched.events("lighthouse")[1].data["host"] == 1
        assert watched.pids() == pids
        summary = watched.stop()

    assert_exact(summary, groups=2)


@pytest.mark.slow
def test_a_group_that_its_host_does_not_prepare_is_tried_on_another_next() -> None:
    """The worker hangs, its host seems well: a process that does not start is given up 30 s after the patience."""
    with (
        LocalCluster(2, gateway_options=["--worker-patience", "1"]) as own_cluster,
        loom.connect(own_cluster.url, own_cluster.token) as job,
    ):
        watched = Watched(job, a_job(steps=100_000))
        watched.await_steps()
        pids, hosts = watched.pids(), watched.hosts()
        lost = next(replica for replica, host in hosts.items() if host == 0)

        worker = own_cluster.pids[1]
        os.kill(worker, signal.SIGSTOP)
        try:
            _kill_all(pids[lost])
            watched.await_event("group_failed", 2)
            watched.await_event("group_restored")
        finally:
            os.kill(worker, signal.SIGCONT)
        watched.await_steps(10)
        failed, after = watched.events("group_failed"), watched.hosts()
        summary = watched.stop()

    assert [event.data["host"] for event in failed] == [0, 0]
    assert "could not be prepared" in failed[1].data["reason"]
    assert set(after.values()) == {1}
    assert_exact(summary, groups=2)
