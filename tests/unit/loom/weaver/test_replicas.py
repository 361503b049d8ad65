"""The states of a replica, and what is known of its steps."""

from __future__ import annotations

import math

import pytest

from loom.weaver.replicas import TRANSITIONS, USUAL_STEPS, Cause, Replica
from loom.weaver.states import LIVING, ReplicaState

START = 1_700_000_000.0


def replica_in(state: ReplicaState) -> Replica:
    replica = Replica("train_0")
    replica.state = state
    return replica


@pytest.mark.parametrize(
    ("state", "cause", "after"),
    [
        ("registering", "resumed", "running"),
        ("registering", "stepped", "running"),
        ("running", "paused", "paused"),
        ("paused", "resumed", "running"),
        ("running", "drained", "draining"),
        ("running", "no step", "stalled"),
        ("stalled", "stepped", "running"),
        ("stalled", "link lost", "recovering"),
        ("running", "link lost", "recovering"),
        ("recovering", "resumed", "running"),
        ("recovering", "paused", "paused"),
        ("recovering", "silent", "failed"),
        ("running", "died", "failed"),
        ("failed", "registered", "registering"),
        ("failed", "resumed", "running"),
        ("finished", "registered", "registering"),
        ("draining", "said that it finished", "finished"),
        ("running", "said that it failed", "failed"),
    ],
)
def test_a_cause_leads_to_a_state(state: str, cause: str, after: str) -> None:
    replica = replica_in(ReplicaState(state))

    assert replica.move(Cause(cause), START) == state

    assert replica.state == after
    assert replica.changed == START


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ("paused", "stepped"),
        ("draining", "stepped"),
        ("draining", "paused"),
        ("paused", "no step"),
        ("stalled", "resumed"),
        ("failed", "link lost"),
        ("failed", "died"),
        ("finished", "died"),
        ("finished", "silent"),
        ("running", "resumed"),
    ],
)
def test_a_cause_that_says_nothing_new_changes_nothing(state: str, cause: str) -> None:
    replica = replica_in(ReplicaState(state))

    assert replica.move(Cause(cause), START) is None

    assert replica.state == state
    assert replica.changed == 0.0


def test_every_cause_is_in_the_table_and_every_state_can_be_entered_and_left() -> None:
    entered = {after for table in TRANSITIONS.values() for before, after in table.items() if before is not after}
    left = {before for table in TRANSITIONS.values() for before, after in table.items() if before is not after}

    assert set(TRANSITIONS) == set(Cause)
    assert entered == left == set(ReplicaState)


def test_whatever_lives_can_die() -> None:
    for cause in (Cause.DIED, Cause.SILENT, Cause.SAID_FAILED):
        assert set(TRANSITIONS[cause]) == LIVING


def test_the_usual_step_time_is_not_moved_by_a_few_slow_steps() -> None:
    replica = Replica("train_0")
    time = START
    for step in range(20):
        time += 30.0 if step in (5, 11) else 0.5
        replica.take_step(step, time, time)

    assert replica.baseline_step_time() == pytest.approx(0.5)


def test_steps_that_were_not_reported_count() -> None:
    replica = Replica("train_0")
    for step in range(0, 60, 10):
        replica.take_step(step, START + step * 0.25, START)

    assert replica.baseline_step_time() == pytest.approx(0.25)


def test_there_is_no_usual_step_time_before_there_are_a_few_steps() -> None:
    replica = Replica("train_0")
    for step in range(3):
        replica.take_step(step, START + step, START)

    assert replica.baseline_step_time() is None


def test_going_back_to_a_checkpoint_is_progress_but_no_step_time() -> None:
    replica = Replica("train_0")
    for step in [*range(10), 3, 4]:
        progress = replica.take_step(step, START + step, START + step)

    assert progress
    assert replica.step == 4
    assert replica.baseline_step_time() == pytest.approx(1.0)


def test_the_same_step_again_is_no_progress() -> None:
    replica = Replica("train_0")
    replica.take_step(5, START, START)

    assert not replica.take_step(5, START + 1, START + 1)
    assert replica.progress == START


def test_a_clock_that_was_turned_back_makes_no_step_time() -> None:
    replica = Replica("train_0")
    for step in range(10):
        replica.take_step(step, START - step, START)

    assert replica.baseline_step_time() is None


def test_a_replica_is_stored_and_read_back() -> None:
    replica = replica_in(ReplicaState.PAUSED)
    replica.begin_instance("one", 5.0)
    replica.take_step(7, START, START)
    replica.config = {"learning_rate": 0.5}

    again = Replica.from_dict(replica.to_dict())

    assert again.to_dict() == replica.to_dict()
    assert again.state is ReplicaState.PAUSED


def test_a_new_process_begins_without_what_the_one_before_reported() -> None:
    replica = Replica("train_0")
    for step in range(10):
        replica.take_step(step, START + step, START)

    replica.begin_instance("two", 5.0)

    assert (replica.step, replica.seq, replica.metrics, replica.baseline_step_time()) == (None, 0, {}, None)


def test_a_replica_is_idle_since_its_last_step_not_since_its_last_sign() -> None:
    replica = Replica("train_0")
    replica.progress = replica.heard = START
    assert replica.idle(START) == math.inf
    replica.take_step(1, START, START)
    replica.take_step(1, START + 5, START + 5)
    assert replica.idle(START + 7) == 7


def test_a_running_replica_may_take_a_few_usual_steps_before_it_is_idle() -> None:
    replica = Replica("train_0", ReplicaState.RUNNING)
    for step in range(5):
        replica.take_step(step, START + 60 * step, START + 60 * step)
    last = START + 240
    assert replica.idle(last + 60 * USUAL_STEPS) == 0
    assert replica.idle(last + 60 * USUAL_STEPS + 1) == 1
    replica.state = ReplicaState.STALLED
    assert replica.idle(last + 60) == 60


def test_a_step_time_is_usual_from_the_first_one_on_for_what_is_idle() -> None:
    replica = Replica("train_0", ReplicaState.RUNNING)
    replica.take_step(0, START, START)
    assert replica.idle(START + 60) == 60
    replica.take_step(1, START + 60, START + 60)
    assert replica.idle(START + 60 + 60 * USUAL_STEPS) == 0
