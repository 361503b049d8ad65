"""Strided ranks: the arithmetic under every shape."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

from loom.errors import Invalid, SliceOutOfRange, WrongArguments
from loom.in_cluster import MonarchsInCluster


class NDSlice(metaclass=MonarchsInCluster):
    """Ranks with an offset, and a size and a stride in each dimension, like ``monarch.NDSlice``.

    Raises:
        Invalid: there are not as many sizes as strides, or two dimensions overlap (a `ValueError`).
        SliceOutOfRange: a number is negative (an `OverflowError`).
    """

    __slots__ = ("_sizes", "_strides", "offset")

    def __init__(self, *, offset: int, sizes: Sequence[int], strides: Sequence[int]) -> None:
        self.offset = _index("offset", offset)
        self._sizes = tuple(_index("sizes", size) for size in sizes)
        self._strides = tuple(_index("strides", stride) for stride in strides)
        if len(self._sizes) != len(self._strides):
            raise Invalid(f"invalid dims: expected {len(self._sizes)}, got {len(self._strides)}")
        why = irregular(self._sizes, self._strides)
        if why:
            raise Invalid(why)

    @staticmethod
    def new_row_major(ranks: Sequence[int]) -> NDSlice:
        """Return the dense slice of these sizes that starts at rank 0."""
        return NDSlice(offset=0, sizes=list(ranks), strides=list(dense_strides(ranks)))

    @staticmethod
    def of(offset: int, sizes: Sequence[int], strides: Sequence[int]) -> NDSlice:
        """Return a slice by positional arguments, for unpickling."""
        return NDSlice(offset=offset, sizes=sizes, strides=strides)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self._sizes)

    @property
    def sizes(self) -> list[int]:
        """Size of each dimension."""
        return list(self._sizes)

    @property
    def strides(self) -> list[int]:
        """Stride of each dimension."""
        return list(self._strides)

    def get(self, index: int) -> int:
        """Return the rank of the element at a row-major index.

        Raises:
            SliceOutOfRange: there are fewer elements.
        """
        if not 0 <= index < len(self):
            raise SliceOutOfRange(f"index {index} out of range {len(self)}")
        rank = self.offset
        for size, stride in zip(reversed(self._sizes), reversed(self._strides), strict=True):
            index, position = divmod(index, size)
            rank += position * stride
        return rank

    def coordinates(self, value: int) -> list[int]:
        """Return the coordinates of a rank.

        Raises:
            SliceOutOfRange: the rank is not in the slice (a `ValueError`).
        """
        rest = value - self.offset
        found = [0] * self.ndim
        for axis in sorted(range(self.ndim), key=lambda axis: (-self._strides[axis], -self._sizes[axis])):
            size, stride = self._sizes[axis], self._strides[axis]
            if size > 1:
                found[axis], rest = divmod(rest, stride)
            if not 0 <= found[axis] < size:
                break
        else:
            if rest == 0:
                return found
        raise SliceOutOfRange(f"value {value} not in slice")

    def index(self, value: int) -> int:
        """Return the row-major index of a rank.

        Raises:
            SliceOutOfRange: the rank is not in the slice (a `ValueError`).
        """
        index = 0
        for position, size in zip(self.coordinates(value), self._sizes, strict=True):
            index = index * size + position
        return index

    def nditem(self, coordinates: Sequence[int]) -> int:
        """Return the rank at coordinates.

        Raises:
            SliceOutOfRange: a coordinate is missing, too many or outside of its dimension (an `IndexError`).
        """
        if len(coordinates) != self.ndim:
            raise SliceOutOfRange(f"invalid dims: expected {self.ndim}, got {len(coordinates)}")
        for position, size in zip(coordinates, self._sizes, strict=True):
            if not 0 <= position < size:
                raise SliceOutOfRange(f"index out of range: {list(coordinates)} in a slice of sizes {self.sizes}")
        steps = zip(coordinates, self._strides, strict=True)
        return self.offset + sum(position * stride for position, stride in steps)

    def ranks(self) -> list[int]:
        """Return all ranks, in row-major order."""
        steps = [range(0, size * stride, stride) for size, stride in zip(self._sizes, self._strides, strict=True)]
        return [self.offset + sum(step) for step in itertools.product(*steps)]

    def __getitem__(self, i: int | slice) -> Any:
        if isinstance(i, slice):
            return tuple(self.get(index) for index in range(*i.indices(len(self))))
        return self.get(i)

    def __len__(self) -> int:
        return math.prod(self._sizes)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks())

    def __eq__(self, other: object) -> bool:
        if type(other) is not NDSlice:
            return NotImplemented
        return (self.offset, self._sizes, self._strides) == (other.offset, other._sizes, other._strides)

    def __hash__(self) -> int:
        return hash((self.offset, self._sizes, self._strides))

    def __repr__(self) -> str:
        return f"Slice {{ offset: {self.offset}, sizes: {self.sizes}, strides: {self.strides} }}"

    def __reduce__(self) -> tuple[Any, ...]:
        return NDSlice.of, (self.offset, self.sizes, self.strides)


def dense_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major layout without gaps."""
    inner = list(itertools.accumulate(reversed(sizes), operator.mul, initial=1))
    return tuple(reversed(inner[:-1]))


def irregular(sizes: Sequence[int], strides: Sequence[int]) -> str:
    """Return why Monarch refuses a layout; empty if it is regular.

    A dimension's stride has to be a multiple of the next finer one's, and to step over all of it.
    """
    finer, reach = 1, 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if stride % finer:
            return "nonrectangular shape"
        if stride < reach:
            larger = f"stride {stride} must be larger than size of previous space {reach}"
            return "nonunique strides" if stride == finer else larger
        finer, reach = stride, stride * size
    return ""


def _index(what: str, number: int) -> int:
    try:
        found = operator.index(number)
    except TypeError:
        raise WrongArguments(f"argument {what!r}: {number!r} is no integer") from None
    if found < 0:
        raise SliceOutOfRange(f"can't convert negative int to unsigned: {what} has {found}")
    return found
