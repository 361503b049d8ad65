"""The benchmark of handshakes adds up; how much an attack costs, it says, and no test does."""

from __future__ import annotations

import json

from rich.console import Console

from tests.benchmarks.handshakes import Calls, HandshakeFigures, HandshakePlan
from tests.integration.benchmarks.test_port_benchmark import MACHINE


def figures(*attacked: float) -> HandshakeFigures:
    return HandshakeFigures(
        "command",
        MACHINE,
        HandshakePlan(rounds=len(attacked)),
        idle=tuple(Calls(1000, 1.0, 2.0) for _ in attacked),
        attacked=tuple(Calls(500, 1.5, p99) for p99 in attacked),
        answers={"400": 10, "401": 20},
    )


def test_the_median_over_rounds_decides_whether_the_budget_is_met() -> None:
    assert figures(6.0, 5.0, 90.0).within_budgets
    assert not figures(6.1, 7.0, 1.0).within_budgets


def test_the_report_has_every_round() -> None:
    report = json.loads(json.dumps(figures(2.0, 4.0, 6.0).as_json()))

    assert report["ratio"]["by_round"] == [1.0, 2.0, 3.0]
    assert report["ratio"]["median"] == 2.0
    assert report["rounds"][1]["attacked"] == {"count": 500, "p50_ms": 1.5, "p99_ms": 4.0}
    console = Console(record=True, width=100)
    console.print(figures(2.0, 4.0, 6.0).as_table())
    assert "p99 2.00 times idle" in console.export_text()
