"""How often a group that fails is tried again."""

from __future__ import annotations

from loom.train.retries import Retries, RetryBudget


def test_each_attempt_waits_longer_until_there_is_none() -> None:
    retries = Retries(RetryBudget(attempts=5, first_wait=0.0, second_wait=0.5, longest_wait=1.5))

    assert [retries.fail() for _ in range(6)] == [0.0, 0.5, 1.0, 1.5, 1.5, None]


def test_a_group_that_was_well_for_long_enough_has_all_attempts_again() -> None:
    retries = Retries(RetryBudget(attempts=1, healthy_steps=20))
    assert retries.fail() is not None

    retries.well(19)
    assert retries.fail() is None
    retries.well(20)

    assert retries.fail() == 0.0
