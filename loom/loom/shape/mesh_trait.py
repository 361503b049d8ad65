"""The operations of every mesh on its shape, and the form of shapes on their way to the cluster.

The package exports it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

from loom.errors import NoSuchDimension
from loom.in_cluster import Counterpart
from loom.shape.extent import Extent, Point
from loom.shape.ndslice import NDSlice
from loom.shape.shape import Shape, check_names


def for_cluster(obj: Any) -> tuple[Any, ...]:
    """Return the reduced form of a value mesh or an object of this package: Monarch's own in the cluster."""
    from loom import actor  # with torchmonarch installed, this takes a second

    if isinstance(obj, Extent):
        return actor.monarch_extent, (obj.labels, obj.sizes)
    if isinstance(obj, Point):
        return actor.monarch_point, (obj.rank, obj.extent.labels, obj.extent.sizes)
    if isinstance(obj, NDSlice):
        return actor.monarch_slice, (obj.offset, obj.sizes, obj.strides)
    if isinstance(obj, Shape):
        return actor.monarch_shape, (obj.labels, obj.offset, obj.sizes, obj.strides)
    shape = obj._shape
    return actor.monarch_value_mesh, ((shape.labels, shape.offset, shape.sizes, shape.strides), list(obj.values()))


M = TypeVar("M", bound="MeshTrait")


class MeshTrait(metaclass=Counterpart):
    """The operations that every mesh has on its shape, without a round trip; like Monarch's class of this name."""

    _shape: Shape

    @abstractmethod
    def _new_with_shape(self: M, shape: Shape) -> M: ...

    def slice(self: M, **selection: Any) -> M:
        """Select along dimensions: an int removes its dimension, a slice narrows it.

        ``mesh.slice(hosts=1, gpus=slice(0, 4, 2))``

        Raises:
            NoSuchDimension: the mesh has no dimension of that name.
            SliceOutOfRange: the dimension has no such index, or the slice selects nothing.
            WrongArguments: a selector is neither an int nor a slice.
        """
        return self._new_with_shape(self._shape.selected(selection))

    def split(self: M, **kwargs: Any) -> M:
        """Cut dimensions into several: ``mesh.split(hosts=("dp", "pp"), pp=2)``.

        All sizes but one of each split dimension have to be given.

        Raises:
            ValueError: the sizes do not divide the dimension, or a name is not a dimension.
        """
        splits: dict[str, Sequence[str]] = {}
        constraints: dict[str, int] = {}
        for key, value in kwargs.items():
            if key in self._shape.labels:
                if isinstance(value, str):
                    raise ValueError(f"expected a sequence of dimensions, but got '{value}'")
                splits[key] = value
            elif not isinstance(value, int):
                raise ValueError(
                    f"'{key}' is not an existing dim. Expected an integer size constraint on a new dim."
                )
            else:
                constraints[key] = value
        return self._new_with_shape(self._shape.split(splits, constraints))

    def flatten(self: M, name: str) -> M:
        """Merge all dimensions into one of that name.

        Raises:
            ValueError: the ranks of the mesh are not contiguous.
            WrongArguments: the name is no string.
        """
        check_names([name])
        return self._new_with_shape(self._shape.flatten(name))

    def rename(self: M, **names: str) -> M:
        """Rename dimensions: ``mesh.rename(hosts="dp")``."""
        return self.split(**{old: (new,) for old, new in names.items()})

    def size(self, dim: str | Sequence[str] | None = None) -> int:
        """Return the number of elements: of the mesh, along one dimension, or along several together.

        Raises:
            NoSuchDimension: the mesh has no dimension of that name.
        """
        shape = self._shape
        if dim is None:
            return len(shape)
        if isinstance(dim, str):
            if dim not in shape.labels:
                raise NoSuchDimension(f"{self} does not have dimension {dim!r}; its dimensions: {shape.known}")
            return shape.sizes[shape.labels.index(dim)]
        return math.prod(self.size(one) for one in dim)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each dimension."""
        return dict(zip(self._shape.labels, self._shape.sizes, strict=True))

    @property
    def extent(self) -> Extent:
        """Size of each dimension, as an `Extent`."""
        return self._shape.extent

    def __len__(self) -> int:
        return len(self._shape)
