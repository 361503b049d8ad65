"""Trainers for the tests, and a job as they look at it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import loom
from loom.control.commands import Acknowledgement
from loom.train import (
    Batch,
    FaultTolerantJob,
    JobEvent,
    JobStatus,
    JobSummary,
    LiveConfig,
    Timeouts,
    TrainerActor,
    status,
)
from loom_proxy.runs import RunHandle
from loom_proxy.weaver.client import WeaverProxy

RATE = 0.5
"""The learning rate at the beginning. Sums of it have no rounding errors."""

BOUND = 90.0

TIMEOUTS = Timeouts(collective=5.0, quorum=10.0, connect=10.0)


def plain_sgd(parameters: Any, learning_rate: float) -> Any:
    import torch

    return torch.optim.SGD(parameters, lr=learning_rate)


class Counting(TrainerActor):
    """A weight that begins with 0, and from which each step takes the learning rate: steps can be counted in it.

    Args:
        pace: seconds that a step takes.
        flawed: the replica whose steps raise; ``*`` for all.
        nan_at: the steps in which the loss of one process is not a number.
    """

    optimizers: Mapping[str, Callable[[Any, float], Any]] = {"sgd": plain_sgd, "twin": plain_sgd}

    def __init__(self, pace: float = 0.02, flawed: str = "", nan_at: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.nan_at = nan_at
        self.pace = pace
        self.flawed = flawed

    def build(self) -> Any:
        import torch

        return torch.nn.Linear(2, 2, bias=False, dtype=torch.float64)

    def loss(self, model: Any, batch: Batch) -> Any:
        import torch

        if self.flawed in ("*", self.replica):
            raise ValueError(f"{self.replica} is flawed")
        time.sleep(self.pace)
        loss = model(torch.ones(1, 2, dtype=torch.float64)).sum()
        return loss * float("nan") if batch.step in self.nan_at and batch.shard == 0 else loss

    def evaluate(self, model: Any) -> dict[str, float]:
        from loom.train.loop.training_state import local

        return {"weight": float(local(model.weight).flatten()[0])}


class Zeroed(Counting):
    """The same, from 0 on, so that the weight is exact."""

    def build(self) -> Any:
        import torch

        model = super().build()
        with torch.no_grad():
            model.weight.zero_()
        return model


def a_job(
    steps: int,
    groups: int = 2,
    *,
    flawed: str = "",
    nan_at: Any = (),
    trainer: type[Counting] = Zeroed,
    **settings: Any,
) -> FaultTolerantJob:
    defaults = {
        "evaluate_every": 1,
        "hash_every": 5,
        "timeouts": TIMEOUTS,
        "config": LiveConfig(learning_rate=RATE),
    }
    return FaultTolerantJob(
        trainer, kwargs={"flawed": flawed, "nan_at": nan_at}, groups=groups, steps=steps, **{**defaults, **settings}
    )


class Watched:
    """A job that runs, seen from a test."""

    def __init__(self, job: loom.Job, training: FaultTolerantJob) -> None:
        self.job = job
        self.training = training
        self.run: RunHandle = training.start(job)

    @property
    def weaver(self) -> WeaverProxy:
        return self.job.weaver

    def status(self) -> JobStatus:
        found: JobStatus = self.job.run(status, self.training.name)
        return found

    def events(self, kind: str) -> list[JobEvent]:
        return [event for event in self.status().events if event.kind == kind]

    def pids(self) -> dict[str, tuple[int, ...]]:
        return {group.replica: group.pids for group in self.status().groups if group.replica}

    def hosts(self) -> dict[str, int]:
        return {group.replica: group.host for group in self.status().groups if group.replica}

    def steps(self) -> dict[str, int]:
        return {group.replica: group.report.step for group in self.status().groups if group.replica}

    def await_steps(self, more: int = 5, groups: int | None = None) -> None:
        """Wait until each of so many groups has made more steps."""
        groups = self.training.groups if groups is None else groups
        least: dict[str, int] = {}

        def made() -> bool:
            steps = self.steps()
            for replica, step in steps.items():
                least.setdefault(replica, step + more)
            return len(steps) == groups and all(step >= least[replica] for replica, step in steps.items())

        self.await_true(made)

    def await_spare(self) -> None:
        self.await_true(lambda: any(spare.state == "ready" for spare in self.status().spares))

    def await_event(self, kind: str, number: int = 1) -> JobEvent:
        found: list[JobEvent] = []

        def there() -> bool:
            found[:] = self.events(kind)
            return len(found) >= number

        self.await_true(there)
        return found[number - 1]

    def await_true(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + BOUND
        while True:
            try:
                if condition():
                    return
            except loom.WrongArguments:  # it does not run yet, or not any more
                if self.run.done():
                    raise AssertionError(f"it is over: {self.run.exception() or self.run.result()}") from None
            assert time.monotonic() < until, f"it never was so: {self.status()}"
            time.sleep(0.05)

    def kill(self, replica: str, number: signal.Signals = signal.SIGKILL) -> float:
        """Send a signal to the first process of a group; when."""
        (pid, *_) = self.pids()[replica]
        os.kill(pid, number)
        return time.time()

    def stop(self) -> JobSummary:
        """Have all groups stop; what came of it."""
        self.weaver.stop(self.training.name).get(BOUND)
        summary: JobSummary = self.run.result(BOUND)
        assert summary.ending == "stopped"
        return summary

    def change(self, target: str = "train", **config: Any) -> dict[str, Acknowledgement]:
        """Change the configuration; every replica has to apply it."""
        answers = self.weaver.update_config(target, **config).get(BOUND)
        assert answers
        assert all(answer.ok for answer in answers.values()), answers
        return answers
