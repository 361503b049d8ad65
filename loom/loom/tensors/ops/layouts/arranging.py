"""Copies in another arrangement: repeated, reversed, rolled, and with zeros beside a diagonal."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index as to_int
from typing import Any

from loom.tensors.dtypes import int32, int64
from loom.tensors.metas import Meta, Shape, pointwise_meta, wrapped
from loom.tensors.op import Op, method
from loom.tensors.ops.layouts.layout import Metas, positional, whole, wrapped_dims
from loom.tensors.tensor import Tensor


def _repeat_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    (meta,) = metas
    (repeats,) = static
    lead = len(repeats) - len(meta.shape)
    if lead < 0:
        raise RuntimeError(
            "Number of dimensions of repeat dims can not be smaller than number of dimensions of tensor"
        )
    shape = tuple([size * many for size, many in zip((1,) * lead + meta.shape, repeats, strict=True)])
    if any(each < 0 for each in shape):
        least = next(each for each in shape if each < 0)
        raise RuntimeError(f"Trying to create tensor with negative dimension {least}: {list(shape)}")
    return Meta(shape, meta.dtype)


def _repeat_backward(node: Any, grad: Tensor) -> tuple[Tensor]:
    (repeats,) = node.static
    shape = node.metas[0].shape
    pairs: list[int] = []
    summed: list[int] = []
    for size, many in zip((1,) * (len(repeats) - len(shape)) + shape, repeats, strict=True):
        if many != 1:
            summed.append(len(pairs))
            pairs.append(many)
        pairs.append(size)
    if summed:
        grad = grad.reshape(pairs).sum(summed)
    return (grad.reshape(shape),)


_repeat = Op("Tensor.repeat", _repeat_rule, _repeat_backward, arguments=positional)


@method
def repeat(self: Tensor, *repeats: Any) -> Tensor:
    return _repeat((self,), (), (whole(repeats),))


@method
def tile(self: Tensor, *dims: Any) -> Tensor:
    times = whole(dims)
    return repeat(self, (1,) * (self.dim() - len(times)) + times)


def _interleave_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    (meta,) = metas
    many, dim = static
    place = 0 if dim is None else wrapped(dim, len(meta.shape))
    if many < 0:
        raise RuntimeError("Repeats must be non-negative")
    if dim is None:
        return Meta((meta.numel * many,), meta.dtype)
    if not meta.shape:
        raise IndexError("Dimension out of range (expected to be in range of [-1, 0], but got 1)")
    return Meta((*meta.shape[:place], meta.shape[place] * many, *meta.shape[place + 1 :]), meta.dtype)


def _interleave_backward(node: Any, grad: Tensor) -> tuple[Tensor]:
    many, dim = node.static
    shape = node.metas[0].shape
    flat = shape if dim is not None else (node.metas[0].numel,)
    place = wrapped(dim or 0, len(flat))
    parts = grad.reshape((*flat[: place + 1], many, *flat[place + 1 :]))
    return (parts.sum(place + 1).reshape(shape),)


_interleave = Op("repeat_interleave", _interleave_rule, _interleave_backward, arguments=positional)


@method
def repeat_interleave(self: Tensor, repeats: int | Tensor | None = None, dim: int | None = None) -> Tensor:
    """Return each element, or each part along a dimension, so many times in a row.

    Args:
        self: the tensor; if it is all that is given, the numbers, and the result is the places of what they repeat.
        repeats: one number, or one for each element or part.
        dim: the dimension; all elements in a row if None.
    """
    if repeats is None:
        return _places((self,))
    if isinstance(repeats, Tensor):
        return _repeated(self, repeats, dim)
    return _interleave((self,), (), (int(to_int(repeats)), None if dim is None else int(dim)))


def _places_rule(metas: Metas, numbers: Any, static: Any) -> None:
    (meta,) = metas
    if len(meta.shape) != 1:
        raise RuntimeError("repeat_interleave only accept 1D vector as repeat")
    if meta.dtype not in (int32, int64):
        raise RuntimeError("repeats has to be Long or Int tensor")


_places = Op("repeat_interleave", _places_rule)


def _repeated(self: Tensor, repeats: Tensor, dim: int | None) -> Tensor:
    if dim is None:
        self = self.flatten()
    place = wrapped(dim or 0, self.dim())
    if repeats.dim() > 1:
        raise RuntimeError("repeats must be 0-dim or 1-dim tensor")
    many = self.shape[place] if self.dim() else 1
    if repeats.shape in ((), (1,)):
        repeats = repeats.reshape(1).expand(many)
    elif repeats.shape[0] != many:
        raise RuntimeError(
            f"repeats must have the same size as input along dim, but got repeats.size(0) = {repeats.shape[0]} and "
            f"input.size({place}) = {many}"
        )
    return self.index_select(place, _places((repeats,)))  # type: ignore[no-any-return]


def _same_order(metas: Metas, numbers: Any, static: Any) -> Meta:
    wrapped_dims(static[0], len(metas[0].shape))
    return pointwise_meta(metas, metas[0].dtype)


_flip = Op("flip", _same_order, lambda node, grad: (flip(grad, *node.static),), arguments=positional)


@method
def flip(self: Tensor, *dims: Any) -> Tensor:
    return _flip((self,), (), (whole(dims),))


def _roll_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    (meta,) = metas
    shifts, dims = static
    if not shifts:
        raise RuntimeError("`shifts` required")
    if len(shifts) != len(dims) and (dims or len(shifts) != 1):
        raise RuntimeError(f"shifts and dimensions must align. shifts: {len(shifts)}, dims:{len(dims)}")
    if dims and not meta.shape:
        raise IndexError("Dimension specified as 0 but tensor has no dimensions")
    for each in dims if meta.numel else ():  # of nothing, torch looks at no dimension
        wrapped(each, len(meta.shape))
    return Meta(meta.shape, meta.dtype)


def _roll_backward(node: Any, grad: Tensor) -> tuple[Tensor]:
    shifts, dims = node.static
    return (_roll((grad,), (), (tuple([-each for each in shifts]), dims)),)


_roll = Op("roll", _roll_rule, _roll_backward, arguments=positional)


@method
def roll(self: Tensor, shifts: Any, dims: Any = None) -> Tensor:
    """Return the elements moved on along dimensions, the last to the front; along all in a row if none is given."""
    return _roll((self,), (), (whole(shifts), () if dims is None else whole(dims)))


def _triangle(name: str) -> Op:
    def rule(metas: Metas, numbers: Any, static: Any) -> Meta:
        (meta,) = metas
        if len(meta.shape) < 2:
            raise RuntimeError(f"{name}: input tensor must have at least 2 dimensions")
        return Meta(meta.shape, meta.dtype)

    def backward(node: Any, grad: Tensor) -> tuple[Tensor]:
        return (op((grad,), (), node.static),)

    op = Op(name, rule, backward, arguments=positional)
    return op


_tril, _triu = _triangle("tril"), _triangle("triu")


@method
def tril(self: Tensor, diagonal: int = 0) -> Tensor:
    return _tril((self,), (), (int(diagonal),))


@method
def triu(self: Tensor, diagonal: int = 0) -> Tensor:
    return _triu((self,), (), (int(diagonal),))


@method
def tril_(self: Tensor, diagonal: int = 0) -> Tensor:
    return _tril.in_place((self,), (), (int(diagonal),))


@method
def triu_(self: Tensor, diagonal: int = 0) -> Tensor:
    return _triu.in_place((self,), (), (int(diagonal),))


def _embed_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    (meta,) = metas
    offset, *dims = static
    many = len(meta.shape) + 1
    one, other = (wrapped(each, many) for each in dims)
    if one == other:
        raise RuntimeError(f"diagonal dimensions cannot be identical {dims[0]}, {dims[1]}")
    return Meta(_embedded(meta.shape, abs(offset), (one, other)), meta.dtype)


def _embedded(shape: Shape, offset: int, dims: Sequence[int]) -> Shape:
    rest = iter(shape[:-1])
    return tuple([shape[-1] + offset if place in dims else next(rest) for place in range(len(shape) + 1)])


def _embed_backward(node: Any, grad: Tensor) -> tuple[Tensor]:
    return (grad.diagonal(*node.static),)


_embed = Op("diag_embed", _embed_rule, _embed_backward, arguments=positional)


@method
def diag_embed(self: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    """Return zeros with the elements of the last dimension on a diagonal of two new dimensions."""
    return _embed((self,), (), (int(offset), int(dim1), int(dim2)))
