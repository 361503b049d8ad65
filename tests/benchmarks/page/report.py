"""The page beside its budgets."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from tests.benchmarks.budgets import BudgetReport, Figure
from tests.benchmarks.machine import Machine
from tests.benchmarks.page.plan import Load, PageFigures, PagePlan, ViewFigures
from tests.benchmarks.page.trace import KINDS, Update
from tests.benchmarks.report import Ratio, budgeted, percentile

__all__ = ["PageReport", "page_report"]

DUE = 0.95
"""Of the reports that are due, what has to be stored: else the load was less than is claimed."""


UPDATES = ("a second", "p50", "p95", "max", *KINDS, "CPU time, p95", "longest task")

OTHERS = ("main thread busy, %", "KB a second", "frames, p50", "frames, p95", "second watcher", "heap, MiB")


@dataclass(frozen=True)
class PageReport(BudgetReport):
    """What one run found out, and a table with a row for each view."""

    views: tuple[tuple[str, dict[str, float]], ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {**super().as_json(), "views": dict(self.views)}

    def as_table(self) -> RenderableType:
        updates = "updates: milliseconds of the main thread; of its kinds of work, the 95th percentile"
        others = "views: a second watcher, in % of a core; milliseconds between two frames"
        return Group(super().as_table(), self._of_views(updates, UPDATES), self._of_views(others, OTHERS))

    def _of_views(self, title: str, columns: Iterable[str]) -> Table:
        table = Table(title=title, title_justify="left")
        table.add_column("", no_wrap=True)
        for name in columns:
            table.add_column(name, justify="right")
        for view, found in self.views:
            table.add_row(view, *(f"{found[name]:.3g}" for name in columns))
        return table


def page_report(plan: PagePlan, command: str, machine: Machine, figures: PageFigures) -> PageReport:
    """Set what was measured beside its budgets."""
    views = figures.views
    growth = [[one.growth for one in views.values()]] if plan.rounds > 1 else []  # from one round to another
    budgets = (
        *(
            budgeted("update of the page", f"update, p95, {name}", "ms", [_p(95, one.updates, _bounded)])
            for name, one in views.items()
        ),
        *(budgeted("growth of the page's memory", "growth of the heap", "KiB/min, by view", one) for one in growth),
        *(
            budgeted("bytes a second to the page", f"received, {name}", "KB/s", _kilobytes(one))
            for name, one in views.items()
        ),
        budgeted(
            "second watcher",
            "a second watcher",
            "% of one core",
            [each for one in views.values() for each in one.second_watcher],
        ),
        budgeted("size of the page", "the page's files, gzipped", "KiB", [figures.size / 1024]),
        Ratio(
            "reports stored",
            "of those due",
            "at least",
            DUE,
            tuple(figures.stored),
        ),
    )
    every = [update for one in views.values() for update in one.updates]
    notes = (
        f"{plan.replicas:,} replicas that report once a second, held to one core; Chromium has half of the cores",
        f"{plan.runs:,} runs of the past; the run of many points has {plan.points:,}",
        f"{len(every)} updates of all views: p50 {_p(50, every, _bounded):.3g}, "
        f"p95 {_p(95, every, _bounded):.3g} ms",
        f"a second watcher, % of one core: {_spread([d for one in views.values() for d in one.second_watcher])}",
    )
    return PageReport(
        "page",
        command,
        machine,
        asdict(plan),
        budgets,
        tuple(_figures(figures)),
        notes,
        tuple((name, _row(one)) for name, one in views.items()),
    )


def _bounded(update: Update) -> float:
    return update.bounded


def _p(percent: int, updates: Sequence[Update], of: Callable[[Update], float] = lambda one: one.total) -> float:
    # A view without an update is not within its budget: nothing was measured.
    return percentile([of(one) for one in updates] or [math.inf], percent)


def _kilobytes(view: ViewFigures) -> list[float]:
    return [one / 1000 for one in view.received]


def _row(view: ViewFigures) -> dict[str, float]:
    def of(kind: str) -> Callable[[Update], float]:
        return lambda update: update.kinds[kind]

    seconds = sum(trace.seconds for trace in view.traces)
    return {
        "a second": len(view.updates) / seconds,
        "p50": _p(50, view.updates),
        "p95": _p(95, view.updates),
        "max": _p(100, view.updates),
        **{kind: _p(95, view.updates, of(kind)) for kind in KINDS},
        "CPU time, p95": _p(95, view.updates, lambda one: one.cpu),
        "longest task": _p(100, view.updates, lambda one: one.longest),
        "main thread busy, %": 100 * sum(trace.busy for trace in view.traces) / seconds,
        "KB a second": statistics.median(_kilobytes(view)),
        "frames, p50": percentile(view.frames, 50),
        "frames, p95": percentile(view.frames, 95),
        "second watcher": statistics.median(view.second_watcher),
        "heap, MiB": view.heaps[-1].used / 2**20,
    }


def _figures(figures: PageFigures) -> Iterator[Figure]:
    def of_loads(figure: Callable[[Load], float]) -> tuple[float, ...]:
        return tuple(figure(one) / one.seconds for one in figures.loads)

    yield Figure("gateway, one watcher", "cores", of_loads(lambda one: one.gateway))
    yield Figure("weaver, one watcher", "cores", of_loads(lambda one: one.weaver))
    yield Figure("simulated threadlets", "cores", of_loads(lambda one: one.threadlets))
    yield Figure("the page is loaded anew", "s until it is connected", (figures.opened,))
    yield Figure("the page is loaded anew, all of it", "s until it shows the replicas", (figures.shown,))
    yield Figure("a run of many points is opened", "ms until its curve is shown", tuple(figures.opened_long))
    yield Figure("snapshot of a second watcher", "s", tuple(figures.watcher_there))
    calls = {
        "without a page": figures.calls_without,
        "while the page is loaded": figures.calls_opening,
        "beside the page": figures.calls_with,
    }
    for when, milliseconds in calls.items():
        yield Figure(f"call {when}", "ms", tuple(milliseconds))
        yield Figure(f"call {when}, p99", "ms", (percentile(milliseconds, 99),))


def _spread(values: Sequence[float]) -> str:
    ordered = sorted(values)
    low, middle, high = (ordered[min(len(ordered) * part // 4, len(ordered) - 1)] for part in (1, 2, 3))
    return f"median {middle:.2f}; half of {len(ordered)} pairs are between {low:.2f} and {high:.2f}"
