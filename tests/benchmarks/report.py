"""The report of a run: every figure, and each ratio beside its budget."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tests.benchmarks.caller import MANY, MESH
from tests.benchmarks.calls import PAYLOADS, PIPELINES, Figures, Measured, Subject, SubjectName
from tests.benchmarks.machine import Machine
from tests.benchmarks.written import BUDGETS

__all__ = ["Ratio", "Report", "budgeted", "percentile", "ratios"]

RAW_CLIENTS = (SubjectName.RAW_ASYNCIO, SubjectName.RAW_SYNC)


def percentile(seconds: Sequence[float], percent: int) -> float:
    """What so many of a hundred do not exceed."""
    return sorted(seconds)[min(len(seconds) * percent // 100, len(seconds) - 1)]


@dataclass(frozen=True)
class Ratio:
    """A ratio of figures of the same round, over all rounds, and its budget."""

    name: str
    formula: str
    bound: Literal["at most", "at least"]
    budget: float
    by_round: tuple[float, ...]
    target: float | None = None
    """What is aimed at beyond the budget."""

    @property
    def median(self) -> float:
        return statistics.median(self.by_round)

    @property
    def met(self) -> bool:
        return self.median <= self.budget if self.bound == "at most" else self.median >= self.budget

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "median": self.median,
            "min": min(self.by_round),
            "max": max(self.by_round),
            "met": self.met,
        }


@dataclass(frozen=True)
class _RawFigure:
    """A figure of the raw echo: that of the client with the better median."""

    client: SubjectName
    by_round: tuple[float, ...]


def ratios(measured: Measured) -> tuple[Ratio, ...]:
    """The ratios that have a budget, as far as their subjects were measured."""
    names = {subject.name for subject in measured.subjects}
    if SubjectName.LOOM not in names:
        return ()
    found = []
    if SubjectName.NATIVE in names and not names.isdisjoint(RAW_CLIENTS):
        found.append(_one_call(measured))
    if SubjectName.NATIVE in names:
        found += [_pipelined(measured, pipeline) for pipeline in PIPELINES]
    if not names.isdisjoint(RAW_CLIENTS):
        found += [_echo(measured, payload) for payload in PAYLOADS]
    if SubjectName.RAY in names:
        found += _against_ray(measured)
    return tuple(found)


def budgeted(budget: str, name: str, formula: str, by_round: Iterable[float]) -> Ratio:
    """A ratio whose budget is written down under a name of `BUDGETS`."""
    written = BUDGETS[budget]
    return Ratio(name, formula, written.bound, written.value, tuple(by_round), written.aim)


def _of(measured: Measured, subject: SubjectName) -> list[Figures]:
    return [figures[subject] for figures in measured.rounds]


def _one_call(measured: Measured) -> Ratio:
    raw = _best_raw(measured, lambda figures: figures.p50_ms)
    rounds = zip(_of(measured, SubjectName.LOOM), _of(measured, SubjectName.NATIVE), raw.by_round, strict=True)
    by_round = (through.p50_ms / (direct.p50_ms + echo) for through, direct, echo in rounds)
    return budgeted("one call", "one call, p50", f"loom / (native + {raw.client})", by_round)


_CALLED = {"one": "one actor", "many": f"{MANY} actors", "mesh": f"mesh of {MESH}"}


def _pipelined(measured: Measured, pipeline: str) -> Ratio:
    name = f"pipelined calls, {_CALLED[pipeline]}"
    rounds = zip(_of(measured, SubjectName.LOOM), _of(measured, SubjectName.NATIVE), strict=True)
    by_round = (through.pipelined_per_s[pipeline] / direct.pipelined_per_s[pipeline] for through, direct in rounds)
    return budgeted(name, name, "loom / native", by_round)


def _echo(measured: Measured, payload: str) -> Ratio:
    raw = _best_raw(measured, lambda figures: figures.echo_s["bytes"])
    rounds = zip(_of(measured, SubjectName.LOOM), raw.by_round, strict=True)
    by_round = (through.echo_s[payload] / echo for through, echo in rounds)
    return budgeted("64 MiB echo", f"{_size(measured)} echo, {payload}", f"loom / {raw.client}", by_round)


def _against_ray(measured: Measured) -> list[Ratio]:
    rounds = list(zip(_of(measured, SubjectName.LOOM), _of(measured, SubjectName.RAY), strict=True))
    latency = (ours.p50_ms / rays.p50_ms for ours, rays in rounds)
    calls = (ours.pipelined_per_s["one"] / rays.pipelined_per_s["one"] for ours, rays in rounds)
    size = (rays.echo_s["bytes"] / ours.echo_s["bytes"] for ours, rays in rounds)
    return [
        budgeted("one call against Ray Client", "one call, p50", "loom / ray", latency),
        budgeted("pipelined calls against Ray Client", "pipelined calls, one actor", "loom / ray", calls),
        budgeted("bytes a second against Ray Client", "bytes a second", "loom / ray", size),
    ]


def _best_raw(measured: Measured, figure: Callable[[Figures], float]) -> _RawFigure:
    clients = [subject.name for subject in measured.subjects if subject.name in RAW_CLIENTS]
    best = min(clients, key=lambda client: measured.median(client, figure))
    return _RawFigure(best, tuple(figure(figures[best]) for figures in measured.rounds))


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))


def _count(number: float | None) -> str:
    return "" if number is None else f"{number:,.0f}"


def _size(measured: Measured) -> str:
    return f"{measured.plan.echo_size / 2**20:g} MiB"


@dataclass(frozen=True)
class Report:
    """Everything that one run found out."""

    command: str
    machine: Machine
    measured: Measured
    ratios: tuple[Ratio, ...]
    notes: tuple[str, ...] = ()

    @property
    def within_budgets(self) -> bool:
        return all(ratio.met for ratio in self.ratios)

    def as_json(self) -> dict[str, Any]:
        """One JSON object: medians over rounds by subject, the ratios, and each round's figures."""
        return {
            "benchmark": "calls",
            "command": self.command,
            "machine": asdict(self.machine),
            "plan": asdict(self.measured.plan),
            "subjects": {
                str(subject.name): {
                    "title": subject.title,
                    **self._medians(subject),
                    "idle_cpu": self.measured.idle_cpu.get(subject.name),
                }
                for subject in self.measured.subjects
            },
            "ratios": [ratio.as_json() for ratio in self.ratios],
            "within_budgets": self.within_budgets,
            "rounds": [
                {str(name): asdict(figures) for name, figures in by_subject.items()}
                for by_subject in self.measured.rounds
            ],
            "notes": list(self.notes),
        }

    def _medians(self, subject: Subject) -> dict[str, Any]:
        def median(figure: Callable[[Figures], float]) -> float:
            return self.measured.median(subject.name, figure)

        def pipelined(pipeline: str) -> Callable[[Figures], float]:
            return lambda figures: figures.pipelined_per_s[pipeline]

        def echo(payload: str) -> Callable[[Figures], float]:
            return lambda figures: figures.echo_s[payload]

        return {
            "p50_ms": median(lambda figures: figures.p50_ms),
            "p99_ms": median(lambda figures: figures.p99_ms),
            "pipelined_per_s": {pipeline: median(pipelined(pipeline)) for pipeline in subject.pipelines},
            "pipelined_cpu_ms": median(lambda figures: figures.pipelined_cpu_ms),
            "echo_s": {payload: median(echo(payload)) for payload in subject.payloads},
        }

    def as_table(self) -> RenderableType:
        """Both tables, and the lines that say where the figures come from."""
        parts: list[RenderableType] = [self._figures_table()]
        if self.ratios:
            parts.append(self._ratios_table())
        lines = [str(self.machine), self.command, *self.notes]
        return Group(*parts, *(Text(line, style="dim") for line in lines))

    def _figures_table(self) -> Table:
        size = _size(self.measured)
        table = _table(f"calls, medians over {len(self.measured.rounds)} round(s)")
        table.add_column("", no_wrap=True)
        for heading in (
            "one call\np50, ms",
            "\np99, ms",
            "pipelined\none, /s",
            f"\n{MANY}, /s",
            "\nmesh, /s",
            "\nCPU ms",
            f"{size}\nbytes, s",
            "\narray, s",
            "idle\nCPU",
        ):
            table.add_column(heading, justify="right", no_wrap=True)
        for subject in self.measured.subjects:
            medians = self._medians(subject)
            idle = self.measured.idle_cpu.get(subject.name)
            table.add_row(
                subject.title,
                f"{medians['p50_ms']:.2f}",
                f"{medians['p99_ms']:.2f}",
                *(_count(medians["pipelined_per_s"].get(pipeline)) for pipeline in PIPELINES),
                f"{medians['pipelined_cpu_ms']:.2f}",
                f"{medians['echo_s']['bytes']:.2f}",
                f"{medians['echo_s']['array']:.2f}" if "array" in medians["echo_s"] else "",
                f"{idle:.0%}" if idle is not None else "",
            )
        return table

    def _ratios_table(self) -> Table:
        table = _table("ratios, taken within each round")
        for heading in ("", "of"):
            table.add_column(heading, no_wrap=True)
        for heading in ("median", "min", "max", "budget"):
            table.add_column(heading, justify="right")
        table.add_column("")
        for ratio in self.ratios:
            aim = f", aim {ratio.target:g}" if ratio.target is not None else ""
            table.add_row(
                ratio.name,
                ratio.formula,
                f"{ratio.median:.2f}",
                f"{min(ratio.by_round):.2f}",
                f"{max(ratio.by_round):.2f}",
                f"{ratio.bound} {ratio.budget:g}{aim}",
                Text("met", style="green") if ratio.met else Text("missed", style="bold red"),
            )
        return table
