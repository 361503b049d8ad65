"""The groups' joint step after several of their own: they average the parameters, or follow an outer optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from loom.train.loop.tensors import local, unflatten


class ParameterMean:
    """The outer step of local SGD: the mean of all groups' parameters."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters

    def progress(self) -> Sequence[torch.Tensor]:
        return self._parameters

    def follow(self, mean: torch.Tensor) -> None:
        unflatten(mean, self._parameters)


class OuterOptimizer:
    """DiLoCo's outer step: SGD with Nesterov momentum on the parameters on which all groups last agreed.

    The rates are those of the paper (https://arxiv.org/abs/2311.08105), section 3.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._anchors = [torch.nn.Parameter(local(one).detach().clone()) for one in parameters]
        self._sgd = torch.optim.SGD(self._anchors, lr=0.7, momentum=0.9, nesterov=True)

    def progress(self) -> list[torch.Tensor]:
        """Return the distance that each parameter has moved, as a gradient: with the opposite sign."""
        pairs = zip(self._anchors, self._parameters, strict=True)
        return [anchor.detach() - local(parameter).detach() for anchor, parameter in pairs]

    def follow(self, mean: torch.Tensor) -> None:
        """Step by the mean of all groups' progress, and copy the result to the parameters."""
        gradients = [torch.zeros_like(anchor) for anchor in self._anchors]
        unflatten(mean, gradients)
        for anchor, gradient in zip(self._anchors, gradients, strict=True):
            anchor.grad = gradient
        self._sgd.step()
        with torch.no_grad():
            for anchor, parameter in zip(self._anchors, self._parameters, strict=True):
                local(parameter).copy_(anchor)

    def state(self) -> dict[str, Any]:
        return {"anchors": [anchor.detach() for anchor in self._anchors], "sgd": self._sgd.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for anchor, value in zip(self._anchors, state["anchors"], strict=True):
                anchor.copy_(value)
        self._sgd.load_state_dict(state["sgd"])
