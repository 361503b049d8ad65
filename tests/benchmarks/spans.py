"""What `loom.timing` costs: one event and one span, and all those of a step of reinforcement learning.

One step is short: it computes for `STEP` seconds, and in it is every event that the pipeline of `loom.rl` has in a
step with four generators, written to a file and as lines. Its share is the time within the calls over the whole of
the step. The other one is that of the shipped task, in a session of a cluster on this machine. Its share is what
the events of all its processes cost, at the cost of an event in the short step, as if none were at the same time.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

import loom
from loom.rl import arithmetic_run
from loom.timing import configure, event, span, trace
from loom.timing.spans import recorder
from tests.benchmarks.budgets import BudgetReport, Figure
from tests.benchmarks.machine import describe_machine
from tests.benchmarks.report import budgeted

__all__ = ["SpansPlan", "measure"]

STEP = 0.1
"""Seconds that a step computes: shorter than any with a model of use."""

GENERATORS = 4

EVENTS = 6 + 6 * GENERATORS
"""Events of that step."""


@dataclass(frozen=True)
class SpansPlan:
    """How much is measured."""

    rounds: int = 5
    calls: int = 20_000
    """Events, and spans, in each round."""
    steps: int = 20
    shipped: int = 30
    """Steps of the shipped task."""


def measure(plan: SpansPlan, command: str, say: Callable[[str], object] = lambda text: None) -> BudgetReport:
    """Measure events and spans with and without a file, and a step."""
    found: dict[str, list[float]] = {}
    costs: list[float] = []
    shares: list[float] = []
    for number in range(plan.rounds):
        say(f"round {number + 1} of {plan.rounds}")
        for where in ("nothing listens", "with a file"):
            with _recording(where == "with a file"):
                found.setdefault(f"event, {where}", []).append(_per_call(_event, plan.calls))
                found.setdefault(f"span, {where}", []).append(_per_call(_span, plan.calls))
        with _recording(file=True, lines=True):
            spent, took = _spent(plan.steps)
        costs.append(spent / plan.steps / EVENTS)
        shares.append(spent / took)
    say("the shipped task")
    rate = _events_a_second(plan.shipped)
    micro = {name: tuple(1e6 * one for one in each) for name, each in found.items()}
    here = "µs"
    budgets = (
        budgeted("event to a file", "event, with a file", here, micro.pop("event, with a file")),
        budgeted("event, nothing listens", "event, nothing listens", here, micro.pop("event, nothing listens")),
        budgeted("instrumentation of a step", "instrumentation of a step", "time in events / step", shares),
        budgeted(
            "instrumentation of the shipped task",
            "instrumentation of a step of the shipped task",
            "time in events / step",
            [rate * cost for cost in costs],
        ),
    )
    micro["event in a step"] = tuple(1e6 * cost for cost in costs)
    figures = tuple(Figure(name, here, each) for name, each in micro.items())
    notes = (
        f"a step computes for {STEP * 1000:g} ms and has {EVENTS} events, to a file and as lines",
        f"all processes of the shipped task together have {rate:.3g} events a second",
    )
    return BudgetReport("spans", command, describe_machine(), asdict(plan), budgets, figures, notes)


@contextmanager
def _recording(file: bool, lines: bool = False) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="loom-benchmark-") as folder, open(os.devnull, "w") as nothing:
        with redirect_stdout(nothing):
            recorder.set_folder(Path(folder, "timing") if file else None)
            configure(lines=lines)
            try:
                yield
            finally:
                recorder.set_folder(None)
                configure(lines=False)


def _event() -> None:
    event("weights.client.done", wall_ms=1222.0, rpc_ms=1219.0, queue_ms=3.0)


def _span() -> None:
    with span("load", path="/weights/step_3"):
        pass


def _per_call(call: Callable[[], None], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def _spent(steps: int) -> tuple[float, float]:
    """Return the seconds within the events of steps, and those of the steps."""
    spent = 0.0
    began = time.perf_counter()
    for step in range(steps):
        start = time.perf_counter()
        _events_of(step)
        spent += time.perf_counter() - start
        _compute()
    return spent, time.perf_counter() - began


def _events_a_second(steps: int) -> float:
    """Return how many events the processes of the shipped task have in a second of its steps."""
    with tempfile.TemporaryDirectory(prefix="loom-benchmark-") as folder, loom.local(hosts=1) as job:
        job.print_logs = False
        job.run(arithmetic_run(Path(folder), steps=steps, generators=GENERATORS).run, name="rl")
        files = Path(folder, "timing").glob("*.jsonl")
        found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    began = min(one["t"] for one in found if one["name"] == "step.begin")
    ended = max(one["t"] for one in found if one["name"] == "step.complete")
    return sum(began <= one["t"] <= ended for one in found) / (ended - began)


def _events_of(step: int) -> None:
    event("step.begin", step=step)
    event("ckpt.wait.start", target_step=step)
    event("ckpt.write.done", step=step, write_ms=234.5)
    event("ckpt.wait.done", target_step=step, wait_ms=232.1)
    for _ in range(GENERATORS):
        with trace():
            event("weights.client.send", url="http://10.0.0.1:8000", path="/update_weights")
            with span("weights.load", path=f"/weights/step_{step}"):
                event("weights.rpc.start", op="update_weights")
            event("weights.rpc.done", op="update_weights", rpc_ms=1219.0)
            event("weights.client.done", wall_ms=1222.0, rpc_ms=1219.0, queue_ms=3.0)
        event("gen.batch.done", completions=64, dur_ms=2109.0, inflight=96)
    event("rollout", trunc_pct=5.2, current_step=step, ckpt_step=step, staleness=0)
    event("step.complete", step=step, wall=3.57)


def _compute() -> None:
    until = time.perf_counter() + STEP
    while time.perf_counter() < until:
        pass
