"""`TrackerSink` and `TrackedRun`: what a tracker's module offers to the exporter.

A run tells what it holds already, which it reads in the tracker itself. So the exporter sends nothing twice,
however it, or what it was writing, has ended.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

from loom.errors import MissingDependency
from loom.extras import require
from loom.weaver.views import ReplicaInfo


class TrackerKind(str, Enum):
    """The trackers, by the names of their extras."""

    WANDB = "wandb"
    MLFLOW = "mlflow"
    TRACKIO = "trackio"
    TENSORBOARD = "tensorboard"


@dataclass(frozen=True)
class Destination:
    """Where runs are written."""

    project: str = "loom"
    """The project, or the experiment, of the runs."""
    folder: Path = Path("loom-export")
    """The folder of files that a tracker writes on this machine."""


@dataclass(frozen=True)
class TrackerRow:
    """The values of one status report."""

    time: float
    """Seconds since the epoch."""
    step: int | None
    values: Mapping[str, float]


@dataclass(frozen=True)
class TrackerMark:
    """An event of a replica."""

    event: int
    """The event's id."""
    time: float
    """Seconds since the epoch."""
    step: int | None
    kind: str
    text: str

    @property
    def line(self) -> str:
        """The mark as a text, from which `event_of` reads the id."""
        return f"#{self.event} {self.kind} {self.text}".rstrip()


@dataclass
class Written:
    """The contents of a run."""

    points: Counter[str] = field(default_factory=Counter)
    """The number of points of each metric, by the tracker's name for it."""
    times: dict[str, float] = field(default_factory=dict)
    """The latest time of a point of each metric, in seconds since the epoch."""
    event: int = 0
    """The id of the last event that is marked."""

    def add(self, name: str, time: float, count: int = 1) -> None:
        """Count points of a metric, the latest of which has this time."""
        self.points[name] += count
        self.times[name] = max(time, self.times.get(name, time))


class TrackedRun(ABC):
    """A replica's run in a tracker."""

    url: str | None = None
    """The address of the run: for a browser, or `local_address` of its files."""

    @abstractmethod
    def written(self) -> Written:
        """Read what the run holds."""

    @abstractmethod
    def log(self, rows: Sequence[TrackerRow]) -> None:
        """Add points, in this order, of which any may be the last if the process dies."""

    @abstractmethod
    def mark(self, marks: Sequence[TrackerMark]) -> None:
        """Add marks, likewise."""

    @abstractmethod
    def set_config(self, config: Mapping[str, Any]) -> None:
        """Set the run's configuration to the replica's present one."""

    @abstractmethod
    def close(self, replica: ReplicaInfo) -> None:
        """End the run, or the work on it, if the replica has not ended."""


class TrackerSink(ABC):
    """A tracker."""

    def name_of(self, metric: str) -> str:
        """Return the tracker's name for a metric. The points of metrics with one name are written together."""
        return metric

    @abstractmethod
    def open(self, replica: ReplicaInfo) -> TrackedRun:
        """Return a replica's run, which is made if there is none yet."""


_NEEDED = {
    TrackerKind.WANDB: {"wandb": "wandb"},
    TrackerKind.MLFLOW: {"mlflow": "mlflow-skinny"},
    TrackerKind.TRACKIO: {"trackio": "trackio"},
    TrackerKind.TENSORBOARD: {"tensorboard": "tensorboard"},
}


def check_installed(kind: TrackerKind) -> None:
    """Raise `MissingDependency` unless a tracker's package is installed."""
    require(_NEEDED[kind], f"the export to {kind.value}", extra=kind.value)


def open_tracker(kind: TrackerKind, destination: Destination) -> TrackerSink:
    """Return a tracker. Raise `MissingDependency` unless its package is installed, and can be imported."""
    check_installed(kind)
    try:
        make: Callable[[Destination], TrackerSink] = import_module(f"loom.exporters.{kind.value}").open_tracker
    except Exception as error:
        raise MissingDependency(
            f"the export to {kind.value} needs its package, which cannot be imported: {error!r:.300}; install it "
            f"again: pip install --force-reinstall 'monarch-loom[{kind.value}]'"
        ) from error
    return make(destination)
