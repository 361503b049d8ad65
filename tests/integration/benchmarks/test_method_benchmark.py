"""The benchmark of method calls runs and adds up; how fast anything is, it says, and no test does."""

from __future__ import annotations

import pytest

from tests.benchmarks import methods
from tests.benchmarks.methods import MethodPlan


@pytest.mark.slow
def test_it_measures_methods_and_endpoints() -> None:
    said: list[str] = []

    measured = methods.measure(MethodPlan(rounds=2, calls=40, warm_up_calls=10), "command", said.append)

    (ratio,) = measured.budgets
    assert len(ratio.by_round) == 2
    for number, (endpoint, method) in enumerate(zip(*(each.by_round for each in measured.figures), strict=True)):
        assert ratio.by_round[number] == pytest.approx(method / endpoint)
    assert said == ["starting", "round 1 of 2", "round 2 of 2"]
