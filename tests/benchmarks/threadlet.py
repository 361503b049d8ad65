"""What a threadlet costs the training thread: one call, and a training that publishes every step.

The calls are measured one by one in a process of its own, ``python -m tests.benchmarks.threadlet ADDRESS``, in a
thread that computes between them, with a real weaver. The training is that of ``loom demo``, in actors that Loom
has spawned; it is measured without a threadlet and with one in turns, in the same processes. It publishes every
step, with the calls by themselves or with the block that stands for them; the budget is that of both. There is
one process less than there are cores, since the weaver is on this machine here, and needs some of what is left.
"""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import loom
from loom import endpoint
from loom.cli.demo_trainer import BATCH, DigitsTrainer
from loom_proxy.local import LocalCluster
from tests.benchmarks.budgets import BudgetReport, Figure
from tests.benchmarks.caller import serve
from tests.benchmarks.caller_process import CallerProcess
from tests.benchmarks.machine import describe_machine
from tests.benchmarks.report import Ratio, percentile
from tests.weaver.raw_threadlet import running_weaver

__all__ = [
    "CallTimes",
    "ThreadletPlan",
    "Training",
    "measure",
    "measure_calls",
    "measure_training",
    "threadlet_report",
]

BETWEEN = 200e-6
"""Seconds that the thread computes between two calls."""

LEARNING_RATE = 0.05

WAYS = ("", "calls", "block")
"""What publishes every step: nothing, ``publish_status`` and ``check_and_apply_updates``, or ``with t.step``."""


def _spare_cores() -> int:
    return max(1, len(os.sched_getaffinity(0)) - 1)


@dataclass(frozen=True)
class ThreadletPlan:
    """How much is measured."""

    rounds: int = 3
    calls: int = 5000
    """Calls of each kind, in each round."""
    pairs: int = 60
    """Times that training is measured in each of the ways, in all."""
    stretches: int = 5
    """Stretches of one such time, of which the median counts."""
    steps: int = 100
    """Steps of a stretch."""
    procs: int = field(default_factory=_spare_cores)
    """Processes that train."""


@dataclass(frozen=True)
class CallTimes:
    """Seconds of each call in one round."""

    publish: Sequence[float]
    check: Sequence[float]


@dataclass(frozen=True)
class Training:
    """Seconds of a step, without a threadlet and with one, measured close upon each other."""

    plain: float
    watched: float
    plain_cpu: float = 1.0
    """Seconds of CPU time of the whole process, all its threads."""
    watched_cpu: float = 1.0
    block: float = 1.0
    """As `watched`, by the block."""


def measure(plan: ThreadletPlan, command: str, say: Callable[[str], object] = lambda text: None) -> BudgetReport:
    """Measure the calls and the training.

    Raises:
        CallerError: a process failed.
    """
    say("calls")
    calls = measure_calls(plan)
    with LocalCluster(1) as cluster, loom.connect(cluster.url, cluster.token) as job:
        return threadlet_report(plan, command, calls, measure_training(job, plan, say))


def measure_calls(plan: ThreadletPlan) -> list[CallTimes]:
    """Measure single calls in each round."""
    with running_weaver() as weaver:
        with CallerProcess("training thread", "tests.benchmarks.threadlet", (weaver.address,)) as caller:
            caller.await_ready()
            caller.ask("publish", count=plan.calls // 4)  # to warm up
            return [
                CallTimes(caller.ask("publish", count=plan.calls), caller.ask("check", count=plan.calls))
                for _ in range(plan.rounds)
            ]


def threadlet_report(
    plan: ThreadletPlan, command: str, calls: Sequence[CallTimes], training: Sequence[Training]
) -> BudgetReport:
    """Set what was measured beside its budgets."""

    def microseconds(percent: int, which: str) -> tuple[float, ...]:
        return tuple(percentile(getattr(one, which), percent) * 1e6 for one in calls)

    here = "µs in the training thread"
    ratio = tuple(one.watched / one.plain for one in training)
    block = tuple(one.block / one.plain for one in training)
    budgets = (
        Ratio("publish_status, p50", "µs in the training thread", "at most", 5.0, microseconds(50, "publish")),
        Ratio(
            "check_and_apply_updates, p50", "µs in the training thread", "at most", 1.0, microseconds(50, "check")
        ),
        Ratio("digits training", "with a threadlet / without", "at most", 1.01, ratio),
        Ratio("digits training, with t.step", "with a threadlet / without", "at most", 1.01, block),
    )
    quartiles = statistics.quantiles(ratio, n=4) if len(ratio) > 1 else [ratio[0]] * 3
    figures = (
        Figure("publish_status, p99", here, microseconds(99, "publish")),
        Figure("check_and_apply_updates, p99", here, microseconds(99, "check")),
        Figure(
            "CPU of digits training",
            "with a threadlet / without",
            tuple(one.watched_cpu / one.plain_cpu for one in training),
        ),
        Figure("step without a threadlet", "µs", tuple(one.plain * 1e6 for one in training)),
        Figure("step with a threadlet", "µs", tuple(one.watched * 1e6 for one in training)),
    )
    notes = (
        "the time of a call has that of reading the clock twice",
        f"half of the {len(ratio)} turns are between {quartiles[0]:.4f} and {quartiles[2]:.4f}",
    )
    return BudgetReport("threadlet", command, describe_machine(), asdict(plan), budgets, figures, notes)


class TrainingThread:
    """Makes the calls of a training thread, and times each."""

    def __init__(self, address: str) -> None:
        self._threadlet = loom.Threadlet("timed", weaver=address)
        while not self._threadlet.connected:
            time.sleep(0.01)
        self._step = 0

    def publish(self, count: int) -> list[float]:
        """Seconds of each ``publish_status``."""
        publish, clock, times = self._threadlet.publish_status, time.perf_counter, []
        for _ in range(count):
            _compute()
            self._step += 1
            metrics = {"loss": 1.0 / self._step, "learning_rate": LEARNING_RATE}
            start = clock()
            publish(step=self._step, metrics=metrics)
            times.append(clock() - start)
        return times

    def check(self, count: int) -> list[float]:
        """Seconds of each ``check_and_apply_updates`` where there is none, as nearly always."""
        check, clock, times = self._threadlet.check_and_apply_updates, time.perf_counter, []
        for _ in range(count):
            _compute()
            start = clock()
            check()
            times.append(clock() - start)
        return times

    def close(self) -> None:
        self._threadlet.close()


def _compute() -> None:
    until = time.perf_counter() + BETWEEN
    while time.perf_counter() < until:
        pass


class WatchedTrainer(DigitsTrainer):
    """The demo's training, with a threadlet and without."""

    @endpoint
    def stretches(self, count: int, steps: int, way: str) -> list[tuple[float, float]]:
        """Seconds of a step, and its CPU seconds, in each stretch of ``steps`` steps; the first does not count."""
        threadlet = loom.Threadlet(config={"learning_rate": LEARNING_RATE}) if way else None
        while threadlet is not None and not threadlet.connected:
            time.sleep(0.001)
        try:
            return [self._stretch(steps, threadlet, way == "block") for _ in range(count + 1)][1:]
        finally:
            if threadlet is not None:
                threadlet.close()

    def _stretch(self, steps: int, threadlet: loom.Threadlet | None, block: bool) -> tuple[float, float]:
        import torch

        generator = torch.Generator().manual_seed(self.step)
        total_loss = 0.0
        start, cpu = time.perf_counter(), time.process_time()
        if threadlet is None:
            for _ in range(steps):
                total_loss += self._one_step(generator)
        elif not block:
            for number in range(self.step, self.step + steps):
                loss = self._one_step(generator)
                total_loss += loss
                threadlet.publish_status(step=number, metrics={"loss": loss})
                threadlet.check_and_apply_updates()
        else:
            for number in range(self.step, self.step + steps):
                with threadlet.step(number) as step:
                    step.metrics["loss"] = loss = self._one_step(generator)
                    total_loss += loss
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        self.step += steps
        return seconds / steps, cpu / steps

    def _one_step(self, generator: Any) -> float:
        import torch
        from torch.nn.functional import cross_entropy

        batch = torch.randint(len(self.images), (BATCH,), generator=generator)
        loss = cross_entropy(self.model(self.images[batch]), self.labels[batch])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.item())


def measure_training(
    job: loom.Job, plan: ThreadletPlan, say: Callable[[str], object] = lambda text: None
) -> list[Training]:
    """Measure the training of a job in each of `WAYS`, in turns."""
    procs = job.hosts.slice(hosts=0).spawn_procs(per_host={"gpus": plan.procs}, name="watched")
    trainers = procs.spawn("trainers", WatchedTrainer, LEARNING_RATE)
    trainers.setup.call(trainers.slice(gpus=0).open_store.call_one().get()).get()

    def step_seconds(way: str) -> list[float]:
        each = trainers.stretches.call(plan.stretches, plan.steps, way).get().values()
        # The slowest process of each stretch; the median over stretches.
        slowest = [[max(of) for of in zip(*stretch, strict=True)] for stretch in zip(*each, strict=True)]
        return [statistics.median(of) for of in zip(*slowest, strict=True)]

    pairs = []
    for number in range(plan.pairs):
        say(f"training: turn {number + 1} of {plan.pairs}")
        # Each of them comes first as often as the others.
        first = number % len(WAYS)
        found = {way: step_seconds(way) for way in WAYS[first:] + WAYS[:first]}
        (plain, plain_cpu), (watched, watched_cpu), (block, _) = (found[way] for way in WAYS)
        pairs.append(Training(plain, watched, plain_cpu, watched_cpu, block))
    procs.stop().get()
    return pairs


if __name__ == "__main__":
    serve(lambda: TrainingThread(sys.argv[1]))  # type: ignore[arg-type, return-value]
