"""The results of a call to a mesh."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from pprint import pformat
from textwrap import indent
from typing import Any, Generic, TypeVar

from loom.errors import Invalid, NoSuchDimension, SliceOutOfRange, WrongArguments
from loom.in_cluster import is_monarchs, monarchs
from loom.shape import MeshTrait, Point, Shape
from loom_proxy.notebook.html import value_mesh_html

R = TypeVar("R")


class ValueMeshProxy(MeshTrait, Generic[R]):
    """The values of called actors, by the actors' coordinates; the counterpart of ``monarch.actor.ValueMesh``.

    Of a Monarch shape, as a program in the cluster has it, the result is Monarch's value mesh.

    Args:
        shape: where the values lie: ``loom.Shape(labels, loom.NDSlice.new_row_major(sizes))``.
        values: one for each element of the shape, in row-major order.

    Raises:
        Invalid: there are more values or fewer (a `ValueError`).
        WrongArguments: the shape is none.
    """

    def __new__(cls, shape: Shape, values: Sequence[R]) -> Any:
        return monarchs().ValueMesh(shape, values) if is_monarchs(shape) else super().__new__(cls)

    def __init__(self, shape: Shape, values: Sequence[R]) -> None:
        _check_shape(shape)
        if len(values) != len(shape):
            raise _not_filled(shape, len(values))
        self._shape = shape
        self._values = values

    @staticmethod
    def from_indexed(shape: Shape, pairs: Sequence[tuple[int, R]]) -> ValueMeshProxy[R]:
        """Return a value mesh of values that come in any order, with the row-major index of each.

        Of two values with one index, the later counts.

        Raises:
            Invalid: an index is missing, or is not in the shape (a `ValueError`).
            SliceOutOfRange: an index is negative (an `OverflowError`).
            WrongArguments: the pairs are no sequence of tuples, or an index is no int.
        """
        if is_monarchs(shape):
            return monarchs().ValueMesh.from_indexed(shape, pairs)  # type: ignore[no-any-return]
        _check_shape(shape)
        if not isinstance(pairs, Sequence):
            raise WrongArguments(f"argument 'pairs': {type(pairs).__name__!r} object cannot be cast as 'Sequence'")
        values = dict(map(_indexed, pairs))
        if len(values) != len(shape) or any(rank >= len(shape) for rank in values):
            raise _not_filled(shape, max((*values, len(values) - 1)) + 1)
        return ValueMeshProxy(shape, [values[rank] for rank in range(len(shape))])

    def _new_with_shape(self, shape: Shape) -> ValueMeshProxy[R]:
        position = {rank: index for index, rank in enumerate(self._shape.ranks())}
        return ValueMeshProxy(shape, [self._values[position[rank]] for rank in shape.ranks()])

    def item(self, **coordinates: int) -> R:
        """Return the value at the coordinates. A mesh without dimensions needs none.

        Raises:
            NoSuchDimension: a dimension is missing, or is not one of this mesh's (a `KeyError`).
            SliceOutOfRange: a coordinate is outside its dimension (an `IndexError`).
            WrongArguments: a coordinate is no int.
        """
        labels = self._shape.labels
        missing = [label for label in labels if label not in coordinates]
        if missing:
            raise NoSuchDimension(f"item() needs a coordinate for each dimension; missing: {missing!r}")
        extra = [label for label in coordinates if label not in labels]
        if extra:
            raise NoSuchDimension(f"item has extra dimensions: {extra}; the dimensions: {self._shape.known}")
        for label, index in coordinates.items():
            if isinstance(index, slice):
                raise WrongArguments(f"item() takes one coordinate for {label!r}, not a slice; use slice()")
        (rank,) = self._shape.selected(coordinates).ranks()
        return self._values[self._shape.ranks().index(rank)]

    def get(self, rank: int) -> R:
        """Return the value of the ``rank``-th element, counted in row-major order.

        Raises:
            SliceOutOfRange: there are fewer elements.
        """
        if not 0 <= rank < len(self._values):
            raise SliceOutOfRange(f"index {rank} out of range (len={len(self._values)})")
        return self._values[rank]

    def items(self) -> Iterator[tuple[Point, R]]:
        """Yield each value's coordinates and the value, in row-major order."""
        extent = self.extent
        for rank, value in enumerate(self._values):
            yield Point(rank, extent), value

    def values(self) -> list[R]:
        """Return the values in row-major order."""
        return list(self._values)

    def __iter__(self) -> Iterator[tuple[Point, R]]:
        return self.items()

    def __eq__(self, other: object) -> bool:
        if type(other) is not ValueMeshProxy:
            return NotImplemented
        return self.extent == other.extent and list(self._values) == list(other._values)

    __hash__ = None  # type: ignore[assignment]

    def _repr_html_(self) -> str:
        return value_mesh_html(self.extent, self._values)

    def __repr__(self) -> str:
        body = indent(pformat(tuple(self.items())), "  ")
        return f"ValueMesh({self.extent}):\n{body}"

    def __reduce__(self) -> tuple[Any, ...]:
        return ValueMeshProxy, (self._shape, list(self._values))


def _check_shape(shape: Shape) -> None:
    if not isinstance(shape, Shape):
        raise WrongArguments(f"argument 'shape': {type(shape).__name__!r} object cannot be cast as 'Shape'")


def _not_filled(shape: Shape, count: int) -> Invalid:
    return Invalid(f"invalid value mesh: expected {len(shape)} ranks, but contains {count} ranks ({shape.extent})")


def _indexed(pair: tuple[int, R]) -> tuple[int, R]:
    if not isinstance(pair, tuple):
        raise WrongArguments(f"argument 'pairs': {type(pair).__name__!r} object cannot be cast as 'tuple'")
    if len(pair) != 2:
        raise Invalid(f"expected tuple of length 2, but got tuple of length {len(pair)}")
    try:
        rank = operator.index(pair[0])
    except TypeError:
        what = type(pair[0]).__name__
        raise WrongArguments(f"argument 'pairs': {what!r} object cannot be interpreted as an integer") from None
    if rank < 0:
        raise SliceOutOfRange(f"can't convert negative int to unsigned: index {rank} of a value")
    return rank, pair[1]
