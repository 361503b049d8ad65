"""Schedules of learning rates, with torch's names and arguments: ``lt.optim.lr_scheduler``. Nothing waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

Optimizer = Any
"""A `loom.tensors.optim.Optimizer`, whose module imports this one."""


class LRScheduler:
    """Sets the learning rates of an optimizer's groups, anew after each `step`.

    Attributes:
        last_epoch: how often `step` was called.
        base_lrs: the learning rates at the beginning.
    """

    def __init__(self, optimizer: Optimizer, last_epoch: int = -1) -> None:
        self.optimizer = optimizer
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
        self.last_epoch = last_epoch
        self.step()

    def get_lr(self) -> list[float]:
        """Return the learning rates of the groups after `last_epoch` steps."""
        return [base * self.factor(self.last_epoch) for base in self.base_lrs]

    def factor(self, epoch: int) -> float:
        """Return the factor of the first learning rates after so many steps."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """Return the learning rates that are set."""
        return self._last_lr

    def step(self) -> None:
        """Go on by one."""
        self.last_epoch += 1
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr

    def state_dict(self) -> dict[str, Any]:
        """Return what a later schedule needs to go on."""
        return {"last_epoch": self.last_epoch, "base_lrs": list(self.base_lrs), "_last_lr": self._last_lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.last_epoch, self.base_lrs = state["last_epoch"], list(state["base_lrs"])
        self._last_lr = list(state["_last_lr"])


class LambdaLR(LRScheduler):
    """The factor is what a function gives for the number of steps."""

    def __init__(self, optimizer: Optimizer, lr_lambda: Callable[[int], float], last_epoch: int = -1) -> None:
        self.lr_lambda = lr_lambda
        super().__init__(optimizer, last_epoch)

    def factor(self, epoch: int) -> float:
        return self.lr_lambda(epoch)


class StepLR(LRScheduler):
    """The factor is multiplied by ``gamma`` after each ``step_size`` steps."""

    def __init__(self, optimizer: Optimizer, step_size: int, gamma: float = 0.1, last_epoch: int = -1) -> None:
        self.step_size, self.gamma = step_size, gamma
        super().__init__(optimizer, last_epoch)

    def factor(self, epoch: int) -> float:
        return self.gamma ** (epoch // self.step_size)


class MultiStepLR(LRScheduler):
    """The factor is multiplied by ``gamma`` at some steps."""

    def __init__(
        self, optimizer: Optimizer, milestones: Sequence[int], gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        self.milestones, self.gamma = sorted(milestones), gamma
        super().__init__(optimizer, last_epoch)

    def factor(self, epoch: int) -> float:
        return self.gamma ** sum(each <= epoch for each in self.milestones)


class ExponentialLR(LRScheduler):
    """The factor is multiplied by ``gamma`` after each step."""

    def __init__(self, optimizer: Optimizer, gamma: float, last_epoch: int = -1) -> None:
        self.gamma = gamma
        super().__init__(optimizer, last_epoch)

    def factor(self, epoch: int) -> float:
        return self.gamma**epoch


class LinearLR(LRScheduler):
    """The factor goes from one number to another in so many steps."""

    def __init__(
        self,
        optimizer: Optimizer,
        start_factor: float = 1 / 3,
        end_factor: float = 1.0,
        total_iters: int = 5,
        last_epoch: int = -1,
    ) -> None:
        self.start_factor, self.end_factor, self.total_iters = start_factor, end_factor, total_iters
        super().__init__(optimizer, last_epoch)

    def factor(self, epoch: int) -> float:
        return self.start_factor + (self.end_factor - self.start_factor) * min(epoch / self.total_iters, 1)


class CosineAnnealingLR(LRScheduler):
    """The learning rate goes down to ``eta_min``, as a half wave of ``T_max`` steps does."""

    def __init__(self, optimizer: Optimizer, T_max: int, eta_min: float = 0.0, last_epoch: int = -1) -> None:
        self.T_max, self.eta_min = T_max, eta_min
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:
        wave = (1 + math.cos(math.pi * self.last_epoch / self.T_max)) / 2
        return [self.eta_min + (base - self.eta_min) * wave for base in self.base_lrs]
