"""A training that has as many groups as there are hosts, while hosts join and are drained."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.listed_workers import Listed, gateway_on, listed
from tests.support.node_api import NODE, node_api
from tests.system.train.test_recovery import assert_exact
from tests.system.train.trainers import BOUND, Watched, a_job

__all__ = ["listed"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_training_grows_and_shrinks_with_the_hosts_of_its_session(listed: Listed, tmp_path: Path) -> None:
    draining = tmp_path / "draining"
    listed.add()
    listed.write()
    with gateway_on("--workers", f"file:{listed.path}") as gateway, gateway.connect() as job:
        watched = Watched(job, a_job(steps=100_000, groups="auto"))
        watched.await_steps(groups=1)
        (first,) = watched.pids().values()

        listed.add(None, "--draining-file", str(draining))
        listed.write()
        watched.await_steps(groups=2)
        assert watched.hosts() == {"train_0": 0, "train_1": 1}
        assert watched.pids()["train_0"] == first

        draining.touch()
        watched.await_event("group_removed")
        watched.await_steps(groups=1)
        assert watched.hosts() == {"train_0": 0}

        draining.unlink()
        watched.await_steps(groups=2)
        assert watched.hosts() == {"train_0": 0, "train_1": 1}

        listed.kill(1)
        watched.await_event("group_removed", 2)
        watched.await_steps(groups=1)
        assert watched.hosts() == {"train_0": 0}

        listed.add(1)
        listed.write()
        watched.await_steps(groups=2)
        assert watched.hosts() == {"train_0": 0, "train_1": 1}
        assert watched.pids()["train_0"] == first
        reasons = [event.data["reason"] for event in watched.events("group_removed")]
        summary = watched.stop()

    assert reasons == ["host 1 is drained: whoever runs it drains it", "there are fewer places for groups"]
    assert summary.failures == 1
    assert summary.reports["train_1"].restored.startswith("peers, at step")
    assert_exact(summary, groups=2)


def test_the_group_of_a_node_that_kubernetes_takes_away_leaves_before_its_pod_is_told(
    listed: Listed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "account").mkdir()
    with node_api(tmp_path / "account") as api:
        for name, value in api.environment.items():
            monkeypatch.setenv(name, value)
        listed.add()
        listed.add(None, "--node", NODE, program=("-c", IN_A_POD, str(api.folder)))
        listed.write()
        with gateway_on("--workers", f"file:{listed.path}") as gateway, gateway.connect() as job:
            watched = Watched(job, a_job(steps=100_000, groups="auto"))
            watched.await_steps(groups=2)

            api.taint("aws-node-termination-handler/spot-itn")
            told = next(event for event in job.events(BOUND) if event.name == "host_draining")
            removed = watched.await_event("group_removed")
            watched.await_steps(groups=1)
            living = len(job.living_hosts())
            summary = watched.stop()

    reason = f"its node {NODE} has the taint aws-node-termination-handler/spot-itn"
    assert (told.details["host"], told.details["reason"], living) == (1, reason, 1)
    assert removed.data["reason"] == f"host 1 is drained: {reason}"
    assert summary.failures == 0
    assert_exact(summary, groups=2)


IN_A_POD = """
import sys
from pathlib import Path
from loom_gateway.workers import host, node_taints
node_taints.SERVICE_ACCOUNT = Path(sys.argv.pop(1))
sys.exit(host.main(sys.argv[1:]))
"""


def test_a_group_is_moved_off_a_host_that_its_worker_says_is_drained(listed: Listed, tmp_path: Path) -> None:
    draining = tmp_path / "draining"
    listed.add()
    listed.add(None, "--draining-file", str(draining))
    listed.write()
    with gateway_on("--workers", f"file:{listed.path}") as gateway, gateway.connect() as job:
        watched = Watched(job, a_job(steps=100_000))
        watched.await_steps()
        draining.touch()
        watched.await_event("group_moved")
        watched.await_steps()
        assert set(watched.hosts().values()) == {0}
        summary = watched.stop()
    assert summary.failures == 0
