"""Activations, and numbers before tensors, agree with torch. The database of torch has the other functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from loom.tensors.tensors import Tensors
from tests.support.torch_agreement import (
    agree,
    given,
    of_the_cpu,
    operands,
    plain,
    shapes,
)

KINDS = (torch.float64, torch.float64, torch.float32, torch.int64, torch.bool)
FLOAT64 = [torch.float64]

ACTIVATIONS = ("mish", "hardswish", "hardshrink", "softshrink", "selu", "celu", "softsign", "tanhshrink")


@pytest.mark.parametrize("name", ACTIVATIONS)
@given(operands(dtypes=KINDS))
def test_activations(lt: Tensors, name: str, x: Any) -> None:
    agree(lt, lambda ns, x: getattr(ns.nn.functional, name)(x), [x])


@given(st.data())
def test_activations_with_arguments(lt: Tensors, data: Any) -> None:
    x = data.draw(operands(data.draw(shapes(1)), KINDS))
    dim = data.draw(st.integers(-2, 2))
    agree(lt, lambda ns, x: ns.nn.functional.hardsigmoid(x), [x], second=False)
    agree(lt, lambda ns, x: ns.nn.functional.glu(x, dim), [x])
    if x.memory.is_floating_point():
        agree(lt, lambda ns, x: ns.nn.functional.softmin(x, dim), [x])
    agree(lt, lambda ns, x: ns.nn.functional.celu(x, 0.5), [x])
    agree(lt, lambda ns, x: ns.nn.functional.softshrink(x, 1.2), [x])
    agree(lt, lambda ns, x: ns.nn.functional.threshold(x, 1, 2), [x])


@given(st.data())
def test_prelu(lt: Tensors, data: Any) -> None:
    shape = data.draw(shapes(1, 4, 3, 1))
    many = data.draw(st.sampled_from([1, 1, *shape[1:2], *shape[1:2], 4]))
    x, weight = data.draw(operands(shape, FLOAT64)), data.draw(operands((many,), FLOAT64))
    agree(lt, lambda ns, x, w: ns.prelu(x, w), [x, weight])


NUMBER_FIRST = (
    "add", "sub", "mul", "div", "pow", "floor_divide", "remainder", "bitwise_and", "bitwise_or", "bitwise_xor",
    "bitwise_left_shift", "bitwise_right_shift", "eq", "atan2", "maximum", "fmod", "logical_and", "dot", "outer",
    "matmul", "sin", "sum", "clamp_min",
)  # fmt: skip
WITHOUT_GRADIENT = ("floor_divide", "remainder")


@given(st.data())
def test_a_number_before_a_tensor(lt: Tensors, data: Any) -> None:
    number = data.draw(st.sampled_from([2, 1, 2.5]))
    x = data.draw(operands(dtypes=(torch.float64, torch.float32, torch.int64, torch.bool), low=1))
    for name in data.draw(st.lists(st.sampled_from(NUMBER_FIRST), min_size=8, max_size=8, unique=True)):
        if name in WITHOUT_GRADIENT and (x.requires_grad or x.memory.dtype is torch.bool):
            continue
        agree(lt, lambda ns, x, name=name: getattr(ns, name)(number, x), [x])
    agree(lt, lambda ns, x: ns.add(number, x, alpha=2), [x])
    agree(lt, lambda ns, x: ns.sub(number, x, alpha=2), [x])
    agree(lt, lambda ns, x: ns.rsub(x, number), [x])


def test_what_is_no_tensor_is_refused(lt: Tensors) -> None:
    with pytest.raises(TypeError, match="must be Tensor, not int"):
        lt.ones(2).matmul(2)
    with pytest.raises(TypeError, match="must be Tensor"):
        lt.sum(2)


@of_the_cpu
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("dim", [-1, 0])
def test_gumbel_softmax_draws_torchs_numbers(lt: Tensors, dim: int, hard: bool) -> None:
    logits = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)

    def work(ns: Any, x: Any) -> Any:
        (ns if ns is torch else lt).manual_seed(3)
        return ns.nn.functional.gumbel_softmax(x, 0.5, hard, dim=dim)

    agree(lt, work, [plain(logits, requires_grad=True)], second=not hard)
