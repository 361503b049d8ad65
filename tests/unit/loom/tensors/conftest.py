"""Lazy tensors of this process."""

import pytest
from hypothesis import HealthCheck, settings

from loom.tensors import methods
from loom.tensors.tensors import Tensors
from tests.support.near_tensors import near_tensors

methods.put()
settings.register_profile(
    "tensors",
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("tensors")


@pytest.fixture(scope="session")
def lt() -> Tensors:
    return near_tensors()
