"""`Baseline`: how long a group usually waits for the others in a step, so that a longer wait is noticed."""

from __future__ import annotations

from collections import deque
from statistics import median

__all__ = ["Baseline"]

REMEMBERED = 200
"""Newest waits that count."""

LEAST = 5
"""Waits before which there is no baseline."""

TIMES = 2.0
"""The baseline is this many times the median."""

_AGAIN = 10
"""Waits after which the median is computed again."""


class Baseline:
    """The time that an exchange with other groups takes as a rule.

    Groups exchange gradients in each step. The exchange is a part of the step, and its time varies. One that takes
    much longer is a wait for a group that is slow, stopped, gone or new.
    """

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=REMEMBERED)
        self._until_again = LEAST
        self.seconds = 0.0
        """The longest time that is usual; 0 while too few are known."""

    def add(self, seconds: float) -> None:
        """Take note of how long an exchange took."""
        self._times.append(seconds)
        self._until_again -= 1
        if self._until_again == 0:
            self._until_again = _AGAIN
            self.seconds = TIMES * median(self._times)
