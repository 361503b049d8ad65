"""The data that a job's controller and its trainers exchange. The module needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from loom.process.backoff import Backoff


class Averaging(str, Enum):
    """The quantity that the replica groups average."""

    GRADIENTS = "gradients"
    """The gradients, in each step."""
    LOCAL_SGD = "local_sgd"
    """The parameters, after each ``sync_every`` steps (https://arxiv.org/abs/1805.09767)."""
    DILOCO = "diloco"
    """The move of the parameters in ``sync_every`` steps, for an outer optimizer (https://arxiv.org/abs/2311.08105)."""


class Restore(str, Enum):
    """The source of the state of a group that begins."""

    NOTHING = "nothing"  # all groups begin with the first step
    PEERS = "peers"
    CHECKPOINT = "checkpoint"  # the newest whole one, or no source if there is none


class Ending(str, Enum):
    """The way in which a trainer's training has ended."""

    FINISHED = "finished"  # the trainer made its last step
    LEFT = "left"  # the job told the trainer to leave
    STOPPED = "stopped"  # the weaver told the trainer to stop, with ``stop`` or ``drain``
    EVICTED = "evicted"  # the trainer's worker was told to end; the state is with other groups, or in a checkpoint
    NO_PEERS = "no_peers"  # no group was left that had the state to take over; the processes are healthy
    FAILED = "failed"
    REFUSED = (
        "refused"  # the trainer cannot begin with its arguments, and another attempt would end in the same way
    )


@dataclass(frozen=True)
class LiveConfig:
    """The configuration that ``job.weaver.update_config("train", batch_size=64)`` changes while the job runs."""

    learning_rate: float = 0.1
    batch_size: int = 32
    """Samples for each process and step."""
    gradient_clipping: float = 0.0
    """The largest norm of the gradient; 0 for no limit."""
    sync_every: int = 1
    """Steps between two averagings; always 1 with `Averaging.GRADIENTS`."""
    optimizer: str = "sgd"
    """A name in `TrainerActor.optimizers`. A new optimizer begins with a fresh state."""


@dataclass(frozen=True)
class Timeouts:
    """The times that groups wait for each other, in seconds."""

    collective: float = 10.0
    """For the gradients of the other groups. After that, a group goes on without the silent ones."""
    quorum: float = 30.0
    """For enough groups to make a step."""
    connect: float = 10.0
    """For a connection to another group."""
    heartbeat: float = 1.0
    """The silence after which the lighthouse leaves a group out."""
    join: float = 2.0
    """For a living group that is not ready for the step."""


@dataclass(frozen=True)
class RetryBudget:
    """The number of attempts that each replica group has, and the waits before them."""

    attempts: int = 5
    """Failures after which the group is still started again."""
    first_wait: float = 0.0
    """Seconds before the first attempt."""
    second_wait: float = 0.5
    """Seconds before the second attempt; each later one waits twice as long as the one before."""
    longest_wait: float = 30.0
    """Seconds before any attempt, at most."""
    healthy_steps: int = 20
    """Steps after which a restored group has the whole budget again."""

    def wait(self, failures: int) -> float | None:
        """Return the seconds before the attempt that follows this many failures; None if no attempt is left."""
        if failures > self.attempts:
            return None
        if failures == 1:
            return self.first_wait
        return Backoff(self.second_wait, self.longest_wait).wait(failures - 2)


@dataclass(frozen=True)
class Batch:
    """The samples that a process trains on in a step."""

    step: int
    size: int
    """Number of samples."""
    shard: int
    """The number of this process among all that train in this step."""
    shards: int
    """The number of processes that train in this step."""

    @property
    def seed(self) -> int:
        """A seed that depends only on step and shard."""
        return 1_000_003 * self.step + self.shard


@dataclass(frozen=True)
class Member:
    """A process of a replica group."""

    pid: int
    store: tuple[str, int]  # the address of the group's store; only the first member has one


@dataclass
class TrainerReport:
    """The progress of a process's training."""

    step: int = 0
    """Applied steps, by this process or before its state was taken over."""
    restored: str = ""
    """The source of the process's state, such as ``peers, at step 120``; empty until it is known."""
    restored_step: int = 0
    """The step of the state that the process took over."""
    first_step_at: float | None = None
    """The time at which the process applied its first step, in seconds since the epoch."""
    participants: int = 0
    """Groups that took part in the last step."""
    discarded: int = 0
    """Steps that were computed but not applied, because a group was lost meanwhile."""
    skipped: int = 0
    """Steps that left the parameters unchanged, because the gradient was not finite."""
    applied: int = 0
    """Steps that this process applied."""
    paused: bool = False
    """True if the weaver has paused the training."""
    hashes: dict[int, str] = field(default_factory=dict)
    """The SHA-256 of the parameters, by step, for the newest hashed steps."""
    changes: tuple[tuple[int, str, Any], ...] = ()
    """Step, key and new value of each change of the configuration."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The newest value of each metric."""
    checkpoint_step: int | None = None
    """The step of the newest checkpoint that this process wrote."""
    checkpoint_error: str | None = None
    """Why the newest checkpoint was not written; None if it was."""
    ending: Ending | None = None
    """The way in which the training has ended; None while it goes on."""
    error: str | None = None
    """Why the training failed, with the traceback."""
