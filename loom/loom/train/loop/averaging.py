"""How groups make a step together: they average gradients in each one, or parameters after several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from loom.threadlet import Step
from loom.train.loop.agreed_config import AgreedConfig
from loom.train.loop.exchange import Exchange
from loom.train.loop.gradients import Gradients
from loom.train.loop.progress import Progress
from loom.train.loop.step_clock import StepClock
from loom.train.loop.tensors import flatten, unflatten

__all__ = ["LocalSteps", "ParameterMean", "SharedSteps", "StepStrategy"]


class StepStrategy(Protocol):
    """What differs between the kinds of `loom.train.Averaging`."""

    def begin(self) -> None:
        """Do what comes before the first step."""

    def advance(self, step: Step) -> None:
        """Make one step."""

    def finish(self) -> None:
        """Do what comes after the last step."""

    @property
    def groups_agree(self) -> bool:
        """Whether all groups have the same parameters now."""


@dataclass
class SharedSteps:
    """`Averaging.GRADIENTS`: all groups apply the same mean gradient in each step."""

    steps: int
    gradients: Gradients
    exchange: Exchange
    progress: Progress
    clock: StepClock

    groups_agree = True

    def begin(self) -> None: ...

    def advance(self, step: Step) -> None:
        while True:
            mark = self.clock.mark()
            self.exchange.gather()
            if self.progress.step >= self.steps:  # taken over from a group that says farewell
                return
            with self.clock.computing():
                flat = self.gradients.compute()
            if self.exchange.average_gradients(flat):
                break
            self.clock.lose(mark)
            step.discard()
        with self.clock.computing():
            self.exchange.settle()
            self.gradients.apply(flat)
        self.progress.step += 1

    def finish(self) -> None: ...


class OuterStep(Protocol):
    """What the groups do with how far each has gone by itself."""

    def progress(self) -> Sequence[torch.Tensor]:
        """Return what the groups average."""

    def follow(self, mean: torch.Tensor) -> None:
        """Go on from the mean."""


@dataclass
class ParameterMean:
    """The outer step of local SGD: the mean of all groups' parameters."""

    parameters: Sequence[torch.Tensor]

    def progress(self) -> Sequence[torch.Tensor]:
        return self.parameters

    def follow(self, mean: torch.Tensor) -> None:
        unflatten(mean, self.parameters)


@dataclass
class LocalSteps:
    """`Averaging.LOCAL_SGD` and ``DILOCO``: each group steps by itself, and all together after several steps."""

    outer: OuterStep
    config: AgreedConfig
    gradients: Gradients
    exchange: Exchange
    progress: Progress
    clock: StepClock
    local_steps: int = 0
    """Steps since the last outer step."""

    @property
    def groups_agree(self) -> bool:
        return self.local_steps == 0

    def begin(self) -> None:
        self._step_outside()  # a group that joins takes over the state of the others here

    def advance(self, step: Step) -> None:
        with self.clock.computing():
            flat = self.gradients.compute()
            self.exchange.average_in_group(flat)
            self.gradients.apply(flat)
        self.progress.step += 1
        self.local_steps += 1
        if self.local_steps >= self.config.sync_every:
            self._step_outside()

    def finish(self) -> None:
        if self.local_steps:
            self._step_outside()

    def _step_outside(self) -> None:
        while True:
            self.exchange.gather()
            flat = flatten(self.outer.progress())
            if self.exchange.average(flat):
                break
        self.exchange.settle()
        self.local_steps = 0
        self.outer.follow(flat)
