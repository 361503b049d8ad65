"""Pooling of images: the largest and the mean of windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loom.tensors.commands import T
from loom.tensors.dtypes import Kind, int64
from loom.tensors.metas import Meta, Shape
from loom.tensors.op import Op, function
from loom.tensors.ops.convolution import images, spread
from loom.tensors.tensor import Tensor

_Window = tuple[Shape, Shape, Shape, Shape, bool]
"""Kernel, stride, padding, dilation, and whether windows reach over the end."""


def _windows(size: int, kernel: int, stride: int, padding: int, dilation: int, over: bool) -> int:
    """Return how many windows there are along a dimension."""
    rest = size + 2 * padding - dilation * (kernel - 1) - 1
    many = (rest + (stride - 1 if over else 0)) // stride + 1
    # The last one has to begin within the image or its left padding.
    return many - 1 if over and (many - 1) * stride >= size + padding else many


def _pooled(meta: Meta, window: _Window) -> Meta:
    kernel, stride, padding, dilation, over = window
    shape = meta.shape
    if len(shape) not in (3, 4) or 0 in shape[-3:]:
        raise RuntimeError("non-empty 3D or 4D (batch mode) tensor expected for input")
    if meta.dtype.kind < Kind.FLOAT:
        raise NotImplementedError(f"\"pool2d\" not implemented for '{meta.dtype.scalar_name}'")
    if any(each == 0 for each in stride):
        raise RuntimeError("stride should not be zero")
    for pad, size, step in zip(padding, kernel, dilation, strict=True):
        if pad > (step * (size - 1) + 1) // 2:
            raise RuntimeError(
                f"pad should be at most half of effective kernel size, but got pad={pad}, kernel_size={size} and "
                f"dilation={step}"
            )
    sizes = tuple(
        _windows(shape[place - 2], kernel[place], stride[place], padding[place], dilation[place], over)
        for place in (0, 1)
    )
    if min(sizes) < 1:
        before, after = ("x".join(map(str, (*shape[-3:-2], *each))) for each in (shape[-2:], sizes))
        raise RuntimeError(
            f"Given input size: ({before}). Calculated output size: ({after}). Output size is too small"
        )
    return images((*shape[:-2], *sizes), [meta])


def _largest(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> tuple[Meta, Meta]:
    meta = _pooled(metas[0], static)
    return meta, meta.of(int64)


def _largest_backward(node: Any, grads: Any) -> tuple[Tensor]:
    return (_of_largest((grads[0], node[0].detach(), node.result().detach()), (), node.static),)


def _of_largest_backward(node: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    index = node[2]
    flat = grad.flatten(-2).gather(-1, index.flatten(-2))
    return flat.reshape(index.shape), None, None


_max_pool2d: Op = Op(
    "ops.aten.max_pool2d_with_indices.default",
    _largest,
    _largest_backward,
    saves=(0,),
    saves_results=(1,),
    arguments=lambda tensors, numbers, static: ((T(0), *static), {}),
)
_of_largest: Op = Op(
    "ops.aten.max_pool2d_with_indices_backward.default",
    lambda metas, numbers, static: images(metas[1].shape, metas[1:2]),
    _of_largest_backward,
    saves=(2,),
    arguments=lambda tensors, numbers, static: ((T(0), T(1), *static, T(2)), {}),
)


@function
def max_pool2d(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Return the largest of each window; with ``return_indices`` its place in the image too."""
    kernel = spread(kernel_size, 2)
    steps = kernel if stride is None or stride == [] else spread(stride, 2)
    window = (kernel, steps, spread(padding, 2), spread(dilation, 2), bool(ceil_mode))
    found = _max_pool2d.several((input,), (), window)
    return found if return_indices else found[0]


def _averaged(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> Meta:
    kernel, stride, padding, over, *_ = static
    for pad, size in zip(padding, kernel, strict=True):
        if pad > size // 2:
            raise RuntimeError(
                f"pad should be at most half of effective kernel size, but got pad={pad}, kernel_size={size}"
            )
    return _pooled(metas[0], (kernel, stride, padding, (1, 1), over))


_avg_pool2d: Op = Op(
    "nn.functional.avg_pool2d",
    _averaged,
    lambda node, grad: (_of_average((grad, node[0].detach()), (), node.static),),
    saves=(0,),
    arguments=lambda tensors, numbers, static: ((T(0), *static), {}),
)
_of_average: Op = Op(
    "ops.aten.avg_pool2d_backward.default",
    lambda metas, numbers, static: images(metas[1].shape, metas[1:]),
    lambda node, grad: (_avg_pool2d((grad,), (), node.static), None),
    arguments=lambda tensors, numbers, static: ((T(0), T(1), *static), {}),
)


@function
def avg_pool2d(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    if divisor_override == 0:
        raise RuntimeError("divisor must be not zero")
    kernel = spread(kernel_size, 2)
    steps = kernel if stride is None or stride == [] else spread(stride, 2)
    static = (kernel, steps, spread(padding, 2), bool(ceil_mode), bool(count_include_pad), divisor_override)
    return _avg_pool2d((input,), (), static)


def _adapted(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> Meta:
    (meta,) = metas
    return images((*meta.shape[:-2], *static), metas)


_adaptive: Op = Op(
    "nn.functional.adaptive_avg_pool2d",
    _adapted,
    lambda node, grad: (_of_adaptive((grad, node[0].detach())),),
    saves=(0,),
    arguments=lambda tensors, numbers, static: ((T(0), static), {}),
)
_of_adaptive: Op = Op(
    "ops.aten._adaptive_avg_pool2d_backward.default",
    lambda metas, numbers, static: images(metas[1].shape, metas[1:]),
    lambda node, grad: (_adaptive((grad,), (), node.metas[0].shape[-2:]), None),
)


@function
def adaptive_avg_pool2d(input: Tensor, output_size: int | Sequence[int | None]) -> Tensor:
    """Return the means of windows so that the result has the given height and width; None keeps the input's."""
    if input.dim() not in (3, 4):
        raise RuntimeError(f"adaptive_avg_pool2d(): Expected 3D or 4D tensor, but got {list(input.shape)}")
    sizes = (output_size,) * 2 if isinstance(output_size, int) else tuple(output_size)
    wanted = tuple(size if each is None else each for each, size in zip(sizes, input.shape[-2:], strict=True))
    return _adaptive((input,), (), wanted)
