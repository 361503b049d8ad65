"""Notices about the processes of proc meshes: started, stopped and lost.

The laptop shows these states without asking; see `loom_proxy.mesh.rank_states`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from loom.errors import because
from loom.wire.messages import Message
from loom_gateway.driver.session.context import SessionContext
from loom_gateway.driver.session.local_api import FIRST_ID
from loom_gateway.driver.session.replies import notice

TOGETHER = 0.1  # seconds over which starts and stops are gathered: a mesh may have thousands of processes


class Processes:
    """The processes of one session. On the driver's event loop."""

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self._started: dict[int, set[int]] = defaultdict(set)  # ranks that run, by proc mesh
        self._unreported: dict[tuple[str, int], list[int]] = defaultdict(list)
        self._lost: dict[tuple[int, int], None] = {}  # a dict, because it keeps the order
        context.on_retired.append(self._forget_stopped)

    def started(self, procs: int, rank: int) -> None:
        self._started[procs].add(rank)
        self._report_soon("processes_started", procs, rank)

    def _report_soon(self, name: str, procs: int, rank: int) -> None:
        if not self._unreported:
            self._context.loop.call_later(TOGETHER, self._report)
        self._unreported[name, procs].append(rank)

    def _report(self) -> None:
        unreported, self._unreported = self._unreported, defaultdict(list)
        for (name, procs), ranks in unreported.items():
            self._context.send(notice(name, {"id": procs, "ranks": ranks}))
            if name == "processes_started":
                self._context.weaver.started(procs, self._name(procs), ranks)

    def gone(self, procs: int, rank: int) -> None:
        """Note that a process is gone. It is lost unless it was stopped."""
        self._started[procs].discard(rank)
        self._forget_stopped(procs)
        weaver, name = self._context.weaver, self._name(procs)
        if self.was_stopped(procs, rank):
            self._report_soon("processes_stopped", procs, rank)
            weaver.gone(procs, name, rank, "stopped", self._why_stopped(procs), exit=self._exit(procs, rank))
        elif (procs, rank) not in self._lost:
            self._lost[procs, rank] = None
            lost = self._is_on_a_lost_host(procs, rank)
            weaver.gone(
                procs, name, rank, "died", self._why_lost(procs, rank), lost=lost, exit=self._exit(procs, rank)
            )
            self._context.send(notice("process_lost", self._loss(procs, rank)))
            if procs < FIRST_ID:  # a function of `Job.run` that spawned processes learns of their ends itself
                self._context.failures.unreported.lost(procs, rank)

    @property
    def any_alive(self) -> bool:
        return any(self._started.values())

    def alive(self, procs: int) -> set[int]:
        """Return the ranks of a proc mesh whose processes run. Safe on any thread."""
        return self._started.get(procs, set()).copy()

    def lost(self) -> set[tuple[int, int]]:
        """Return the ids of proc meshes and the ranks of the processes that were lost. Safe on any thread."""
        return set(self._lost.copy())

    def send_all(self, send: Callable[[Message], None]) -> None:
        """Send a new client the notices that earlier clients got."""
        for procs, ranks in self._started.items():
            send(notice("processes_started", {"id": procs, "ranks": sorted(ranks)}))
        for procs, rank in self._lost:
            send(notice("process_lost", self._loss(procs, rank)))

    def _forget_stopped(self, procs: int) -> None:
        """Forget the processes of a proc mesh that was stopped, once all of them are gone."""
        if not self._started[procs]:
            del self._started[procs]
            if self._is_retired(procs):
                self._lost = {place: None for place in self._lost if place[0] != procs}

    def _is_retired(self, procs: int) -> bool:
        whole = self._context.meshes.known(procs)
        return whole is None or (whole.stopped and whole.failure is not None)

    def was_stopped(self, procs: int, rank: int) -> bool:
        if self._is_retired(procs):
            return True
        meshes = self._context.meshes.of_procs(procs)
        return any(mesh.stopped and mesh.kind == "procs" and rank in mesh.ranks for mesh in meshes)

    def _loss(self, procs: int, rank: int) -> dict[str, object]:
        meshes = self._context.meshes
        actors = [ident for ident, entry in meshes.whole("actors") if entry.procs == procs and rank in entry.ranks]
        why, seen = self._why_lost(procs, rank), self._exit(procs, rank)
        return {"mesh": self._name(procs), "id": procs, "rank": rank, "actors": actors, "reason": why, "exit": seen}

    def _why_stopped(self, procs: int) -> str:
        entry = self._context.meshes.known(procs)
        return (entry.stop_reason if entry is not None else "") or "its processes were stopped"

    def _why_lost(self, procs: int, rank: int) -> str:
        end = self._context.dead.end_of(procs, rank)
        if end is None and self._is_on_a_lost_host(procs, rank):
            return f"the host of process {rank} of {self._name(procs)!r} is gone"
        return because(f"process {rank} of {self._name(procs)!r} is gone", end.cause if end is not None else "")

    def _exit(self, procs: int, rank: int) -> dict[str, object] | None:
        end = self._context.dead.end_of(procs, rank)
        return None if end is None else end.to_body()

    def _is_on_a_lost_host(self, procs: int, rank: int) -> bool:
        entry = self._context.meshes.known(procs)
        return entry is not None and not self._context.hosts.lost.isdisjoint(entry.hosts[rank : rank + 1])

    def _name(self, procs: int) -> str:
        entry = self._context.meshes.known(procs)
        return "" if entry is None else entry.name
