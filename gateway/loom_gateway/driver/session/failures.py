"""What can no longer answer: processes that are gone, and actors that Monarch has stopped unasked.

Monarch fails the calls on a dead actor itself, as long as its controller of the actor's mesh lives. The controller
may die (torchmonarch 0.7): a host goes right after a spawn, comes back on the same address, and is sent once more
what the dead one had not acknowledged; that comes back undeliverable, and whoever sent it fails. A mesh's actors on
the living hosts are then stopped, and calls on them would be waited for without end.
"""

from __future__ import annotations

import asyncio
import re
from typing import NamedTuple

from loom_gateway.driver.monarch.mesh_table import Entry, Meshes

__all__ = ["Fault", "Losses", "read_fault"]

NAME_TIMEOUT = 1.0
"""Seconds that a mesh has to tell Monarch's name of it; one that is being made has none."""

_CAME_BACK = re.compile(
    r"undeliverable message for .*?\bdest: (?P<label>[\w-]+)<(?P<uid>\w+)>\.\S+?-(?P<rank>\d+)<"
    r".*?: (?P<why>invalid reference [^\n]+)",
    re.DOTALL,
)
"""Of a call that came back: whom it was for, and why it was not delivered."""

_CONTROLLER = re.compile(r"The actor actor_mesh_controller_(?P<mesh>[\w-]+)<")


class Fault(NamedTuple):
    """An unhandled fault that leaves actors without an answer."""

    mesh: str
    """Monarch's name of the actor mesh, in small letters."""
    rank: int | None
    """The process of the proc mesh; None for all of them."""
    why: str


def read_fault(report: str) -> Fault | None:
    """What Monarch's report of a fault says of actors that will not answer; None where it says nothing of them."""
    if found := _CONTROLLER.search(report):
        return Fault(found["mesh"].lower(), None, "Monarch's controller of the mesh has failed")
    if found := _CAME_BACK.search(report):
        return Fault(f"{found['label']}-{found['uid']}".lower(), int(found["rank"]), found["why"].strip())
    return None


class Losses:
    """What cannot answer any more, of one session.

    Args:
        meshes: the session's.
    """

    def __init__(self, meshes: Meshes) -> None:
        self._meshes = meshes
        self._processes: set[tuple[int, int]] = set()
        self._actors: dict[tuple[int, int], str] = {}

    def add_process(self, procs: int, rank: int) -> None:
        """Note that a process of a proc mesh is gone."""
        self._processes.add((procs, rank))

    async def add_actors(self, fault: Fault) -> tuple[int, Entry, list[int]] | None:
        """Note actors that Monarch has stopped unasked.

        Returns:
            The id of their mesh, the mesh, and the ranks that had not been noted before; None if there are none.
        """
        meshes = [(ident, entry) for ident, entry in self._meshes.whole("actors") if not entry.stopped]
        names = await asyncio.gather(*(_name(entry) for _, entry in meshes))
        for (ident, entry), name in zip(meshes, names, strict=True):
            if name == fault.mesh:
                stopped = entry.ranks if fault.rank is None else (fault.rank,)
                new = [rank for rank in stopped if (ident, rank) not in self._actors]
                self._actors.update(((ident, rank), fault.why) for rank in new)
                return (ident, entry, new) if new else None
        return None

    def why_silent(self, entry: Entry) -> str | None:
        """Why a mesh, or one of its elements, cannot answer; None if it can as far as is known."""
        gone = self._processes.copy()
        rank = next((rank for rank in entry.ranks if (entry.procs, rank) in gone), None) if gone else None
        if rank is not None:
            procs = self._meshes.known(entry.procs)
            if procs is not None and procs.stopped:
                return f"process {rank} of proc mesh {procs.name!r} was stopped"
            of = f"of proc mesh {procs.name!r}" if procs is not None else f"under {entry.name!r}"
            return f"process {rank} {of} is gone: it died, or its host did, or the network between"
        actors = self._actors.copy()
        rank = next((rank for rank in entry.ranks if (entry.root, rank) in actors), None) if actors else None
        if rank is None:
            return None
        return (
            f"the actor of mesh {entry.name!r} on rank {rank} was stopped by Monarch, though its process may live: "
            f"spawn it again, on new processes ({actors[entry.root, rank]})"
        )


async def _name(entry: Entry) -> str | None:
    """Monarch's name of an actor mesh, in small letters; None if it has none yet."""
    try:
        name: str = await asyncio.wait_for(entry.mesh._inner.name().as_asyncio(), NAME_TIMEOUT)
    except Exception:  # noqa: BLE001 - it could not be made
        return None
    return name.lower()
