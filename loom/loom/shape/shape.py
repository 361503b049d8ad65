"""Labelled dimensions over strided ranks."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from loom.errors import Invalid, NoSuchDimension, SliceOutOfRange, WrongArguments
from loom.in_cluster import MonarchsInCluster
from loom.shape.extent import Extent
from loom.shape.ndslice import NDSlice, dense_strides
from loom.shape.selection import ShapeNumbers, indexed, narrowed


class Shape(metaclass=MonarchsInCluster):
    """Labelled dimensions over ranks: the element at ``(i, j, …)`` has the rank ``offset + i*s0 + j*s1 + …``.

    The class works like ``monarch.Shape``. Only `of` makes Loom's own shape also in the cluster, for proxies.

    Args:
        labels: name of each dimension.
        slice: its ranks.

    Raises:
        Invalid: there are not as many labels as dimensions (a `ValueError`).
    """

    __slots__ = ("_labels", "offset", "sizes", "strides")

    _labels: tuple[str, ...]
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def __init__(self, labels: Sequence[str], slice: NDSlice) -> None:
        if not isinstance(slice, NDSlice):
            raise WrongArguments(f"argument 'slice': a shape is made of labels and an NDSlice, not {slice!r:.80}")
        if len(labels) != slice.ndim:
            raise Invalid(f"label slice dimension mismatch: {len(labels)} != {slice.ndim}")
        check_names(labels)
        self._set(tuple(labels), slice.offset, tuple(slice.sizes), tuple(slice.strides))

    def _set(self, labels: tuple[str, ...], offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self._labels, self.offset, self.sizes, self.strides = labels, offset, sizes, strides

    @classmethod
    def of(cls, labels: tuple[str, ...], offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Shape:
        """Return a shape by its numbers, without a check."""
        shape = cls.__new__(cls)
        shape._set(labels, offset, sizes, strides)
        return shape

    @classmethod
    def row_major(cls, sizes: Mapping[str, int]) -> Shape:
        """Return the shape of a whole mesh: dense, starting at rank 0."""
        return cls.of(tuple(sizes), 0, tuple(sizes.values()), dense_strides(tuple(sizes.values())))

    @staticmethod
    def unity() -> Shape:
        """Return the shape of a single element, which has no dimension."""
        return Shape([], NDSlice(offset=0, sizes=[], strides=[]))

    @property
    def labels(self) -> list[str]:
        """Name of each dimension."""
        return list(self._labels)

    @property
    def ndslice(self) -> NDSlice:
        """The ranks, without labels."""
        return NDSlice(offset=self.offset, sizes=list(self.sizes), strides=list(self.strides))

    @property
    def extent(self) -> Extent:
        """Size of each dimension."""
        return Extent(self._labels, self.sizes)

    def __len__(self) -> int:
        return math.prod(self.sizes)

    def ranks(self) -> list[int]:
        """Return the rank of each element in the whole mesh, in row-major order."""
        steps = [range(0, size * stride, stride) for size, stride in zip(self.sizes, self.strides, strict=True)]
        return [self.offset + sum(step) for step in itertools.product(*steps)]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank.

        Raises:
            SliceOutOfRange: the rank is not in the shape (a `ValueError`).
        """
        return dict(zip(self._labels, self.ndslice.coordinates(rank), strict=True))

    def at(self, label: str, index: int) -> Shape:
        """Select an index along a dimension, which goes away.

        Raises:
            NoSuchDimension: there is no dimension of that name.
            SliceOutOfRange: the dimension has no such index.
        """
        axis = self._dimension(label)
        size = self.sizes[axis]
        if isinstance(index, int) and index >= size:
            raise SliceOutOfRange(f"out of range {index}:{index + 1}:1 for dimension {label} of size {size}")
        return Shape.of(*indexed(self._numbers, axis, index))

    def select(self, label: str, slice: slice) -> Shape:
        """Narrow a dimension.

        Raises:
            NoSuchDimension: there is no dimension of that name.
            SliceOutOfRange: the slice selects nothing, or leaves ranks that are not regular.
            WrongArguments: the argument is no slice.
        """
        axis = self._dimension(label)
        if not isinstance(slice, _SLICE):
            raise WrongArguments(f"argument 'slice': {label}={slice!r} is no slice; use at()")
        return Shape.of(*narrowed(self._numbers, axis, slice))

    def index(self, **kwargs: int) -> Shape:
        """Select an index along each of several dimensions, which go away: ``shape.index(hosts=1, gpus=0)``."""
        shape = self
        for label, index in kwargs.items():
            shape = shape.at(label, index)
        return shape

    def _dimension(self, label: str) -> int:
        if label not in self._labels:
            raise NoSuchDimension(f'invalid labels `["{label}"]`; the dimensions: {self.known}')
        return self._labels.index(label)

    @property
    def known(self) -> str:
        """The names of the dimensions, for an error."""
        return ", ".join(self._labels) or "none (a single element)"

    def selected(self, selection: Mapping[str, int | slice]) -> Shape:
        """Select along dimensions: an int removes its dimension, a slice narrows it; see `MeshTrait.slice`."""
        shape = self
        for label, selector in selection.items():
            if label not in shape._labels:
                raise NoSuchDimension(
                    f"Shape does not have dimension labeled {label!r}; its dimensions: {shape.known}"
                )
            axis = shape._labels.index(label)
            if isinstance(selector, slice):
                left = narrowed(shape._numbers, axis, selector)
            else:
                left = indexed(shape._numbers, axis, selector)
            shape = Shape.of(*left)
        return shape

    def split(self, splits: Mapping[str, Sequence[str]], constraints: Mapping[str, int]) -> Shape:
        """Cut dimensions into several; see `MeshTrait.split`."""
        left = {label: operator.index(size) for label, size in constraints.items()}
        labels: list[str] = []
        sizes: list[int] = []
        strides: list[int] = []
        for label, size, stride in zip(self._labels, self.sizes, self.strides, strict=True):
            parts = tuple(splits.get(label, (label,)))
            part_sizes = _split_sizes(label, size, parts, left)
            inner = list(itertools.accumulate(reversed(part_sizes), operator.mul, initial=stride))
            strides.extend(reversed(inner[:-1]))
            sizes.extend(part_sizes)
            for part in parts:
                if part in labels:
                    raise ValueError(f"Duplicate dimension name '{part}'")
                labels.append(part)
        if left:
            raise ValueError(f"unused size constraints: {tuple(left)}")
        check_names(labels)
        return Shape.of(tuple(labels), self.offset, tuple(sizes), tuple(strides))

    def flatten(self, label: str) -> Shape:
        """Return the shape with all dimensions merged into one; see `MeshTrait.flatten`."""
        dense = dense_strides(self.sizes)
        if dense != self.strides:
            raise ValueError(
                f"cannot flatten sparse mesh: ndslice.strides={list(self.strides)} != dense_strides={list(dense)}"
            )
        return Shape.of((label,), self.offset, (len(self),), (1,))

    def __eq__(self, other: object) -> bool:
        if type(other) is not Shape:
            return NotImplemented
        return self._numbers == other._numbers

    def __hash__(self) -> int:
        return hash(self._numbers)

    @property
    def _numbers(self) -> ShapeNumbers:
        return self._labels, self.offset, self.sizes, self.strides

    def __str__(self) -> str:
        return "{" + ",".join(f"{label}={size}" for label, size in zip(self._labels, self.sizes, strict=True)) + "}"

    def __repr__(self) -> str:
        labels = ", ".join(f'"{label}"' for label in self._labels)
        return f"Shape {{ labels: [{labels}], slice: {self.ndslice!r} }}"

    def __reduce__(self) -> tuple[Any, ...]:
        return Shape.of, self._numbers


_SLICE = slice
"""Python's slice, whose name Monarch gives to an argument."""


def _split_sizes(label: str, size: int, parts: Sequence[str], constraints: dict[str, int]) -> list[int]:
    for part in parts:
        if constraints.get(part, 1) < 1:
            raise ValueError(f"{part}={constraints[part]}: a dimension split from '{label}' has at least 1 element")
    known = math.prod(constraints[part] for part in parts if part in constraints)
    unknown = [part for part in parts if part not in constraints]
    if len(unknown) > 1:
        raise ValueError(
            f"Cannot infer size of {tuple(parts)} because both {unknown[1]} and {unknown[0]} have unknown size. "
            f"Specify at least one as argument, e.g. {unknown[1]}=4"
        )
    inferred, rest = divmod(size, known) if known else (0, 1)
    if rest or (not unknown and inferred != 1):
        shown = tuple(constraints.get(part, "?") for part in parts)
        raise ValueError(
            f"Dimension '{label}' of size {size} is not evenly divided by {tuple(parts)!r} with sizes {shown!r}"
        )
    return [constraints.pop(part) if part in constraints else inferred for part in parts]


def check_names(names: Sequence[Any]) -> None:
    """Raise `WrongArguments` if a name of a dimension is no string."""
    for name in names:
        if not isinstance(name, str):
            raise WrongArguments(f"a dimension is named by a string, not by {name!r}")
