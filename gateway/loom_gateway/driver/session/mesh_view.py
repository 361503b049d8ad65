"""The description of a session's meshes: a tree with the states of all elements and the calls of all endpoints.

It changes with what people look at, and not with the dispatch of operations.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

from loom_gateway.driver.handlers.processes import Processes
from loom_gateway.driver.monarch.mesh_table import HOST_MESH, MeshEntry
from loom_gateway.driver.session.context import SessionContext
from loom_gateway.sessions.descriptions import (
    SHOWN_RANKS,
    ActorMeshInfo,
    ElementState,
    EndpointInfo,
    FailedElement,
    HostMeshInfo,
    MeshElements,
    MeshInfo,
    ProcMeshInfo,
    SessionMeshes,
)

MOST_MESHES = 500  # proc and actor meshes that are described, the oldest
SHOWN_STOPPED = 16  # stopped meshes among them, the newest
MOST_REASONS = 1000  # failed elements, of all meshes, whose reasons are told
LONGEST_REASON = 600  # characters; of a longer one the middle is left out, because a traceback ends with the error

State: TypeAlias = tuple[ElementState, str]  # with the reason, if the element has failed

_STARTING: State = (ElementState.STARTING, "")
_ALIVE: State = (ElementState.ALIVE, "")
_STOPPED: State = (ElementState.STOPPED, "")


class MeshView:
    """Describes the meshes of one session. Safe on any thread."""

    def __init__(self, context: SessionContext, processes: Processes) -> None:
        self._context = context
        self._processes = processes

    def describe(self) -> SessionMeshes:
        """Return the meshes as they are now. A mesh that a program in the cluster has made is not among them."""
        known = [one for one in self._context.meshes.whole_and_stopped() if one[1].procs >= 0]
        chosen = _chosen(known)
        return _Picture(self._context, self._processes).tree(chosen, len(known) - len(chosen))


def _chosen(known: Sequence[tuple[int, MeshEntry]]) -> list[tuple[int, MeshEntry]]:
    """Return the meshes to describe: all that were not stopped, and some of the others, if there is room."""
    stopped = [ident for ident, entry in known if entry.stopped]
    shown = set(stopped[-SHOWN_STOPPED:])
    there = {ident for ident, entry in known if not entry.stopped or ident in shown}
    chosen = [(ident, entry) for ident, entry in known if ident in there and entry.procs in there]
    return chosen[:MOST_MESHES]


class _Picture:
    """A session's elements and calls at one time."""

    def __init__(self, context: SessionContext, processes: Processes) -> None:
        self._context = context
        self._processes = processes
        self._now = time.perf_counter()
        self._in_flight = context.replies.calls_in_flight()
        self._reasons = context.failures.reasons()
        self._lost = processes.lost()
        self._stopped_parts = context.meshes.stopped_parts()
        self._room = MOST_REASONS

    def tree(self, meshes: Sequence[tuple[int, MeshEntry]], left_out: int) -> SessionMeshes:
        actors: dict[int, list[ActorMeshInfo]] = {}
        procs: list[ProcMeshInfo] = []
        for ident, entry in meshes:
            if entry.kind == "procs":
                below = actors.setdefault(ident, [])
                common = self._common(ident, entry, self._processes_of(ident, entry))
                procs.append(ProcMeshInfo(**vars(common), actors=below))
            elif entry.kind == "actors":
                actors.setdefault(entry.procs, []).append(self._actors(ident, entry))
        hosts = self._context.meshes.entry(HOST_MESH)
        common = self._common(
            HOST_MESH, hosts, [self._host(number) for number in range(len(self._context.hosts.addresses))]
        )
        return SessionMeshes(HostMeshInfo(**vars(common), procs=procs), left_out)

    def _common(self, ident: int, entry: MeshEntry, states: Sequence[State]) -> MeshInfo:
        labels, _, sizes, _ = entry.shape or ((), 0, (), ())
        extent = dict(zip(labels, sizes, strict=True))
        return MeshInfo(ident, entry.name, extent, self._elements(states), entry.stopped)

    def _elements(self, states: Sequence[State]) -> MeshElements:
        counts = Counter(state for state, _ in states)
        failed = ((rank, why) for rank, (state, why) in enumerate(states) if state is ElementState.FAILED)
        told = itertools.islice(failed, min(SHOWN_RANKS, self._room))
        failures = [FailedElement(rank, _short(why)) for rank, why in told]
        self._room -= len(failures)
        return MeshElements(
            dict(counts), [state for state, _ in states] if len(states) <= SHOWN_RANKS else [], failures
        )

    def _host(self, number: int) -> State:
        hosts = self._context.hosts
        if number in hosts.lost:
            return ElementState.FAILED, f"worker host {number} at {hosts.addresses[number]} is gone"
        return _ALIVE

    def _processes_of(self, ident: int, entry: MeshEntry) -> list[State]:
        if entry.stopped:
            return [_STOPPED] * len(entry.ranks)
        alive, stopped = self._processes.alive(ident), self._stopped_parts.get(ident, set())
        return [_STOPPED if rank in stopped else self._process(ident, entry, rank, alive) for rank in entry.ranks]

    def _process(self, ident: int, entry: MeshEntry, rank: int, alive: set[int]) -> State:
        if (ident, rank) in self._lost:
            host = self._host(entry.hosts[rank]) if entry.hosts else _ALIVE
            gone = f"process {rank} of proc mesh {entry.name!r} is gone"
            return host if host[0] is ElementState.FAILED else (ElementState.FAILED, gone)
        if (ident, rank) in self._reasons:
            return ElementState.FAILED, self._reasons[ident, rank]
        return _ALIVE if rank in alive else _STARTING

    def _actors(self, ident: int, entry: MeshEntry) -> ActorMeshInfo:
        below = self._context.meshes.known(entry.procs)
        if entry.stopped or below is None or below.stopped:
            states = [_STOPPED] * len(entry.ranks)
        else:
            alive = self._processes.alive(entry.procs)
            stopped = self._stopped_parts.get(ident, set()) | self._stopped_parts.get(entry.procs, set())
            states = [
                _STOPPED if rank in stopped else self._actor(ident, entry, below, rank, alive)
                for rank in entry.ranks
            ]
        in_flight = {name: count for (mesh, name), count in self._in_flight.items() if mesh == ident}
        return ActorMeshInfo(
            **vars(self._common(ident, entry, states)),
            class_name="" if entry.cls is None else entry.cls.__name__,
            endpoints=[] if entry.stopped else self._endpoints(entry, in_flight),
        )

    def _actor(self, ident: int, entry: MeshEntry, procs: MeshEntry, rank: int, alive: set[int]) -> State:
        if (ident, rank) in self._reasons:
            return ElementState.FAILED, self._reasons[ident, rank]
        return self._process(entry.procs, procs, rank, alive)

    def _endpoints(self, entry: MeshEntry, in_flight: dict[str, int]) -> list[EndpointInfo]:
        found = []
        for name in sorted({*entry.calls.copy(), *in_flight}):
            waiting = in_flight.get(name, 0)
            calls, failures, per_second, p50, p99 = entry.calls_of(name, self._now).summary(self._now)
            found.append(EndpointInfo(name, calls + waiting, failures, waiting, per_second, p50, p99))
        return found


def _short(reason: str) -> str:
    text = " ".join(reason.split())
    if len(text) <= LONGEST_REASON:
        return text
    return f"{text[: LONGEST_REASON // 2 - 2]} … {text[-LONGEST_REASON // 2 + 1 :]}"
