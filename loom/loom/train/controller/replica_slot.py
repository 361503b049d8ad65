"""`ReplicaSlot`: the slot of a replica in a job, which one group after another may have."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

from loom.train.controller.group import GroupState, ReplicaGroup
from loom.train.settings import Ending, TrainerReport
from loom.train.spec import Assignment


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
        """Whether the slot's group trains only until the next step boundary."""
        return self.state in (SlotState.REMOVING, SlotState.MOVING)

    @property
    def trains(self) -> bool:
        return self.state is SlotState.TRAINING or self.leaving

    @property
    def is_ready(self) -> bool:
        return self.state is SlotState.STARTING and self.group is not None and self.group.state is GroupState.READY

    @property
    def has_state(self) -> bool:
        """Whether the slot's group has made a step, and can give its state to another."""
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
