"""The laptop's knowledge of each element of a mesh: whether it lives, has failed or was stopped.

The laptop never asks for it. It comes from answers, failures of calls, the driver's events, and this client's own
stops. So it may be behind, and an element without any news is `RankState.STARTING`.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from loom.errors import ActorError, SupervisionError
from loom.shape import Shape
from loom.wire.bodies import AwaitInitialized, Choose, EndpointCall
from loom.wire.body import Body

_STARTED, _STOPPED = "processes_started", "processes_stopped"
UNLOGGED = frozenset({_STARTED, _STOPPED})
"""Events for processes that started or stopped as planned, perhaps thousands, which `Job.events` leaves out."""

LONGEST_REASON = 300  # characters of a failure's text that are kept

_HOSTS = 0

MOST_UNKNOWN = 1000
"""Meshes without a proxy here whose events are kept, such as those of functions that run in the driver."""


class RankState(enum.Enum):
    """The known state of an element of a mesh: of a host, a process or an actor."""

    STARTING = "starting"
    """The element has not been heard of yet."""
    ALIVE = "alive"
    FAILED = "failed"
    """The element, its process or its host died."""
    STOPPED = "stopped"


class _Whole:
    """The states of a whole mesh's elements, by rank. Actors have the ranks of their processes in the proc mesh."""

    def __init__(self) -> None:
        self.procs: _Whole | None = None
        """The proc mesh that an actor mesh is on."""
        self.alive: set[int] = set()
        self.failed: dict[int, str] = {}
        self.stopped: set[int] = set()

    def note_alive(self, ranks: Iterable[int]) -> None:
        for whole in self._with_procs():
            whole.alive.update(ranks)

    def note_failed(self, ranks: Iterable[int], text: str) -> None:
        text = " ".join(text.split())
        if len(text) > LONGEST_REASON:
            text = text[: LONGEST_REASON - 1] + "…"
        self.failed.update(dict.fromkeys(ranks, text))

    def state(self, rank: int) -> tuple[RankState, str]:
        """Return the state of an element, and the reason if it has failed."""
        wholes = self._with_procs()
        if any(rank in whole.stopped for whole in wholes):
            return RankState.STOPPED, ""
        for whole in wholes:
            if rank in whole.failed:
                return RankState.FAILED, whole.failed[rank]
        return (RankState.ALIVE if rank in self.alive else RankState.STARTING), ""

    def _with_procs(self) -> tuple[_Whole, ...]:
        return (self,) if self.procs is None else (self, self.procs)


class _Part(NamedTuple):
    """A mesh or a part of one that has an id."""

    name: str
    whole: _Whole
    shape: Shape

    def ranks(self, index: int | None) -> list[int]:
        """Return the rank of the element with an index; all ranks without one."""
        ranks = self.shape.ranks()
        return ranks if index is None else ranks[index : index + 1]


class MeshStates:
    """The states of all meshes of a session. Any thread may read while the connection's reader thread writes."""

    def __init__(self) -> None:
        self._wholes: dict[int, _Whole] = {}
        """The whole meshes by id."""
        self._unknown: OrderedDict[int, _Whole] = OrderedDict()
        """Meshes that events have named before they are added, the oldest first."""
        self._parts: dict[int, _Part] = {}
        self._living: dict[int, Sequence[int]] = {}
        """The numbers of the hosts of each mesh that has left some out."""
        self.unseen: set[int] = set()
        """Ids of meshes and parts of meshes that have not answered as a whole yet."""

    def _whole(self, ident: int) -> _Whole:
        whole = self._wholes.get(ident)
        if whole is None:
            # Events about a mesh may come before this client knows it, as for meshes of an earlier client.
            whole = self._unknown.setdefault(ident, _Whole())
            if len(self._unknown) > MOST_UNKNOWN:
                self._unknown.popitem(last=False)
        return whole

    def add(self, ident: int, name: str, shape: Shape, procs: int | None = None) -> None:
        """Add a whole mesh; ``procs`` is the id of the proc mesh that an actor mesh is on."""
        whole = self._wholes[ident] = self._whole(ident)
        self._unknown.pop(ident, None)
        whole.procs = None if procs is None else self._whole(procs)
        self._parts[ident] = _Part(name, whole, shape)
        self.unseen.add(ident)
        if ident == _HOSTS:
            whole.alive.update(shape.ranks())  # the session was opened on them

    def add_part(self, ident: int, of: int, shape: Shape) -> None:
        """Add a part of a mesh that has an id of its own."""
        self._parts[ident] = self._parts[of]._replace(shape=shape)
        self.unseen.add(ident)

    def share_hosts(self, ident: int) -> None:
        """Note that a mesh has the session's hosts by their numbers, with those that have joined."""
        whole, part = self._whole(_HOSTS), self._parts[ident]
        self._wholes[ident] = whole
        self._parts[ident] = part._replace(whole=whole)
        whole.alive.update(part.shape.ranks())

    def number_hosts(self, ident: int, hosts: Sequence[int]) -> None:
        """Note the numbers of the hosts of a mesh that leaves some out. They live."""
        self._living[ident] = hosts
        self._whole(ident).alive.update(range(len(hosts)))

    def forget(self, views: Mapping[Shape, int]) -> None:
        """Drop a mesh whose proxies are garbage, given the ids of the mesh and of its parts."""
        for ident in views.values():
            self._wholes.pop(ident, None)
            self._parts.pop(ident, None)
            self._living.pop(ident, None)
            self.unseen.discard(ident)

    def of(self, ident: int, ranks: Iterable[int]) -> list[tuple[RankState, str]]:
        """Return the state of each given rank of a whole mesh, and the reason if it has failed."""
        return [self._whole(ident).state(rank) for rank in ranks]

    def name_and_shape(self, ident: int) -> tuple[str, Shape] | None:
        part = self._parts.get(ident)
        return None if part is None else (part.name, part.shape)

    def started(self, ident: int) -> tuple[int, int]:
        """Return how many elements of a mesh, or of its proc mesh, have been heard of, and how many there are."""
        part = self._parts.get(ident)
        if part is None:
            return 0, 0
        whole = part.whole.procs or part.whole
        states = [whole.state(rank)[0] for rank in part.shape.ranks()]
        return sum(state is not RankState.STARTING for state in states), len(states)

    def answered(self, operation: Body | None, index: int | None = None) -> None:
        """Note that an operation was answered, the ``index``-th time. If it is a call, its mesh lives."""
        if not isinstance(operation, (EndpointCall, AwaitInitialized)) or operation.mesh not in self.unseen:
            return  # nearly always
        part = self._parts.get(operation.mesh)
        if part is None or (isinstance(operation, Choose) and len(part.shape) > 1):  # unknown which actor answered
            return
        part.whole.note_alive(part.ranks(index))
        if index is None:
            self.unseen.discard(operation.mesh)

    def failed(self, operation: Body | None, code: str, text: str, index: int | None = None) -> None:
        """Note that an operation failed, with a code of `loom.errors`, if that shows which element is dead."""
        ident: Any = getattr(operation, "mesh", None)
        part = self._parts.get(ident)
        if part is None or (index is None and len(part.shape) > 1):
            return
        if code == ActorError.code:  # the endpoint raised, so the actor lives
            part.whole.note_alive(part.ranks(index))
        elif code == SupervisionError.code:
            part.whole.note_failed(part.ranks(index), text)

    def not_made(self, ident: int, text: str) -> None:
        """Note that a mesh could not be made; ignore ids of other operations."""
        part = self._parts.get(ident)
        if part is not None and part.whole is self._wholes.get(ident):
            part.whole.note_failed(part.shape.ranks(), text)

    def stopped(self, ident: int) -> None:
        """Note that this client stops a mesh or a part of one."""
        part = self._parts.get(ident)
        if part is not None:
            part.whole.stopped.update(part.shape.ranks())
            self.unseen.discard(ident)

    def event(self, name: str, details: Mapping[str, Any]) -> None:
        if name == _STARTED:
            self._whole(details["id"]).alive.update(details["ranks"])
        elif name == _STOPPED:
            self._whole(details["id"]).stopped.update(details["ranks"])
        elif name == "process_lost":
            text = details.get("reason") or f"process {details['rank']} of proc mesh {details['mesh']!r} is gone"
            for ident in (details["id"], *details.get("actors", ())):
                self._whole(ident).failed.setdefault(details["rank"], text)
        elif name == "actors_lost":
            self._whole(details["id"]).note_failed(details["ranks"], f"Monarch has stopped it: {details['report']}")
        elif name == "host_lost":
            for whole, rank in self._host(details["host"]):
                whole.failed[rank] = f"worker {details['address']} is gone"
        elif name in ("host_back", "host_joined"):
            for whole, rank in self._host(details["host"]):
                whole.failed.pop(rank, None)
        elif name == "failure" and "id" in details:
            self._whole(details["id"]).note_failed(details["ranks"], details["report"])

    def _host(self, number: int) -> list[tuple[_Whole, int]]:
        """Return a host's rank in each whole host mesh."""
        living = self._living.copy().items()
        found = [(self._whole(ident), hosts.index(number)) for ident, hosts in living if number in hosts]
        return [(self._whole(_HOSTS), number), *found]
