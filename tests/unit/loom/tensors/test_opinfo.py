"""torch's own database of operations agrees with lazy tensors."""

from __future__ import annotations

import pytest
import torch

from loom.tensors.tensors import Tensors
from tests.support.near_tensors import near_tensors
from tests.support.torch_agreement import PROCESSES

pytest.importorskip("expecttest", reason="torch's database of operations needs it")

from tests.support.opinfo import DTYPES, check, entries, lazy

pytestmark = [
    pytest.mark.skipif(PROCESSES > 1, reason="the database has operands of every layout, which are not spread"),
    pytest.mark.filterwarnings("ignore"),
]

OPERATIONS = entries()
EACH = 8
"""Of so many operations one is compared with each commit; .ci/slow compares all."""


@pytest.fixture(scope="module")
def own() -> Tensors:
    return near_tensors()


def agrees(own: Tensors, place: int, most: int) -> None:
    op = OPERATIONS[place]
    if lazy(own, op.name) is None:
        pytest.skip(f"lazy tensors have no {op.name}")
    problems = [
        found
        for dtype in DTYPES
        if dtype in op.supported_dtypes("cpu") and (found := check(own, op, dtype, most)).problem
    ]
    assert not problems


@pytest.mark.parametrize(
    "place", range(0, len(OPERATIONS), EACH), ids=lambda place: OPERATIONS[place].formatted_name
)
def test_some_operations_agree(own: Tensors, place: int) -> None:
    agrees(own, place, 2)


@pytest.mark.slow
@pytest.mark.parametrize("place", range(len(OPERATIONS)), ids=lambda place: OPERATIONS[place].formatted_name)
def test_all_operations_agree(own: Tensors, place: int) -> None:
    agrees(own, place, 30)


def test_most_of_the_database_is_there(own: Tensors) -> None:
    missing = sorted({op.name for op in OPERATIONS if lazy(own, op.name) is None})
    assert len(missing) < 60, missing
    assert torch.__version__
