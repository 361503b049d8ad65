"""What the tests with Slurm share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.support.processes import still_there
from tests.support.slurm import SlurmCluster

SHOWN = 6000
"""Characters of a log that a failed test shows."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Three nodes, a login node and a laptop."""
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def nothing_left(cluster: SlurmCluster) -> Iterator[None]:
    """Fail the test that leaves a process on a node. Its jobs and its files are not for the next test."""
    yield
    cluster.cancel_all()
    processes = [process for number in range(1, len(cluster.nodes) + 1) for process in cluster.processes(number)]
    left = still_there(processes, 10.0)
    folder = cluster.homes / "ada" / ".loom"
    for log in sorted(folder.glob("slurm/**/*.log")):
        print(f"==> {log.relative_to(folder)} <==\n{log.read_text()[-SHOWN:]}")
    shutil.rmtree(folder, ignore_errors=True)
    assert left == []
