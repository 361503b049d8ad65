"""`loom.SlurmJob`: its allocation and its session. Slurm's commands are stand-ins here."""

from __future__ import annotations

from pathlib import Path

import pytest

import loom
from loom_proxy.local import LocalCluster
from tests.support.made_allocation import MadeAllocation


@pytest.fixture
def allocation(tmp_path: Path, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> MadeAllocation:
    """An allocation of the name ``train`` whose gateway is the cluster's."""
    made = MadeAllocation(tmp_path / "slurm")
    made.make(cluster.token, port_of(cluster))
    made.use(monkeypatch)
    return made


def port_of(cluster: LocalCluster) -> int:
    return int(cluster.url.rpartition(":")[2])


def test_an_allocation_that_lives_is_used_and_left(allocation: MadeAllocation) -> None:
    with loom.SlurmJob(name="train") as job:
        assert job.run(lambda: 7) == 7
        assert job.address == job.url == "slurm://train"
        assert job.state().workers.extent.nelements == 2

    assert allocation.cancelled == []


def test_a_submitted_allocation_ends_with_the_block(allocation: MadeAllocation, cluster: LocalCluster) -> None:
    allocation.runs_when_submitted(port_of(cluster))

    with loom.SlurmJob(nodes=2, name="train", partition="main", gpus_per_node=8) as job:
        assert job.run(lambda: 7) == 7
        assert allocation.cancelled == []

    assert allocation.cancelled == ["18"]
    assert "--partition=main" in allocation.submitted
    assert "--gpus-per-node=8" in allocation.submitted


@pytest.mark.slow
def test_a_detached_job_leaves_its_allocation_until_it_is_killed(
    allocation: MadeAllocation, cluster: LocalCluster
) -> None:
    allocation.runs_when_submitted(port_of(cluster))
    with loom.SlurmJob(name="train") as job:
        job.detach()
    assert allocation.cancelled == []

    loom.connect("slurm://train", session=job.session).close()
    job.kill()
    assert allocation.cancelled == ["18"]


def test_an_allocation_whose_gateway_does_not_come_is_ended(allocation: MadeAllocation) -> None:
    allocation.runs_when_submitted(None)

    with pytest.raises(loom.WaitTimeout, match="job 18 runs on n1; the gateway starts; this has taken 0 s"):
        loom.SlurmJob(name="train", launch_timeout=0).apply()

    assert allocation.cancelled == ["18"]


def test_an_allocation_whose_session_does_not_open_is_ended(
    allocation: MadeAllocation, cluster: LocalCluster
) -> None:
    allocation.runs_when_submitted(port_of(cluster))

    with pytest.raises(loom.UnknownSession):
        loom.SlurmJob(name="train", session="none").apply()

    assert allocation.cancelled == ["18"]


def test_before_it_has_a_session_it_says_what_to_call() -> None:
    job = loom.SlurmJob(nodes=2, via="ssh://login")

    with pytest.raises(AttributeError, match="a SlurmJob has no 'hosts' before it has a session: call apply"):
        _ = job.hosts
    with pytest.raises(loom.LoomError, match="no name before it is submitted"):
        _ = job.name
    assert repr(job) == "<SlurmJob 'without a name yet' via ssh://login: nodes=2>"


def test_arguments_are_checked_before_anything_is_submitted() -> None:
    with pytest.raises(loom.WrongArguments, match="1 node at least"):
        loom.SlurmJob(nodes=0)
    with pytest.raises(loom.InvalidAddress, match="write ssh://USER@HOST"):
        loom.SlurmJob(via="login")
