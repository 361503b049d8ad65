"""Tensors with more at their edges: constants, or what is within, mirrored, repeated or from the other side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loom.tensors.commands import S, T
from loom.tensors.metas import Meta, Shape, pointwise_meta
from loom.tensors.op import Op, function
from loom.tensors.ops.convolution import images
from loom.tensors.tensor import Tensor


def _padded(meta: Meta, pads: Sequence[int]) -> Shape:
    shape = list(meta.shape)
    for place in range(len(pads) // 2):
        shape[-1 - place] += pads[2 * place] + pads[2 * place + 1]
    return tuple(shape)


def _constant_rule(metas: Sequence[Meta], numbers: tuple[Any, ...], pads: Any) -> Meta:
    (meta,) = metas
    if len(pads) > 2 * len(meta.shape):
        raise RuntimeError(
            "Padding length should be less than or equal to two times the input dimension but got padding length "
            f"{len(pads)} and input of dimension {len(meta.shape)}"
        )
    shape = _padded(meta, pads)
    for place, size in enumerate(shape):
        if size < 0 or any(pad < -meta.shape[place] for pad in _of(pads, len(shape), place)):
            raise RuntimeError(
                f"The input size {meta.shape[place]}, plus negative padding, resulted in a negative output size"
            )
    if all(each <= 0 for each in pads):  # a copy of a part, which keeps the order of dimensions in memory
        return pointwise_meta([Meta(shape, meta.dtype, meta.strides)], meta.dtype)
    return images(shape, metas)


def _of(pads: Sequence[int], dimensions: int, place: int) -> Sequence[int]:
    """Return the padding of one dimension."""
    at = 2 * (dimensions - 1 - place)
    return pads[at : at + 2]


_constant: Op = Op(
    "constant_pad_nd",
    _constant_rule,
    lambda node, grad: (_constant((grad,), (0,), tuple(-each for each in node.static)),),
    arguments=lambda tensors, numbers, pads: ((T(0), list(pads), S(0)), {}),
)


def _edges(name: str, dimensions: int) -> Op:
    """Return the padding with elements of the tensor itself, whose gradient is torch's kernel."""

    def rule(metas: Sequence[Meta], numbers: tuple[Any, ...], pads: Any) -> Meta:
        (meta,) = metas
        shape = _padded(meta, pads)
        for place in range(len(pads) // 2):
            size, pair = meta.shape[-1 - place], pads[2 * place : 2 * place + 2]
            if name == "reflection" and max(pair) >= size:
                raise RuntimeError(
                    "Argument #4: Padding size should be less than the corresponding input dimension, but got: "
                    f"padding {pair} at dimension {len(shape) - 1 - place} of input {list(meta.shape)}"
                )
            if shape[-1 - place] < 1:
                raise RuntimeError(f"input (size: {size}) is too small. Calculated output: {shape[-1 - place]}")
        return images(shape, metas)

    def again(node: Any, grad: Tensor) -> tuple[Tensor, None]:
        return forth((grad,), (), node.static), None

    def arguments(tensors: int, numbers: int, pads: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (*map(T, range(tensors)), list(pads)), {}

    back = Op(
        f"ops.aten.{name}_pad{dimensions}d_backward.default",
        lambda metas, numbers, pads: images(metas[1].shape, metas[1:]),
        again,
        arguments=arguments,
    )
    forth: Op = Op(
        f"ops.aten.{name}_pad{dimensions}d.default",
        rule,
        lambda node, grad: (back((grad, node[0].detach()), (), node.static),),
        saves=(0,),
        arguments=arguments,
    )
    return forth


_EDGES = {(name, many): _edges(name, many) for name in ("reflection", "replication") for many in (1, 2, 3)}
_NAMES = {"reflect": "reflection", "replicate": "replication"}


@function
def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Return a tensor with more, or less, at its edges.

    Args:
        input: the tensor.
        pad: how much before and after the last dimension, then the one before it, and so on.
        mode: "constant", "reflect", "replicate" or "circular".
        value: the constant; 0 if None.

    Raises:
        NotImplementedError: there is no such mode, or not for so many dimensions.
    """
    pads = tuple(int(each) for each in pad)
    if len(pads) % 2:
        raise RuntimeError("Padding length must be divisible by 2")
    if mode == "constant":
        return _constant((input,), (0 if value is None else value,), pads)
    if value is not None and value != 0:
        raise ValueError(f'Padding mode "{mode}" doesn\'t take in value argument')
    many = len(pads) // 2
    if mode not in (*_NAMES, "circular") or not 1 <= many <= 3 or input.dim() not in (many + 1, many + 2):
        raise NotImplementedError(
            f"Padding size {len(pads)} is not supported for {input.dim()}D input tensor, or mode {mode!r}"
        )
    return _around(input, pads) if mode == "circular" else _EDGES[_NAMES[mode], many]((input,), (), pads)


def _around(tensor: Tensor, pads: Sequence[int]) -> Tensor:
    """Return a tensor with elements of the other side at each edge."""
    for place in range(len(pads) // 2):
        before, after = pads[2 * place : 2 * place + 2]
        dim = tensor.dim() - 1 - place
        size = tensor.shape[dim]
        if max(before, after) > size:
            raise RuntimeError("Padding value causes wrapping around more than once.")
        if size + before + after < 0:
            raise RuntimeError("Negative padding value is resulting in an empty dimension")
        rest = size - max(-before, 0) - max(-after, 0)
        kept = tensor.narrow(dim, max(-before, 0), rest) if rest < size else tensor
        parts = [kept.narrow(dim, rest - before, before)] if before > 0 else []
        parts.append(kept)
        parts += [kept.narrow(dim, 0, after)] if after > 0 else []
        tensor = tensor._home.cat(parts, dim)
    return tensor.contiguous()  # type: ignore[no-any-return]
