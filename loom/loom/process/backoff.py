"""`Backoff`: the waits between attempts after failures."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

_MOST_DOUBLINGS = 64  # every limit is below 2**64, and a float would overflow after 1,023


@dataclass(frozen=True)
class Backoff:
    """The waits between attempts, each twice as long as the one before, up to a limit.

    Iterating over it yields the waits, in seconds. After a success, a new iterator starts with short waits again.
    """

    first: float
    most: float
    jitter: float = 0.0
    """The part of each wait by which it is shortened at random, so that not all clients come back at once."""
    at_once: bool = False
    """True if the first attempt comes without a wait."""

    def wait(self, attempt: int) -> float:
        """Return the seconds before the attempt with this number, counted from 0, without jitter."""
        return min(self.first * 2.0 ** min(attempt, _MOST_DOUBLINGS), self.most)

    def __iter__(self) -> Iterator[float]:
        if self.at_once:
            yield 0.0
        for attempt in itertools.count():
            wait = self.wait(attempt)
            yield wait - random.uniform(0.0, self.jitter) * wait
