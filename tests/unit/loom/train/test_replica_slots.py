"""What becomes of a slot when its group tells something: decided by what it tells, not by the words of an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from loom.errors import WrongArguments
from loom.train.controller.replica_slots import ReplicaSlot, SlotState
from loom.train.settings import Ending, Restore
from tests.unit.loom.train.slots import Group, Job


def test_the_first_groups_begin_together_when_all_are_ready() -> None:
    job = Job()
    job.tick()
    first, second = job.pool.started

    job.become_ready(first)
    job.tick()
    assert not first.assignments
    job.become_ready(second)
    job.tick()

    assert [one.restore for group in (first, second) for one in group.assignments] == [Restore.NOTHING] * 2


def test_the_others_begin_when_the_one_that_they_wait_for_is_removed() -> None:
    job = Job(groups=3)
    job.tick()
    first, second, _ = job.pool.started
    job.become_ready(first)
    job.become_ready(second)

    job.slots.resize(2)
    job.tick()

    assert [slot.state for slot in job.slots.all()] == [SlotState.TRAINING, SlotState.TRAINING, SlotState.OVER]


def test_a_group_that_found_nobody_with_the_state_begins_again() -> None:
    job = Job()
    group, _ = job.train()

    job.end(group, Ending.NO_PEERS, error="no group is left that has the state")

    assert group.stopped == ""
    assert len(group.assignments) == 2
    assert job.slots.failures == 0


def test_a_group_whose_error_mentions_no_peers_has_failed_all_the_same() -> None:
    job = Job()
    group, _ = job.train()

    job.end(group, Ending.FAILED, error="Traceback …\nNoPeers: said the user's code")

    assert group.stopped == "NoPeers: said the user's code"
    assert job.slots.failures == 1
    assert job.of("group_retried") == [("train_0", {"attempt": 1, "wait": 0.0})]


def test_a_group_that_cannot_begin_with_its_arguments_is_not_tried_again() -> None:
    job = Job()
    group, _ = job.train()

    job.end(group, Ending.REFUSED, error="WrongArguments: there is no folder /models/none")

    assert group.stopped == "WrongArguments: there is no folder /models/none"
    assert job.of("group_retried") == []
    assert job.of("job_smaller")[0][1]["reason"] == "WrongArguments: there is no folder /models/none"


def test_a_group_that_is_to_leave_and_finds_nobody_does_not_begin_again() -> None:
    job = Job()
    group, _ = job.train()
    slot = job.slots.all()[0]
    job.slots.remove(slot, "moved by hand")  # a text that begins as another reason's name

    job.end(group, Ending.NO_PEERS)

    assert len(group.assignments) == 1
    assert slot.ending is Ending.LEFT
    assert job.of("group_removed") == [("train_0", {"step": 1, "reason": "moved by hand"})]


def test_a_group_that_moves_trains_until_its_successor_is_ready_which_takes_its_place() -> None:
    job = Job()
    group, _ = job.train()
    slot = job.slots.all()[0]

    job.slots.drain(0)
    assert slot.state is SlotState.TRAINING
    (successor,) = job.prepare()
    assert slot.state is SlotState.MOVING
    assert group.told_to_leave
    job.end(group, Ending.LEFT, step=5, first_step_at=1.0)

    assert slot.state is SlotState.TRAINING
    assert [one.restore for one in successor.assignments] == [Restore.PEERS]
    assert job.of("group_moved") == [("train_0", {"reason": "host 0 is drained", "host": 1})]


def test_an_evicted_group_goes_to_another_host_and_is_no_failure() -> None:
    job = Job()
    group, other = job.train()
    slot = job.slots.all()[0]

    job.end(group, Ending.EVICTED, step=7, first_step_at=1.0)
    (successor,) = job.prepare()

    assert successor.host == other.host != group.host
    assert slot.state is SlotState.TRAINING
    assert (slot.failures, job.slots.failures) == (0, 0)
    assert [(replica, data["step"]) for replica, data in job.of("group_evicted")] == [("train_0", 7)]
    assert job.evicted == [group.host]


def test_a_job_whose_groups_are_all_evicted_begins_again_with_the_checkpoint(tmp_path: Path) -> None:
    job = Job(checkpoints=str(tmp_path))
    for group in job.train():
        job.end(group, Ending.EVICTED, step=7, first_step_at=1.0)
    assert not job.slots.are_over
    job.pool.draining.clear()  # there are new workers

    began = job.prepare()

    assert Restore.CHECKPOINT in [one.restore for group in began for one in group.assignments]


def test_a_group_that_finishes_while_it_moves_needs_no_successor() -> None:
    job = Job()
    group, _ = job.train()
    job.slots.drain(0)
    (successor,) = job.prepare()

    job.end(group, Ending.FINISHED, step=1000, first_step_at=1.0)

    assert job.slots.all()[0].ending is Ending.FINISHED
    assert successor.stopped


def test_a_group_that_moves_still_counts_as_one_of_the_job() -> None:
    job = Job()
    job.train()
    job.slots.drain(0)
    job.prepare()
    assert job.slots.all()[0].state is SlotState.MOVING

    job.slots.resize(2)

    assert job.of("group_added") == []


def test_a_successor_that_is_lost_is_replaced() -> None:
    job = Job()
    job.train()
    job.slots.drain(0)
    successor = job.slots.all()[0].successor

    job.find(successor, failure="process 100 is gone")

    assert job.slots.all()[0].successor not in (None, successor)
    assert job.slots.failures == 0


@pytest.mark.parametrize(("value", "rule"), [(7, "there is no host 7"), (0, "the only group")])
def test_a_host_that_cannot_be_drained_gets_groups_as_before(value: int, rule: str) -> None:
    job = Job(groups=1)
    job.train()

    with pytest.raises(WrongArguments, match=rule):
        job.slots.drain(value)

    assert not job.pool.draining


def test_a_host_of_which_its_agent_tells_that_it_is_drained_is_left_and_used_again() -> None:
    job = Job()
    job.train()
    job.slots.follow_drains({0: "", 1: "Slurm drains it"})
    job.slots.follow_drains({0: "Slurm drains it", 1: "Slurm drains it"})  # the last one
    job.slots.follow_drains({0: "Slurm drains it", 1: "Slurm drains it"})

    assert job.slots.all()[1].successor in job.pool.started
    assert job.pool.hosts() == [0]
    assert job.of("drain_refused") == [(None, {"host": 0, "reason": "host 0 is the last that groups can be on"})]

    job.slots.follow_drains({0: "Slurm drains it", 1: ""})  # then the other can be left
    job.slots.follow_drains({0: "Slurm drains it"})
    assert job.pool.hosts() == [1]


def test_a_job_that_fits_its_hosts_grows_and_shrinks_with_them() -> None:
    job = Job(groups="auto", count=2)
    job.train()
    job.pool.places = 3
    job.slots.fit()
    job.slots.fit()
    assert [slot.replica for slot in job.slots.staying()] == ["train_0", "train_1", "train_2"]
    assert job.of("group_added") == [("train_2", {})]

    job.pool.places = 2
    job.slots.follow_drains({0: "Slurm drains it"})
    job.slots.fit()
    leaving = [slot.replica for slot in job.slots.all() if slot.state is SlotState.REMOVING]
    assert leaving == [slot.replica for slot in job.slots.all() if slot.group is not None and slot.group.host == 0]
    assert leaving

    job.slots.stop_all()
    job.slots.fit()
    assert len(job.of("group_added")) == 1


def test_a_job_that_fits_its_hosts_is_smaller_without_a_host_until_another_is_there() -> None:
    job = Job(groups="auto", count=2)
    groups = job.train()
    job.pool.places = 0
    for group in groups:
        job.find(group, failure="its process is gone")
    job.tick()
    job.tick()
    assert [slot.replica for slot in job.slots.staying()] == ["train_1"], "one group always stays"
    assert job.of("group_removed") == [("train_0", {"step": 1, "reason": "there are fewer places for groups"})]

    job.pool.places = 2
    job.slots.fit()
    assert [slot.replica for slot in job.slots.staying()] == ["train_0", "train_1"]


def test_a_job_that_fits_its_hosts_adds_none_for_a_group_that_was_given_up_or_after_a_change_by_hand() -> None:
    job = Job(groups="auto", count=2)
    first, _ = job.train()
    job.end(first, Ending.REFUSED, error="WrongArguments: no")
    job.slots.fit()
    assert job.of("group_added") == []

    job.slots.resize(1)
    job.pool.places = 5
    job.slots.fit()
    assert job.of("group_added") == []


def test_a_group_without_another_place_leaves_a_drained_host_as_soon_as_there_is_one() -> None:
    job = Job()
    job.train()
    job.pool.full = True
    job.slots.follow_drains({1: "Slurm drains it"})
    assert job.slots.all()[1].successor is None

    job.pool.full = False
    job.slots.follow_drains({1: "Slurm drains it"})
    assert job.slots.all()[1].successor in job.pool.started


def test_a_host_that_a_user_has_drained_is_not_used_again_because_its_agent_tells_nothing() -> None:
    job = Job()
    job.train()
    job.slots.drain(1)
    job.slots.follow_drains({0: "", 1: "Slurm drains it"})
    job.slots.follow_drains({0: "", 1: ""})

    assert job.pool.hosts() == [0]


def test_a_slot_refuses_a_transition_that_makes_no_sense() -> None:
    slot = ReplicaSlot(0, "train_0", due=0.0)

    with pytest.raises(RuntimeError, match="train_0 cannot become removing: it is empty"):
        slot.leave(SlotState.REMOVING)
    slot.end(Ending.LEFT)
    with pytest.raises(RuntimeError, match="cannot become starting: it is over"):
        slot.assign(Group(0))  # type: ignore[arg-type]


def test_the_first_groups_begin_with_the_newest_checkpoint_if_there_is_a_folder() -> None:
    job = Job(checkpoints="/shared")

    first, second = job.prepare()

    assert [one.assignments[0].restore for one in (first, second)] == [Restore.CHECKPOINT] * 2


def test_a_group_whose_gpu_may_not_be_used_moves_as_soon_as_there_is_another() -> None:
    job = Job(groups=2)
    group, _ = job.train()
    job.pool.full = True
    job.pool.refused[id(group)] = "GPU-0: failed, Xid 79"

    job.tick()
    assert job.slots.all()[0].successor is None  # there is no free GPU
    assert not group.stopped

    job.pool.full = False
    job.tick()
    job.tick()  # a successor is looked for once
    (successor,) = job.prepare()
    job.tick()
    assert group.told_to_leave
    job.end(group, Ending.LEFT)

    assert job.slots.all()[0].group is successor
    moved = next(data for kind, _, data in job.events if kind == "group_moved")
    assert moved["reason"] == "GPU-0: failed, Xid 79"


def test_a_successor_whose_gpu_may_not_be_used_any_more_is_replaced() -> None:
    job = Job(groups=2)
    group, _ = job.train()
    job.pool.refused[id(group)] = "GPU-0: inactive"
    job.tick()
    successor = job.slots.all()[0].successor
    assert isinstance(successor, Group)

    job.pool.refused[id(successor)] = "GPU-1: inactive"
    job.tick()

    assert successor.stopped == "GPU-1: inactive"
    assert job.slots.all()[0].successor not in (None, successor)


def test_a_group_on_a_cpu_that_may_not_be_used_stays_if_it_has_no_other_place_and_a_job_says_so_once() -> None:
    job = Job(groups=2)
    job.tick()
    group = job.slots.all()[0].group
    assert isinstance(group, Group)
    why = "CPU-a-0: inactive, deactivated by anna"
    job.pool.refused[id(group)], job.pool.full = why, True

    for _ in range(3):
        job.tick()  # it does not train yet
    assert job.slots.all()[0].group is group
    assert not group.stopped
    stays = [data["reason"] for kind, _, data in job.events if kind == "group_stays"]
    assert stays == [f"{why}; no other device or host of the job is free"]

    job.pool.full = False
    job.tick()
    assert group.stopped == why


def test_a_group_that_does_not_train_yet_leaves_a_gpu_that_may_not_be_used_at_once() -> None:
    job = Job(groups=2)
    job.tick()
    group = job.slots.all()[0].group
    assert isinstance(group, Group)
    job.pool.refused[id(group)] = "GPU-0: failed, Xid 79"

    job.tick()
    job.tick()

    assert group.stopped == "GPU-0: failed, Xid 79"
    assert job.slots.all()[0].group not in (None, group)
    assert job.slots.failures == 0
