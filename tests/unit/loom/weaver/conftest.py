"""What several modules of this folder use."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.unit.loom.weaver.bench import Bench
from tests.unit.loom.weaver.raw_threadlet import WeaverProcess, running_weaver


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def weaver() -> Iterator[WeaverProcess]:
    with running_weaver() as running:
        yield running


@pytest.fixture
def began() -> float:
    """When training began: less than an hour ago, because what is older is made coarser."""
    return float(int(time.time()) - 3000)
