"""Training that survives failures: jobs of replica groups, actors that train, checkpoints.

Names are imported when they are first used (PEP 562), as most of them need torch: extra ``train``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loom.train.checkpoints.store import CheckpointStore as CheckpointStore
    from loom.train.checkpoints.store import FoundCheckpoint as FoundCheckpoint
    from loom.train.checkpoints.store import PendingCheckpoint as PendingCheckpoint
    from loom.train.checkpoints.store import SkippedCheckpoint as SkippedCheckpoint
    from loom.train.controller.group import ReplicaGroup as ReplicaGroup
    from loom.train.controller.job_events import JobEvent as JobEvent
    from loom.train.controller.lighthouse import LighthouseActor as LighthouseActor
    from loom.train.controller.summaries import JobStatus as JobStatus
    from loom.train.controller.summaries import JobSummary as JobSummary
    from loom.train.job import FaultTolerantJob as FaultTolerantJob
    from loom.train.job import status as status
    from loom.train.retries import RetryBudget as RetryBudget
    from loom.train.settings import Averaging as Averaging
    from loom.train.settings import Batch as Batch
    from loom.train.settings import LiveConfig as LiveConfig
    from loom.train.settings import Timeouts as Timeouts
    from loom.train.settings import TrainerReport as TrainerReport
    from loom.train.trainer import TrainerActor as TrainerActor

_HOMES = {
    "FaultTolerantJob": "loom.train.job",
    "status": "loom.train.job",
    "TrainerActor": "loom.train.trainer",
    "ReplicaGroup": "loom.train.controller.group",
    "LighthouseActor": "loom.train.controller.lighthouse",
    "JobStatus": "loom.train.controller.summaries",
    "JobSummary": "loom.train.controller.summaries",
    "JobEvent": "loom.train.controller.job_events",
    "RetryBudget": "loom.train.retries",
    "Averaging": "loom.train.settings",
    "Batch": "loom.train.settings",
    "LiveConfig": "loom.train.settings",
    "Timeouts": "loom.train.settings",
    "TrainerReport": "loom.train.settings",
    "CheckpointStore": "loom.train.checkpoints.store",
    "FoundCheckpoint": "loom.train.checkpoints.store",
    "PendingCheckpoint": "loom.train.checkpoints.store",
    "SkippedCheckpoint": "loom.train.checkpoints.store",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'loom.train' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_HOMES)
