"""Failures that Monarch leaves out (torchmonarch 0.7).

Monarch's controller of a mesh reports the first of its elements that fails, and none after it. So of two processes
that die at once, or one after the other, Monarch tells of one. A mesh of actors has no controller
before it is made. If an actor fails meanwhile, the mesh is not made, and Monarch tells of none.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from loom.process import tasks
from loom.shape import Extent, Point
from loom_gateway.driver.monarch.host_table import HostTable
from loom_gateway.driver.monarch.mesh_table import MeshEntry, MeshTable, monarchs_name
from loom_gateway.driver.monarch.reports import MeshElement, died_with_its_process, failed_spawn

MONARCHS_TURN = 1.0  # seconds for which Monarch may report a dead process first; it takes half of one
KEPT = 4096  # reports of Monarch's that are remembered


class UnreportedFailures:
    """The failures of one session that Monarch does not report. On the event loop, except for `reported`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        meshes: MeshTable,
        hosts: HostTable,
        publish: Callable[[dict[str, Any]], None],
    ) -> None:
        self._loop = loop
        self._meshes = meshes
        self._hosts = hosts
        self._publish = publish
        self._reports: deque[tuple[str, MeshElement]] = deque(maxlen=KEPT)
        """What Monarch has reported: its name of a mesh in lower case, and the element."""
        self._published: set[tuple[int, int]] = set()  # mesh's id and rank

    def reported(self, mesh: str, place: MeshElement | None, element: tuple[int, int] | None) -> bool:
        """Note a report of Monarch's; return whether it comes too late, because it was published without Monarch.

        Safe on any thread.
        """
        if place is not None:
            self._reports.append((mesh.lower(), place))
        return element in self._published

    def lost(self, procs: int, rank: int) -> None:
        """Note that a process was lost, and publish its failures unless Monarch reports them."""
        self._loop.call_later(MONARCHS_TURN, self._check, procs, rank)

    def watch_spawn(self, ident: int, entry: MeshEntry) -> None:
        """Publish the failure of an actor mesh whose spawn fails. None of its actors can be called then."""

        def done(made: asyncio.Future[Any]) -> None:
            error = None if made.cancelled() else made.exception()
            if error is None:
                return
            error.__traceback__ = None  # its frames hold the future, which in 0.8 holds the error for ever
            why = None if entry.stopped else failed_spawn(str(error))
            if why is not None:
                self._publish({"mesh": entry.name, "report": why, "id": ident, "ranks": list(entry.ranks)})

        entry.mesh.initialized.as_asyncio().add_done_callback(done)

    def retire(self, ident: int) -> None:
        """Forget what was published of a mesh that was stopped."""
        self._published = {place for place in self._published if place[0] != ident}

    def _check(self, procs: int, rank: int) -> None:
        tasks.run_to_end("publish failures", lambda: self._publish_missing(procs, rank))

    async def _publish_missing(self, procs: int, rank: int) -> None:
        whole = self._meshes.known(procs)
        if whole is None or whole.failure is not None or whole.hosts[rank] in self._hosts.lost:
            return  # stopped, or lost with its host, which is one failure
        failed = [(ident, entry) for ident, entry in self._meshes.whole("actors") if _runs_on(entry, procs, rank)]
        for ident, entry in failed:
            name = await monarchs_name(entry) or entry.name
            point = _point(entry, rank)
            if not self._knows(name.lower(), point):
                self._add(ident, rank, name, died_with_its_process(entry.cls, entry.name, point))
        if not failed and not self._knows_process(whole, rank):
            point = _point(whole, rank)
            self._add(procs, rank, whole.name, f"The process {point} of proc mesh {whole.name!r} has failed")

    def _knows(self, name: str, point: Point) -> bool:
        return any(mesh == name and place.is_at(point) for mesh, place in self._reports)

    def _knows_process(self, whole: MeshEntry, rank: int) -> bool:
        """Return whether Monarch has reported one of its own actors, which it has in each process."""
        point = _point(whole, rank)
        alike = [entry for _, entry in self._meshes.whole("procs") if _extent(entry) == _extent(whole)]
        return len(alike) == 1 and any(place.mesh == "setup" and place.is_at(point) for _, place in self._reports)

    def _add(self, ident: int, rank: int, mesh: str, report: str) -> None:
        if (ident, rank) not in self._published:
            self._published.add((ident, rank))
            self._publish({"mesh": mesh, "report": report, "id": ident, "ranks": [rank]})


def _runs_on(entry: MeshEntry, procs: int, rank: int) -> bool:
    return entry.procs == procs and rank in entry.ranks and not entry.stopped


def _extent(entry: MeshEntry) -> dict[str, int]:
    labels, _, sizes, _ = MeshTable.shape(entry)
    return dict(zip(labels, sizes, strict=True))


def _point(entry: MeshEntry, rank: int) -> Any:
    """Return where the element on a rank of the proc mesh is in its own mesh."""
    extent = _extent(entry)
    return Point(entry.ranks.index(rank), Extent(list(extent), list(extent.values())))
