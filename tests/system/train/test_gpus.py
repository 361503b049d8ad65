"""A host with eight GPUs, which the real pynvml sees through a library of ours: who has which, and if one fails."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import loom
from loom_proxy.local import LocalCluster
from tests.support.gateways import await_true
from tests.support.nvml import Gpus
from tests.system.train.trainers import BOUND, Watched, Zeroed, a_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GPUS = 8


class Trainer(loom.Actor):
    """Trains until it should stop."""

    @loom.endpoint
    def train(self) -> list[str]:
        failed: list[str] = []
        with loom.Threadlet() as threadlet:
            threadlet.on_device_failure(lambda device, reason: failed.append(f"{device}: {reason}"))
            number = 0
            while not threadlet.should_stop:
                number += 1
                with threadlet.step(number):
                    time.sleep(0.02)
        return failed


class OnSimulatedGpus(Zeroed):
    """Has a GPU of its own, as far as NVML and the job know; torch computes on the CPU."""

    device = "cuda"

    def warm_up(self) -> None:
        assert self.device == "cuda:0", self.device
        self.device = "cpu"


@pytest.fixture
def gpus(tmp_path: Path) -> Gpus:
    return Gpus(GPUS, tmp_path)


@pytest.fixture
def cluster(gpus: Gpus) -> Iterator[LocalCluster]:
    with LocalCluster(1, env=gpus.environment) as cluster:
        yield cluster


def states(job: loom.Job) -> dict[str, str]:
    return {uuid: str(device.state) for uuid, device in job.weaver.devices().items()}


def test_eight_processes_have_eight_gpus_and_an_xid_on_one_concerns_one(cluster: LocalCluster, gpus: Gpus) -> None:
    with loom.connect(cluster.url, cluster.token) as job:
        procs = job.hosts.spawn_procs(per_host={"gpus": GPUS}, name="trainers")
        training = procs.spawn("trainers", Trainer).train.call()
        await_true(lambda: len(job.weaver.replicas()) == GPUS)
        owned = {replica.rank: replica.devices for replica in job.weaver.replicas().values()}
        assert owned == {rank: (f"GPU-{rank}",) for rank in range(GPUS)}
        assert states(job) == {f"GPU-{rank}": "active" for rank in range(GPUS)}

        gpus[5].throttled, gpus[5].temperature = 0x40, 92
        gpus[5].report_xid(79)

        await_true(lambda: states(job)["GPU-5"] == "failed")
        assert [uuid for uuid, state in states(job).items() if state != "active"] == ["GPU-5"]
        (event,) = job.weaver.events(kind="device_failed")
        assert event.data["reason"] == "Xid 79: GPU has fallen off the bus"
        assert [one["replica"] for one in event.data["replicas"]] == [f"trainers_5@{job.session}"]

        def status() -> Any:
            return job.weaver.devices()["GPU-5"].status or {}

        await_true(lambda: status().get("xid") == 79)
        assert (status()["temperature"], status()["throttled"]) == (92, ["hw_thermal"])
        asked = urllib.request.Request(cluster.url.replace("ws:", "http:") + "/metrics")
        asked.add_header("Authorization", f"Bearer {cluster.token}")
        with urllib.request.urlopen(asked, timeout=BOUND) as answer:
            page = answer.read().decode()
        assert 'loom_device_state{device="GPU-5",state="failed",user="admin"} 1.0' in page

        job.weaver.stop("*").get(BOUND)
        told = training.get(BOUND)
        assert [failed for failed in told.values() if failed] == [["GPU-5: Xid 79: GPU has fallen off the bus"]]


def test_a_job_leaves_a_gpu_that_has_failed_and_comes_back_only_when_it_is_reactivated(
    cluster: LocalCluster, gpus: Gpus
) -> None:
    for place in range(3, GPUS):  # three are enough for two groups and one that moves
        gpus[place].unlisted = 1
    with loom.connect(cluster.url, cluster.token) as job:
        training = a_job(steps=1_000_000, trainer=OnSimulatedGpus)
        watched = Watched(job, training)
        watched.await_steps()

        def places() -> dict[str, tuple[str, ...]]:
            return {group.replica: group.devices for group in watched.status().groups if group.replica}

        assert places() == {"train_0": ("GPU-0",), "train_1": ("GPU-1",)}
        assert job.weaver.replicas()["train_1"].devices == ("GPU-1",)

        gpus[1].report_xid(95)
        moved = watched.await_event("group_moved")
        assert moved.replica == "train_1"
        assert moved.data["reason"] == "GPU-1: failed, Xid 95: uncontained memory error"
        watched.await_steps()
        assert places() == {"train_0": ("GPU-0",), "train_1": ("GPU-2",)}

        # The third GPU is taken out of use. The only one that is free has failed: the group stays while it lives.
        told = job.weaver.deactivate_device("GPU-2").get(BOUND)
        assert {replica: one.ok for replica, one in told.items()} == {"train_1": True}
        watched.await_true(lambda: any("GPU-2" in event.data["gpus"] for event in watched.events("gpus_refused")))
        watched.kill("train_1")
        watched.await_event("group_retried")
        watched.await_steps(groups=1)
        assert "train_1" not in places()

        job.weaver.reactivate("GPU-1", target=[]).get(BOUND)
        watched.await_steps()
        assert places()["train_1"] == ("GPU-1",)
        watched.stop()


def test_a_second_job_leaves_the_gpus_of_the_first_alone_while_there_are_others(
    cluster: LocalCluster, gpus: Gpus
) -> None:
    for place in range(3, GPUS):
        gpus[place].unlisted = 1

    def places(watched: Watched) -> set[str]:
        return {gpu for group in watched.status().groups if group.replica for gpu in group.devices}

    with loom.connect(cluster.url, cluster.token) as one, loom.connect(cluster.url, cluster.token) as other:
        first = Watched(one, a_job(steps=1_000_000, name="first", trainer=OnSimulatedGpus))
        first.await_steps()
        assert places(first) == {"GPU-0", "GPU-1"}

        second = Watched(other, a_job(steps=1_000_000, groups=1, name="second", trainer=OnSimulatedGpus))
        second.await_steps()
        assert places(second) == {"GPU-2"}
        assert second.events("gpus_shared") == []

        third = Watched(other, a_job(steps=1_000_000, groups=1, name="third", trainer=OnSimulatedGpus))
        third.await_steps()
        (shared,) = third.events("gpus_shared")
        assert list(shared.data["gpus"]) == sorted(places(third)) == ["GPU-0"]
        for watched in (third, second, first):
            watched.stop()
