"""`Orchestrator`: the loop of an RL run, which waits for weights, generates, rewards, and has trainers learn.

::

    orchestrator = Orchestrator(
        Arithmetic(),
        Generators(make_model, tokenizer, count=2, max_tokens=4),
        Trainers(make_model, tokenizer, groups=2),
        folder="/shared/run-7",
        steps=200,
        batch=256,
        group=16,
        async_level=1,
    )
    summary = job.run(orchestrator.run)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from loom.errors import WrongArguments
from loom.rl.generation.weight_client import POOL, WeightsVia
from loom.rl.settings import Generators, Options, RunSpec, RunSummary, StepRecord, Trainers, Weights
from loom.rl.task import Task


class Orchestrator:
    """A run: its task, its generators and trainers, and the loop between them.

    Args:
        task: gives prompts, rewards and advantages.
        generators: the processes that sample completions.
        trainers: the processes that learn from them.
        folder: a folder that every host reaches. A run goes on from what it finds there.
        steps: number of optimizer steps.
        batch: completions of a step.
        group: completions of a prompt.
        async_level: steps that the generators' policy may be behind; 0 takes turns.
        weights: ``files`` or ``messages``: how weights get to the generators.
        weights_via: ``shared``, ``admin`` or ``lane``: how the order to load files gets there. Unless it is
            ``lane``, completions are HTTP requests, too.
        max_staleness: the largest age, in steps, of a policy whose completions are trained on; None for
            ``async_level``.
        inflight: completions that are generated at the same time, if more than ``batch``. A step takes the first
            ``batch`` that are done, and the others go into later steps, unless they are too old by then.
        connections: of the pool for HTTP requests.
        lines: whether the processes also print their events, as the log lines of `loom.tracing`, which
            ``loom analyze --session`` and ``loom tune`` read.
        on_step: called with each step's `StepRecord`.

    Raises:
        WrongArguments: a number makes no sense.
    """

    def __init__(
        self,
        task: Task,
        generators: Generators,
        trainers: Trainers,
        *,
        folder: str | os.PathLike[str],
        steps: int,
        batch: int,
        group: int,
        async_level: int = 1,
        weights: str | Weights = Weights.FILES,
        weights_via: str | WeightsVia = WeightsVia.LANE,
        max_staleness: int | None = None,
        inflight: int = 0,
        connections: int = POOL,
        lines: bool = True,
        on_step: Callable[[StepRecord], object] | None = None,
    ) -> None:
        options = Options(
            batch=batch,
            group=group,
            generators=generators.count,
            max_tokens=generators.max_tokens,
            async_level=async_level,
            weights_via=WeightsVia(weights_via),
            inflight=inflight,
        )
        options.check()
        if steps < 1:
            raise WrongArguments(f"steps is {steps}: it has to be 1 at least")
        self.spec = RunSpec(
            task=task,
            generators=generators,
            trainers=trainers,
            folder=Path(folder),
            steps=steps,
            options=options,
            weights=Weights(weights),
            max_staleness=max_staleness,
            connections=connections,
            lines=lines,
            on_step=on_step,
        )

    def run(self) -> RunSummary:
        """Run until the last step; return the summary.

        The function is for `Job.run`. It also works in an actor, and in a program in the cluster.

        Raises:
            ReplicaTaken: the user has a run that goes on in another session.
            TrainingFailed: no trainer is left.
            LoomError: no generator is left.
        """
        from loom.rl.run import OrchestratorRun  # needs torch

        return OrchestratorRun(self.spec).run()
