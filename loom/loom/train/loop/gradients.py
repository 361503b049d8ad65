"""`Gradients`: computes the gradient of a batch, and lets the optimizer step by the mean of all groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loom.train.loop.agreed_config import AgreedConfig
from loom.train.loop.exchange import Exchange
from loom.train.loop.progress import Progress
from loom.train.loop.tensors import flatten, local, unflatten
from loom.train.loop.training_state import TrainingState
from loom.train.model import TrainerModel

__all__ = ["Gradients", "NotFinite"]

MOST_SKIPPED = 20
"""Steps in a row without a finite gradient, after which the training is given up."""


class NotFinite(Exception):
    """The gradient was not finite in so many steps that it will not become so by itself."""


@dataclass
class Gradients:
    """The gradients of one process."""

    trainer: TrainerModel
    state: TrainingState
    config: AgreedConfig
    exchange: Exchange
    progress: Progress
    skipped_now: int = 0
    """Steps in a row without a finite gradient."""

    def compute(self) -> torch.Tensor:
        """Return the gradient of this process's batch, and the loss behind it, in a row."""
        self.state.optimizer.zero_grad(set_to_none=True)
        loss = self.trainer.step(self.state.model, self.exchange.batch())
        loss.backward()
        for parameter in self.state.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return flatten((one.grad for one in self.state.parameters), [float(loss.detach())])

    def apply(self, flat: torch.Tensor) -> None:
        """Let the optimizer step by a mean gradient, unless it is not finite.

        All groups are given the same mean, and so agree on whether it is finite.
        """
        parameters = self.state.parameters
        self.progress.metrics["loss"] = unflatten(flat, (one.grad for one in parameters))[0]
        if not self.exchange.all_members(local(one.grad).isfinite().all() for one in parameters):
            self._skip()
            return
        self.skipped_now = 0
        if clip := self.config.gradient_clipping:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        self.state.optimizer.step()
        self.progress.applied += 1

    def _skip(self) -> None:
        self.progress.skipped += 1
        self.skipped_now += 1
        if self.skipped_now >= MOST_SKIPPED:
            step = self.progress.step
            raise NotFinite(f"the gradient was not finite in {MOST_SKIPPED} steps in a row, up to {step}")
