"""PyTorch's optimizers: each step of the primary optimizer, the first to step, is a step boundary."""

from __future__ import annotations

from types import ModuleType
from typing import Any
from weakref import ref

from loom.instrument.training import Source, guarded, training

NAME = "PyTorch's optimizers"


def hook(optimizers: ModuleType) -> None:
    """Hook ``torch.optim.optimizer``."""
    steps = OptimizerSteps()
    optimizers.register_optimizer_step_post_hook(steps.stepped)


class OptimizerSteps:
    """The steps of this process's optimizers."""

    def __init__(self) -> None:
        self._primary: ref[Any] | None = None
        self._count = 0

    @guarded(NAME)
    def stepped(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a step; torch calls this after each one of every optimizer."""
        if self._primary is None or self._primary() is None:
            self._primary = ref(optimizer)
        if self._primary() is not optimizer:
            return
        self._count += 1
        here = training()
        if here.owns(Source.TORCH):
            here.publish(self._count)
        here.boundary()
