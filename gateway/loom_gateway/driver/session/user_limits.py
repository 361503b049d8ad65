"""`UserLimits`: limits that hold for all sessions of a user together.

Each session has a process of its own, and nothing may be asked for each call. So every driver reports to its user's
weaver, with what it reports anyway every two seconds, what its session uses, and gets in return what the user's
other sessions use. It counts against what is left. Between two reports, sessions may exceed a limit together; none
ever does alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loom_gateway.driver.clients.results import StoredResults


class UserLimits:
    """The limits of one session, as far as the user's other sessions leave them.

    Args:
        max_in_flight: unanswered operations of all sessions; 0 is any number.
        results: keeps results, up to its limit for all sessions.
        in_flight: returns the number of this session's unanswered operations.
    """

    def __init__(self, max_in_flight: int, results: StoredResults, in_flight: Callable[[], int]) -> None:
        self.max_in_flight = max_in_flight
        self._results = results
        self._in_flight = in_flight
        self.in_flight_left = max_in_flight
        """What the other sessions leave of `max_in_flight`."""

    def used(self) -> dict[str, int]:
        """Return what this session uses, as the weaver takes it."""
        return {"in_flight": self._in_flight(), "kept": self._results.used}

    def take(self, others: Any) -> None:
        """Take what the weaver says that the other sessions use; None if it said nothing, as when it is away."""
        found = others if isinstance(others, dict) else {}
        self.in_flight_left = max(0, self.max_in_flight - int(found.get("in_flight", 0)))
        self._results.kept_elsewhere = int(found.get("kept", 0))
