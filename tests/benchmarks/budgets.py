"""The report of a benchmark whose figures each have a budget of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tests.benchmarks.machine import Machine
from tests.benchmarks.report import Ratio

__all__ = ["BudgetReport", "Figure"]


@dataclass(frozen=True)
class Figure:
    """Something that was measured and has no budget: it says where one that has comes from."""

    name: str
    unit: str
    by_round: tuple[float, ...]


@dataclass(frozen=True)
class BudgetReport:
    """What one run found out."""

    benchmark: str
    command: str
    machine: Machine
    plan: dict[str, Any]
    budgets: tuple[Ratio, ...]
    """Ratios, and figures for which ``formula`` says unit and place."""
    figures: tuple[Figure, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def within_budgets(self) -> bool:
        return all(each.met for each in self.budgets)

    def as_json(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "command": self.command,
            "machine": asdict(self.machine),
            "plan": self.plan,
            "budgets": [each.as_json() for each in self.budgets],
            "figures": [{**asdict(each), "median": _median(each.by_round)} for each in self.figures],
            "within_budgets": self.within_budgets,
            "notes": list(self.notes),
        }

    def as_table(self) -> RenderableType:
        title = f"{self.benchmark}, medians over rounds"
        table = Table(title=title, title_justify="left")
        for heading in ("", "of"):
            table.add_column(heading)
        for heading in ("median", "min", "max", "budget"):
            table.add_column(heading, justify="right")
        for each in self.budgets:
            values = [_short(one) for one in (each.median, min(each.by_round), max(each.by_round))]
            style = "green" if each.met else "bold red"
            verdict = Text(f"{each.bound} {each.budget:,g}: {'met' if each.met else 'missed'}", style=style)
            table.add_row(each.name, each.formula, *values, verdict)
        for figure in self.figures:
            values = [_short(of(figure.by_round)) for of in (_median, min, max)]
            table.add_row(figure.name, figure.unit, *values, "")
        lines = [*self.notes, str(self.machine), self.command]
        return Group(table, *(Text(line, style="dim") for line in lines))


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
