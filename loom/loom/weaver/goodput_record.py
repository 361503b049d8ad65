"""The goodput of a job, as a program sees it: what `loom.weaver.goodput` keeps, read from a gateway's answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["CoursePoint", "FaultRecord", "GoodputRecord"]


@dataclass(frozen=True)
class FaultRecord:
    """The death of a process, and what it cost. Times are seconds since the epoch."""

    replica: str
    reason: str
    time: float
    """When the process was last heard of."""
    detected: float
    """When the weaver knew."""
    registered: float | None = None
    """When the process came that has its place now; None as long as there is none."""
    stepped: float | None = None
    """When that began its first step."""

    @property
    def detection(self) -> float:
        """Seconds until the weaver knew."""
        return self.detected - self.time

    @property
    def respawn(self) -> float | None:
        """Seconds from then until another process had its place."""
        return None if self.registered is None else self.registered - self.detected

    @property
    def waiting(self) -> float | None:
        """Seconds from then until the first step."""
        return None if self.registered is None or self.stepped is None else self.stepped - self.registered

    @property
    def recovery(self) -> float | None:
        """Seconds from the last sign of the one process to the first step of the other."""
        return None if self.stepped is None else self.stepped - self.time


@dataclass(frozen=True)
class CoursePoint:
    """What the sums of a job were at a time."""

    time: float
    """Seconds since the epoch."""
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class GoodputRecord:
    """How much of a job's time was spent on steps that count. A second of it is a second of one of its replicas."""

    job: str
    """The replicas' group; ``GROUP@SESSION`` where a session spawned them."""
    since: float
    """When its first replica registered, in seconds since the epoch."""
    until: float
    """Now, or when its last replica ended."""
    replicas: int
    """How many live."""
    ratio: float | None
    """The share of ``compute``, from 0 to 1. None before there is anything."""
    seconds: Mapping[str, float]
    """By what they were spent on: `loom.control.time_account.REASONS`, and what the training names besides."""
    faults: tuple[FaultRecord, ...] = ()
    """Deaths of processes, the first first."""
    course: tuple[CoursePoint, ...] = ()
    """What ``seconds`` were since the beginning, at several times, the last of them ``until``."""

    def share(self, reason: str) -> float:
        """The share of a reason, from 0 to 1."""
        whole = sum(self.seconds.values())
        return self.seconds.get(reason, 0.0) / whole if whole > 0 else 0.0

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> GoodputRecord:
        """As a gateway's answer has it."""
        return cls(
            body["job"],
            body["since"],
            body["until"],
            body["replicas"],
            body["ratio"],
            body["seconds"],
            tuple(FaultRecord(**{name: one.get(name) for name in _FAULT}) for one in body["faults"]),
            tuple(CoursePoint(point["time"], point["seconds"]) for point in body["course"]),
        )


_FAULT = tuple(FaultRecord.__dataclass_fields__)
