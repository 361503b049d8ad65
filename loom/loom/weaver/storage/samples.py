"""`CurveSamples`: points of a metric as columns, in which a whole chunk of points may be one sample.

A store of ten million points answers a curve from the outlines of its chunks, and reads the chunks themselves only
where the curve is looked at closely.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from operator import le, lt
from typing import Any

POINT = 3
"""Doubles of a point: time, step, value."""


_Outline = tuple[int, int, int, float, float, float, float, float | None, float | None, float | None]


def outline(series: int, chunk: int, data: bytes) -> _Outline | None:
    """Return the outline of a chunk; None if its steps do not rise, or some points have none.

    It has the number of points, the earliest time, the time of the last one, the first and the last step, the mean
    of the values, None if one is not finite, and the least and the greatest of the finite ones.
    """
    points = array("d", data)
    times, steps, values = points[::POINT], points[1::POINT], points[2::POINT]
    if not all(map(le, steps, steps[1:])) or math.isnan(steps[-1]):
        return None
    mean = average(values)
    finite = values if math.isfinite(mean) else [one for one in values if math.isfinite(one)]
    low, high = min(finite, default=None), max(finite, default=None)
    return series, chunk, len(times), min(times), times[-1], steps[0], steps[-1], _finite(mean), low, high


def average(values: Sequence[float]) -> float:
    """Return the mean; not a number if one of the values is none, or there are infinities of both signs."""
    try:
        return math.fsum(values) / len(values)
    except ValueError:  # infinities of both signs
        return math.nan
    except OverflowError:
        return math.fsum(value / len(values) for value in values)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class CurveSamples:
    """CurveSamples in the order in which their points came."""

    __slots__ = ("counts", "highs", "lows", "means", "steps", "times")

    def __init__(self) -> None:
        self.counts: list[int] = []
        """The number of points that each sample stands for."""
        self.times: list[float] = []
        """The time of the last of them; for `steps` likewise."""
        self.steps: list[float] = []
        """Not a number for a point without a step."""
        self.means: list[float] = []
        self.lows: list[float] = []
        self.highs: list[float] = []

    def __len__(self) -> int:
        return len(self.counts)

    def add_points(self, points: array[float]) -> None:
        values = points[2::POINT].tolist()
        self._extend([1] * len(values), points[::POINT].tolist(), points[1::POINT].tolist(), values, values, values)

    def add_outlines(self, outlines: Iterable[Sequence[Any]]) -> None:
        """Add (chunk, points, last time, last step, mean, low, high) of chunks."""
        _, counts, times, steps, *values = zip(*outlines, strict=True)
        columns = ([math.nan if one is None else one for one in some] if None in some else some for some in values)
        self._extend(counts, times, steps, *columns)

    def add(self, count: int, time: float, step: float, mean: float, low: float, high: float) -> None:
        self._extend([count], [time], [step], [mean], [low], [high])

    def _extend(self, *columns: Sequence[Any]) -> None:
        for mine, more in zip(self.columns(), columns, strict=True):
            mine.extend(more)

    def columns(self) -> tuple[list[Any], ...]:
        return self.counts, self.times, self.steps, self.means, self.lows, self.highs

    def _taken(self, take: Callable[[list[Any]], list[Any]]) -> CurveSamples:
        taken = CurveSamples()
        for mine, other in zip(taken.columns(), self.columns(), strict=True):
            mine += take(other)
        return taken

    def x(self, by: str) -> list[float]:
        return self.steps if by == "step" else self.times

    def within(self, by: str, since: float, until: float) -> CurveSamples:
        """Return the samples of a range of steps or times."""
        if since == -math.inf and until == math.inf:
            return self
        inside = [at for at, x in enumerate(self.x(by)) if since <= x <= until]
        return self._taken(lambda column: [column[at] for at in inside])

    def in_time(self) -> CurveSamples:
        """Return the samples in the order of their times."""
        if all(map(le, self.times, self.times[1:])):
            return self
        order = sorted(range(len(self)), key=self.times.__getitem__)
        return self._taken(lambda column: [column[at] for at in order])

    def sections(self, begun: Sequence[float] = ()) -> list[CurveSamples]:
        """Return the parts in which steps rise, and that no process has begun within, by the times of those."""
        falls = list(map(lt, self.steps[1:], self.steps))
        bounds = {at for at, falls_here in enumerate(falls, 1) if falls_here} if True in falls else set()
        if self.times:
            bounds |= {bisect_left(self.times, time) for time in begun if self.times[0] < time <= self.times[-1]}
        ends = [*sorted(bounds), len(self)]
        return [self.part(start, end) for start, end in zip([0, *ends], ends, strict=False) if start < end]

    def part(self, start: int, end: int) -> CurveSamples:
        return self._taken(lambda column: column[start:end])

    def thinned(self, most: int) -> CurveSamples:
        """Return at most so many samples, each for as many points, about."""
        every = sum(self.counts) / most
        if len(self) <= most:
            return self
        sums = list(accumulate(self.counts))
        bounds, start = [], 0
        while start < len(self):
            end = max(start + 1, bisect_left(sums, (sums[start - 1] if start else 0) + every) + 1)
            bounds.append((start, min(end, len(self))))
            start = end
        return self._joined(bounds)

    def on(self, edges: Sequence[float], by: str) -> CurveSamples:
        """Return one sample for each interval between edges; of counts of 0 where there is none."""
        x = self.x(by)
        at = [bisect_left(x, edge) for edge in edges]
        return self._joined(list(pairwise(at)))

    def _joined(self, bounds: Iterable[tuple[int, int]]) -> CurveSamples:
        joined = CurveSamples()
        raw = self.lows is self.highs or self.lows == self.means
        for start, end in bounds:
            counts, means = self.counts[start:end], self.means[start:end]
            total = sum(counts)
            if not total:
                joined.add(0, *[math.nan] * 5)
                continue
            if total == len(counts):
                mean = average(means)
            else:
                mean = (
                    average([one * count for one, count in zip(means, counts, strict=True)]) * len(counts) / total
                )
            lows = means if raw else self.lows[start:end]
            highs = means if raw else self.highs[start:end]
            if not math.isfinite(mean):
                lows = [one for one in lows if math.isfinite(one)] or [math.nan]
                highs = [one for one in highs if math.isfinite(one)] or [math.nan]
            last = end - 1
            joined.add(total, self.times[last], self.steps[last], mean, min(lows), max(highs))
        return joined

    def to_body(self) -> dict[str, list[float | None]]:
        """Return the columns of a curve; what is not finite is None."""
        steps = self.steps
        return {
            "time": list(self.times),
            "step": [None if math.isnan(one) else int(one) for one in steps],
            "value": list(map(_finite, self.means)),
            "low": list(map(_finite, self.lows)),
            "high": list(map(_finite, self.highs)),
        }
