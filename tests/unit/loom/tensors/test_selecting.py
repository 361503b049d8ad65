"""What masks and conditions select, whose shape depends on elements, agrees with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import loom
from loom.tensors.tensors import Tensors
from tests.support.torch_agreement import (
    ALL,
    INTS,
    agree,
    broadcastable,
    given,
    operands,
    plain,
    settled,
    shapes,
    to_torch,
)

FLOAT64 = [torch.float64]


def masks(shape: tuple[int, ...]) -> Any:
    return operands(shape, [torch.bool])


@given(st.data())
def test_a_mask_as_an_index(lt: Tensors, data: Any) -> None:
    shape = data.draw(shapes(2, 4, 3))
    x = data.draw(operands(shape, FLOAT64))
    begin = data.draw(st.integers(0, len(shape) - 1))
    end = data.draw(st.integers(begin + 1, len(shape)))
    mask = data.draw(masks(shape[begin:end]))
    before: list[Any] = [slice(None)] * begin
    if begin and data.draw(st.booleans()):
        before[0] = data.draw(st.sampled_from([slice(1, None), slice(None, None, 2)]))
    if data.draw(st.booleans()):
        before.insert(data.draw(st.integers(0, begin)), None)
    after = data.draw(st.sampled_from([(), (...,), (None,), (slice(0, 2),)])) if end < len(shape) else ()
    agree(lt, lambda ns, x, m: x[(*before, m, *after)] ** 2, [x, mask])
    agree(lt, lambda ns, x, m: (x * 2)[(*before, m, *after)].sin().sum(), [x, mask])
    agree(lt, lambda ns, x, m: x[(..., m)] if end == len(shape) else x[(*before, m)], [x, mask])


@given(st.data())
def test_a_mask_beside_other_tensors(lt: Tensors, data: Any) -> None:
    x, rows = data.draw(operands((3, 4, 2), FLOAT64)), plain(torch.tensor([True, False, True]))
    columns, one = data.draw(masks((2,))), plain(torch.tensor([1]))
    agree(lt, lambda ns, x, m, i: x[m, i] ** 2, [x, rows, one])
    agree(lt, lambda ns, x, m, i: x[m, :, i] ** 2, [x, rows, one])
    agree(lt, lambda ns, x, m, i: x[i[0], :, m] ** 2, [x, columns, one])
    agree(lt, lambda ns, x, m: x[m, 1, 0] ** 2, [x, rows])


@given(st.data())
def test_a_truth_value_as_an_index(lt: Tensors, data: Any) -> None:
    x, value = data.draw(operands(dtypes=FLOAT64)), data.draw(st.booleans())
    one = plain(torch.tensor(value))
    agree(lt, lambda ns, x: x[value] ** 2, [x])
    agree(lt, lambda ns, x, one: x[one] ** 2, [x, one])


@given(st.data())
def test_assignment_by_masks(lt: Tensors, data: Any) -> None:
    shape = data.draw(shapes(1, 3, 3, 1))
    x = data.draw(operands(shape, FLOAT64))
    many = data.draw(st.integers(1, len(shape)))
    mask = data.draw(masks(shape[:many]))
    value = data.draw(operands(data.draw(broadcastable((1, *shape[many:]))), FLOAT64))

    def work(ns: Any, x: Any, mask: Any, value: Any) -> Any:
        y, z, w = x * x, x * 2, x * 3
        y[mask] = value
        z[mask, ...] = value.sum()
        w[mask] *= 2
        return y * y, z * z, w * w

    agree(lt, work, [x, mask, value])


def _assigned(x: Any, index: Any, value: Any) -> Any:
    x[index] = value
    return x * x


@given(st.data())
def test_as_many_values_as_the_mask_has(lt: Tensors, data: Any) -> None:
    shape = data.draw(shapes(1, 3, 3, 1))
    x, mask = data.draw(operands(shape, FLOAT64)), data.draw(masks(shape))
    many = int(mask.of_torch().sum())
    value = data.draw(operands((many,), FLOAT64))
    agree(lt, lambda ns, x, m, v: _assigned(x * x, m, v), [x, mask, value])
    agree(lt, lambda ns, x, m, v: _assigned((x * x).unsqueeze(0)[0], m, v), [x, mask, value])
    agree(lt, lambda ns, x, m, v: x.index_put((m,), v) ** 2, [x, mask, value])
    agree(lt, lambda ns, x, m, v: (x * 1).index_put_((m,), v, accumulate=True) ** 2, [x, mask, value])


@given(st.data())
def test_masked_select(lt: Tensors, data: Any) -> None:
    shape = data.draw(shapes())
    x, mask = data.draw(operands(data.draw(broadcastable(shape)), FLOAT64)), data.draw(masks(shape))
    agree(lt, lambda ns, x, m: ns.masked_select(x, m) ** 2, [x, mask])
    agree(lt, lambda ns, x, m: m.masked_select(m), [x, mask])
    agree(lt, lambda ns, x, m: x.masked_select(x), [x, mask])


@given(st.data())
def test_places(lt: Tensors, data: Any) -> None:
    x = data.draw(operands(dtypes=ALL, grad=False))
    agree(lt, lambda ns, x: x.nonzero(), [x])
    agree(lt, lambda ns, x: ns.nonzero(x, as_tuple=True), [x])
    agree(lt, lambda ns, x: ns.argwhere(x > 0), [x])
    agree(lt, lambda ns, x: ns.where(x > 0), [x])
    agree(lt, lambda ns, x: x[ns.where(x > 0)], [x])


@given(st.data())
def test_different_elements(lt: Tensors, data: Any) -> None:
    x = data.draw(operands(data.draw(shapes(smallest=1)), [*INTS, torch.bool, torch.float32], grad=False))
    inverse, counts = data.draw(st.booleans()), data.draw(st.booleans())
    dim = data.draw(st.sampled_from([None, None, 0, -1, 1]))
    agree(lt, lambda ns, x: ns.unique(x, True, inverse, counts, dim), [x])
    agree(lt, lambda ns, x: x.unique_consecutive(inverse, counts, dim), [x])


def test_one_hot_of_as_many_classes_as_there_are(lt: Tensors) -> None:
    agree(lt, lambda ns, x: ns.nn.functional.one_hot(x), [plain([[0, 3], [1, 2]])])


def test_what_is_selected_is_asked_for_only_if_needed(lt: Tensors) -> None:
    x = lt.tensor([1.0, -2.0, 3.0])
    chosen = x[x > 0]
    assert chosen._meta is None
    assert chosen.tolist() == [1.0, 3.0]
    assert chosen._meta is None
    assert (chosen.shape, chosen.dtype) == ((2,), lt.float32)


def test_unique_has_no_gradient(lt: Tensors) -> None:
    x = lt.tensor([1.0, 1.0], requires_grad=True)
    found = x.unique()
    assert found.requires_grad
    found.sum().backward()
    with pytest.raises(NotImplementedError, match="unique"):
        x.grad.tolist()


def test_what_does_not_fit_fails_in_the_cluster(lt: Tensors) -> None:
    x = lt.zeros(3)
    x[x == 0] = lt.ones(2)
    with pytest.raises(loom.OperationFailed, match="shape mismatch"):
        settled(x.tolist())


def test_a_function_that_selects_is_not_compiled(lt: Tensors) -> None:
    @lt.compile
    def chosen(x: Any) -> Any:
        return x[x > 0].mean()

    for numbers in ([1.0, 2.0], [1.0, -1.0], [4.0, 2.0], [5.0, -1.0], [6.0, 2.0]):
        expected = torch.tensor(numbers)
        torch.testing.assert_close(to_torch(chosen(lt.tensor(numbers))), expected[expected > 0].mean())


ERRORS: list[tuple[str, Any]] = [
    ("mask", lambda ns, x: x[ns.ones(2, 4) > 0]),
    ("mask of many", lambda ns, x: x[ns.ones(2, 3, 1) > 0]),
    ("mask at", lambda ns, x: x[:, ns.ones(2) > 0]),
    ("too many", lambda ns, x: x[x > 0, 0]),
    ("put mask", lambda ns, x: x.index_put((ns.ones(2, 4) > 0,), x[0, 0])),
    ("put many", lambda ns, x: x.index_put((x > 0, x > 0), x[0, 0])),
    ("where", lambda ns, x: ns.where(x > 0, x)),
    ("scatter", lambda ns, x: x.masked_scatter(x > 0, x.double())),
    ("scatter shape", lambda ns, x: x.masked_scatter_(ns.ones(2, 2, 3) > 0, x)),
    ("unique", lambda ns, x: x.unique(dim=2)),
    ("repeats", lambda ns, x: x.repeat_interleave(ns.tensor([[1]]), 0)),
]


@pytest.mark.parametrize(("name", "work"), ERRORS, ids=[name for name, _ in ERRORS])
def test_errors(lt: Tensors, name: str, work: Any) -> None:
    with pytest.raises((RuntimeError, IndexError, TypeError)) as theirs:
        work(torch, torch.zeros(2, 3))
    with pytest.raises(type(theirs.value)):
        settled(work(lt, lt.zeros(2, 3)))
