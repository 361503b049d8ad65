"""Devices are taken out of use and put back, by name or by group, from Python, the command line and REST."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import loom
from loom.rest_client import Gateway
from loom_proxy.local import LocalCluster
from tests.support.gateways import await_true
from tests.support.nvml import Gpus

LOOM = "from loom.cli import main; main()"
BOUND = 60.0


class Trainer(loom.Actor):
    """Trains until it should stop, and returns what it heard of its device."""

    @loom.endpoint
    def train(self) -> list[tuple[str, bool]]:
        heard: list[tuple[str, bool]] = []
        number = 0
        with loom.Threadlet() as threadlet:
            threadlet.on_device_change(lambda device, usable: heard.append((device, usable)))
            while not threadlet.should_stop:
                number += 1
                with threadlet.step(number):
                    time.sleep(0.02)
        return heard


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(1, env=Gpus(3, tmp_path).environment) as cluster:
        yield cluster


def states(job: loom.Job) -> dict[str, str]:
    return {uuid: str(device.state) for uuid, device in job.weaver.devices().items()}


@pytest.mark.slow
def test_devices_leave_and_come_back_by_name_and_by_group(cluster: LocalCluster) -> None:
    def cli(*words: str) -> tuple[int, Any, str]:
        """Run a command of the command line; return its exit code, its JSON, and what it says of errors."""
        environment = {**os.environ, "LOOM_URL": cluster.url, "LOOM_TOKEN": str(cluster.token)}
        command = [sys.executable, "-c", LOOM, *words, "--json"]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=BOUND)
        return ended.returncode, json.loads(ended.stdout) if ended.returncode == 0 else None, ended.stderr

    with loom.connect(cluster.url, cluster.token) as job:
        two = job.hosts.spawn_procs(per_host={"gpus": 2}, name="two").spawn("trainers", Trainer)
        training = two.train.call()
        await_true(lambda: [one.state for one in job.weaver.replicas().values()] == ["running"] * 2)
        replicas = {f"two_{rank}@{job.session}" for rank in range(2)}
        assert {one.devices for one in job.weaver.replicas().values()} == {("GPU-0",), ("GPU-1",)}

        told = job.weaver.deactivate(group="two").get(BOUND)
        assert {replica for replica, one in told.items() if one.ok} == replicas
        assert states(job) == {"GPU-0": "inactive", "GPU-1": "inactive"}

        code, answer, _ = cli("reactivate", "--device", "GPU-0")
        assert (code, list(answer["outcomes"])) == (0, [f"two_0@{job.session}"])
        assert states(job) == {"GPU-0": "active", "GPU-1": "inactive"}
        assert cli("reactivate", "--group", "two")[0] == 0
        assert states(job) == {"GPU-0": "active", "GPU-1": "active"}
        assert cli("deactivate", "--device", "GPU-1")[0] == 0
        assert [one["uuid"] for one in cli("status")[1]["devices"] if one["state"] == "inactive"] == ["GPU-1"]

        params = {"group": f"two_1@{job.session}"}
        Gateway(cluster.url, cluster.token).ask("command", kind="reactivate", params=params, wait=BOUND)
        assert states(job)["GPU-1"] == "active"

        code, _, error = cli("deactivate")
        assert code != 0
        assert "give the uuid of a device or the name of a group, and not both" in error
        code, _, error = cli("deactivate", "--group", "tow")
        assert code != 0
        assert "no replica of a group 'tow' lives on a device; groups: two" in error
        with pytest.raises(loom.UnknownDevice, match="no device of a group 'two' is out of use"):
            job.weaver.reactivate(group="two")
        with pytest.raises(loom.WrongArguments, match="and not both"):
            job.weaver.deactivate("GPU-0", "two")

        job.weaver.stop("two").get(BOUND)
        heard = list(training.get(BOUND).values())
        assert heard == [
            [("GPU-0", False), ("GPU-0", True)],
            [("GPU-1", False), ("GPU-1", True), ("GPU-1", False), ("GPU-1", True)],
        ]
