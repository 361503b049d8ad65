"""A histogram of latencies, with buckets for Prometheus."""

from __future__ import annotations

import threading
from bisect import bisect_left
from typing import TypedDict

BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Upper bounds of the buckets in seconds; a further bucket counts longer times."""


class LatencyCounts(TypedDict):
    """A histogram as it travels."""

    bounds: list[float]
    counts: list[int]
    """One more than bounds, each only of its own bucket."""
    sum: float


class Latencies:
    """A histogram of seconds. Any thread may add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        """Count a latency, in seconds."""
        bucket = bisect_left(BOUNDS, seconds)
        with self._lock:
            self.counts[bucket] += 1
            self.sum += seconds

    def to_dict(self) -> LatencyCounts:
        with self._lock:
            return {"bounds": list(BOUNDS), "counts": list(self.counts), "sum": self.sum}
