"""Named meshes: an allocation whose nodes are not alike, as a heterogeneous job of Slurm."""

from __future__ import annotations

import json
import sys

import pytest

from tests.support.needs import skipped_if
from tests.support.slurm import SlurmCluster, missing
from tests.system.slurm.researcher import PROGRAMS, loom, up

pytestmark = [skipped_if(missing()), pytest.mark.slow, pytest.mark.timeout(500)]

PLACES = {"trainers": [["n1", "0,1"], ["n2", "0,1"]], "generators": [["n3", None]], "hosts": 3}


def places(cluster: SlurmCluster, *arguments: str) -> object:
    done = cluster.login([sys.executable, str(PROGRAMS / "meshes.py"), *arguments], timeout=300.0)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_a_program_has_its_meshes_as_long_as_its_block(cluster: SlurmCluster) -> None:
    assert places(cluster) == PLACES
    assert cluster.jobs() == []


def test_an_allocation_has_its_meshes_also_after_a_requeue(cluster: SlurmCluster) -> None:
    meshes = ("--mesh", "trainers:nodes=2,gpus-per-node=2", "--mesh", "generators:nodes=1")
    address = up(cluster, *meshes, "--name", "mine")
    (listed,) = json.loads(loom(cluster, "slurm", "list", "--json").stdout)["allocations"]
    assert listed["job"]["nodes"] == "n[1-2],n3"
    assert places(cluster, address) == PLACES

    gateway = cluster.homes / "ada" / ".loom" / "slurm" / "mine" / "gateway.json"
    cluster.login(["scontrol", "requeue", str(listed["job"]["id"])]).check_returncode()
    cluster.wait(
        "a second start", lambda: gateway.exists() and json.loads(gateway.read_text())["restart"] == 1, 120.0
    )
    assert places(cluster, address) == PLACES

    assert loom(cluster, "slurm", "down", "mine").returncode == 0
    assert cluster.jobs() == []
