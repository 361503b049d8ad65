"""How much of the page is measured, and what was measured."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.benchmarks.page.trace import Trace, Update

__all__ = ["VIEWS", "Heap", "Load", "PageFigures", "PagePlan", "ViewFigures"]

VIEWS = {
    "overview": "overview",
    "runs": "runs",
    "a run": "runs/{run}",
    "two runs": "compare/{run}/{other}",
    "grid by state": "replicas",
    "grid by loss": "replicas?by=loss",
    "a replica": "replicas/{replica}",
    "steering": "steering?target=*",
    "devices": "devices",
}
"""Addresses of the views that are measured."""


@dataclass(frozen=True)
class PagePlan:
    """How much is measured."""

    replicas: int = 10_000
    group: int = 500
    """Replicas of a group, which are a run."""
    runs: int = 1000
    """Runs of the past."""
    points: int = 10_000_000
    """Points of a long run, which is opened."""
    seconds: float = 300.0
    """How long all views are measured, with what is between."""
    rounds: int = 4
    """Times that each view is measured."""

    @property
    def share(self) -> float:
        """Seconds of a view in a round."""
        return self.seconds / self.rounds / len(VIEWS)

    @property
    def traced(self) -> float:
        """Seconds for which a view is traced in a round."""
        return max(0.4 * self.share, 0.8)

    @property
    def window(self) -> float:
        """Seconds of each of the two measurements of the CPU time in a round."""
        return max(0.2 * self.share, 0.8)

    @property
    def settle(self) -> float:
        """Seconds that a view is open before it is measured."""
        return min(2.0, 0.2 * self.share)


@dataclass(frozen=True)
class Load:
    """CPU seconds that the processes used in some time."""

    seconds: float
    gateway: float
    weaver: float
    threadlets: float

    @property
    def serving(self) -> float:
        """Of one core, what gateway and weaver used, in per cent."""
        return 100 * (self.gateway + self.weaver) / self.seconds


@dataclass(frozen=True)
class Heap:
    """The page's heap after its garbage was collected."""

    at: float
    """Seconds since the page was measured first."""
    used: int
    """Bytes of objects, of what the browser keeps for them, and of buffers."""


@dataclass
class ViewFigures:
    """What was measured of a view, over all rounds."""

    traces: list[Trace] = field(default_factory=list)
    received: list[float] = field(default_factory=list)
    """Bytes a second of the messages to the page, in each round."""
    frames: list[float] = field(default_factory=list)
    """Milliseconds between the frames of an animation."""
    second_watcher: list[float] = field(default_factory=list)
    """Of one core, what gateway and weaver used more with a second watcher, in per cent; one for each round."""
    heaps: list[Heap] = field(default_factory=list)

    @property
    def updates(self) -> list[Update]:
        return [one for trace in self.traces for one in trace.updates]

    @property
    def growth(self) -> float:
        """KiB a minute by which the heap grew until the last round.

        The first round does not count if there are three: until a view was open, its code is not compiled.
        """
        first, last = self.heaps[1 if len(self.heaps) > 2 else 0], self.heaps[-1]
        return (last.used - first.used) / 1024 / (last.at - first.at) * 60


@dataclass
class PageFigures:
    """What was measured."""

    views: dict[str, ViewFigures]
    size: int
    """Bytes of the page's files, gzipped."""
    opened: float = 0.0
    """Seconds until the page was connected."""
    loads: list[Load] = field(default_factory=list)
    """Of each view and round, with one watcher."""
    stored: list[float] = field(default_factory=list)
    """Of the reports that were due, what the weaver has said to be stored; one for each round.

    It says so for two reports of a threadlet together, so that a few seconds more or less do not tell.
    """
    watcher_there: list[float] = field(default_factory=list)
    """Seconds until a second watcher had its snapshot."""
    calls_without: list[float] = field(default_factory=list)
    """Milliseconds of calls of a session before a page was open."""
    calls_opening: list[float] = field(default_factory=list)
    """The same while the page was opened."""
    calls_with: list[float] = field(default_factory=list)
    """The same while the page was open."""
    opened_long: list[float] = field(default_factory=list)
    """Milliseconds from the address of the long run until its curve is drawn; one for each round."""
    shown: float = 0.0
    """Seconds until it showed the replicas."""
