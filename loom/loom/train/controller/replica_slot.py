"""A place for a replica in a job, which one group after the other may have."""

from __future__ import annotations

from dataclasses import dataclass, field

from loom.train.controller.group import GroupState, ReplicaGroup
from loom.train.retries import Retries
from loom.train.settings import Ending, TrainerReport

__all__ = ["Seat"]


@dataclass
class Seat:
    """A place for a replica, and the group that has it."""

    number: int
    replica: str
    retries: Retries
    group: ReplicaGroup | None = None
    shunned: int | None = None
    """The host that did not prepare its last group, or hung; None: that was lost otherwise."""
    due: float | None = None
    """When to look for a group again."""
    lost_at: float | None = None
    """When the group was lost that this seat had, until another has made a step."""
    told_to_leave: str = ""
    """Why, and ``removed`` or ``moved`` as its first word; empty unless it is to leave."""
    successor: ReplicaGroup | None = None
    """What is to take the place of the group, which has to leave a host."""
    moving: str = ""
    """Why it leaves its host, as soon as the successor is ready."""
    ending: Ending | None = None
    last: TrainerReport = field(default_factory=TrainerReport)

    @property
    def over(self) -> bool:
        return self.ending is not None

    @property
    def has_state(self) -> bool:
        """Whether its group trains, and has made a step."""
        group = self.group
        return group is not None and group.state is GroupState.TRAINING and group.report.first_step_at is not None
