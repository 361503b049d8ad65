"""The baseline of an exchange, which is a part of the step."""

from __future__ import annotations

from loom.train.loop.averaging import LEAST, REMEMBERED, TIMES, Baseline


def test_there_is_no_baseline_before_some_waits_are_known() -> None:
    baseline = Baseline()

    for _ in range(LEAST - 1):
        baseline.add(0.5)
    assert baseline.seconds == 0.0
    baseline.add(0.5)
    assert baseline.seconds == TIMES * 0.5


def test_a_few_long_waits_do_not_change_the_baseline() -> None:
    baseline = Baseline()

    for number in range(REMEMBERED):
        baseline.add(30.0 if number % 3 == 0 else 0.1)

    assert baseline.seconds == TIMES * 0.1


def test_waits_that_stay_long_become_the_baseline() -> None:
    baseline = Baseline()

    for seconds in (0.1, 0.2):
        for _ in range(REMEMBERED):
            baseline.add(seconds)

    assert baseline.seconds == TIMES * 0.2
