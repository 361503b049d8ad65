"""`RetryBudget`: how often, and after how long, something that failed is tried again."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Retries", "RetryBudget"]


@dataclass(frozen=True)
class RetryBudget:
    """The attempts that each replica group has."""

    attempts: int = 5
    """Failures after which the group is started again."""
    first_wait: float = 0.0
    """Seconds before the first attempt."""
    second_wait: float = 0.5
    """Seconds before the second attempt; each later one waits twice as long as the one before."""
    longest_wait: float = 30.0
    """Seconds before any attempt, at most."""
    healthy_steps: int = 20
    """Steps after which a group that was restored has the whole budget again."""


class Retries:
    """What is left of a group's budget."""

    def __init__(self, budget: RetryBudget) -> None:
        self._budget = budget
        self.failures = 0
        """Failures since the group was well."""

    def fail(self) -> float | None:
        """Take note of a failure; return the seconds to wait before the next attempt, or None if there is none."""
        self.failures += 1
        if self.failures > self._budget.attempts:
            return None
        if self.failures == 1:
            return self._budget.first_wait
        return min(self._budget.longest_wait, self._budget.second_wait * 2.0 ** (self.failures - 2))

    def well(self, steps: int) -> None:
        """Take note that the group has trained for this many steps since the last failure."""
        if steps >= self._budget.healthy_steps:
            self.failures = 0
