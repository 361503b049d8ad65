"""The benchmark of the analysis runs and adds up; how fast it is, it says, and no test does."""

from __future__ import annotations

import pytest

from tests.benchmarks import analyze
from tests.benchmarks.analyze import AnalyzePlan


@pytest.mark.slow
def test_it_measures_a_log_of_which_every_line_is_an_event() -> None:
    said: list[str] = []

    measured = analyze.measure(AnalyzePlan(rounds=2, megabytes=1), "command", said.append)

    took, memory = measured.budgets
    assert len(took.by_round) == len(memory.by_round) == 2
    assert all(one > 0 for one in (*took.by_round, *memory.by_round))
    lines = next(figure for figure in measured.figures if figure.name == "lines")
    assert lines.by_round[0] > 8000
    assert said == ["writing the log", "round 1 of 2", "round 2 of 2"]
