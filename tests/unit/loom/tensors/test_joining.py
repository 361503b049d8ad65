"""Tensors put together and taken apart agree with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from loom.tensors.tensors import Tensors
from tests.support.torch_agreement import ALL, FLOATS, agree, given, operands, plain, settled, shapes

dims = st.integers(-4, 3)


@given(st.data())
def test_cat(lt: Tensors, data: Any) -> None:
    shape = list(data.draw(shapes(1, 5, 3)))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    kinds = data.draw(st.sampled_from([FLOATS, ALL]))
    given = []
    for _ in range(data.draw(st.integers(1, 4))):
        shape[dim] = data.draw(st.integers(0, 3))
        given.append(data.draw(operands(tuple(shape) if data.draw(st.integers(0, 9)) else (0,), kinds)))
    agree(lt, lambda ns, *xs: ns.cat(xs, dim), given)
    agree(lt, lambda ns, *xs: ns.concat(xs), given)


@given(st.data())
def test_stack(lt: Tensors, data: Any) -> None:
    shape, dim = data.draw(shapes(0, 4, 3)), data.draw(dims)
    kinds = data.draw(st.sampled_from([FLOATS, ALL]))
    given = [data.draw(operands(shape, kinds)) for _ in range(data.draw(st.integers(1, 3)))]
    agree(lt, lambda ns, *xs: ns.stack(xs, dim), given)


@given(st.data())
def test_split(lt: Tensors, data: Any) -> None:
    x, dim, many = data.draw(operands()), data.draw(dims), data.draw(st.integers(-1, 5))
    length = x.size[dim] if -len(x.size) <= dim < len(x.size) else 0
    first = data.draw(st.integers(0, length))
    sizes = data.draw(st.permutations([first, length - first, data.draw(st.sampled_from([0, 0, 1]))]))
    for work in (
        lambda ns, x: x.split(many, dim),
        lambda ns, x: ns.split(x, sizes, dim),
        lambda ns, x: x.chunk(many, dim),
        lambda ns, x: x.unbind(dim),
        lambda ns, x: x.unbind(dim)[:1],
        lambda ns, x: x.split(2)[-1],
    ):
        agree(lt, work, [x])


@given(st.data())
def test_repeated(lt: Tensors, data: Any) -> None:
    x = data.draw(operands(data.draw(shapes(0, 3, 3))))
    times = data.draw(st.lists(st.integers(0, 3), min_size=max(0, len(x.size) - 1), max_size=4))
    agree(lt, lambda ns, x: x.repeat(times), [x])


@given(st.data())
def test_triangles(lt: Tensors, data: Any) -> None:
    x, offset = data.draw(operands(data.draw(shapes(0, 3)), ALL)), data.draw(st.integers(-4, 4))
    for work in (
        lambda ns, x: x.tril(offset),
        lambda ns, x: ns.triu(x, offset),
        lambda ns, x: x.tril(),
    ):
        agree(lt, work, [x])


def test_parts_are_views(lt: Tensors) -> None:
    def work(ns: Any, x: Any) -> Any:
        x.split(2)[1].add_(1)
        x.chunk(2, 1)[0].add_(2)
        for row in x.unbind():
            row.add_(3)
        x.tensor_split((1,))[0].add_(4)
        return x.split([1, 2])[1]

    agree(lt, work, [plain(torch.arange(12.0).reshape(3, 4))])


ERRORS: list[tuple[str, Any]] = [
    ("cat of none", lambda ns, x: ns.cat([])),
    ("stack of none", lambda ns, x: ns.stack([])),
    ("cat of sizes", lambda ns, x: ns.cat([x, x.t()])),
    ("cat of dims", lambda ns, x: ns.cat([x, x[0]])),
    ("cat of numbers", lambda ns, x: ns.cat([x[0, 0]])),
    ("stack of sizes", lambda ns, x: ns.stack([x, x[0]])),
    ("sizes", lambda ns, x: x.split([1, 2])),
    ("negative size", lambda ns, x: x.split([3, -1])),
    ("size of 0", lambda ns, x: x.split(0)),
    ("chunks", lambda ns, x: x.chunk(0)),
    ("repeats", lambda ns, x: x.repeat(2)),
    ("negative repeats", lambda ns, x: x.repeat(1, -1)),
    ("triangle", lambda ns, x: x[0].tril()),
]


@pytest.mark.parametrize(("name", "work"), ERRORS, ids=[name for name, _ in ERRORS])
def test_errors_have_torchs_words(lt: Tensors, name: str, work: Any) -> None:
    with pytest.raises((RuntimeError, IndexError, ValueError)) as theirs:
        work(torch, torch.zeros(2, 3))
    with pytest.raises(type(theirs.value)) as ours:
        settled(work(lt, lt.zeros(2, 3)))
    assert str(theirs.value)[:60] in str(ours.value)
