"""What is changed while a job runs is changed at the same step everywhere, and no process starts again."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import loom
from loom.train import Averaging, LiveConfig
from tests.support.gateways import await_true
from tests.system.train.trainers import BOUND, RATE, Watched, a_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def test_each_change_is_applied_at_one_step_by_all_groups_and_no_process_starts_again(job: loom.Job) -> None:
    watched = Watched(job, a_job(steps=400))
    watched.await_steps()
    pids = watched.pids()

    answers = [
        watched.change(learning_rate=0.25),
        watched.change(batch_size=64),
        watched.change(gradient_clipping=1.0),
        watched.change(optimizer="twin"),
    ]
    after = watched.pids()
    summary = watched.run.result(BOUND)

    assert after == pids
    (changes,) = {report.changes for report in summary.reports.values()}
    assert [(key, value) for _, key, value in changes] == [
        ("learning_rate", 0.25),
        ("batch_size", 64.0),
        ("gradient_clipping", 1.0),
        ("optimizer", "twin"),
    ]
    for answer, (step, key, _) in zip(answers, changes, strict=True):
        assert answer.keys() == {"train_0", "train_1"}
        assert all(key in one.changes for one in answer.values())
        assert {one.step for one in answer.values()} == {step}
    # The gradient is (1, 1, 1, 1), whose norm is 2: clipped, each step takes half of it.
    slower, clipped = changes[0][0], changes[2][0]
    expected = -(RATE * slower + 0.25 * (clipped - slower) + 0.125 * (400 - clipped))
    assert summary.metrics["weight"] == pytest.approx(expected, rel=1e-5)
    assert len(set(summary.hashes.values())) == 1


def test_the_way_of_the_learning_rate_changes_at_one_step(job: loom.Job) -> None:
    watched = Watched(job, a_job(steps=200, config=LiveConfig(learning_rate=RATE, schedule="linear")))
    watched.await_steps()

    for change in ({"accumulation": 2}, {"weight_decay": 0.0}, {"schedule": "constant"}, {"learning_rate": 0.25}):
        watched.change(**change)
    refused = watched.weaver.update_config("train", schedule="quick", beta1=0.5).get(BOUND)
    summary = watched.run.result(BOUND)

    (changes,) = {report.changes for report in summary.reports.values()}
    assert [(key, value) for _, key, value in changes] == [
        ("accumulation", 2),
        ("weight_decay", 0.0),
        ("schedule", "constant"),
        ("learning_rate", 0.25),
    ]
    linear = LiveConfig(learning_rate=RATE, schedule="linear")
    (constant, slower) = changes[2][0], changes[3][0]
    rates = [linear.rate(step, 200) if step < constant else RATE if step < slower else 0.25 for step in range(200)]
    assert summary.metrics["weight"] == pytest.approx(-sum(rates), rel=1e-9)
    assert summary.metrics["learning_rate"] == 0.25
    for answer in refused.values():
        assert "one of constant, cosine, linear" in answer.refused["schedule"]
        assert "the optimizer is sgd" in answer.refused["beta1"]


def test_what_makes_no_sense_is_refused_with_the_rule(job: loom.Job) -> None:
    watched = Watched(job, a_job(steps=100_000))
    watched.await_steps()

    answers = watched.weaver.update_config(
        "train", learning_rate=0, optimizer="lion", sync_every=4, batch_size="many"
    ).get(BOUND)
    of_job = watched.weaver.update_config("train_job", groups=0, drain_host=7).get(BOUND)
    watched.await_steps()
    summary = watched.stop()

    for answer in answers.values():
        assert "larger than 0" in answer.refused["learning_rate"]
        assert "one of sgd, twin, not lion" in answer.refused["optimizer"]
        assert "averages gradients" in answer.refused["sync_every"]
        assert "many" in answer.refused["batch_size"]
    assert "1 group at least" in of_job["train_job"].refused["groups"]
    assert "there is no host 7" in of_job["train_job"].refused["drain_host"]
    assert summary.ending == "stopped"
    assert all(not report.changes for report in summary.reports.values())


def test_a_group_is_added_and_another_removed(job: loom.Job) -> None:
    watched = Watched(job, a_job(steps=100_000))
    watched.await_steps()
    pids = watched.pids()

    watched.change("train_job", groups=3)
    watched.await_steps(groups=3)
    three = watched.pids()
    watched.change("train_job", groups=1)
    watched.await_event("group_removed", 2)
    watched.await_steps(groups=1)
    one = watched.pids()
    summary = watched.stop()

    assert three.keys() == {"train_0", "train_1", "train_2"}
    assert {replica: three[replica] for replica in pids} == pids
    assert one == {"train_0": pids["train_0"]}
    assert summary.reports["train_2"].restored.startswith("peers, at step")
    assert summary.failures == 0
    assert summary.metrics["weight"] == -RATE * summary.steps


def test_a_job_that_is_paused_pauses_its_groups_until_it_is_resumed(job: loom.Job) -> None:
    watched = Watched(job, a_job(steps=100_000))
    watched.await_steps()

    assert job.weaver.pause("train_job").get(BOUND)["train_job"].ok
    await_true(lambda: {job.weaver.replica(f"train_{n}").state for n in (0, 1)} == {"paused"})
    assert job.weaver.replica("train_job").state == "paused"
    before = job.weaver.replica("train_0").step
    assert job.weaver.resume("train_job").get(BOUND)["train_job"].ok
    await_true(lambda: (job.weaver.replica("train_0").step or 0) > (before or 0))
    watched.stop()


def test_a_group_is_moved_off_a_host_that_is_drained(job: loom.Job) -> None:
    watched = Watched(job, a_job(steps=100_000))
    watched.await_steps()
    pids, hosts = watched.pids(), watched.hosts()
    moving = next(replica for replica, host in hosts.items() if host == 1)
    staying = next(replica for replica, host in hosts.items() if host == 0)

    watched.change("train_job", drain_host=1)
    watched.await_event("group_moved")
    watched.await_steps()
    after, where = watched.pids(), watched.hosts()
    refused = watched.weaver.update_config("train_job", drain_host=0).get(BOUND)["train_job"]
    summary = watched.stop()

    assert set(where.values()) == {0}
    assert after[staying] == pids[staying]
    assert after[moving] != pids[moving]
    assert summary.reports[moving].restored.startswith("peers, at step")
    assert summary.failures == 0
    assert "the last that groups can be on" in refused.reason


def test_all_groups_move_one_after_the_other(job: loom.Job) -> None:
    watched = Watched(job, a_job(steps=100_000, groups=3))
    watched.await_steps()
    pids, hosts = watched.pids(), watched.hosts()
    moving = {replica for replica, host in hosts.items() if host == 0}
    assert len(moving) == 2

    watched.change("train_job", drain_host=0)
    watched.await_event("group_moved", 2)
    watched.await_steps()
    after, where = watched.pids(), watched.hosts()
    summary = watched.stop()

    assert set(where.values()) == {1}
    assert {replica for replica in pids if after[replica] != pids[replica]} == moving
    assert summary.metrics["weight"] == -RATE * summary.steps


def test_a_group_whose_device_failed_is_moved_where_the_policy_says_so(job: loom.Job) -> None:
    watched = Watched(job, a_job(steps=100_000, name="moved"))
    watched.await_steps()
    pids, hosts = watched.pids(), watched.hosts()
    (device, *_) = watched.weaver.replica("moved_0").devices  # both are on it: the machine's CPU

    watched.weaver.set_policy("moved", "respawn")
    watched.weaver.report_device_failure(device, "xid 79")
    event = watched.await_event("group_moved", 2)
    watched.await_steps()
    after, where = watched.pids(), watched.hosts()
    watched.weaver.reactivate(device, target=[])
    summary = watched.stop()

    assert "xid 79" in event.data["reason"]
    assert all(after[replica] != pids[replica] and where[replica] != hosts[replica] for replica in pids)
    assert summary.failures == 0
    assert summary.metrics["weight"] == -RATE * summary.steps


def test_a_group_stays_on_a_cpu_that_was_deactivated_if_there_is_no_other(job: loom.Job) -> None:
    watched = Watched(job, a_job(steps=100_000, name="stays"))
    watched.await_steps()
    pids = watched.pids()
    (device, *_) = watched.weaver.replica("stays_0").devices  # of both hosts: they are on one machine

    told = watched.weaver.deactivate_device(device).get(BOUND)
    try:
        stays = watched.await_event("group_stays", 2)
        watched.await_steps()
    finally:
        watched.weaver.reactivate(device, target=[])
    watched.await_true(lambda: len(watched.events("cpus_refused")) == 2)
    after = watched.pids()
    summary = watched.stop()

    assert {acknowledgement.ok for acknowledgement in told.values()} == {True}
    assert stays.data["reason"].startswith(f"{device}: inactive, deactivated by ")
    assert after == pids
    assert summary.failures == 0


def test_a_group_whose_device_failed_is_moved_by_default_and_not_if_the_policy_is_to_notify(
    job: loom.Job,
) -> None:
    watched = Watched(job, a_job(steps=100_000, name="default"))
    watched.await_steps()
    pids, hosts = watched.pids(), watched.hosts()
    (device, *_) = watched.weaver.replica("default_0").devices  # both are on it: the machine's CPU

    watched.weaver.report_device_failure(device, "xid 79")
    event = watched.await_event("group_moved", 2)
    watched.await_steps()
    after, where = watched.pids(), watched.hosts()
    watched.weaver.reactivate(device, target=[])
    watched.weaver.set_policy("default", "notify")
    watched.weaver.report_device_failure(device, "xid 80")
    watched.await_steps(30)
    later = watched.pids()
    watched.weaver.reactivate(device, target=[])
    summary = watched.stop()

    assert "xid 79" in event.data["reason"]
    assert all(after[replica] != pids[replica] and where[replica] != hosts[replica] for replica in pids)
    assert later == after
    assert summary.failures == 0
    assert summary.metrics["weight"] == -RATE * summary.steps


def test_the_only_group_of_a_job_takes_its_state_along_in_a_checkpoint(job: loom.Job, tmp_path: Path) -> None:
    alone = a_job(steps=100_000, groups=1, name="alone")
    saving = a_job(steps=100_000, groups=1, name="saving", checkpoints=str(tmp_path), checkpoint_every=10_000)
    watched = [Watched(job, alone), Watched(job, saving)]
    for one in watched:
        one.await_steps()

    refused = watched[0].weaver.update_config("alone_job", drain_host=0).get(BOUND)["alone_job"]
    watched[0].stop()
    watched[1].change("saving_job", drain_host=0)
    watched[1].await_event("group_moved")
    watched[1].await_steps()
    where = watched[1].hosts()
    summary = watched[1].stop()

    assert "alone_0 is the only group" in refused.reason
    assert where == {"saving_0": 1}
    assert summary.reports["saving_0"].restored.startswith("checkpoint 000001-step-")
    assert summary.metrics["weight"] == -RATE * summary.steps


@pytest.mark.parametrize("averaging", [Averaging.LOCAL_SGD, Averaging.DILOCO])
def test_how_often_local_steps_are_averaged_is_changed(job: loom.Job, averaging: Averaging) -> None:
    config = LiveConfig(learning_rate=RATE, sync_every=4)
    watched = Watched(job, a_job(steps=100_000, averaging=averaging, config=config, hash_every=1))
    watched.await_steps()

    watched.change(sync_every=8)
    watched.kill("train_1")
    watched.await_event("group_restored")
    watched.await_steps(20)
    summary = watched.stop()

    (step, key, value) = summary.reports["train_0"].changes[0]
    assert (key, value) == ("sync_every", 8.0)
    assert step % 4 == 0
    steps = list(summary.reports["train_0"].hashes)
    assert {after - before for before, after in itertools.pairwise(steps) if before > step} == {8}
    hashes = [report.hashes for report in summary.reports.values()]
    both = hashes[0].keys() & hashes[1].keys()
    assert both
    assert all(hashes[0][step] == hashes[1][step] for step in both)
    if averaging is Averaging.LOCAL_SGD:
        assert summary.metrics["weight"] == -RATE * summary.steps
