"""Statistics of a metric that may have millions of values, in bounded memory.

Count, sum, mean, standard deviation (of the population), minimum and maximum are exact. Percentiles are exact,
with linear interpolation, while the metric has at most so many distinct values as `Series` is given; after that
each value counts as its first three digits, so that a percentile is right to half a per cent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

DISTINCT = 50_000
"""Distinct values up to which percentiles are exact."""
POINTS = 4096
"""Values that are kept in their order, evenly spread, for plots and comparisons."""
FIRST_OF = 5
"""With this many values, a largest first value counts as start-up in `Series.steady_total`."""

_DIGITS = "{:.3g}".format


@dataclass(frozen=True)
class Stats:
    """The statistics of a metric."""

    count: int
    mean: float
    stddev: float
    min: float
    max: float
    p50: float
    p90: float
    p95: float
    p99: float

    def as_dict(self) -> dict[str, float]:
        """Return the statistics by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


class Sums:
    """Count, sum, mean, minimum and maximum of values, which come in batches."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.min = math.inf
        self.max = -math.inf
        self.first = 0.0
        self._mean = 0.0

    def extend(self, values: Sequence[float]) -> None:
        """Add finite values."""
        if values:
            self._add(values)

    def _add(self, values: Sequence[float]) -> float:
        """Add one value or more, and return their mean."""
        if not self.count:
            self.first = values[0]
        count, total = len(values), math.fsum(values)
        mean = total / count
        self.count += count
        self.total += total
        self._mean += (mean - self._mean) * count / self.count
        self.min = min(self.min, min(values))
        self.max = max(self.max, max(values))
        return mean

    @property
    def mean(self) -> float:
        """The mean, or 0.0 without values."""
        return self._mean

    @property
    def steady_total(self) -> float:
        """The sum without a start-up: the first of `FIRST_OF` or more values, if it is the largest."""
        return self.total - self.first if self._starts_slowly else self.total

    @property
    def steady_count(self) -> int:
        """The number of values in `steady_total`."""
        return self.count - 1 if self._starts_slowly else self.count

    @property
    def steady_mean(self) -> float:
        """The mean without a start-up, or 0.0 without values."""
        return self.steady_total / self.steady_count if self.count else 0.0

    @property
    def _starts_slowly(self) -> bool:
        return self.count >= FIRST_OF and self.first >= self.max > self.min


class Series(Sums):
    """All statistics of values, which come in batches.

    Args:
        distinct: as `DISTINCT`.
    """

    def __init__(self, distinct: int = DISTINCT) -> None:
        super().__init__()
        self.exact = True
        """True if percentiles are exact."""
        self.points = EvenSample(POINTS)
        """Some of the values, in their order."""
        self._squares = 0.0
        """Sum of the squared distances from the mean."""
        self._distinct = distinct
        self._values: Counter[float] = Counter()
        self._rounded: Counter[str] = Counter()

    def _add(self, values: Sequence[float]) -> float:
        before, mean_before = self.count, self._mean
        mean = super()._add(values)
        delta = mean - mean_before
        squares = math.fsum([(value - mean) ** 2 for value in values])
        # Chan, Golub and LeVeque, 1979
        self._squares += squares + delta * delta * before * len(values) / self.count
        self.points.extend(values)
        if self.exact:
            self._values.update(values)
            if len(self._values) > self._distinct:
                self._round()
        else:
            self._rounded.update(map(_DIGITS, values))
        return mean

    @property
    def stddev(self) -> float:
        """The standard deviation of the population."""
        return math.sqrt(self._squares / self.count) if self.count else 0.0

    def percentiles(self, *percents: float) -> list[float]:
        """Return percentiles, in ascending order of ``percents``."""
        if not self.count:
            return [0.0] * len(percents)
        counts: Iterable[tuple[float, int]] = (
            self._values.items() if self.exact else ((float(text), n) for text, n in self._rounded.items())
        )
        ascending = sorted(counts)
        return [self._at((self.count - 1) * percent / 100, ascending) for percent in percents]

    def stats(self) -> Stats | None:
        """Return all statistics, or None without values."""
        if not self.count:
            return None
        return Stats(self.count, self.mean, self.stddev, self.min, self.max, *self.percentiles(50, 90, 95, 99))

    def _at(self, place: float, ascending: Sequence[tuple[float, int]]) -> float:
        """Return the value at a place between 0 and ``count - 1``, between two values in proportion."""
        below, seen = math.floor(place), 0
        for index, (value, count) in enumerate(ascending):
            seen += count
            if below < seen:
                after = value if below + 1 < seen or index + 1 == len(ascending) else ascending[index + 1][0]
                return min(max(value + (after - value) * (place - below), self.min), self.max)
        return self.max

    def _round(self) -> None:
        self.exact = False
        for value, count in self._values.items():
            self._rounded[_DIGITS(value)] += count
        self._values.clear()


class EvenSample:
    """At most so many of the values of a stream, evenly spread over it and in their order."""

    def __init__(self, most: int) -> None:
        self.values: list[float] = []
        self.stride = 1
        """One of so many values of the stream is kept."""
        self._most = most
        self._seen = 0

    def extend(self, values: Sequence[float]) -> None:
        self.values += values[-self._seen % self.stride :: self.stride]
        self._seen += len(values)
        while len(self.values) > self._most:
            self.values = self.values[::2]
            self.stride *= 2
