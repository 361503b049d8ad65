"""Reductions, softmax and orders agree with torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from loom.tensors.tensors import Tensors
from tests.support.torch_agreement import (
    ALL,
    FLOATS,
    INTS,
    agree,
    agree_with_either_backward,
    broadcastable,
    given,
    of_the_cpu,
    operands,
    settled,
    shapes,
)  # fmt: skip

EVERY = (*FLOATS, *INTS, torch.bool)


@st.composite
def dims_of(draw: Any, shape: tuple[int, ...], several: bool = True) -> Any:
    """Draw dimensions of a shape, sometimes one that it has not."""
    many = max(len(shape), 1)
    one = st.integers(-many, many - 1)
    if draw(st.integers(0, 19)) == 0:
        return draw(st.sampled_from([many, -many - 1]))
    if not several or draw(st.booleans()):
        return draw(one)
    return draw(st.lists(one, min_size=1, max_size=many, unique_by=lambda each: each % many))


SEVERAL: dict[str, Callable[..., Any]] = {
    "sum": lambda ns, x, dim, keep: ns.sum(x, dim, keep),
    "sum to a dtype": lambda ns, x, dim, keep: x.sum(dim, keepdim=keep, dtype=torch.float64),
    "mean": lambda ns, x, dim, keep: x.mean(dim, keep),
    "mean of a dtype": lambda ns, x, dim, keep: x.mean(dim, keep, dtype=torch.float64),
    "amax": lambda ns, x, dim, keep: x.amax(dim, keep),
    "amin": lambda ns, x, dim, keep: ns.amin(x, dim, keepdim=keep),
    "any": lambda ns, x, dim, keep: x.any(dim, keep),
    "all": lambda ns, x, dim, keep: ns.all(x, dim, keepdim=keep),
    "logsumexp": lambda ns, x, dim, keep: x.logsumexp(dim, keep),
}
ONE: dict[str, Callable[..., Any]] = {
    "prod": lambda ns, x, dim, keep: x.prod(dim, keep),
    "argmax": lambda ns, x, dim, keep: x.argmax(dim, keep),
    "argmin": lambda ns, x, dim, keep: ns.argmin(x, dim, keep),
    "max": lambda ns, x, dim, keep: x.max(dim, keep),
    "min": lambda ns, x, dim, keep: tuple(ns.min(x, dim, keepdim=keep)),
    "sort": lambda ns, x, dim, keep: x.sort(dim, descending=keep),
    "stable sort": lambda ns, x, dim, keep: ns.sort(x, stable=True, dim=dim, descending=keep),
    "argsort": lambda ns, x, dim, keep: x.argsort(dim, keep),
    "topk": lambda ns, x, dim, keep: x.topk(1, dim, largest=keep),
    "topk of three": lambda ns, x, dim, keep: ns.topk(x, 3, dim),
    "cumsum": lambda ns, x, dim, keep: x.cumsum(dim),
    "cumsum to a dtype": lambda ns, x, dim, keep: ns.cumsum(x, dim, dtype=torch.float64),
    "softmax": lambda ns, x, dim, keep: ns.softmax(x, dim),
    "softmax to a dtype": lambda ns, x, dim, keep: x.softmax(dim, dtype=torch.float64),
    "log_softmax": lambda ns, x, dim, keep: x.log_softmax(dim),
}
FLOATING = {"logsumexp", "softmax", "log_softmax", "softmax to a dtype"}
UNSTABLE = {"argsort", "topk of three"}


@pytest.mark.parametrize("name", SEVERAL)
@given(st.data())
def test_over_dimensions(lt: Tensors, name: str, data: Any) -> None:
    work = SEVERAL[name]
    x = data.draw(operands(dtypes=FLOATS if name in FLOATING else EVERY))
    dim, keep = data.draw(dims_of(x.size)), data.draw(st.booleans())
    agree_with_either_backward(lt, lambda ns, x: work(ns, x, dim, keep), [x])


@pytest.mark.parametrize("name", [pytest.param(name, marks=[of_the_cpu] * (name in UNSTABLE)) for name in ONE])
@given(st.data())
def test_along_a_dimension(lt: Tensors, name: str, data: Any) -> None:
    work = ONE[name]
    x = data.draw(operands(dtypes=FLOATS if name in FLOATING else (*FLOATS, *INTS)))
    dim, keep = data.draw(dims_of(x.size, several=False)), data.draw(st.booleans())
    agree_with_either_backward(lt, lambda ns, x: work(ns, x, dim, keep), [x])


@pytest.mark.parametrize(
    "work",
    [
        lambda ns, x: ns.sum(x), lambda ns, x: x.mean(), lambda ns, x: x.prod(), lambda ns, x: ns.max(x),
        lambda ns, x: x.min(), lambda ns, x: x.amax(), lambda ns, x: x.argmax(),
        lambda ns, x: x.argmin(keepdim=True), lambda ns, x: x.any(), lambda ns, x: ns.all(x),
        lambda ns, x: x.sum(()), lambda ns, x: x.sum(dtype=torch.float32),
    ],
)  # fmt: skip
@given(operands(dtypes=(*FLOATS, *INTS)))
def test_of_all_elements(lt: Tensors, work: Any, x: Any) -> None:
    agree_with_either_backward(lt, work, [x])


@pytest.mark.parametrize("name", ["var", "std"])
@given(st.data())
def test_variances(lt: Tensors, name: str, data: Any) -> None:
    # No two elements are equal, as the gradient of a deviation of 0 is not defined.
    x = data.draw(operands(data.draw(shapes(least=1, smallest=2))))
    x = x if 0 not in x.stride else data.draw(operands(x.size, views=False))
    dim, keep = data.draw(st.one_of(st.none(), dims_of(x.size))), data.draw(st.booleans())
    correction = data.draw(st.sampled_from([0, 1, 0.5]))
    agree_with_either_backward(
        lt, lambda ns, x: getattr(ns, name)(x, dim=dim, correction=correction, keepdim=keep), [x]
    )
    agree(lt, lambda ns, x: getattr(ns, name)(x, 0, True, keep), [x])
    agree(lt, lambda ns, x: getattr(ns, name)(x, unbiased=False), [x])


@pytest.mark.parametrize("p", [0, 1, 2, 3, 1.5, float("inf"), -float("inf"), "fro"])
@given(st.data())
def test_norms(lt: Tensors, p: Any, data: Any) -> None:
    low, high = data.draw(st.sampled_from([(0.1, 3), (-3, -0.1)]))  # of 0, second derivatives are not defined
    x = data.draw(operands(data.draw(shapes(smallest=1)), low=low, high=high))
    dim, keep = data.draw(st.one_of(st.none(), dims_of(x.size))), data.draw(st.booleans())
    agree_with_either_backward(lt, lambda ns, x: ns.norm(x, p, dim, keep), [x])


@given(st.data())
def test_of_two_tensors(lt: Tensors, data: Any) -> None:
    shape = data.draw(shapes())
    pair = [data.draw(operands(data.draw(broadcastable(shape)), FLOATS)) for _ in range(2)]
    agree(lt, lambda ns, x, y: (ns.max(x, y), x.min(y)), pair)


@given(operands((2, 3), dtypes=ALL))
def test_dtypes(lt: Tensors, x: Any) -> None:
    near = 1e-2 if x.memory.dtype.itemsize == 2 else None
    for work in (
        lambda ns, x: (x.sum(), x.sum(0), x.any(1), x.all(), x.cumsum(0)),
        lambda ns, x: x.mean(1),
        lambda ns, x: x.softmax(-1),
        lambda ns, x: x.std(0),
        lambda ns, x: x.norm(),
        lambda ns, x: x.logsumexp(0),
    ):
        agree(lt, work, [x], rtol=near, atol=near, second=near is None)


@pytest.mark.parametrize(
    ("work", "error", "words"),
    [
        (lambda x: x.sum((0, 0)), RuntimeError, "dim 0 appears multiple times in the list of dims"),
        (lambda x: x.sum(2), IndexError, r"expected to be in range of \[-2, 1\], but got 2"),
        (lambda x: x.to("int64").mean(), RuntimeError, r"mean\(\): could not infer output dtype"),
        (lambda x: x.to("bool").mean(5), RuntimeError, r"mean\(\): could not infer output dtype"),
        (lambda x: x.to("int64").var(), RuntimeError, "std and var only support floating point"),
        (lambda x: x.to("int64").softmax(0), NotImplementedError, "not implemented for 'Long'"),
        (lambda x: x.to("int64").norm(), RuntimeError, "Expected a floating point or complex tensor"),
        (lambda x: x.topk(4), RuntimeError, "selected index k out of range"),
        (lambda x: x.reshape(3, 2)[:0].max(), RuntimeError, r"max\(\): Expected reduction dim to be specified"),
        (lambda x: x.reshape(3, 2)[:0].amax(0), IndexError, "reduction dim 0 to have non-zero size"),
        (lambda x: x.prod((0, 1)), TypeError, "invalid combination of arguments"),
    ],
)
def test_what_torch_would_raise(lt: Tensors, work: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        settled(work(lt.zeros(2, 3)))


def test_the_gradient_of_log_softmax_is_one_command(lt: Tensors) -> None:
    x = lt.ones(2, 3, requires_grad=True)
    y, ones = x.log_softmax(1), lt.ones(2, 3)
    before = lt._dispatcher._next
    lt.grad(y, x, ones)
    assert lt._dispatcher._next == before + 1
