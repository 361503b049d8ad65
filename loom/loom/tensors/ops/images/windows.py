"""Pooling of one dimension, the largest of windows of a fitting size, and normalisation of images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loom.tensors.commands import T
from loom.tensors.dtypes import int64
from loom.tensors.metas import Meta
from loom.tensors.op import Op, function
from loom.tensors.ops.convolution import images, spread
from loom.tensors.tensor import Tensor

Sizes = int | Sequence[int]


def _row(name: str, input: Tensor) -> Tensor:
    """Return lines as images of height 1."""
    if input.dim() not in (2, 3):
        raise RuntimeError(f"{name}(): Expected 2D or 3D input tensor, but got {list(input.shape)}")
    return input.unsqueeze(-2)  # type: ignore[no-any-return]


def _one(value: Sizes) -> int:
    return spread(value, 1)[0]


@function
def max_pool1d(
    input: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Return the largest of each window along the last dimension."""
    step = kernel_size if stride is None or stride == [] else stride
    found, index = input._home.max_pool2d(
        _row("max_pool1d", input), (1, _one(kernel_size)), (1, _one(step)), (0, _one(padding)), (1, _one(dilation)),
        ceil_mode, True,
    )  # fmt: skip
    return (found.squeeze(-2), index.squeeze(-2)) if return_indices else found.squeeze(-2)


@function
def avg_pool1d(
    input: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """Return the mean of each window along the last dimension."""
    step = kernel_size if stride is None or stride == [] else stride
    rows = _row("avg_pool1d", input)
    sizes = (1, _one(kernel_size)), (1, _one(step)), (0, _one(padding))
    return input._home.avg_pool2d(rows, *sizes, ceil_mode, count_include_pad).squeeze(-2)  # type: ignore[no-any-return]


@function
def adaptive_avg_pool1d(input: Tensor, output_size: Sizes) -> Tensor:
    """Return the means of windows along the last dimension so that the result has the given length."""
    rows = _row("adaptive_avg_pool1d", input)
    return input._home.adaptive_avg_pool2d(rows, (1, _one(output_size))).squeeze(-2)  # type: ignore[no-any-return]


def _largest(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> tuple[Meta, Meta]:
    meta = images((*metas[0].shape[:-2], *static), metas)
    return meta, meta.of(int64)


def _largest_backward(node: Any, grads: Any) -> tuple[Tensor]:
    return (_of_largest((grads[0], node[0].detach(), node.result().detach())),)


def _of_largest_backward(node: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    index = node[2]
    return grad.flatten(-2).gather(-1, index.flatten(-2)).reshape(index.shape), None, None


_adaptive = Op(
    "ops.aten.adaptive_max_pool2d.default",
    _largest,
    _largest_backward,
    saves=(0,),
    saves_results=(1,),
    arguments=lambda tensors, numbers, static: ((T(0), list(static)), {}),
)
_of_largest = Op(
    "ops.aten.adaptive_max_pool2d_backward.default",
    lambda metas, numbers, static: images(metas[1].shape, metas[1:2]),
    _of_largest_backward,
    saves=(2,),
)


@function
def adaptive_max_pool2d(
    input: Tensor, output_size: int | Sequence[int | None], return_indices: bool = False
) -> Any:
    """Return the largest of windows so that the result has the given height and width; None keeps the input's."""
    if input.dim() < 3:
        raise ValueError("Input dimension should be at least 3")
    if input.dim() not in (3, 4) or 0 in input.shape[-3:]:
        raise RuntimeError(f"adaptive_max_pool2d(): Expected 3D or 4D tensor, but got: {list(input.shape)}")
    sizes = (output_size,) * 2 if isinstance(output_size, int) else tuple(output_size)
    wanted = tuple(size if each is None else each for each, size in zip(sizes, input.shape[-2:], strict=True))
    found = _adaptive.several((input,), (), wanted)
    return found if return_indices else found[0]


@function
def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise each channel (dimension 1) of each image by itself."""
    shape = input.shape
    if len(shape) < 2:
        raise RuntimeError(f"Expected at least 2 dimensions for input tensor but received {len(shape)}")
    many = input.numel() // max(shape[0] * shape[1], 1)
    if use_input_stats and many <= 1:
        raise ValueError(
            f"Expected more than 1 spatial element when training, got input size torch.Size({list(shape)})"
        )

    def each_image(parameter: Tensor | None) -> Tensor | None:
        return None if parameter is None else parameter.repeat(shape[0])

    means, variances = each_image(running_mean), each_image(running_var)
    together = input.reshape(1, shape[0] * shape[1], *shape[2:])
    found = input._home.batch_norm(
        together, means, variances, each_image(weight), each_image(bias), use_input_stats, momentum, eps
    )
    for running, new in ((running_mean, means), (running_var, variances)):
        if running is not None and new is not None and use_input_stats:
            running.copy_(new.reshape(shape[0], -1).mean(0))
    return found.reshape(shape)  # type: ignore[no-any-return]


@function
def local_response_norm(
    input: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Tensor:
    """Divide by the size of neighbouring channels."""
    if input.dim() < 3:
        raise ValueError(f"Expected 3D or higher dimensionality input (got {input.dim()} dimensions)")
    channels = input.shape[1]
    squares = input._home.pad(
        (input * input).movedim(1, -1), (size // 2, (size - 1) // 2)
    ).unfold(-1, size, 1).sum(-1) / size  # fmt: skip
    assert squares.shape[-1] == channels
    return input / (squares.movedim(-1, 1) * alpha + k) ** beta  # type: ignore[no-any-return]
