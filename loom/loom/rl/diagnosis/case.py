"""`Case`: the measured subject of a rule."""

from __future__ import annotations

from dataclasses import dataclass, field

from loom.rl.diagnosis.attribution import Lost
from loom.rl.diagnosis.evidence import Evidence
from loom.rl.diagnosis.rules import Bound
from loom.rl.diagnosis.statistics import Series


@dataclass(frozen=True)
class Case:
    """The measured subject of a rule."""

    value: float
    lost: Lost
    metrics: tuple[str, ...]
    """The metrics whose largest values are the evidence."""
    details: list[str] = field(default_factory=list)
    bounds: tuple[Bound, ...] | None = None
    evidence: list[Evidence] | None = None


def typical(series: Series) -> float:
    """Return the mean, without a slow start if that makes it lower."""
    return min(series.mean, series.steady_mean)
