"""What several modules of this folder use."""

from __future__ import annotations

import pytest

from tests.unit.loom.weaver.bench import Bench


@pytest.fixture
def bench() -> Bench:
    return Bench()
