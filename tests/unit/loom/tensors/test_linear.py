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


@given(st.data())
def test_outer(lt: Tensors, data: Any) -> None:
    pair = [data.draw(operands((data.draw(SIZES),))) for _ in range(2)]
    agree(lt, lambda ns, x, y: ns.outer(x, y), pair)
    agree(lt, lambda ns, x, y: y.outer(x), [data.draw(operands()), pair[0]], second=False)


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


EQUATIONS = [
    "ij,jk->ik", "ij,jk", "bij,bjk->bik", "ij,kj->ki", "i,j->ij", "ij,ij->", "ij,ij->ij", "ij,j->i", "abc,cd->abd",
    "abc,abd->dcab", "ab,cd->dabc", "abc,bd->ad", "...ij,...jk->...ik", "...i,i->...", "i...,...j->ij...", "ij->ji",
    "ij->", "ij->j", "ii->i", "ii", "iij->ji", "ii,i->i", "a,ab,b->", "ab,bc,cd->ad", "ab,bc,ac->abc", "...",
    "aB,Bc",
]  # fmt: skip


@pytest.mark.parametrize("equation", EQUATIONS)
@given(st.data())
def test_einsum(lt: Tensors, equation: str, data: Any) -> None:
    sizes = {each: data.draw(st.integers(0, 3)) for each in "abcdijkB"}
    hidden = data.draw(st.lists(st.integers(1, 3), max_size=2))
    dtype = data.draw(st.sampled_from(FLOATS))
    given = []
    for part in equation.split("->")[0].split(","):
        before, dots, after = part.partition("...")
        middle = hidden[data.draw(st.integers(0, len(hidden))) :] if dots else []
        shape = [*(sizes[each] for each in before), *middle, *(sizes[each] for each in after)]
        repeated = len(set(before + after)) < len(before + after)
        if shape and not repeated and data.draw(st.integers(0, 5)) == 0:
            shape[data.draw(st.integers(0, len(shape) - 1))] = data.draw(st.sampled_from([1, 4]))
        given.append(data.draw(operands(tuple(shape), (dtype,))))
    # Of three tensors, the strides depend on the order of the products.
    agree(lt, lambda ns, *each: ns.einsum(equation, *each), given, strides=len(given) < 3)


@pytest.mark.parametrize("dims", [0, 1, 2, ([0], [1]), ([0, 1], [1, 0]), ([-1], [-1])])
@given(st.data())
def test_tensordot(lt: Tensors, dims: Any, data: Any) -> None:
    sizes = [data.draw(st.integers(1, 3)) for _ in range(5)]
    one = sizes[:3]
    two = [sizes[3], sizes[4]]
    match dims:
        case 0:
            other = two
        case 1:
            other = [one[2], *two]
        case 2:
            other = [*one[1:], sizes[3]]
        case ([0], [1]):
            other = [sizes[3], one[0]]
        case ([0, 1], [1, 0]):
            other = [one[1], one[0], sizes[3]]
        case _:
            other = [*two, one[2]]
    dtype = data.draw(st.sampled_from(FLOATS))
    given = [data.draw(operands(tuple(each), (dtype,))) for each in (one, other)]
    agree(lt, lambda ns, x, y: ns.tensordot(x, y, dims=dims), given, strides=False)  # without a sum, of `einsum`


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda lt, x: x @ x, r"mat1 and mat2 shapes cannot be multiplied \(2x3 and 2x3\)"),
        (lambda lt, x: x @ lt.zeros(3, 2, dtype="float64"), "expected m1 and m2 to have the same dtype"),
        (lambda lt, x: x @ lt.zeros(4), r"size mismatch, got input \(2\), mat \(2x3\), vec \(4\)"),
        (lambda lt, x: x @ lt.zeros(()), "both arguments to matmul need to be at least 1D"),
        (lambda lt, x: x.mm(lt.zeros(3)), "mat2 must be a matrix"),
        (lambda lt, x: lt.einsum("ij,jk", x, x), "does not broadcast with previously seen size 3"),
        (lambda lt, x: lt.einsum("ij->k", x), "output subscript k does not appear"),
        (lambda lt, x: lt.einsum("ij->ii", x), "output subscript i appears more than once"),
        (lambda lt, x: lt.einsum("ijk", x), r"does not match the number of dimensions \(2\) for operand 0"),
        (lambda lt, x: lt.einsum("ij", x, x), "more operands were provided"),
        (lambda lt, x: lt.einsum("ij,jk", x), "fewer operands were provided"),
        (lambda lt, x: lt.einsum("ii", x), "subscript i is repeated for operand 0 but the sizes don't match"),
        (lambda lt, x: lt.linear(x, lt.zeros(4, 3), lt.zeros(5)), "The expanded size of the tensor"),
        (lambda lt, x: x.tensordot(x, 1), "contracted dimensions need to match"),
    ],
)
def test_what_torch_would_raise(lt: Tensors, work: Any, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        settled(work(lt, lt.zeros(2, 3)))
