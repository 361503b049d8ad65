"""The sizes of a mesh's dimensions, and a coordinate in a mesh."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from loom.errors import NoSuchDimension, SliceOutOfRange
from loom.in_cluster import MonarchsInCluster


class Extent(Mapping[str, int], metaclass=MonarchsInCluster):
    """The size of each dimension of a mesh, in order, like ``monarch.actor.Extent``.

    Raises:
        ValueError: there are not as many sizes as labels.
    """

    __slots__ = ("_labels", "_sizes")

    def __init__(self, labels: Sequence[str], sizes: Sequence[int]) -> None:
        self._labels = tuple(labels)
        self._sizes = tuple(sizes)
        if len(self._labels) != len(self._sizes):
            raise ValueError(
                f"label/sizes dimension mismatch: {len(self._labels)} != {len(self._sizes)}: give one size a label"
            )

    @property
    def labels(self) -> list[str]:
        """Name of each dimension."""
        return list(self._labels)

    @property
    def sizes(self) -> list[int]:
        """Size of each dimension."""
        return list(self._sizes)

    @property
    def nelements(self) -> int:
        """The number of elements of a mesh of this extent."""
        return math.prod(self._sizes)

    def __getitem__(self, label: str) -> int:
        return self._sizes[_position(label, self._labels)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._labels)

    def __len__(self) -> int:
        return len(self._labels)

    def __eq__(self, other: object) -> bool:
        return type(other) is Extent and (self._labels, self._sizes) == (other._labels, other._sizes)

    def __hash__(self) -> int:
        return hash((self._labels, self._sizes))

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{label}: {size}" for label, size in self.items()) + "}"


class Point(Mapping[str, int], metaclass=MonarchsInCluster):
    """A coordinate in a mesh: the index along each dimension, and the rank in row-major order.

    The class works like ``monarch.actor.Point``.

    Raises:
        SliceOutOfRange: the extent has no such rank.
    """

    __slots__ = ("extent", "rank")

    def __init__(self, rank: int, extent: Extent) -> None:
        if not 0 <= rank < extent.nelements:
            raise SliceOutOfRange(f"out of range: total ranks {extent.nelements}; does not contain rank {rank}")
        self.rank = rank
        self.extent = extent

    def _indices(self) -> tuple[int, ...]:
        indices = []
        rest = self.rank
        for size in reversed(self.extent._sizes):
            rest, index = divmod(rest, size)
            indices.append(index)
        return tuple(reversed(indices))

    def size(self, label: str) -> int:
        """Return the size of a dimension of the mesh.

        Raises:
            NoSuchDimension: the mesh has no dimension of that name.
        """
        return self.extent[label]

    def __getitem__(self, label: str) -> int:
        return self._indices()[_position(label, self.extent._labels)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.extent)

    def __len__(self) -> int:
        return len(self.extent)

    def __eq__(self, other: object) -> bool:
        if type(other) is Point:
            return (self.rank, self.extent) == (other.rank, other.extent)
        return isinstance(other, Mapping) and dict(self) == dict(other)

    def __hash__(self) -> int:
        return hash((self.rank, self.extent))

    def __repr__(self) -> str:
        pairs = zip(self.extent._labels, self._indices(), self.extent._sizes, strict=True)
        return "{" + ", ".join(f"'{label}': {index}/{size}" for label, index, size in pairs) + "}"


def _position(label: str, labels: Sequence[str]) -> int:
    try:
        return labels.index(label)
    except ValueError:
        known = ", ".join(labels) or "none (a single element)"
        raise NoSuchDimension(f"Dimension {label!r} not found; the dimensions: {known}") from None
