"""The benchmark of `loom run` runs and adds up; what it costs, it says, and no test does."""

from __future__ import annotations

import pytest

from tests.benchmarks import run
from tests.benchmarks.run import RunPlan


@pytest.mark.slow
def test_it_measures_the_hooks_and_the_start() -> None:
    measured = run.measure(RunPlan(rounds=1, steps=20), "command")

    hooks, later = measured.budgets
    assert 0 < hooks.median < 10_000
    assert -60 < later.median < 60
    assert measured.figures[0].by_round[0] >= hooks.by_round[0]
