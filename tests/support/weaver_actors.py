"""Actors for the tests of the weaver: they train with a real optimizer, and tell in the end what it did."""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import loom
from loom import Actor, endpoint
from loom_proxy.weaver.client import WeaverProxy
from tests.support.gateways import BOUND, await_true

FIRST_RATE = 0.5
"""The learning rate at the beginning. Sums of it have no rounding errors, as all those in tests."""

STEP = 0.002
"""Seconds."""


@dataclass(frozen=True)
class Trained:
    """What a training did."""

    steps: int
    weight: float
    """It begins with 0, and each step takes the learning rate away."""
    calls: list[tuple[int, float]]
    """The step and the value of each call of the handler."""
    rates: list[tuple[int, float]]
    """Each step that the optimizer made with another learning rate than the one before, and that rate."""


class TorchTrainer(Actor):
    """A training of one weight."""

    @endpoint
    def prepare(self) -> int:
        """Import torch, which may take long; the process' id."""
        import torch

        torch.set_num_threads(1)
        return os.getpid()

    @endpoint
    def train(self) -> Trained:
        """Train until told to stop."""
        import torch

        weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        optimizer = torch.optim.SGD([weight], lr=FIRST_RATE)
        number = 0
        calls: list[tuple[int, float]] = []
        rates: list[tuple[int, float]] = []
        threadlet = loom.Threadlet(config={"learning_rate": FIRST_RATE})

        @threadlet.handler("learning_rate")
        def set_learning_rate(value: float) -> None:
            calls.append((number, value))
            for group in optimizer.param_groups:
                group["lr"] = value

        while not threadlet.should_stop:
            with threadlet.step(number) as step:
                rate = optimizer.param_groups[0]["lr"]
                if not rates or rates[-1][1] != rate:
                    rates.append((number, rate))
                optimizer.zero_grad()
                weight.backward()
                optimizer.step()
                time.sleep(STEP)
                step.metrics["weight"] = weight.detach()
            number += 1
        threadlet.close()
        return Trained(number, weight.item(), calls, rates)


class Trainers:
    """Two processes that train."""

    def __init__(self, job: loom.Job, name: str) -> None:
        self.weaver: WeaverProxy = job.weaver
        procs = job.hosts.slice(hosts=0).spawn_procs(per_host={"gpus": 2}, name=name)
        actors = procs.spawn("trainers", TorchTrainer)
        self.pids: list[int] = list(actors.prepare.call().get().values())
        self.replicas = [f"{name}_{rank}@{job.session}" for rank in (0, 1)]
        self.glob = f"{name}_*@{job.session}"
        self._trained = actors.train.call()
        self._trained.add_done_callback(lambda trained: None)  # so that it leaves at once
        await_true(lambda: all((self.step(one) or 0) > 0 for one in self.replicas))

    def step(self, replica: str) -> int | None:
        """The last step that the weaver knows of."""
        found = self.weaver.replicas().get(replica)
        return None if found is None else found.step

    def stop(self) -> dict[str, Trained]:
        """Have them stop; what each did."""
        self.weaver.stop(self.glob).get(BOUND)
        trained: Any = self._trained.get(BOUND).values()
        return dict(zip(self.replicas, trained, strict=True))


def weight_after(trained: Trained) -> float:
    """What the weight has to be when each step was made with the learning rate that the optimizer had."""
    weight = 0.0
    for (first, rate), (end, _) in zip(trained.rates, [*trained.rates[1:], (trained.steps, 0.0)], strict=True):
        weight -= rate * (end - first)
    return weight
