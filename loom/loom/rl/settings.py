"""`Generators` and `Trainers`, which an orchestrator gets besides the task, and `RunSummary`, its result."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from loom.errors import WrongArguments
from loom.rl.engines.engine import EngineKind
from loom.rl.generation.completions import Sampling
from loom.rl.generation.weight_client import POOL, WeightsVia
from loom.rl.task import Task, Tokenizer
from loom.train.settings import LiveConfig

if TYPE_CHECKING:
    from loom.train.controller.summaries import JobSummary


class Weights(str, Enum):
    """The way of the weights from the trainers to the generators."""

    FILES = "files"
    """A trainer writes ``weights/step_N/``, the generators read it."""
    MESSAGES = "messages"
    """A trainer sends the tensors to the generators, over Monarch."""
    TRANSFER = "transfer"
    """A trainer broadcasts the tensors to the workers of vLLM's servers, by NCCL or on CPUs by gloo."""


@dataclass(frozen=True)
class Generators:
    """The generators of a run: processes that sample completions.

    Raises:
        WrongArguments: there is no such engine, or it lacks a model or a tokenizer.
    """

    make_model: Callable[[], Any] | None = None
    """Returns the model of Loom's own engine, unless `model` names one; see `docs/guide/rl.md`."""
    tokenizer: Tokenizer | None = None
    """The tokenizer of the prompts and completions; None for that of `model`."""
    count: int = 1
    max_tokens: int = 64
    """Tokens after which a completion ends at the latest."""
    temperature: float = 1.0
    concurrency: int = 256
    """Completions that a generator works on at a time."""
    seed: int = 0
    actor: type | None = None
    """Class of the actors; None for `loom.rl.Generator`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments for the actors: options of the engine, and ``sampling``, its further fields."""
    engine: str | EngineKind = EngineKind.LOOM
    """``loom``, ``vllm``, ``sglang`` or ``transformers``."""
    model: str | os.PathLike[str] | None = None
    """The folder of a Hugging Face causal model, which every host reaches, or its name on the hub."""
    gpus: int = 0
    """GPUs of each generator, its own; 0 for those that its process sees."""
    colocated: bool = False
    """True if generators and trainers use the same GPUs in turns: vLLM's servers sleep while the trainers train."""

    def __post_init__(self) -> None:
        try:
            EngineKind(self.engine)
        except ValueError:
            kinds = ", ".join(one.value for one in EngineKind)
            raise WrongArguments(f"engine is one of {kinds}, not {self.engine!r:.40}") from None
        if self.make_model is not None and (self.model is not None or self.kind is not EngineKind.LOOM):
            raise WrongArguments(
                "generators get either make_model, for Loom's own engine, or model, a folder of Hugging Face's"
            )
        if self.model is None and (
            self.tokenizer is None or (self.make_model is None and not self.options.get("url"))
        ):
            raise WrongArguments(
                f"generators with engine={self.kind.value!r} get a model, its folder or its name on the hub; "
                "with make_model, or a server by its URL, the tokenizer does as well"
            )

    @property
    def kind(self) -> EngineKind:
        """The engine."""
        return EngineKind(self.engine)

    @property
    def sampling(self) -> Sampling:
        """The sampling of the completions."""
        return Sampling(self.max_tokens, self.temperature).with_fields(self.options.get("sampling", {}))

    @functools.cached_property
    def own_tokenizer(self) -> Tokenizer:
        """The tokenizer, read from the model's folder if none is given."""
        if self.tokenizer is not None:
            return self.tokenizer
        from loom.rl.models.tokenizers import tokenizer_of

        assert self.model is not None
        return tokenizer_of(self.model)


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters, which learn instead of the model's own parameters.

    Raises:
        WrongArguments: a number makes no sense.
    """

    rank: int = 16
    alpha: int = 32
    """The adapters' output is multiplied by ``alpha / rank``."""
    targets: tuple[str, ...] = ()
    """Names of the modules that get adapters, such as ``q_proj``; empty for all linear ones but the head."""

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha <= 0:
            raise WrongArguments(f"adapters have a rank from 1 and an alpha above 0, not {self.rank}, {self.alpha}")


@dataclass(frozen=True)
class Trainers:
    """The trainers of a run: a job of `loom.train`, whose groups share the rollouts of each step.

    Raises:
        WrongArguments: neither a model nor a function that makes one is given, or both are, or no tokenizer.
    """

    make_model: Callable[[], Any] | None = None
    """Returns the model, unless `model` names one."""
    tokenizer: Tokenizer | None = None
    """The tokenizer of the prompts and completions; None for that of `model`."""
    groups: int = 1
    members: int = 1
    """Processes of a group."""
    config: LiveConfig = field(
        default_factory=lambda: LiveConfig(learning_rate=2e-3, optimizer="adam", gradient_clipping=1.0)
    )
    """The first values of the configuration that can change while the run goes on."""
    actor: type | None = None
    """Class of the actors; None for `loom.rl.Trainer`."""
    clip: float = 0.2
    """The share by which a token's probability may move from the sampler's before its gradient ends."""
    checkpoint_every: int = 10
    """Steps between two checkpoints, from which a run goes on if all trainers are lost."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of `loom.train.FaultTolerantJob`, such as ``spares``."""
    model: str | os.PathLike[str] | None = None
    """The folder of a Hugging Face causal model, which every host reaches, or its name on the hub.

    The members of a group share its parameters (FSDP2) unless `job` says ``{"parallel": "ddp"}``.
    """
    gpus: bool = False
    """True if each process has a GPU of its own; groups and members then exchange tensors by NCCL."""
    bfloat16: bool = True
    """True if `model` computes in bfloat16 on GPUs, and is published so; its parameters stay in float32."""
    checkpoint_activations: bool = False
    """True if the layers of `model` are computed again for the gradient, instead of keeping what they computed."""

    lora: Lora | None = None
    """Adapters that learn instead of the parameters of `model`; it is published with them merged into it."""
    reference: str | os.PathLike[str] | None = None
    """The folder, or the name on the hub, of a model of the same tokens from which the policy is kept close."""
    kl: float = 0.0
    """The weight of the divergence from `reference` in the loss; 0 only to measure it."""

    def __post_init__(self) -> None:
        if self.kl < 0 or (self.kl and self.reference is None):
            raise WrongArguments(f"kl is {self.kl}: it is 0 or more, and needs a model as reference")
        if self.lora is not None and self.model is None:
            raise WrongArguments("lora is for model, a folder of Hugging Face's")
        if (self.make_model is None) == (self.model is None):
            raise WrongArguments("trainers get either make_model, a function, or model, a folder of Hugging Face's")
        if self.model is None and self.tokenizer is None:
            raise WrongArguments("trainers with make_model get the tokenizer, too")

    @property
    def parallel(self) -> str:
        """``fsdp`` if the members of a group share the parameters, ``ddp`` if only the batches."""
        default = "ddp" if self.model is None or self.members == 1 else "fsdp"
        return str(self.job.get("parallel", default))


@dataclass(frozen=True)
class TrainerRun:
    """The trainers' view of the run."""

    folder: str
    steps: int
    weights: Weights
    temperature: float
    keep: int
    """Weights that are kept at a time."""
    lines: bool
    """True if events are also printed, as log lines."""
    colocated: bool = False
    """True if generators use the trainers' GPUs when these do not train."""


@dataclass(frozen=True)
class Options:
    """Options that a running orchestrator changes at step boundaries, as by ``loom config set async_level=2``."""

    batch: int
    """Completions of a step."""
    group: int
    """Completions of a prompt."""
    generators: int
    max_tokens: int
    async_level: int
    weights_via: WeightsVia
    inflight: int = 0
    """Completions that are generated at the same time, at least; those beyond ``batch`` go into later steps."""
    reward_weights: tuple[float, ...] = (1.0,)
    """Of each of the task's reward functions."""
    split: tuple[float, ...] = ()
    """The share of a step for each trainer process, in any unit; empty for equal shares."""

    def check(self) -> None:
        """Raise `WrongArguments` if a value makes no sense."""
        least = {"batch": 1, "group": 1, "generators": 1, "max_tokens": 1, "async_level": 0, "inflight": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise WrongArguments(f"{name} is {getattr(self, name)}: it has to be {bound} at least")
        if self.batch % self.group:
            raise WrongArguments(f"batch is {self.batch}: it has to be a multiple of group, which is {self.group}")
        if not all(map(math.isfinite, self.reward_weights)):
            raise WrongArguments(f"reward_weights is {list(self.reward_weights)}: they have to be finite numbers")
        if any(share < 0 for share in self.split) or (self.split and not sum(self.split)):
            raise WrongArguments(
                f"split is {list(self.split)}: no share may be below 0, and one has to be above it"
            )


@dataclass(frozen=True)
class StepRecord:
    """A step of the orchestrator."""

    step: int
    reward: float
    """The mean reward of its completions."""
    staleness: int
    trunc_pct: float
    dropped: int
    """Completions of the step that were too old to train on."""
    rollouts: int
    seconds: float
    failed: int = 0
    """Completions without a reward, which are not trained on."""
    flat: int = 0
    """Prompts whose completions are all equally good."""
    evaluation: float | None = None
    """The mean reward of the evaluation before the step, if there was one."""


@dataclass(frozen=True)
class RunSummary:
    """The result of a run."""

    steps: tuple[StepRecord, ...]
    trained: int
    """Rollouts that the trainers have trained on, each once."""
    dropped: int
    lost_generators: int
    training: JobSummary
    """The result of the trainers' job."""
    seconds: float

    def reward(self, newest: int = 20) -> float:
        """Return the mean reward of the newest steps."""
        rewards = [one.reward for one in self.steps[-newest:]]
        return sum(rewards) / len(rewards) if rewards else 0.0


@dataclass(frozen=True)
class RunSpec:
    """The settings of an orchestrator.

    Raises:
        WrongArguments: a number makes no sense.
    """

    task: Task
    """Gives prompts, rewards and advantages."""
    generators: Generators
    trainers: Trainers
    _: KW_ONLY
    folder: str | os.PathLike[str]
    """A folder that every host reaches. A run goes on from its contents."""
    steps: int
    """Number of optimizer steps."""
    batch: int
    """Completions of a step."""
    group: int
    """Completions of a prompt."""
    async_level: int = 1
    """Steps that the generators' policy may be behind; 0 takes turns."""
    weights: str | Weights = Weights.FILES
    """``files``, ``messages`` or ``transfer``: the way of weights to the generators."""
    weights_via: str | WeightsVia = WeightsVia.LANE
    """``shared``, ``admin`` or ``lane``: the way of the order to load files.

    Unless it is ``lane``, completions are HTTP requests, too.
    """
    max_staleness: int | None = None
    """The largest age, in steps, of a policy whose completions are trained on; None for ``async_level``."""
    inflight: int = 0
    """Completions that are generated at the same time, if more than ``batch``.

    A step takes the first ``batch`` that are done. The others go into later steps, unless they are too old then.
    """
    connections: int = POOL
    """Connections of the pool for HTTP requests."""
    rollout_timeout: float = 600.0
    """Seconds that `Task.rollout` may take for one answer, if the task overrides it."""
    reward_timeout: float = 30.0
    """Seconds that a reward function may take."""
    reward_processes: int = 2
    """Processes that judge completions."""
    filter_groups: bool = False
    """True if prompts whose completions are all equally good are left out: they have no gradient."""
    evaluate_every: int = 0
    """Steps between two evaluations of the policy on `Task.evaluation`; 0 for none."""
    lines: bool = True
    """True if the processes also print their events, as the log lines of `loom.tracing`.

    ``loom analyze --session`` and ``loom tune`` read them.
    """
    on_step: Callable[[StepRecord], object] | None = None
    """Called with each step's `StepRecord`."""

    def __post_init__(self) -> None:
        self.options.check()
        if self.steps < 1:
            raise WrongArguments(f"steps is {self.steps}: it has to be 1 at least")
        for name in ("reward_timeout", "rollout_timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise WrongArguments(f"{name} is {getattr(self, name)}: it has to be a number above 0")
        self.check_inflight(self.inflight)
        for name, least in (("reward_processes", 1), ("evaluate_every", 0)):
            if getattr(self, name) < least:
                raise WrongArguments(f"{name} is {getattr(self, name)}: it has to be {least} at least")
        self._check_weights()
        self.check_turns(self.options)
        if WeightsVia(self.weights_via) is not WeightsVia.LANE and not self.generators.kind.has_http:
            raise WrongArguments(
                f"weights_via={WeightsVia(self.weights_via).value!r} needs a generator with an HTTP server, and "
                f"engine={self.generators.kind.value!r} has none for it: weights_via='lane'"
            )

    def _check_weights(self) -> None:
        try:
            weights, kind = Weights(self.weights), self.generators.kind
        except ValueError:
            ways = ", ".join(one.value for one in Weights)
            raise WrongArguments(f"weights is one of {ways}, not {self.weights!r:.40}") from None
        if weights is Weights.MESSAGES and not kind.in_process:
            raise WrongArguments(
                f"weights='messages' sends tensors to the generator's process, and engine={kind.value!r} has "
                "another one: weights='files'"
            )
        if weights is Weights.TRANSFER and kind is not EngineKind.VLLM:
            raise WrongArguments(
                f"weights='transfer' is for the workers of a vLLM server, and engine={kind.value!r} has none: "
                "weights='files'"
            )
        if weights is Weights.TRANSFER and self.generators.gpus and not self.trainers.gpus:
            raise WrongArguments(
                "weights='transfer' goes to GPUs by NCCL, which trainers without GPUs have not: "
                "Trainers(gpus=True), or weights='files'"
            )

    def check_turns(self, options: Options) -> None:
        """Raise `WrongArguments` if generators on the trainers' GPUs could not take turns with these."""
        generators = self.generators
        if not generators.colocated:
            return
        wrong = {
            "engine": generators.kind is not EngineKind.VLLM,
            "gpus": not (self.trainers.gpus and generators.gpus),
            "async_level": options.async_level > 0,
            "inflight": options.inflight > options.batch,
            "weights": Weights(self.weights) is not Weights.FILES,
        }
        if found := next(filter(wrong.get, wrong), None):
            raise WrongArguments(
                f"colocated generators take turns with trainers on their GPUs, and {found} does not allow that: "
                "they need engine='vllm', gpus from 1, Trainers(gpus=True), async_level=0, weights='files', and an "
                "inflight within batch"
            )

    @property
    def has_turns(self) -> bool:
        """True if the task draws its answers by itself, in several turns."""
        return type(self.task).rollout is not Task.rollout

    def check_inflight(self, inflight: int) -> None:
        """Raise `WrongArguments` if the task takes no such ``inflight``."""
        if inflight and self.has_turns:
            raise WrongArguments("inflight is for tasks of one turn, and this task has a rollout of its own")

    @property
    def options(self) -> Options:
        """The options as the run begins."""
        return Options(
            batch=self.batch,
            group=self.group,
            generators=self.generators.count,
            max_tokens=self.generators.max_tokens,
            async_level=self.async_level,
            weights_via=WeightsVia(self.weights_via),
            inflight=self.inflight,
            reward_weights=tuple(self.task.weights()),
        )
