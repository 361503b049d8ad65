"""Products of matrices agree with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from loom.tensors.tensors import Tensors
from tests.support.torch_agreement import (
    DEVICE,
    FLOATS,
    Operand,
    agree,
    agree_with_either_backward,
    broadcastable,
    given,
    operands,
    settled,
)  # fmt: skip

SIZES = st.integers(0, 4)
DTYPES = st.sampled_from([(torch.float32,), (torch.float64,), *[(torch.int64,)] * (DEVICE == "cpu")])
"""On a GPU torch has no products of integers."""


@st.composite
def factors(draw: Any, one: int, other: int, fits: bool | None = None) -> list[Operand]:
    """Draw two operands with so many dimensions, which mostly fit."""
    rows, inner, columns = draw(SIZES), draw(SIZES), draw(SIZES)
    fits = draw(st.integers(0, 9)) > 0 if fits is None else fits
    dtypes = draw(DTYPES)
    lead = tuple(
        draw(st.lists(st.integers(1, 3), min_size=max(one, other, 2) - 2, max_size=max(one, other, 2) - 2))
    )
    left = (rows, inner)[-one:] if one < 3 else (*_batch(draw, lead, one - 2), rows, inner)
    second = inner if fits else inner + 1
    right = (second,) if other == 1 else (*(_batch(draw, lead, other - 2) if other > 2 else ()), second, columns)
    return [draw(operands(left, dtypes)), draw(operands(right, dtypes))]


def _batch(draw: Any, lead: tuple[int, ...], many: int) -> tuple[int, ...]:
    return tuple(1 if draw(st.integers(0, 3)) == 0 else size for size in lead[len(lead) - many :])


@pytest.mark.parametrize("other", [1, 2, 3, 4])
@pytest.mark.parametrize("one", [1, 2, 3, 4])
@given(st.data())
def test_matmul(lt: Tensors, one: int, other: int, data: Any) -> None:
    agree_with_either_backward(lt, lambda ns, x, y: x @ y, data.draw(factors(one, other)))


@pytest.mark.parametrize(("name", "one", "other"), [("mm", 2, 2), ("bmm", 3, 3), ("mv", 2, 1), ("dot", 1, 1)])
@given(st.data())
def test_products_of_given_dimensions(lt: Tensors, name: str, one: int, other: int, data: Any) -> None:
    agree_with_either_backward(lt, lambda ns, x, y: getattr(ns, name)(x, y), data.draw(factors(one, other)))
    wrong = data.draw(factors(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))))
    agree(lt, lambda ns, x, y: getattr(x, name)(y), wrong, second=False)


@pytest.mark.parametrize(("name", "many"), [("addmm", 2), ("baddbmm", 3)])
@given(st.data())
def test_products_added_to_a_tensor(lt: Tensors, name: str, many: int, data: Any) -> None:
    pair = data.draw(factors(many, many, fits=True))
    if many == 3 and pair[0].size[0] != pair[1].size[0]:
        pair[1] = data.draw(operands((pair[0].size[0], *pair[1].size[1:]), (pair[0].memory.dtype,)))
    shape = (*pair[0].size[:-1], pair[1].size[-1])
    given = [data.draw(operands(data.draw(broadcastable(shape)), (pair[0].memory.dtype,))), *pair]
    beta, alpha = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (0, 1)]))
    agree(lt, lambda ns, x, y, z: getattr(ns, name)(x, y, z, beta=beta, alpha=alpha), given)
    wrong = [data.draw(operands((7,), (pair[0].memory.dtype,))), *pair]
    agree(lt, lambda ns, x, y, z: getattr(x, name)(y, z), wrong, second=False)


@pytest.mark.parametrize("bias", [False, True])
@given(st.data())
def test_linear(lt: Tensors, bias: bool, data: Any) -> None:
    dtype = data.draw(st.sampled_from(FLOATS))
    x, weight = data.draw(factors(data.draw(st.integers(1, 4)), 2))
    x = data.draw(operands(x.size, (dtype,)))
    its = data.draw(operands(weight.size[::-1], (dtype,)))
    given = [x, its, *([data.draw(operands(its.size[:1], (dtype,)))] if bias else [])]
    agree_with_either_backward(lt, lambda ns, *each: _functional(ns).linear(*each), given)


def _functional(ns: Any) -> Any:
    return torch.nn.functional if ns is torch else ns


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda lt, x: x @ x, r"mat1 and mat2 shapes cannot be multiplied \(2x3 and 2x3\)"),
        (lambda lt, x: x @ lt.zeros(3, 2, dtype="float64"), "expected m1 and m2 to have the same dtype"),
        (lambda lt, x: x @ lt.zeros(4), r"size mismatch, got input \(2\), mat \(2x3\), vec \(4\)"),
        (lambda lt, x: x @ lt.zeros(()), "both arguments to matmul need to be at least 1D"),
        (lambda lt, x: x.mm(lt.zeros(3)), "mat2 must be a matrix"),
        (lambda lt, x: lt.linear(x, lt.zeros(4, 3), lt.zeros(5)), "The expanded size of the tensor"),
    ],
)
def test_what_torch_would_raise(lt: Tensors, work: Any, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        settled(work(lt, lt.zeros(2, 3)))
