"""`JobSpec`: the settings of a job; `Assignment`: the part of them that one group gets."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from loom.branches.branch import Branch
from loom.control.run_start import RunParent
from loom.errors import BranchRefused, WrongArguments
from loom.train.model import TrainerModel
from loom.train.settings import RULES, Averaging, LiveConfig, Restore, RetryBudget, Timeouts

if TYPE_CHECKING:
    from typing_extensions import Self

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
    groups: int | Literal["auto"] = 2
    """``auto``: one for each host or, on GPUs, as many as find some; more as hosts join, and fewer as hosts are
    drained."""
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
    branch: Branch | None = None
    """The checkpoint of another job with which this one begins, and the values that it changes; see `branched`."""
    start_id: str | None = None
    """Id of the job's run in the weaver; None for one made of the job's key."""
    injectable: bool | None = None
    """True if failures may be injected into the processes (`loom.chaos`); None if ``LOOM_INJECTABLE`` decides."""

    def __post_init__(self) -> None:
        counts = {"groups": self.groups, "steps": self.steps, "members": self.members}
        wrong = [
            f"{name} is {value!r:.40}: it has to be 1 at least{', or auto' * (name == 'groups')}"
            for name, value in counts.items()
            if (name, value) != ("groups", "auto") and (isinstance(value, str) or value < 1)
        ]
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

    @property
    def parent(self) -> RunParent | None:
        """The run of which this job is a branch."""
        return None if self.branch is None else RunParent(self.branch.run, self.branch.step, "branch")

    def branched(self, asked: Mapping[str, Any]) -> Self:
        """Return the settings of a branch of this job, with its checkpoint linked into a folder of its own.

        Args:
            asked: the parameters of `loom.branches.launch.start_of`.

        Raises:
            NotFound: there is no such checkpoint here.
            BranchRefused: the job has no checkpoints, or the branch changes what it cannot.
        """
        from loom.branches.launch import start_of  # which few processes need

        if asked.get("replace"):
            raise BranchRefused("a job of a session has its branches beside it: stop it when the branch trains")
        if self.checkpoints is None:
            raise BranchRefused("the job writes no checkpoints: name a folder for them in its `checkpoints`")
        start = start_of(asked, (), os.sep, [os.path.abspath(self.checkpoints)])
        self.begun_by(start.branch, start.name, start.id)
        start = start.prepare()
        return self.begun_by(start.branch, start.name, start.id)

    def begun_by(self, branch: Branch, name: str, start_id: str | None) -> Self:
        """Return the settings of a branch of this job, under another name.

        Raises:
            BranchRefused: the branch changes what it cannot.
        """
        keys = [one.name for one in fields(LiveConfig)]
        wrong = [key for key in branch.changes if key not in (*keys, "groups")]
        if wrong:
            raise BranchRefused(f"set {wrong[0]}: the branch of a job changes {', '.join(keys)} or groups")
        groups = branch.config.get("groups", self.groups)
        if groups != "auto" and (type(groups) is not int or groups < 1):
            raise BranchRefused(f"set groups: a number from 1 on, not {groups!r:.80}")
        kept, changes = ({key: one[key] for key in keys if key in one} for one in (branch.kept, branch.changes))
        branch = replace(branch, kept=kept, changes=changes)
        return replace(self, name=name, groups=groups, checkpoints=branch.own, branch=branch, start_id=start_id)

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
        return self.job.start_id or run_of(self.key)
