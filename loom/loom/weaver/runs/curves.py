"""The curves of one metric of a run: of single ranks, and a band of many."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from loom.weaver.storage.history import READ_CLOSELY
from loom.weaver.storage.samples import CurveSamples, average

READ_IN_ALL = 1 << 18
"""Points of many ranks that are read one by one."""

FAR = 6.0
"""Median absolute deviations from the median from which on a rank is an outlier."""

MAX_OUTLIERS = 16


class CurveReader:
    """Reads the curves that one request asks for.

    Args:
        read: returns the samples of a replica, with at most so many points read one by one.
        by: ``step`` or ``time``.
        begun: the times when processes of the run began again.
    """

    def __init__(
        self, read: Callable[[str, int], CurveSamples], by: str, points: int, begun: Sequence[float] = ()
    ) -> None:
        self._read = read
        self._by = by
        self._points = points
        self._begun = begun

    def each(self, replicas: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        for replica in replicas:
            sections = self._sections(replica, len(replicas))
            total = sum(map(len, sections))
            thin = [one.thinned(max(2, self._points * len(one) // max(1, total))) for one in sections]
            yield {"replica": replica, "sections": [one.to_body() for one in thin]}

    def band(self, lead: str, replicas: Sequence[str]) -> Mapping[str, Any]:
        """Return one curve over several ranks, with the lead's sections. The newest ones belong together."""
        frames = self._sections(lead, 1)
        total = sum(map(len, frames))
        edges = [_edges(one.x(self._by), max(2, self._points * len(one) // max(1, total))) for one in frames]
        bands: list[list[CurveSamples]] = [[] for _ in frames]
        for replica in replicas:
            sections = frames if replica == lead else self._sections(replica, len(replicas))
            for section, grid, band in zip(reversed(sections), reversed(edges), reversed(bands), strict=False):
                band.append(section.on(grid, self._by))
        return {"replica": None, "sections": [_together(band).to_body() for band in bands]}

    def _sections(self, replica: str, of: int) -> list[CurveSamples]:
        found = self._read(replica, min(READ_CLOSELY, READ_IN_ALL // of))
        if self._by == "time":
            found = found.in_time()
        elif any(map(math.isnan, found.steps)):  # points without a step have no place on this axis
            found = found.within("step", 0.0, math.inf)
        return found.sections(self._begun)


def _edges(x: Sequence[float], most: int) -> list[float]:
    """Return the edges of equal intervals over a range, at most one for each step where there are few."""
    there = [one for one in x if math.isfinite(one)]
    if not there:
        return [-math.inf, math.inf]
    first, last = min(there), max(there)
    count = min(most, len(there))
    width = (last - first) / max(1, count)
    return [first + width * at for at in range(count)] + [math.nextafter(last, math.inf)]


def _together(band: Sequence[CurveSamples]) -> CurveSamples:
    """Return the mean and the extremes of several ranks in each interval that one of them has points in."""
    joined = CurveSamples()
    if not band:
        return joined
    by_column = zip(*(one.columns() for one in band), strict=True)
    by_interval = zip(*(list(zip(*ranks, strict=True)) for ranks in by_column), strict=True)
    for counts, times, steps, means, lows, highs in by_interval:
        if not any(counts):
            continue
        there = [at for at, count in enumerate(counts) if count]
        joined.add(
            sum(counts),
            max(times[at] for at in there),
            max(steps[at] for at in there),
            average([means[at] for at in there]),
            min((lows[at] for at in there if math.isfinite(lows[at])), default=math.nan),
            max((highs[at] for at in there if math.isfinite(highs[at])), default=math.nan),
        )
    return joined


def outliers(values: Mapping[str, float]) -> list[Mapping[str, Any]]:
    """Return the ranks whose newest value is far from the others', the farthest first.

    The distance is from the median, in median absolute deviations; of ranks that are all equal nearly, in
    thousandths of their median.
    """
    finite = {replica: value for replica, value in values.items() if math.isfinite(value)}
    found: list[tuple[str, float | None, float]] = [
        (replica, None, math.inf) for replica in values if replica not in finite
    ]
    if len(finite) >= 3:
        middle = median(finite.values())
        spread = median(abs(value - middle) for value in finite.values()) or abs(middle) * 1e-3 or 1e-9
        distances = ((replica, value, abs(value - middle) / spread) for replica, value in finite.items())
        found += sorted((one for one in distances if one[2] > FAR), key=lambda one: -one[2])
    return [
        {"replica": replica, "value": value, "distance": None if value is None else distance}
        for replica, value, distance in found[:MAX_OUTLIERS]
    ]
