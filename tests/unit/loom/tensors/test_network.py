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


@given(st.data())
def test_rms_norm(lt: Tensors, data: Any) -> None:
    dtype = data.draw(DTYPES)
    x = spread_out(data, data.draw(shapes(least=1, smallest=2)), dtype)
    normalized = x.size[data.draw(st.integers(0, len(x.size) - 1)) :]
    eps = data.draw(st.sampled_from([None, 1e-3]))
    agree_with_parameters(
        lt,
        lambda ns, x, weight: functional(ns).rms_norm(x, normalized, weight, eps),
        x,
        parameters(data, normalized, dtype, 1),
        **near(dtype),
    )


@given(st.data())
def test_group_norm(lt: Tensors, data: Any) -> None:
    dtype, groups = data.draw(DTYPES), data.draw(st.integers(1, 3))
    channels = groups * data.draw(st.integers(1, 2))
    shape = (data.draw(st.integers(1, 3)), channels, *data.draw(shapes(least=1, most=2, smallest=2)))
    x, rest = spread_out(data, shape, dtype), parameters(data, (channels,), dtype)
    agree_with_parameters(
        lt,
        lambda ns, x, weight, bias: functional(ns).group_norm(x, groups, weight, bias, 1e-2),
        x,
        rest,
        strides=False,  # on the CPU, torch keeps the channels last
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


@given(st.data())
def test_attention(lt: Tensors, data: Any) -> None:
    dtype = data.draw(DTYPES)
    lead = data.draw(shapes(most=2, smallest=1, largest=2))
    length, other, size, values = (data.draw(st.integers(1, 4)) for _ in range(4))
    options: dict[str, Any] = {"scale": data.draw(st.sampled_from([None, 0.3]))}
    given = [
        data.draw(operands((*lead, length, size), (dtype,))),
        data.draw(operands((*lead, other, size), (dtype,))),
        data.draw(operands((*lead, other, values), (dtype,))),
    ]
    match data.draw(st.sampled_from(["no mask", "causal", "bool", "float"])):
        case "causal":
            options["is_causal"] = True
        case "bool":
            mask = torch.rand(length, other) > 0.5
            mask[:, 0] = True
            given.append(plain(mask))
        case "float":
            given.append(data.draw(operands((length, other), (dtype,))))
    # Torch chooses one of several kernels, whose layouts differ.
    agree(
        lt,
        lambda ns, *each: functional(ns).scaled_dot_product_attention(*each, **options),
        given,
        strides=False,
        second=False,
        **near(dtype),
    )
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        agree(
            lt,
            lambda ns, *each: functional(ns).scaled_dot_product_attention(*each, **options),
            given,
            strides=False,
            **near(dtype),
        )


def channels_last(x: Operand) -> Operand:
    made = x.of_torch().detach().contiguous(memory_format=torch.channels_last)
    return Operand(made.as_strided((made.numel(),), (1,)), x.size, made.stride(), 0, x.requires_grad)


@pytest.mark.parametrize("many", [1, 2])
@given(st.data())
def test_convolutions(lt: Tensors, many: int, data: Any) -> None:
    dtype, groups = data.draw(DTYPES), data.draw(st.sampled_from([1, 1, 2]))
    channels = groups * data.draw(st.integers(1, 2)) + (data.draw(st.integers(0, 12)) == 0)
    kernel = tuple(data.draw(st.integers(1, 3)) for _ in range(many))
    size = tuple(data.draw(st.integers(2, 5)) for _ in range(many))
    batch = data.draw(st.sampled_from([(), (1,), (2,)]))
    x = data.draw(operands((*batch, channels, *size), (dtype,)))
    outs = groups * data.draw(st.integers(1, 2))
    weight = data.draw(operands((outs, max(channels // groups, 1), *kernel), (dtype,)))
    if many == 2 and batch and data.draw(st.integers(0, 3)) == 0:
        x = channels_last(x)
    padding = data.draw(st.sampled_from([0, 1, (1,) * many, "same", "valid"]))
    options = {
        "stride": 1 if padding == "same" else data.draw(st.sampled_from([1, 2, (2, 1)[:many]])),
        "padding": padding,
        "dilation": data.draw(st.sampled_from([1, 1, 2, (1, 2)[:many]])),
        "groups": groups,
    }
    agree_with_parameters(
        lt,
        lambda ns, x, weight, bias: getattr(functional(ns), f"conv{many}d")(x, weight, bias, **options),
        x,
        [weight, *parameters(data, (outs,), dtype, 1)],
        **near(dtype),
    )


@given(st.data())
def test_convolutions_keep_channels_last(lt: Tensors, data: Any) -> None:
    x = channels_last(data.draw(operands((2, 3, 4, 5), (data.draw(DTYPES),), grad=True)))
    weight = data.draw(operands((2, 3, 2, 2), (x.memory.dtype,), grad=True, views=False))
    agree_with_either_backward(
        lt, lambda ns, x, w: functional(ns).conv2d(x, w), [x, weight], **near(x.memory.dtype)
    )


@pytest.mark.parametrize("name", ["max_pool2d", "avg_pool2d"])
@given(st.data())
def test_pooling(lt: Tensors, name: str, data: Any) -> None:
    batch = data.draw(st.sampled_from([(), (2,)]))
    x = data.draw(operands((*batch, 2, *(data.draw(st.integers(2, 6)) for _ in range(2)))))
    if batch and data.draw(st.integers(0, 2)) == 0:
        x = channels_last(x)
    kernel = data.draw(st.sampled_from([1, 2, 3, (2, 3)]))
    options: dict[str, Any] = {
        "stride": data.draw(st.sampled_from([None, 1, 2, (1, 2)])),
        "padding": data.draw(st.sampled_from([0, 0, 1])),
        "ceil_mode": data.draw(st.booleans()),
    }
    if name == "max_pool2d":
        options |= {"dilation": data.draw(st.sampled_from([1, 1, 2])), "return_indices": data.draw(st.booleans())}
    else:
        options |= {
            "count_include_pad": data.draw(st.booleans()),
            "divisor_override": data.draw(st.sampled_from([None, 3])),
        }
    agree(
        lt,
        lambda ns, x: getattr(functional(ns), name)(x, kernel, **options),
        [x],
        **near(x.memory.dtype),
    )


@given(st.data())
def test_adaptive_pooling(lt: Tensors, data: Any) -> None:
    batch = data.draw(st.sampled_from([(), (2,)]))
    x = data.draw(operands((*batch, 2, *(data.draw(st.integers(2, 5)) for _ in range(2)))))
    size = data.draw(st.sampled_from([1, 2, (1, 3), (None, 2)]))
    agree(lt, lambda ns, x: functional(ns).adaptive_avg_pool2d(x, size), [x], **near(x.memory.dtype))


F32 = torch.zeros


@pytest.mark.parametrize(
    ("name", "given", "options"),
    [
        ("layer_norm", [F32(4, 5)], {"normalized_shape": (4,)}),
        ("layer_norm", [F32(4, 5)], {"normalized_shape": (5,), "weight": F32(4)}),
        ("rms_norm", [F32(4, 5)], {"normalized_shape": (4,)}),
        ("group_norm", [F32(2, 3)], {"num_groups": 2}),
        ("batch_norm", [F32(1, 3)], {"running_mean": None, "running_var": None, "training": True}),
        ("batch_norm", [F32(2, 3)], {"running_mean": None, "running_var": None}),
        ("batch_norm", [F32(2, 3), F32(2), F32(2)], {}),
        ("dropout", [F32(2)], {"p": 1.5}),
        ("dropout", [F32(2).long()], {}),
        ("scaled_dot_product_attention", [F32(2, 3), F32(4, 2), F32(4, 3)], {}),
        ("conv2d", [F32(4, 5), F32(1, 1, 2, 2)], {}),
        ("conv2d", [F32(1, 3, 4, 4), F32(2, 2, 2, 2)], {}),
        ("conv2d", [F32(1, 2, 4, 4), F32(2, 2, 2, 2), F32(3)], {}),
        ("conv2d", [F32(1, 2, 4, 4), F32(2, 2, 6, 2)], {}),
        ("conv2d", [F32(1, 2, 4, 4), F32(3, 1, 2, 2)], {"groups": 2}),
        ("conv2d", [F32(1, 2, 4, 4), F32(3, 2, 2, 2)], {"padding": "same", "stride": 2}),
        ("conv2d", [F32(1, 2, 4, 4), F32(3, 2, 2, 2).double()], {}),
        ("max_pool2d", [F32(2, 4, 4)], {"kernel_size": 5}),
        ("max_pool2d", [F32(4, 4)], {"kernel_size": 2}),
        ("max_pool2d", [F32(2, 4, 4)], {"kernel_size": 2, "padding": 2}),
        ("avg_pool2d", [F32(2, 4, 4)], {"kernel_size": 2, "padding": 2}),
        ("adaptive_avg_pool2d", [F32(4)], {"output_size": 2}),
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
