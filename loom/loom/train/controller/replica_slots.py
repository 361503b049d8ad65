"""`ReplicaSlots`: gives each replica of a job a group, and another one when that is lost or has to move."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

from loom.train.controller.group import GroupState, ReplicaGroup
from loom.train.controller.group_events import Ended, Failed, GroupEvent, Prepared, ProcessLost, Reported, Silent
from loom.train.controller.group_pool import GroupPool
from loom.train.controller.job_events import JobEvents
from loom.train.controller.replica_slot import Departure, LeaveReason, ReplicaSlot, SlotState
from loom.train.controller.stuck import StuckGroups
from loom.train.controller.support import Support
from loom.train.retries import Retries
from loom.train.settings import Ending, Restore, TrainerReport
from loom.train.spec import JobSpec

__all__ = ["ReplicaSlots"]


@dataclass
class ReplicaSlots:
    """The slots of one job. For the controller's thread."""

    job: JobSpec
    pool: GroupPool
    support: Support
    events: JobEvents
    failures: int = 0
    """Groups that were lost."""

    def __post_init__(self) -> None:
        self._slots: dict[int, ReplicaSlot] = {}
        self._stuck = StuckGroups(self.job.stuck)
        self._began = False
        """Whether the first groups have begun, which wait for each other."""

    # What the slots are.

    def all(self) -> list[ReplicaSlot]:
        """Return all slots by their numbers. Any thread may call."""
        return sorted(self._slots.copy().values(), key=lambda slot: slot.number)

    def open(self) -> list[ReplicaSlot]:
        """Return the slots that are not over, by their numbers."""
        return [slot for slot in self.all() if not slot.over]

    def training(self) -> list[ReplicaSlot]:
        """Return the slots whose groups train."""
        return [slot for slot in self.all() if slot.trains]

    @property
    def step(self) -> int:
        """The highest step that a group has applied."""
        return max((slot.last.step for slot in self.all()), default=0)

    @property
    def are_over(self) -> bool:
        """Whether nothing is left to wait for."""
        slots = self.all()
        # A group that is being restored when the others finish would only do again what is done.
        return all(slot.over for slot in slots) or (
            any(slot.ending is Ending.FINISHED for slot in slots) and not self.training()
        )

    # What the controller tells them.

    def add(self) -> ReplicaSlot:
        """Add a slot, with the lowest number that is free."""
        number = next(one for one in itertools.count() if one not in self._slots or self._slots[one].over)
        replica = f"{self.job.name}_{number}"
        slot = self._slots[number] = ReplicaSlot(number, replica, Retries(self.job.retries), time.monotonic())
        return slot

    def tick(self, now: float) -> None:
        """Do what is due."""
        if not self._began:
            self._begin_together()
        for slot in self.open():
            if slot.state is SlotState.EMPTY and now >= slot.due:
                self._fill(slot)
            self._move_on(slot)
        by_group = {slot.group: slot for slot in self.training()}
        for group, seconds in self._stuck.find([group for group in by_group if group is not None], now):
            self._lose(by_group[group], f"it has made no step for {seconds:.1f} s, while others did")
        # A spare that starts would slow down the group that replaces a lost one.
        if all(slot.has_state for slot in self.open()):
            self.pool.keep_spares(now)

    def take(self, group: ReplicaGroup, event: GroupEvent) -> None:
        """Take an event of a group."""
        if group.state is GroupState.OVER:
            return
        for slot in self._slots.values():
            if group is slot.group:
                return self._take(slot, group, event)
            if group is slot.successor:
                return self._take_of_successor(slot, group, event)
        self.pool.take(group, event)

    def lighthouse_moved(self) -> None:
        """Tell the groups that train where the lighthouse is now."""
        for slot in self.training():
            if slot.group is not None:
                slot.group.move(self.support.lighthouse)

    def remove(self, slot: ReplicaSlot, why: str) -> None:
        """Let the group of a slot leave, and end the slot."""
        self._depart(slot, Departure(LeaveReason.REMOVED, why))

    def move(self, slot: ReplicaSlot, why: str) -> None:
        """Start another group elsewhere for a slot; the group that has it trains until the other one is ready."""
        left = None if slot.group is None else slot.group.host
        slot.successor = self.pool.find_elsewhere(slot.replica, left)
        slot.moving = why

    def replace_successor(self, slot: ReplicaSlot, why: str) -> None:
        """Stop the successor of a slot, and start another one."""
        assert slot.successor is not None
        left = slot.successor.host
        slot.successor.stop(why)
        slot.successor = self.pool.start(slot.replica, rather_not=left)

    # How a slot comes by a group, and how that begins.

    def _fill(self, slot: ReplicaSlot) -> None:
        group, slot.successor = slot.successor, None
        if group is None:
            group = self.pool.find(slot.replica, slot.shunned)
        if group is not None:  # else no host is there: another attempt follows with the next tick
            self._give(slot, group)

    def _give(self, slot: ReplicaSlot, group: ReplicaGroup) -> None:
        slot.take(group)
        if slot.is_ready:
            self._begin(slot)

    def _begin(self, slot: ReplicaSlot) -> None:
        """Let a group that is ready begin, unless the first groups still wait for each other."""
        if not self._began:
            return
        peers = any(one.has_state for one in self.open() if one is not slot)
        self._train(slot, Restore.PEERS if peers else self._restore_without_peers)

    def _begin_together(self) -> None:
        waiting = self.open()
        if waiting and all(slot.is_ready for slot in waiting):
            self._began = True
            for slot in waiting:
                self._train(slot, self._restore_without_peers)

    @property
    def _restore_without_peers(self) -> Restore:
        return Restore.NOTHING if self.job.checkpoints is None else Restore.CHECKPOINT

    def _train(self, slot: ReplicaSlot, restore: Restore) -> None:
        group = slot.group
        assert group is not None
        slot.begin(self.job.assignment(slot.replica, self.support.lighthouse, group.store, restore))
        self._record("group_started", slot, group, procs=group.procs.name, restore=restore.value)

    # How a slot loses its group.

    def _lose(self, slot: ReplicaSlot, reason: str, *, hung: bool = False) -> None:
        """Replace the group of a slot: on another host, if its own may hang."""
        group = slot.group
        assert group is not None
        self.failures += 1
        group.stop(reason)
        self.support.kill(group)
        slot.lost_at = time.time()
        slot.shunned = group.host if hung or not group.members else None
        self._record("group_failed", slot, group, step=group.report.step, reason=reason)
        if slot.departure is not None:
            self._departed(slot, slot.departure)
            return
        wait = slot.retries.fail()
        if wait is None:
            slot.end(Ending.FAILED)
            left = [one.replica for one in self.open()]
            failures = slot.retries.failures
            self.events.record(
                "job_smaller", slot.replica, groups=len(left), left=left, failures=failures, reason=reason
            )
        else:
            slot.vacate(time.monotonic() + wait)
            self.events.record("group_retried", slot.replica, attempt=slot.retries.failures, wait=wait)

    def _depart(self, slot: ReplicaSlot, departure: Departure) -> None:
        if slot.state is SlotState.TRAINING:
            slot.leave(departure)
            return
        if slot.group is not None:
            slot.group.stop(departure.text)
        self._departed(slot, departure)

    def _departed(self, slot: ReplicaSlot, departure: Departure) -> None:
        """Take note that a slot's group has left, and let its successor take the place if there is one."""
        if departure.reason is LeaveReason.REMOVED:
            slot.end(Ending.LEFT)
            self.events.record("group_removed", slot.replica, step=slot.last.step, reason=departure.text)
            return
        slot.vacate(time.monotonic())
        group, slot.successor = slot.successor, None
        host = None if group is None else group.host
        self.events.record("group_moved", slot.replica, reason=departure.text, host=host)
        if group is not None:
            self._give(slot, group)

    def _move_on(self, slot: ReplicaSlot) -> None:
        """Let a group leave whose successor is ready, unless its state would leave with it."""
        successor = slot.successor
        if successor is None or successor.state is not GroupState.READY or slot.state is SlotState.LEAVING:
            return
        others = any(one.has_state and one.state is not SlotState.LEAVING for one in self.open() if one is not slot)
        if others or (self.job.checkpoints is not None and len(self.training()) == 1):
            self._depart(slot, Departure(LeaveReason.MOVED, slot.moving))

    # What groups tell.

    def _take(self, slot: ReplicaSlot, group: ReplicaGroup, event: GroupEvent) -> None:
        match event:
            case Prepared():
                group.state = GroupState.READY
                self._begin(slot)
            case Reported(report):
                self._take_report(slot, group, report)
            case Ended(report):
                self._take_end(slot, group, report)
            case Silent(seconds):
                if seconds >= self.job.silence:
                    self._lose(slot, f"its processes have not answered for {seconds:.1f} s", hung=True)
            case ProcessLost(rank):
                self._lose(slot, f"process {group.pids[rank] if group.pids else rank} is gone")
            case Failed(reason):
                self._lose(slot, reason)

    def _take_of_successor(self, slot: ReplicaSlot, group: ReplicaGroup, event: GroupEvent) -> None:
        match event:
            case Prepared():
                group.state = GroupState.READY
            case ProcessLost() | Failed():
                self.replace_successor(slot, "it was lost before it began")

    def _take_report(self, slot: ReplicaSlot, group: ReplicaGroup, report: TrainerReport) -> None:
        before, group.report, slot.last = group.report, report, report
        if report.checkpoint_error is not None and report.checkpoint_error != before.checkpoint_error:
            self.events.record("checkpoint_failed", slot.replica, step=report.step, reason=report.checkpoint_error)
        if report.checkpoint_step is not None and report.checkpoint_step != before.checkpoint_step:
            self.events.record("checkpoint_written", slot.replica, step=report.checkpoint_step)
        if report.first_step_at is None:
            return
        if before.first_step_at is None:
            self._take_first_step(slot, group, report, report.first_step_at)
        slot.retries.well(report.step - report.restored_step)

    def _take_first_step(
        self, slot: ReplicaSlot, group: ReplicaGroup, report: TrainerReport, first_step_at: float
    ) -> None:
        lost_at, slot.lost_at = slot.lost_at, None
        self._record(
            "group_trains" if lost_at is None else "group_restored",
            slot,
            group,
            restored=report.restored,
            step=report.restored_step,
            seconds=None if lost_at is None else round(first_step_at - lost_at, 3),
        )

    def _take_end(self, slot: ReplicaSlot, group: ReplicaGroup, report: TrainerReport) -> None:
        if report.ending is Ending.FAILED:
            slot.last = report
            self._lose(slot, (report.error or "").strip().rpartition("\n")[2])
            return
        if report.ending is Ending.NO_PEERS and slot.departure is None:
            # The groups that had the state were lost since it was told to begin. Its own processes are well.
            slot.rest()
            self._begin(slot)
            return
        if report.ending is not Ending.NO_PEERS:
            self._take_report(slot, group, report)
        group.stop("its training has ended")
        if slot.departure is not None and report.ending in (Ending.LEFT, Ending.NO_PEERS):
            self._departed(slot, slot.departure)
            return
        assert report.ending is not None
        slot.end(report.ending)
        if report.ending is Ending.STOPPED:
            self.events.record("group_stopped", slot.replica, step=report.step)

    def _record(self, kind: str, slot: ReplicaSlot, group: ReplicaGroup, **data: object) -> None:
        self.events.record(kind, slot.replica, host=group.host, pids=group.pids, **data)
