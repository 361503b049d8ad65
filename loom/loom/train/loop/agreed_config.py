"""`AgreedConfig`: the configuration that all groups have agreed on, and how others change it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from loom.errors import WrongArguments
from loom.threadlet import Deferred, Threadlet
from loom.train.loop.agreement import Agreement
from loom.train.settings import Averaging, LiveConfig

__all__ = ["AgreedConfig"]


class AgreedConfig(Agreement):
    """The live configuration of one group, with an optimizer by its place among the names."""

    def __init__(self, config: LiveConfig, averaging: Averaging, optimizers: Iterable[str]) -> None:
        self._averaging = averaging
        self._names = sorted(optimizers)
        numbers = {**dataclasses.asdict(config), "optimizer": self._names.index(config.optimizer)}
        super().__init__({key: float(value) for key, value in numbers.items()})

    @property
    def current(self) -> LiveConfig:
        """The values that hold now."""
        return LiveConfig(
            learning_rate=self["learning_rate"],
            batch_size=int(self["batch_size"]),
            gradient_clipping=self["gradient_clipping"],
            sync_every=int(self["sync_every"]),
            optimizer=self._names[int(self["optimizer"])],
        )

    def named(self, changed: Mapping[str, float]) -> dict[str, Any]:
        """Return changes as others are told of them: an optimizer by its name."""
        return {key: self.current.optimizer if key == "optimizer" else value for key, value in changed.items()}

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
        return self.propose(key, float(value))
