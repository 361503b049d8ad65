"""The names of a session's cells: what the cells have assigned, ``job``, and the session's meshes."""

from __future__ import annotations

import builtins
import keyword
from collections.abc import Mapping
from typing import Any

import loom.beside
from loom.cells.displays import display


class CellJob:
    """The session, for a cell in its driver. Its meshes are Monarch's own, as those that `Job.run` passes."""

    @property
    def session(self) -> str:
        """The session's name."""
        return loom.beside.session().name

    @property
    def hosts(self) -> Any:
        """The Monarch host mesh of the worker hosts."""
        return loom.beside.session().host_mesh()

    @property
    def meshes(self) -> Mapping[str, Any]:
        """The session's Monarch proc and actor meshes by name; of two with one name, the newer."""
        return loom.beside.session().meshes()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"in the cluster, job has no {name!r}; it has hosts, meshes and session. "
            f"The notebook's own job has more: use it in a cell without %%cluster"
        )

    def __repr__(self) -> str:
        return f"<job of session {self.session!r} in its driver: hosts, meshes {', '.join(self.meshes) or 'none'}>"


class Namespace:
    """The global variables of all cells of a session."""

    def __init__(self) -> None:
        # Classes of this module's name travel by value, to workers too, as those of a notebook do.
        self.names: dict[str, Any] = {
            "__name__": "__main__",
            "__builtins__": builtins,
            "job": CellJob(),
            "display": display,
        }
        self._given: dict[str, Any] = {}  # the meshes that are in `names`

    def give_meshes(self) -> None:
        """Bring the names of meshes up to date. A name that a cell has assigned keeps the cell's value."""
        meshes = {name: mesh for name, mesh in loom.beside.session().meshes().items() if _is_usable(name)}
        for name, mesh in self._given.items():
            if name not in meshes and self.names.get(name) is mesh:
                del self.names[name]
        for name, mesh in meshes.items():
            if name not in self.names or self.names[name] is self._given.get(name):
                self.names[name] = mesh
        self._given = meshes


def _is_usable(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name) and not hasattr(builtins, name)
