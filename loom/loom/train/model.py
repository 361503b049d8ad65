"""`TrainerModel`: a model, an optimizer and data, written in plain torch, as the training loop uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from loom.train.settings import Batch


def sgd(parameters: Iterable[Any], learning_rate: float) -> Any:
    """SGD with momentum 0.9."""
    import torch

    return torch.optim.SGD(parameters, lr=learning_rate, momentum=0.9)


def adamw(parameters: Iterable[Any], learning_rate: float) -> Any:
    """AdamW with torch's defaults."""
    import torch

    return torch.optim.AdamW(parameters, lr=learning_rate)


class TrainerModel:
    """What a subclass of `loom.train.TrainerActor` gives: at least `build` and `loss`."""

    seed = 0
    """Seed of torch, before `build`."""
    device = "cpu"
    """Where the model is put."""
    optimizers: Mapping[str, Callable[[Iterable[Any], float], Any]] = {"sgd": sgd, "adamw": adamw}
    """Functions of parameters and a learning rate, by the names that `LiveConfig.optimizer` may have."""

    def __init__(self) -> None:
        self.before_step: list[Callable[[Batch], object]] = []
        """Called with each batch before it is trained on, in the training thread."""
        self.after_loss: list[Callable[[Any], Any]] = []
        """Called with each loss; each returns the loss to go on with."""
        self.replica = ""
        """Name of the replica, such as ``train_0``; empty before the training begins."""

    def build(self) -> Any:
        """Return the model, a ``torch.nn.Module``, which has to be the same in each process."""
        raise NotImplementedError(f"{type(self).__name__} has to give build(self), which returns the model")

    def loss(self, model: Any, batch: Batch) -> Any:
        """Return the loss of a model on a batch: a tensor that can be differentiated."""
        raise NotImplementedError(f"{type(self).__name__} has to give loss(self, model, batch)")

    def warm_up(self) -> None:
        """Do what takes long and needs no model, such as reading data; a spare does it before it is needed."""

    def evaluate(self, model: Any) -> dict[str, float]:
        """Return metrics of a model, such as ``{"accuracy": 0.97}``. All processes call this, without gradients."""
        return {}

    def save(self) -> dict[str, Any]:
        """Return the state besides model and optimizer, for `load`."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `save` returned in another process, or an earlier one."""

    def step(self, model: Any, batch: Batch) -> Any:
        """Return the loss to differentiate."""
        for function in self.before_step:
            function(batch)
        loss = self.loss(model, batch)
        for function in self.after_loss:
            loss = function(loss)
        return loss
