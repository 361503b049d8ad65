"""The benchmark of lanes runs and adds up; how fast anything is, it says, and no test does."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from tests.benchmarks import lanes
from tests.benchmarks.lanes import LanesFigures, LanesPlan
from tests.benchmarks.machine import Machine

MACHINE = Machine(cores=2, cpu="a processor", python="3.11.7", packages={"torchmonarch": "0.7.0"})


def figures(two: float, one: float) -> LanesFigures:
    idle = [{"two": [0.001], "one": [0.001]}]
    return LanesFigures("command", MACHINE, LanesPlan(1), idle, [{"two": [two] * 3, "one": [one] * 2}])


def test_the_ratio_to_one_connection_decides_whether_the_budget_is_met() -> None:
    assert figures(0.01, 0.5).within_budgets
    assert not figures(0.4, 0.5).within_budgets


def test_the_report_has_every_round() -> None:
    report = json.loads(json.dumps(figures(0.01, 0.5).as_json()))
    assert report["rounds"][0]["two"]["busy_p50_ms"] == 10.0
    assert report["ratios"][0]["median"] == 0.02
    console = Console(record=True, width=110)
    console.print(figures(0.01, 0.5).as_table())
    assert "0.020 (two connections / one" in console.export_text()


@pytest.mark.slow
def test_it_measures_with_two_connections_and_with_one() -> None:
    measured = lanes.measure(LanesPlan(rounds=1, size=4 << 20, idle_calls=3), "command")
    assert set(measured.busy_s[0]) == {"two", "one"}
    assert all(seconds > 0 for each in measured.busy_s[0].values() for seconds in each)
