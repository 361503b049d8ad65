"""How long ``loom analyze`` takes for a large log of which every line is an event, and how much memory.

The log is written first, from a piece of random values that is repeated. The analysis is a process of its own,
which shows what it took: CPU time, because that is what one core takes, however busy the machine is; and the
most memory.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from loom.tracing.lines import format_line
from tests.benchmarks.budgets import BudgetReport, Figure
from tests.benchmarks.machine import describe_machine
from tests.benchmarks.report import budgeted

__all__ = ["AnalyzePlan", "measure"]

PIECE = 20_000_000
"""Bytes that are repeated."""


@dataclass(frozen=True)
class AnalyzePlan:
    """How much is measured."""

    rounds: int = 3
    megabytes: int = 1000


@dataclass(frozen=True)
class Took:
    """What one analysis took."""

    cpu_s: float
    wall_s: float
    memory_mb: float


def measure(plan: AnalyzePlan, command: str, say: Callable[[str], object] = lambda text: None) -> BudgetReport:
    """Write a log and analyse it in each round."""
    with tempfile.TemporaryDirectory(prefix="loom-benchmark-") as name:
        folder = Path(name)
        say("writing the log")
        log, lines = _write_log(folder, plan.megabytes * 1_000_000)
        took = []
        for number in range(plan.rounds):
            say(f"round {number + 1} of {plan.rounds}")
            took.append(_analyse(log, folder))
    scale = 1000 / plan.megabytes
    return BudgetReport(
        "analyze",
        command,
        describe_machine(),
        asdict(plan),
        (
            budgeted(
                "analysis of 1 GB of log", "1 GB of log", "s of CPU time", [one.cpu_s * scale for one in took]
            ),
            budgeted("memory of an analysis", "most memory", "MB", [one.memory_mb for one in took]),
        ),
        (
            Figure("until it is done", "s for 1 GB", tuple(one.wall_s * scale for one in took)),
            Figure("lines", "of the log", tuple(float(lines) for _ in took)),
        ),
    )


def _write_log(folder: Path, size: int) -> tuple[Path, int]:
    """Write a log of whole pieces, so that it may be a little longer; return it with the number of its lines."""
    piece = "".join(_lines(min(size, PIECE))).encode()
    path = folder / "run.log"
    times = -(-size // len(piece))
    with path.open("wb") as file:
        for _ in range(times):
            file.write(piece)
    return path, times * piece.count(b"\n")


def _lines(size: int) -> Iterator[str]:
    chance = random.Random(24)
    written, step = 0, 0
    while written < size:
        step += 1
        trace = f"{chance.getrandbits(24):06x}"
        queue, rpc, now = chance.expovariate(1 / 20), chance.gauss(1200, 80), 4.0 * step
        done = {"wall_ms": queue + rpc, "rpc_ms": rpc, "queue_ms": queue}
        url = f"http://generator:8000/weights/step_{step}"
        events: list[tuple[str, dict[str, object]]] = [
            ("step.begin", {"step": step}),
            ("ckpt.wait.start", {"target_step": step}),
            ("ckpt.write.done", {"step": step, "write_ms": chance.gauss(230, 20)}),
            ("ckpt.wait.done", {"target_step": step, "wait_ms": chance.gauss(230, 20)}),
            ("weights.client.send", {"url": url, "path": f"/weights/step_{step}", "t": now}),
            ("weights.server.recv", {"path": "/update_weights", "t": now + queue / 1000}),
            ("weights.rpc.start", {"op": "update_weights", "t": now + queue / 1000}),
            ("weights.rpc.done", {"op": "update_weights", "t": now + done["wall_ms"] / 1000, "rpc_ms": rpc}),
            ("weights.client.done", {**done}),
            ("gen.batch.start", {"inflight": 96, "target_batch": 64}),
            ("gen.batch.done", {"completions": 64, "dur_ms": chance.gauss(2100, 300), "inflight": 96}),
            (
                "rollout",
                {"trunc_pct": chance.uniform(0, 9), "current_step": step, "ckpt_step": step, "staleness": 0},
            ),
            ("train.batch.wait", {"step": step, "rank": 0, "wait_ms": chance.expovariate(1 / 50)}),
            ("train.step.done", {"step": step, "rank": 0, "dur_ms": chance.gauss(3000, 100)}),
            ("step.complete", {"step": step, "wall": chance.gauss(3.6, 0.2)}),
        ]
        for name, fields in events:
            line = f"2026-01-01 00:00:{step % 60:02d} INFO {format_line(name, trace, fields)}\n"
            written += len(line)
            yield line


def _analyse(log: Path, out: Path) -> Took:
    program = "import sys; from loom.rl.diagnosis import analyze; analyze(sys.argv[1], sys.argv[2])"
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", program, str(log), str(out)])
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"the analysis ended with {process.returncode}")
    return Took(used.ru_utime + used.ru_stime, wall, used.ru_maxrss / 1000)
