"""A run of `loom.rl` on GPUs: ``python -m tests.benchmarks gpu-rl``. It has never run on one: none was at hand.

A random Qwen2 of about 0.5 B parameters, one engine and one trainer. With vLLM for GPUs and two of them, weights go
by NCCL; with one, engine and trainer take turns on it. Without vLLM, the engine is Loom's own, by messages. With
``--cpus`` a small model goes the same way on CPUs, which tries this program.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import loom
from loom.rl import Generators, Orchestrator, Trainers
from loom.rl.arithmetic import CHARACTERS, SMALL_SERVER, Arithmetic
from loom.rl.arithmetic_model import LONGEST, write_arithmetic_model
from loom.train import LiveConfig
from tests.benchmarks.budgets import BudgetReport, Figure
from tests.benchmarks.machine import describe_machine
from tests.support.gpus import GPUS

__all__ = ["GpuRlPlan", "measure"]

TIMEOUT = 540.0
"""Seconds that all of it may take."""


@dataclass(frozen=True)
class GpuRlPlan:
    """How much is measured."""

    steps: int = 10
    batch: int = 128
    layers: int = 24
    hidden: int = 1536
    """With 24 layers, 0.46 B parameters."""
    cpus: bool = False


def measure(plan: GpuRlPlan, command: str, say: Callable[[str], object] = lambda text: None) -> BudgetReport:
    """Run it in a session of a cluster on this machine.

    Raises:
        SystemExit: there is no GPU.
    """
    if not GPUS and not plan.cpus:
        raise SystemExit("this machine has no GPU that NVML knows, with the extra gpu of monarch-loom")
    ways = _ways(0 if plan.cpus else len(GPUS))
    with tempfile.TemporaryDirectory(prefix="loom-gpu-rl-") as folder, loom.local(hosts=1) as job:
        job.print_logs = False
        say("a model is written")
        run = _run(Path(folder), plan, ways)
        say(f"{plan.steps} steps, with {ways}")
        summary = job.run(run.run, detach=True).result(TIMEOUT)
        orders = [one for one in _events(Path(folder)) if one["name"] == "weights.client.done"]
    names = [f"step, {name}" for name in ("first", "later ones")]
    seconds = [one.seconds for one in summary.steps]
    figures = (
        Figure(names[0], "s", tuple(seconds[:1])),
        Figure(names[1], "s", tuple(seconds[1:])),
        Figure("an order for weights", "ms", tuple(float(one["wall_ms"]) for one in orders)),
        Figure("in the engine", "ms", tuple(float(one["rpc_ms"]) for one in orders)),
    )
    notes = (
        f"{ways}, on {'CPUs' if plan.cpus else f'{len(GPUS)} GPUs'}",
        f"{summary.trained} completions trained on, {summary.lost_generators} generators lost",
    )
    return BudgetReport("gpu-rl", command, describe_machine(), asdict(plan), (), figures, notes)


def _ways(gpus: int) -> Mapping[str, Any]:
    """Return the engine, the way of weights, and whether both share a GPU."""
    if not (os.environ.get("LOOM_VLLM") or shutil.which("vllm")):
        return {"engine": "loom", "weights": "messages", "colocated": False}
    shared = gpus == 1
    return {"engine": "vllm", "weights": "files" if shared else "transfer", "colocated": shared}


def _run(folder: Path, plan: GpuRlPlan, ways: Mapping[str, Any]) -> Orchestrator:
    model = write_arithmetic_model(folder / "model", layers=plan.layers, hidden=plan.hidden, letters=CHARACTERS)
    options: dict[str, Any] = {}
    if ways["engine"] == "vllm":
        room = {"max_length": LONGEST, "arguments": ("--enforce-eager", "--gpu-memory-utilization", "0.4")}
        options = {**SMALL_SERVER} if plan.cpus else room
    shape: dict[str, Any] = {"gpus": 0 if plan.cpus else 1, "colocated": ways["colocated"], "options": options}
    return Orchestrator(
        Arithmetic(),
        Generators(engine=ways["engine"], model=model, max_tokens=8, **shape),
        Trainers(model=model, gpus=not plan.cpus, config=LiveConfig(learning_rate=1e-5, optimizer="adam")),
        folder=folder,
        steps=plan.steps,
        batch=plan.batch,
        group=8,
        async_level=0,
        weights=ways["weights"],
    )


def _events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in (folder / "timing").glob("*.jsonl") for line in file.open()]
