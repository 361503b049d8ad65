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

A module apart from `loom.rl.run`, because a laptop makes an orchestrator without torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from loom.rl.settings import RunSpec, RunSummary


@dataclass(frozen=True)
class Orchestrator(RunSpec):
    """A run: its task, its generators and trainers, and the loop between them."""

    def run(self) -> RunSummary:
        """Run until the last step; return the summary.

        The function is for `Job.run`. It also works in an actor, and in a program in the cluster.

        Raises:
            ReplicaTaken: the user has a run that goes on in another session.
            TrainingFailed: no trainer is left.
            LoomError: no generator is left.
        """
        from loom.rl.run import OrchestratorRun  # needs torch

        return OrchestratorRun(self).run()
