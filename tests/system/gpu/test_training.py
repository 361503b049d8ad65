"""`loom.train` on real GPUs: the model is there, checkpoints of it are, and what torch does there is in a trace."""

from __future__ import annotations

from pathlib import Path

import pytest

import loom
from tests.support.gpus import GPUS, needs_gpus
from tests.system.gpu.trainers import OnGpu
from tests.system.train.trainers import Watched, a_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), needs_gpus()]

BACKENDS = pytest.mark.parametrize("backend", ["nccl", "gloo"])


def places(watched: Watched) -> list[tuple[str, ...]]:
    return sorted(group.devices for group in watched.status().groups if group.replica)


@BACKENDS
def test_a_group_that_is_killed_goes_on_from_its_checkpoint(job: loom.Job, tmp_path: Path, backend: str) -> None:
    kept = {"checkpoints": str(tmp_path), "checkpoint_every": 20, "backend": backend}
    watched = Watched(job, a_job(steps=100_000, groups=1, trainer=OnGpu, **kept))
    watched.await_event("checkpoint_written")
    assert places(watched) == [(GPUS[0].uuid,)]
    watched.kill("train_0")
    watched.await_event("group_restored")
    watched.change(learning_rate=0.25)
    watched.await_steps(10)
    summary = watched.stop()

    report = summary.reports["train_0"]
    assert report.restored.startswith("checkpoint")
    ((slower, _, _),) = report.changes
    assert summary.metrics["weight"] == -(0.5 * slower + 0.25 * (summary.steps - slower))


@needs_gpus(2)
@BACKENDS
def test_groups_on_gpus_of_their_own_replace_each_other(job: loom.Job, backend: str) -> None:
    watched = Watched(job, a_job(steps=100_000, groups=2, trainer=OnGpu, backend=backend))
    watched.await_steps()
    assert len(set(places(watched))) == 2
    watched.kill("train_1")
    watched.await_event("group_restored")
    watched.await_steps()
    summary = watched.stop()
    assert summary.metrics["weight"] == -0.5 * summary.steps


@needs_gpus(2)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_group_of_several_gpus_goes_on_from_its_checkpoint(job: loom.Job, tmp_path: Path, parallel: str) -> None:
    several = {"members": 2, "parallel": parallel, "backend": "nccl"}
    kept = {"checkpoints": str(tmp_path), "checkpoint_every": 20}
    watched = Watched(job, a_job(steps=100_000, groups=1, trainer=OnGpu, **several, **kept))
    watched.await_event("checkpoint_written")
    watched.kill("train_0")
    watched.await_event("group_restored")
    watched.await_steps(10)
    summary = watched.stop()
    assert summary.metrics["weight"] == -0.5 * summary.steps


def test_a_model_on_the_cpu_stays_there_beside_a_gpu(job: loom.Job) -> None:
    watched = Watched(job, a_job(steps=20, groups=1, members=2, parallel="fsdp"))
    summary = watched.run.result(120)
    assert summary.failures == 0, [str(event)[:2000] for event in summary.events]
    assert summary.metrics["weight"] == -0.5 * 20
