"""How long something takes, counted the way Prometheus draws it."""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["BOUNDS", "Latencies"]

BOUNDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Seconds; what takes longer than the last is counted behind it."""


class Latencies:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds

    def to_dict(self) -> dict[str, object]:
        """``bounds``, ``counts`` (one more than bounds, each only of its own bucket) and ``sum``."""
        return {"bounds": list(BOUNDS), "counts": list(self.counts), "sum": self.sum}
