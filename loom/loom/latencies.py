"""How long something takes, counted the way Prometheus draws it."""

from __future__ import annotations

import threading
from bisect import bisect_left
from typing import Any

BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Seconds; what takes longer than the last is counted behind it."""


class Latencies:
    """A histogram of seconds. Any thread may add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        bucket = bisect_left(BOUNDS, seconds)
        with self._lock:
            self.counts[bucket] += 1
            self.sum += seconds

    def to_dict(self) -> dict[str, Any]:
        """``bounds``, ``counts`` (one more than bounds, each only of its own bucket) and ``sum``."""
        with self._lock:
            return {"bounds": list(BOUNDS), "counts": list(self.counts), "sum": self.sum}
