"""`NamedMeshes`: the proxies of a session's meshes, by names of which none hides another mesh.

A name need not be unique: a proc mesh and the actors on it often share one.
"""

from __future__ import annotations

from typing import Any

KEPT_STOPPED = 64
"""Meshes that were stopped here which still have a name."""


class NamedMeshes:
    """The meshes that one client knows, the oldest first. Any thread may call."""

    def __init__(self) -> None:
        self._all: dict[int, Any] = {}  # by the mesh's id; ids grow in the order in which meshes are made
        self._stopped: dict[int, None] = {}
        """The ids of those that were stopped here, in that order."""

    def __contains__(self, ident: int) -> bool:
        return ident in self._all

    def add(self, mesh: Any) -> None:
        self._all[mesh._whole.ident] = mesh

    def remove(self, mesh: Any) -> None:
        self._all.pop(mesh._whole.ident, None)
        self._stopped.pop(mesh._whole.ident, None)

    def by_name(self) -> dict[str, Any]:
        """Return each mesh under its name. Of several with one name, the newest that was not stopped has it.

        The others are there, too, with their id behind the name: ``trainers#3``. If all were stopped, the newest
        has the name.
        """
        found: dict[str, Any] = {}
        for _, mesh in sorted(self._all.copy().items()):
            name, other = mesh._whole.name, None
            if name in found:
                other = found[name]
                if mesh._whole.ident in self._stopped and other._whole.ident not in self._stopped:
                    mesh, other = other, mesh
            found[name] = mesh
            if other is not None:
                found[f"{name}#{other._whole.ident}"] = other
        return found

    def note_stopped(self, ident: int | None) -> None:
        """Note that a whole mesh was stopped, with the actors on it; without an id, that all were.

        Those that were stopped first, beyond `KEPT_STOPPED`, are dropped.
        """
        for known, mesh in self._all.copy().items():
            if ident is None or ident in (known, mesh._whole.procs):
                self._stopped.setdefault(known)
        while len(self._stopped) > KEPT_STOPPED:
            oldest = next(iter(self._stopped))
            del self._stopped[oldest]
            self._all.pop(oldest, None)
