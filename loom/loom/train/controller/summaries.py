"""How a job is, and what has come of it, as others are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loom.train.controller.group import ReplicaGroup
from loom.train.controller.job_events import JobEvent
from loom.train.settings import TrainerReport

__all__ = ["GroupStatus", "JobStatus", "JobSummary"]


@dataclass(frozen=True)
class GroupStatus:
    """A group at a moment."""

    replica: str
    """Empty for a spare."""
    state: str
    host: int
    """Number of the host."""
    pids: tuple[int, ...]
    procs: str
    """Name of the proc mesh."""
    report: TrainerReport

    @classmethod
    def of(cls, group: ReplicaGroup) -> GroupStatus:
        """The status of a group."""
        pids = tuple(group.pids)
        return cls(group.replica, group.state.value, group.host, pids, group.procs.name, group.report)


@dataclass(frozen=True)
class JobStatus:
    """A job at a moment."""

    name: str
    step: int
    """The highest step that a group has applied."""
    groups: tuple[GroupStatus, ...]
    spares: tuple[GroupStatus, ...]
    lighthouse: str
    hosts: tuple[int, ...]
    """Numbers of the hosts that groups may be started on."""
    events: tuple[JobEvent, ...]


@dataclass(frozen=True)
class JobSummary:
    """What has come of a job."""

    name: str
    ending: str
    steps: int
    seconds: float
    metrics: Mapping[str, float]
    """Of the group with the lowest number that came to its end."""
    hashes: Mapping[str, str]
    """The SHA-256 of the parameters in the end, of each replica."""
    reports: Mapping[str, TrainerReport]
    """The last of each replica."""
    failures: int
    events: tuple[JobEvent, ...]
