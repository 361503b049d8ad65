"""The reward of the shipped task rises to its threshold, whatever the generators' policy may be behind."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

import loom
from loom.rl import Arithmetic
from loom_proxy.local import LocalCluster
from tests.system.rl.runs import WatchedRun, assert_exact

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 220
STEPS_WITH_LOSSES = 280
"""While a trainer is away the others learn from their part of the rollouts only."""


@pytest.mark.guarantees("rl run", "Reward rises to the task's threshold with `async_level` 0, 1 and 2")
@pytest.mark.parametrize("level", [0, 1, 2])
def test_the_reward_rises_to_the_threshold(job: loom.Job, tmp_path: Path, level: int) -> None:
    summary = WatchedRun(job, tmp_path, steps=STEPS, async_level=level).result()

    assert_exact(summary, STEPS)
    assert summary.steps[0].reward < 0.3
    assert summary.reward() >= Arithmetic.threshold
    assert [one.staleness for one in summary.steps] == [min(step, level) for step in range(STEPS)]
    assert summary.dropped == 0


@pytest.mark.guarantees("rl run", "It also does with a generator, the trainers and the weaver killed on the way")
def test_the_reward_rises_with_a_trainer_a_generator_and_the_weaver_killed_on_the_way(
    own_cluster: LocalCluster, tmp_path: Path
) -> None:
    with loom.connect(own_cluster.url, own_cluster.token) as job:
        run = WatchedRun(job, tmp_path, steps=STEPS_WITH_LOSSES, async_level=1, groups=2, generators=2)
        run.await_step(15)
        run.kill_generator()
        run.await_step(30)
        run.kill_trainer("trainer_0")
        run.await_step(45)
        weaver_of(own_cluster).kill()
        run.await_step(60)
        run.kill_trainer("trainer_1")
        run.await_step(75)
        replicas = set(job.weaver.replicas())
        summary = run.result()

    assert_exact(summary, STEPS_WITH_LOSSES)
    assert summary.reward() >= Arithmetic.threshold
    assert max(one.staleness for one in summary.steps) == 1
    assert summary.lost_generators >= 1
    assert summary.training.failures == 2
    assert {"trainer_0", "trainer_1", "trainer_job", "orchestrator"} <= replicas
    restored = [event.replica for event in summary.training.events if event.kind == "group_restored"]
    assert sorted(restored) == ["trainer_0", "trainer_1"]


def weaver_of(cluster: LocalCluster) -> psutil.Process:
    """Return the process of a cluster's weaver."""
    ours = [process for pid in cluster.pids for process in psutil.Process(pid).children(recursive=True)]
    (weaver,) = [process for process in ours if "loom.weaver" in process.cmdline()]
    return weaver
