"""Tensors turned, stacked, split and made like others agree with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from loom.tensors.tensors import Tensors
from tests.support.torch_agreement import Operand, agree, given, of_the_cpu, operands, plain, to_torch


def of(*shape: int, grad: bool = True, low: float = -2.0) -> Operand:
    many = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(many)
    values = low + (2 - low) * (torch.randperm(many, generator=generator).double() + 0.5) / max(many, 1)
    return plain(values.reshape(shape), grad)


FLOAT64 = [torch.float64]


@given(st.data())
def test_turned(lt: Tensors, data: Any) -> None:
    x = data.draw(operands(dtypes=(torch.float64, torch.int64)))
    many, dims = data.draw(st.integers(-1, 4)), data.draw(st.sampled_from([(0, 1), (1, 0), (0, -1), (0, 0), (0,)]))
    agree(lt, lambda ns, x: ns.rot90(x, many, dims), [x])
    agree(lt, lambda ns, x: ns.fliplr(x), [x])
    agree(lt, lambda ns, x: x.flipud(), [x])
    agree(lt, lambda ns, x: (ns.atleast_1d(x), ns.atleast_2d(x), ns.atleast_3d(x)), [x])
    if len(x.size) > 1:
        agree(lt, lambda ns, x: (ns.adjoint(x), x.mH), [x])


@pytest.mark.parametrize("name", ["dstack", "column_stack", "row_stack", "concatenate"])
def test_stacked(lt: Tensors, name: str) -> None:
    for given_ in ([of(3, 4), of(3, 4)], [of(3), of(3)], [of(3, 4), of(3)], [of()], []):
        agree(lt, lambda ns, *ts: getattr(ns, name)(ts), given_)


@pytest.mark.parametrize("indexing", ["ij", "xy", "yx"])
def test_grids(lt: Tensors, indexing: str) -> None:
    for given_ in ([of(3), of(4)], [of(3), of(4), of()], [of(3)], [of(3, 4)], []):
        agree(lt, lambda ns, *ts: ns.meshgrid(*ts, indexing=indexing), given_)
    agree(lt, lambda ns, x, y: ns.broadcast_tensors(x, y), [of(3, 1), of(4)])


@pytest.mark.parametrize("name", ["hsplit", "vsplit", "dsplit"])
@given(operands(dtypes=FLOAT64))
def test_split(lt: Tensors, name: str, x: Operand) -> None:
    agree(lt, lambda ns, x: getattr(ns, name)(x, 2), [x])
    agree(lt, lambda ns, x: getattr(ns, name)(x, [1]), [x])


@given(st.data())
def test_parts_replaced(lt: Tensors, data: Any) -> None:
    x = data.draw(operands((3, 4), FLOAT64))
    part = data.draw(operands(data.draw(st.sampled_from([(3,), (4,), (3, 2), (1, 4)])), FLOAT64))
    agree(lt, lambda ns, x, y: x.select_scatter(y, 1, 2), [x, part], strides=False)
    agree(lt, lambda ns, x, y: ns.slice_scatter(x, y, 1, 0, 4, 2), [x, part], strides=False)
    agree(lt, lambda ns, x, y: x.slice_scatter(y, 0, 1, 2), [x, part], strides=False)
    agree(lt, lambda ns, x, y: x.diagonal_scatter(y, 1), [x, part], strides=False)


def test_taken(lt: Tensors) -> None:
    agree(lt, lambda ns, x, i: ns.take(x, i), [of(3, 4), plain([[1, -2], [5, 5]])])
    agree(lt, lambda ns, x, i: ns.take(x, i), [of(3, 4), plain([[1.0]])])
    agree(lt, lambda ns, x: x.split_with_sizes((1, 3), 1), [of(3, 4)])


def test_made_like_others(lt: Tensors) -> None:
    for x in (of(3, 4), plain([1, 2]), plain([True])):
        agree(
            lt, lambda ns, x: (x.new_zeros(2, 3), x.new_ones((2,)), x.new_full((2, 2), 1), x.new_tensor([1])), [x]
        )
        agree(lt, lambda ns, x: (ns.full_like(x, 1), ns.full_like(x, 2, dtype=torch.float32)), [x])
        agree(lt, lambda ns, x: (x.nelement(), x.ndimension(), x.element_size(), x.itemsize, x.nbytes), [x])
        agree(lt, lambda ns, x: (x.is_floating_point(), x.is_complex(), x.cpu().shape), [x])
    assert (lt.empty_like(lt.zeros(2, 3)).shape, lt.rand_like(lt.zeros(2)).dtype) == ((2, 3), lt.float32)


def test_sequences(lt: Tensors) -> None:
    for work in (
        lambda ns: (ns.linspace(0, 1, 5), ns.linspace(3, -1, 4, dtype=torch.float64), ns.linspace(0, 1, 0)),
        lambda ns: (ns.logspace(0, 2, 3), ns.logspace(0, 2, 3, 2.0)),
        lambda ns: (ns.tril_indices(3, 4), ns.tril_indices(4, 3, -1), ns.tril_indices(2, 3, 2)),
        lambda ns: (ns.triu_indices(3, 4), ns.triu_indices(4, 3, -1), ns.triu_indices(2, 3, 2)),
        lambda ns: ns.linspace(0, 1, -1),
        lambda ns: ns.randint(3, 3, (2,)),
        lambda ns: ns.as_tensor([1, 2]),
    ):
        agree(lt, work, [])


@of_the_cpu
def test_random_numbers_are_torchs(lt: Tensors) -> None:
    def work(ns: Any) -> Any:
        x = ns.zeros(50)
        with ns.no_grad():
            found = [x.normal_(1, 2) * 1, x.uniform_(-1, 1) * 1, x.exponential_(2) * 1]
        return [
            *found,
            ns.randint(2, 9, (20,)),
            ns.randint(9, (20,)),
            ns.randperm(9),
            ns.bernoulli(ns.full((9,), 0.5)),
        ]

    torch.manual_seed(3)
    expected = work(torch)
    lt.seed(3)
    for one, other in zip(expected, work(lt), strict=True):
        torch.testing.assert_close(to_torch(other), one)
