"""The time of a job: its slots, and the deaths of processes in them.

A plot of a job's goodput: the use of its time over its life, and the deaths of its processes.

The plot needs matplotlib (extra ``plot``), which is imported only when a plot is made.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loom.control.reports import MAX_REASONS, OTHER, REASONS
from loom.extras import require
from loom.weaver.views import CoursePoint, FaultRecord, GoodputRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes


COLOURS = {
    "compute": "#2e9e5b",
    "lost": "#c0392b",
    "checkpoint": "#3b7dd8",
    "waiting": "#e5c043",
    "detection": "#8e44ad",
    "respawn": "#e67e22",
    "idle": "#c8ccd0",
}
MORE_COLOURS = ("#16a3b8", "#7f6b4f", "#d977b0", "#5b6770")
"""For the reasons that a training names in addition."""

BARS = 120  # bars in a plot at most; a bar is the mean over its time


def save_plot(record: GoodputRecord, path: str | Path) -> Path:
    """Write a PNG: the share of each reason over time as stacked bars, deaths as lines, and the total as one bar.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    require({"matplotlib": "matplotlib"}, "a plot of goodput", "plot")
    from matplotlib.figure import Figure  # pyplot could open a window, and disturb a program's own plots

    figure = Figure(figsize=(11, 5), layout="constrained")
    over_time, in_all = figure.subplots(1, 2, width_ratios=[12, 1], sharey=True)
    named = sorted(set(record.seconds) - set(REASONS))
    reasons = [*REASONS[:-1], *named, REASONS[-1]]
    colours = {**COLOURS, **dict(zip(named, itertools.cycle(MORE_COLOURS), strict=False))}
    _draw_timeline(over_time, record, reasons, colours)
    _draw_faults(over_time, record)
    below = 0.0
    for reason in reasons:
        in_all.bar(0, 100 * record.share(reason), bottom=below, color=colours[reason])
        below += 100 * record.share(reason)
    in_all.set(xticks=[], xlabel="in all")
    good = "no time yet" if record.ratio is None else f"{100 * record.ratio:.1f} %"
    deaths = f"{len(record.faults)} death" + ("" if len(record.faults) == 1 else "s")
    figure.suptitle(f"Goodput of {record.job}: {good}; {deaths}", parse_math=False)
    used = [reason for reason in reasons if record.seconds.get(reason, 0.0) > 0]
    labels = [f"{reason} ({100 * record.share(reason):.1f} %)" for reason in used]
    marks = [over_time.bar(0, 0, color=colours[reason]) for reason in used]
    figure.legend(marks, labels, loc="outside lower center", ncols=4)
    path = Path(path)
    figure.savefig(path, format="png", dpi=120)
    return path


def _draw_timeline(axes: Axes, record: GoodputRecord, reasons: Sequence[str], colours: dict[str, str]) -> None:
    points = _at_most(record.course, BARS + 1)
    for before, after in itertools.pairwise(points):
        spent = {reason: _grown(reason, before, after) for reason in reasons}
        whole = sum(spent.values())
        begin, end = before.time - record.since, after.time - record.since
        below = 0.0
        for reason in reasons if whole > 0 else ():
            share = 100 * spent[reason] / whole
            axes.bar(begin, share, end - begin, bottom=below, color=colours[reason], align="edge")
            below += share
    axes.set(xlabel="seconds since the beginning", ylabel="share of the replicas' time (%)", ylim=(0, 100))
    axes.set_xlim(0, max(record.until - record.since, 1e-3))


def _draw_faults(axes: Any, record: GoodputRecord) -> None:
    for fault in record.faults:
        axes.axvline(fault.time - record.since, color="black", linewidth=1, linestyle=":")
        if fault.stepped is not None:
            axes.axvspan(fault.time - record.since, fault.stepped - record.since, color="black", alpha=0.12, lw=0)


def _grown(reason: str, before: CoursePoint, after: CoursePoint) -> float:
    # The sum falls when a process that was taken for dead reconnects and gets its time back.
    return max(0.0, after.seconds.get(reason, 0.0) - before.seconds.get(reason, 0.0))


def _at_most(points: Sequence[CoursePoint], count: int) -> Sequence[CoursePoint]:
    if len(points) <= count:
        return points
    return [points[round(slot * (len(points) - 1) / (count - 1))] for slot in range(count)]


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
