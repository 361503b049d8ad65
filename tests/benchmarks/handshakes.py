"""How much a session's calls suffer while others try handshakes with the gateway.

In each round, calls are measured while nothing else happens and while `tests.benchmarks.attack`, a process of its
own, sends bad handshakes and wrong tokens.
"""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

import loom
from loom import Actor, endpoint
from loom_proxy.local import LocalCluster
from tests.benchmarks.machine import Machine, describe_machine
from tests.benchmarks.report import Ratio
from tests.benchmarks.written import BUDGETS

__all__ = ["BUDGET", "Calls", "HandshakeFigures", "HandshakePlan", "measure"]

BUDGET = BUDGETS["small call beside bad handshakes"].value
"""p99 of a call during the attack, at most so many times that without."""

WARM_UP = 200
"""Calls before the first that counts."""


@dataclass(frozen=True)
class HandshakePlan:
    """How much is measured."""

    rounds: int = 3
    seconds: float = 10.0
    per_second: int = 200
    """Bad handshakes and wrong tokens."""


@dataclass(frozen=True)
class Calls:
    """Calls one after the other for some seconds; times in milliseconds."""

    count: int
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True)
class HandshakeFigures:
    """What was measured, of each round."""

    command: str
    machine: Machine
    plan: HandshakePlan
    idle: tuple[Calls, ...]
    attacked: tuple[Calls, ...]
    answers: dict[str, int]
    """How often the gateway answered the attack with each status."""

    @property
    def ratio(self) -> Ratio:
        return Ratio(
            name="call p99 under attack",
            formula="attacked / idle",
            bound="at most",
            budget=BUDGET,
            by_round=tuple(
                attacked.p99_ms / idle.p99_ms for idle, attacked in zip(self.idle, self.attacked, strict=True)
            ),
        )

    @property
    def within_budgets(self) -> bool:
        return self.ratio.met

    def as_json(self) -> dict[str, Any]:
        rounds = zip(self.idle, self.attacked, strict=True)
        return {
            "benchmark": "handshakes",
            "command": self.command,
            "machine": asdict(self.machine),
            "plan": asdict(self.plan),
            "ratio": self.ratio.as_json(),
            "answers": self.answers,
            "within_budgets": self.within_budgets,
            "rounds": [{"idle": asdict(idle), "attacked": asdict(attacked)} for idle, attacked in rounds],
        }

    def as_table(self) -> RenderableType:
        title = f"one call, with {self.plan.per_second} bad handshakes and tokens a second and without"
        table = Table(title=title, title_justify="left")
        for heading in ("", "p50, ms", "p99, ms", "calls"):
            table.add_column(heading, justify="right" if heading else "left")
        for name, rounds in (("idle", self.idle), ("attacked", self.attacked)):
            p50 = statistics.median(calls.p50_ms for calls in rounds)
            p99 = statistics.median(calls.p99_ms for calls in rounds)
            table.add_row(name, f"{p50:.2f}", f"{p99:.2f}", f"{sum(calls.count for calls in rounds):,}")
        ratio = self.ratio
        style = "green" if ratio.met else "bold red"
        each = ", ".join(f"{one:.2f}" for one in ratio.by_round)
        lines = [
            f"answers to the attack: {', '.join(f'{count} x {answer}' for answer, count in self.answers.items())}",
            str(self.machine),
            self.command,
        ]
        return Group(
            table,
            Text(f"p99 {ratio.median:.2f} times idle ({each}); at most {BUDGET:g}", style=style),
            *(Text(line, style="dim") for line in lines),
        )


class Echo(Actor):
    @endpoint
    def echo(self, value: int) -> int:
        return value


def measure(plan: HandshakePlan, command: str, progress: Callable[[str], object]) -> HandshakeFigures:
    """Measure calls of one session, in turns without and with an attack."""
    idle, attacked = [], []
    answers: Counter[str] = Counter()
    with LocalCluster(1) as cluster, loom.connect(cluster.url, cluster.token) as job:
        echo = job.hosts.spawn_procs(per_host={"gpus": 1}).spawn("echo", Echo)
        for number in range(WARM_UP):
            echo.echo.call_one(number).get()
        for number in range(plan.rounds):
            progress(f"round {number + 1} of {plan.rounds}: idle")
            end = time.monotonic() + plan.seconds
            idle.append(_calls(echo, lambda end=end: time.monotonic() < end))
            progress(f"round {number + 1} of {plan.rounds}: attacked")
            arguments = [cluster.url, str(plan.per_second), str(plan.seconds)]
            attack = subprocess.Popen(
                [sys.executable, "-m", "tests.benchmarks.attack", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
            )
            try:
                attacked.append(_calls(echo, lambda attack=attack: attack.poll() is None))
                assert attack.stdout is not None
                answers.update(json.load(attack.stdout))
            finally:
                attack.kill()
                attack.wait()
    return HandshakeFigures(command, describe_machine(), plan, tuple(idle), tuple(attacked), dict(answers))


def _calls(echo: Any, goes_on: Callable[[], bool]) -> Calls:
    """Call for as long as something goes on."""
    times = []
    while goes_on() or len(times) < 2:
        start = time.perf_counter()
        assert echo.echo.call_one(len(times)).get() == len(times)
        times.append((time.perf_counter() - start) * 1000)
    return Calls(len(times), statistics.median(times), statistics.quantiles(times, n=100)[98])
