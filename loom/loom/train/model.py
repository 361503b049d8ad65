"""`TrainerModel`: what the training loop asks of a trainer, without knowing that it is an actor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from loom.train.settings import Batch

__all__ = ["TrainerModel"]


class TrainerModel(Protocol):
    """A model, its optimizers and its data; `loom.train.TrainerActor` is one."""

    @property
    def seed(self) -> int:
        """Seed of torch, before `build`."""

    @property
    def device(self) -> str:
        """Where the model is put, such as ``cuda``."""

    @property
    def optimizers(self) -> Mapping[str, Callable[[Iterable[Any], float], Any]]:
        """Functions of parameters and a learning rate, by the optimizer's name."""

    def build(self) -> Any:
        """Return the model, a ``torch.nn.Module``."""

    def step(self, model: Any, batch: Batch) -> Any:
        """Return the loss of the model on a batch."""

    def evaluate(self, model: Any) -> dict[str, float]:
        """Return how good the model is."""

    def save(self) -> dict[str, Any]:
        """Return the state besides model and optimizer."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that `save` returned."""
