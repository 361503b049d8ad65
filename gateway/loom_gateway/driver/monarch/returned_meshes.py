"""Meshes in results: if an actor returns a mesh, the laptop gets a proxy of it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

from monarch._src.actor.actor_mesh import ActorMesh
from monarch.actor import HostMesh, ProcMesh, ValueMesh

from loom.signatures import endpoints
from loom.wire.codec import Made
from loom_gateway.driver.monarch.mesh_table import Entry, MeshTable, shape_of


class ReturnedMeshes:
    """The ids of meshes in results.

    A mesh that the session knows keeps its id. Another gets a negative id, and is forgotten when the laptop has
    dropped its proxies.
    """

    def __init__(self, meshes: MeshTable) -> None:
        self._meshes = meshes
        self._ids = itertools.count(-1, -1)
        self._lock = threading.Lock()
        self.swaps: dict[type, Callable[[Any], Any]] = {
            ActorMesh: self._actors,
            ProcMesh: self._procs,
            HostMesh: self._hosts,
            ValueMesh: _values,
        }
        """Replacements for `Encoder`, by type: a description travels instead of the mesh."""

    def _actors(self, mesh: Any) -> Made:
        described = {name: signature.parameters for name, signature in endpoints(mesh._class).items()}
        made = self._made("actors", mesh, mesh._mesh_name, mesh._class)
        return made._replace(class_name=mesh._class.__name__, endpoints=described)

    def _procs(self, mesh: Any) -> Made:
        return self._made("procs", mesh, "procs")

    def _hosts(self, mesh: Any) -> Made:
        return self._made("hosts", mesh, "hosts")

    def _made(self, kind: str, mesh: Any, name: str, cls: type | None = None) -> Made:
        with self._lock:
            found = self._meshes.find(mesh)
            if found is not None:
                ident, entry = found
            else:
                ident = next(self._ids)
                entry = Entry(kind, name, mesh, ident, cls=cls)
                self._meshes.add(ident, entry)
        return Made(kind, ident, entry.name, shape_of(mesh), entry.root)


def _values(mesh: Any) -> Made:
    return Made("values", 0, "", shape_of(mesh), values=list(mesh.values()))
