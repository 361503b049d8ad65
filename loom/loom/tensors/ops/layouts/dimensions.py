"""Views with other dimensions: in another order, on a diagonal, of windows."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

from loom.errors import NotSupported
from loom.tensors.grad_modes import grad_enabled
from loom.tensors.metas import Meta, wrapped
from loom.tensors.op import Op, method, properties
from loom.tensors.ops.layouts.layout import Metas, picked, positional, whole
from loom.tensors.tensor import Tensor


def _permute_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    (meta,) = metas
    (dims,) = static
    if len(dims) != len(meta.shape):
        raise RuntimeError(
            "permute(sparse_coo): number of dimensions in the tensor input does not match the length of the "
            f"desired ordering of dimensions i.e. input.dim() = {len(meta.shape)} is not equal to len(dims) = "
            f"{len(dims)}"
        )
    order = [wrapped(each, len(dims)) for each in dims]
    if len(set(order)) != len(order):
        raise RuntimeError("permute(): duplicate dims are not allowed.")
    return picked(meta, order)


def _permute_backward(node: Any, grad: Tensor) -> tuple[Tensor]:
    (dims,) = node.static
    order = [each % len(dims) for each in dims]
    return (permute(grad, [order.index(place) for place in range(len(order))]),)


_permute = Op("permute", _permute_rule, _permute_backward, arguments=positional, view=True)


@method
def permute(self: Tensor, *dims: Any) -> Tensor:
    return _permute((self,), (), (whole(dims),))


def _transpose_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    (meta,) = metas
    one, other = (wrapped(each, len(meta.shape)) for each in static)
    order = list(range(len(meta.shape)))
    if order:
        order[one], order[other] = other, one
    return picked(meta, order)


_transpose = Op(
    "transpose",
    _transpose_rule,
    lambda node, grad: (transpose(grad, *node.static),),
    arguments=positional,
    view=True,
)


@method
def transpose(self: Tensor, dim0: int, dim1: int) -> Tensor:
    return _transpose((self,), (), (int(index(dim0)), int(index(dim1))))


@method
def swapaxes(self: Tensor, axis0: int, axis1: int) -> Tensor:
    return transpose(self, axis0, axis1)


@method
def swapdims(self: Tensor, dim0: int, dim1: int) -> Tensor:
    return transpose(self, dim0, dim1)


@method
def t(self: Tensor) -> Tensor:
    """Return a matrix transposed, and a tensor of fewer dimensions as it is."""
    many = self.dim()
    if many > 2:
        raise RuntimeError(f"t() expects a tensor with <= 2 dimensions, but self is {many}D")
    return transpose(self, 0, many - 1 if many else 0)


def _reversed(self: Tensor) -> Tensor:
    return permute(self, tuple(range(self.dim()))[::-1])


def _matrices_transposed(self: Tensor) -> Tensor:
    if not self.dim():
        return permute(self, ())
    if self.dim() == 1:
        raise RuntimeError(
            f"tensor.mT is only supported on matrices or batches of matrices. Got {self.dim()}-D tensor."
        )
    return transpose(self, -2, -1)


properties["T"] = property(_reversed)
properties["mT"] = property(_matrices_transposed)


@method
def movedim(self: Tensor, source: Any, destination: Any) -> Tensor:
    froms, tos, many = whole(source), whole(destination), self.dim()
    if len(froms) != len(tos):
        raise RuntimeError(
            f"movedim: Invalid source or destination dims: source ({list(froms)} dims) should contain the same "
            f"number of dims as destination ({list(tos)} dims)"
        )
    froms, tos = (tuple([wrapped(each, many) for each in dims]) for dims in (froms, tos))
    for name, dims in (("source", froms), ("destination", tos)):
        if len(set(dims)) != len(dims):
            raise RuntimeError(f"movedim: repeated dim in `{name}` ({list(dims)})")
    if not many:
        return permute(self, ())
    rest = iter(place for place in range(many) if place not in froms)
    moved = dict(zip(tos, froms, strict=True))
    return permute(self, [moved[place] if place in moved else next(rest) for place in range(many)])


@method
def moveaxis(self: Tensor, source: Any, destination: Any) -> Tensor:
    return movedim(self, source, destination)


# Diagonals and windows


def _diagonal_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    (meta,) = metas
    offset, *dims = static
    one, other = (wrapped(each, len(meta.shape)) for each in dims)
    if one == other:
        raise RuntimeError(f"diagonal dimensions cannot be identical {dims[0]}, {dims[1]}")
    rows, columns = meta.shape[one] + min(offset, 0), meta.shape[other] - max(offset, 0)
    rest = picked(meta, [place for place in range(len(meta.shape)) if place not in (one, other)])
    return Meta(
        (*rest.shape, max(min(rows, columns), 0)),
        meta.dtype,
        (*rest.strides, meta.strides[one] + meta.strides[other]),
    )


def _whole_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    return Meta(static[0], metas[0].dtype)


def _diagonal_backward(node: Any, grad: Tensor) -> tuple[Tensor]:
    return (_diagonal_whole((grad,), (), (node.metas[0].shape, *node.static)),)


def _diagonal_again(node: Any, grad: Tensor) -> tuple[Tensor]:
    return (_diagonal((grad,), (), node.static[1:]),)


_diagonal = Op("diagonal", _diagonal_rule, _diagonal_backward, arguments=positional, view=True)
_diagonal_whole = Op("ops.aten.diagonal_backward", _whole_rule, _diagonal_again, arguments=positional)


@method
def diagonal(self: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    return _diagonal((self,), (), (int(offset), int(dim1), int(dim2)))


def _unfold_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    (meta,) = metas
    dim, size, step = static
    place = wrapped(dim, len(meta.shape))
    have, stride = (meta.shape[place], meta.strides[place]) if meta.shape else (1, 1)
    if size < 0:
        raise RuntimeError(f"size is {size} but must be >= 0")
    if size > have:
        raise RuntimeError(f"maximum size for tensor at dimension {place} is {have} but size is {size}")
    if step <= 0:
        raise RuntimeError(f"step is {step} but must be > 0")
    shape, strides = [*meta.shape, size], [*meta.strides, stride]
    if meta.shape:
        shape[place], strides[place] = (have - size) // step + 1, stride * step
    return Meta(tuple(shape), meta.dtype, tuple(strides))


def _unfold_backward(node: Any, grad: Tensor) -> tuple[Tensor]:
    return (_unfold_whole((grad,), (), (node.metas[0].shape, *node.static)),)


def _unfold_again(node: Any, grad: Tensor) -> tuple[Tensor]:
    return (_unfold((grad,), (), node.static[1:]),)


_unfold = Op("Tensor.unfold", _unfold_rule, _unfold_backward, arguments=positional, view=True)
_unfold_whole = Op("ops.aten.unfold_backward", _whole_rule, _unfold_again, arguments=positional)


@method
def unfold(self: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """Return a view of windows along a dimension; the last dimension is that of a window."""
    return _unfold((self,), (), (int(dimension), int(size), int(step)))


def _strided_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    size, stride, _ = static
    if len(size) != len(stride):
        raise RuntimeError("mismatch in length of strides and shape")
    if any(each < 0 for each in stride):
        raise RuntimeError(
            f"as_strided: Negative strides are not supported at the moment, got strides: {list(stride)}"
        )
    return Meta(size, metas[0].dtype, stride)


_as_strided = Op("as_strided", _strided_rule, arguments=positional, view=True)


@method
def as_strided(
    self: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    """Return a view of any layout in the same memory.

    Raises:
        NotSupported: its gradient would be wanted.
    """
    if self._needs and grad_enabled.get():
        raise NotSupported("as_strided has no gradient on lazy tensors: use slices, unfold or diagonal")
    return _as_strided((self,), (), (whole(size), whole(stride), storage_offset))
