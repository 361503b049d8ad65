"""`TrainerModel`: a model, an optimizer and data in plain torch, in the form that the training loop uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from loom.train.settings import Batch


def sgd(parameters: Iterable[Any], learning_rate: float) -> Any:
    """Return SGD with momentum 0.9."""
    import torch

    return torch.optim.SGD(parameters, lr=learning_rate, momentum=0.9)


def adamw(parameters: Iterable[Any], learning_rate: float) -> Any:
    """Return AdamW with torch's defaults."""
    import torch

    return torch.optim.AdamW(parameters, lr=learning_rate)


class TrainerModel:
    """The methods that a subclass of `loom.train.TrainerActor` overrides: at least `build` and `loss`."""

    seed = 0
    """The seed of torch, set before `build`."""
    device = "cpu"
    """The device of the model. With ``cuda`` each process has a GPU of its own, and finds it here as ``cuda:N``."""
    optimizers: Mapping[str, Callable[[Iterable[Any], float], Any]] = {"sgd": sgd, "adamw": adamw}
    """Functions of parameters and a learning rate, by the names that `LiveConfig.optimizer` may have."""

    def __init__(self) -> None:
        self.before_step: list[Callable[[Batch], object]] = []
        """Called with each batch before the training on it, in the training thread."""
        self.after_loss: list[Callable[[Any], Any]] = []
        """Called with each loss; each returns the loss to continue with."""
        self.replica = ""
        """Name of the replica, such as ``train_0``; empty before the training begins."""

    def build(self) -> Any:
        """Return the model, a ``torch.nn.Module``. It has to be the same in each process.

        With ``parallel="fsdp"``, processes other than the first of a group may return it on the meta device: they
        get their parts of the first one's values.
        """
        raise NotImplementedError(f"{type(self).__name__} has to give build(self), which returns the model")

    def parts(self, model: Any) -> Sequence[Any]:
        """Return the modules whose parameters are gathered at a time with ``parallel="fsdp"``, such as its layers.

        The parameters that are in none of them are gathered at once.
        """
        return ()

    def loss(self, model: Any, batch: Batch) -> Any:
        """Return the loss of a model on a batch: a tensor that can be differentiated."""
        raise NotImplementedError(f"{type(self).__name__} has to give loss(self, model, batch)")

    def warm_up(self) -> None:
        """Do slow work that needs no model, such as reading data; a spare does it before it is needed."""

    def data_loader(self) -> Any:
        """Return a loader of data with a state, such as torchdata's ``StatefulDataLoader``; None without one.

        `Batch.items` has its next item, the same in all processes: each trains on its share, such as
        ``items[batch.shard :: batch.shards]``. Checkpoints and peers keep the loader's state.
        """
        return None

    def evaluate(self, model: Any) -> dict[str, float]:
        """Return metrics of a model, such as ``{"accuracy": 0.97}``. All processes call this, without gradients."""
        return {}

    def stepped(self, model: Any, step: int) -> dict[str, float]:
        """Return metrics of a step that was just applied; ``step`` counts these. All processes call this."""
        return {}

    def attend(self) -> None:
        """Apply commands, and end the training if it has to end; for a `loss` that waits for something."""

    def save(self) -> Mapping[str, Any]:
        """Return the state that is neither model nor optimizer, for `load`.

        It has tensors, numbers, strings, bytes, booleans, None, and dicts, lists and tuples of these: other groups
        and checkpoints take nothing that could run code.
        """
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `save` in another process, or in an earlier one."""

    def step(self, model: Any, batch: Batch) -> Any:
        """Return the loss to differentiate."""
        for function in self.before_step:
            function(batch)
        loss = self.loss(model, batch)
        for function in self.after_loss:
            loss = function(loss)
        return loss
