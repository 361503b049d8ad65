"""Every public name of `loom.train` and its module."""

from loom.train.checkpoints.store import CheckpointStore as CheckpointStore
from loom.train.checkpoints.store import FoundCheckpoint as FoundCheckpoint
from loom.train.checkpoints.store import PendingCheckpoint as PendingCheckpoint
from loom.train.checkpoints.store import SkippedCheckpoint as SkippedCheckpoint
from loom.train.controller.controller import status as status
from loom.train.controller.group import ReplicaGroup as ReplicaGroup
from loom.train.controller.job_events import JobEvent as JobEvent
from loom.train.controller.lighthouse import LighthouseActor as LighthouseActor
from loom.train.controller.summaries import JobStatus as JobStatus
from loom.train.controller.summaries import JobSummary as JobSummary
from loom.train.job import FaultTolerantJob as FaultTolerantJob
from loom.train.registration import register as register
from loom.train.settings import Averaging as Averaging
from loom.train.settings import Batch as Batch
from loom.train.settings import LiveConfig as LiveConfig
from loom.train.settings import RetryBudget as RetryBudget
from loom.train.settings import Timeouts as Timeouts
from loom.train.settings import TrainerReport as TrainerReport
from loom.train.trainer import TrainerActor as TrainerActor
