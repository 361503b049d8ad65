"""`TrainingState`: the model and all else that a training needs to go on, as peers and checkpoints take it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from loom.train.loop.agreed_config import AgreedConfig
from loom.train.loop.outer import OuterOptimizer
from loom.train.loop.progress import Progress
from loom.train.loop.tensors import hash_of, load_model, load_optimizer, local, plain, whole
from loom.train.model import TrainerModel
from loom.train.settings import Assignment, Averaging

__all__ = ["FROM_THE_BEGINNING", "TrainingState"]

FROM_THE_BEGINNING = "the beginning"
"""`Progress.restored` of a process that took over no state."""


class TrainingState:
    """Model, optimizers, step and configuration of a process."""

    def __init__(
        self, trainer: TrainerModel, assignment: Assignment, config: AgreedConfig, progress: Progress
    ) -> None:
        self._trainer = trainer
        self._config = config
        self._progress = progress
        torch.manual_seed(trainer.seed)
        self.model = trainer.build().to(trainer.device)
        if assignment.members > 1 and assignment.parallel == "fsdp":
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.model)
        self.parameters = [one for one in self.model.parameters() if one.requires_grad]
        self.outer = OuterOptimizer(self.parameters) if assignment.averaging is Averaging.DILOCO else None
        self._use_optimizer(config.optimizer)

    def adopt(self, changed: Iterable[str]) -> None:
        """Apply the keys of the configuration that have changed."""
        if "optimizer" in changed:
            self._use_optimizer(self._config.optimizer)
        elif "learning_rate" in changed:
            for group in self.optimizer.param_groups:
                group["lr"] = self._config.learning_rate

    def _use_optimizer(self, name: str) -> None:
        self._optimizer_name = name
        self.optimizer: torch.optim.Optimizer = self._trainer.optimizers[name](
            self.parameters, self._config.learning_rate
        )

    def evaluate(self) -> dict[str, float]:
        """Return how good the model is."""
        self.model.eval()
        with torch.no_grad():
            metrics = self._trainer.evaluate(self.model)
        self.model.train()
        return metrics

    def hash(self) -> str:
        """Return the SHA-256 of what this process has of the parameters."""
        return hash_of(self.model)

    def for_peers(self) -> dict[str, Any]:
        """Return the state of this process, for the process of the same rank in a group that joins."""
        return self._state(local)

    def for_checkpoint(self) -> dict[str, Any]:
        """Return the state of the whole group; all its members have to call this."""
        return self._state(whole)

    def take_from_peer(self, state: Mapping[str, Any]) -> None:
        """Go on from a peer's `for_peers`."""
        self._load(state, of_whole=False)
        if self._progress.restored:
            return
        step = self._progress.step
        self._progress.restored = f"peers, at step {step}" if step else FROM_THE_BEGINNING
        self._progress.restored_step = step

    def take_from_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Go on from what `for_checkpoint` returned."""
        self._load(state, of_whole=True)

    def _state(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "optimizer_name": self._optimizer_name,
            "outer": None if self.outer is None else self.outer.state(),
            "step": self._progress.step,
            "config": self._config.state(),
            "trainer": self._trainer.save(),
        }
        converted: dict[str, Any] = plain(state, convert)
        return converted

    def _load(self, state: Mapping[str, Any], of_whole: bool) -> None:
        self._config.load(state["config"])
        self._use_optimizer(state["optimizer_name"])
        load_model(self.model, state["model"], of_whole)
        load_optimizer(self.optimizer, state["optimizer"], of_whole)
        if self.outer is not None:
            self.outer.load(state["outer"])
        self._trainer.load(state["trainer"])
        self._progress.step = state["step"]
