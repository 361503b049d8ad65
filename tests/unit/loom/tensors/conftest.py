"""Lazy tensors of this process."""

import pytest

from loom.tensors import methods
from loom.tensors.tensors import Tensors
from tests.support.near_tensors import near_tensors

methods.put()


@pytest.fixture(scope="session")
def lt() -> Tensors:
    return near_tensors()
