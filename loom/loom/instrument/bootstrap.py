"""The bootstrap of a process that ``loom run`` has started, or that has ``LOOM_AUTO=1``: it hooks what is imported.

It runs at the start of every Python process of the command, so it imports nothing but `loom.instrument.imports`.
"""

from __future__ import annotations

import os
from importlib import import_module

from loom.instrument.imports import finds_loom, when_imported

HOOKS = {
    "torch.distributed.elastic.agent.server.api": "loom.instrument.torchelastic:hook",
    "torch.optim.optimizer": "loom.instrument.torch:hook",
    "torch.utils.data.dataloader": "loom.instrument.torch:hook_loaders",
    "torch.utils.tensorboard.writer": "loom.instrument.trackers:hook_tensorboard",
    "tensorboardX.writer": "loom.instrument.trackers:hook_tensorboard",
    "wandb.sdk.wandb_run": "loom.instrument.trackers:hook_wandb",
    "mlflow.tracking.client": "loom.instrument.trackers:hook_mlflow",
    "trackio.run": "loom.instrument.trackers:hook_trackio",
    "accelerate.accelerator": "loom.instrument.accelerate:hook",
    "torchft.manager": "loom.instrument.torchft:hook",
    "torchtitan.trainer": "loom.instrument.torchtitan:hook",
    "transformers.trainer": "loom.instrument.transformers:hook",
    "torch.distributed.checkpoint.filesystem": "loom.instrument.branching:hook_distributed",
}
"""The hook of each module of a library, which is called when a program imports the module."""

BRANCH_HOOKS = {
    "transformers.trainer": "loom.instrument.branching:hook_trainer",
    "lightning.pytorch.trainer.trainer": "loom.instrument.branching:hook_lightning",
    "pytorch_lightning.trainer.trainer": "loom.instrument.branching:hook_lightning",
    "torchtitan.components.checkpoint": "loom.instrument.branching:hook_titan",
}
"""Further hooks in the processes of a branch, which load its checkpoint and write into its folder."""


_begun = False


def lightning_callbacks() -> list[object]:
    """Return the callbacks that Lightning adds to each Trainer, by its entry points: none without hooks here."""
    if not _begun or not finds_loom():
        return []
    return [import_module("loom.instrument.lightning").LightningCallback()]


def begin() -> None:
    """Wait for the modules that have hooks. A second call changes nothing."""
    global _begun
    if _begun:
        return
    _begun = True
    branch = BRANCH_HOOKS if os.environ.get("LOOM_BRANCH") else {}
    for module, hook in [*HOOKS.items(), *branch.items()]:
        when_imported(module, hook)
