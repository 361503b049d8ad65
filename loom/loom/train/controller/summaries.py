"""`JobStatus` and `JobSummary`: the state of a running job, and the result of a finished one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loom.train.controller.group import ReplicaGroup
from loom.train.controller.job_events import JobEvent
from loom.train.settings import TrainerReport


@dataclass(frozen=True)
class GroupStatus:
    """The state of a group at a moment."""

    replica: str
    """The replica that the group trains; empty for a spare."""
    state: str
    host: int
    """Number of the host."""
    pids: tuple[int, ...]
    procs: str
    """Name of the proc mesh."""
    report: TrainerReport
    devices: tuple[str, ...] = ()
    """The uuids of its GPUs, if the job uses GPUs."""

    @classmethod
    def of(cls, group: ReplicaGroup) -> GroupStatus:
        state, name = group.state.value, group.procs.name
        return cls(group.replica, state, group.host, tuple(group.pids), name, group.report, group.devices)


@dataclass(frozen=True)
class JobStatus:
    """The state of a job at a moment."""

    name: str
    step: int
    """The highest step that a group has applied."""
    groups: tuple[GroupStatus, ...]
    spares: tuple[GroupStatus, ...]
    lighthouse: str
    hosts: tuple[int, ...]
    """Numbers of the hosts on which groups may be started."""
    events: tuple[JobEvent, ...]
    """The newest 10,000, the oldest first."""


@dataclass(frozen=True)
class JobSummary:
    """The result of a job."""

    name: str
    ending: str
    """``finished``, or ``stopped`` if no group reached the last step."""
    steps: int
    """Steps that were applied."""
    seconds: float
    """Duration of the job."""
    metrics: Mapping[str, float]
    """The last metrics of the finished group with the lowest number."""
    hashes: Mapping[str, str]
    """The SHA-256 of the parameters of each replica at the end."""
    reports: Mapping[str, TrainerReport]
    """The last report of each replica."""
    failures: int
    """The number of lost groups."""
    events: tuple[JobEvent, ...]
    """The newest 10,000, the oldest first."""
