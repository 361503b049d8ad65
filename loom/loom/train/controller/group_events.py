"""What a replica group tells the controller: one dataclass for each kind of event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from loom.train.settings import TrainerReport

__all__ = ["Ended", "Failed", "GroupEvent", "Prepared", "ProcessLost", "Reported", "Silent"]


@dataclass(frozen=True)
class Prepared:
    """The group's processes have imported everything: it can begin at once."""


@dataclass(frozen=True)
class ProcessLost:
    """A process of the group is gone."""

    rank: int


@dataclass(frozen=True)
class Reported:
    """How far the first member is."""

    report: TrainerReport


@dataclass(frozen=True)
class Silent:
    """The group's processes do not answer."""

    seconds: float
    """How long they have not answered."""


@dataclass(frozen=True)
class Ended:
    """The group's training has ended."""

    report: TrainerReport
    """The last report, of the first member that failed if one did."""


@dataclass(frozen=True)
class Failed:
    """The group cannot be used any more."""

    reason: str


GroupEvent: TypeAlias = Prepared | ProcessLost | Reported | Silent | Ended | Failed
