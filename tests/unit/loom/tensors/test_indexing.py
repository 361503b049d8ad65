"""Parts by index, and their assignment, agree with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from loom.tensors.tensors import Tensors
from tests.support.torch_agreement import (
    ALL,
    PROCESSES,
    Operand,
    agree,
    broadcastable,
    given,
    operands,
    plain,
    settled,
    shapes,
    to_torch,
)

dims = st.integers(-3, 3)
bounds = st.one_of(st.none(), st.integers(-5, 5))


@st.composite
def slices(draw: Any) -> slice:
    return slice(draw(bounds), draw(bounds), draw(st.sampled_from([None, 1, 1, 2, 3])))


@st.composite
def numbers_of(draw: Any, size: int, shape: tuple[int, ...], least: int | None = None) -> Operand:
    """Draw a tensor of ints below a size."""
    low = -size if least is None else least
    kind = draw(st.sampled_from([torch.int64, torch.int64, torch.int32]))
    many = torch.Size(shape).numel()
    elements = draw(st.lists(st.integers(low, max(size - 1, low)), min_size=many, max_size=many))
    return plain(torch.tensor(elements, dtype=kind).reshape(shape))


@st.composite
def indices(draw: Any, shape: tuple[int, ...], advanced: bool = True) -> tuple[list[Any], list[Operand]]:
    """Draw an index of a tensor, with a number in the place of each of its tensors, and these."""
    tensors: list[Operand] = []
    common = draw(shapes(1, 2, 3, 1))
    many = draw(st.integers(0, len(shape)))
    from_end = draw(st.integers(0, 3)) == 0
    parts: list[Any] = [...] if from_end else []
    for place in range(len(shape) - many, len(shape)) if from_end else range(many):
        if draw(st.integers(0, 4)) == 0:
            parts.append(None)
        what = draw(st.sampled_from(["int", "slice", "slice", "tensor", "tensor", "one", "list"]))
        size = shape[place]
        if what == "slice" or size == 0:
            parts.append(draw(slices()))
        elif what == "int":
            parts.append(draw(st.integers(-size, size - 1)))
        elif what == "list" and advanced:
            length = common[-1]
            parts.append(draw(st.lists(st.integers(-size, size - 1), min_size=length, max_size=length)))
        elif what == "one":
            parts.append(f"tensor {len(tensors)}")
            tensors.append(draw(numbers_of(size, ())))
        elif advanced:
            parts.append(f"tensor {len(tensors)}")
            tensors.append(draw(numbers_of(size, draw(broadcastable(common)) or (1,))))
        else:
            parts.append(draw(slices()))
    if not from_end and draw(st.booleans()):
        parts.append(...)
    return parts, tensors


def filled(parts: list[Any], tensors: Any) -> Any:
    found = tuple(tensors[int(each[7:])] if isinstance(each, str) else each for each in parts)
    return found[0] if len(found) == 1 and not isinstance(found[0], list) else found


@given(st.data())
def test_parts(lt: Tensors, data: Any) -> None:
    x = data.draw(operands(dtypes=data.draw(st.sampled_from([ALL, (torch.float64,)]))))
    parts, tensors = data.draw(indices(x.size, data.draw(st.booleans())))
    agree(lt, lambda ns, x, *ts: x[filled(parts, ts)], [x, *tensors])


@pytest.mark.skipif(PROCESSES > 1, reason="operands that are spread are contiguous")
@given(st.data())
def test_strides_of_views_by_index_are_torchs(lt: Tensors, data: Any) -> None:
    x = data.draw(operands())
    parts, tensors = data.draw(indices(x.size, advanced=False))
    expected = x.of_torch()[filled(parts, [each.of_torch() for each in tensors])]
    found = x.of_loom(lt)[filled(parts, [each.of_loom(lt) for each in tensors])]
    assert (found.shape, found.stride()) == (tuple(expected.shape), expected.stride())


@given(st.data())
def test_order_in_memory_of_parts_by_tensors(lt: Tensors, data: Any) -> None:
    x = data.draw(operands(data.draw(shapes(2, 4, 3, 1))))
    shape = data.draw(shapes(1, 3, 3, 1))
    dim = data.draw(st.integers(0, len(x.size) - 2))
    rows = data.draw(operands(shape, [torch.int64], low=0, high=0))
    agree(lt, lambda ns, x, i: x[(slice(None),) * dim + (i,)], [x, rows])
    agree(lt, lambda ns, x, i: x[(i,) * (dim + 2)], [x, rows])
    agree(lt, lambda ns, x, i: x[(i, *[slice(None)] * dim, i)], [x, rows])


@given(st.data())
def test_assignment(lt: Tensors, data: Any) -> None:
    x = data.draw(operands(dtypes=ALL, views=False, grad=False))
    parts, tensors = data.draw(indices(x.size))
    part = x.of_torch()[filled(parts, [each.of_torch() for each in tensors])]
    # Where an index is there twice, torch does not say which value remains: there is one value for all.
    twice = bool(tensors) or any(isinstance(each, list) for each in parts)
    shape = () if twice else data.draw(broadcastable(tuple(part.shape)))
    kinds = [x.memory.dtype] if twice else ALL
    wanted = None if x.memory.is_floating_point() else False
    value = data.draw(operands((1,) * data.draw(st.integers(0, 1)) + shape, kinds, wanted))
    number = data.draw(st.sampled_from([0, 1, True, 2.0, -0.0]))

    def with_tensor(ns: Any, x: Any, value: Any, *ts: Any) -> Any:
        x = x.clone()
        x[filled(parts, ts)] = value
        return x

    def with_number(ns: Any, x: Any, *ts: Any) -> Any:
        x[filled(parts, ts)] = number
        return x

    # torch sums a gradient sometimes before it casts it, sometimes after.
    mixed = {} if value.memory.dtype is x.memory.dtype else {"rtol": 1e-2, "atol": 1e-2}
    agree(lt, with_tensor, [x, value, *tensors], **mixed)
    agree(lt, with_number, [x, *tensors])


@given(st.data())
def test_gradients_of_assignment(lt: Tensors, data: Any) -> None:
    x = data.draw(operands(dtypes=[torch.float64], grad=True))
    parts, tensors = data.draw(indices(x.size))
    value = data.draw(operands((), [torch.float64], grad=True))

    def work(ns: Any, x: Any, value: Any, *ts: Any) -> Any:
        y, z = x * x, x * 2
        y[filled(parts, ts)] = value
        z[filled(parts, ts)] = 3
        return y * y, z * z

    agree(lt, work, [x, value, *tensors])


@given(st.data())
def test_assignment_by_a_mask(lt: Tensors, data: Any) -> None:
    shape = data.draw(shapes(1))
    x, mask = data.draw(operands(shape, grad=True)), data.draw(operands(shape[:-1] or shape, [torch.bool]))

    def work(ns: Any, x: Any, mask: Any) -> Any:
        y = x * x
        y[mask] = 2
        return y * y

    agree(lt, work, [x, mask])


@given(st.data())
def test_select_and_narrow(lt: Tensors, data: Any) -> None:
    x, dim, at = data.draw(operands()), data.draw(dims), data.draw(st.integers(-4, 4))
    many = data.draw(st.integers(-1, 3))
    agree(lt, lambda ns, x: x.select(dim, at), [x])
    agree(lt, lambda ns, x: ns.narrow(x, dim, at, many), [x])
    agree(lt, lambda ns, x: list(x), [x])


@given(st.data())
def test_masked_fill(lt: Tensors, data: Any) -> None:
    shape = data.draw(shapes())
    x = data.draw(operands(data.draw(broadcastable(shape)), ALL))
    mask = data.draw(operands(data.draw(broadcastable(shape)), [torch.bool]))
    wanted = None if x.memory.is_floating_point() else False
    value = data.draw(operands((), [torch.float64], wanted, low=0))
    agree(lt, lambda ns, x, m: x.masked_fill(m, 2), [x, mask])
    agree(lt, lambda ns, x, m, v: ns.masked_fill(x, m, v), [x, mask, value])
    agree(lt, lambda ns, x, m: (x * 1).masked_fill_(m, 1), [x, mask])


@given(st.data())
def test_embedding_and_one_hot(lt: Tensors, data: Any) -> None:
    weight = data.draw(operands(data.draw(shapes(2, 2, 4, 1)), [torch.float64]))
    rows = data.draw(numbers_of(weight.size[0], data.draw(shapes(0, 3, 3)), 0))
    padding = data.draw(st.one_of(st.none(), st.integers(-5, 4)))

    def embedded(ns: Any, rows: Any, weight: Any) -> Any:
        call = torch.nn.functional.embedding if ns is torch else ns.embedding
        return call(rows, weight, padding_idx=padding)

    def one_hot(ns: Any, rows: Any) -> Any:
        return (torch.nn.functional if ns is torch else ns).one_hot(rows, 5)

    agree(lt, embedded, [rows, weight])
    agree(lt, one_hot, [rows])


def _changed(ns: Any, x: Any) -> Any:
    x[0].add_(1)
    x[:, 1:][..., None][1].add_(2)
    x.select(1, 0).add_(3)
    x.narrow(0, 1, 1).add_(4)
    x[[0, 1]].add_(100)
    x[1, 2:] += 5
    for row in x:
        row[0] = 7
    return x[1:]


def test_what_is_done_in_place_to_a_part_is_seen_in_the_whole(lt: Tensors) -> None:
    agree(lt, _changed, [plain(torch.arange(8.0).reshape(2, 4))])


def test_a_list_of_bools_selects_without_asking(lt: Tensors) -> None:
    x = plain(torch.arange(6.0).reshape(2, 3), requires_grad=True)
    agree(lt, lambda ns, x: x[..., [True, False, True]], [x])
    agree(lt, lambda ns, x: x[[False, True]], [x])
    agree(lt, lambda ns, x: x[:, [False, True]], [x])
    agree(lt, lambda ns, x: x[[]], [x])
    agree(lt, lambda ns, x: x[range(1), torch.tensor([2]).numpy()], [x])


def test_a_window_that_moves_has_one_form(lt: Tensors) -> None:
    x = lt.arange(100)
    x[0:10]
    before = len(lt._known)
    found = [x[start : start + 10] for start in range(1, 50)]
    assert len(lt._known) == before
    assert to_torch(found[30]).tolist() == list(range(31, 41))


def test_a_change_between_is_noticed_by_gradients(lt: Tensors) -> None:
    x = lt.ones(3, requires_grad=True)
    rows = lt.tensor([0, 2])
    y = x[rows]
    rows.add_(0)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.grad.tolist()


def _assigned(x: Any, index: Any, value: Any) -> Any:
    x[index] = value
    return x


ERRORS: list[tuple[str, Any]] = [
    ("range", lambda ns, x: x[2]),
    ("range below", lambda ns, x: x[0, -4]),
    ("too many", lambda ns, x: x[0, 0, 0]),
    ("of a number", lambda ns, x: x[0, 0][0]),
    ("float", lambda ns, x: x[0.5]),
    ("step", lambda ns, x: x[::-1]),
    ("step of 0", lambda ns, x: x[::0]),
    ("tensors", lambda ns, x: x[ns.tensor([0, 1]), ns.tensor([0, 1, 2])]),
    ("kind", lambda ns, x: x[ns.tensor([0.0])]),
    ("bools", lambda ns, x: x[[True, False, True]]),
    ("empty dimension", lambda ns, x: x[:0][[0]]),
    ("value", lambda ns, x: _assigned(x, 0, ns.ones(5))),
    ("value by tensor", lambda ns, x: _assigned(x, [0], ns.ones(5))),
    ("value of no kind", lambda ns, x: _assigned(x, 0, "1")),
    ("mask", lambda ns, x: _assigned(x, ns.ones(3) > 0, 1)),
    ("iteration", lambda ns, x: iter(x[0, 0])),
    ("select", lambda ns, x: x.select(0, 2)),
    ("select of a number", lambda ns, x: x[0, 0].select(0, 0)),
    ("narrow", lambda ns, x: x.narrow(0, 1, 2)),
    ("narrow from", lambda ns, x: x.narrow(0, 3, 0)),
    ("narrow of a number", lambda ns, x: x[0, 0].narrow(0, 0, 1)),
    ("gather sizes", lambda ns, x: x.gather(0, ns.tensor([[0, 0, 0, 0]]))),
    ("index_select", lambda ns, x: x.index_select(0, ns.tensor([[0]]))),
    ("index_select kind", lambda ns, x: x.index_select(0, ns.tensor([0.0]))),
    ("index_select of a number", lambda ns, x: x[0, 0].index_select(0, ns.tensor([0, 0]))),
    ("masked_fill kind", lambda ns, x: x.masked_fill(x, 1)),
    ("masked_fill value", lambda ns, x: x.masked_fill(x > 1, ns.ones(1))),
    ("masked_fill shape", lambda ns, x: x.masked_fill(ns.ones(5) > 0, 1)),
    ("masked_fill_ shape", lambda ns, x: x.masked_fill_(ns.ones(5, 2, 3) > 0, 1)),
]


@pytest.mark.parametrize(("name", "work"), ERRORS, ids=[name for name, _ in ERRORS])
def test_errors_have_torchs_words(lt: Tensors, name: str, work: Any) -> None:
    with pytest.raises((RuntimeError, IndexError, ValueError, TypeError)) as theirs:
        work(torch, torch.zeros(2, 3))
    with pytest.raises(type(theirs.value)) as ours:
        settled(work(lt, lt.zeros(2, 3)))
    same = str(theirs.value)[:15] in str(ours.value)
    assert same or name in ("gather sizes", "of a number", "value")  # which have the words of other functions
