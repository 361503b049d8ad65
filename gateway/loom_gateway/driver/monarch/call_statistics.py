"""The calls of one endpoint: how many there were, and how long those of the last minute took.

It costs the same however many calls there are: times fall into buckets that each are a tenth wider than the one
before, and the buckets of the last six periods of ten seconds are kept. This arithmetic is apart from the table of
meshes, which alone uses it, because it needs nothing of Monarch.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict, deque
from math import log
from typing import NamedTuple

PERIOD = 10.0  # seconds
PERIODS = 6

_SHORTEST = 1e-5  # seconds: the upper bound of the bucket 0
_SCALE = 1 / math.log(1.1)
_FIRST = 1 - math.log(_SHORTEST) * _SCALE
_UNTIMED = -1  # the bucket of what has no answer


class CallSummary(NamedTuple):
    """The sums of an endpoint's calls."""

    calls: int
    """Without those that were not answered yet."""
    failures: int
    per_second: float
    p50: float | None
    p99: float | None


class EndpointCalls:
    """The calls of one endpoint. Safe on any thread. Times are those of ``time.perf_counter``."""

    __slots__ = ("_before", "_buckets", "_ends", "_failures", "_first", "_lock", "_periods")

    def __init__(self, now: float) -> None:
        self._lock = threading.Lock()
        self._before = 0  # calls of periods that are not kept
        self._failures = 0
        self._first = now
        self._periods: deque[tuple[int, defaultdict[int, int]]] = deque()  # each with its number and its buckets
        self._begin(now)

    def _begin(self, now: float) -> None:
        """Begin the period of a time."""
        if len(self._periods) == PERIODS:
            self._before += sum(self._periods.popleft()[1].values())
        number = int(now / PERIOD)
        self._ends = (number + 1) * PERIOD
        self._buckets = defaultdict[int, int](int)
        self._periods.append((number, self._buckets))

    def answered(self, now: float, seconds: float, failed: bool) -> None:
        """Count a call that was answered after so many seconds."""
        bucket = int(log(seconds) * _SCALE + _FIRST) if seconds > _SHORTEST else 0
        with self._lock:
            if now >= self._ends:
                self._begin(now)
            self._buckets[bucket] += 1
            if failed:
                self._failures += 1

    def sent(self, now: float) -> None:
        """Count a call that is never answered."""
        with self._lock:
            if now >= self._ends:
                self._begin(now)
            self._buckets[_UNTIMED] += 1

    def summary(self, now: float) -> CallSummary:
        """Return what the calls come to."""
        oldest = int(now / PERIOD) - PERIODS + 1
        counts: Counter[int] = Counter()
        with self._lock:
            calls, failures = self._before, self._failures
            for number, buckets in self._periods:
                calls += sum(buckets.values())
                if number >= oldest:
                    counts.update(buckets)
        lasted = max(now - max(self._first, oldest * PERIOD), 1.0)
        timed = sorted((bucket, count) for bucket, count in counts.items() if bucket != _UNTIMED)
        return CallSummary(calls, failures, counts.total() / lasted, _quantile(timed, 0.5), _quantile(timed, 0.99))


def _quantile(buckets: list[tuple[int, int]], share: float) -> float | None:
    """Return the time that a share of the calls did not exceed, given the count of each bucket in order."""
    wanted = math.ceil(share * sum(count for _, count in buckets))
    for bucket, count in buckets:
        wanted -= count
        if wanted <= 0:
            return _SHORTEST * math.exp((bucket - 0.5) / _SCALE)
    return None
