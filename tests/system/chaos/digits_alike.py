"""Digits that are learnt alike by however many groups, so that it is known bit for bit what has to come of it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

from loom.train import Batch, FaultTolerantJob, JobSummary
from loom.train.digits import DigitsTrainer, digits_job

__all__ = ["HASH_EVERY", "DigitsAlike", "alike_job", "assert_agree", "assert_as_without_faults"]

ACCURACY = 0.97
"""Of the test digits, the least share that has to be read correctly in the end."""

HASH_EVERY = 10

_GRAIN = 4096.0
"""Gradients are multiples of one part in so many: sums of a few, and their means, have no rounding errors."""


class DigitsAlike(DigitsTrainer):
    """Has each group compute the same gradient, so that their mean is the same whoever takes part in a step.

    What a step does then depends on nothing but the steps before: one that is left out, applied twice or applied to
    other parameters changes all that come after it.
    """

    def build(self) -> Any:
        """The same network, whose gradients are coarse."""
        model = super().build()
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: (gradient * _GRAIN).round() / _GRAIN)
        return model

    def loss(self, model: Any, batch: Batch) -> Any:
        """The loss on the samples that the first of all groups would have."""
        return super().loss(model, replace(batch, shard=0, shards=1))


def alike_job(steps: int, **settings: Any) -> FaultTolerantJob:
    """A job of three groups and a spare for `DigitsAlike`."""
    return replace(digits_job(groups=3, steps=steps, hash_every=HASH_EVERY, **settings), trainer=DigitsAlike)


def hashes_without_faults(steps: int) -> dict[int, str]:
    """The SHA-256 of the parameters after some steps of one process to which nothing happens."""
    import torch

    from loom.train.loop.training_state import hash_of

    job = alike_job(steps)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as many as a trainer has
    try:
        trainer = DigitsAlike()
        trainer.warm_up()
        torch.manual_seed(trainer.seed)
        model = trainer.build()
        optimizer = trainer.optimizers[job.config.optimizer](model.parameters(), job.config.learning_rate)
        found = {}
        for step in range(steps):
            optimizer.zero_grad()
            trainer.step(model, Batch(step, job.config.batch_size, 0, 1)).backward()
            optimizer.step()
            if (step + 1) % job.hash_every == 0:
                found[step + 1] = hash_of(model)
        return found
    finally:
        torch.set_num_threads(threads)


def assert_agree(summary: JobSummary, steps: int, groups: int = 3) -> None:
    """All groups came to the last step, with the same parameters there and wherever two of them tell their hash.

    No process has applied more steps than there are between the state that it began with and the last.
    """
    assert (summary.ending, summary.steps) == ("finished", steps)
    assert len(summary.hashes) == groups
    assert len(set(summary.hashes.values())) == 1
    by_step = defaultdict(set)
    for report in summary.reports.values():
        for step, found in report.hashes.items():
            by_step[step].add(found)
        assert report.step == steps
        assert report.applied + report.skipped <= steps - report.restored_step
    assert [step for step, hashes in by_step.items() if len(hashes) > 1] == []
    assert summary.metrics["accuracy"] >= ACCURACY


def assert_as_without_faults(summary: JobSummary, steps: int) -> None:
    """As `assert_agree`; and wherever a group of an `alike_job` tells its hash, it is that of a training alone."""
    assert_agree(summary, steps)
    alone = hashes_without_faults(steps)
    for report in summary.reports.values():
        assert len(report.hashes) > 1
        assert {step: alone[step] for step in report.hashes} == report.hashes
