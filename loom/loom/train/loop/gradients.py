"""`Gradients`: computes the gradient of a batch, and lets the optimizer step by the mean of all groups."""

from __future__ import annotations

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


class Gradients:
    """The gradients of one process.

    Args:
        trainer: has the loss.
        state: has the model and the optimizer.
        config: has the batch size and the clipping.
        exchange: with the other processes.
        progress: told of steps that were applied or skipped.
    """

    def __init__(
        self,
        trainer: TrainerModel,
        state: TrainingState,
        config: AgreedConfig,
        exchange: Exchange,
        progress: Progress,
    ) -> None:
        self._trainer = trainer
        self._state = state
        self._config = config
        self._exchange = exchange
        self._progress = progress
        self._skipped_now = 0

    def compute(self) -> torch.Tensor:
        """Return the gradient of this process's batch, and the loss behind it, in a row."""
        self._state.optimizer.zero_grad(set_to_none=True)
        loss = self._trainer.step(self._state.model, self._exchange.batch())
        loss.backward()
        for parameter in self._state.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return flatten((one.grad for one in self._state.parameters), [float(loss.detach())])

    def apply(self, flat: torch.Tensor) -> None:
        """Let the optimizer step by a mean gradient, unless it is not finite.

        All groups are given the same mean, and so agree on whether it is finite.
        """
        parameters = self._state.parameters
        self._progress.metrics["loss"] = unflatten(flat, (one.grad for one in parameters))[0]
        if not self._exchange.all_members(local(one.grad).isfinite().all() for one in parameters):
            self._skip()
            return
        self._skipped_now = 0
        if clip := self._config.gradient_clipping:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        self._state.optimizer.step()
        self._progress.applied += 1

    def _skip(self) -> None:
        self._progress.skipped += 1
        self._skipped_now += 1
        if self._skipped_now >= MOST_SKIPPED:
            step = self._progress.step
            raise NotFinite(f"the gradient was not finite in {MOST_SKIPPED} steps in a row, up to {step}")
