"""`Backoff`: how long to wait before something that failed is tried again."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

_MOST_DOUBLINGS = 64
"""Every limit is below this power of two. A float would overflow after 1,023 doublings: two hours of attempts."""


@dataclass(frozen=True)
class Backoff:
    """Waits between attempts, each twice as long as the one before, up to a limit.

    Iterate over it for the waits, in seconds; after a success begin a new iterator, which starts with short ones::

        waits = iter(BACKOFF)
        while not connected():
            time.sleep(next(waits))
    """

    first: float
    """Seconds before the first attempt."""
    most: float
    """Seconds before any attempt, at most."""
    jitter: float = 0.0
    """Shortens each wait at random by up to this part of it: clients of a server that comes back do not come at
    once."""
    at_once: bool = False
    """Whether there is one attempt without a wait before those that wait."""

    def wait(self, attempt: int) -> float:
        """Return the seconds before the attempt with this number, counted from 0, without jitter."""
        return min(self.first * 2.0 ** min(attempt, _MOST_DOUBLINGS), self.most)

    def __iter__(self) -> Iterator[float]:
        if self.at_once:
            yield 0.0
        for attempt in itertools.count():
            wait = self.wait(attempt)
            yield wait - random.uniform(0.0, self.jitter) * wait
