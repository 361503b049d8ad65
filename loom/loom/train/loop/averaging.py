"""The strategies for a step of all groups: they average gradients in each step, or parameters after several."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from loom.threadlet import Step
from loom.train.loop.exchange import StepExchange
from loom.train.loop.outer import OuterOptimizer, ParameterMean
from loom.train.loop.step_clock import StepClock
from loom.train.loop.tensors import flatten, local, unflatten
from loom.train.loop.training_state import TrainingState

MOST_SKIPPED = 20  # steps in a row without a finite gradient after which the training fails


class NotFinite(Exception):
    """The gradient was not finite in so many steps that it will not recover."""


@dataclass
class StepStrategy:
    """A kind of `loom.train.Averaging`, with the parts that all kinds share: gradients and the optimizer's step."""

    state: TrainingState
    exchange: StepExchange
    clock: StepClock
    _skipped_now: int = field(default=0, init=False)  # steps in a row without a finite gradient

    def begin(self) -> None:
        """Prepare for the first step."""

    def advance(self, step: Step) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Complete the work after the last step."""

    @property
    def groups_agree(self) -> bool:
        """Whether all groups have the same parameters now."""
        return True

    def _compute(self) -> torch.Tensor:
        """Return the gradient of this process's batch, followed by the loss, as one flat tensor."""
        state = self.state
        state.optimizer.zero_grad(set_to_none=True)
        loss = state.trainer.step(state.model, self.exchange.batch())
        loss.backward()
        for parameter in state.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return flatten((one.grad for one in state.parameters), [float(loss.detach())])

    def _apply(self, flat: torch.Tensor) -> None:
        """Let the optimizer step by the mean gradient, the same in all groups, unless it is not finite."""
        state, report = self.state, self.state.report
        report.metrics["loss"] = unflatten(flat, (one.grad for one in state.parameters))[0]
        if self.exchange.all_members(local(one.grad).isfinite().all() for one in state.parameters):
            self._skipped_now = 0
            if clip := state.config.current.gradient_clipping:
                torch.nn.utils.clip_grad_norm_(state.parameters, clip)
            state.optimizer.step()
            report.applied += 1
        else:
            report.skipped += 1
            self._skipped_now += 1
            if self._skipped_now >= MOST_SKIPPED:
                raise NotFinite(
                    f"the gradient was not finite in {MOST_SKIPPED} steps in a row, up to {report.step}"
                )
        report.step += 1


class SharedSteps(StepStrategy):
    """`Averaging.GRADIENTS`: all groups apply the same mean gradient in each step."""

    def advance(self, step: Step) -> None:
        """Make one step; repeat it until no group is lost in it."""
        while True:
            mark = self.clock.mark()
            self.exchange.gather()
            if self.state.report.step >= self.state.job.steps:  # the state came from a group that says farewell
                return
            with self.clock.measured("compute_s"):
                flat = self._compute()
            if self.exchange.average_gradients(flat):
                break
            self.clock.lose(mark)
            step.discard()
        with self.clock.measured("compute_s"):
            self.exchange.settle()
            self._apply(flat)


@dataclass
class LocalSteps(StepStrategy):
    """`Averaging.LOCAL_SGD` and ``DILOCO``: each group steps alone, and all step together after several steps."""

    outer: OuterOptimizer | ParameterMean
    _local_steps: int = field(default=0, init=False)  # steps since the last outer step

    @property
    def groups_agree(self) -> bool:
        """Whether no group has made a step of its own since the last outer step."""
        return self._local_steps == 0

    def begin(self) -> None:
        """Take over the state of the other groups if the group joins them."""
        self._step_outside()

    def advance(self, step: Step) -> None:
        """Make one local step, and an outer one if it is due."""
        with self.clock.measured("compute_s"):
            flat = self._compute()
            self.exchange.average_in_group(flat)
            self._apply(flat)
        self._local_steps += 1
        if self._local_steps >= self.state.config.current.sync_every:
            self._step_outside()

    def finish(self) -> None:
        """Make the last outer step, if there are local steps since the one before."""
        if self._local_steps:
            self._step_outside()

    def _step_outside(self) -> None:
        while True:
            self.exchange.gather()
            flat = flatten(self.outer.progress())
            if self.exchange.average(flat):
                break
        self.exchange.settle()
        self._local_steps = 0
        self.outer.follow(flat)
