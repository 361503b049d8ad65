"""Numbers of numpy stand wherever torch takes numbers; and no number or argument spoils what comes after it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from loom.tensors.tensors import Tensors

ONE, TWO, HALF = np.int64(1), np.int64(2), np.float32(0.5)

WORKS: dict[str, Callable[[Any], Any]] = {
    "x + half": lambda m: m.ones(2) + HALF,
    "half + x": lambda m: HALF + m.ones(2),
    "half - x": lambda m: HALF - m.ones(2),
    "double - x": lambda m: np.float64(0.5) - m.ones(2),
    "half / x": lambda m: HALF / m.ones(2),
    "x * int": lambda m: m.ones(2) * TWO,
    "x * float16": lambda m: m.ones(2) * np.float16(2),
    "x * bool": lambda m: m.ones(2) * np.bool_(True),
    "x ** int": lambda m: m.ones(2) ** TWO,
    "x > half": lambda m: m.ones(2) > HALF,
    "half < x": lambda m: np.float64(0.5) < m.ones(2),
    "x == int": lambda m: m.ones(2) == ONE,
    "x += half": lambda m: m.ones(2).__iadd__(HALF),
    "x * array": lambda m: m.ones(2) * np.array([1.0, 2.0]),
    "add, alpha": lambda m: m.ones(2).add(m.ones(2), alpha=HALF),
    "sub_, alpha": lambda m: m.ones(2).sub_(m.ones(2), alpha=HALF),
    "addcmul": lambda m: m.ones(2).addcmul(m.ones(2), m.ones(2), value=HALF),
    "lerp": lambda m: m.zeros(2).lerp(m.ones(2), np.float64(0.5)),
    "clamp": lambda m: m.ones(2).clamp(np.float64(0.1), HALF),
    "clamp, min": lambda m: m.zeros(2).clamp(min=HALF),
    "masked_fill": lambda m: m.ones(2).masked_fill(m.ones(2) > 0, HALF),
    "fill_": lambda m: m.ones(2).fill_(HALF),
    "where": lambda m: m.where(m.ones(2) > 0, HALF, np.float64(0)),
    "full": lambda m: m.full((TWO,), HALF),
    "full of ints": lambda m: m.full((2,), TWO),
    "zeros": lambda m: m.zeros(TWO, np.int32(3)),
    "zeros of a shape": lambda m: m.zeros((TWO, 3)),
    "eye": lambda m: m.eye(TWO),
    "arange": lambda m: m.arange(np.int64(3)),
    "arange of floats": lambda m: m.arange(np.float32(0), np.float32(3), HALF),
    "linspace": lambda m: m.linspace(np.float32(0), np.float32(1), np.int64(3)),
    "logspace": lambda m: m.logspace(np.float32(0), np.float32(1), np.int64(3)),
    "tensor": lambda m: m.tensor([HALF, HALF]),
    "sum": lambda m: m.ones(2, 3).sum(ONE),
    "sum over several": lambda m: m.ones(2, 3, 4).sum((ONE, TWO)),
    "mean": lambda m: m.ones(2, 3).mean(ONE, keepdim=True),
    "prod": lambda m: m.ones(2, 3).prod(ONE),
    "var": lambda m: m.ones(2, 3).var(ONE),
    "var, correction": lambda m: m.ones(2, 3).var(dim=ONE, correction=0),
    "norm": lambda m: m.ones(2, 3).norm(TWO, ONE),
    "argmax": lambda m: m.ones(2, 3).argmax(ONE),
    "max": lambda m: m.ones(2, 3).max(ONE)[0],
    "topk": lambda m: m.ones(2, 3).topk(TWO)[0],
    "cumsum": lambda m: m.ones(2, 3).cumsum(ONE),
    "softmax": lambda m: m.ones(2, 3).softmax(ONE),
    "logsumexp": lambda m: m.ones(2, 3).logsumexp(ONE),
    "reshape": lambda m: m.ones(4).reshape(TWO, TWO),
    "view": lambda m: m.ones(2, 2).view(np.int64(4)),
    "flatten": lambda m: m.ones(2, 2).flatten(np.int64(0)),
    "transpose": lambda m: m.ones(2, 3).transpose(np.int64(0), ONE),
    "permute": lambda m: m.ones(2, 3).permute(ONE, np.int64(0)),
    "unsqueeze": lambda m: m.ones(2, 3).unsqueeze(ONE),
    "expand": lambda m: m.ones(1, 2).expand(TWO, 2),
    "repeat": lambda m: m.ones(2).repeat(TWO),
    "select": lambda m: m.ones(2, 2).select(np.int64(0), ONE),
    "narrow": lambda m: m.ones(4).narrow(0, ONE, TWO),
    "chunk": lambda m: m.ones(4, 3).chunk(TWO)[1],
    "roll": lambda m: m.ones(2, 3).roll(ONE, np.int64(0)),
    "tril": lambda m: m.ones(2, 3).tril(ONE),
    "cat": lambda m: m.cat([m.ones(2, 2)] * 2, ONE),
    "stack": lambda m: m.stack([m.ones(2, 2)] * 2, ONE),
    "an element": lambda m: m.ones(4)[ONE],
    "a slice": lambda m: m.ones(4)[ONE : np.int64(3)],
    "some elements": lambda m: m.ones(4)[np.array([0, 1])],
    "x + 2j": lambda m: m.ones(2) + 2j,
    "complex * complex": lambda m: m.ones(2, dtype=m.complex64) * (1 + 2j),
    "full of complex": lambda m: m.full((2,), 1j),
    "fill_ with complex": lambda m: m.zeros(2, dtype=m.complex64).fill_(1j),
}


@pytest.mark.parametrize("name", WORKS)
def test_a_number_of_numpy_is_one(lt: Tensors, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # some of numpy are for torch alone
        wanted = WORKS[name](torch)
    found = WORKS[name](lt)
    assert repr(found.shape) == repr(tuple(wanted.shape))
    assert found.dtype.name == str(wanted.dtype).removeprefix("torch.")
    assert torch.allclose(torch.tensor(found.tolist(), dtype=wanted.dtype), wanted)


def test_the_gradient_passes_a_number_of_numpy(lt: Tensors) -> None:
    x = lt.ones(2, requires_grad=True)
    (HALF * x * TWO).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 1.0]


def test_an_array_before_a_tensor_is_refused_as_by_torch(lt: Tensors) -> None:
    for namespace in (torch, lt):
        with pytest.raises(TypeError, match="unsupported operand"):
            np.ones(2) * namespace.ones(2)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "work",
    [
        lambda m: m.ones(2).add(2**70),
        lambda m: m.ones(2) * -(2**64),
        lambda m: m.ones(2).add_(2**70),
        lambda m: m.ones(2).clamp(max=2**70),
        lambda m: m.full((2,), 2**70),
        lambda m: m.ones(2).masked_fill(m.ones(2) > 0, 2**70),
    ],
)
def test_a_number_of_more_than_64_bits_is_refused_where_it_stands(lt: Tensors, work: Callable[[Any], Any]) -> None:
    for namespace in (torch, lt):
        with pytest.raises(OverflowError, match=r"int too big to convert|can't convert negative int to unsigned"):
            work(namespace)
    assert lt.ones(2).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "work",
    [
        lambda lt: lt.call("torch.sum", lt.ones(2), object()),
        lambda lt: lt.call("torch.sum", lt.ones(2), dim={1, 2}),
        lambda lt: lt.zeros(2**70),
    ],
)
def test_what_does_not_travel_is_refused_where_it_stands(lt: Tensors, work: Callable[[Tensors], Any]) -> None:
    with pytest.raises(TypeError, match=r"does not travel|unhashable|interpreted"):
        work(lt)
    assert lt.ones(2).tolist() == [1.0, 1.0]


def test_numbers_of_one_value_and_other_types_are_other_numbers(lt: Tensors) -> None:
    x = lt.full((2,), 3, dtype="int64")
    for one, kind in (
        (1, "int64"),
        (True, "int64"),
        (1.0, "float32"),
        (np.float64(1), "float32"),
        (1 + 0j, "complex64"),
    ):
        assert (x * one).dtype.name == kind
        assert (x * one).tolist() == [3, 3]
    assert [math.copysign(1, each) for each in (lt.zeros(2) * -0.0).tolist()] == [-1.0, -1.0]
