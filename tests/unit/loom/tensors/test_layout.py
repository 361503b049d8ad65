"""Views agree with torch, in their strides and in what a change of one does to the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from loom.tensors.tensors import Tensors
from tests.support.torch_agreement import ALL, Operand, agree, given, operands, plain, settled

dims = st.integers(-3, 3)
offsets = st.integers(-3, 3)


@st.composite
def sizes(draw: Any, numel: int) -> tuple[int, ...]:
    """Draw a shape of so many elements, mostly, at times with a -1 or one that does not fit."""
    found = []
    while numel > 1 and draw(st.booleans()):
        found.append(draw(st.sampled_from([each for each in range(1, numel + 1) if numel % each == 0])))
        numel //= found[-1]
    found.insert(draw(st.integers(0, len(found))), numel)
    found += [1] * draw(st.integers(0, 1))
    found = draw(st.permutations(found))
    if draw(st.booleans()):
        found[draw(st.integers(0, len(found) - 1))] = -1
    if draw(st.integers(0, 9)) == 0:
        found[draw(st.integers(0, len(found) - 1))] = draw(st.integers(-2, 5))
    return tuple(found)


def numel(operand: Operand) -> int:
    return torch.Size(operand.size).numel()


def same_strides(lt: Tensors, work: Any, operand: Operand) -> None:
    """Check strides also of dimensions of size 1 and of empty tensors, and the gradients."""
    agree(lt, work, [operand])
    try:
        expected = work(torch, operand.of_torch())
    except Exception:  # noqa: BLE001 - `agree` has looked at it
        return
    assert work(lt, operand.of_loom(lt)).stride() == expected.stride()


@given(st.data())
def test_reshape_and_view(lt: Tensors, data: Any) -> None:
    x = data.draw(operands(dtypes=ALL))
    size = data.draw(sizes(numel(x)))
    for work in (
        lambda ns, x: x.reshape(*size),
        lambda ns, x: ns.reshape(x, size),
        lambda ns, x: x.view(size),
        lambda ns, x: x.ravel(),
    ):
        same_strides(lt, work, x)


@given(st.data())
def test_flatten(lt: Tensors, data: Any) -> None:
    x, a, b = data.draw(operands()), data.draw(dims), data.draw(dims)
    same_strides(lt, lambda ns, x: x.flatten(a, b), x)
    same_strides(lt, lambda ns, x: ns.flatten(x), x)


@given(st.data())
def test_expand(lt: Tensors, data: Any) -> None:
    x = data.draw(operands(tuple(data.draw(st.lists(st.sampled_from([1, 1, 2, 3, 0]), max_size=3)))))
    size = [data.draw(st.sampled_from([each, each, -1, 3, 4])) for each in x.size]
    size = data.draw(st.lists(st.integers(-1, 3), max_size=2)) + size
    size = size[data.draw(st.sampled_from([0, 0, 0, 1])) :]
    same_strides(lt, lambda ns, x: x.expand(size), x)
    same_strides(lt, lambda ns, x: ns.broadcast_to(x, size), x)


@given(st.data())
def test_unsqueeze_and_squeeze(lt: Tensors, data: Any) -> None:
    x = data.draw(operands(tuple(data.draw(st.lists(st.sampled_from([1, 1, 2, 0]), max_size=4)))))
    dim, several = data.draw(st.integers(-5, 5)), data.draw(st.lists(dims, max_size=3))
    same_strides(lt, lambda ns, x: x.unsqueeze(dim), x)
    same_strides(lt, lambda ns, x: ns.squeeze(x, dim), x)
    same_strides(lt, lambda ns, x: x.squeeze(), x)
    same_strides(lt, lambda ns, x: x.squeeze(tuple(several)), x)


@given(st.data())
def test_orders_of_dimensions(lt: Tensors, data: Any) -> None:
    x, a, b = data.draw(operands()), data.draw(dims), data.draw(dims)
    order = [each - data.draw(st.sampled_from([0, len(x.size)])) for each in range(len(x.size))]
    order = data.draw(st.permutations(order))
    pair = data.draw(st.lists(dims, min_size=2, max_size=2))
    for work in (
        lambda ns, x: x.permute(*order) if order else x,
        lambda ns, x: ns.permute(x, tuple(pair)),
        lambda ns, x: x.transpose(a, b),
        lambda ns, x: x.swapaxes(a, b),
        lambda ns, x: x.t(),
        lambda ns, x: x.mT if x.dim() else x,
    ):
        same_strides(lt, work, x)
    if len(x.size) == 2:
        same_strides(lt, lambda ns, x: x.T, x)


@given(operands(grad=False), operands(grad=False))
def test_shapes_of_another_tensor(lt: Tensors, x: Any, y: Any) -> None:
    for work in (
        lambda ns, x, y: x.view_as(y),
        lambda ns, x, y: x.reshape_as(y),
        lambda ns, x, y: x.expand_as(y),
    ):
        agree(lt, work, [x, y])


def _change_of_view(ns: Any, x: Any) -> Any:
    view = x.transpose(0, 1).unsqueeze(0).squeeze().diagonal()
    view.add_(view)
    x.view(-1).add_(1)
    x.expand(3, 2, 2).permute(1, 0, 2).unfold(2, 1, 1).view(2, 3, 2)
    return view


def test_what_is_done_in_place_to_a_view_is_seen_in_its_base(lt: Tensors) -> None:
    agree(lt, _change_of_view, [plain(torch.arange(4.0).reshape(2, 2))])


def test_reshape_that_copies_has_memory_of_its_own(lt: Tensors) -> None:
    def work(ns: Any, x: Any) -> Any:
        return x.t().reshape(-1).add_(1)

    agree(lt, work, [plain(torch.arange(4.0).reshape(2, 2))])


def test_a_change_of_a_view_is_noticed_by_gradients_of_its_base(lt: Tensors) -> None:
    x = lt.ones(2, requires_grad=True)
    y = x.mul(2)
    z = y.mul(y)
    y.detach().view(1, 2).add_(1)
    z.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.grad.tolist()


ERRORS: list[tuple[str, Any]] = [
    ("sizes", lambda x: x.reshape(5)),
    ("two inferred", lambda x: x.view(-1, -1)),
    ("negative", lambda x: x.view(-2, 3)),
    ("strides", lambda x: x.t().view(-1)),
    ("dim", lambda x: x.unsqueeze(4)),
    ("order", lambda x: x.permute(0)),
    ("duplicates", lambda x: x.permute(0, 0)),
    ("expand", lambda x: x.expand(4, 3)),
    ("expand less", lambda x: x.expand(3)),
    ("expand nothing", lambda x: x.expand(-1, 2, 3)),
    ("squeeze twice", lambda x: x.squeeze((0, 0))),
    ("flatten", lambda x: x.flatten(1, 0)),
    ("float", lambda x: x.view(1.5)),
    ("t", lambda x: x.unsqueeze(0).t()),
    ("mT", lambda x: x.view(-1).mT),
]


@pytest.mark.parametrize(("name", "work"), ERRORS, ids=[name for name, _ in ERRORS])
def test_errors_have_torchs_words(lt: Tensors, name: str, work: Any) -> None:
    with pytest.raises((RuntimeError, IndexError, TypeError)) as theirs:
        work(torch.zeros(2, 3))
    with pytest.raises(type(theirs.value)) as ours:
        settled(work(lt.zeros(2, 3)))
    assert str(theirs.value)[:30] in str(ours.value) or name in ("float", "expand less")


def test_a_view_of_another_dtype(lt: Tensors) -> None:
    x = plain([0.5, -1.0, 3.0, 0.0])
    agree(lt, lambda ns, x: x.view(torch.int32), [x])
    agree(lt, lambda ns, x: x.view(torch.int64).add_(1), [x])


def test_a_view_of_any_strides_has_a_gradient(lt: Tensors) -> None:
    x = lt.ones(2, requires_grad=True)
    x.as_strided((3,), (0,)).sum().backward()
    assert x.grad.tolist() == [3.0, 0.0]
