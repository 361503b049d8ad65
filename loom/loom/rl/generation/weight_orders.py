"""`WeightOrders`: gives generators the weights of the trainers.

A module of its own, because it alone knows both trainers and generators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loom.errors import LoomError
from loom.rl.engines.engine import PauseMode
from loom.rl.engines.weight_transfer import TransferTarget
from loom.rl.generation import weight_files as files
from loom.rl.generation.generator_pool import PooledGenerator
from loom.rl.generation.generator_requests import GeneratorRequests
from loom.rl.generation.interruptible_calls import ProcessGone, result_of
from loom.rl.generation.weight_client import WeightsVia
from loom.rl.settings import Weights
from loom.rl.trainer import Training


@dataclass(frozen=True)
class Loaded:
    """The result of an order for all generators."""

    step: int
    """The step of the weights that they have now."""
    lost: list[tuple[PooledGenerator, str]]
    """The generators that have not loaded them, and why."""


class WeightOrders:
    """Orders to load weights, for one thread.

    Args:
        requests: by which generators are ordered to read files.
        via: returns the way of such an order.
        folder: of the run.
        weights: how weights travel.
        pause: what happens to completions that are under way when a trainer gives a server weights.
    """

    def __init__(
        self,
        training: Training,
        requests: GeneratorRequests,
        via: Callable[[], WeightsVia],
        folder: Path,
        weights: Weights,
        pause: PauseMode,
    ) -> None:
        self._training = training
        self._requests = requests
        self._via = via
        self._folder = folder / "weights"
        self._weights = weights
        self._pause = pause

    def load(self, generators: Sequence[PooledGenerator], step: int) -> Loaded:
        """Let generators load the weights of a step, or the newest if those are gone; return when all have."""
        if self._weights is Weights.FILES:
            return self._load_files(generators, step)
        return self._send(generators, step)

    def _load_files(self, generators: Sequence[PooledGenerator], step: int) -> Loaded:
        path = files.path_of(self._folder, step)
        if not path.is_dir():
            newest = files.latest(self._folder)
            if newest is None:
                raise LoomError(f"there are no weights in {self._folder}")
            step, path = newest, files.path_of(self._folder, newest)
        via, orders, lost = self._via(), [], []
        for one in generators:
            try:
                target = one.actor if via is WeightsVia.LANE else one.url()
            except ProcessGone as error:
                lost.append((one, str(error)))
            else:
                orders.append((one, self._requests.order(via, target, step, str(path.resolve()))))
        for one, order in orders:
            try:
                result_of(order, one.gone)
            except ProcessGone as error:
                lost.append((one, str(error)))
            else:
                one.weights_step = step
        return Loaded(step, lost)

    def _send(self, generators: Sequence[PooledGenerator], step: int) -> Loaded:
        """Let a trainer send its weights to the generators, or to their servers."""
        asked, targets, lost = [], list[Any](), []
        for one in generators:
            try:
                transfer = self._weights is Weights.TRANSFER
                targets.append(TransferTarget(one.url(), self._pause) if transfer else one.actor)
            except ProcessGone as error:
                lost.append((one, str(error)))
            else:
                asked.append(one)
        while (answer := self._training.ask(lambda trainer: trainer.send_weights, step, targets)) is None:
            # The trainer was lost meanwhile; the next one has these weights, or will have newer ones.
            self._training.await_weights(step)
        sent, results = answer
        for one, result in zip(asked, results, strict=True):
            if result is not None:
                lost.append((one, result))
            else:
                one.weights_step = sent
        return Loaded(sent, lost)
