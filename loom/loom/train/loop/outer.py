"""The outer optimizer of DiLoCo, which follows how far all groups have gone since they last agreed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from loom.train.loop.tensors import local, unflatten

__all__ = ["OuterOptimizer"]


class OuterOptimizer:
    """SGD with Nesterov momentum on the parameters that all agreed on last.

    Rates are those of the paper (https://arxiv.org/abs/2311.08105), section 3.

    Args:
        parameters: which the groups change by themselves in between.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], learning_rate: float = 0.7, momentum: float = 0.9
    ) -> None:
        self._parameters = parameters
        self._anchors = [torch.nn.Parameter(local(one).detach().clone()) for one in parameters]
        self._sgd = torch.optim.SGD(self._anchors, lr=learning_rate, momentum=momentum, nesterov=True)

    def progress(self) -> list[torch.Tensor]:
        """How far each parameter has gone, as a gradient: against the direction."""
        pairs = zip(self._anchors, self._parameters, strict=True)
        return [anchor.detach() - local(parameter).detach() for anchor, parameter in pairs]

    def follow(self, progress: torch.Tensor) -> None:
        """Step by the mean of all groups' progress, and begin from there."""
        for anchor in self._anchors:
            anchor.grad = torch.zeros_like(anchor)
        unflatten(progress, [anchor.grad for anchor in self._anchors if anchor.grad is not None])
        self._sgd.step()
        with torch.no_grad():
            for anchor, parameter in zip(self._anchors, self._parameters, strict=True):
                local(parameter).copy_(anchor)

    def state(self) -> dict[str, Any]:
        """What another needs to go on from here."""
        return {"anchors": [anchor.detach() for anchor in self._anchors], "sgd": self._sgd.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        with torch.no_grad():
            for anchor, value in zip(self._anchors, state["anchors"], strict=True):
                anchor.copy_(value)
        self._sgd.load_state_dict(state["sgd"])
