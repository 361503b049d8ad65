"""Dead processes, actors that Monarch has stopped, and the failure of calls that wait for them.

Monarch fails the calls on a dead actor itself, as long as its controller of the actor's mesh lives. The controller
itself may die (torchmonarch 0.7): a host dies right after a spawn and comes back on the same address. Monarch then
resends the messages that the dead host had not acknowledged. They come back undeliverable, and their sender, the
controller, fails. This stops the mesh's actors on living hosts, and calls on them would wait forever.

`UnreportedFailures` are the failures that Monarch leaves out (torchmonarch 0.7). Monarch's controller of a mesh
reports the first of its elements that fails, and none after it. So of two processes that die at once, or one after
the other, Monarch tells of one. A mesh of actors has no controller before it is made. If an actor fails meanwhile,
the mesh is not made, and Monarch tells of none.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypedDict

from loom.control.process_end import ProcessEnd
from loom.process import tasks
from loom.shape import Extent, Point
from loom_gateway.driver.monarch.errors import (
    Fault,
    MeshElement,
    died_with_its_process,
    failed_element,
    failed_spawn,
    read_fault,
)
from loom_gateway.driver.monarch.mesh_table import HostTable, MeshEntry, MeshTable, monarchs_name
from loom_gateway.driver.monarch.reply_channels import ReplyChannels
from loom_gateway.driver.session.replies import Replies, Send, notice

MONARCHS_TURN = 1.0  # seconds for which Monarch may report a dead process first; it takes half of one
KEPT = 4096  # reports of Monarch's that are remembered


class FailureDetails(TypedDict, total=False):
    """The details of the notice ``failure``. Without an id it is not known which mesh of the session has failed."""

    mesh: str
    report: str
    id: int
    ranks: Sequence[int]


class UnreportedFailures:
    """The failures of one session that Monarch does not report. On the event loop, except for `reported`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        meshes: MeshTable,
        hosts: HostTable,
        publish: Callable[[FailureDetails], None],
    ) -> None:
        self._loop = loop
        self._meshes = meshes
        self._hosts = hosts
        self._publish = publish
        self._reports: deque[tuple[str, MeshElement]] = deque(maxlen=KEPT)
        """The subject of Monarch's report: its name of a mesh in lower case, and the element."""
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


logger = logging.getLogger(__name__)


class DeadElements:
    """The processes and actors of one session that can no longer answer."""

    def __init__(self, meshes: MeshTable) -> None:
        self._meshes = meshes
        self._processes: set[tuple[int, int]] = set()  # a proc mesh's id and a rank
        self._actors: dict[tuple[int, int], str] = {}  # a mesh's id and a rank, with the reason
        self.end_of: Callable[[int, int], ProcessEnd | None] = lambda procs, rank: None
        """Returns how a process has ended, by its proc mesh and rank; None if that is not known."""

    def add_process(self, procs: int, rank: int) -> None:
        self._processes.add((procs, rank))

    async def add_actors(self, fault: Fault) -> tuple[int, MeshEntry, list[int]] | None:
        """Note actors that Monarch has stopped. Return the id of their mesh, the mesh, and its new ranks."""
        found = await self._meshes.named_by_monarch(fault.mesh)
        if found is None:
            return None
        ident, entry = found
        stopped = entry.ranks if fault.rank is None else (fault.rank,)
        new = [rank for rank in stopped if (ident, rank) not in self._actors]
        self._actors.update(((ident, rank), fault.why) for rank in new)
        return (ident, entry, new) if new else None

    @property
    def actors(self) -> dict[tuple[int, int], str]:
        """The actors that Monarch has stopped: why, by a mesh's id and a rank."""
        return self._actors.copy()

    def retire(self, meshes: Collection[int]) -> None:
        """Forget the elements of meshes that were stopped."""
        self._processes = {place for place in self._processes if place[0] not in meshes}
        self._actors = {place: why for place, why in self._actors.copy().items() if place[0] not in meshes}

    def why_silent(self, entry: MeshEntry) -> str | None:
        """Return why a mesh, or one of its elements, cannot answer; None if no reason is known."""
        if not self._processes and not self._actors:
            return None  # the usual case, and every call passes here
        gone = self._processes.copy()
        rank = next((rank for rank in entry.ranks if (entry.procs, rank) in gone), None) if gone else None
        if rank is not None:
            procs = self._meshes.known(entry.procs)
            if procs is not None and procs.stopped:
                return f"process {rank} of proc mesh {procs.name!r} was stopped"
            of = f"of proc mesh {procs.name!r}" if procs is not None else f"under {entry.name!r}"
            end = self.end_of(entry.procs, rank)
            why = "it died, or its host did, or the network between" if end is None or not end.text else end.text
            return f"process {rank} {of} is gone: {why}"
        actors = self._actors.copy()
        rank = next((rank for rank in entry.ranks if (entry.root, rank) in actors), None) if actors else None
        if rank is None:
            return None
        return (
            f"the actor of mesh {entry.name!r} on rank {rank} was stopped by Monarch, though its process may live: "
            f"spawn it again, on new processes ({actors[entry.root, rank]})"
        )

    def how_died(self, entry: MeshEntry) -> str:
        """Return how the first process of a mesh that has died ended; "" if nothing is known of its end."""
        gone = self._processes.copy() if self._processes else ()
        ends = ((rank, self.end_of(entry.procs, rank)) for rank in entry.ranks if (entry.procs, rank) in gone)
        return next((f"process {rank}: {end.text}" for rank, end in ends if end is not None and end.text), "")


class Failures:
    """Fails the calls that wait for dead processes and actors. On the event loop, except for `report`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        meshes: MeshTable,
        dead: DeadElements,
        replies: Replies,
        channels: ReplyChannels,
        send: Send,
        hosts: HostTable,
    ) -> None:
        self._loop = loop
        self._meshes = meshes
        self._dead = dead
        self._replies = replies
        self._channels = channels
        self._send = send
        self.unreported = UnreportedFailures(loop, meshes, hosts, self._publish)
        self._reported: dict[tuple[int, int], str] = {}  # published reports, by a mesh's id and a rank
        self.on_process_gone: list[Callable[[int, int], object]] = []  # with its proc mesh's id and rank

    def process_gone(self, procs: int, rank: int) -> None:
        """Note that a process is gone. Fail the calls that wait for it unless Monarch fails them in time."""
        whole = self._meshes.known(procs)
        if whole is not None and whole.failure is None:
            self._dead.add_process(procs, rank)
        for notify in self.on_process_gone:
            notify(procs, rank)
        self._fail_calls(lambda entry: entry.procs == procs and rank in entry.ranks)

    def retire(self, meshes: Collection[int]) -> None:
        """Fail the calls that wait for meshes that were stopped, and forget their elements."""
        self._dead.retire(meshes)
        self._reported = {place: why for place, why in self._reported.copy().items() if place[0] not in meshes}
        for ident in meshes:
            self.unreported.retire(ident)
        self._replies.fail_calls(lambda entry: entry.root in meshes)

    def host_gone(self, host: int) -> None:
        """Note that every process on a worker host is gone, including those that were being spawned."""
        for procs, entry in self._meshes.whole("procs"):
            self.processes_gone_with(procs, entry, host)

    def processes_gone_with(self, procs: int, entry: MeshEntry, host: int) -> None:
        for rank in entry.ranks:
            if entry.hosts[rank] == host:
                self.process_gone(procs, rank)

    def report(self, mesh: str, report: str) -> None:
        """Publish a fault that no user code handles. ``mesh`` is Monarch's name of the mesh. Safe on any thread."""
        details: FailureDetails = {"mesh": mesh, "report": report}
        place = failed_element(mesh, report)
        element = None if place is None else self._meshes.element(place.mesh, place.point)
        if element is not None:
            details |= {"id": element[0], "ranks": [element[1]]}
        if not self.unreported.reported(mesh, place, element):
            self._publish(details)
        fault = read_fault(report)
        if fault is not None:
            asyncio.run_coroutine_threadsafe(self.actors_stopped(fault), self._loop)

    def reasons(self) -> dict[tuple[int, int], str]:
        """Return why elements have failed, by a mesh's id and a rank. Safe on any thread."""
        stopped = {place: f"Monarch has stopped it: {why}" for place, why in self._dead.actors.items()}
        return {**stopped, **self._reported.copy()}

    def _publish(self, details: FailureDetails) -> None:
        entry = self._meshes.known(details["id"]) if "id" in details else None
        procs, ranks = (-1, ()) if entry is None else (entry.procs, details["ranks"])
        for rank in ranks:
            end = self._dead.end_of(procs, rank)
            if end is not None and end.text:
                details["report"] += f"\nprocess {rank}: {end.text}"
        for rank in details.get("ranks", ()):
            self._reported.setdefault((details["id"], rank), details["report"])
        logger.warning("failure: %s", details)
        self._send(notice("failure", details))

    async def actors_stopped(self, fault: Fault) -> None:
        lost = await self._dead.add_actors(fault)
        if lost is None:
            return
        ident, whole, ranks = lost
        details = {"mesh": whole.name, "id": ident, "ranks": ranks, "report": fault.why}
        self._send(notice("actors_lost", details))
        self._fail_calls(lambda entry: entry.root == ident and not set(ranks).isdisjoint(entry.ranks))

    def _fail_calls(self, on: Callable[[MeshEntry], bool]) -> None:
        self._channels.break_off(on)
        self._replies.fail_calls(on)
