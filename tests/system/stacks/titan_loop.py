"""``python -m tests.system.stacks.titan_loop FOLDER``: the loop of torchtitan's Trainer around one weight.

The loop, `train`, is torchtitan's own. Stand-ins take the places of what needs a GPU: the building of models, and
the timeouts of process groups.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torchtitan.trainer
from torchtitan.components.metrics import BaseLogger
from torchtitan.trainer import Trainer


class Checkpointer:
    """Saves as torchtitan's DCP manager decides: by its interval, if it is on."""

    enable, load_only, interval = True, False, 1_000_000

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, step: int) -> None:
        pass

    def save(self, step: int, last_step: bool = False) -> bool:
        if last_step or step % self.interval == 0:
            (self._folder / f"step-{step}").touch()
            return True
        return False


class SmallTrainer(Trainer):
    def __init__(self, folder: Path) -> None:
        profiler = SimpleNamespace(build=lambda **_: nullcontext(SimpleNamespace(step=lambda: None)))
        self.config = SimpleNamespace(
            training=SimpleNamespace(steps=1_000_000, max_norm=1.0),
            validator=SimpleNamespace(enable=False),
            checkpoint=SimpleNamespace(load_step=-1),
            profiler=profiler,
            dump_folder=str(folder),
            comm=SimpleNamespace(train_timeout_seconds=100),
        )
        self.parallel_dims: Any = SimpleNamespace(get_all_one_dimensional_meshes=dict, world_size=1)
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.optimizers: Any = torch.optim.SGD([self.weight], lr=0.5)
        self.metrics_processor: Any = SimpleNamespace(logger=BaseLogger())
        self.checkpointer: Any = Checkpointer(folder)
        self.gc_handler = SimpleNamespace(run=lambda step: None)
        self.dataloader: Any = ()
        self.step = 0

    def batch_generator(self, loader: Any) -> Any:
        return iter(loader)

    def train_step(self, batches: Any) -> None:
        self.weight.square().backward()
        self.optimizers.step()
        self.optimizers.zero_grad()
        self.metrics_processor.logger.log({"loss_metrics/global_avg_loss": 1.0 / self.step}, self.step)


if __name__ == "__main__":
    torchtitan.trainer.dist_utils.set_pg_timeouts = lambda **_: None
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    SmallTrainer(Path(sys.argv[1])).train()
