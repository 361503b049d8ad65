"""`JobSpec`: the settings of a job; `Assignment`: the part of them that one group gets."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loom.errors import WrongArguments
from loom.train.model import TrainerModel
from loom.train.settings import RULES, Averaging, LiveConfig, Restore, RetryBudget, Timeouts

PARALLEL = ("ddp", "fsdp")
BACKENDS = ("gloo", "nccl")


@dataclass(frozen=True)
class JobSpec:
    """The settings of a training job.

    Raises:
        WrongArguments: the fields contradict each other, or a field makes no sense.
    """

    trainer: type[TrainerModel]
    """Class of the actors, a `loom.train.TrainerActor`."""
    args: tuple[Any, ...] = ()
    """Positional arguments for the class of the actors."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    name: str = "train"
    """Group of the replicas ``train_0``, ``train_1``, … in the weaver; ``train_job`` is the controller."""
    groups: int = 2
    steps: int = 1000
    members: int = 1
    """Processes of a group, all on one host."""
    parallel: str = "ddp"
    """The parallelism inside a group: ``ddp`` shards the batches, ``fsdp`` (FSDP2) also the parameters."""
    backend: str = "gloo"
    """``gloo``, or ``nccl`` on GPUs."""
    averaging: Averaging = Averaging.GRADIENTS
    config: LiveConfig = field(default_factory=LiveConfig)
    """The first values of the configuration that can change while the job runs."""
    spares: int = 0
    """Groups that have imported everything and wait to replace a lost one."""
    hosts: tuple[int, ...] | None = None
    """Numbers of the hosts to use; None for all."""
    checkpoints: str | None = None
    """A folder that every host reaches."""
    checkpoint_every: int = 100
    """Steps between two checkpoints."""
    keep_checkpoints: int = 3
    evaluate_every: int = 100
    hash_every: int = 50
    """Steps between two hashes of the parameters, for comparing replicas; 0 for no hashes."""
    retries: RetryBudget = field(default_factory=RetryBudget)
    timeouts: Timeouts = field(default_factory=Timeouts)
    silence: float = 5.0
    """Seconds without an answer of its processes after which a group is replaced."""
    stuck: float = 30.0
    """Seconds without a step, while others make some, after which a group is replaced."""
    injectable: bool | None = None
    """True if failures may be injected into the processes (`loom.chaos`); None if ``LOOM_INJECTABLE`` decides."""

    def __post_init__(self) -> None:
        counts = {"groups": self.groups, "steps": self.steps, "members": self.members}
        wrong = [f"{name} is {value}: it has to be 1 at least" for name, value in counts.items() if value < 1]
        if self.parallel not in PARALLEL:
            wrong.append(f"parallel is {self.parallel!r}: give one of {', '.join(PARALLEL)}")
        if self.backend not in BACKENDS:
            wrong.append(f"backend is {self.backend!r}: give one of {', '.join(BACKENDS)}")
        for key, value in vars(self.config).items():
            fits, rule = RULES.get(key, (None, ""))
            if fits is not None and value is not None and not fits(value):
                wrong.append(f"{key} {rule}, not {value!r}")
        if self.config.optimizer not in self.trainer.optimizers:
            known = ", ".join(sorted(self.trainer.optimizers))
            wrong.append(f"the trainer has no optimizer {self.config.optimizer!r}; it has {known}")
        if self.averaging is Averaging.GRADIENTS and self.config.sync_every != 1:
            wrong.append("sync_every is for Averaging.LOCAL_SGD and DILOCO; gradients are averaged in each step")
        if self.averaging is Averaging.DILOCO and self.parallel == "fsdp" and self.members > 1:
            wrong.append("DiLoCo's outer optimizer does not know sharded parameters: use parallel='ddp'")
        if wrong:
            raise WrongArguments("; ".join(wrong))

    @property
    def uses_gpus(self) -> bool:
        """True if each process of the job gets a GPU of its own: `TrainerModel.device` is ``cuda``."""
        return self.trainer.device == "cuda"

    def for_trainers(self) -> JobSpec:
        """Return the settings for the trainers, without the arguments from which they were made."""
        return JobSpec(**{**vars(self), "args": (), "kwargs": {}})


def run_of(key: str) -> str:
    """Return the id of a job's run in the weaver, from which nobody learns the job's key."""
    return hashlib.sha256(f"the run of {key}".encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Assignment:
    """The work of a group's processes, from the controller."""

    job: JobSpec
    replica: str
    lighthouse: str  # its URL
    store: tuple[str, int]
    restore: Restore
    key: str = field(repr=False)
    """By which the job's processes know each other."""

    @property
    def run(self) -> str:
        """The id of the job's run in the weaver."""
        return run_of(self.key)
