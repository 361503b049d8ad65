"""What ``loom run`` costs a training: the time within its hooks in a step, and the later start.

A script with steps of 10 ms runs by itself and under ``loom run``, in turns, with a real gateway. It times what
`loom.instrument` does in each step, and says when its first step was made.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from loom_proxy.local import LocalCluster
from tests.benchmarks.budgets import BudgetReport, Figure
from tests.benchmarks.caller_process import CallerError
from tests.benchmarks.machine import describe_machine
from tests.benchmarks.report import budgeted

__all__ = ["RunPlan", "measure"]

STEP = 0.01
"""Seconds of a step, about."""

WITHIN = 120.0
"""Seconds that the script may take."""


@dataclass(frozen=True)
class RunPlan:
    """How much is measured."""

    rounds: int = 7
    steps: int = 300


@dataclass(frozen=True)
class Round:
    """Seconds of one run of the script."""

    to_first_step: float
    hooks: tuple[float, ...]
    """The time within hooks, of each step."""


def measure(plan: RunPlan, command: str, say: Callable[[str], object] = lambda text: None) -> BudgetReport:
    """Run the script by itself and under ``loom run``.

    Raises:
        CallerError: the script failed.
    """
    plain, hooked = [], []
    with LocalCluster(1) as cluster:
        access = {"LOOM_URL": cluster.url, "LOOM_TOKEN": cluster.token}
        for number in range(plan.rounds):
            say(f"round {number + 1} of {plan.rounds}")
            loom = [str(Path(sys.executable).with_name("loom")), "run", "--name", f"round-{number}", "--"]
            plain.append(_run([], plan.steps, {}))
            hooked.append(_run(loom, plan.steps, access))
    later = tuple(there.to_first_step - here.to_first_step for here, there in zip(plain, hooked, strict=True))
    hooks = tuple(statistics.median(one.hooks) * 1e6 for one in hooked)
    budgets = (
        budgeted("hooks of a step under loom run", "p50", "µs in the training thread", hooks),
        budgeted("later start under loom run", "the first step's end", "s", later),
    )
    figures = (
        Figure("hooks of a step, p99", "µs", tuple(_percentile(one.hooks, 99) * 1e6 for one in hooked)),
        Figure(
            "hooks of all steps", "of the steps' time", tuple(sum(one.hooks) / plan.steps / STEP for one in hooked)
        ),
    )
    return BudgetReport("run", command, describe_machine(), asdict(plan), budgets, figures)


def _run(before: list[str], steps: int, environment: dict[str, str]) -> Round:
    began = time.time()
    command = [*before, sys.executable, "-m", "tests.benchmarks.run", str(steps)]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=WITHIN, check=False
    )
    if done.returncode:
        raise CallerError(f"the script ended with {done.returncode}: {done.stderr[-2000:]}")
    said = json.loads(done.stdout)
    return Round(said["first"] - began, tuple(said["hooks"]) or (0.0,))


def _percentile(values: tuple[float, ...], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def train(steps: int) -> None:
    """Train a network; print when the first step was made, and the time within hooks of each further one."""
    import torch

    optimizers = sys.modules["torch.optim.optimizer"]
    spent = [0.0]

    def timed(hook: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            start = time.perf_counter()
            try:
                return hook(*arguments)
            finally:
                spent[-1] += time.perf_counter() - start

        return call

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    first = 0.0
    for _ in range(steps):
        until = time.perf_counter() + STEP
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if not first:  # now torch has imported what it needs, and all hooks are in place
            first = time.time()
            for hooks in (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks):
                for key, hook in hooks.items():
                    hooks[key] = timed(hook)
        spent.append(0.0)
        while time.perf_counter() < until:
            pass
    print(json.dumps({"first": first, "hooks": spent[1:-1] if any(spent) else []}))


if __name__ == "__main__":
    train(int(sys.argv[1]))
