"""A trainer on a GPU of its own, for the tests and benchmarks that have one."""

from __future__ import annotations

from typing import Any

from loom.train import Batch
from tests.system.train.trainers import Zeroed


class OnGpu(Zeroed):
    """Counts its steps in a weight on the GPU."""

    device = "cuda"

    def loss(self, model: Any, batch: Batch) -> Any:
        import torch

        assert {one.device for one in model.parameters()} == {torch.device(self.device)}
        with torch.device(self.device):
            return super().loss(model, batch)
