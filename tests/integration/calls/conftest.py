"""One session and processes for the tests of this folder, and counters in them for each test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import loom
from loom_proxy.local import LocalCluster
from tests.conftest import ending_new_meshes
from tests.support.actors import Counter


@pytest.fixture(scope="package")
def shared(cluster: LocalCluster) -> Iterator[loom.Job]:
    """One session on the cluster for those tests that need none of their own."""
    with loom.connect(cluster.url, cluster.token) as connected:
        yield connected


@pytest.fixture(scope="module", autouse=True)
def _end_meshes_of_module(shared: loom.Job, procs: loom.ProcMeshProxy) -> Iterator[None]:
    with ending_new_meshes(shared):
        yield


@pytest.fixture(scope="package")
def procs(shared: loom.Job) -> loom.ProcMeshProxy:
    """Two processes on each of two hosts."""
    return shared.hosts.spawn_procs(per_host={"gpus": 2}, name="procs")


@pytest.fixture
def counters(procs: loom.ProcMeshProxy, tidied: loom.Job) -> Any:
    """Counters in all processes."""
    return procs.spawn("counters", Counter, 10)
