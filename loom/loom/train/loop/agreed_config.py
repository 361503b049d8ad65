"""`AgreedConfig`: the configuration that all groups have agreed on, and how others change it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from loom.errors import WrongArguments
from loom.threadlet import Deferred, Threadlet
from loom.train.loop.agreement import Agreement
from loom.train.settings import Averaging, LiveConfig

__all__ = ["AgreedConfig"]


class AgreedConfig:
    """The live configuration of one group.

    Args:
        config: the first values.
        averaging: what the groups average.
        optimizers: names of the optimizers that the trainer has.
    """

    def __init__(self, config: LiveConfig, averaging: Averaging, optimizers: Iterable[str]) -> None:
        self._averaging = averaging
        self._names = sorted(optimizers)
        numbers = {**dataclasses.asdict(config), "optimizer": self._names.index(config.optimizer)}
        self._agreement = Agreement({key: float(value) for key, value in numbers.items()})

    @property
    def learning_rate(self) -> float:
        return self._agreement["learning_rate"]

    @property
    def batch_size(self) -> int:
        return int(self._agreement["batch_size"])

    @property
    def gradient_clipping(self) -> float:
        return self._agreement["gradient_clipping"]

    @property
    def sync_every(self) -> int:
        return int(self._agreement["sync_every"])

    @property
    def optimizer(self) -> str:
        return self._names[int(self._agreement["optimizer"])]

    @property
    def width(self) -> int:
        """How many numbers a row has."""
        return self._agreement.width

    def row(self) -> list[float]:
        """Return what the other groups are sent."""
        return self._agreement.row()

    def settle(self, rows: Sequence[Sequence[float]], step: int) -> dict[str, Any]:
        """Adopt the newest values of all groups' rows; return the keys that changed, with their values."""
        changed: dict[str, Any] = self._agreement.settle(rows, step)
        return {key: self.optimizer if key == "optimizer" else value for key, value in changed.items()}

    def state(self) -> dict[str, list[float]]:
        """Return what has been adopted, for a group that joins and for a checkpoint."""
        return self._agreement.state()

    def load(self, state: Mapping[str, Sequence[float]]) -> None:
        """Take over what other groups have adopted."""
        self._agreement.load(state)

    def register(self, threadlet: Threadlet) -> None:
        """Make a handler for each key, which proposes the value to the other groups."""

        @threadlet.handler("learning_rate")
        def set_learning_rate(value: float) -> Deferred:
            return self._propose("learning_rate", value, value > 0, "is larger than 0")

        @threadlet.handler("batch_size")
        def set_batch_size(value: int) -> Deferred:
            return self._propose("batch_size", value, value >= 1, "is 1 at least")

        @threadlet.handler("gradient_clipping")
        def set_gradient_clipping(value: float) -> Deferred:
            return self._propose("gradient_clipping", value, value >= 0, "is 0 (none) or larger")

        @threadlet.handler("sync_every")
        def set_sync_every(value: int) -> Deferred:
            if self._averaging is Averaging.GRADIENTS:
                return self._propose("sync_every", value, value == 1, "is 1: this job averages gradients")
            return self._propose("sync_every", value, value >= 1, "is 1 at least")

        @threadlet.handler("optimizer")
        def set_optimizer(value: str) -> Deferred:
            known = value in self._names
            number = self._names.index(value) if known else -1
            return self._propose("optimizer", number, known, f"is one of {', '.join(self._names)}, not {value}")

    def _propose(self, key: str, value: float, allowed: bool, rule: str) -> Deferred:
        if not allowed:
            raise WrongArguments(f"{key} {rule}")
        return self._agreement.propose(key, float(value))
