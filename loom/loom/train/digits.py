"""`digits_job`: a training on scikit-learn's 1,797 digits, to watch, change and break.

A module of its own, which programs outside Loom import as an example of a trainer.
"""

from __future__ import annotations

import gzip
import importlib.util
import time
from pathlib import Path
from typing import Any

from loom.errors import MissingDependency
from loom.train.job import FaultTolerantJob
from loom.train.settings import Batch, LiveConfig, Timeouts
from loom.train.trainer import TrainerActor

TEST_DIGITS = 360  # digits held back for `DigitsTrainer.evaluate`

SEED = 0


class DigitsTrainer(TrainerActor):
    """A trainer that learns to read digits.

    Args:
        pace: minimal seconds of a step, because the model is tiny and real ones take longer.
        hidden: units of the one hidden layer.
    """

    def __init__(self, pace: float = 0.0, hidden: int = 128) -> None:
        super().__init__()
        self.pace = pace
        self.hidden = hidden

    def warm_up(self) -> None:
        import torch

        images, labels = _digits()
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED))
        test, training = order[:TEST_DIGITS], order[TEST_DIGITS:]
        self.test_images, self.test_labels = images[test], labels[test]
        self.images, self.labels = images[training], labels[training]

    def build(self) -> Any:
        """Return a network of one hidden layer."""
        from torch import nn

        return nn.Sequential(nn.Linear(64, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 10))

    def loss(self, model: Any, batch: Batch) -> Any:
        """Return the cross entropy on random digits."""
        import torch
        from torch.nn.functional import cross_entropy

        began = time.perf_counter()
        generator = torch.Generator().manual_seed(batch.seed)
        chosen = torch.randint(len(self.images), (batch.size,), generator=generator)
        loss = cross_entropy(model(self.images[chosen]), self.labels[chosen])
        time.sleep(max(0.0, self.pace - (time.perf_counter() - began)))
        return loss

    def evaluate(self, model: Any) -> dict[str, float]:
        """Return the share of the test digits that are read correctly, between 0 and 1."""
        guesses = model(self.test_images).argmax(dim=1)
        return {"accuracy": float((guesses == self.test_labels).float().mean())}


def digits_job(
    groups: int = 3, steps: int = 1000, *, pace: float = 0.0, config: LiveConfig | None = None, **settings: Any
) -> FaultTolerantJob:
    """Return a job that learns to read digits.

    Args:
        pace: minimal seconds of a step.
        config: the first values of the configuration that can change while the job runs.
        settings: other fields of `FaultTolerantJob`.
    """
    timeouts = Timeouts(collective=5.0, quorum=10.0, connect=5.0)
    defaults = {"spares": 1, "evaluate_every": 50, "hash_every": 10, "stuck": 10.0, "timeouts": timeouts}
    return FaultTolerantJob(
        DigitsTrainer,
        kwargs={"pace": pace},
        groups=groups,
        steps=steps,
        config=config or LiveConfig(learning_rate=0.05),
        **{**defaults, **settings},
    )


def start(job: Any, groups: int = 3, steps: int = 1000, **settings: Any) -> Any:
    """Start `digits_job` in a session's driver; return its `loom.RunHandle`."""
    return digits_job(groups, steps, **settings).start(job)


def _digits() -> tuple[Any, Any]:
    """Return the images (n x 64, from 0 to 1) and labels, without the two seconds of importing sklearn."""
    import numpy
    import torch

    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise MissingDependency("the digits are scikit-learn's: pip install 'monarch-loom[train]'")
    path = Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(path, "rt") as file:
        table = torch.tensor(numpy.loadtxt(file, delimiter=","))
    return table[:, :-1].float() / 16, table[:, -1].long()
