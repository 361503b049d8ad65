"""`FaultTolerantJob`: replica groups that train together, and go on when some of them are lost.

::

    training = FaultTolerantJob(DigitsTrainer, groups=3, steps=2000, spares=1, checkpoints="/shared/digits")
    run = training.start(job)                                   # in the driver: it goes on without this program
    job.weaver.update_config("train", learning_rate=0.02)       # all groups, at the same step
    job.weaver.update_config("train_job", groups=4)             # one more
    print(run.result())

A group that is lost (its process killed, its host gone, an exception, a hang) is started again on a host that
lives, and takes its state from the groups that went on, or from the last whole checkpoint where none did. What
happens is in the weaver's events (``loom events``), and in the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loom.beside import session
from loom.errors import WrongArguments
from loom.train.controller.controller import Controller, controller_of
from loom.train.controller.summaries import JobStatus, JobSummary
from loom.train.retries import RetryBudget
from loom.train.settings import Averaging, LiveConfig, Timeouts
from loom.train.trainer import TrainerActor

__all__ = ["FaultTolerantJob", "status"]

PARALLEL = ("ddp", "fsdp")
BACKENDS = ("gloo", "nccl")


@dataclass(frozen=True)
class FaultTolerantJob:
    """What to train, and how.

    Raises:
        WrongArguments: something of it makes no sense.
    """

    trainer: type[TrainerActor]
    """The actors' class,"""
    args: tuple[Any, ...] = ()
    """and what it is made with."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    name: str = "train"
    """The group of its replicas in the weaver; they are ``train_0``, ``train_1``, …, and ``train_job`` is what
    looks after them."""
    groups: int = 2
    steps: int = 1000
    members: int = 1
    """Processes of a group, all on one host."""
    parallel: str = "ddp"
    """What the members of a group share: ``ddp`` the batches, ``fsdp`` (FSDP2) the parameters, too."""
    backend: str = "gloo"
    """``gloo``, or ``nccl`` on GPUs."""
    averaging: Averaging = Averaging.GRADIENTS
    config: LiveConfig = field(default_factory=LiveConfig)
    """What can be changed while it runs, as it is at first."""
    spares: int = 0
    """Groups that have imported everything and wait to take the place of one that is lost."""
    hosts: tuple[int, ...] | None = None
    """Numbers of the hosts to use; None: all."""
    checkpoints: str | None = None
    """A folder that every host reaches."""
    checkpoint_every: int = 100
    """Steps."""
    keep_checkpoints: int = 3
    evaluate_every: int = 100
    hash_every: int = 50
    """Steps between two hashes of the parameters, by which the replicas can be compared; 0: none."""
    retries: RetryBudget = field(default_factory=RetryBudget)
    timeouts: Timeouts = field(default_factory=Timeouts)
    silence: float = 5.0
    """Seconds after which a group whose processes do not answer is given up."""
    stuck: float = 30.0
    """Seconds after which a group is given up that makes no step while others do."""
    injectable: bool | None = None
    """Whether failures may be injected into its processes (`loom.chaos`); None: where ``LOOM_INJECTABLE`` is 1."""

    def __post_init__(self) -> None:
        counts = {"groups": self.groups, "steps": self.steps, "members": self.members}
        wrong = [f"{name} is {value}: it has to be 1 at least" for name, value in counts.items() if value < 1]
        if self.parallel not in PARALLEL:
            wrong.append(f"parallel is {self.parallel!r}: give one of {', '.join(PARALLEL)}")
        if self.backend not in BACKENDS:
            wrong.append(f"backend is {self.backend!r}: give one of {', '.join(BACKENDS)}")
        if self.config.optimizer not in self.trainer.optimizers:
            known = ", ".join(sorted(self.trainer.optimizers))
            wrong.append(f"the trainer has no optimizer {self.config.optimizer!r}; it has {known}")
        if self.averaging is Averaging.GRADIENTS and self.config.sync_every != 1:
            wrong.append("sync_every is for Averaging.LOCAL_SGD and DILOCO; gradients are averaged in each step")
        if self.averaging is Averaging.DILOCO and self.parallel == "fsdp" and self.members > 1:
            wrong.append("DiLoCo's outer optimizer does not know sharded parameters: use parallel='ddp'")
        if wrong:
            raise WrongArguments("; ".join(wrong))

    def start(self, job: Any) -> Any:
        """Begin in a session's driver, and leave it to itself.

        Args:
            job: the session, a `loom.Job`.

        Returns:
            The `loom.RunHandle`, whose result is a `JobSummary`; later, ``job.runs()`` finds it by the job's name.
        """
        return job.run(self.run, detach=True, name=self.name)

    def run(self) -> JobSummary:
        """Do it, and return when it is over. In a session's driver: see `start`.

        Raises:
            TrainingFailed: no group is left.
        """
        return Controller(self, session()).run()


def status(name: str = "train") -> JobStatus:
    """How a job that runs in this driver is: ``job.run(loom.train.status)``.

    Raises:
        WrongArguments: no job of the name runs here.
    """
    return controller_of(name).status()
