"""`ReplicaSlots`: the assignment of groups to the replicas of a job, whenever a group is lost or has to move."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from loom.errors import WrongArguments, because
from loom.train.controller.group import GroupState, ReplicaGroup
from loom.train.controller.group_pool import GroupPool
from loom.train.controller.host_agents import HostAgents
from loom.train.controller.job_events import JobEvents
from loom.train.controller.lighthouse import Support
from loom.train.settings import Ending, Restore, TrainerReport
from loom.train.spec import Assignment, JobSpec


class SlotState(Enum):
    """The state of a slot."""

    EMPTY = "empty"  # the slot has no group, and looks for one when it is due
    STARTING = "starting"  # the slot's group prepares, or waits until it may begin
    TRAINING = "training"
    REMOVING = "removing"  # the slot's group was told to end its training, and the slot ends with it
    MOVING = "moving"  # the slot's group was told to end its training; one on another host takes the slot
    OVER = "over"  # the slot gets no further group


_NEXT = {
    SlotState.EMPTY: {SlotState.EMPTY, SlotState.STARTING, SlotState.OVER},
    SlotState.STARTING: {SlotState.TRAINING, SlotState.EMPTY, SlotState.OVER},
    SlotState.TRAINING: set(SlotState) - {SlotState.TRAINING},
    SlotState.REMOVING: {SlotState.OVER},
    SlotState.MOVING: {SlotState.EMPTY, SlotState.OVER},
    SlotState.OVER: set[SlotState](),
}


@dataclass
class ReplicaSlot:
    """A slot for a replica, and the group that has it."""

    number: int
    replica: str
    due: float  # when an empty slot looks for a group, on the monotonic clock
    state: SlotState = SlotState.EMPTY
    group: ReplicaGroup | None = None
    failures: int = 0  # failures of the slot's groups since one was healthy
    shunned: int | None = None  # the host on which the last group could not be prepared, or hung
    lost_at: float | None = None  # when the last group was lost, by `time.time`; None once another made a step
    successor: ReplicaGroup | None = None  # the group on another host that takes the slot once it is ready
    why: str = ""  # why the group leaves or the successor was started, for users: "host 1 is drained"
    stays: str = ""  # why the group should leave, if it stays because there is no other place for it
    ending: Ending | None = None  # None unless the slot is over
    last: TrainerReport = field(default_factory=TrainerReport)  # the last report of any of the slot's groups
    report: TrainerReport = field(default_factory=TrainerReport)  # the group's last that was acted on
    silent: bool = False  # whether neither the slot's group nor its host answers
    excused: float = 0.0  # seconds of the group's silence for which its host's is the reason
    back_until: float = 0.0  # until when a group that was silent need not make a step, on the monotonic clock
    moved_at: float = 0.0  # when the slot's group began, made its last step or was paused, on the monotonic clock

    @property
    def over(self) -> bool:
        return self.state is SlotState.OVER

    @property
    def leaving(self) -> bool:
        """True if the slot's group trains only until the next step boundary."""
        return self.state in (SlotState.REMOVING, SlotState.MOVING)

    @property
    def trains(self) -> bool:
        return self.state is SlotState.TRAINING or self.leaving

    @property
    def is_ready(self) -> bool:
        return self.state is SlotState.STARTING and self.group is not None and self.group.state is GroupState.READY

    @property
    def has_state(self) -> bool:
        """True if the slot's group has made a step, and can give its state to another."""
        return self.trains and self.report.first_step_at is not None

    def assign(self, group: ReplicaGroup) -> None:
        self._enter(SlotState.STARTING)
        self.group = group

    def begin(self, assignment: Assignment) -> None:
        self._enter(SlotState.TRAINING)
        assert self.group is not None
        self.group.begin(assignment)
        self.report = self.group.report
        self.moved_at = time.monotonic()
        self.silent, self.excused = False, 0.0

    def rest(self) -> None:
        self._enter(SlotState.STARTING)
        assert self.group is not None
        self.group.rest()

    def leave(self, state: SlotState) -> None:
        """Tell the training group to leave at the next step boundary, and remove or move the slot."""
        self._enter(state)
        assert self.group is not None
        self.group.leave()

    def vacate(self, due: float) -> None:
        """Drop the stopped group; the slot looks for another one when it is due."""
        self._enter(SlotState.EMPTY)
        self.group, self.due = None, due

    def end(self, ending: Ending) -> None:
        """End the slot for good, after its group was stopped."""
        self._enter(SlotState.OVER)
        self.group, self.ending = None, ending
        if self.successor is not None:
            self.successor.stop("its replica needs no group any more")
            self.successor = None

    def _enter(self, state: SlotState) -> None:
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"the slot of {self.replica} cannot become {state.value}: it is {self.state.value}")
        self.state = state


@dataclass
class ReplicaSlots:
    """The slots of one job, for the controller's thread."""

    job: JobSpec
    pool: GroupPool
    support: Support
    agents: HostAgents
    events: JobEvents
    failures: int = 0  # the number of lost groups

    def __post_init__(self) -> None:
        self._slots: dict[int, ReplicaSlot] = {}
        self.auto = self.job.groups == "auto"
        """Whether the job has as many groups as there are places."""
        self._told = dict[int, str]()  # why, of the hosts that are drained because their agents tell so
        self._not_left = dict[int, str]()  # why hosts that should be left are not
        self._began = False  # whether the first groups, which wait for each other, have begun

    # The slots and their state.

    def all(self) -> list[ReplicaSlot]:
        """Return all slots by their numbers. Any thread may call."""
        return sorted(self._slots.copy().values(), key=lambda slot: slot.number)

    def open(self) -> list[ReplicaSlot]:
        return [slot for slot in self.all() if not slot.over]

    def training(self) -> list[ReplicaSlot]:
        return [slot for slot in self.all() if slot.trains]

    def staying(self) -> list[ReplicaSlot]:
        """Return the slots that are not being removed; a group that moves to another host stays in the job."""
        return [slot for slot in self.open() if slot.state is not SlotState.REMOVING]

    @property
    def step(self) -> int:
        """The highest step that any group has applied."""
        return max((slot.last.step for slot in self.all()), default=0)

    @property
    def are_over(self) -> bool:
        """True if there is no slot left to wait for."""
        slots = self.all()
        # A group that is being restored when the others finish, or is silent, would only repeat their work.
        return all(slot.over for slot in slots) or (
            any(slot.ending is Ending.FINISHED for slot in slots) and all(slot.silent for slot in self.training())
        )

    # Changes while the job runs. The first three methods are handlers: an exception refuses the change.

    def resize(self, groups: int) -> None:
        """Add slots, or remove those with the highest numbers."""
        if groups < 1:
            raise WrongArguments(f"a job has 1 group at least, not {groups}; `loom stop` ends it")
        self.auto = False
        staying = self.staying()
        for slot in reversed(staying[groups:]):
            self.remove(slot, "the job is to be smaller")
        for _ in range(groups - len(staying)):
            slot = self.add()
            self.events.record("group_added", slot.replica)

    def drain(self, host: int) -> None:
        """Move all groups off a host, and start no more there."""
        self._check_drain(host)
        self.pool.drain(host)
        self._leave_host(host)

    def _leave_host(self, host: int) -> None:
        why = because(f"host {host} is drained", self._told.get(host, ""))
        for slot in self.open():
            if slot.successor is not None and slot.successor.host == host:
                self._replace_successor(slot, slot.successor, why)
            elif slot.group is not None and slot.group.host == host and slot.successor is None and not slot.leaving:
                if self.auto and len(self.staying()) > 1:
                    self.remove(slot, why)
                else:
                    self._move(slot, why)

    def undrain(self, host: int) -> None:
        self.pool.draining.discard(host)

    def follow_drains(self, told: Mapping[int, str]) -> None:
        """Drain the hosts of which their agents tell that whoever runs them drains them, until they tell otherwise.

        A host that cannot be left yet, and a group that has no other place, leaves as soon as it can.
        """
        if self.pool.draining and self.pool.has_place():
            for host in self.pool.draining:
                self._leave_host(host)
        for host, reason in told.items():
            if not reason:
                self._not_left.pop(host, None)
                if self._told.pop(host, None):
                    self.undrain(host)
            elif host not in self.pool.draining:
                self._told[host] = reason
                try:
                    self.drain(host)
                except WrongArguments as error:
                    del self._told[host]
                    if self._not_left.get(host) != str(error):
                        self._not_left[host] = str(error)
                        self.events.record("drain_refused", host=host, reason=str(error))

    def fit(self) -> None:
        """Add groups for which there are places now, if the job wants as many as there are."""
        if not self.auto or not self._began:
            return
        left = SlotState.REMOVING, SlotState.OVER
        # One that was given up, or has finished, is none for which another is to be added.
        there = [slot for slot in self.all() if slot.state not in left or slot.ending not in (None, Ending.LEFT)]
        for _ in range(self.pool.capacity() - len(there)):
            self.events.record("group_added", self.add().replica)

    def respawn(self, replica: str, reason: str) -> None:
        """Move the group of a process whose device has failed."""
        # Only the first process of a group has the group's name; the others have their rank behind it.
        names = replica, replica.rpartition(".")[0]
        for slot in self.training():
            if slot.replica in names and slot.successor is None and not slot.leaving:
                why = "" if slot.group is None else self.pool.refusal(slot.group)
                self._move(slot, why or because("its device has failed", reason))

    def stop_all(self) -> None:
        self.auto = False
        for slot in self.staying():
            if not slot.leaving:
                self.remove(slot, "the job was told to stop")

    def _check_drain(self, host: int) -> None:
        hosts = self.pool.session.hosts()
        if host not in hosts:
            raise WrongArguments(f"there is no host {host}; there are {hosts}")
        if not set(self.pool.hosts()) - {host}:
            raise WrongArguments(f"host {host} is the last that groups can be on")
        training = self.training()
        there = [slot for slot in training if slot.group is not None and slot.group.host == host]
        if self.job.checkpoints is None and there and len(training) == 1:
            raise WrongArguments(
                f"{there[0].replica} is the only group, and nobody could give its state to another: add a group "
                "first (groups=2), or give the job a folder for checkpoints"
            )

    def add(self) -> ReplicaSlot:
        """Add a slot with the lowest free number."""
        number = next(one for one in itertools.count() if one not in self._slots or self._slots[one].over)
        replica = f"{self.job.name}_{number}"
        slot = self._slots[number] = ReplicaSlot(number, replica, time.monotonic())
        return slot

    def remove(self, slot: ReplicaSlot, why: str) -> None:
        slot.why = why
        self._depart(slot, SlotState.REMOVING)

    def _move(self, slot: ReplicaSlot, why: str) -> None:
        """Start another group elsewhere for a slot; the old group trains until the new one is ready."""
        left = None if slot.group is None else slot.group.host
        slot.successor = self.pool.find_elsewhere(slot.replica, left)
        slot.why = why

    def _leave_refused(self, slot: ReplicaSlot) -> None:
        """Look for other devices for a group that trains and may not use its own, as soon as there are any.

        A group that does not train yet has nothing to lose: it is stopped at once, on CPUs if it has another place.
        """
        if slot.successor is not None and (why := self.pool.refusal(slot.successor)):
            self._replace_successor(slot, slot.successor, why)
            return
        group = None if slot.successor is not None or slot.leaving else slot.group
        why = "" if group is None else self.pool.refusal(group)
        if group is None or not why:
            slot.stays = ""
        elif slot.state is not SlotState.STARTING:
            slot.successor, slot.why = self.pool.find_elsewhere(slot.replica, None), why
            self._note_stay(slot, group, "" if slot.successor is not None else why)
        elif self.job.uses_gpus or self.pool.has_place():
            group.stop(why)
            slot.vacate(time.monotonic())
        else:
            self._note_stay(slot, group, why)

    def _note_stay(self, slot: ReplicaSlot, group: ReplicaGroup, why: str) -> None:
        """Note that a group stays though it should leave, because it has no other place; "" if it has one."""
        if why and why != slot.stays:
            self._record("group_stays", slot, group, reason=f"{why}; no other device or host of the job is free")
        slot.stays = why

    def _replace_successor(self, slot: ReplicaSlot, successor: ReplicaGroup, why: str) -> None:
        successor.stop(why)
        slot.successor = self.pool.start(slot.replica, rather_not=successor.host)

    # Periodic work, and the findings of the groups.

    def tick(self, now: float) -> None:
        slots = self.open()
        if not self._began and slots and all(slot.is_ready for slot in slots):
            self._began = True
            for slot in slots:
                self._begin(slot)
        for slot in slots:
            self._leave_refused(slot)
            if slot.state is SlotState.EMPTY and now >= slot.due:
                self._fill(slot)
            self._hand_over(slot)
        if self.support.host in self.agents.silent() and self._none_moves(now):
            self.support.leave_host()
        for slot in self._stuck(now):
            self._lose(slot, f"it has made no step for {now - slot.moved_at:.1f} s, while others did")
        # A spare that starts would slow down the group that replaces a lost one.
        if all(slot.has_state for slot in self.open()):
            self.pool.keep_spares(now)

    def look(self) -> None:
        for slot in self.open():
            if slot.group is not None:
                self._look_at(slot, slot.group)
            if slot.successor is not None and slot.successor.failure:
                self._replace_successor(slot, slot.successor, "it was lost before it began")
        self.pool.drop_lost_spares()

    def lighthouse_moved(self) -> None:
        for slot in self.training():
            if slot.group is not None:
                slot.group.move(self.support.lighthouse, behind=slot.group.host in self.agents.silent())

    def _look_at(self, slot: ReplicaSlot, group: ReplicaGroup) -> None:
        if slot.trains and group.report is not slot.report:
            self._take_report(slot, group, group.report)
        # Check for the end first: when the training has ended, the end of its processes is no failure.
        if group.ended is not None:
            self._take_end(slot, group, group.ended)
        elif group.failure:
            self._lose(slot, group.failure)
        elif group.silent >= self.job.silence:
            self._take_silence(slot, group)
        elif slot.is_ready:
            self._begin(slot)

    def _take_silence(self, slot: ReplicaSlot, group: ReplicaGroup) -> None:
        """Replace a group that hangs. Wait for one whose host is silent too, unless a spare can take its place."""
        host_is_silent = group.host in self.agents.silent()
        if host_is_silent and not slot.silent:
            # Nothing resets the connections to it, for whose answers the others would wait until their timeout.
            for other in self.training():
                if other.group is not None and other.group.host not in self.agents.silent():
                    other.group.break_off()
        if host_is_silent and not self.pool.has_spare():
            # After a cut, some connections come back later than others, by up to the length of the cut.
            slot.excused = 2 * group.silent
            if not slot.silent:
                slot.silent = True
                self._record("group_silent", slot, group, step=slot.report.step)
        elif host_is_silent or group.silent >= slot.excused + self.job.silence:
            self._lose(slot, f"its processes have not answered for {group.silent:.1f} s", hung=True)

    def _take_report(self, slot: ReplicaSlot, group: ReplicaGroup, report: TrainerReport) -> None:
        before, slot.report, slot.last = slot.report, report, report
        if slot.silent:
            # Its connections to the lighthouse and to the other groups may come back later than the one from here.
            slot.moved_at = time.monotonic()
            slot.back_until = slot.moved_at + slot.excused / 2
            slot.silent, slot.excused = False, 0.0
            self._record("group_back", slot, group, step=report.step)
        # Neither a pause nor its end counts as a lack of progress.
        if report.step != before.step or report.paused or before.paused:
            slot.moved_at = time.monotonic()
        if report.checkpoint_error is not None and report.checkpoint_error != before.checkpoint_error:
            self.events.record("checkpoint_failed", slot.replica, step=report.step, reason=report.checkpoint_error)
        if report.checkpoint_step is not None and report.checkpoint_step != before.checkpoint_step:
            self.events.record("checkpoint_written", slot.replica, step=report.checkpoint_step)
        if report.first_step_at is None:
            return
        if before.first_step_at is None:
            lost_at, slot.lost_at = slot.lost_at, None
            kind = "group_trains" if lost_at is None else "group_restored"
            # The clock of another host, or a clock that was set back, may say earlier.
            seconds = None if lost_at is None else max(0.0, round(report.first_step_at - lost_at, 3))
            self._record(kind, slot, group, restored=report.restored, step=report.restored_step, seconds=seconds)
        if report.step - report.restored_step >= self.job.retries.healthy_steps:
            slot.failures = 0

    def _take_end(self, slot: ReplicaSlot, group: ReplicaGroup, report: TrainerReport) -> None:
        if report.ending in (Ending.FAILED, Ending.REFUSED):
            slot.last = report
            reason = (report.error or "").strip().rpartition("\n")[2]
            self._lose(slot, reason, hopeless=report.ending is Ending.REFUSED)
            return
        if report.ending is Ending.NO_PEERS and not slot.leaving:
            # The groups that had the state were lost after this one was told to begin; its processes are healthy.
            slot.rest()
            self._begin(slot)
            return
        if report.ending is not Ending.NO_PEERS:
            self._take_report(slot, group, report)
        group.stop("its training has ended")
        if report.ending is Ending.EVICTED:
            self._take_eviction(slot, group)
            return
        if slot.leaving and report.ending in (Ending.LEFT, Ending.NO_PEERS):
            self._departed(slot, slot.state)
            return
        assert report.ending is not None
        slot.end(report.ending)
        if report.ending is Ending.STOPPED:
            self.events.record("group_stopped", slot.replica, step=report.step)

    def _take_eviction(self, slot: ReplicaSlot, group: ReplicaGroup) -> None:
        self.pool.evict(group.host)
        self._record("group_evicted", slot, group, step=slot.last.step)
        if slot.leaving:
            self._departed(slot, slot.state)
        else:
            slot.lost_at = time.time()
            slot.vacate(time.monotonic())
        if all(one.group is None or one.group.host != group.host for one in self.training()):
            self.support.evict(group.host)

    def _none_moves(self, now: float) -> bool:
        """Return whether no group on a host that answers has made a step for `JobSpec.silence`."""
        silent = self.agents.silent()
        heard = [slot for slot in self.training() if slot.group is not None and slot.group.host not in silent]
        return bool(heard) and all(now - slot.moved_at >= self.job.silence for slot in heard)

    def _stuck(self, now: float) -> list[ReplicaSlot]:
        """Return the slots whose groups have made no step for too long, while others did."""
        training = [slot for slot in self.training() if not slot.silent and now >= slot.back_until]
        newest = max((slot.moved_at for slot in training if not slot.report.paused), default=0.0)
        return [slot for slot in training if now - slot.moved_at > self.job.stuck and newest > slot.moved_at]

    # A slot gets a group, and the group begins.

    def _fill(self, slot: ReplicaSlot) -> None:
        group, slot.successor = slot.successor, None
        if group is None and self.auto and self._began and len(self.staying()) > max(1, self.pool.capacity()):
            self.remove(slot, "there are fewer places for groups")  # `fit` adds one again when there are more
            return
        if group is None:
            group = self.pool.find(slot.replica, slot.shunned)
        if group is not None:  # without a host, the next tick tries again
            self._give(slot, group)

    def _give(self, slot: ReplicaSlot, group: ReplicaGroup) -> None:
        slot.assign(group)
        if slot.is_ready:
            self._begin(slot)

    def _begin(self, slot: ReplicaSlot) -> None:
        """Let a ready group begin, unless the first groups still wait for each other."""
        if not self._began:
            return
        group = slot.group
        assert group is not None
        restore = Restore.NOTHING if self.job.checkpoints is None else Restore.CHECKPOINT
        with_state = [one for one in self.open() if one.has_state and one is not slot]
        if with_state:
            if all(one.silent for one in with_state):
                return  # their hosts come back with the state, or are lost
            restore = Restore.PEERS
        job, support = self.job.for_trainers(), self.support
        slot.begin(Assignment(job, slot.replica, support.lighthouse, group.store, restore, support.key))
        self._record("group_started", slot, group, procs=group.procs.name, restore=restore.value)

    # A slot loses its group.

    def _lose(self, slot: ReplicaSlot, reason: str, *, hung: bool = False, hopeless: bool = False) -> None:
        """Replace the group of a slot, on another host if it may hang; give the slot up if that is hopeless."""
        group = slot.group
        assert group is not None
        self.failures += 1
        group.stop(reason)
        self.agents.kill(group)
        slot.lost_at = time.time()
        slot.shunned = group.host if hung or not group.members else None
        self._record("group_failed", slot, group, step=slot.report.step, reason=reason)
        if slot.leaving:
            self._departed(slot, slot.state)
            return
        slot.failures += 1
        wait = None if hopeless else self.job.retries.wait(slot.failures)
        if wait is None:
            slot.end(Ending.FAILED)
            left = [one.replica for one in self.open()]
            self.events.record(
                "job_smaller", slot.replica, groups=len(left), left=left, failures=slot.failures, reason=reason
            )
        else:
            slot.vacate(time.monotonic() + wait)
            self.events.record("group_retried", slot.replica, attempt=slot.failures, wait=wait)

    def _depart(self, slot: ReplicaSlot, state: SlotState) -> None:
        if slot.state is SlotState.TRAINING:
            slot.leave(state)
            return
        if slot.group is not None:
            slot.group.stop(slot.why)
        self._departed(slot, state)

    def _departed(self, slot: ReplicaSlot, state: SlotState) -> None:
        """Note that a slot's group has left, and give the slot to its successor if there is one."""
        if state is SlotState.REMOVING:
            slot.end(Ending.LEFT)
            self.events.record("group_removed", slot.replica, step=slot.last.step, reason=slot.why)
            return
        slot.vacate(time.monotonic())
        group, slot.successor = slot.successor, None
        host = None if group is None else group.host
        self.events.record("group_moved", slot.replica, reason=slot.why, host=host)
        if group is not None:
            self._give(slot, group)

    def _hand_over(self, slot: ReplicaSlot) -> None:
        """Let a group leave if its successor is ready, unless the state would be lost with it."""
        successor = slot.successor
        if successor is None or successor.state is not GroupState.READY or slot.leaving:
            return
        others = any(one.has_state and not one.leaving and not one.silent for one in self.open() if one is not slot)
        if others or (self.job.checkpoints is not None and len(self.training()) == 1):
            self._depart(slot, SlotState.MOVING)

    def _record(self, kind: str, slot: ReplicaSlot, group: ReplicaGroup, **data: object) -> None:
        self.events.record(kind, slot.replica, host=group.host, pids=group.pids, **data)
