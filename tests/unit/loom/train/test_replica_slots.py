"""What becomes of a slot when its group tells something: decided by what it tells, not by the words of an error."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loom.errors import WrongArguments
from loom.train import FaultTolerantJob, RetryBudget, TrainerActor, TrainerReport
from loom.train.controller.group import GroupState
from loom.train.controller.replica_slot import ReplicaSlot, SlotState
from loom.train.controller.replica_slots import ReplicaSlots
from loom.train.settings import Ending, Restore
from loom.train.spec import Assignment


class Group:
    """Stands in for the processes of a group: it notes what it is told."""

    def __init__(self, host: int) -> None:
        self.host = host
        self.state = GroupState.PREPARING
        self.members, self.pids, self.store = [1], [100 + host], ("host", 1)
        self.procs = SimpleNamespace(name="procs")
        self.report = TrainerReport()
        self.ended: TrainerReport | None = None
        self.failure, self.silent = "", 0.0
        self.assignments: list[Assignment] = []
        self.told_to_leave = False
        self.moved: list[tuple[str, bool]] = []
        self.broken_off = 0
        self.stopped = ""

    def begin(self, assignment: Assignment) -> None:
        self.state = GroupState.TRAINING
        self.assignments.append(assignment)

    def rest(self) -> None:
        self.state, self.ended = GroupState.READY, None

    def leave(self) -> None:
        self.told_to_leave = True

    def move(self, lighthouse: str, behind: bool) -> None:
        self.moved.append((lighthouse, behind))

    def break_off(self) -> None:
        self.broken_off += 1

    def stop(self, reason: str) -> None:
        self.state, self.stopped = GroupState.OVER, reason


class Pool:
    """Starts groups on the hosts in turn."""

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
        self.session = SimpleNamespace(hosts=lambda: list(range(hosts)))
        self.started: list[Group] = []
        self.spares: list[Group] = []
        self.draining: set[int] = set()
        self.refused: dict[int, str] = {}  # why a group has to leave its GPU, by the group's id
        self.full = False  # whether there is no free GPU

    def refusal(self, group: Group | None) -> str:
        return self.refused.get(id(group), "")

    def hosts(self) -> list[int]:
        return [host for host in range(self._hosts) if host not in self.draining]

    def drain(self, host: int) -> None:
        self.draining.add(host)

    def evict(self, host: int) -> None:
        self.draining.add(host)

    def start(self, name: str, rather_not: int | None = None) -> Group:
        hosts = self.hosts()
        self.started.append(Group(hosts[len(self.started) % len(hosts)]))
        return self.started[-1]

    find = start

    def find_elsewhere(self, name: str, left: int | None) -> Group | None:
        return None if self.full else self.start(name, left)

    def has_place(self) -> bool:
        return not self.full

    def has_spare(self) -> bool:
        return bool(self.spares)

    def keep_spares(self, now: float) -> None: ...

    def drop_lost_spares(self) -> None: ...


class Job:
    """The slots of a job whose groups are stand-ins."""

    def __init__(self, **settings: Any) -> None:
        spec = FaultTolerantJob(TrainerActor, **{"groups": 2, **settings})
        self.events: list[tuple[str, str | None, dict[str, Any]]] = []
        events: Any = SimpleNamespace(
            record=lambda kind, replica=None, **data: self.events.append((kind, replica, data))
        )
        pool: Any = Pool(2)
        self.pool = pool
        self.killed: list[Group] = []
        self.evicted: list[int] = []
        self.silent: set[int] = set()
        self.lighthouses_left: list[int] = []
        support: Any = SimpleNamespace(
            lighthouse="http://lighthouse",
            host=0,
            key="key",
            evict=self.evicted.append,
            leave_host=lambda: self.lighthouses_left.append(0),
        )
        agents: Any = SimpleNamespace(silent=lambda: self.silent, kill=self.killed.append)
        self.slots = ReplicaSlots(spec, pool, support, agents, events)
        for _ in range(spec.groups):
            self.slots.add()

    def find(self, group: Any, **found: Any) -> None:
        """Let the threads of a group find something."""
        for name, value in found.items():
            setattr(group, name, value)
        self.slots.look()

    def become_ready(self, group: Any) -> None:
        self.find(group, state=GroupState.READY)

    def end(self, group: Any, ending: Ending, **report: Any) -> None:
        self.find(group, ended=TrainerReport(ending=ending, **report))

    def tick(self) -> None:
        self.slots.tick(time.monotonic())

    def prepare(self) -> list[Group]:
        """Let the groups that were started become ready."""
        self.tick()
        waiting = [group for group in self.pool.started if group.state is GroupState.PREPARING]
        for group in waiting:
            self.become_ready(group)
        self.tick()
        return waiting

    def train(self) -> list[Group]:
        """Let all groups begin, and make a step."""
        groups = self.prepare()
        for group in groups:
            self.make_step(group, 1)
        return groups

    def make_step(self, group: Group, step: int) -> None:
        self.find(group, report=TrainerReport(step=step, first_step_at=1.0))

    def of(self, kind: str) -> list[tuple[str | None, dict[str, Any]]]:
        return [(replica, data) for found, replica, data in self.events if found == kind]


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


@pytest.mark.parametrize(("value", "rule"), [(7, "there is no host 7"), (0, "the only group")])
def test_a_host_that_cannot_be_drained_gets_groups_as_before(value: int, rule: str) -> None:
    job = Job(groups=1)
    job.train()

    with pytest.raises(WrongArguments, match=rule):
        job.slots.drain(value)

    assert not job.pool.draining


def test_a_slot_refuses_a_transition_that_makes_no_sense() -> None:
    slot = ReplicaSlot(0, "train_0", due=0.0)

    with pytest.raises(RuntimeError, match="train_0 cannot become removing: it is empty"):
        slot.leave(SlotState.REMOVING)
    slot.end(Ending.LEFT)
    with pytest.raises(RuntimeError, match="cannot become starting: it is over"):
        slot.take(Group(0))  # type: ignore[arg-type]


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
