"""The pickling of points and extents: they are Monarch's in the cluster, Loom's own on the laptop.

A payload names the functions below, and each returns the class of its side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


def laptop_extent(labels: Sequence[str], sizes: Sequence[int]) -> Any:
    """Unpickle an extent on the laptop."""
    from loom.shape import Extent

    return Extent(labels, sizes)


def laptop_point(rank: int, labels: Sequence[str], sizes: Sequence[int]) -> Any:
    """Unpickle a point on the laptop."""
    from loom.shape import Point

    return Point(rank, laptop_extent(labels, sizes))


def _cluster_extent(labels: Sequence[str], sizes: Sequence[int]) -> Any:
    from loom.actor import monarch_extent

    return monarch_extent(labels, sizes)


def _cluster_point(rank: int, labels: Sequence[str], sizes: Sequence[int]) -> Any:
    from loom.actor import monarch_point

    return monarch_point(rank, labels, sizes)


def _cluster_value_mesh(shape: tuple[Any, ...], values: list[Any]) -> Any:
    from loom.actor import monarch_value_mesh

    return monarch_value_mesh(shape, values)


def for_laptop(obj: Any) -> Reduced:
    """Return the reduced form of a Monarch point or extent for the laptop; for `Encoder`."""
    if hasattr(obj, "rank"):
        return laptop_point, (obj.rank, list(obj.extent.labels), list(obj.extent.sizes))
    return laptop_extent, (list(obj.labels), list(obj.sizes))


def for_cluster(obj: Any) -> Reduced:
    """Return the reduced form of Loom's point, extent or value mesh for the cluster; for `Encoder`."""
    if hasattr(obj, "rank"):
        return _cluster_point, (obj.rank, list(obj.extent.labels), list(obj.extent.sizes))
    if hasattr(obj, "items") and hasattr(obj, "_shape"):
        shape = obj._shape
        return _cluster_value_mesh, (
            (shape.labels, shape.offset, shape.sizes, shape.strides),
            list(obj.values()),
        )
    return _cluster_extent, (list(obj.labels), list(obj.sizes))
