"""A replica group of several processes: they share the batches (DDP) or the parameters (FSDP2)."""

from __future__ import annotations

from pathlib import Path

import pytest

import loom
from loom.train import JobSummary
from tests.system.train.trainers import BOUND, Watched, a_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_group_that_loses_one_process_is_replaced_as_a_whole(
    job: loom.Job, tmp_path: Path, parallel: str
) -> None:
    several = {"members": 2, "parallel": parallel, "checkpoints": str(tmp_path), "checkpoint_every": 50}
    watched = Watched(job, a_job(steps=100_000, **several))
    watched.await_steps()
    pids = watched.pids()

    watched.kill("train_1")
    watched.await_event("group_restored")
    after = watched.pids()
    watched.change(learning_rate=0.25)
    watched.await_steps(10)
    summary = watched.stop()

    assert after["train_0"] == pids["train_0"]
    assert not set(after["train_1"]) & set(pids["train_1"])
    hashes = [report.hashes for report in summary.reports.values()]
    both = hashes[0].keys() & hashes[1].keys()
    assert both
    assert all(hashes[0][step] == hashes[1][step] for step in both)
    ((slower, _, _),) = summary.reports["train_0"].changes
    assert summary.metrics["weight"] == -(0.5 * slower + 0.25 * (summary.steps - slower))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_what_one_job_saved_another_goes_on_with(job: loom.Job, tmp_path: Path, parallel: str) -> None:
    several = {"members": 2, "parallel": parallel, "checkpoint_every": 40}  # the last step, too
    first = a_job(steps=40, groups=1, checkpoints=str(tmp_path), **several)
    second = a_job(steps=60, groups=1, checkpoints=str(tmp_path), name="again")
    saved: JobSummary = Watched(job, first).run.result(BOUND)

    assert saved.failures == 0
    summary = Watched(job, second).run.result(BOUND)

    assert summary.reports["again_0"].restored == "checkpoint 000001-step-40"
    assert summary.metrics["weight"] == -0.5 * 60
