"""The results of a call to a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pprint import pformat
from textwrap import indent
from typing import Any, Generic, TypeVar

from loom.errors import NoSuchDimension, SliceOutOfRange, WrongArguments
from loom.shape import MeshTrait, Point, Shape
from loom_proxy.display.notebook import value_mesh_html

R = TypeVar("R")


class ValueMeshProxy(MeshTrait, Generic[R]):
    """The values of called actors, by the actors' coordinates; the counterpart of ``monarch.actor.ValueMesh``."""

    def __init__(self, shape: Shape, values: Sequence[R]) -> None:
        if len(values) != len(shape):
            raise ValueError(f"{len(values)} values do not fill a mesh of {shape.extent}")
        self._shape = shape
        self._values = values

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
        missing = [label for label in self._shape.labels if label not in coordinates]
        if missing:
            raise NoSuchDimension(f"item() needs a coordinate for each dimension; missing: {', '.join(missing)}")
        for label, index in coordinates.items():
            self._shape.dimension(label)
            if isinstance(index, slice):
                raise WrongArguments(f"item() takes one coordinate for {label!r}, not a slice; use slice()")
        (rank,) = self._shape.select(coordinates).ranks()
        return self._values[self._shape.ranks().index(rank)]

    def get(self, rank: int) -> R:
        """Return the value of the ``rank``-th element, counted in row-major order.

        Raises:
            SliceOutOfRange: there are fewer elements.
        """
        if not 0 <= rank < len(self._values):
            raise SliceOutOfRange(f"rank {rank} is out of range: there are {len(self._values)} values")
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
