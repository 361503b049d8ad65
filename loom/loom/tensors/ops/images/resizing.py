"""Images of other sizes: interpolated, or with channels as pixels."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor
from typing import Any

from loom.errors import NotSupported
from loom.tensors.commands import T
from loom.tensors.dtypes import Kind
from loom.tensors.metas import Meta, Shape
from loom.tensors.op import Op, function
from loom.tensors.ops.convolution import images, spread
from loom.tensors.tensor import Tensor

MODES = {
    "nearest": ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    "linear": ("upsample_linear1d", None, None),
    "bilinear": (None, "upsample_bilinear2d", None),
    "bicubic": (None, "upsample_bicubic2d", None),
    "trilinear": (None, None, "upsample_trilinear3d"),
}  # fmt: skip
"""torch's kernels of the modes, for one, two and three dimensions of space."""


def _kernel(name: str) -> Op:
    """Return an interpolation; static are the sizes, and what follows them in torch's kernel."""

    def rule(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> Meta:
        (meta,) = metas
        if meta.dtype.kind is not Kind.FLOAT:
            raise NotImplementedError(f"\"{name}\" not implemented for '{meta.dtype.scalar_name}'")
        if 0 in meta.shape[1:] or min(static[0]) <= 0:
            raise RuntimeError(
                f"Input and output sizes should be greater than 0, but got input {list(meta.shape)} and output "
                f"{list(static[0])}"
            )
        return images((*meta.shape[:2], *static[0]), metas)

    def back_rule(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> Meta:
        return images(static[1], metas)

    def backward(node: Any, grad: Tensor) -> tuple[Tensor]:
        size, *rest = node.static
        return (back((grad,), (), (size, node.metas[0].shape, *rest)),)

    def again(node: Any, grad: Tensor) -> tuple[Tensor]:
        size, _, *rest = node.static
        return (op((grad,), (), (size, *rest)),)

    def arguments(tensors: int, numbers: int, static: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (T(0), *[list(each) if isinstance(each, tuple) else each for each in static]), {}

    back: Op = Op(f"ops.aten.{name}_backward.default", back_rule, again, arguments=arguments)
    op: Op = Op(f"ops.aten.{name}.default", rule, backward, arguments=arguments)
    return op


_OPS = {name: _kernel(name) for names in MODES.values() for name in names if name is not None}


@function
def interpolate(
    input: Tensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """Return images [batch, channels, ...] of another size.

    Args:
        input: the images.
        size: the size, one number or one for each dimension of space.
        scale_factor: how many times the size of the input, instead of the size.
        mode: "nearest", "linear", "bilinear", "bicubic", "trilinear" or "area".
        align_corners: whether the middles of corners stay where they are.
        recompute_scale_factor: whether to use the factors that the rounded sizes have.
        antialias: not supported.

    Raises:
        ValueError: both of size and scale_factor are given, or none.
        NotImplementedError: there is no such mode for so many dimensions.
    """
    many = input.dim() - 2
    if (size is None) is (scale_factor is None):
        what = "either" if size is None else "only one of"
        raise ValueError(f"{what} size or scale_factor should be defined")
    if antialias:
        raise NotSupported("interpolate(antialias=True) is not supported on lazy tensors")
    if align_corners is not None and mode in ("nearest", "area"):
        raise ValueError(
            "align_corners option can only be set with the interpolating modes: linear | bilinear | bicubic | "
            "trilinear"
        )
    factors = None if scale_factor is None else _numbers(scale_factor, many)
    if size is not None:
        sizes = spread(size if isinstance(size, int) else tuple(map(int, size)), many)
    else:
        assert factors is not None
        sizes = tuple(floor(length * factor) for length, factor in zip(input.shape[2:], factors, strict=True))
    if len(sizes) != many:
        raise ValueError(
            f"Input and output must have the same number of spatial dimensions, but got input with spatial "
            f"dimensions of {list(input.shape[2:])} and output size of {list(sizes)}."
        )
    if mode == "area" and many == 2:
        return input._home.adaptive_avg_pool2d(input, sizes)  # type: ignore[no-any-return]
    names = MODES.get(mode, (None,) * 3)
    name = names[many - 1] if 1 <= many <= 3 else None
    if name is None:
        raise NotImplementedError(f"{mode!r} interpolation of {input.dim()}D input is not supported")
    used: Sequence[float | None] = (None,) * many if factors is None or recompute_scale_factor else factors
    corners = () if mode == "nearest" else (bool(align_corners),)
    return _OPS[name]((input,), (), (sizes, *corners, *used))


def _numbers(value: float | Sequence[float], many: int) -> tuple[float, ...]:
    found = (float(value),) * many if isinstance(value, (int, float)) else tuple(map(float, value))
    if len(found) != many:
        raise ValueError(
            f"Input and scale_factor must have the same number of spatial dimensions, but got {many} and "
            f"scale_factor of shape {list(found)}."
        )
    return found


# Channels as pixels


def _shuffled(metas: Sequence[Meta], numbers: tuple[Any, ...], many: Any) -> Meta:
    *lead, channels, height, width = metas[0].shape
    return images((*lead, channels // (many * many), height * many, width * many), metas)


def _unshuffled(metas: Sequence[Meta], numbers: tuple[Any, ...], many: Any) -> Meta:
    *lead, channels, height, width = metas[0].shape
    return images((*lead, channels * many * many, height // many, width // many), metas)


def _with_factor(tensors: int, numbers: int, many: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (T(0), many), {}


_shuffle: Op = Op(
    "nn.functional.pixel_shuffle",
    _shuffled,
    lambda node, grad: (_unshuffle((grad,), (), node.static),),
    arguments=_with_factor,
)
_unshuffle: Op = Op(
    "nn.functional.pixel_unshuffle",
    _unshuffled,
    lambda node, grad: (_shuffle((grad,), (), node.static),),
    arguments=_with_factor,
)


_shuffle_channels: Op = Op(
    "nn.functional.channel_shuffle",
    lambda metas, numbers, static: images(metas[0].shape, metas),
    lambda node, grad: (_shuffle_channels((grad,), (), grad.shape[1] // node.static),),
    arguments=_with_factor,
)


def _check_image(name: str, input: Tensor) -> Shape:
    if input.dim() < 3:
        raise RuntimeError(
            f"{name} expects input to have at least 3 dimensions, but got input with {input.dim()} dimension(s)"
        )
    return input.shape


@function
def pixel_shuffle(input: Tensor, upscale_factor: int) -> Tensor:
    """Return images with ``upscale_factor`` times the height and width, whose pixels were channels."""
    channels = _check_image("pixel_shuffle", input)[-3]
    many = upscale_factor
    if many <= 0:
        raise RuntimeError(f"pixel_shuffle expects a positive upscale_factor, but got {many}")
    if channels % (many * many):
        raise RuntimeError(
            "pixel_shuffle expects its input's 'channel' dimension to be divisible by the square of "
            f"upscale_factor, but input.size(-3)={channels} is not divisible by {many * many}"
        )
    return _shuffle((input,), (), many)


@function
def pixel_unshuffle(input: Tensor, downscale_factor: int) -> Tensor:
    """Return images with a part of the height and width, whose channels were pixels."""
    height, width = _check_image("pixel_unshuffle", input)[-2:]
    many = downscale_factor
    if many <= 0:
        raise RuntimeError(f"pixel_unshuffle expects a positive downscale_factor, but got {many}")
    for name, size in (("height", height), ("width", width)):
        if size % many:
            raise RuntimeError(
                f"pixel_unshuffle expects {name} to be divisible by downscale_factor, but {size} is not divisible "
                f"by {many}"
            )
    return _unshuffle((input,), (), many)


@function
def channel_shuffle(input: Tensor, groups: int) -> Tensor:
    """Return images with the channels of groups taken in turn."""
    shape = _check_image("channel_shuffle", input)
    if groups <= 0 or shape[1] % groups:
        raise RuntimeError(
            f"Number of channels must be divisible by groups. Got {shape[1]} channels and {groups} groups."
        )
    return _shuffle_channels((input,), (), int(groups))
