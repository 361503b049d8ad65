"""What can no longer answer, and what follows: processes that are gone, and actors that Monarch has stopped.

Monarch fails the calls on a dead actor itself, as long as its controller of the actor's mesh lives. The controller
may die (torchmonarch 0.7): a host goes right after a spawn, comes back on the same address, and is sent once more
what the dead one had not acknowledged; that comes back undeliverable, and whoever sent it fails. A mesh's actors on
the living hosts are then stopped, and calls on them would be waited for without end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from loom_gateway.driver.monarch.fast_call import ReplyChannels
from loom_gateway.driver.monarch.mesh_table import Entry, MeshTable
from loom_gateway.driver.monarch.reports import Fault, failed_element, read_fault
from loom_gateway.driver.session.notices import notice
from loom_gateway.driver.session.replies import Replies, Send

logger = logging.getLogger(__name__)


class Losses:
    """What cannot answer any more, of one session.

    Args:
        meshes: the session's.
    """

    def __init__(self, meshes: MeshTable) -> None:
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
        found = await self._meshes.named_by_monarch(fault.mesh)
        if found is None:
            return None
        ident, entry = found
        stopped = entry.ranks if fault.rank is None else (fault.rank,)
        new = [rank for rank in stopped if (ident, rank) not in self._actors]
        self._actors.update(((ident, rank), fault.why) for rank in new)
        return (ident, entry, new) if new else None

    def why_silent(self, entry: Entry) -> str | None:
        """Return why a mesh, or one of its elements, cannot answer; None if it can as far as is known."""
        if not self._processes and not self._actors:
            return None  # as nearly always; each call is asked about
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


class Failures:
    """Fails the calls that wait for what is gone. On the event loop, but for `report`.

    Args:
        loop: the driver's event loop.
        meshes: the session's.
        losses: takes note of what is gone.
        replies: has the calls.
        channels: to single actors, which are not used any more once one is gone.
        send: takes a message for the client.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        meshes: MeshTable,
        losses: Losses,
        replies: Replies,
        channels: ReplyChannels,
        send: Send,
    ) -> None:
        self._loop = loop
        self._meshes = meshes
        self._losses = losses
        self._replies = replies
        self._channels = channels
        self._send = send
        self.on_process_gone: list[Callable[[int, int], object]] = []
        """Called with the id of a proc mesh and a rank in it, for each process that is gone."""

    def process_gone(self, procs: int, rank: int) -> None:
        """Note that a process is gone; fail the calls that wait for it unless Monarch does so in time."""
        self._losses.add_process(procs, rank)
        for tell in self.on_process_gone:
            tell(procs, rank)
        self._fail_calls(lambda entry: entry.procs == procs and rank in entry.ranks)

    def host_gone(self, host: int) -> None:
        """Note that each process on a worker host is gone, also those that were being spawned."""
        for procs, entry in self._meshes.whole("procs"):
            self.processes_gone_with(procs, entry, host)

    def processes_gone_with(self, procs: int, entry: Entry, host: int) -> None:
        """Note that the processes of a proc mesh on a lost host are gone."""
        for rank in entry.ranks:
            if entry.hosts[rank] == host:
                self.process_gone(procs, rank)

    def report(self, mesh: str, report: str) -> None:
        """Take Monarch's report of a fault that nobody handles, and its name of the mesh. On any thread."""
        details: dict[str, Any] = {"mesh": mesh, "report": report}
        logger.warning("failure: %s", details)
        place = failed_element(mesh, report)
        element = None if place is None else self._meshes.element(place.mesh, place.point)
        if element is not None:
            details |= {"id": element[0], "ranks": [element[1]]}
        self._send(notice("failure", details))
        fault = read_fault(report)
        if fault is not None:
            asyncio.run_coroutine_threadsafe(self.actors_stopped(fault), self._loop)

    async def actors_stopped(self, fault: Fault) -> None:
        """Note actors that Monarch has stopped unasked; fail the calls on them as `process_gone` does."""
        lost = await self._losses.add_actors(fault)
        if lost is None:
            return
        ident, whole, ranks = lost
        details = {"mesh": whole.name, "id": ident, "ranks": ranks, "report": fault.why}
        self._send(notice("actors_lost", details))
        self._fail_calls(lambda entry: entry.root == ident and not set(ranks).isdisjoint(entry.ranks))

    def _fail_calls(self, on: Callable[[Entry], bool]) -> None:
        self._channels.break_off(on)
        self._replies.fail_calls(on)
