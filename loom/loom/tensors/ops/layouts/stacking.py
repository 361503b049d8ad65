"""Tensors turned, stacked and split in further ways, all of them made of the operations beside this module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loom.tensors.metas import broadcast, wrapped
from loom.tensors.op import function, method
from loom.tensors.ops.layouts.joining import cat, hstack, vstack
from loom.tensors.tensor import Tensor

Tensors = Sequence[Tensor]


# Turned


@method
def fliplr(self: Tensor) -> Tensor:
    """Return the columns in reverse."""
    if self.dim() < 2:
        raise RuntimeError("Input must be >= 2-d.")
    return self.flip(1)  # type: ignore[no-any-return]


@method
def flipud(self: Tensor) -> Tensor:
    """Return the rows in reverse."""
    if self.dim() < 1:
        raise RuntimeError("Input must be >= 1-d.")
    return self.flip(0)  # type: ignore[no-any-return]


@method
def rot90(self: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    """Return a tensor turned by so many right angles, from the first of two dimensions to the second."""
    if len(dims) != 2:
        raise RuntimeError(f"expected total rotation dims == 2, but got dims = {len(dims)}")
    if self.dim() < 2:
        raise RuntimeError(f"expected total dims >= 2, but got total dims = {self.dim()}")
    one, other = (wrapped(each, self.dim()) for each in dims)
    if one == other:
        raise RuntimeError(f"expected rotation dims to be different, but got dim0 = {one} and dim1 = {other}")
    match k % 4:
        case 1:
            return self.flip(other).transpose(one, other)  # type: ignore[no-any-return]
        case 2:
            return self.flip(one, other)  # type: ignore[no-any-return]
        case 3:
            return self.flip(one).transpose(one, other)  # type: ignore[no-any-return]
    return self.clone() if self.meta.contiguous else self.contiguous()  # type: ignore[no-any-return]


@method
def adjoint(self: Tensor) -> Tensor:
    """Return matrices transposed and conjugated."""
    return self.mT.conj()  # type: ignore[no-any-return]


# Stacked


@function
def concatenate(tensors: Tensors, dim: int = 0) -> Tensor:
    return cat(tensors, dim)


def _each(function: Any, tensors: tuple[Any, ...]) -> Any:
    if len(tensors) == 1 and not isinstance(tensors[0], Tensor):
        tensors = tuple(tensors[0])
    return function(tensors[0]) if len(tensors) == 1 else tuple(map(function, tensors))


@function
def atleast_1d(*tensors: Any) -> Any:
    """Return tensors with at least one dimension."""
    return _each(lambda each: each if each.dim() else each.reshape(1), tensors)


@function
def atleast_2d(*tensors: Any) -> Any:
    """Return tensors with at least two dimensions, a vector as a row."""
    return _each(_row, tensors)


def _row(tensor: Tensor) -> Tensor:
    if tensor.dim() == 0:
        return tensor.reshape(1, 1)  # type: ignore[no-any-return]
    return tensor.unsqueeze(0) if tensor.dim() == 1 else tensor


@function
def atleast_3d(*tensors: Any) -> Any:
    """Return tensors with at least three dimensions."""
    return _each(_deep, tensors)


def _deep(tensor: Tensor) -> Tensor:
    match tensor.dim():
        case 0:
            return tensor.reshape(1, 1, 1)  # type: ignore[no-any-return]
        case 1:
            return tensor.unsqueeze(0).unsqueeze(-1)  # type: ignore[no-any-return]
        case 2:
            return tensor.unsqueeze(-1)  # type: ignore[no-any-return]
    return tensor


@function
def dstack(tensors: Tensors) -> Tensor:
    """Put tensors together along the third dimension."""
    if not tensors:
        raise RuntimeError("dstack expects a non-empty TensorList")
    return cat([_deep(each) for each in tensors], 2)


@function
def column_stack(tensors: Tensors) -> Tensor:
    """Put tensors together along the second dimension; those of fewer are columns."""
    if not tensors:
        raise RuntimeError("column_stack expects a non-empty TensorList")
    return hstack([each if each.dim() > 1 else each.reshape(each.numel(), 1) for each in tensors])


@function
def row_stack(tensors: Tensors) -> Tensor:
    return vstack(tensors)


@function
def broadcast_tensors(*tensors: Any) -> tuple[Tensor, ...]:
    """Return tensors expanded to the shape that they are broadcast to."""
    shape = broadcast(*(each.shape for each in tensors))
    return tuple(each.expand(shape) for each in tensors)


@function
def meshgrid(*tensors: Any, indexing: str = "ij") -> tuple[Tensor, ...]:
    """Return the coordinates of a grid, whose sides are vectors; "xy" has the first two dimensions exchanged."""
    if len(tensors) == 1 and not isinstance(tensors[0], Tensor):
        tensors = tuple(tensors[0])
    if indexing not in ("ij", "xy"):
        raise RuntimeError(f'torch.meshgrid: indexing must be one of "xy" or "ij", but received: {indexing}')
    if not tensors:
        raise RuntimeError("meshgrid expects a non-empty TensorList")
    for each in tensors:
        if each.dim() > 1:
            raise RuntimeError("torch.meshgrid: Expected 0D or 1D tensor in the tensor list")
    if any(each.dtype is not tensors[0].dtype for each in tensors):
        raise RuntimeError("torch.meshgrid expects all tensors to have the same dtype")
    swapped = indexing == "xy" and len(tensors) > 1
    sides = (tensors[1], tensors[0], *tensors[2:]) if swapped else tensors
    shape = tuple(each.numel() for each in sides)
    found = [
        each.reshape([-1 if at == place else 1 for at in range(len(sides))]).expand(shape)
        for place, each in enumerate(sides)
    ]
    return (found[1], found[0], *found[2:]) if swapped else tuple(found)


# Apart


def _split_along(self: Tensor, name: str, least: int, dim: int, sections: Any) -> tuple[Tensor, ...]:
    if self.dim() < least:
        raise RuntimeError(
            f"torch.{name} requires a tensor with at least {least} dimension, but got a tensor with {self.dim()} "
            "dimensions!"
        )
    if isinstance(sections, int) and (sections <= 0 or self.shape[dim] % sections):
        raise RuntimeError(
            f"torch.{name} attempted to split along dimension {dim}, but the size of the dimension "
            f"{self.shape[dim]} is not divisible by the split_size {sections}!"
        )
    return self.tensor_split(sections, dim)  # type: ignore[no-any-return]


@method
def hsplit(self: Tensor, indices_or_sections: Any) -> tuple[Tensor, ...]:
    """Split along the second dimension; of one dimension along that."""
    return _split_along(self, "hsplit", 1, 0 if self.dim() == 1 else 1, indices_or_sections)


@method
def vsplit(self: Tensor, indices_or_sections: Any) -> tuple[Tensor, ...]:
    """Split along the first dimension."""
    return _split_along(self, "vsplit", 2, 0, indices_or_sections)


@method
def dsplit(self: Tensor, indices_or_sections: Any) -> tuple[Tensor, ...]:
    """Split along the third dimension."""
    return _split_along(self, "dsplit", 3, 2, indices_or_sections)


@method
def split_with_sizes(self: Tensor, split_sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Split into parts of given sizes."""
    return self.split(list(split_sizes), dim)  # type: ignore[no-any-return]


# Parts replaced


def _with(self: Tensor, part: Any, src: Tensor) -> Tensor:
    """Return a copy of which a part, a view of it, is replaced."""
    copy = self.clone()
    place = part(copy)
    if place.shape != src.shape:
        raise RuntimeError(
            f"expected src to have a size equal to the slice of self. src size = {list(src.shape)}, slice size = "
            f"{list(place.shape)}"
        )
    place.copy_(src)
    return copy  # type: ignore[no-any-return]


@method
def select_scatter(self: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    """Return a copy in which what is at an index along a dimension is replaced."""
    return _with(self, lambda copy: copy.select(dim, index), src)


@method
def slice_scatter(
    self: Tensor, src: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """Return a copy of which a slice along a dimension is replaced."""
    place = wrapped(dim, self.dim())
    return _with(self, lambda copy: copy[(slice(None),) * place + (slice(start, end, step),)], src)


@method
def diagonal_scatter(self: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Return a copy of which a diagonal is replaced."""
    return _with(self, lambda copy: copy.diagonal(offset, dim1, dim2), src)


@method
def take(self: Tensor, index: Tensor) -> Tensor:
    """Return the elements at indices, counted in a row."""
    if index.dtype.name != "int64":
        raise RuntimeError(f"take(): Expected a long tensor for index, but got {index.dtype.scalar_name}")
    return self.reshape(-1)[index.reshape(-1)].reshape(index.shape)  # type: ignore[no-any-return]
