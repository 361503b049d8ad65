"""`Run`: the weaver's record of one run, and the end that follows from the ends of its ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from loom.control.frame import MAX_NAME, pack_value
from loom.weaver.replicas import Replica
from loom.weaver.states import ReplicaEnding
from loom.weaver.storage.history import MAX_METRICS

RUNNING = "running"

MAX_CONFIG = 64 << 10
"""Bytes of the configuration at the start of a run; larger values are left out."""

MAX_GROUPS = 64
"""Groups, and ids of starts, that one run remembers."""

MAX_PLACES = 64
"""Places of which a run remembers that processes of it began there, and times that it remembers of each."""

TOGETHER = 0.01
"""Seconds within which processes that begin in one place count once."""

MAX_REASON = 500
"""Characters of the reason of an end."""

_FAILURES = (ReplicaEnding.CRASHED, ReplicaEnding.LOST)
_THEN = (
    ReplicaEnding.EVICTED,
    ReplicaEnding.CANCELLED,
    ReplicaEnding.STOPPED,
    ReplicaEnding.ENDED_EARLY,
    ReplicaEnding.UNKNOWN,
    ReplicaEnding.COMPLETED,
)
"""The ends that decide a run's state if no failure does, the first one first."""


class RankEnd(NamedTuple):
    """The end of a replica's last process in a run."""

    replica: str
    ending: ReplicaEnding
    reason: str | None
    by: str | None
    time: float
    step: int | None


def deciding_end(ends: Iterable[RankEnd]) -> RankEnd | None:
    """Return the end that gives a run its state; None if there is none.

    A failure does not decide if a rank has completed at a later step, as the others went on without it.
    """
    known = list(ends)
    completed = max((_at(one) for one in known if one.ending is ReplicaEnding.COMPLETED), default=-math.inf)
    failed = [one for one in known if one.ending in _FAILURES and not _at(one) < completed]
    if failed:
        return min(failed, key=lambda one: one.time)
    left = [one for one in known if one.ending not in _FAILURES]
    return min(left, key=lambda one: (_THEN.index(one.ending), -one.time), default=None)


def _at(end: RankEnd) -> float:
    return -math.inf if end.step is None else end.step


@dataclass(slots=True, eq=False)
class Run:
    """One run, as it is stored; what is about living processes is not."""

    id: str
    name: str
    session: str | None
    began: float
    groups: list[str] = field(default_factory=list)
    starts: list[str] = field(default_factory=list)
    """The ids of its starts."""
    ended: float | None = None
    state: str = RUNNING
    reason: str | None = None
    by: str | None = None
    first: str | None = None
    step: int | None = None
    max_step: int | None = None
    ranks: int = 0
    restarts: int = 0
    leads: dict[str, tuple[int, str]] = field(default_factory=dict)
    """For each group the lowest rank, with its replica: their metrics make the summary."""
    start: Mapping[str, Any] | None = None
    """The facts of the start; None until a process has told them."""
    config: dict[str, Any] = field(default_factory=dict)
    config_bytes: int = 0
    summary: dict[str, list[Any]] = field(default_factory=dict)
    """For each metric its last, least and greatest value, the step of the last, and the replica."""
    tags: list[str] = field(default_factory=list)
    note: str = ""
    archived: bool = False
    parent: Mapping[str, Any] | None = None
    marks: int = 0
    """Marks of the timeline, ever."""
    places: dict[str, list[float]] = field(default_factory=dict)
    """The places in its session where processes of it began, and when: the first time, and the last ones."""

    # The fields from here on are not stored.
    there: dict[str, Replica] = field(default_factory=dict)
    """The replicas whose last process is of this run, by id."""
    living: dict[str, None] = field(default_factory=dict)
    """The ids of those that live."""
    odd: dict[str, tuple[float, int | None]] = field(default_factory=dict)
    """The last value of each metric that was not finite, with its step, since those who look at them did."""
    asked: float = -math.inf
    """When a process was asked last for the facts of the start."""

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _STORED}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Run:
        """Return a stored run. Fields that only a newer version knows are ignored."""
        return cls(**{name: stored[name] for name in _STORED if name in stored})

    def take_lead(self, replica: str, group: str, rank: int | None) -> bool:
        """Return whether a replica has the lowest rank of its group from now on, or again."""
        place = (rank or 0, replica)
        before = self.leads.get(group)
        if before is not None and tuple(before) < place:
            return False
        if before is None and len(self.leads) >= MAX_GROUPS:
            return False
        if before is not None and before[1] != replica:
            self.summary = {name: one for name, one in self.summary.items() if one[4] != before[1]}
        self.leads[group] = place
        return True

    def summarize(self, replica: str, step: int | None, metrics: Mapping[str, float]) -> None:
        """Take a status report of a lead into the summary. To take one again changes nothing."""
        summary = self.summary
        for name, value in metrics.items():
            known = summary.get(name)
            if known is None:
                if len(summary) < MAX_METRICS:
                    summary[name] = [value, value, value, step, replica]
            elif known[4] == replica:
                known[0], known[3] = value, step
                if not known[1] <= value:  # also if the one before is not a number
                    known[1] = value if value == value else known[1]
                if not known[2] >= value:
                    known[2] = value if value == value else known[2]
            if value - value:  # it is infinite, or not a number
                self.odd[name] = value, step

    def configure(self, config: Mapping[str, Any]) -> bool:
        """Take values into the configuration at the start; return whether one of them is the first of its key."""
        before = len(self.config)
        for key, value in config.items():
            if isinstance(key, str) and key not in self.config and len(key) <= MAX_NAME:
                size = len(pack_value([key, value]))
                if self.config_bytes + size <= MAX_CONFIG:
                    self.config[key] = value
                    self.config_bytes += size
        return len(self.config) > before

    def begin_in(self, place: str, now: float) -> None:
        """Note that a process began in a place of the run's session: in a proc mesh, or in a function there."""
        times = self.places.pop(place, [])
        if not times or now - times[-1] >= TOGETHER:
            times.append(now)
        self.places[place] = times if len(times) <= MAX_PLACES else [times[0], *times[2:]]
        if len(self.places) > MAX_PLACES:
            del self.places[next(iter(self.places))]

    def end(self, end: RankEnd | None, at: float) -> bool:
        """Record the end that decides; return whether it is another one than was known."""
        state, reason = ReplicaEnding.UNKNOWN.value, None
        by = first = None
        if end is not None:
            state, reason, by = end.ending.value, (end.reason or "")[:MAX_REASON] or None, end.by
            first = end.replica if end.ending in _FAILURES else None
        before = (self.ended is not None, self.state, self.reason, self.by, self.first)
        self.ended, self.state, self.reason, self.by, self.first = at, state, reason, by, first
        return before != (True, state, reason, by, first)

    def go_on(self) -> None:
        """Forget the end: a process of it lives again."""
        self.ended, self.state = None, RUNNING
        self.reason = self.by = self.first = None


_STORED = tuple(one.name for one in fields(Run) if one.name not in ("there", "living", "odd", "asked"))
