"""Convolutions, whose gradients are convolutions themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from loom.tensors.commands import T
from loom.tensors.grad_modes import grad_enabled
from loom.tensors.metas import Meta, Shape
from loom.tensors.op import Arguments, Op, function
from loom.tensors.tensor import Tensor


class Layout(NamedTuple):
    """How a kernel moves, for each dimension of space."""

    stride: Shape
    padding: Shape
    dilation: Shape
    groups: int


def spread(value: int | Sequence[int], dimensions: int) -> Shape:
    """Return a number for each dimension of space."""
    if isinstance(value, int):
        return (value,) * dimensions
    found = tuple(value)
    return found * dimensions if len(found) == 1 else found


def channels_last(meta: Meta) -> bool:
    """Whether the channels of images are next to each other in memory: torch keeps them so."""
    if len(meta.shape) != 4:
        return False
    least = 0
    strides = meta.strides
    if strides[1] == 0:
        return False
    for place in (1, 3, 2, 0):
        if meta.shape[place] == 0 or strides[place] < least:
            return False
        if place == 0 and least == strides[1]:
            return False
        least = strides[place] * (meta.shape[place] if meta.shape[place] > 1 else 1)
    return True


def images(shape: Shape, like: Sequence[Meta]) -> Meta:
    """Return the layout of images that are made of others: channels last if one of those has them last."""
    if len(shape) == 4 and any(map(channels_last, like)):
        _, channels, height, width = shape
        strides = (height * width * channels, 1, width * channels, channels)
        return Meta(shape, like[0].dtype, strides)
    return Meta(shape, like[0].dtype)


def _check(x: Meta, weight: Meta, bias: Meta | None, layout: Layout) -> None:
    own, groups = weight.shape, layout.groups
    if x.dtype is not weight.dtype:
        raise RuntimeError(f"expected scalar type {x.dtype.scalar_name} but found {weight.dtype.scalar_name}")
    if groups <= 0:
        raise RuntimeError("non-positive groups is not supported")
    if any(each < 0 for each in layout.padding):
        raise RuntimeError("negative padding is not supported")
    if any(each <= 0 for each in layout.stride):
        raise RuntimeError("non-positive stride is not supported")
    if any(each <= 0 for each in layout.dilation):
        raise RuntimeError("dilation should be greater than zero")
    if own[0] < groups or own[0] % groups:
        raise RuntimeError(
            f"Given groups={groups}, expected weight to be divisible by {groups} at dimension 0, but got weight of "
            f"size [{list(own)}] instead"
        )
    if x.shape[1] != own[1] * groups:
        raise RuntimeError(
            f"Given groups={groups}, weight of size {list(own)}, expected input{list(x.shape)} to have "
            f"{own[1] * groups} channels, but got {x.shape[1]} channels instead"
        )
    if bias is not None and bias.shape != own[:1]:
        raise RuntimeError(
            f"Given weight of size {list(own)}, expected bias to be 1-dimensional with {own[0]} elements, but got "
            f"bias of size {list(bias.shape)} instead"
        )
    padded = [size + 2 * each for size, each in zip(x.shape[2:], layout.padding, strict=True)]
    kernel = [each * (size - 1) + 1 for size, each in zip(own[2:], layout.dilation, strict=True)]
    if any(size < each for size, each in zip(padded, kernel, strict=True)):
        raise RuntimeError(
            f"Calculated padded input size per channel: ({' x '.join(map(str, padded))}). Kernel size: "
            f"({' x '.join(map(str, kernel))}). Kernel size can't be greater than actual input size"
        )


def _convolved(metas: Sequence[Meta], numbers: tuple[Any, ...], layout: Any) -> Meta:
    x, weight, *bias = metas
    _check(x, weight, bias[0] if bias else None, layout)
    size = [
        (many + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        for many, kernel, stride, padding, dilation in zip(
            x.shape[2:], weight.shape[2:], layout.stride, layout.padding, layout.dilation, strict=True
        )
    ]
    return images((x.shape[0], weight.shape[0], *size), [x, weight])


def _arguments(tensors: int, numbers: int, layout: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(map(T, range(tensors))), {
        "stride": layout.stride, "padding": layout.padding, "dilation": layout.dilation, "groups": layout.groups
    }  # fmt: skip


def _part_arguments(size_first: bool) -> Arguments:
    """Return the arguments of `torch.nn.grad`'s functions: a size, and the two tensors, the gradient last."""

    def arguments(tensors: int, numbers: int, static: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        size, layout = static
        size_and_other = (size, T(1)) if size_first else (T(1), size)
        return (*size_and_other, T(0), *layout), {}

    return arguments


def _part(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> Meta:
    return images(static[0], metas)


def _of_input_backward(node: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    _, layout = node.static
    weight = node[1]
    return (
        _convolution((grad, weight), (), layout) if node.needs(0) else None,
        _of_weight((node[0], grad), (), (weight.shape, layout)) if node.needs(1) else None,
    )


def _of_weight_backward(node: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    _, layout = node.static
    x = node[1]
    return (
        _convolution((x, grad), (), layout) if node.needs(0) else None,
        _of_input((node[0], grad), (), (x.shape, layout)) if node.needs(1) else None,
    )


def _kernel_arguments(tensors: int, numbers: int, static: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    layout, mask = static
    none = [0] * len(layout.stride)
    channels = None  # of the bias, which is summed by itself
    return (
        T(0), T(1), T(2), channels, list(layout.stride), list(layout.padding), list(layout.dilation), False, none,
        layout.groups, list(mask),
    ), {}  # fmt: skip


def _kernel_rule(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> tuple[Meta, ...]:
    grad, x, weight = metas
    return images(x.shape, metas), images(weight.shape, metas), Meta(grad.shape[1:2], grad.dtype)


_kernel = Op("ops.aten.convolution_backward.default", _kernel_rule, arguments=_kernel_arguments)


def _backward(node: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    layout, x, weight = node.static, node[0], node[1]
    of_bias: tuple[Tensor | None, ...] = ()
    if len(node.edges) > 2:
        of_bias = (grad.sum([0, *range(2, grad.dim())]) if node.needs(2) else None,)
    if not grad_enabled.get() and node.needs(0) and node.needs(1):
        return (*_kernel.several((grad, x, weight), (), (layout, (True, True, False)))[:2], *of_bias)
    of_input = _of_input((grad, weight), (), (x.shape, layout)) if node.needs(0) else None
    of_weight = _of_weight((grad, x), (), (weight.shape, layout)) if node.needs(1) else None
    return (of_input, of_weight, *of_bias)


# The three operations of a trilinear form, each of which is a derivative of the others.
_convolution: Op = Op("conv2d", _convolved, _backward, saves=(0, 1), arguments=_arguments)
_of_input: Op = Op(
    "nn.grad.conv2d_input", _part, _of_input_backward, saves=(0, 1), arguments=_part_arguments(size_first=True)
)
_of_weight: Op = Op(
    "nn.grad.conv2d_weight", _part, _of_weight_backward, saves=(0, 1), arguments=_part_arguments(size_first=False)
)


def _conv(
    many: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int | Sequence[int],
    padding: int | Sequence[int] | str,
    dilation: int | Sequence[int],
    groups: int,
) -> Tensor:
    if weight.dim() != many + 2 or x.dim() not in (many + 1, many + 2):
        raise RuntimeError(
            f"Expected {many + 1}D (unbatched) or {many + 2}D (batched) input to conv{many}d, but got input of "
            f"size: {list(x.shape)}"
        )
    if x.dim() == many + 1:
        return _conv(many, x.unsqueeze(0), weight, bias, stride, padding, dilation, groups).squeeze(0)  # type: ignore[no-any-return]
    strides, dilations = spread(stride, many), spread(dilation, many)
    if isinstance(padding, str):
        x, paddings = _padded(x, weight, strides, dilations, padding)
    else:
        paddings = spread(padding, many)
    if many == 1:  # as torch does it, so that the layout is the same
        x, weight = x.contiguous().unsqueeze(2), weight.unsqueeze(2)
        layout = Layout((1, *strides), (0, *paddings), (1, *dilations), groups)
    else:
        layout = Layout(strides, paddings, dilations, groups)
    found = _convolution((x, weight) if bias is None else (x, weight, bias), (), layout)
    return found if many == 2 else found.squeeze(2)


def _with_zeros(metas: Sequence[Meta], numbers: tuple[Any, ...], pads: Any) -> Meta:
    (x,) = metas
    shape = list(x.shape)
    for place in range(len(pads) // 2):
        shape[-1 - place] += pads[2 * place] + pads[2 * place + 1]
    return images(tuple(shape), metas)


_pad: Op = Op(
    "constant_pad_nd",
    _with_zeros,
    lambda node, grad: (_pad((grad,), (), tuple(-each for each in node.static)),),
    arguments=lambda tensors, numbers, pads: ((T(0), list(pads)), {}),
)


def _padded(x: Tensor, weight: Tensor, stride: Shape, dilation: Shape, padding: str) -> tuple[Tensor, Shape]:
    """Return the input, with one more 0 at the end where the padding is odd, and the padding of both sides."""
    if padding == "valid":
        return x, (0,) * len(stride)
    if padding != "same":
        raise RuntimeError(f"Invalid padding string: '{padding}'")
    if any(each != 1 for each in stride):
        raise RuntimeError("padding='same' is not supported for strided convolutions")
    totals = [each * (size - 1) for size, each in zip(weight.shape[2:], dilation, strict=True)]
    if any(total % 2 for total in totals):
        x = _pad((x,), (), tuple(part for total in reversed(totals) for part in (0, total % 2)))
    return x, tuple(total // 2 for total in totals)


@function
def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    return _conv(1, input, weight, bias, stride, padding, dilation, groups)


@function
def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    return _conv(2, input, weight, bias, stride, padding, dilation, groups)
