"""The description of a session's meshes: a tree with the states of all elements and the calls of all endpoints."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from loom.tensors.watched import Distribution, History, Wanted, coarser
from loom.tensors.worker.actor import TensorWorker
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
    ProcMeshInfo,
    SessionMeshes,
    SessionTensors,
    WatchedTensor,
    WatchedValues,
)

MOST_TENSORS = 60  # watched tensors that are described
POINTS = 60  # norms of each, evenly from the first one that is kept to the newest
BARS = 64  # bins of a histogram; of more, neighbours are added up
PATIENCE = 0.3  # seconds that workers have to answer; a later answer is for who asks next

logger = logging.getLogger(__name__)

_Answer: TypeAlias = "tuple[dict[str, History], int]"


class WatchedView:
    """Describes the watched tensors of one session. Safe on any thread.

    A mesh of workers that has not answered yet is not asked again, and its last answer is told.
    """

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self._turn = threading.Lock()
        self._asked: dict[int, concurrent.futures.Future[_Answer]] = {}
        self._answers: dict[int, _Answer] = {}

    def describe(self) -> SessionTensors:
        """Return the tensors of the meshes that programs outside the cluster have made."""
        meshes = {ident: one for ident, one in self._context.meshes.whole("actors") if _has_tensors(one)}
        with self._turn:
            for ident in [ident for ident in {*self._asked, *self._answers} if ident not in meshes]:
                self._asked.pop(ident, None)
                self._answers.pop(ident, None)
            for ident in [ident for ident in meshes if ident not in self._asked]:
                self._asked[ident] = asyncio.run_coroutine_threadsafe(
                    _watched(meshes[ident].mesh), self._context.loop
                )
            concurrent.futures.wait(self._asked.values(), PATIENCE)
            for ident, asked in [one for one in self._asked.items() if one[1].done()]:
                del self._asked[ident]
                try:
                    self._answers[ident] = asked.result()
                except Exception as error:  # noqa: BLE001 - Monarch's, of many classes; the mesh's state tells it
                    logger.debug("the tensors of mesh %s are not known: %s", meshes[ident].name, error)
            answers = [(meshes[ident].name, answer) for ident, answer in sorted(self._answers.items())]
        found = [_tensor(mesh, name, one) for mesh, (named, _) in answers for name, one in named.items()]
        left_out = sum(more for _, (_, more) in answers)
        return SessionTensors(found[:MOST_TENSORS], left_out + max(0, len(found) - MOST_TENSORS))


def _has_tensors(entry: MeshEntry) -> bool:
    return not entry.stopped and entry.cls is not None and issubclass(entry.cls, TensorWorker)


async def _watched(mesh: Any) -> _Answer:
    """Ask the first worker of a mesh. It does not wait for its device."""
    first = mesh.slice(**dict.fromkeys(mesh.sizes, 0))
    wanted = Wanted(most=POINTS, histograms=1, limit=MOST_TENSORS, wait=False)
    answer: _Answer = await first.watched.call_one(wanted).as_asyncio()
    return answer


def _tensor(mesh: str, name: str, history: History) -> WatchedTensor:
    summaries = history.summaries
    newest = summaries[-1] if summaries else None
    return WatchedTensor(
        mesh,
        name,
        history.gradients,
        history.trouble[:500],
        None if newest is None else newest.time,
        [one.step for one in summaries],
        _told(one.weight.norm for one in summaries),
        _told(one.grad.norm for one in summaries),
        None if newest is None else _values(newest.weight),
        None if newest is None else _values(newest.grad),
    )


def _values(one: Distribution) -> WatchedValues:
    norm, mean, std, low, high = _told((one.norm, one.mean, one.std, one.min, one.max))
    return WatchedValues(norm, mean, std, low, high, one.nonfinite, coarser(one.histogram or (), BARS))


def _told(numbers: Iterable[float]) -> Sequence[float | None]:
    """Return numbers in six digits; None for what JSON has no word for."""
    return [float(f"{one:.6g}") if math.isfinite(one) else None for one in numbers]


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
    """What is known of a session's elements and calls at one time."""

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
                procs.append(ProcMeshInfo(**common, actors=below))
            elif entry.kind == "actors":
                actors.setdefault(entry.procs, []).append(self._actors(ident, entry))
        hosts = self._context.meshes.entry(HOST_MESH)
        common = self._common(HOST_MESH, hosts, [self._host(number) for number in hosts.ranks])
        return SessionMeshes(HostMeshInfo(**common, procs=procs), left_out)

    def _common(self, ident: int, entry: MeshEntry, states: Sequence[State]) -> dict[str, Any]:
        labels, _, sizes, _ = entry.shape or ((), 0, (), ())
        return {
            "id": ident,
            "name": entry.name,
            "extent": dict(zip(labels, sizes, strict=True)),
            "elements": self._elements(states),
            "stopped": entry.stopped,
        }

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
            **self._common(ident, entry, states),
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
