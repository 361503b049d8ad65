"""The benchmark of events runs and adds up; what they cost, it says, and no test does."""

from __future__ import annotations

import os

import pytest

from tests.benchmarks import spans
from tests.benchmarks.spans import SpansPlan


@pytest.mark.slow
def test_it_measures_the_events_of_all_processes_where_they_happen() -> None:
    before = os.environ.get("PYTHONPATH")

    measured = spans.measure(SpansPlan(rounds=1, calls=100, steps=2, shipped=5), "command")

    figures = {one.name: one.by_round[0] for one in (*measured.budgets, *measured.figures)}
    assert 0 < figures["instrumentation of a step of the shipped task"] < 1
    assert figures["events, spans and traces of these steps"] > 10
    assert 0 < figures["what these steps take"] <= (os.cpu_count() or 1)
    assert all(one > 0 for one in figures.values())
    assert os.environ.get("PYTHONPATH") == before
