"""What a run of `loom.rl` survives, what changes while it goes on, and what it leaves behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import loom
from loom.rl import (
    Arithmetic,
    Characters,
    Generators,
    Orchestrator,
    Prompt,
    RolloutStore,
    Trainers,
    arithmetic_run,
)
from loom.rl.arithmetic import arithmetic_model
from loom.rl.generation import weight_files as weights
from loom.rl.task import RolloutPolicy
from loom_proxy.local import LocalCluster
from tests.support.processes import still_there
from tests.system.rl.runs import BOUND, WatchedRun, assert_exact

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SMALL = {"batch": 64, "group": 8}


@pytest.mark.guarantees("rl run", "Weights by files and by messages give the same results")
@pytest.mark.parametrize("level", [0, 1])
def test_weights_by_files_and_by_messages_give_the_same(job: loom.Job, tmp_path: Path, level: int) -> None:
    found = {}
    for way in ("files", "messages"):
        run = WatchedRun(job, tmp_path / way, steps=8, async_level=level, generators=2, weights=way, **SMALL)
        summary = run.result()
        assert_exact(summary, 8)
        state, _ = weights.load(weights.path_of(tmp_path / way / "weights", 8))
        found[way] = [one.reward for one in summary.steps], state

    assert found["files"][0] == found["messages"][0]
    # The last bits depend on which completions the engine happens to compute together.
    torch.testing.assert_close(found["files"][1], found["messages"][1], rtol=1e-3, atol=1e-4)


@pytest.mark.guarantees("rl run", "Without any trainer left, they go on from a checkpoint with the same rollouts")
def test_the_only_trainer_goes_on_from_its_checkpoint_with_the_same_rollouts(job: loom.Job, tmp_path: Path) -> None:
    run = WatchedRun(job, tmp_path, steps=40, **SMALL)
    run.await_step(14)
    run.kill_trainer("trainer_0")
    summary = run.result()

    assert_exact(summary, 40)
    (restored,) = [event for event in summary.training.events if event.kind == "group_restored"]
    assert restored.data["restored"].startswith("checkpoint ")


@pytest.mark.guarantees("rl run", "A killed generator is replaced, and its part generated again")
def test_a_killed_generator_is_replaced_and_its_part_generated_again(job: loom.Job, tmp_path: Path) -> None:
    run = WatchedRun(job, tmp_path, steps=30, generators=1, **SMALL)
    run.await_step(5)
    killed = run.kill_generator()
    run.await_step(12)
    (other,) = run.pids("generator")
    summary = run.result()

    assert other != killed
    assert summary.lost_generators == 1
    assert_exact(summary, 30)
    assert {one.rollouts for one in summary.steps} == {64}


@pytest.mark.guarantees(
    "rl run", "Options change at a step boundary, with an acknowledgement or a refusal that says why"
)
def test_options_change_at_a_step_boundary_and_a_stop_ends_the_run(job: loom.Job, tmp_path: Path) -> None:
    run = WatchedRun(job, tmp_path, steps=100_000, async_level=0, **SMALL)
    run.await_step(3)

    answers = job.weaver.update_config("orchestrator", async_level=2, batch=32, generators=2, max_tokens=2)
    (answer,) = answers.get(BOUND).values()
    refused = job.weaver.update_config("orchestrator", batch=33).get(BOUND)["orchestrator"]
    run.await_true(lambda: len(run.pids("generator")) == 2, "the second generator")
    job.weaver.stop("orchestrator").get(BOUND)
    summary = run.result()

    assert answer.ok
    assert not refused.ok
    assert "multiple of group" in str(refused.reason)
    assert summary.training.ending == "stopped"
    by_step = {one.step: one for one in summary.steps}
    assert by_step[answer.step - 1].rollouts == 64
    assert by_step[answer.step].rollouts == 32
    assert summary.steps[-1].staleness == 2
    assert max(one.staleness for one in summary.steps) == 2


class TwoTurns(Arithmetic):
    """The task, with a second turn that goes on after the first one."""

    async def rollout(self, prompt: Prompt, policy: RolloutPolicy) -> str:
        first = await policy.complete(prompt.content)
        second = await policy.complete(f"{prompt.text}{first.text}", max_tokens=1)
        return first.text + second.text


def run_of_turns(folder: Path, **settings: Any) -> Orchestrator:
    sampling = Generators(arithmetic_model, Characters(), max_tokens=2)
    return Orchestrator(
        TwoTurns(), sampling, Trainers(arithmetic_model, Characters()), folder=folder, batch=32, group=8, **settings
    )


def test_a_run_of_several_turns_takes_no_inflight(job: loom.Job, tmp_path: Path) -> None:
    run = WatchedRun(job, tmp_path, run_of_turns, steps=100_000)
    run.await_step(1)

    refused = job.weaver.update_config("orchestrator", inflight=64).get(BOUND)["orchestrator"]
    taken = job.weaver.update_config("orchestrator", inflight=0).get(BOUND)["orchestrator"]
    job.weaver.stop("orchestrator").get(BOUND)
    summary = run.result()

    assert not refused.ok
    assert "inflight is for tasks of one turn" in str(refused.reason)
    assert taken.ok
    assert {one.failed for one in summary.steps} == {0}


@pytest.mark.guarantees(
    "rl run", "No rollout is trained on twice, and none that is too old: those are dropped and counted"
)
@pytest.mark.parametrize("via", ["lane", "shared", "admin"])
def test_completions_that_go_on_from_step_to_step_are_trained_on_once_and_never_too_old(
    job: loom.Job, tmp_path: Path, via: str
) -> None:
    settings = {"async_level": 1, "max_staleness": 2, "inflight": 128, "weights_via": via, "generators": 2}
    run = WatchedRun(job, tmp_path, steps=9, **settings, **SMALL)
    summary = run.result()

    assert_exact(summary, 9)
    store = RolloutStore(tmp_path)
    by_step = {step: store.read_all(step) for step in store.steps()}
    ids = [one.id for rollouts in by_step.values() for one in rollouts]
    assert len(ids) == len(set(ids)) == summary.trained
    assert {step - one.weights_step for step, rollouts in by_step.items() for one in rollouts} <= {0, 1, 2}


@pytest.mark.guarantees(
    "rl run", "No rollout is trained on twice, and none that is too old: those are dropped and counted"
)
def test_completions_that_are_too_old_are_dropped_and_counted(job: loom.Job, tmp_path: Path) -> None:
    summary = WatchedRun(job, tmp_path, steps=9, async_level=0, max_staleness=0, inflight=128, **SMALL).result()

    assert_exact(summary, 9)
    assert summary.dropped > 0
    assert summary.dropped == sum(one.dropped for one in summary.steps)
    store = RolloutStore(tmp_path)
    assert {step - one.weights_step for step in store.steps() for one in store.read_all(step)} == {0}


def test_a_run_is_refused_while_another_session_has_one(
    cluster: LocalCluster, job: loom.Job, tmp_path: Path
) -> None:
    run = WatchedRun(job, tmp_path / "first", steps=100_000, async_level=0, **SMALL)
    run.await_step(3)
    with loom.connect(cluster.url, cluster.token) as other:
        second = WatchedRun(other, tmp_path / "second", steps=4, **SMALL)
        error = second.run.exception(BOUND)
    run.await_step(run.records()[-1].step + 3)
    job.weaver.stop("orchestrator").get(BOUND)
    summary = run.result()

    assert isinstance(error, loom.errors.Conflict)
    assert error.code == "replica_taken"
    assert "another run of yours goes on already: end it first" in str(error)
    assert second.records() == []
    assert second.pids("generator") == []
    assert summary.training.ending == "stopped"


@pytest.mark.guarantees("tracing", "The metrics come to the weaver under the names that people know")
def test_metrics_come_to_the_weaver_under_their_names(job: loom.Job, tmp_path: Path) -> None:
    run = WatchedRun(job, tmp_path, steps=40, async_level=0, **SMALL)
    run.await_step(10)
    run.await_true(lambda: "time/train" in job.weaver.replica("orchestrator").metrics, "the trainer's metrics")
    metrics = job.weaver.replica("orchestrator").metrics
    run.result()

    times = ("wait_for_batch", "wait_for_policy", "broadcast_weights", "generate", "train", "write_checkpoint")
    assert {f"time/{name}" for name in times} <= metrics.keys()
    assert {"reward", "loss", "staleness", "trunc_pct", "rollouts/dropped"} <= metrics.keys()
    shares = [value for name, value in metrics.items() if name.startswith("perf/trainer/step_time_ratio/")]
    assert "perf/trainer/step_time_ratio/unaccounted" in metrics
    assert sum(shares) == pytest.approx(1.0, abs=0.02)


@pytest.mark.guarantees("rl run", "A cancelled run leaves no process, and another one goes on from its folder")
def test_a_cancelled_run_leaves_no_process_and_another_goes_on_from_its_folder(
    job: loom.Job, tmp_path: Path
) -> None:
    run = WatchedRun(job, tmp_path, steps=60, **SMALL)
    run.await_step(25)
    processes = [psutil.Process(pid) for role in ("generator", "trainer") for pid in run.pids(role)]
    assert len(processes) >= 2

    run.run.cancel()

    assert still_there(processes, BOUND) == []
    before = [one.step for one in run.records()]
    summary = WatchedRun(job, tmp_path, steps=60, **SMALL).result()
    assert before[-1] >= 25
    assert_exact(summary, 60)


def test_the_folder_stays_small(job: loom.Job, tmp_path: Path) -> None:
    summary = WatchedRun(job, tmp_path, steps=80, async_level=1, **SMALL).result()

    assert_exact(summary, 80)
    assert len(RolloutStore(tmp_path).steps()) <= 40  # since the oldest of three checkpoints
    assert len(list((tmp_path / "weights").glob("step_*"))) <= 5
    assert weights.latest(tmp_path / "weights") == 80


PROGRAM = """
import sys
from loom.rl import arithmetic_run

summary = arithmetic_run(sys.argv[1], steps=6, batch=64, group=8).run()
print("trained", summary.trained, summary.training.ending)
"""


@pytest.mark.guarantees("rl run", "It runs in `job.run`, in an actor, and in a program on a host of the cluster")
def test_a_program_in_the_cluster_runs_it_on_its_own_host(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=BOUND, check=False
    )

    assert "trained 384 finished" in ran.stdout, ran.stderr[-2000:]


class Runner(loom.Actor):
    """An actor in the cluster that makes a run."""

    @loom.endpoint
    def run(self, folder: str) -> tuple[list[int], int]:
        summary = arithmetic_run(folder, steps=3, generators=2, groups=2, **SMALL).run()
        return [one.step for one in summary.steps], summary.trained


@pytest.mark.guarantees("rl run", "It runs in `job.run`, in an actor, and in a program on a host of the cluster")
def test_an_orchestrator_runs_in_an_actor(job: loom.Job, tmp_path: Path) -> None:
    procs = job.hosts.slice(hosts=0).spawn_procs()
    runner = procs.spawn("runner", Runner)

    assert runner.run.call_one(str(tmp_path)).get(timeout=BOUND) == ([0, 1, 2], 3 * 64)
