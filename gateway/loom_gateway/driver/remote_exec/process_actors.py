"""`ProcessActors`: actors of Loom's own in the session's processes, spawned when they are first needed."""

from __future__ import annotations

from typing import Any

from loom_gateway.driver.monarch.mesh_table import MeshEntry, release, shape_of


class ProcessActors:
    """The actors of one class: a mesh of its own for each process. In one mesh, a dead one would end the others.

    Args:
        name: Monarch's name of each mesh.
    """

    def __init__(self, name: str, cls: type) -> None:
        self._name = name
        self._cls = cls
        self._actors: dict[int, dict[int, Any]] = {}  # by the id of the proc mesh and the rank

    def of(self, procs: MeshEntry, rank: int, *arguments: Any) -> Any:
        """Return the actor of a rank of a whole proc mesh. The first time, spawn it with arguments."""
        actors = self._actors.setdefault(procs.root, {})
        if rank not in actors:
            actors[rank] = procs.mesh.slice(**_coordinates(procs, rank)).spawn(self._name, self._cls, *arguments)
        return actors[rank]

    def retire(self, procs: int) -> None:
        """Release the actors of a proc mesh that has stopped."""
        release(self._actors.pop(procs, {}).values())


def _coordinates(procs: MeshEntry, rank: int) -> dict[str, int]:
    """Return the coordinates of a process of a whole proc mesh, whose ranks go row by row."""
    labels, _, sizes, _ = shape_of(procs.mesh)
    found = {}
    for label, size in zip(reversed(labels), reversed(sizes), strict=True):
        rank, found[label] = divmod(rank, size)
    return found
