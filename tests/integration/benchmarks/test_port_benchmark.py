"""The benchmark of ports runs and adds up; how fast anything is, it says, and no test does."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from tests.benchmarks import ports
from tests.benchmarks.machine import Machine
from tests.benchmarks.ports import PortFigures, PortPlan

MACHINE = Machine(cores=2, cpu="a processor", python="3.11.7", packages={"torchmonarch": "0.7.0"})


def figures(*loom: float) -> PortFigures:
    return PortFigures("command", MACHINE, PortPlan(3, 10), {"native": (10_000.0, 5_000.0, 8_000.0), "loom": loom})


def test_the_median_over_rounds_decides_whether_the_budget_is_met() -> None:
    assert figures(19_000.0, 20_000.0, 30_000.0).within_budgets
    assert not figures(19_000.0, 19_900.0, 90_000.0).within_budgets
    assert figures(20_000.0, 20_000.0, 20_000.0).ratio == 2.5


def test_the_report_has_every_round() -> None:
    report = json.loads(json.dumps(figures(1.0, 2.0, 3.0).as_json()))
    assert report["rounds"][1] == {"native": 5_000.0, "loom": 2.0}
    assert report["median_per_s"] == {"native": 8_000.0, "loom": 2.0}
    console = Console(record=True, width=100)
    console.print(figures(1.0, 2.0, 3.0).as_table())
    assert "at least 20,000" in console.export_text()


@pytest.mark.slow
def test_it_measures_native_monarch_and_loom() -> None:
    said: list[str] = []
    measured = ports.measure(PortPlan(rounds=2, messages=50), "command", said.append)
    assert {subject: len(rates) for subject, rates in measured.per_second.items()} == {"native": 2, "loom": 2}
    assert all(rate > 0 for rates in measured.per_second.values() for rate in rates)
    assert len(said) == 4
