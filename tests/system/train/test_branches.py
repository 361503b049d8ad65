"""Branches of jobs: beside the job in its session, and by their program again, which does not know of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import loom
from loom.errors import BranchRefused
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.runs import TrainingRun
from tests.support.gateways import await_true
from tests.support.paths import ROOT
from tests.support.processes import run_loom
from tests.system.train.trainers import BOUND, RATE, Watched, a_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = """
import sys
import loom
from tests.system.train.trainers import a_job

with loom.connect() as job:
    training = a_job(steps=int(sys.argv[2]), checkpoints=sys.argv[1], checkpoint_every=10, keep_checkpoints=100)
    print(training.start(job).result().ending)
"""


def expect_half_the_rate(run: TrainingRun, parent: str, step: int) -> None:
    """Check that a run goes on from a step of another one, with half of its rate from the first step on."""
    assert run.parent["run"] == parent
    assert (run.parent["step"], run.parent["kind"]) == (step, "branch")
    points = run.history("weight")  # each step takes the learning rate from it
    assert points
    assert all(one.value == -RATE * step - RATE / 2 * ((one.step or 0) - step) for one in points)
    (mark,) = (one for one in run.timeline if one["kind"] == "command")
    assert (mark["refused"], mark["changes"]["learning_rate"]["new"]) == (0, RATE / 2)


def test_a_branch_trains_beside_its_job_in_the_same_session(job: loom.Job, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    watched = Watched(job, a_job(steps=100_000, checkpoints=str(kept), checkpoint_every=10, keep_checkpoints=100))
    watched.await_steps(35)
    run = job.weaver.run("train")

    half = run.branch(step=29, set={"learning_rate": "0.5x"})
    await_true(lambda: (half.refresh().step or 0) > 25, BOUND)

    assert half.name.startswith("train-at-20")
    expect_half_the_rate(half, run.id, 20)
    assert [one["run"] for one in run.refresh().children] == [half.id]
    assert [one.id for one in job.runs()["train"].trains] == [run.id, half.id]
    assert run.state == "running"
    assert (tmp_path / f"kept-branch-{half.id}").is_dir()
    for wanted, why in (
        ({"replace": True}, "beside it"),
        ({"step": 9}, "no checkpoint at or before step 9"),
        ({"set": {"drain_host": 1}}, "set drain_host: the branch of a job changes learning_rate"),
    ):
        with pytest.raises(BranchRefused, match=why):
            run.branch(**wanted)
    job.weaver.stop(half.name).get(BOUND)
    watched.stop()


def test_the_program_of_a_job_starts_a_branch_when_it_is_given_again(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LOOM_URL", cluster.url), ("LOOM_TOKEN", cluster.token), ("PYTHONPATH", str(ROOT))):
        monkeypatch.setenv(name, value)
    (tmp_path / "program.py").write_text(PROGRAM)
    program = [sys.executable, "program.py", str(tmp_path / "kept")]
    subprocess.run([*program, "30"], cwd=tmp_path, check=True, timeout=BOUND)
    parent = loom.runs("train", limit=1)[0]

    refused = run_loom("branch", parent.id)
    words = ("branch", parent.id, "--step", "25", "--set", "learning_rate=0.5x", "--", *program, "40")
    command = [str(Path(sys.executable).with_name("loom")), *words]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=BOUND)

    assert "in which no job of loom.train goes on" in refused.stderr
    assert f"loom branch {parent.id} -- PROGRAM" in refused.stderr
    assert (made.returncode, made.stdout.strip()) == (0, "finished"), made.stderr
    half = next(one for one in loom.runs() if (one.parent or {}).get("run") == parent.id)
    expect_half_the_rate(half, parent.id, 20)
    assert (half.state, half.step) == ("completed", 40)
    assert [one["run"] for one in parent.refresh().children] == [half.id]  # which is of another session
    assert os.path.isdir(tmp_path / f"kept-branch-{half.id}")
