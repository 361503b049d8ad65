"""The meshes of a session, by the ids that the client gave them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from monarch._src.actor.shape import NDSlice, Shape

from loom.errors import LoomError, NoSuchMesh

__all__ = ["HOST_MESH", "Entry", "Meshes"]

HOST_MESH = 0
"""The id of the session's host mesh, which exists from the start."""


@dataclass
class Entry:
    """A mesh, or the reason why there is none."""

    kind: str
    """``hosts``, ``procs`` or ``actors``."""
    name: str
    mesh: Any
    root: int
    """The id of the mesh that this one is a part of; its own id where it is whole."""
    failure: LoomError | None = None
    procs: int = -1
    """The id of the proc mesh that this mesh is in; its own id for a proc mesh, -1 for hosts."""
    ranks: tuple[int, ...] = ()
    """Ranks of that proc mesh that this mesh covers, row by row; of a host mesh, the numbers of its hosts."""
    hosts: tuple[int, ...] = ()
    """Number of the host of each rank; of a whole proc mesh only."""
    cls: type | None = None
    """Class of the actors of an actor mesh."""
    stopped: bool = False


class Meshes:
    """What the ids of a session mean."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._endpoints: dict[tuple[int, str, str], Any] = {}

    def add(self, ident: int, entry: Entry) -> None:
        """Give a mesh the id that the client chose for it."""
        self._entries[ident] = entry

    def fail(self, ident: int, kind: str, name: str, failure: LoomError) -> None:
        """Note that the mesh of this id could not be made; whatever names it fails with the same cause."""
        self._entries[ident] = Entry(kind, name, None, ident, failure)

    def entry(self, ident: int) -> Entry:
        """The entry of an id.

        Raises:
            NoSuchMesh: the session has no mesh of this id.
            LoomError: the operation that had to make the mesh failed; this is its error.
        """
        entry = self._entries.get(ident)
        if entry is None:
            raise NoSuchMesh(
                f"this session has no mesh with the id {ident}; it may have been made in another session"
            )
        if entry.failure is not None:
            raise entry.failure
        return entry

    def mesh(self, ident: int) -> Any:
        """The Monarch mesh of an id. Raises as `entry` does."""
        return self.entry(ident).mesh

    def add_view(
        self, ident: int, of: int, labels: tuple[str, ...], offset: int, sizes: list[int], strides: list[int]
    ) -> None:
        """Give a part of a mesh an id of its own."""
        entry = self.entry(of)
        shape = Shape(list(labels), NDSlice(offset=offset, sizes=list(sizes), strides=list(strides)))
        view = entry.mesh._new_with_shape(shape)
        # Slices, and actors on slices of procs, keep the ranks of the whole mesh.
        ranks = tuple(shape.ranks())
        self._entries[ident] = Entry(
            entry.kind, entry.name, view, entry.root, procs=entry.procs, ranks=ranks, cls=entry.cls
        )

    def adverb(self, ident: int, endpoint: str, adverb: str) -> Any:
        """The bound method that calls an endpoint of a mesh, such as ``mesh.add.call``."""
        key = (ident, endpoint, adverb)
        bound = self._endpoints.get(key)
        if bound is None:
            bound = getattr(getattr(self.mesh(ident), endpoint), adverb)
            self._endpoints[key] = bound
        return bound

    def whole(self, kind: str | None = None) -> list[tuple[int, Entry]]:
        """Every whole mesh that was made, oldest first; of one kind where ``kind`` names it."""
        return [
            (ident, entry)
            for ident, entry in self._entries.items()
            if entry.root == ident and entry.failure is None and kind in (None, entry.kind)
        ]
