"""What `loom.tracing` costs: one event and one span, and all those of a step of reinforcement learning.

One step computes for `STEP` seconds in one process, and in it is every event that the pipeline of `loom.rl` has in
a step with four generators, written to a file and as lines. The other one is that of the shipped task, in a session
of a cluster on this machine. The share is the CPU time within `loom.tracing`, that of the threads which write
included, of the CPU time that all processes of the step take.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import psutil

import loom
from loom.rl import arithmetic_run
from loom.tracing import configure, event, flush, span, trace
from loom.tracing.files import Writer
from loom.tracing.spans import recorder
from tests.benchmarks.budgets import BudgetReport, Figure
from tests.benchmarks.machine import describe_machine
from tests.benchmarks.report import budgeted
from tests.benchmarks.spent import Spent, in_all_processes, measured, read

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
    shipped: int = 100
    """Steps of the shipped task."""


def measure(plan: SpansPlan, command: str, say: Callable[[str], object] = lambda text: None) -> BudgetReport:
    """Measure events and spans with and without a file, and a step."""
    found: dict[str, list[float]] = {}
    shares: list[float] = []
    shipped: list[float] = []
    cores: list[float] = []
    rates: list[float] = []
    for number in range(plan.rounds):
        say(f"round {number + 1} of {plan.rounds}")
        for where in ("nothing listens", "with a file"):
            with _recording(where == "with a file"):
                found.setdefault(f"event, {where}", []).append(_per_call(_event, plan.calls))
                found.setdefault(f"span, {where}", []).append(_per_call(_span, plan.calls))
        with _recording(file=True, lines=True):
            shares.append(_share_of_steps(plan.steps))
        one = _share_of_the_shipped_task(plan.shipped)
        shipped.append(one.share)
        cores.append(one.cores)
        rates.append(one.rate)
    micro = {name: tuple(1e6 * one for one in each) for name, each in found.items()}
    here = "µs"
    budgets = (
        budgeted("event to a file", "event, with a file", here, micro.pop("event, with a file")),
        budgeted("event, nothing listens", "event, nothing listens", here, micro.pop("event, nothing listens")),
        budgeted(
            "instrumentation of a step", "instrumentation of a step", "CPU time in events / of the step", shares
        ),
        budgeted(
            "instrumentation of the shipped task",
            "instrumentation of a step of the shipped task",
            "CPU time in events / of the step",
            shipped,
        ),
    )
    figures = (
        *(Figure(name, here, each) for name, each in micro.items()),
        Figure("events, spans and traces of these steps", "a second", tuple(rates)),
        Figure("what these steps take", "cores", tuple(cores)),
    )
    notes = (f"a step computes for {STEP * 1000:g} ms and has {EVENTS} events, to a file and as lines",)
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
    flush()
    return (time.perf_counter() - start) / calls


def _share_of_steps(steps: int) -> float:
    """Return the share of the events of steps, and of writing them."""
    written: list[Spent] = []
    with patch.object(Writer, "flush", measured(Writer.flush, written)):
        spent = 0.0
        began = time.perf_counter()
        for step in range(steps):
            start = time.thread_time()
            _events_of(step)
            spent += time.thread_time() - start
            _compute()
        flush()
        took = time.perf_counter() - began
    return (spent + sum(one.seconds for one in written)) / took


class _Shipped(NamedTuple):
    """What the events of the shipped task cost."""

    share: float
    """Of the CPU time of all processes of the session."""
    cores: float
    """Seconds of CPU time a second."""
    rate: float
    """Events, spans and traces a second."""


def _share_of_the_shipped_task(steps: int) -> _Shipped:
    with tempfile.TemporaryDirectory(prefix="loom-benchmark-") as name:
        found, folder = Path(name, "found"), Path(name, "run")
        with in_all_processes(found), loom.local(hosts=1) as job, _CpuTime() as cpu:
            job.print_logs = False
            job.run(arithmetic_run(folder, steps=steps, generators=GENERATORS).run, name="rl")
        texts = [file.read_text() for file in folder.glob("timing/*.jsonl")]
        events = [json.loads(line) for text in texts for line in text.splitlines()]
        began = min(one["t"] for one in events if one["name"] == "step.begin")
        ended = max(one["t"] for one in events if one["name"] == "step.complete")
        spent = read(found, began, ended)
    cores = cpu.between(began, ended) / (ended - began)
    took = sum(one.seconds for one in spent) / (ended - began)
    return _Shipped(took / cores, cores, len(spent) / (ended - began))


class _CpuTime:
    """The CPU time of all processes that this one has started, looked at once a second while a block runs."""

    def __enter__(self) -> _CpuTime:
        self._seen: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def between(self, began: float, ended: float) -> float:
        """Return the seconds between two times of this host's clock, on the line through the looks around them."""
        times, seconds = zip(*self._seen, strict=True)
        return float(np.interp(ended, times, seconds) - np.interp(began, times, seconds))

    def _watch(self) -> None:
        this = psutil.Process()
        while not self._over.wait(1):
            total = 0.0
            for process in this.children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    used = process.cpu_times()
                    total += used.user + used.system
            self._seen.append((time.monotonic(), total))


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
