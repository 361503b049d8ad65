"""Images as columns of their windows, and back: `unfold` and `fold` of `torch.nn.functional`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from loom.tensors.dtypes import Kind
from loom.tensors.metas import Meta, Shape, wrapped
from loom.tensors.op import Op, function
from loom.tensors.ops.convolution import spread
from loom.tensors.ops.layouts.layout import positional
from loom.tensors.tensor import Tensor

Sizes = int | Sequence[int]
Metas = Sequence[Meta]


def _windows(sizes: Shape, kernel: Shape, dilation: Shape, padding: Shape, stride: Shape) -> Shape:
    """Return how many windows there are in each dimension.

    Raises:
        RuntimeError: a window has no size, no distance from the next, or does not fit.
    """
    for name, values in (("kernel size", kernel), ("dilation", dilation), ("stride", stride)):
        if min(values) <= 0:
            raise RuntimeError(
                f"{name} should be greater than zero, but got {name.replace(' ', '_')}: {list(values)}"
            )
    if min(padding) < 0:
        raise RuntimeError(f"padding should be non-negative, but got padding: {list(padding)}")
    found = tuple(
        (size + 2 * pad - step * (width - 1) - 1) // move + 1
        for size, width, step, pad, move in zip(sizes, kernel, dilation, padding, stride, strict=True)
    )
    if min(found) < 1:
        raise RuntimeError(
            f"Given spatial size {list(sizes)}, kernel_size={list(kernel)}, dilation={list(dilation)}, "
            f"padding={list(padding)}, stride={list(stride)}, calculated shape of the array of sliding blocks as "
            f"{list(found)}, but its components must be at least one."
        )
    return found


def _check_kind(name: str, meta: Meta) -> None:
    if meta.dtype.kind not in (Kind.FLOAT, Kind.COMPLEX, Kind.BOOL):
        raise NotImplementedError(f"\"{name}_out_cpu\" not implemented for '{meta.dtype.scalar_name}'")


def _columns_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    (meta,) = metas
    shape, kernel = meta.shape, static[0]
    wrapped(2, len(shape))
    if len(shape) not in (3, 4) or 0 in shape[-3:]:
        raise RuntimeError(
            "Expected 3D or 4D (batch mode) tensor with possibly 0 batch size and other non-zero dimensions for "
            f"input, but got: {list(shape)}"
        )
    many = prod(_windows(shape[-2:], *static))
    _check_kind("im2col", meta)
    return Meta((*shape[:-3], shape[-3] * prod(kernel), many), meta.dtype)


def _image_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    (meta,) = metas
    size, kernel, *rest = static
    shape = meta.shape
    if len(shape) not in (2, 3) or 0 in shape[-2:]:
        raise RuntimeError(
            "Expected 2D or 3D (batch mode) tensor for input with possibly 0 batch size and non-zero dimensions for"
            f" input, but got: {list(shape)}"
        )
    channels, left = divmod(shape[-2], prod(kernel)) if min(kernel) > 0 else (0, 0)
    if left:
        raise RuntimeError(
            f"Expected size of input's dimension 1 to be divisible by the product of kernel_size, but got "
            f"input.size(1)={shape[-2]} and kernel_size={list(kernel)}."
        )
    many = prod(_windows(size, kernel, *rest))
    if many != shape[-1]:
        raise RuntimeError(
            f"Given output_size={list(size)}, kernel_size={list(kernel)}, expected size of input's dimension 2 to "
            f"match the calculated number of sliding blocks {many}, but got input.size(2)={shape[-1]}."
        )
    _check_kind("col2im", meta)
    return Meta((*shape[:-2], channels, *size), meta.dtype)


_columns: Op = Op(
    "ops.aten.im2col",
    _columns_rule,
    lambda node, grad: (_image((grad,), (), (node.metas[0].shape[-2:], *node.static)),),
    arguments=positional,
)
_image: Op = Op(
    "ops.aten.col2im",
    _image_rule,
    lambda node, grad: (_columns((grad,), (), node.static[1:]),),
    arguments=positional,
)


@function
def unfold(input: Tensor, kernel_size: Sizes, dilation: Sizes = 1, padding: Sizes = 0, stride: Sizes = 1) -> Tensor:
    """Return the windows of images as columns; `Tensor.unfold` is torch's view along a dimension."""
    return _columns((input,), (), tuple(spread(each, 2) for each in (kernel_size, dilation, padding, stride)))


@function
def fold(
    input: Tensor,
    output_size: Sizes,
    kernel_size: Sizes,
    dilation: Sizes = 1,
    padding: Sizes = 0,
    stride: Sizes = 1,
) -> Tensor:
    """Return images of columns of their windows, in which windows that overlap are added up."""
    sizes = (output_size, kernel_size, dilation, padding, stride)
    return _image((input,), (), tuple(spread(each, 2) for each in sizes))
