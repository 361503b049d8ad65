"""The data that a job's controller and its trainers exchange. The module needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
    accumulation: int = 1
    """Batches of ``batch_size`` samples whose mean gradient a step applies."""
    weight_decay: float | None = None
    """None for the optimizer's own. Groups of parameters without decay, beside others with it, keep none."""
    beta1: float | None = None
    """How much Adam's mean of gradients keeps in a step, from 0 to below 1; None for the optimizer's own."""
    beta2: float | None = None
    """The same, of the mean of their squares."""
    schedule: str = "constant"
    """The way of the learning rate from the end of the warm-up to the last step: one of `SCHEDULES`."""
    warmup_steps: int = 0
    """The first steps, in which the learning rate grows to ``learning_rate``."""
    decay_to: float = 0.0
    """The share of ``learning_rate`` that a ``linear`` or ``cosine`` schedule ends with."""

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate of a step, counted from 0, of so many."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        done = min(1.0, (step - self.warmup_steps) / max(1, steps - 1 - self.warmup_steps))
        left = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * (self.decay_to + (1 - self.decay_to) * left)


SCHEDULES = ("constant", "cosine", "linear")
RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "learning_rate": (lambda value: value > 0, "is larger than 0"),
    "batch_size": (lambda value: value >= 1, "is 1 at least"),
    "gradient_clipping": (lambda value: value >= 0, "is 0 (none) or larger"),
    "sync_every": (lambda value: value >= 1, "is 1 at least"),
    "accumulation": (lambda value: value >= 1, "is 1 at least"),
    "weight_decay": (lambda value: value >= 0, "is 0 (none) or larger"),
    "beta1": (lambda value: 0 <= value < 1, "is from 0 to below 1"),
    "beta2": (lambda value: 0 <= value < 1, "is from 0 to below 1"),
    "schedule": (lambda value: value in SCHEDULES, f"is one of {', '.join(SCHEDULES)}"),
    "warmup_steps": (lambda value: value >= 0, "is 0 (none) or more"),
    "decay_to": (lambda value: 0 <= value <= 1, "is a share from 0 to 1"),
}
"""Whether a value of `LiveConfig` makes sense, and the words for what does."""


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
    part: int = 0
    """The number of this batch among those of the process in this step."""
    parts: int = 1
    """`LiveConfig.accumulation`."""
    items: Any = field(default=None, compare=False, repr=False)
    """The next item of `TrainerModel.data_loader`, the same in all processes; None without a loader."""

    @property
    def seed(self) -> int:
        """A seed that depends only on step, shard and part."""
        return 1_000_003 * self.step + self.shard * self.parts + self.part


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
