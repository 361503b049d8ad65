"""Layers of networks agree with torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from loom.tensors.tensors import Tensors
from tests.support.torch_agreement import (
    FLOATS,
    Operand,
    agree,
    agree_with_either_backward,
    given,
    operands,
    plain,
    settled,
    shapes,
    to_torch,
)

DTYPES = st.sampled_from(FLOATS)
NEAR = {"rtol": 1e-3, "atol": 1e-4}
"""Of float32: the mean and the variance are computed in another order."""


def functional(ns: Any) -> Any:
    return torch.nn.functional if ns is torch else ns


@pytest.fixture(autouse=True)
def _no_advice() -> Iterator[None]:
    """Torch warns of an even kernel with the padding "same"."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def near(dtype: torch.dtype) -> dict[str, float]:
    return NEAR if dtype is torch.float32 else {"rtol": 1e-6, "atol": 1e-7}


def spread_out(data: Any, shape: tuple[int, ...], dtype: torch.dtype, grad: bool | None = None) -> Operand:
    """Draw an operand no two of whose elements are equal: a variance of 0 makes gradients of any size."""
    made: Operand = data.draw(operands(shape, (dtype,), grad=grad))
    return made if 0 not in made.stride else data.draw(operands(shape, (dtype,), grad=grad, views=False))


def parameters(
    data: Any, shape: tuple[int, ...], dtype: torch.dtype, many: int = 2, views: bool = True
) -> list[Operand | None]:
    """Draw weight and bias, or None; no bias without a weight, for which torch's own gradients fail."""
    one = st.one_of(st.none(), operands(shape, (dtype,), low=0.5, views=views))
    rest = [data.draw(one) for _ in range(many)]
    return rest if rest[0] is not None else [None] * many


def agree_with_parameters(lt: Tensors, work: Any, x: Operand, rest: list[Operand | None], **options: Any) -> None:
    """Check a function of a tensor and of parameters some of which are None."""
    present = [each for each in rest if each is not None]

    def filled(ns: Any, x: Any, *given: Any) -> Any:
        left = iter(given)
        return work(ns, x, *[None if each is None else next(left) for each in rest])

    agree_with_either_backward(lt, filled, [x, *present], **options)


@given(st.data())
def test_layer_norm(lt: Tensors, data: Any) -> None:
    dtype = data.draw(DTYPES)
    x = spread_out(data, data.draw(shapes(least=1, smallest=2)), dtype)
    normalized = x.size[data.draw(st.integers(0, len(x.size) - 1)) :]
    rest = parameters(data, normalized, dtype)
    agree_with_parameters(
        lt,
        lambda ns, x, weight, bias: functional(ns).layer_norm(x, normalized, weight, bias, 1e-3),
        x,
        rest,
        **near(dtype),
    )


@pytest.mark.parametrize("training", [False, True])
@given(st.data())
def test_batch_norm(lt: Tensors, training: bool, data: Any) -> None:
    dtype = torch.float64  # in float32 the gradients of a small batch are mostly rounding
    channels = data.draw(st.integers(1, 3))
    shape = (data.draw(st.integers(2, 3)), channels, *data.draw(shapes(most=2, smallest=1)))
    running = [data.draw(operands((channels,), (dtype,), low=0.5, grad=False, views=False)) for _ in range(2)]

    def work(ns: Any, x: Any, weight: Any, bias: Any, mean: Any, var: Any) -> Any:
        result = functional(ns).batch_norm(x, mean, var, weight, bias, training, 0.3, 1e-2)
        return result, mean, var

    # Of transposed tensors, torch's gradients are wrong if it is not training.
    x = spread_out(data, shape, dtype) if training else data.draw(operands(shape, (dtype,), views=False))
    rest = parameters(data, (channels,), dtype, views=training)
    agree_with_parameters(
        lt,
        work,
        x,
        [*rest, *running],
        strides=False,  # torch's kernels keep the channels last, or not
        **near(dtype),
    )


@given(st.data())
def test_dropout_draws_a_mask_once(lt: Tensors, data: Any) -> None:
    x = data.draw(operands(data.draw(shapes(smallest=1)), grad=True, low=1))
    p = data.draw(st.sampled_from([0.0, 0.3, 0.5, 1.0]))
    given = x.of_loom(lt)
    found = lt.dropout(given, p)  # type: ignore[attr-defined]
    assert found.strides == functional(torch).dropout(x.of_torch(), p).stride() or 1 in found.shape
    values = to_torch(found)
    mask = values != 0
    scale = 0 if p == 1 else 1 / (1 - p)
    torch.testing.assert_close(values, x.of_torch().detach() * mask * scale)
    (grad,) = lt.grad(found.sum(), given, retain_graph=True)
    assert grad is not None
    torch.testing.assert_close(to_torch(grad), mask.to(values.dtype) * scale)
    (again,) = lt.grad(found.mul(found).sum(), given, create_graph=True)
    assert again is not None
    (second,) = lt.grad(again.sum(), given)
    assert second is not None
    torch.testing.assert_close(to_torch(second), mask.to(values.dtype) * 2 * scale**2)


def test_dropout_follows_the_seed_and_only_in_training(lt: Tensors) -> None:
    x = lt.ones(64)
    lt.seed(1)
    first = to_torch(lt.dropout(x, 0.5))  # type: ignore[attr-defined]
    lt.seed(1)
    assert torch.equal(first, to_torch(lt.dropout(x, 0.5)))  # type: ignore[attr-defined]
    assert lt.dropout(x, 0.5, training=False) is x  # type: ignore[attr-defined]
    assert 10 < int((first == 0).sum()) < 54


F32 = torch.zeros


@pytest.mark.parametrize(
    ("name", "given", "options"),
    [
        ("layer_norm", [F32(4, 5)], {"normalized_shape": (4,)}),
        ("layer_norm", [F32(4, 5)], {"normalized_shape": (5,), "weight": F32(4)}),
        ("batch_norm", [F32(1, 3)], {"running_mean": None, "running_var": None, "training": True}),
        ("batch_norm", [F32(2, 3)], {"running_mean": None, "running_var": None}),
        ("batch_norm", [F32(2, 3), F32(2), F32(2)], {}),
        ("dropout", [F32(2)], {"p": 1.5}),
        ("dropout", [F32(2).long()], {}),
    ],
)
def test_what_torch_would_raise(lt: Tensors, name: str, given: list[Any], options: dict[str, Any]) -> None:
    def work(ns: Any, *each: Any) -> Any:
        made = {key: ns.zeros(tuple(value.shape)) if key == "weight" else value for key, value in options.items()}
        return getattr(functional(ns), name)(*each, **made)

    inputs = [plain(each) for each in given]
    agree(lt, work, inputs)
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        settled(work(lt, *[each.of_loom(lt) for each in inputs]))
