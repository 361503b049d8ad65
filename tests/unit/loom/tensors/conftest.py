"""Lazy tensors of this process, or of several if LOOM_PROCESSES says so."""

from collections.abc import Iterator

import pytest

from loom.tensors.tensors import Tensors
from tests.support.near_tensors import NearWorkers, near_tensors
from tests.support.torch_agreement import PROCESSES


@pytest.fixture(scope="session")
def lt() -> Iterator[Tensors]:
    if PROCESSES == 1:
        yield near_tensors()
        return
    with NearWorkers({"gpus": PROCESSES}) as workers:
        yield Tensors(workers)
