"""Extents, points, shapes and value meshes on their way to the cluster."""

from __future__ import annotations

from typing import Any

from loom.shape.extent import Extent, Point
from loom.shape.ndslice import NDSlice
from loom.shape.shape import Shape


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
