"""Transposed convolutions, and convolutions of three dimensions of space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from loom.tensors.commands import T
from loom.tensors.metas import Meta, Shape
from loom.tensors.op import Op, function
from loom.tensors.ops.convolution import images, spread
from loom.tensors.tensor import Tensor


class Way(NamedTuple):
    """How a kernel moves, as torch's kernels take it."""

    stride: Shape
    padding: Shape
    dilation: Shape
    transposed: bool
    output_padding: Shape
    groups: int


def _lists(way: Way) -> tuple[Any, ...]:
    return tuple(list(each) if isinstance(each, tuple) else each for each in way)


def _sizes(x: Shape, weight: Shape, way: Way) -> Shape:
    found = []
    for place, size in enumerate(x[2:]):
        reach = way.dilation[place] * (weight[place + 2] - 1)
        if way.transposed:
            size = (size - 1) * way.stride[place] - 2 * way.padding[place] + reach + way.output_padding[place] + 1
        else:
            size = (size + 2 * way.padding[place] - reach - 1) // way.stride[place] + 1
        found.append(size)
    return tuple(found)


def _rule(metas: Sequence[Meta], numbers: tuple[Any, ...], way: Any) -> Meta:
    x, weight, *bias = metas
    if x.dtype is not weight.dtype:
        raise RuntimeError(f"expected scalar type {x.dtype.scalar_name} but found {weight.dtype.scalar_name}")
    if way.groups <= 0 or min(way.stride) <= 0 or min(way.dilation) <= 0 or min(way.padding) < 0:
        raise RuntimeError("groups, stride and dilation have to be positive, and padding not negative")
    if weight.shape[0] % way.groups:
        raise RuntimeError(f"expected weight to be divisible by groups={way.groups} at dimension 0")
    into = weight.shape[0] if way.transposed else weight.shape[1] * way.groups
    if x.shape[1] != into:
        raise RuntimeError(
            f"Given weight of size {list(weight.shape)}, expected input{list(x.shape)} to have {into} channels, "
            f"but got {x.shape[1]} channels instead"
        )
    out = weight.shape[1] * way.groups if way.transposed else weight.shape[0]
    if bias and bias[0].shape != (out,):
        raise RuntimeError(f"expected bias to be 1-dimensional with {out} elements, but got {list(bias[0].shape)}")
    for place, pad in enumerate(way.output_padding):
        if way.transposed and not 0 <= pad < max(way.stride[place], way.dilation[place]):
            raise RuntimeError("output padding must be smaller than either stride or dilation")
    sizes = _sizes(x.shape, weight.shape, way)
    if min(sizes) < 1:
        raise RuntimeError(
            f"Given input size per channel: {list(x.shape[2:])}. Calculated output size: {list(sizes)}"
        )
    return images((x.shape[0], out, *sizes), [x, weight])


def _arguments(tensors: int, numbers: int, way: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (T(0), T(1), T(2) if tensors > 2 else None, *_lists(way)), {}


def _back_arguments(tensors: int, numbers: int, static: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    way, mask = static
    return (T(0), T(1), T(2), None, *_lists(way), list(mask)), {}


def _back_rule(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> tuple[Meta, ...]:
    grad, x, weight = metas
    return images(x.shape, metas), images(weight.shape, metas), Meta(grad.shape[1:2], grad.dtype)


def _back_backward(node: Any, grads: Any) -> tuple[Tensor | None, ...]:
    """The gradients of gradients: a convolution is linear in its input and in its weight."""
    way, _ = node.static
    grad, x, weight = node[0], node[1], node[2]
    of_x, of_weight = grads.get(0), grads.get(1)
    of_grad = None
    if node.needs(0):
        parts = [] if of_x is None else [_convolution((of_x, weight), (), way)]
        parts += [] if of_weight is None else [_convolution((x, of_weight), (), way)]
        of_grad = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    again_x = again_weight = None
    if of_weight is not None and node.needs(1):
        again_x = _gradients((grad, x, of_weight), (), (way, (True, False, False)))[0]
    if of_x is not None and node.needs(2):
        again_weight = _gradients((grad, of_x, weight), (), (way, (False, True, False)))[1]
    return of_grad, again_x, again_weight


def _backward(node: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    of_bias: tuple[Tensor | None, ...] = ()
    if len(node.edges) > 2:
        of_bias = (grad.sum([0, *range(2, grad.dim())]) if node.needs(2) else None,)
    mask = node.needs(0), node.needs(1), False
    if not any(mask):
        return (None, None, *of_bias)
    found = _gradients((grad, node[0], node[1]), (), (node.static, mask))
    return (found[0] if mask[0] else None, found[1] if mask[1] else None, *of_bias)


_convolution: Op = Op("ops.aten.convolution.default", _rule, _backward, saves=(0, 1), arguments=_arguments)
_back: Op = Op(
    "ops.aten.convolution_backward.default", _back_rule, _back_backward, saves=(0, 1, 2), arguments=_back_arguments
)


def _gradients(inputs: tuple[Tensor, ...], numbers: tuple[Any, ...], static: Any) -> tuple[Tensor, ...]:
    return _back.several(inputs, numbers, static)


def _convolved(
    many: int, transposed: bool, x: Tensor, weight: Tensor, bias: Tensor | None, *ways: Any, groups: int
) -> Tensor:
    if weight.dim() != many + 2 or x.dim() not in (many + 1, many + 2):
        raise RuntimeError(
            f"Expected {many + 1}D (unbatched) or {many + 2}D (batched) input, but got input of size: "
            f"{list(x.shape)}"
        )
    if x.dim() == many + 1:
        whole = x.unsqueeze(0)
        return _convolved(many, transposed, whole, weight, bias, *ways, groups=groups).squeeze(0)  # type: ignore[no-any-return]
    stride, padding, dilation, output_padding = (spread(each, many) for each in ways)
    way = Way(stride, padding, dilation, transposed, output_padding, groups)
    return _convolution((x, weight) if bias is None else (x, weight, bias), (), way)


Sizes = int | Sequence[int]


@function
def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Tensor:
    return _convolved(1, True, input, weight, bias, stride, padding, dilation, output_padding, groups=groups)


@function
def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Tensor:
    return _convolved(2, True, input, weight, bias, stride, padding, dilation, output_padding, groups=groups)


@function
def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Tensor:
    return _convolved(3, True, input, weight, bias, stride, padding, dilation, output_padding, groups=groups)


@function
def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    return _convolved(3, False, input, weight, bias, stride, padding, dilation, 0, groups=groups)
