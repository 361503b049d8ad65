"""How often a group that fails is tried again."""

from __future__ import annotations

from loom.train import RetryBudget


def test_each_attempt_waits_longer_until_there_is_none() -> None:
    budget = RetryBudget(attempts=5, first_wait=0.0, second_wait=0.5, longest_wait=1.5)

    assert [budget.wait(failures) for failures in range(1, 7)] == [0.0, 0.5, 1.0, 1.5, 1.5, None]
