"""The weaver's view of runs, for users: JSON objects as in `loom.weaver.views`.

The design page about runs says what a run is, and where its parts lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from loom.weaver.views import MetricValue, View

R = TypeVar("R", bound="RunRecord")


class MetricSummary(NamedTuple):
    """A metric of a run, of the lowest rank of a group."""

    last: MetricValue
    min: MetricValue
    """The least value; values that are not a number do not count."""
    max: MetricValue
    step: int | None
    """The step of the last value."""


@dataclass(frozen=True)
class TrainingName:
    """The run of a training, as something else names it."""

    id: str
    name: str


class RunsPlace(NamedTuple):
    """A place of a session where processes of a run began."""

    place: str
    """The id of a proc mesh, or a function's, as `loom.control.run_start.function_place` names it."""
    times: Sequence[float]
    """When they did, in seconds since the epoch."""
    run: str
    """The run's id."""
    name: str


@dataclass(frozen=True)
class RunRecord(View):
    """A run: the start of a training, and what became of it. Times are seconds since the epoch."""

    id: str
    name: str
    """The group of the process with which it began."""
    state: str
    """``running``, or of an ended run a `loom.weaver.states.ReplicaEnding`, such as ``crashed``."""
    user: str = ""
    session: str | None = None
    groups: tuple[str, ...] = ()
    reason: str | None = None
    """The cause of the end, in words."""
    by: str | None = None
    """The token or session that stopped it."""
    first: str | None = None
    """The replica that failed first, if a failure ended the run."""
    began: float = 0.0
    ended: float | None = None
    step: int | None = None
    max_step: int | None = None
    ranks: int = 0
    """Replicas that are or were in it."""
    replicas: Mapping[str, int] = field(default_factory=dict)
    """The number of living replicas in each state."""
    restarts: int = 0
    """How often processes were started again in it; those that restart together count once."""
    command: tuple[str, ...] = ()
    """The command line, without secrets."""
    commit: str | None = None
    """Git's commit of the program's folder."""
    clean: bool | None = None
    """Whether the tracked files there are those of the commit."""
    tags: tuple[str, ...] = ()
    note: str = ""
    archived: bool = False
    parent: Mapping[str, Any] | None = None
    """The ``run`` that this one continues, the ``step`` of the checkpoint with which it began, and the ``kind``:
    ``branch``, ``restart`` or ``requeue``; None for a start of its own. Details have its ``name``, too."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The configuration at the start."""
    summary: Mapping[str, MetricSummary] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    """Fields that lack parts in a list: they are too large."""

    @classmethod
    def from_body(cls: type[R], body: Mapping[str, Any]) -> R:
        summary = {name: _summary(values) for name, values in body.get("summary", {}).items()}
        lists = {name: tuple(body.get(name, ())) for name in ("groups", "command", "tags", "left_out")}
        return super().from_body({**body, **lists, "summary": summary})


def _summary(values: Any) -> MetricSummary:
    last, least, most, step = values
    return MetricSummary(float(last), float(least), float(most), step)


@dataclass(frozen=True)
class RunDetails(RunRecord):
    """A run with its start, its ranks and its timeline."""

    start: Mapping[str, Any] = field(default_factory=dict)
    """The facts that the first process told: those of `loom.control.run_start.StartFacts`."""
    metrics: tuple[str, ...] = ()
    members: tuple[Mapping[str, Any], ...] = ()
    """The first thousand replicas: ``replica``, ``group``, ``rank``, ``host``, ``devices``, ``state``, ``step``,
    ``ending`` and ``end_reason``."""
    timeline: tuple[Mapping[str, Any], ...] = ()
    """Marks, the oldest first: ``kind``, ``time``, ``event`` (the id of the first event of it), ``step`` and what
    the kind has beside them, as the guide's page about the runs of trainings lists it."""
    children: tuple[Mapping[str, Any], ...] = ()
    """The runs that continue this one, the first first: ``run``, ``name``, ``state``, ``step`` and ``kind``."""
    marks_left_out: int = 0
    """Marks for which there was no room."""


@dataclass(frozen=True)
class RunComparison(View):
    """The differences of two runs. In each pair the first run's value comes first; None stands for none."""

    runs: tuple[RunRecord, ...]
    config: Mapping[str, tuple[Any, Any]]
    start: Mapping[str, tuple[Any, Any]]
    """Facts of the starts."""
    summary: Mapping[str, tuple[MetricSummary | None, MetricSummary | None]]
    """Of all metrics, also of equal ones."""
    step: int | None = None
    at_step: Mapping[str, tuple[MetricValue | None, MetricValue | None]] = field(default_factory=dict)
    """The last values at or before ``step``, if one was asked for, of the first 50 metrics that both have."""

    def to_body(self) -> dict[str, object]:
        return {**super().to_body(), "runs": [one.to_body() for one in self.runs]}

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> RunComparison:
        summary = {
            name: tuple(None if one is None else _summary(one) for one in pair)
            for name, pair in body["summary"].items()
        }
        at = {
            name: tuple(None if one is None else float(one) for one in pair)
            for name, pair in body["at_step"].items()
        }
        runs = tuple(map(RunRecord.from_body, body["runs"]))
        return super().from_body({**body, "runs": runs, "summary": summary, "at_step": at})


@dataclass(frozen=True)
class RunCurves(View):
    """A metric of a run as curves. Where more points are stored than were asked for, each is a mean of several."""

    run: str
    metric: str
    by: str
    ranks: int = 0
    """Replicas of the run that have the metric."""
    drawn: int = 0
    """Those that the curves are made of: at most 64 each by itself, and 256 in a band, evenly chosen."""
    curves: tuple[Mapping[str, Any], ...] = ()
    """``replica`` (None for the band) and ``sections``: columns ``time``, ``step``, ``value``, ``low``, ``high``.

    In a section steps rise, and no process of it began. None stands for values that are not finite. A band's value
    is the mean of its ranks, its ``low`` and ``high`` are the extremes.
    """
    outliers: tuple[Mapping[str, Any], ...] = ()
    """``replica``, ``value`` and ``distance`` of living ranks whose newest value is far from the others', the
    farthest first: the distance from the median in median absolute deviations, None if it is not finite."""
