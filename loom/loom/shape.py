"""The shapes of meshes, computed on the laptop: labelled dimensions over strided ranks.

The arithmetic is Monarch's (``monarch._src.actor.shape.MeshTrait`` and its ``NDSlice``), so that a slice of a proxy
selects the same ranks as the same slice of the real mesh.
"""

from __future__ import annotations

import itertools
import math
import operator
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from loom.cluster import Counterpart, MonarchsInCluster
from loom.errors import NoSuchDimension, SliceOutOfRange, WrongArguments

M = TypeVar("M", bound="MeshTrait")


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
            raise ValueError(f"{len(self._labels)} labels and {len(self._sizes)} sizes: there is one size a label")

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
            raise SliceOutOfRange(f"rank {rank} is out of range: a mesh of {extent} has {extent.nelements} ranks")
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


def for_cluster(obj: Any) -> tuple[Any, ...]:
    """Return the reduced form of an extent, a point or a value mesh, which is Monarch's own in the cluster."""
    from loom import actor  # with torchmonarch installed, this takes a second

    if isinstance(obj, Extent):
        return actor.monarch_extent, (obj.labels, obj.sizes)
    if isinstance(obj, Point):
        return actor.monarch_point, (obj.rank, obj.extent.labels, obj.extent.sizes)
    shape = obj._shape
    return actor.monarch_value_mesh, ((shape.labels, shape.offset, shape.sizes, shape.strides), list(obj.values()))


@dataclass(frozen=True)
class Shape:
    """Labelled dimensions over ranks: the element at ``(i, j, …)`` has the rank ``offset + i*s0 + j*s1 + …``."""

    labels: tuple[str, ...]
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def row_major(cls, sizes: Mapping[str, int]) -> Shape:
        """Return the shape of a whole mesh: dense, starting at rank 0."""
        strides = list(itertools.accumulate(reversed(list(sizes.values())), operator.mul, initial=1))
        return cls(tuple(sizes), 0, tuple(sizes.values()), tuple(reversed(strides[:-1])))

    @property
    def extent(self) -> Extent:
        return Extent(self.labels, self.sizes)

    def __len__(self) -> int:
        return math.prod(self.sizes)

    def ranks(self) -> list[int]:
        """Return the rank of each element in the whole mesh, in row-major order."""
        steps = [range(0, size * stride, stride) for size, stride in zip(self.sizes, self.strides, strict=True)]
        return [self.offset + sum(step) for step in itertools.product(*steps)]

    def dimension(self, label: str) -> int:
        """Return the position of a dimension."""
        return _position(label, self.labels)

    def select(self, selection: Mapping[str, int | slice]) -> Shape:
        """Select along dimensions: an int removes its dimension, a slice narrows it."""
        shape = self
        for label, selector in selection.items():
            axis = shape.dimension(label)
            shape = shape._narrow(axis, selector) if isinstance(selector, slice) else shape._at(axis, selector)
        return shape

    def _at(self, axis: int, index: int) -> Shape:
        label, size = self.labels[axis], self.sizes[axis]
        try:
            index = operator.index(index)
        except TypeError:
            raise WrongArguments(f"{label}={index!r}: select with an int or a slice") from None
        if not 0 <= index < size:
            raise SliceOutOfRange(f"{label}={index} is out of range: {label} has {size} (0 to {size - 1})")

        offset = self.offset + index * self.strides[axis]
        return Shape(_put(self.labels, axis), offset, _put(self.sizes, axis), _put(self.strides, axis))

    def _narrow(self, axis: int, selector: slice) -> Shape:
        label, size = self.labels[axis], self.sizes[axis]
        text = f"{label}={selector.start}:{selector.stop}:{selector.step}".replace("None", "")
        if selector.step is not None and selector.step < 1:
            raise SliceOutOfRange(f"{text}: a step must be at least 1")
        start, stop, step = selector.indices(size)
        count = len(range(start, stop, step))
        if count == 0:
            raise SliceOutOfRange(f"{text} selects nothing: {label} has {size} (0 to {size - 1})")

        stride = self.strides[axis]
        sizes, strides = _put(self.sizes, axis, count), _put(self.strides, axis, stride * step)
        if not _is_regular(sizes, strides):
            raise SliceOutOfRange(
                f"{text} leaves a mesh that is not regular, which Monarch refuses: {label} has {size}. "
                f"Use a step that divides {size}, or select one index of the dimensions before {label} first"
            )
        return Shape(self.labels, self.offset + start * stride, sizes, strides)

    def split(self, splits: Mapping[str, Sequence[str]], constraints: Mapping[str, int]) -> Shape:
        """Cut dimensions into several; see `MeshTrait.split`."""
        left = dict(constraints)
        labels: list[str] = []
        sizes: list[int] = []
        strides: list[int] = []
        for label, size, stride in zip(self.labels, self.sizes, self.strides, strict=True):
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
        _check_names(labels)
        return Shape(tuple(labels), self.offset, tuple(sizes), tuple(strides))

    def flatten(self, label: str) -> Shape:
        """Return the shape with all dimensions merged into one; see `MeshTrait.flatten`."""
        dense = Shape.row_major(dict(zip(self.labels, self.sizes, strict=True))).strides
        if dense != self.strides:
            raise ValueError(f"cannot flatten sparse mesh: strides {self.strides} != {dense}")
        return Shape((label,), self.offset, (len(self),), (1,))


def _put(values: tuple[Any, ...], axis: int, *instead: Any) -> tuple[Any, ...]:
    return (*values[:axis], *instead, *values[axis + 1 :])


def _position(label: str, labels: tuple[str, ...]) -> int:
    try:
        return labels.index(label)
    except ValueError:
        known = ", ".join(labels) or "none (a single element)"
        raise NoSuchDimension(f"no dimension {label!r} in this mesh; its dimensions: {known}") from None


def _is_regular(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Apply Monarch's rule: a dimension's stride is a multiple of the next finer one's and steps over all of it."""
    finer, reach = 1, 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if stride % finer or stride < reach:
            return False
        finer, reach = stride, stride * size
    return True


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


def _check_names(names: Sequence[Any]) -> None:
    for name in names:
        if not isinstance(name, str):
            raise WrongArguments(f"a dimension is named by a string, not by {name!r}")


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
        return self._new_with_shape(self._shape.select(selection))

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
        _check_names([name])
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
            return shape.sizes[shape.dimension(dim)]
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
