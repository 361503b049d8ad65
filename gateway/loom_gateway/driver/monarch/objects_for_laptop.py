"""Replacements for objects of Monarch's classes on their way to a laptop, which need not have Monarch.

If an actor returns a mesh, the laptop gets a proxy of it. Only the session's context uses them; they are apart
because they name each of Monarch's classes.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.shape import Extent as MonarchExtent
from monarch._rust_bindings.monarch_hyperactor.shape import Point as BasePoint
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError as MonarchSupervisionError
from monarch._src.actor.actor_mesh import ActorMesh
from monarch._src.actor.shape import NDSlice as MonarchSlice
from monarch._src.actor.shape import Shape as MonarchShape
from monarch.actor import ActorError as MonarchActorError
from monarch.actor import HostMesh, ProcMesh, ValueMesh
from monarch.actor import Point as MonarchPoint

from loom.errors import ActorError, SupervisionError
from loom.shape import Extent, NDSlice, Point, Shape
from loom.signatures import endpoints
from loom.wire.codec import Made
from loom_gateway.driver.monarch.mesh_table import MeshEntry, MeshTable, shape_of


def _actor_error(error: MonarchActorError) -> tuple[Any, ...]:
    return (
        ActorError,
        (error.exception, error.message, error.exception_formatted),
        {"place": getattr(error, "place", "")},
    )


def _supervision_error(error: MonarchSupervisionError) -> tuple[Any, ...]:
    return SupervisionError, (str(error),)


def _point(point: MonarchPoint) -> tuple[Any, ...]:
    return Point, (point.rank, point.extent)


def _extent(extent: MonarchExtent) -> tuple[Any, ...]:
    return Extent, (extent.labels, extent.sizes)


def _shape(shape: MonarchShape) -> tuple[Any, ...]:
    ranks = shape.ndslice
    return Shape.of, (tuple(shape.labels), ranks.offset, tuple(ranks.sizes), tuple(ranks.strides))


def _slice(ranks: MonarchSlice) -> tuple[Any, ...]:
    return NDSlice.of, (ranks.offset, ranks.sizes, ranks.strides)


class Translations:
    """The replacements of one session.

    A mesh that the session knows keeps its id. Another gets a negative id, and is forgotten when the laptop has
    dropped its proxies.
    """

    def __init__(self, meshes: MeshTable) -> None:
        self._meshes = meshes
        self._ids = itertools.count(-1, -1)
        self._lock = threading.Lock()
        self.swaps: dict[type, Callable[[Any], Any]] = {
            BasePoint: _point,
            MonarchPoint: _point,
            MonarchExtent: _extent,
            MonarchShape: _shape,
            MonarchSlice: _slice,
            MonarchActorError: _actor_error,
            MonarchSupervisionError: _supervision_error,
            ActorMesh: self._actors,
            ProcMesh: lambda mesh: self._made("procs", mesh, "procs"),
            HostMesh: lambda mesh: self._made("hosts", mesh, "hosts"),
            ValueMesh: _values,
        }
        """For `Encoder`: the replacement to pickle, by an object's type."""

    def _actors(self, mesh: Any) -> Made:
        described = {name: signature.parameters for name, signature in endpoints(mesh._class).items()}
        made = self._made("actors", mesh, mesh._mesh_name, mesh._class)
        return made._replace(class_name=mesh._class.__name__, endpoints=described)

    def _made(self, kind: str, mesh: Any, name: str, cls: type | None = None) -> Made:
        with self._lock:
            found = self._meshes.find(mesh)
            if found is not None:
                ident, entry = found
            else:
                ident = next(self._ids)
                entry = MeshEntry(kind, name, mesh, ident, cls=cls)
                self._meshes.add(ident, entry)
        return Made(kind, ident, entry.name, shape_of(mesh), entry.root)


def _values(mesh: Any) -> Made:
    return Made("values", 0, "", shape_of(mesh), values=list(mesh.values()))
