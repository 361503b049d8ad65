"""Selection along a dimension of a shape: the checks of an index or a slice, and the ranks that are left.

A module of its own, since it counts with the numbers of shapes and makes none.
"""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex

from loom.errors import SliceOutOfRange, WrongArguments
from loom.shape.ndslice import irregular

ShapeNumbers = tuple[tuple[str, ...], int, tuple[int, ...], tuple[int, ...]]
"""The labels, the offset, the sizes and the strides of a shape."""


def indexed(of: ShapeNumbers, axis: int, index: SupportsIndex) -> ShapeNumbers:
    """Return the numbers of a shape at an index of a dimension, which goes away.

    Raises:
        SliceOutOfRange: the dimension has no such index.
        WrongArguments: it is no index.
    """
    labels, offset, sizes, strides = of
    label, size = labels[axis], sizes[axis]
    try:
        index = operator.index(index)
    except TypeError:
        raise WrongArguments(f"{label}={index!r}: select with an int or a slice") from None
    if not 0 <= index < size:
        raise SliceOutOfRange(f"index out of range: {label}={index}, but {label} has {size} (0 to {size - 1})")
    return _put(labels, axis), offset + index * strides[axis], _put(sizes, axis), _put(strides, axis)


def narrowed(of: ShapeNumbers, axis: int, selector: slice) -> ShapeNumbers:
    """Return the numbers of a shape with a part of a dimension.

    Raises:
        SliceOutOfRange: the slice selects nothing, or leaves ranks that are not regular.
    """
    labels, offset, sizes, strides = of
    label, size = labels[axis], sizes[axis]
    text = f"{label}={selector.start}:{selector.stop}:{selector.step}".replace("None", "")
    if selector.step is not None and selector.step < 1:
        why = "" if selector.step else "slice step cannot be zero; "
        raise SliceOutOfRange(f"{text}: {why}a step must be at least 1")
    start, stop, step = selector.indices(size)
    count = len(range(start, stop, step))
    if count == 0:
        part = f"{start}:{stop}:{step}"
        why = f"empty range {part}" if start < size else f"out of range {part} for dimension {label} of size {size}"
        raise SliceOutOfRange(f"{why}: {text} selects nothing; {label} has {size}")

    stride = strides[axis]
    sizes, strides = _put(sizes, axis, count), _put(strides, axis, stride * step)
    if why := irregular(sizes, strides):
        raise SliceOutOfRange(
            f"{why}: {text} leaves a mesh that is not regular; {label} has {size}. "
            f"Use a step that divides {size}, or select one index of the dimensions before {label} first"
        )
    return labels, offset + start * stride, sizes, strides


def _put(values: tuple[Any, ...], axis: int, *instead: Any) -> tuple[Any, ...]:
    return (*values[:axis], *instead, *values[axis + 1 :])
