"""How long a group usually waits for the others in a step, so that it is seen when one of them holds it up."""

from __future__ import annotations

from collections import deque
from statistics import median

__all__ = ["UsualTime"]

REMEMBERED = 200
"""Times, the newest."""

LEAST = 5
"""Times before which nothing is usual."""

TIMES = 2.0
"""As long as this many times the median is usual."""

_AGAIN = 10
"""Times after which the median is looked for again."""


class UsualTime:
    """What an exchange with others takes as a rule.

    With each step groups exchange gradients: that is a part of the step, and takes a time that varies. What takes
    much longer is a wait for somebody who is slow, stopped, gone or new.
    """

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=REMEMBERED)
        self._until_again = LEAST
        self.seconds = 0.0
        """Up to which it is usual; 0 while too few are known."""

    def add(self, seconds: float) -> None:
        """Take note of how long one took."""
        self._times.append(seconds)
        self._until_again -= 1
        if self._until_again == 0:
            self._until_again = _AGAIN
            self.seconds = TIMES * median(self._times)
