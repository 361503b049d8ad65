"""What a job tells its trainers, and what they tell it. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

__all__ = [
    "Assignment",
    "Averaging",
    "Batch",
    "Ending",
    "LiveConfig",
    "Member",
    "Restore",
    "Timeouts",
    "TrainerReport",
]


class Averaging(str, Enum):
    """What the replica groups average."""

    GRADIENTS = "gradients"
    """The gradients, in each step."""
    LOCAL_SGD = "local_sgd"
    """The parameters, after each ``sync_every`` steps (https://arxiv.org/abs/1805.09767)."""
    DILOCO = "diloco"
    """How far the parameters went in ``sync_every`` steps, which an outer optimizer follows
    (https://arxiv.org/abs/2311.08105)."""


class Restore(str, Enum):
    """Where a group that begins has its state from."""

    NOTHING = "nothing"
    """It begins with the first step, or agrees with the others that do."""
    PEERS = "peers"
    """From a group that trains."""
    CHECKPOINT = "checkpoint"
    """From the newest whole checkpoint, or the beginning where there is none."""


class Ending(str, Enum):
    """How a trainer's training has ended."""

    FINISHED = "finished"
    LEFT = "left"
    """The job told it to."""
    STOPPED = "stopped"
    """The weaver told it to, with ``stop`` or ``drain``."""
    FAILED = "failed"


@dataclass(frozen=True)
class LiveConfig:
    """What can be changed while the job runs: ``job.weaver.update_config("train", learning_rate=0.01)``."""

    learning_rate: float = 0.1
    batch_size: int = 32
    """Samples a process and step."""
    gradient_clipping: float = 0.0
    """The largest norm that the gradient keeps; 0: any."""
    sync_every: int = 1
    """Steps between two averagings; of `Averaging.GRADIENTS` always 1."""
    optimizer: str = "sgd"
    """One of `TrainerActor.optimizers`. Another one begins with a fresh state."""


@dataclass(frozen=True)
class Timeouts:
    """In seconds."""

    collective: float = 10.0
    """For which a group waits for the others' gradients. Then it goes on without those that are silent."""
    quorum: float = 30.0
    connect: float = 10.0
    heartbeat: float = 1.0
    """A group that the lighthouse has not heard of for so long is left out."""
    join: float = 2.0
    """For which groups that are ready wait for one that lives and is not."""


@dataclass(frozen=True)
class Batch:
    """Which samples a process trains on in a step."""

    step: int
    size: int
    shard: int
    """Number of this process among all that train in this step."""
    shards: int

    @property
    def seed(self) -> int:
        """The same for the same step and shard."""
        return 1_000_003 * self.step + self.shard


@dataclass(frozen=True)
class Member:
    """A process of a replica group."""

    pid: int
    host: str
    store: tuple[str, int]
    """Where the group's store listens; of the first member only."""


@dataclass(frozen=True)
class Assignment:
    """What the processes of a group are to do."""

    job: str
    replica: str
    lighthouse: str
    store: tuple[str, int]
    steps: int
    config: LiveConfig
    averaging: Averaging
    restore: Restore
    parallel: str
    backend: str
    checkpoints: str | None
    checkpoint_every: int
    keep_checkpoints: int
    evaluate_every: int
    hash_every: int
    timeouts: Timeouts
    weaver: str | None
    injectable: bool | None = None


@dataclass(frozen=True)
class TrainerReport:
    """How far a process is."""

    step: int = 0
    """Steps that are applied."""
    restored: str = ""
    """Where its state came from: ``peers, at step 120``; empty until it is known."""
    restored_step: int = 0
    first_step_at: float | None = None
    """When its first step was applied, in seconds since the epoch."""
    participants: int = 0
    """Groups that took part in the last step."""
    discarded: int = 0
    """Steps that were computed and not applied, because a group was lost meanwhile."""
    skipped: int = 0
    """Steps that left the parameters as they were, because the gradient was not finite."""
    applied: int = 0
    """Steps that this process applied."""
    paused: bool = False
    hashes: Mapping[int, str] = field(default_factory=dict)
    """The SHA-256 of the parameters after some steps, the last of them."""
    changes: tuple[tuple[int, str, Any], ...] = ()
    """Step, key and new value of each change of the configuration."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    checkpoint_step: int | None = None
    """Of the newest checkpoint that this process wrote."""
    checkpoint_error: str | None = None
    ending: Ending | None = None
    error: str | None = None
    """Why it failed, with the traceback."""
