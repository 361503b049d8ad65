"""Processes for the tests of a module, and counters in them for each test."""

from __future__ import annotations

from typing import Any

import pytest

import loom
from tests.support.actors import Counter


@pytest.fixture(scope="module")
def procs(shared: loom.Job) -> loom.ProcMeshProxy:
    """Two processes on each of two hosts."""
    return shared.hosts.spawn_procs(per_host={"gpus": 2}, name="procs")


@pytest.fixture
def counters(procs: loom.ProcMeshProxy, tidied: loom.Job) -> Any:
    """Counters in all processes."""
    return procs.spawn("counters", Counter, 10)
