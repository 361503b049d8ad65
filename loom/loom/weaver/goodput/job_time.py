"""The time of a job: its slots, and the deaths of processes in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from loom.control.reports import MAX_REASONS, OTHER, REASONS
from loom.weaver.views import FaultRecord

SAMPLE_EVERY = 1.0  # seconds between the first points of a timeline


@dataclass(slots=True)
class GoodputSlot:
    """The slot of a replica in a job."""

    replica: str
    registered: float
    heard: float
    """When the last account came; before the first one, when the process registered."""
    counted: dict[str, float] = field(default_factory=dict)
    """Seconds of the living process, by reason, as they are included in the job's sum."""
    open: float = 0.0
    """Counted seconds of the unfinished step."""
    compute: float = 0.0
    """Seconds of steps that the process has reported."""
    again: float = 0.0
    """Seconds of those steps that repeated steps of an earlier process."""
    before: int | None = None
    """The highest step that an earlier process had made in this slot."""
    reached: int | None = None
    """The highest step that the living process has made."""
    overlap: float | None = None
    """Seconds that the process lived before it registered; None before its first account."""
    respawn: float = 0.0
    """Seconds for which the slot was vacant before this process came."""
    vacant: float | None = None
    """When the slot became vacant, or since when its time is not in the job's sum; None while a process has it."""
    awaited: bool = False
    """True if something is to start another process in the vacant slot."""
    settled: float = 0.0
    """Seconds of the vacant slot that are in the job's sum."""
    fault: FaultRecord | None = None
    """The last fault, until the process after it has made a step."""
    run: str = ""
    """The run of the process; empty in what an older weaver has stored."""

    @property
    def behind(self) -> bool:
        return self.before is not None and (self.reached is None or self.reached < self.before)

    def to_dict(self) -> dict[str, object]:
        return {**_fields(self), "fault": None if self.fault is None else self.fault.to_body()}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> GoodputSlot:
        fault = stored["fault"]
        return cls(**{**stored, "fault": None if fault is None else FaultRecord(**fault)})


@dataclass(slots=True)
class JobTime:
    """The time of a job, and the slots of its replicas."""

    name: str
    since: float
    base: dict[str, float] = field(default_factory=dict)
    """Seconds of ended processes and vacant slots, by reason."""
    total: dict[str, float] = field(default_factory=dict)
    """Seconds by reason, with those of living processes: ``base`` plus the sum of ``counted``."""
    until: float = 0.0
    """When the job last changed."""
    alive: float = 0.0
    """When the job last had a living process."""
    slots: dict[str, GoodputSlot] = field(default_factory=dict)
    faults: list[FaultRecord] = field(default_factory=list)
    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    sample_every: float = SAMPLE_EVERY
    vacant: dict[str, None] = field(default_factory=dict)
    highest: dict[str, float] = field(default_factory=dict)
    """The most seconds by reason that `counters` has returned."""

    def to_dict(self) -> dict[str, object]:
        left_out = ("slots", "vacant", "total")
        stored = {name: value for name, value in _fields(self).items() if name not in left_out}
        return {**stored, "faults": [fault.to_body() for fault in self.faults]}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> JobTime:
        faults = [FaultRecord(**fault) for fault in stored["faults"]]
        samples = [(time, spent) for time, spent in stored["samples"]]
        return cls(**{**stored, "faults": faults, "samples": samples}, total=dict(stored["base"]))

    def restore(self, slot: GoodputSlot) -> None:
        self.slots[slot.replica] = slot
        if slot.vacant is not None:
            self.vacant[slot.replica] = None
        else:
            for reason, seconds in slot.counted.items():
                self.total[reason] = self.total.get(reason, 0.0) + seconds

    def update_fault(self, slot: GoodputSlot, **known: Any) -> None:
        before = slot.fault
        assert before is not None
        slot.fault = replace(before, **known)
        self.faults = [slot.fault if one == before else one for one in self.faults]

    @property
    def living(self) -> int:
        return len(self.slots) - len(self.vacant)

    def add(self, reason: str, seconds: float) -> None:
        self.base[reason] = self.base.get(reason, 0.0) + seconds
        self.total[reason] = self.total.get(reason, 0.0) + seconds

    def counters(self, now: float) -> dict[str, float]:
        """Return the seconds by reason as counters, which never fall.

        A corrected clock stands still until the correction is made up.
        """
        for reason, seconds in self.seconds(now).items():
            self.highest[reason] = max(seconds, self.highest.get(reason, 0.0))
        return dict(self.highest)

    def settle_vacant(self, now: float) -> list[str]:
        """Add the time of vacant slots to the sum if nothing lives any more; return the ids of their replicas.

        The job's share stays what it was at its end then.
        """
        settled = [] if self.living else [id for id in self.vacant if self.slots[id].awaited]
        for id in settled:
            slot = self.slots[id]
            assert slot.vacant is not None  # it is in `vacant`
            seconds = max(0.0, now - slot.vacant)
            self.add("respawn", seconds)
            slot.settled, slot.vacant = slot.settled + seconds, max(now, slot.vacant)
        return settled

    def seconds(self, now: float) -> dict[str, float]:
        """Return the seconds by reason, with the time for which slots wait for another process so far."""
        spent = dict.fromkeys(REASONS, 0.0)
        for reason, seconds in self.total.items():
            # A sum of many float differences may be slightly negative.
            known = reason if reason in spent or len(spent) < len(REASONS) + MAX_REASONS else OTHER
            spent[known] = spent.get(known, 0.0) + max(0.0, seconds)
        if self.living:
            awaited = (slot for id in self.vacant if (slot := self.slots[id]).awaited)
            spent["respawn"] += sum(max(0.0, now - (slot.vacant or now)) for slot in awaited)
        return spent


def _fields(kept: Any) -> dict[str, object]:
    return {name: getattr(kept, name) for name in kept.__slots__}
