"""`Sessions`: what the drivers of one user's living sessions report of themselves every few seconds."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from loom.control.arguments import count, seconds, text
from loom.control.latencies import BOUNDS
from loom.errors import WrongArguments

LIVES_FOR = 15.0
"""Seconds after its last report for which a session counts as living: several times the pause between two."""

USES_FOR = 6.0
"""Seconds after its last report for which what a session uses counts: it is kept from the others no longer."""

MOST_USED = 1 << 53
"""The largest sum that is told."""

_MAX_SESSIONS = 1_000
_MAX_WORKERS = 10_000


@dataclass(frozen=True)
class _Report:
    time: float
    latencies: dict[str, Any]
    workers: frozenset[str]
    in_flight: int
    kept: int


class Sessions:
    """The last report of each session; sessions that reported last come last."""

    def __init__(self) -> None:
        self._reports: dict[str, _Report] = {}

    @property
    def latencies(self) -> dict[str, dict[str, Any]]:
        """The latencies of calls by session, as `loom.control.latencies.Latencies.to_dict`."""
        return {session: report.latencies for session, report in self._reports.items()}

    def workers(self, session: str | None) -> frozenset[str]:
        """Return the addresses of a session's workers."""
        report = self._reports.get(session or "")
        return frozenset() if report is None else report.workers

    def use(self, workers: Collection[str], now: float) -> bool:
        """Return whether a living session uses one of the workers."""
        living = (report for report in self._reports.values() if now < report.time + LIVES_FOR)
        return any(not report.workers.isdisjoint(workers) for report in living)

    def take(self, arguments: dict[str, Any], now: float) -> dict[str, int]:
        """Take a driver's report; return what the user's other sessions use of the limits that count by user.

        A report has ``session`` and ``workers``, ``counts`` and ``sum`` of the calls, and what the session uses:
        its unanswered operations ``in_flight``, and the bytes of results that it has ``kept``.
        """
        session, counts, workers = text(arguments, "session"), arguments.get("counts"), arguments.get("workers", [])
        if not isinstance(counts, list) or len(counts) != len(BOUNDS) + 1:
            raise WrongArguments(f"counts are {len(BOUNDS) + 1} numbers, not {counts!r:.80}")
        if type(workers) is not list or len(workers) > _MAX_WORKERS or not all(type(one) is str for one in workers):
            raise WrongArguments(f"workers are at most {_MAX_WORKERS} addresses, not {workers!r:.80}")
        counts = [count({"a count": one}, "a count", 0) for one in counts]
        latencies = {"bounds": list(BOUNDS), "counts": counts, "sum": seconds(arguments, "sum", 0.0)}
        latencies["tasks_died"] = count(arguments, "tasks_died", 0)
        self._reports.pop(session, None)  # reinsert it at the end: the first entry is dropped first
        used = count(arguments, "in_flight", 0), count(arguments, "kept", 0)
        self._reports[session] = _Report(now, latencies, frozenset(workers), *used)
        if len(self._reports) > _MAX_SESSIONS:
            del self._reports[next(iter(self._reports))]
        others = [one for name, one in self._reports.items() if name != session and now < one.time + USES_FOR]
        sums = {"in_flight": sum(one.in_flight for one in others), "kept": sum(one.kept for one in others)}
        return {name: min(value, MOST_USED) for name, value in sums.items()}
