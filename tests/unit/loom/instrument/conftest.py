"""A process that trains, which a test throws away, with its hooks."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from loom.instrument import training as module
from loom.instrument.torch import OptimizerSteps
from loom.instrument.training import HookedTraining, training
from loom.threadlet import Threadlet
from tests.unit.loom.threadlet.conftest import _no_environment, threadlet, weaver

__all__ = ["_no_environment", "threadlet", "weaver"]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No training before the test, and none after it."""
    monkeypatch.delenv("LOOM_RUN", raising=False)
    monkeypatch.setattr(module, "_training", None)
    monkeypatch.setattr(module, "_waiting", {})
    monkeypatch.setattr(module, "_stepped_back", set())
    yield
    if module._training is not None:
        module._training.threadlet.close()


@pytest.fixture
def hooked() -> Iterator[OptimizerSteps]:
    """The steps of torch's optimizers, which are hooked until the test ends."""
    import torch.optim.optimizer  # noqa: F401

    steps = OptimizerSteps()
    remove = steps.register(sys.modules["torch.optim.optimizer"])
    yield steps
    remove()


def apply(key: str, value: object) -> str | None:
    """Give a value to the handler of a key; return why it was refused."""
    return made()._registry.apply(key, value).refused


def made() -> Threadlet:
    return here().threadlet


def here() -> HookedTraining:
    return training()
