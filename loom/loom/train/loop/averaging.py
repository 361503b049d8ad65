"""How groups make a step together: they average gradients in each one, or parameters after several."""

from __future__ import annotations

from collections.abc import Sequence
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


class SharedSteps:
    """`Averaging.GRADIENTS`: all groups apply the same mean gradient in each step.

    Args:
        steps: that the job has.
        gradients: of this process.
        exchange: with the other groups.
        progress: has the step.
        clock: takes the time.
    """

    groups_agree = True

    def __init__(
        self, steps: int, gradients: Gradients, exchange: Exchange, progress: Progress, clock: StepClock
    ) -> None:
        self._steps = steps
        self._gradients = gradients
        self._exchange = exchange
        self._progress = progress
        self._clock = clock

    def begin(self) -> None: ...

    def advance(self, step: Step) -> None:
        while True:
            mark = self._clock.mark()
            self._exchange.gather()
            if self._progress.step >= self._steps:  # taken over from a group that says farewell
                return
            with self._clock.computing():
                flat = self._gradients.compute()
            if self._exchange.average_gradients(flat):
                break
            self._clock.lose(mark)
            step.discard()
        with self._clock.computing():
            self._exchange.settle()
            self._gradients.apply(flat)
        self._progress.step += 1

    def finish(self) -> None: ...


class OuterStep(Protocol):
    """What the groups do with how far each has gone by itself."""

    def progress(self) -> Sequence[torch.Tensor]:
        """Return what the groups average."""

    def follow(self, mean: torch.Tensor) -> None:
        """Go on from the mean."""


class ParameterMean:
    """The outer step of local SGD: the mean of all groups' parameters.

    Args:
        parameters: that the groups change by themselves in between.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters

    def progress(self) -> Sequence[torch.Tensor]:
        return self._parameters

    def follow(self, mean: torch.Tensor) -> None:
        unflatten(mean, self._parameters)


class LocalSteps:
    """`Averaging.LOCAL_SGD` and ``DILOCO``: each group steps by itself, and all take an outer step after several.

    Args:
        outer: the outer step, a `ParameterMean` or an `OuterOptimizer`.
        config: says after how many steps.
        gradients: of this process.
        exchange: with the other groups.
        progress: has the step.
        clock: takes the time.
    """

    def __init__(
        self,
        outer: OuterStep,
        config: AgreedConfig,
        gradients: Gradients,
        exchange: Exchange,
        progress: Progress,
        clock: StepClock,
    ) -> None:
        self._outer = outer
        self._config = config
        self._gradients = gradients
        self._exchange = exchange
        self._progress = progress
        self._clock = clock
        self._local_steps = 0
        """Steps since the last outer step."""

    @property
    def groups_agree(self) -> bool:
        return self._local_steps == 0

    def begin(self) -> None:
        self._step_outside()  # a group that joins takes over the state of the others here

    def advance(self, step: Step) -> None:
        with self._clock.computing():
            flat = self._gradients.compute()
            self._exchange.average_in_group(flat)
            self._gradients.apply(flat)
        self._progress.step += 1
        self._local_steps += 1
        if self._local_steps >= self._config.sync_every:
            self._step_outside()

    def finish(self) -> None:
        if self._local_steps:
            self._step_outside()

    def _step_outside(self) -> None:
        while True:
            self._exchange.gather()
            flat = flatten(self._outer.progress())
            if self._exchange.average(flat):
                break
        self._exchange.settle()
        self._local_steps = 0
        self._outer.follow(flat)
