"""What the laptop knows of a tensor without asking: shape, strides and dtype; and torch's rules of layout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import mul

from loom.tensors.dtypes import DType

Shape = tuple[int, ...]

MOST_KEPT = 65_536
"""Metas that are kept, so that equal ones are the same object."""


class Meta:
    """Shape, strides in elements, and dtype. Equal ones are mostly the same object, and compare as such."""

    __slots__ = ("contiguous", "dtype", "numel", "shape", "strides")

    shape: Shape
    strides: Shape
    dtype: DType
    numel: int
    contiguous: bool

    def __new__(cls, shape: Shape, dtype: DType, strides: Shape | None = None) -> Meta:
        key = (shape, dtype, strides)
        found = _kept.get(key)
        if found is not None:
            return found
        if strides is None:
            meta = super().__new__(cls)
            meta.shape, meta.dtype, meta.strides = shape, dtype, contiguous_strides(shape)
            meta.numel, meta.contiguous = reduce(mul, shape, 1), True
        elif is_contiguous(shape, strides) and strides == contiguous_strides(shape):
            meta = cls(shape, dtype)
        else:
            meta = super().__new__(cls)
            meta.shape, meta.dtype, meta.strides = shape, dtype, strides
            meta.numel, meta.contiguous = reduce(mul, shape, 1), is_contiguous(shape, strides)
        if len(_kept) >= MOST_KEPT:
            _kept.clear()
        _kept[key] = meta
        return meta

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def of(self, dtype: DType) -> Meta:
        """Return the same layout with other elements."""
        return Meta(self.shape, dtype, self.strides)

    def __repr__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"


_kept: dict[tuple[Shape, DType, Shape | None], Meta] = {}


def contiguous_strides(shape: Shape) -> Shape:
    """Return the strides of elements that lie in memory in their order."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_contiguous(shape: Shape, strides: Shape) -> bool:
    """Whether the elements lie in memory in their order; the strides of dimensions of size 1 do not matter."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 0:
            return True
        if size != 1:
            if stride != step:
                return 0 in shape
            step *= size
    return True


def is_dense(shape: Shape, strides: Shape) -> bool:
    """Whether the elements lie side by side in memory, in any order of the dimensions."""
    if is_contiguous(shape, strides):
        return True
    step = 1
    for size, stride in sorted(
        ((size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1),
        key=lambda each: each[::-1],
    ):
        if stride != step:
            return False
        step *= size
    return True


def check_written(meta: Meta) -> None:
    """Check that no elements share memory, as far as strides of 0 show it.

    Raises:
        RuntimeError: some do, in torch's words.
    """
    if not meta.contiguous and any(
        stride == 0 and size > 1 for size, stride in zip(meta.shape, meta.strides, strict=True)
    ):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory "
            "location. Please clone() the tensor before performing the operation."
        )


def broadcast(*shapes: Shape) -> Shape:
    """Return the shape to which shapes are broadcast.

    Raises:
        RuntimeError: they do not fit, in torch's words.
    """
    first, *others = shapes
    for other in others:
        if other != first:
            first = _broadcast(first, other)
    return first


def _broadcast(one: Shape, other: Shape) -> Shape:
    longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
    lead = len(longer) - len(shorter)
    result = list(longer)
    for place in range(len(longer) - 1, lead - 1, -1):
        size, its = longer[place], shorter[place - lead]
        if size == 1:
            result[place] = its
        elif its not in (1, size):
            a, b = (size, its) if longer is one else (its, size)
            raise RuntimeError(
                f"The size of tensor a ({a}) must match the size of tensor b ({b}) at non-singleton dimension "
                f"{place}"
            )
    return tuple(result)


def expanded_strides(meta: Meta, shape: Shape) -> Shape:
    """Return the strides with which a tensor is read as if it had a broadcast shape."""
    lead = len(shape) - len(meta.shape)
    steps = [
        0 if size == 1 and wanted != 1 else stride
        for size, stride, wanted in zip(meta.shape, meta.strides, shape[lead:], strict=True)
    ]
    return (0,) * lead + tuple(steps)


def pointwise_meta(metas: Sequence[Meta], dtype: DType) -> Meta:
    """Return what an elementwise operation gives: torch keeps the order of the operands' dimensions in memory."""
    first = metas[0]
    if (len(metas) == 1 and first.contiguous) or all(
        each.shape == first.shape and each.contiguous for each in metas
    ):
        return Meta(first.shape, dtype)
    shape = broadcast(*(each.shape for each in metas))
    if all(each.shape == shape and each.strides == first.strides for each in metas) and is_dense(
        shape, first.strides
    ):
        return Meta(shape, dtype, first.strides)
    return Meta(shape, dtype, _ordered_strides(shape, [expanded_strides(each, shape) for each in metas]))


def _ordered_strides(shape: Shape, operands: Sequence[Shape]) -> Shape:
    """Return dense strides in the operands' order: the first that tells two dimensions apart decides."""
    order = list(reversed(range(len(shape))))  # the innermost first
    for place in range(1, len(order)):
        at = place
        for below in range(place - 1, -1, -1):
            decision = _compare(shape, operands, order[below], order[at])
            if decision > 0:
                order[below], order[at] = order[at], order[below]
                at = below
            elif decision < 0:
                break
    strides = [0] * len(shape)
    step = 1
    for dimension in order:
        strides[dimension] = step
        step *= shape[dimension]
    return contiguous_strides(shape) if 0 in shape else tuple(strides)


def _compare(shape: Shape, operands: Sequence[Shape], inner: int, outer: int) -> int:
    """Return 1 if two dimensions are to change places, -1 if they are in order, 0 if nothing tells."""
    for strides in operands:
        one, other = strides[inner], strides[outer]
        if one == 0 or other == 0:
            continue
        if one < other:
            return -1
        if one > other or shape[inner] > shape[outer]:
            return 1
    return 0


def wrapped(dimension: int, dimensions: int) -> int:
    """Return a dimension counted from the front.

    Raises:
        IndexError: there is none, in torch's words.
    """
    many = max(dimensions, 1)
    if not -many <= dimension < many:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-many}, {many - 1}], but got {dimension})"
        )
    return dimension % many
