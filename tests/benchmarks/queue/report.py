"""The tables and the plot of what was measured, and the budgets."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tests.benchmarks.machine import Machine
from tests.benchmarks.queue.load import Window
from tests.benchmarks.queue.measuring import Windows
from tests.benchmarks.queue.plan import SET_UPS, WAYS, QueuePlan, SetUp
from tests.benchmarks.report import Ratio, budgeted

TITLES = {
    "shared": "shared pool",
    "admin": "admin client, 1/0",
    "listener": "admin client, own listener",
    "lane": "endpoint call",
}

HELPS = 0.25
"""A way helps if its queue_ms is at most this part of the shared pool's."""


@dataclass(frozen=True)
class QueueReport:
    """What one run found out."""

    plan: QueuePlan
    command: str
    machine: Machine
    windows: Windows

    def by_round(self, set_up: SetUp, way: str, of: Callable[[Window], float]) -> list[float]:
        """Return a figure of each round."""
        return [of(window) for window in self.windows[set_up.name][way]]

    def best(self, set_up: SetUp) -> str:
        """Return the way with the smallest queue_ms."""
        return min(WAYS, key=lambda way: statistics.median(self.by_round(set_up, way, queue_ms)))

    @property
    def ratios(self) -> list[Ratio]:
        """The best way's queue_ms in the shared pool's, of the set-ups in which orders wait on their way."""
        found = []
        for set_up in SET_UPS:
            if set_up.budget:
                best = self.by_round(set_up, self.best(set_up), queue_ms)
                pairs = zip(best, self.by_round(set_up, "shared", queue_ms), strict=True)
                formula = f"queue_ms, {TITLES[self.best(set_up)]} / shared pool"
                found.append(budgeted(set_up.budget, set_up.budget, formula, [one / other for one, other in pairs]))
        return found

    def unchanged(self, set_up: SetUp, of: Callable[[Window], list[float]]) -> bool:
        """Return whether the spreads of a figure overlap, for the shared pool and each other way."""

        def figures(way: str) -> list[float]:
            return [figure for window in self.windows[set_up.name][way] for figure in of(window)]

        def same(one: list[float], other: list[float]) -> bool:
            return min(one) <= max(other) and min(other) <= max(one)

        return all(same(figures("shared"), figures(way)) for way in WAYS[1:])

    def place(self, set_up: SetUp) -> str:
        """Return where the orders over the shared pool waited, by what the server said meanwhile."""
        places = (place for window in self.windows[set_up.name]["shared"] for place in window.places)
        return Counter(place.value for place in places).most_common(1)[0][0]

    @property
    def within_budgets(self) -> bool:
        places = all(self.place(set_up) == set_up.place.value for set_up in SET_UPS)
        same = all(self.unchanged(set_up, of) for set_up in SET_UPS for of in _UNCHANGED)
        return places and same and all(ratio.met for ratio in self.ratios)

    def as_json(self) -> dict[str, Any]:
        return {
            "benchmark": "queue",
            "command": self.command,
            "machine": asdict(self.machine),
            "plan": asdict(self.plan),
            "set_ups": [asdict(set_up) for set_up in SET_UPS],
            "places": {set_up.name: self.place(set_up) for set_up in SET_UPS},
            "windows": {
                name: {way: [asdict(one) for one in each] for way, each in ways.items()}
                for name, ways in self.windows.items()
            },
            "budgets": [ratio.as_json() for ratio in self.ratios],
            "within_budgets": self.within_budgets,
        }

    def as_table(self) -> RenderableType:
        tables = [self._set_up_table(set_up) for set_up in SET_UPS]
        lines = [str(self.machine), self.command]
        return Group(*tables, self._verdicts(), self._budgets(), *(Text(line, style="dim") for line in lines))

    def _set_up_table(self, set_up: SetUp) -> Table:
        table = Table(
            title=f"{set_up.name}: median (min to max) of {self.plan.rounds} rounds", title_justify="left"
        )
        table.add_column("order to load weights")
        for heading in ("queue_ms", "rpc_ms", "tokens/s", "orders"):
            table.add_column(heading, justify="right")
        for way in WAYS:
            cells = [spread(self.by_round(set_up, way, of)) for of in (queue_ms, rpc_ms, tokens_per_s)]
            orders = sum(len(window.queue_ms) for window in self.windows[set_up.name][way])
            table.add_row(TITLES[way], *cells, str(orders))
        return table

    def _verdicts(self) -> Table:
        table = Table(title="what helps", title_justify="left")
        for heading in ("set-up", "orders wait in", "helps", "does not help", "rpc_ms", "tokens/s"):
            table.add_column(heading)
        for set_up in SET_UPS:
            shared = statistics.median(self.by_round(set_up, "shared", queue_ms))
            helps, not_ = [], []
            for way in WAYS[1:]:
                ratio = statistics.median(self.by_round(set_up, way, queue_ms)) / shared
                (helps if set_up.budget and ratio <= HELPS else not_).append(TITLES[way])
            same = ["the same" if self.unchanged(set_up, of) else "CHANGED" for of in _UNCHANGED]
            table.add_row(set_up.name, self.place(set_up), ", ".join(helps), ", ".join(not_), *same)
        return table

    def _budgets(self) -> Table:
        table = Table(title="budgets", title_justify="left")
        for heading in ("", "of"):
            table.add_column(heading)
        for heading in ("median", "min", "max", "budget"):
            table.add_column(heading, justify="right")
        for each in self.ratios:
            values = [f"{one:.2g}" for one in (each.median, min(each.by_round), max(each.by_round))]
            style = "green" if each.met else "bold red"
            verdict = Text(f"{each.bound} {each.budget:g}: {'met' if each.met else 'missed'}", style=style)
            table.add_row(each.name, each.formula, *values, verdict)
        return table

    def plot(self, path: Path) -> None:
        """Write a picture of queue_ms by set-up and way; a logarithmic scale, and bars from min to max."""
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(8, 3.4), layout="constrained")
        width = 0.8 / len(WAYS)
        for number, way in enumerate(WAYS):
            rounds = [self.by_round(set_up, way, queue_ms) for set_up in SET_UPS]
            middle = [statistics.median(each) for each in rounds]
            below = [median - min(each) for median, each in zip(middle, rounds, strict=True)]
            above = [max(each) - median for median, each in zip(middle, rounds, strict=True)]
            places = [place + (number - (len(WAYS) - 1) / 2) * width for place in range(len(SET_UPS))]
            axes.bar(places, middle, width * 0.9, yerr=(below, above), capsize=2, label=TITLES[way])
        axes.set_yscale("log")
        axes.set_ylabel("queue_ms")
        axes.set_xticks(range(len(SET_UPS)), [set_up.name for set_up in SET_UPS])
        axes.legend(frameon=False, ncols=len(WAYS), fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1))
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


def queue_ms(window: Window) -> float:
    return statistics.median(window.queue_ms)


def rpc_ms(window: Window) -> float:
    return statistics.median(window.rpc_ms)


def tokens_per_s(window: Window) -> float:
    return window.tokens_per_s


_UNCHANGED: tuple[Callable[[Window], list[float]], ...] = (
    lambda window: window.rpc_ms,
    lambda window: [window.tokens_per_s],
)
"""What no way may change: rpc_ms of each order, and tokens a second of each round."""


def spread(values: Sequence[float]) -> str:
    """Return the median, and from where to where the values go."""
    return f"{short_number(statistics.median(values))} ({short_number(min(values))} to {short_number(max(values))})"


def short_number(value: float) -> str:
    """Return a number with as many digits as its reader needs."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
