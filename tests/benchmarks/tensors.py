"""What lazy tensors cost: an operation on the laptop, the way through the gateway, a read, and a training step.

The training is that of a network of two layers of 512 by 512; beside it the same with torch itself, in an actor on
the same host. Beside the operations and reads are those of Monarch's own remote tensors.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import loom
from tests.benchmarks.budgets import BudgetReport, Figure
from tests.benchmarks.caller_process import CallerError, CallerProcess
from tests.benchmarks.machine import describe_machine
from tests.benchmarks.report import budgeted

__all__ = ["BATCH", "WIDTH", "Eager", "TensorsPlan", "measure", "train_lazily"]

WIDTH, BATCH = 512, 256


@dataclass(frozen=True)
class TensorsPlan:
    """How much is measured."""

    rounds: int = 5
    operations: int = 20_000
    remote_operations: int = 1000
    """With Monarch's remote tensors."""
    reads: int = 200
    steps: int = 30


class Eager(loom.Actor):
    """Trains the network with torch itself, and answers calls."""

    @loom.endpoint
    def echo(self, number: float) -> float:
        return number

    @loom.endpoint
    def train(self, steps: int) -> float:
        """Return the seconds of a step, on a GPU where there is one."""
        import torch

        torch.manual_seed(0)
        has_gpu = torch.cuda.is_available()
        done = torch.cuda.synchronize if has_gpu else lambda: None
        with torch.device("cuda" if has_gpu else "cpu"):
            x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
            w = [torch.randn(WIDTH, WIDTH).mul_(0.04).requires_grad_() for _ in range(2)]
        for step in range(-3, steps):
            if step == 0:
                done()
                began = time.perf_counter()
            loss = (x.matmul(w[0]).relu().matmul(w[1]) - y).pow(2).mean()
            loss.backward()
            with torch.no_grad():
                for each in w:
                    each.sub_(each.grad, alpha=0.01)
                    each.grad = None
        done()
        return (time.perf_counter() - began) / steps


def measure(plan: TensorsPlan, command: str, say: Callable[[str], object] = lambda text: None) -> BudgetReport:
    """Measure lazy tensors in a session of a cluster on this machine."""
    found: dict[str, list[float]] = {}
    with _remote_tensors() as remote, loom.local(hosts=1) as job:
        job.print_logs = False
        lt = job.tensors()
        eager = job.hosts.spawn_procs(name="eager").spawn("eager", Eager)
        eager.train.call_one(3).get()
        for number in range(plan.rounds):
            say(f"round {number + 1} of {plan.rounds}")
            for name, value in {
                "operation": _varied(lt, plan.operations),
                **_operations(lt, plan.operations),
                "compiled": _compiled(lt),
                **_reads(lt, eager, plan.reads),
                "step of torch": eager.train.call_one(plan.steps).get(),
                "step": train_lazily(lt, plan.steps),
            }.items():
                found.setdefault(name, []).append(value)
            if isinstance(remote, CallerProcess):
                queued, done = remote.ask("operations", count=plan.remote_operations)
                read = sorted(remote.ask("read", count=plan.reads))[plan.reads // 2]
                for name, value in zip(REMOTE, (queued, done, read), strict=True):
                    found.setdefault(name, []).append(value)
    return _report(plan, command, found, remote if isinstance(remote, str) else None)


REMOTE = (
    "operation of Monarch's remote tensors, queued",
    "operation of Monarch's remote tensors, done",
    "read of Monarch's remote tensors",
)


@contextmanager
def _remote_tensors() -> Iterator[CallerProcess | str]:
    """Give the process that has Monarch's remote tensors, or why there are none."""
    with CallerProcess("remote tensors", "tests.benchmarks.remote_tensors") as caller:
        try:
            caller.await_ready()
        except CallerError as error:
            yield f"Monarch's remote tensors were not measured: {error}"
        else:
            yield caller


def _varied(lt: Any, many: int) -> float:
    """Return the seconds of an operation on the laptop, of a program that does not repeat itself."""
    x, w = lt.ones(4), lt.ones(4, requires_grad=True)
    kinds: tuple[Callable[[Any], Any], ...] = (
        lambda y: y.mul(w),
        lambda y: y.add(x),
        lambda y: y.relu(),
        lambda y: y.sub(w),
        lambda y: y.neg(),
    )
    chosen = random.Random(many).choices(kinds, k=many)
    lt.synchronize()
    began = time.perf_counter()
    y = x
    for place, kind in enumerate(chosen):
        y = kind(y if place % 8 else x)
    queued = time.perf_counter() - began
    lt.synchronize()
    return queued / many


def _operations(lt: Any, many: int) -> dict[str, float]:
    """Return the seconds of one of four operations that repeat, on the laptop, and of one until it is done."""
    x, w = lt.ones(4), lt.ones(4, requires_grad=True)
    lt.synchronize()
    began = time.perf_counter()
    for _ in range(many // 4):
        y = x.mul(w).add(x).relu().sum()
    queued = time.perf_counter() - began
    del y
    lt.synchronize()
    return {"repeated": queued / many, "done": (time.perf_counter() - began) / many}


def _compiled(lt: Any) -> float:
    """Return the seconds of an operation of a function of 400, on the laptop."""
    w = lt.ones(4)

    @lt.compile
    def work(x: Any) -> Any:
        for _ in range(200):
            x = x.mul(w).add(w)
        return x

    x = lt.ones(4)
    for _ in range(5):
        work(x)
    lt.synchronize()
    began = time.perf_counter()
    for _ in range(50):
        work(x)
    queued = time.perf_counter() - began
    lt.synchronize()
    return queued / 50 / 400


def _reads(lt: Any, eager: Any, many: int) -> dict[str, float]:
    """Return the seconds of a read and of a call, alternating."""
    one = lt.ones(())
    spent = {"read": 0.0, "call": 0.0}
    for _ in range(many):
        began = time.perf_counter()
        eager.echo.call_one(1.0).get()
        between = time.perf_counter()
        one.item()
        spent["call"] += between - began
        spent["read"] += time.perf_counter() - between
    return {name: each / many for name, each in spent.items()}


def train_lazily(lt: Any, steps: int) -> float:
    """Return the seconds of a step."""
    lt.seed(0)
    x, y = lt.randn(BATCH, WIDTH), lt.randn(BATCH, WIDTH)
    w = [lt.randn(WIDTH, WIDTH).mul_(0.04).requires_grad_() for _ in range(2)]
    for step in range(-3, steps):
        if step == 0:
            lt.synchronize()
            began = time.perf_counter()
        loss = (x.matmul(w[0]).relu().matmul(w[1]) - y).pow(2).mean()
        loss.backward()
        with lt.no_grad():
            for each in w:
                each.sub_(each.grad, alpha=0.01)
                each.grad = None
    lt.synchronize()
    return (time.perf_counter() - began) / steps


def _report(plan: TensorsPlan, command: str, found: dict[str, list[float]], missing: str | None) -> BudgetReport:
    def over(one: str, other: str) -> tuple[float, ...]:
        return tuple(a / b for a, b in zip(found[one], found[other], strict=True))

    micro = {name: tuple(1e6 * each for each in values) for name, values in found.items()}
    per_s = tuple(1 / each for each in found["done"])
    budgets = (
        budgeted("operation on a tensor", "an operation on the laptop", "µs", micro["operation"]),
        budgeted("operation of a sequence that repeats", "one of four that repeat", "µs", micro["repeated"]),
        budgeted("operation of a compiled function", "one of a compiled function", "µs", micro["compiled"]),
        budgeted("operations a second through the gateway", "done through the gateway", "a second", per_s),
        budgeted("read of an element", "item()", "a call of an endpoint", over("read", "call")),
        budgeted("training step", "a training step", "torch's own in the worker", over("step", "step of torch")),
    )
    named = ("read", "call", "step", "step of torch", *(REMOTE if missing is None else ()))
    figures = tuple(Figure(name, "µs", micro[name]) for name in named)
    notes = (f"a step trains two layers of {WIDTH} by {WIDTH} with a batch of {BATCH}",)
    return BudgetReport(
        "tensors",
        command,
        describe_machine(),
        asdict(plan),
        budgets,
        figures,
        notes if missing is None else (*notes, missing),
    )
