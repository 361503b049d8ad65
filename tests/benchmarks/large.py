"""Large tensors: how fast they move, what a small call takes meanwhile, and what the gateway holds of them.

The echo through Loom is compared to a raw WebSocket's of the same size in the same round, small calls while a
tensor streams to those of the same round while nothing does. What is reported is the median over rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tests.benchmarks.caller_process import CallerProcess
from tests.benchmarks.machine import Machine, describe_machine
from tests.benchmarks.report import Ratio, budgeted, percentile

__all__ = ["LargeFigures", "LargePlan", "LargeRound", "measure"]

GATEWAY_BUDGET = 128 * 2**20
"""Bytes that the gateway's memory may grow by while a tensor moves."""

WAYS = {"there": "to an actor", "back": "to the laptop", "both": "echoed"}

_SUBJECTS = {
    "raw": ("raw echo, sync", "tests.benchmarks.raw_caller", ("sync",)),
    "native": ("native Monarch", "tests.benchmarks.large_caller", ("native",)),
    "loom": ("Loom", "tests.benchmarks.large_caller", ("loom",)),
}


@dataclass(frozen=True)
class LargePlan:
    """How much is measured."""

    size: int = 2**30
    """Bytes of the tensor."""

    rounds: int = 5
    idle_calls: int = 1000
    """Small calls a round while nothing else moves."""

    stream_step: float = 0.25
    """Seconds that the second of two actors takes longer than the first."""


@dataclass(frozen=True)
class LargeRound:
    """What one round found."""

    echo_s: Mapping[str, float]
    """Seconds of an echo, by subject."""

    idle_s: Sequence[float]
    """Seconds of each small call while nothing else moved."""

    busy_s: Mapping[str, Sequence[float]]
    """Seconds of each small call while the tensor moved, by the way that it moved."""

    native_idle_s: Sequence[float]
    native_busy_s: Mapping[str, Sequence[float]]
    """The same of native Monarch, for comparison."""

    gateway_peak: int
    """Bytes that the gateway's memory grew by at most."""

    stream_s: Mapping[str, float]
    """Seconds until the ``first`` and the ``last`` result of a stream."""


@dataclass(frozen=True)
class LargeFigures:
    """Everything that one run found."""

    command: str
    machine: Machine
    plan: LargePlan
    rounds: Sequence[LargeRound]

    @property
    def ratios(self) -> list[Ratio]:
        """The ratios that have a budget."""
        size = f"{self.plan.size / 2**20:g} MiB"
        bandwidths = tuple(one.echo_s["raw"] / one.echo_s["loom"] for one in self.rounds)
        found = [Ratio(f"{size} echo, bandwidth", "loom / raw-sync", "at least", 0.5, bandwidths)]
        for way, title in WAYS.items():
            slower = tuple(percentile(one.busy_s[way], 99) / percentile(one.idle_s, 99) for one in self.rounds)
            name = f"small call, p99, {size} {title}"
            found.append(budgeted("small call beside 1 GiB", name, "streaming / idle", slower))
        peaks = tuple(one.gateway_peak / GATEWAY_BUDGET for one in self.rounds)
        found.append(Ratio("gateway's memory, growth", "peak / 128 MiB", "at most", 1.0, peaks))
        firsts = tuple(one.stream_s["first"] / one.stream_s["last"] for one in self.rounds)
        found.append(Ratio("stream, first result", "first / last", "at most", 0.9, firsts))
        return found

    @property
    def within_budgets(self) -> bool:
        return all(ratio.met for ratio in self.ratios)

    def median(self, figure: Callable[[LargeRound], float]) -> float:
        return statistics.median(map(figure, self.rounds))

    def _calls(self) -> dict[str, Callable[[LargeRound], Sequence[float]]]:
        def busy(way: str) -> Callable[[LargeRound], Sequence[float]]:
            return lambda one: one.busy_s[way]

        def native(way: str) -> Callable[[LargeRound], Sequence[float]]:
            return lambda one: one.native_busy_s[way]

        return {
            "Loom, nothing": lambda one: one.idle_s,
            **{f"Loom, {title}": busy(way) for way, title in WAYS.items()},
            "native, nothing": lambda one: one.native_idle_s,
            **{f"native, {title}": native(way) for way, title in WAYS.items()},
        }

    def as_json(self) -> dict[str, Any]:
        """One JSON object: medians over rounds and the ratios."""
        return {
            "benchmark": "large",
            "command": self.command,
            "machine": asdict(self.machine),
            "plan": asdict(self.plan),
            "echo_s": {name: self.median(lambda one, name=name: one.echo_s[name]) for name in _SUBJECTS},  # type: ignore[misc]
            "small_calls_ms": {
                title: {
                    "p50": self.median(lambda one, of=of: percentile(of(one), 50) * 1e3),  # type: ignore[misc]
                    "p99": self.median(lambda one, of=of: percentile(of(one), 99) * 1e3),  # type: ignore[misc]
                    "calls": [len(of(one)) for one in self.rounds],
                }
                for title, of in self._calls().items()
            },
            "gateway_peak": self.median(lambda one: one.gateway_peak),
            "stream_s": [dict(one.stream_s) for one in self.rounds],
            "ratios": [ratio.as_json() for ratio in self.ratios],
            "within_budgets": self.within_budgets,
        }

    def as_table(self) -> RenderableType:
        """The figures, the ratios beside their budgets, and where they come from."""
        figures = self.as_json()
        size = self.plan.size / 2**20
        echoes = Table(
            "echo", "s", "MiB/s each way", title=f"{size:g} MiB, medians over {len(self.rounds)} round(s)"
        )
        for name, seconds in figures["echo_s"].items():
            echoes.add_row(_SUBJECTS[name][0], f"{seconds:.2f}", f"{size / seconds:,.0f}")
        calls = Table("small calls while moving", "p50, ms", "p99, ms", "calls")
        for title, of in figures["small_calls_ms"].items():
            calls.add_row(title, f"{of['p50']:.2f}", f"{of['p99']:.2f}", f"{min(of['calls'])}")
        ratios = Table("ratio", "of", "median", "min", "max", "budget", "")
        for ratio in self.ratios:
            least, most = min(ratio.by_round), max(ratio.by_round)
            ratios.add_row(
                ratio.name,
                ratio.formula,
                *(f"{value:.2f}" for value in (ratio.median, least, most)),
                f"{ratio.bound} {ratio.budget:g}",
                Text("met", style="green") if ratio.met else Text("missed", style="bold red"),
            )
        lines = [str(self.machine), self.command]
        return Group(echoes, calls, ratios, *(Text(line, style="dim") for line in lines))


def measure(plan: LargePlan, command: str, say: Callable[[str], object] = lambda text: None) -> LargeFigures:
    """Measure all subjects in turns.

    Raises:
        CallerError: one of them failed.
    """
    with ExitStack() as stack:
        say("starting")
        callers = {
            name: stack.enter_context(CallerProcess(title, module, arguments))
            for name, (title, module, arguments) in _SUBJECTS.items()
        }
        for caller in callers.values():
            caller.await_ready()
        say("warming")
        loom, native = callers["loom"], callers["native"]
        for caller in (loom, native):
            caller.ask("idle", count=plan.idle_calls // 3)
        loom.ask("stream", step=0.0)
        for name in callers:
            _echo(callers[name], name, plan.size // 16)
        rounds = []
        for number in range(1, plan.rounds + 1):
            say(f"round {number} of {plan.rounds}")
            echo_s = {name: _echo(caller, name, plan.size) for name, caller in callers.items()}
            idle_s = loom.ask("idle", count=plan.idle_calls)
            busy = {way: loom.ask("meanwhile", way=way, size=plan.size) for way in WAYS}
            native_idle_s = native.ask("idle", count=plan.idle_calls)
            native_busy = {way: native.ask("meanwhile", way=way, size=plan.size) for way in WAYS}
            rounds.append(
                LargeRound(
                    echo_s,
                    idle_s,
                    {way: found["seconds"] for way, found in busy.items()},
                    native_idle_s,
                    {way: found["seconds"] for way, found in native_busy.items()},
                    max(found["gateway_peak"] for found in busy.values()),
                    loom.ask("stream", step=plan.stream_step),
                )
            )
    return LargeFigures(command, describe_machine(), plan, rounds)


def _echo(caller: CallerProcess, name: str, size: int) -> float:
    # A WebSocket carries bytes; the others carry a tensor of as many.
    payload = {"payload": "bytes"} if name == "raw" else {}
    (seconds,) = caller.ask("echo", size=size, count=1, **payload)
    return float(seconds)
