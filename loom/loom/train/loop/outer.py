"""`OuterOptimizer`: DiLoCo's optimizer for how far the groups have gone since they last agreed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from loom.train.loop.tensors import local, unflatten

__all__ = ["OuterOptimizer"]


class OuterOptimizer:
    """SGD with Nesterov momentum on the parameters that all groups agreed on last.

    The rates are those of the paper (https://arxiv.org/abs/2311.08105), section 3.

    Args:
        parameters: that the groups change by themselves in between.
        learning_rate: of the outer step.
        momentum: of the outer step.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], learning_rate: float = 0.7, momentum: float = 0.9
    ) -> None:
        self._parameters = parameters
        self._anchors = [torch.nn.Parameter(local(one).detach().clone()) for one in parameters]
        self._sgd = torch.optim.SGD(self._anchors, lr=learning_rate, momentum=momentum, nesterov=True)

    def progress(self) -> list[torch.Tensor]:
        """Return how far each parameter has gone, as a gradient: with the opposite sign."""
        pairs = zip(self._anchors, self._parameters, strict=True)
        return [anchor.detach() - local(parameter).detach() for anchor, parameter in pairs]

    def follow(self, progress: torch.Tensor) -> None:
        """Step by the mean of all groups' progress, and give the parameters the result."""
        for anchor in self._anchors:
            anchor.grad = torch.zeros_like(anchor)
        unflatten(progress, [anchor.grad for anchor in self._anchors if anchor.grad is not None])
        self._sgd.step()
        with torch.no_grad():
            for anchor, parameter in zip(self._anchors, self._parameters, strict=True):
                local(parameter).copy_(anchor)

    def state(self) -> dict[str, Any]:
        """Return what another process needs to go on from here."""
        return {"anchors": [anchor.detach() for anchor in self._anchors], "sgd": self._sgd.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from another process's `state`."""
        with torch.no_grad():
            for anchor, value in zip(self._anchors, state["anchors"], strict=True):
                anchor.copy_(value)
        self._sgd.load_state_dict(state["sgd"])
