"""Casts, copies and new contents in place agree with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from loom.tensors.tensors import Tensors
from tests.support.torch_agreement import ALL, FLOATS, agree, broadcastable, given, operands, plain, shapes
from tests.unit.loom.tensors.test_pointwise import TOLERANT, several

CASTS = ("float", "double", "half", "bfloat16", "long", "int", "short", "bool")


@pytest.mark.parametrize("name", CASTS)
@given(data=st.data())
def test_casts(lt: Tensors, name: str, data: Any) -> None:
    (x,) = data.draw(several(1, (0, 3)))  # torch leaves open what a negative number is as a uint8
    agree(lt, lambda ns, x: getattr(x, name)(), [x], rtol=1e-2, atol=1e-2)


@given(data=st.data())
def test_to(lt: Tensors, data: Any) -> None:
    (x,) = data.draw(several(1, (0, 3)))
    y = data.draw(operands((2,), dtypes=ALL, grad=False))
    agree(lt, lambda ns, x, y: x.to(y), [x, y], rtol=1e-2, atol=1e-2)
    agree(lt, lambda ns, x, y: x.type_as(y), [x, y], rtol=1e-2, atol=1e-2)
    agree(lt, lambda ns, x, y: x.to(y.dtype, copy=True), [x, y], rtol=1e-2, atol=1e-2)


def test_to_names(lt: Tensors) -> None:
    x = lt.tensor([1.0])
    assert x.to("int64").dtype.name == "int64"
    assert x.to(torch.float16).dtype.name == "float16"
    assert x.to("float32") is x
    assert x.to("float32", copy=True) is not x
    with pytest.raises(TypeError, match="there is no dtype 'float7'"):
        x.to("float7")


@given(data=st.data())
def test_copies(lt: Tensors, data: Any) -> None:
    (x,) = data.draw(several(1))
    agree(lt, lambda ns, x: x.clone(), [x])
    agree(lt, lambda ns, x: x.contiguous(), [x])
    agree(lt, lambda ns, x: x.contiguous() is x, [x])


@given(data=st.data())
def test_copy_in_place(lt: Tensors, data: Any) -> None:
    shape = data.draw(shapes())
    if data.draw(st.booleans()):
        x = data.draw(operands(shape, FLOATS))
        y = data.draw(operands(data.draw(broadcastable(shape)), FLOATS))
        agree(lt, lambda ns, x, y: (x * 2).copy_(y), [x, y], **TOLERANT)
    else:
        x = data.draw(operands(shape, ALL, grad=False, low=0))
        y = data.draw(operands(data.draw(broadcastable(shape)), ALL, grad=False, low=0))
        agree(lt, lambda ns, x, y: x.copy_(y), [x, y])


@given(data=st.data())
def test_fill_in_place(lt: Tensors, data: Any) -> None:
    (x,) = data.draw(several(1))
    y = data.draw(operands((), (torch.float32,)))
    number = data.draw(st.sampled_from((True, 3, 2.5)))
    if x.requires_grad or y.requires_grad:
        if x.memory.dtype.is_floating_point:
            agree(lt, lambda ns, x: x.clone().fill_(number), [x])
            agree(lt, lambda ns, x: x.clone().zero_(), [x])
            agree(lt, lambda ns, x, y: x.clone().fill_(y), [x, y], rtol=1e-2, atol=1e-2)
    else:
        agree(lt, lambda ns, x: x.fill_(number), [x])
        agree(lt, lambda ns, x: x.zero_(), [x])
        agree(lt, lambda ns, x: x.clone().fill_(ns.tensor(2.5)), [x])


def test_fill_takes_no_dimensions(lt: Tensors) -> None:
    agree(lt, lambda ns, x, y: x.fill_(y), [plain([1.0, 2.0]), plain([3.0])])


def test_copy_does_not_fit(lt: Tensors) -> None:
    agree(lt, lambda ns, x, y: x.copy_(y), [plain([1.0, 2.0]), plain([1.0, 2.0, 3.0])])
    agree(lt, lambda ns, x, y: x.copy_(y), [plain([1.0]), plain([1.0, 2.0, 3.0])])
