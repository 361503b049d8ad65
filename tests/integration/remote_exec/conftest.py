"""Processes on the shared cluster, reached through a line that can be cut."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

import loom
from loom_proxy.local import LocalCluster
from loom_proxy.mesh.procs import ProcMeshProxy
from tests.support.network.gate import Gate


@pytest.fixture(scope="package")
def gate(cluster: LocalCluster) -> Iterator[Gate]:
    port = urlsplit(cluster.url).port
    assert port is not None
    with Gate(port) as opened:
        yield opened


@pytest.fixture(scope="package")
def far(gate: Gate, cluster: LocalCluster) -> Iterator[loom.Job]:
    """A session behind the gate."""
    with loom.connect(f"ws://127.0.0.1:{gate.port}", cluster.token) as job:
        job.print_logs = False
        yield job


@pytest.fixture(scope="package")
def trainers(far: loom.Job) -> ProcMeshProxy:
    """Two processes, on two hosts."""
    procs = far.hosts.spawn_procs(name="trainers")
    procs.initialized.get(60)
    return procs
