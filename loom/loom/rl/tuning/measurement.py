"""What some steps of a run came to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from loom.rl.diagnosis.result import Analysis

HOUR = 3600.0
PIECES = 4
"""Pieces into which steps are divided to see how much their length varies."""


@dataclass(frozen=True)
class Measurement:
    """Some steps of a run. What is None was not reported."""

    first: int
    """The first step."""
    last: int
    steps_per_hour: float
    step_seconds: float
    """The mean wall time of a step."""
    error: float
    """The standard error of ``step_seconds``, in seconds."""
    reward: float | None = None
    """The mean reward."""
    reward_error: float = 0.0
    """The standard error of ``reward``."""
    loss: float | None = None
    trunc_pct: float | None = None
    staleness: float | None = None

    @classmethod
    def of(cls, first: int, last: int, found: Analysis, rewards: list[float], losses: list[float]) -> Measurement:
        """Return the measurement of steps, from the analysis of their log and what the weaver has of them."""
        walls = found.metrics["step_s"]
        durations = found.measured.series["step_s"].points.values
        reward, reward_error = _mean(rewards)
        means = {name: found.metrics[name].mean for name in ("trunc_pct", "staleness") if name in found.metrics}
        return cls(
            first=first,
            last=last,
            steps_per_hour=HOUR / walls.mean,
            step_seconds=walls.mean,
            error=_error(durations),
            reward=reward,
            reward_error=reward_error,
            loss=_mean(losses)[0],
            **means,
        )

    def faster_than(self, other: Measurement) -> float:
        """Return by what share these steps are faster: 0.1 for a tenth more steps an hour."""
        return self.steps_per_hour / other.steps_per_hour - 1

    def as_dict(self) -> dict[str, Any]:
        """Return the object for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Measurement:
        """Return what `as_dict` gave, also that of a newer version."""
        return cls(**{field.name: told[field.name] for field in fields(cls) if field.name in told})


def _mean(values: list[float]) -> tuple[float | None, float]:
    """Return the mean and its standard error."""
    if not values:
        return None, 0.0
    mean = sum(values) / len(values)
    spread = sum((value - mean) ** 2 for value in values) / len(values)
    return mean, sqrt(spread / len(values))


def _error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of values in their order; neighbours may depend on each other."""
    size = max(1, len(values) // PIECES)
    means = [fmean(values[at : at + size]) for at in range(0, len(values) - size + 1, size)]
    return stdev(means) / sqrt(len(means)) if len(means) > 1 else 0.0
