"""Statistics, products and distances agree with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from loom.tensors.tensors import Tensors
from tests.support.torch_agreement import Operand, agree, broadcastable, given, operands, plain, shapes

FLOAT64 = [torch.float64]
KINDS = (torch.float64, torch.float64, torch.float32, torch.int64, torch.bool)
dims = st.integers(-3, 2)


def of(*shape: int, grad: bool = True, low: float = -2.0) -> Operand:
    many = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(many)
    values = low + (2 - low) * (torch.randperm(many, generator=generator).double() + 0.5) / max(many, 1)
    return plain(values.reshape(shape), grad)


@given(st.data())
def test_along_a_dimension(lt: Tensors, data: Any) -> None:
    x, dim = data.draw(operands(dtypes=KINDS)), data.draw(dims)
    agree(lt, lambda ns, x: tuple(ns.cummax(x, dim)), [x])
    agree(lt, lambda ns, x: tuple(x.cummin(dim)), [x])
    agree(lt, lambda ns, x: ns.nansum(x, dim), [x])
    agree(lt, lambda ns, x: ns.nanmean(x, dim, True), [x])


@given(st.data())
def test_differences(lt: Tensors, data: Any) -> None:
    x, dim, many = data.draw(operands(dtypes=KINDS)), data.draw(dims), data.draw(st.integers(0, 5))
    agree(lt, lambda ns, x: ns.diff(x, many, dim), [x])
    agree(lt, lambda ns, x: ns.diff(x, prepend=x, append=x), [x])


@given(st.data())
def test_integrals(lt: Tensors, data: Any) -> None:
    shape = data.draw(shapes(1, 3, 4, 1))
    x, dim = data.draw(operands(shape, FLOAT64)), data.draw(st.integers(0, len(shape) - 1))
    steps = data.draw(operands((shape[dim],), FLOAT64))
    agree(lt, lambda ns, x, s: ns.trapezoid(x, dx=0.5, dim=dim), [x, steps])
    agree(lt, lambda ns, x, s: ns.trapz(x, s, dim=dim), [x, steps])
    agree(lt, lambda ns, x, s: ns.cumulative_trapezoid(x, s, dim=dim), [x, steps])


@given(st.data())
def test_the_kth_value(lt: Tensors, data: Any) -> None:
    x, dim = data.draw(operands(dtypes=(torch.float64, torch.int64))), data.draw(dims)
    many, keepdim = data.draw(st.integers(0, 4)), data.draw(st.booleans())
    if x.memory.dtype is torch.float64:
        agree(lt, lambda ns, x: tuple(ns.kthvalue(x, many, dim, keepdim)), [x])
    agree(lt, lambda ns, x: ns.kthvalue(x, many, dim, keepdim)[0], [x])
    agree(lt, lambda ns, x: ns.msort(x), [x])


@given(st.data())
def test_quantiles(lt: Tensors, data: Any) -> None:
    x = data.draw(operands(data.draw(shapes(1, 3, 4, 1)), [torch.float64, torch.float32]))
    dim, keepdim = data.draw(st.sampled_from([None, 0, -1])), data.draw(st.booleans())
    share = data.draw(st.sampled_from([0.0, 0.2, 0.5, 1.0]))
    how = data.draw(st.sampled_from(["linear", "linear", "lower", "higher", "midpoint", "nearest", "middle"]))
    shares = plain(torch.tensor([0.3, 0.0, 0.9], dtype=x.memory.dtype))
    agree(lt, lambda ns, x: ns.quantile(x, share, dim, keepdim, interpolation=how), [x])
    agree(lt, lambda ns, x, q: x.quantile(q, dim, keepdim), [x, shares])


def test_quantiles_of_what_is_no_number(lt: Tensors) -> None:
    agree(lt, lambda ns, x: ns.quantile(x, 0.5, dim=0), [plain([[1.0, float("nan")], [2.0, 3.0]])])


@given(st.data())
def test_extremes_and_covariances(lt: Tensors, data: Any) -> None:
    x = data.draw(operands(data.draw(shapes(1, 2, 5, 2)), FLOAT64))
    agree(lt, lambda ns, x: tuple(ns.aminmax(x)), [x])
    agree(lt, lambda ns, x: tuple(ns.aminmax(x, dim=-1, keepdim=True)), [x])
    agree(lt, lambda ns, x: (ns.cov(x), ns.cov(x, correction=0)), [x])


@pytest.mark.parametrize("x", [of(3, 4), of(4)])
def test_correlations(lt: Tensors, x: Operand) -> None:
    agree(lt, lambda ns, x: ns.corrcoef(x), [x])


@given(st.data())
def test_counts_and_places(lt: Tensors, data: Any) -> None:
    numbers = data.draw(operands(data.draw(shapes(1, 1, 6)), [torch.int64], low=0))
    weights = data.draw(operands(numbers.size, FLOAT64, grad=False))
    agree(lt, lambda ns, x, w: (ns.bincount(x), ns.bincount(x, w), ns.bincount(x, minlength=5)), [numbers, weights])
    x, edges = data.draw(operands(dtypes=FLOAT64, grad=False, views=False)), of(5, grad=False)
    right, small = data.draw(st.booleans()), data.draw(st.booleans())
    agree(lt, lambda ns, x, e: ns.bucketize(x, e.sort().values, right=right, out_int32=small), [x, edges])
    agree(lt, lambda ns, x, e: ns.searchsorted(e.sort().values, x, right=right), [x, edges])


PRODUCTS: list[tuple[Any, list[Operand]]] = [
    (lambda ns, x, y: ns.inner(x, y), [of(3, 4), of(4)]),
    (lambda ns, x, y: ns.inner(x, y), [of(2, 3, 4), of(5, 4)]),
    (lambda ns, x, y: ns.inner(x, y), [of(3, 4), of(3)]),
    (lambda ns, x, y: ns.inner(x, y), [of(4), of(4)]),
    (lambda ns, x, y: ns.inner(x, y), [of(3, 4), of()]),
    (lambda ns, x, y: ns.vdot(x, y), [of(4), of(4)]),
    (lambda ns, x, y: ns.ger(x, y), [of(3), of(4)]),
    (lambda ns, x, m, v: ns.addmv(x, m, v, beta=0.5, alpha=2), [of(3), of(3, 4), of(4)]),
    (lambda ns, x, m, v: ns.addmv(x, m, v), [of(5), of(3, 4), of(4)]),
    (lambda ns, x, v, w: ns.addr(x, v, w, alpha=2), [of(3, 4), of(3), of(4)]),
    (lambda ns, x, a, b: ns.addbmm(x, a, b), [of(4, 4), of(2, 4, 3), of(2, 3, 4)]),
    (lambda ns, x, y: ns.kron(x, y), [of(3, 4), of(2, 2)]),
    (lambda ns, x, y: ns.kron(x, y), [of(2, 1, 2), of(3)]),
    (lambda ns, x, y: ns.cross(x, y, dim=-1), [of(2, 3), of(2, 3)]),
    (lambda ns, x, y: ns.cross(x, y, dim=0), [of(3, 2), of(3, 1)]),
    (lambda ns, x, y: ns.cross(x, y, dim=1), [of(3, 4), of(3, 4)]),
    (lambda ns, x, y: ns.cross(x, y, dim=0), [of(3, 4), of(3)]),
    (lambda ns, x: ns.trace(x), [of(3, 4)]),
    (lambda ns, x: ns.trace(x), [of(3)]),
    (lambda ns, x: ns.trace(x), [plain([[1, 2], [3, 4]])]),
    (lambda ns, x: (ns.diag(x), ns.diag(x, 1), ns.diag(x, -2)), [of(3, 4)]),
    (lambda ns, x: (ns.diag(x), ns.diag(x, 1), ns.diagflat(x, -1)), [of(3)]),
    (lambda ns, x: ns.diag(x), [of(2, 2, 2)]),
    (lambda ns, x, y, z: ns.block_diag(x, y, z), [of(2, 3), of(2), of()]),
    (lambda ns, x, y: ns.cdist(x, y), [of(2, 3), of(3, 3)]),
    (lambda ns, x, y: ns.cdist(x, y, 1.0), [of(2, 2, 3), of(4, 3)]),
    (lambda ns, x, y: ns.cdist(x, y), [of(2, 3), of(3, 2)]),
    (lambda ns, x, y: ns.dist(x, y, 3), [of(2, 3), of(3)]),
    (lambda ns, x: ns.nn.functional.normalize(x, dim=0), [of(3, 4)]),
    (lambda ns, x: ns.nn.functional.normalize(x, 1.0), [of(3, 4)]),
    (lambda ns, x: ns.nn.functional.normalize(x), [plain([[1, 2], [3, 4]])]),
    (lambda ns, x, y: ns.nn.functional.pairwise_distance(x, y), [of(3, 4), of(4)]),
]


@pytest.mark.parametrize(("work", "operands"), PRODUCTS)
def test_products_and_distances(lt: Tensors, work: Any, operands: list[Operand]) -> None:
    agree(lt, work, operands, second=work.__code__.co_names[0] != "cdist")


@given(st.data())
def test_cosines(lt: Tensors, data: Any) -> None:
    shape, dim = data.draw(shapes(2, 3, 3, 1)), data.draw(st.sampled_from([0, 1, -1]))
    x = data.draw(operands(shape, FLOAT64, low=0.1))
    y = data.draw(operands(data.draw(broadcastable(shape)), FLOAT64, low=0.1))
    agree(lt, lambda ns, x, y: ns.nn.functional.cosine_similarity(x, y, dim), [x, y])


SIGNS = [plain(torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64))]
PROBABILITIES = of(3, 4, grad=False, low=0.0)
COUNTS = plain(torch.arange(12.0, dtype=torch.float64).reshape(3, 4))
LOSSES: list[tuple[str, list[Operand], dict[str, Any]]] = [
    ("margin_ranking_loss", [of(3), of(3, low=-1), *SIGNS], {"margin": 0.1}),
    ("hinge_embedding_loss", [of(3), *SIGNS], {}),
    ("cosine_embedding_loss", [of(3, 4), of(3, 4, low=-1), *SIGNS], {"margin": 0.1}),
    ("triplet_margin_loss", [of(3, 4), of(3, 4, low=-1), of(3, 4, low=0)], {}),
    ("triplet_margin_loss", [of(3, 4), of(3, 4, low=-1), of(3, 4, low=0)], {"swap": True, "p": 1.0}),
    ("soft_margin_loss", [of(3), *SIGNS], {}),
    ("multilabel_soft_margin_loss", [of(3, 4), PROBABILITIES], {}),
    ("poisson_nll_loss", [of(3, 4), COUNTS], {"full": True}),
    ("poisson_nll_loss", [of(3, 4, low=0.1), COUNTS], {"log_input": False}),
    ("gaussian_nll_loss", [of(3, 4), COUNTS, of(3, 4, low=0.1)], {"full": True}),
    ("gaussian_nll_loss", [of(3, 4), COUNTS, of(3, low=0.1)], {}),
]


@pytest.mark.parametrize("reduction", ["none", "mean", "sum", "most"])
@pytest.mark.parametrize(("name", "operands", "options"), LOSSES)
def test_losses(lt: Tensors, name: str, operands: list[Operand], options: dict[str, Any], reduction: str) -> None:
    agree(lt, lambda ns, *given: getattr(ns.nn.functional, name)(*given, **options, reduction=reduction), operands)
