"""Tensors put together and taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import index as to_int
from typing import Any

from loom.tensors.core.shapes import Metas, positional
from loom.tensors.layouts import DType, Meta, Shape, result_type, wrapped
from loom.tensors.op import Op, function, method
from loom.tensors.sending.encoding import T
from loom.tensors.tensor import Tensor

Tensors = Sequence[Tensor]


def _together(tensors: int, numbers: int, static: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (tuple(map(T, range(tensors))), *static), {}


def _promoted(metas: Metas) -> DType:
    return result_type(
        [each.dtype for each in metas if each.shape], [each.dtype for each in metas if not each.shape], []
    )


# Together


def _is_channels_last(meta: Meta) -> bool:
    """Whether torch sees channels in the last place in memory. As `is_channels_last_strides` of ATen."""
    shape, strides = meta.shape, meta.strides
    if len(shape) not in (4, 5) or strides[1] == 0 or 0 in shape:
        return False
    least = 0
    for place in (1, *range(len(shape) - 1, 1, -1), 0):
        if strides[place] < least or (place == 0 and least == strides[1]):
            return False
        least = strides[place] * max(shape[place], 1)
    return True


def _channels_last(shape: Shape) -> Shape:
    strides = [0] * len(shape)
    step = 1
    for place in (1, *range(len(shape) - 1, 1, -1), 0):
        strides[place] = step
        step *= shape[place]
    return tuple(strides)


def _is_skipped(meta: Meta) -> bool:
    """Whether `cat` leaves a tensor out, whatever its number of dimensions."""
    return meta.shape == (0,)


def _cat_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    for at, each in enumerate(metas):
        if not each.shape:
            raise RuntimeError(f"zero-dimensional tensor (at position {at}) cannot be concatenated")
    dtype = _promoted(metas)
    kept = [(at, each) for at, each in enumerate(metas) if not _is_skipped(each)]
    if not kept:
        return Meta((0,), dtype)
    first = kept[0][1]
    place = wrapped(static[0], len(first.shape))
    whole = 0
    for at, each in kept:
        if len(each.shape) != len(first.shape):
            raise RuntimeError(
                f"Tensors must have same number of dimensions: got {len(first.shape)} and {len(each.shape)}"
            )
        for dimension, (size, wanted) in enumerate(zip(each.shape, first.shape, strict=True)):
            if dimension != place and size != wanted:
                raise RuntimeError(
                    f"Sizes of tensors must match except in dimension {place}. Expected size {wanted} but got size "
                    f"{size} for tensor number {at} in the list."
                )
        whole += each.shape[place]
    shape = (*first.shape[:place], whole, *first.shape[place + 1 :])
    if all(map(_is_channels_last, metas)) and 0 not in shape:
        return Meta(shape, dtype, _channels_last(shape))
    return Meta(shape, dtype)


_cat = Op("cat", _cat_rule, arguments=_together)


@function
def cat(tensors: Tensors, dim: int = 0) -> Tensor:
    if not tensors:
        raise ValueError("torch.cat(): expected a non-empty list of Tensors")
    return _cat(tuple(tensors), (), (int(to_int(dim)),))


@function
def concat(tensors: Tensors, dim: int = 0) -> Tensor:
    return cat(tensors, dim)


def _stack_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    first = metas[0].shape
    for at, each in enumerate(metas):
        if each.shape != first:
            raise RuntimeError(
                f"stack expects each tensor to be equal size, but got {list(first)} at entry 0 and "
                f"{list(each.shape)} at entry {at}"
            )
    place = wrapped(static[0], len(first) + 1)
    return Meta((*first[:place], len(metas), *first[place:]), _promoted(metas))


_stack = Op("stack", _stack_rule, arguments=_together)


@function
def stack(tensors: Tensors, dim: int = 0) -> Tensor:
    if not tensors:
        raise RuntimeError("stack expects a non-empty TensorList")
    return _stack(tuple(tensors), (), (int(to_int(dim)),))


# Apart


def _split_rule(metas: Metas, numbers: Any, static: Any) -> tuple[Meta, ...]:
    (meta,) = metas
    sizes, dim = static
    return tuple(
        Meta((*meta.shape[:dim], size, *meta.shape[dim + 1 :]), meta.dtype, meta.strides) for size in sizes
    )


_split = Op("split", _split_rule, arguments=positional, view=True, outs=None)


def _parts(self: Tensor, sizes: Sequence[int], dim: int) -> tuple[Tensor, ...]:
    """Return views of these sizes along a dimension."""
    if len(sizes) > 1:
        return _split.several((self,), (), (tuple(sizes), dim))
    return (self.narrow(dim, 0, sizes[0]),) if sizes else ()


def _length(self: Tensor, dim: int, error: str) -> tuple[int, int]:
    """Return a dimension counted from the front, and its size."""
    if not self.dim():
        raise RuntimeError(error)
    place = wrapped(dim, self.dim())
    return place, self.shape[place]


@method
def split(self: Tensor, split_size: Any, dim: int = 0) -> tuple[Tensor, ...]:
    """Return views of one size, of which the last may be smaller, or of the sizes of a list."""
    if isinstance(split_size, int) and split_size < 0 and self.dim():
        raise RuntimeError(f"split expects split_size be non-negative, but got split_size={split_size}")
    place, size = _length(self, dim, "split expects at least a 1-dimensional tensor")
    if isinstance(split_size, int):
        return _parts(self, _equal(split_size, size), place)
    sizes = [int(to_int(each)) for each in split_size]
    if any(each < 0 for each in sizes):
        raise RuntimeError(
            f"split_with_sizes expects split_sizes have only non-negative entries, but got split_sizes={sizes}"
        )
    if sum(sizes) != size:
        raise RuntimeError(
            f"split_with_sizes expects split_sizes to sum exactly to {size} (input tensor's size at dimension "
            f"{place}), but got split_sizes={sizes}"
        )
    return _parts(self, sizes, place)


def _equal(part: int, size: int) -> list[int]:
    if part == 0 and size:
        raise RuntimeError(f"split_size can only be 0 if dimension size is 0, but got dimension size of {size}")
    return [min(part, size - start) for start in range(0, size, part)] if size else [0]


@method
def chunk(self: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Return as many views as there are chunks, or fewer, of which the last may be smaller."""
    if chunks <= 0 and self.dim():
        raise RuntimeError(f"chunk expects `chunks` to be greater than 0, got: {chunks}")
    place, size = _length(self, dim, "chunk expects at least a 1-dimensional tensor")
    return _parts(self, _equal(-(-size // chunks), size) if size else [0] * chunks, place)


@method
def tensor_split(self: Tensor, indices_or_sections: Any, dim: int = 0) -> tuple[Tensor, ...]:
    """Return as many views as there are sections, or one between each two indices."""
    place, size = _length(
        self, dim, f"tensor_split expected at least a 1-dimensional tensor, but got a tensor with {self.dim()} dims"
    )
    where = indices_or_sections
    where = where.tolist() if isinstance(where, Tensor) else where
    if isinstance(where, int):
        if where <= 0:
            raise RuntimeError(f"number of sections must be larger than 0, got {where}")
        return _parts(self, [size // where + (at < size % where) for at in range(where)], place)
    views = []
    for each in pairwise([0, *(int(to_int(each)) for each in where), size]):
        start, stop, _ = slice(*each).indices(size)
        views.append(self.narrow(place, start, max(stop - start, 0)))
    return tuple(views)


def _unbind_rule(metas: Metas, numbers: Any, static: Any) -> tuple[Meta, ...]:
    (meta,) = metas
    (dim,) = static
    part = Meta(
        (*meta.shape[:dim], *meta.shape[dim + 1 :]), meta.dtype, (*meta.strides[:dim], *meta.strides[dim + 1 :])
    )
    return tuple([part] * meta.shape[dim])


_unbind = Op("unbind", _unbind_rule, arguments=positional, view=True, outs=None)


@method
def unbind(self: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    if not self.dim():
        raise IndexError("Dimension specified as 0 but tensor has no dimensions")
    place, size = _length(self, dim, "")
    if size > 1:
        return _unbind.several((self,), (), (place,))
    return (self.select(place, 0),) if size else ()
