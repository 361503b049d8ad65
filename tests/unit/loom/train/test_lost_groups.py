"""Groups that are lost, silent, stuck or fail, and what becomes of their slots."""

from __future__ import annotations

import time
from typing import Any

import pytest

from loom.train import RetryBudget, TrainerReport
from loom.train.settings import Ending, Restore
from tests.unit.loom.train.slots import Group, Job


@pytest.mark.guarantees("training", "A process that hangs on a host that answers is replaced")
@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({"failure": "process 100 is gone"}, "process 100 is gone"),
        ({"silent": 5.0}, "its processes have not answered for 5.0 s"),
        (
            {"ended": TrainerReport(ending=Ending.FAILED, error="Traceback\nValueError: flawed")},
            "ValueError: flawed",
        ),
    ],
)
def test_a_group_that_is_lost_is_killed_and_replaced(found: dict[str, Any], reason: str) -> None:
    job = Job()
    group, _ = job.train()

    job.find(group, **found)
    (replacement,) = job.prepare()

    assert (group.stopped, job.killed) == (reason, [group])
    assert [one.restore for one in replacement.assignments] == [Restore.PEERS]
    job.make_step(replacement, 2)
    assert [replica for replica, _ in job.of("group_restored")] == ["train_0"]


def test_a_short_silence_is_no_loss() -> None:
    job = Job(silence=5.0)
    group, _ = job.train()

    job.find(group, silent=4.9)

    assert not group.stopped


@pytest.mark.guarantees(
    "training",
    "The groups on a host without network are left out, and taken back when it returns within the "
    "patience; no step is lost or made twice",
)
def test_a_group_whose_host_is_silent_too_is_waited_for_and_taken_back() -> None:
    job = Job(silence=5.0)
    group, other = job.train()
    job.silent = {group.host}

    for seconds in (5.0, 10.0, 55.0):
        job.find(group, silent=seconds)
    assert job.of("group_silent") == [("train_0", {"host": 0, "pids": [100], "step": 1})]
    job.silent = set()
    job.find(group, silent=60.0)  # its connection comes back later than its host's
    job.find(group, silent=0.0, report=TrainerReport(step=90, first_step_at=1.0))

    assert job.of("group_back") == [("train_0", {"host": 0, "pids": [100], "step": 90})]
    assert (group.stopped, job.slots.failures, job.of("group_failed")) == ("", 0, [])
    job.find(group, silent=5.0)  # this time its host answers: it hangs
    assert group.stopped
    assert not other.stopped


@pytest.mark.parametrize("spare", [True, False])
def test_the_others_do_not_wait_for_the_answers_of_a_silent_host(spare: bool) -> None:
    job = Job(silence=5.0)
    group, other = job.train()
    job.silent, job.pool.spares = {group.host}, [Group(other.host)] if spare else []

    job.find(group, silent=4.9)
    too_early = other.broken_off
    for seconds in (5.0, 10.0):
        job.find(group, silent=seconds)

    assert (too_early, other.broken_off, group.broken_off) == (0, 1, 0)


def test_the_others_do_wait_for_a_group_that_hangs_until_it_is_killed() -> None:
    job = Job(silence=5.0)
    group, other = job.train()

    job.find(group, silent=5.0)

    assert group.stopped
    assert other.broken_off == 0


def test_a_group_that_does_not_come_back_with_its_host_is_replaced() -> None:
    job = Job(silence=5.0)
    group, _ = job.train()
    job.silent = {group.host}
    job.find(group, silent=20.0)

    job.silent = set()
    job.find(group, silent=40.0)
    assert not group.stopped
    job.find(group, silent=45.0)

    assert group.stopped == "its processes have not answered for 45.0 s"


def test_a_spare_takes_the_place_of_a_group_whose_host_is_silent() -> None:
    job = Job(silence=5.0)
    group, other = job.train()
    job.silent, job.pool.spares = {group.host}, [Group(other.host)]

    job.find(group, silent=5.0)

    assert group.stopped == "its processes have not answered for 5.0 s"


def test_a_group_whose_host_is_silent_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    job = Job(stuck=10.0)
    group, other = job.train()
    job.silent = {group.host}
    job.find(group, silent=5.0)

    for second in range(50):
        now = 1000.0 + second
        job.make_step(other, second)
        job.tick()
    job.silent = set()
    job.find(group, silent=0.0, report=TrainerReport(step=1, first_step_at=1.0))
    job.make_step(other, 51)
    job.tick()

    assert not group.stopped


def test_a_group_does_not_begin_anew_while_a_silent_host_has_the_state() -> None:
    job = Job()
    group, other = job.train()
    job.silent = {group.host}
    job.find(group, silent=5.0)

    job.find(other, failure="process 101 is gone")
    (replacement,) = job.prepare()
    assert not replacement.assignments
    job.silent = set()
    job.find(group, silent=0.0, report=TrainerReport(step=2, first_step_at=1.0))

    assert [one.restore for one in replacement.assignments] == [Restore.PEERS]


def test_a_silent_group_is_not_waited_for_when_the_others_finish() -> None:
    job = Job()
    group, other = job.train()
    job.silent = {group.host}
    job.find(group, silent=5.0)

    job.end(other, Ending.FINISHED, step=1000, first_step_at=1.0)

    assert job.slots.are_over


@pytest.mark.guarantees(
    "training", "The job's lighthouse leaves a silent host if groups wait for it, and only then"
)
def test_the_lighthouse_leaves_a_silent_host_if_the_groups_elsewhere_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    job = Job(silence=5.0)
    group, other = job.train()
    job.silent = {0}

    for second in range(10):  # the line from here is cut, and not the one between the hosts
        now = 1000.0 + second
        job.make_step(other, second)
        job.tick()
    assert not job.lighthouses_left
    now += 5.0
    job.tick()
    job.slots.lighthouse_moved()

    assert job.lighthouses_left == [0]
    assert (group.moved, other.moved) == ([("http://lighthouse", True)], [("http://lighthouse", False)])
    job.lighthouses_left.clear()
    job.silent = {0, 1}  # nothing is known of any group
    job.tick()
    assert not job.lighthouses_left


def test_a_group_that_fails_too_often_is_given_up() -> None:
    job = Job(retries=RetryBudget(attempts=0))
    group, other = job.train()

    job.find(group, failure="process 100 is gone")

    assert job.slots.all()[0].ending is Ending.FAILED
    assert [(replica, data["left"]) for replica, data in job.of("job_smaller")] == [("train_0", ["train_1"])]
    assert not job.slots.are_over
    job.find(other, failure="process 100 is gone")
    assert job.slots.are_over


def test_a_group_that_was_well_for_long_enough_has_all_attempts_again() -> None:
    job = Job(retries=RetryBudget(attempts=1, healthy_steps=20))
    groups = job.train()
    slots = job.slots.all()

    for group, slot, step in zip(groups, slots, (19, 20), strict=True):
        slot.failures = 1
        job.make_step(group, step)
        job.find(group, failure="process 100 is gone")

    assert [slot.ending for slot in slots] == [Ending.FAILED, None]


def test_a_group_that_is_restored_is_not_waited_for_when_the_others_finish() -> None:
    job = Job()
    group, other = job.train()
    job.find(group, failure="process 100 is gone")

    job.end(other, Ending.FINISHED, step=1000, first_step_at=1.0)

    assert job.slots.are_over


def test_a_group_is_stuck_when_it_makes_no_step_while_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    job = Job(groups=3, stuck=10.0)
    slow, fast, paused = job.train()

    for second in range(25):
        now = 1000.0 + second
        job.make_step(fast, second)
        job.find(paused, report=TrainerReport(step=3, first_step_at=1.0, paused=second < 20))
        job.tick()
        assert bool(slow.stopped) == (second > 10)

    assert slow.stopped == "it has made no step for 11.0 s, while others did"
    assert not paused.stopped
    assert not fast.stopped


def test_when_nobody_makes_a_step_nobody_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    job = Job(stuck=10.0)
    groups = job.train()

    now += 30.0
    job.tick()

    assert not any(group.stopped for group in groups)


def test_a_group_that_ends_well_and_whose_processes_go_then_is_not_lost() -> None:
    job = Job()
    group, _ = job.train()

    job.find(group, failure="process 100 is gone", ended=TrainerReport(step=1000, ending=Ending.FINISHED))

    assert job.slots.all()[0].ending is Ending.FINISHED
    assert job.slots.failures == 0
