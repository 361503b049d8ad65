"""The laptop's knowledge of each element of a mesh: whether it lives, has failed or was stopped.

The laptop never asks for it. It comes from answers, failures of calls, the driver's events, and this client's own
stops. So it may be behind, and an element without any news is `RankState.STARTING`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any

from loom.errors import ActorError, SupervisionError
from loom.shape import Shape
from loom.wire.bodies import AwaitInitialized, Body, Choose, EndpointCall

_STARTED, _STOPPED = "processes_started", "processes_stopped"
UNLOGGED = frozenset({_STARTED, _STOPPED})
"""Names of events for processes that started or stopped as planned.

There may be thousands, so `Job.events` leaves them out.
"""

LONGEST_REASON = 300
"""Characters of a failure's text that are kept."""

_NONE = -(1 << 62)
"""An id that no mesh has."""

_HOSTS = 0
"""Id of the session's host mesh."""


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

    def __init__(self, name: str, shape: Shape, procs: int | None) -> None:
        self.name = name
        self.shape = shape
        self.procs = procs
        self.alive: set[int] = set()
        self.failed: dict[int, str] = {}
        """The reason for each failed rank."""
        self.stopped: set[int] = set()


class MeshStates:
    """The states of all meshes of a session. Any thread may read while the connection's reader thread writes."""

    def __init__(self) -> None:
        self._wholes: dict[int, _Whole] = {}
        self._parts: dict[int, tuple[int, Shape]] = {}
        """The whole mesh's id and the shape of each mesh and part, by its id."""
        self._lost: dict[int, dict[int, str]] = {}
        """Failures by rank in meshes that have not been added yet, by the mesh's id."""
        self._started: dict[int, set[int]] = {}
        """Started ranks of meshes that have not been added yet, by the mesh's id."""
        self.unseen: set[int] = set()
        """Ids of meshes and parts of meshes that have not answered as a whole yet."""

    def add(self, ident: int, name: str, shape: Shape, procs: int | None = None) -> None:
        """Add a whole mesh; ``procs`` is the id of the proc mesh that an actor mesh is on."""
        whole = self._wholes[ident] = _Whole(name, shape, procs)
        self._parts[ident] = (ident, shape)
        self.unseen.add(ident)
        if ident == _HOSTS:
            whole.alive.update(shape.ranks())  # the session was opened on them
        # Events about a mesh may come before this client knows it, as for meshes of an earlier client.
        whole.alive.update(self._started.pop(ident, ()))
        whole.failed.update(self._lost.pop(ident, {}))

    def add_part(self, ident: int, of: int, shape: Shape) -> None:
        """Add a part of a mesh that has an id of its own."""
        self._parts[ident] = (of, shape)
        self.unseen.add(ident)

    def forget(self, ident: int) -> None:
        """Drop a mesh whose proxies are garbage."""
        self._wholes.pop(ident, None)
        self._parts.pop(ident, None)
        self.unseen.discard(ident)

    def of(self, ident: int, ranks: Iterable[int]) -> list[tuple[RankState, str]]:
        """Return the state of each given rank of a whole mesh, and the reason if it has failed."""
        whole = self._wholes.get(ident)
        return [(RankState.STARTING, "") if whole is None else self._of(whole, rank) for rank in ranks]

    def _of(self, whole: _Whole, rank: int) -> tuple[RankState, str]:
        procs = self._wholes.get(whole.procs) if whole.procs is not None else None
        if rank in whole.stopped or (procs is not None and rank in procs.stopped):
            return RankState.STOPPED, ""
        reason = whole.failed.get(rank)
        if reason is None and procs is not None:
            reason = procs.failed.get(rank)
        if reason is not None:
            return RankState.FAILED, reason
        return (RankState.ALIVE if rank in whole.alive else RankState.STARTING), ""

    def name_and_shape(self, ident: int) -> tuple[str, Shape] | None:
        """Return the name and shape of a mesh or a part of one."""
        part = self._parts.get(ident)
        whole = self._wholes.get(part[0]) if part is not None else None
        return None if part is None or whole is None else (whole.name, part[1])

    def started(self, ident: int) -> tuple[int, int]:
        """Return how many elements of a mesh, or of its proc mesh, have been heard of, and how many there are."""
        part = self._parts.get(ident)
        if part is None:
            return 0, 0
        root, shape = part
        whole = self._wholes.get(root)
        if whole is not None and whole.procs is not None and whole.procs in self._wholes:
            root = whole.procs
        states = self.of(root, shape.ranks())
        return sum(state is not RankState.STARTING for state, _ in states), len(states)

    def answered(self, operation: Body | None, index: int | None = None) -> None:
        """Note that an operation was answered. If it is a call, its mesh lives.

        Args:
            operation: the answered operation.
            index: the number of this answer among several.
        """
        if not isinstance(operation, (EndpointCall, AwaitInitialized)) or operation.mesh not in self.unseen:
            return  # nearly always
        ident = operation.mesh
        part = self._parts.get(ident)
        if part is None:
            return
        root, shape = part
        whole = self._wholes.get(root)
        if whole is None or (isinstance(operation, Choose) and len(shape) > 1):  # unknown which actor answered
            return
        self._note_alive(whole, _ranks(shape, index))
        if index is None:
            self.unseen.discard(ident)

    def _note_alive(self, whole: _Whole, ranks: Iterable[int]) -> None:
        ranks = list(ranks)
        whole.alive.update(ranks)
        if whole.procs is not None and whole.procs in self._wholes:
            self._wholes[whole.procs].alive.update(ranks)

    def failed(self, operation: Body | None, code: str, text: str, index: int | None = None) -> None:
        """Note that an operation on a mesh failed, if the error shows which element is dead.

        Args:
            operation: the failed operation.
            code: the error's code in `loom.errors`.
            text: the error's text.
            index: the number of this answer among several.
        """
        part = self._parts.get(getattr(operation, "mesh", _NONE))
        if part is None:
            return
        root, shape = part
        whole = self._wholes.get(root)
        if whole is None or (index is None and len(shape) > 1):
            return
        ranks = _ranks(shape, index)
        if code == ActorError.code:  # the endpoint raised, so the actor lives
            self._note_alive(whole, ranks)
        elif code == SupervisionError.code:
            whole.failed.update(dict.fromkeys(ranks, _short(text)))

    def not_made(self, ident: int, text: str) -> None:
        """Note that a mesh could not be made; ignore ids of other operations."""
        whole = self._wholes.get(ident)
        if whole is not None:
            whole.failed.update(dict.fromkeys(whole.shape.ranks(), _short(text)))

    def stopped(self, ident: int) -> None:
        """Note that this client stops a mesh or a part of one."""
        part = self._parts.get(ident)
        if part is not None and part[0] in self._wholes:
            self._wholes[part[0]].stopped.update(part[1].ranks())
            self.unseen.discard(ident)

    def event(self, name: str, details: Mapping[str, Any]) -> None:
        """Take in an event of the driver."""
        if name == _STARTED:
            whole = self._wholes.get(details["id"])
            known = self._started.setdefault(details["id"], set()) if whole is None else whole.alive
            known.update(details["ranks"])
        elif name == _STOPPED and details["id"] in self._wholes:
            self._wholes[details["id"]].stopped.update(details["ranks"])
        elif name == "process_lost":
            text = f"process {details['rank']} of proc mesh {details['mesh']!r} is gone"
            for ident in (details["id"], *details.get("actors", ())):
                whole = self._wholes.get(ident)
                lost = self._lost.setdefault(ident, {}) if whole is None else whole.failed
                lost.setdefault(details["rank"], text)
        elif name == "actors_lost":
            whole = self._wholes.get(details["id"])
            if whole is not None:
                text = f"Monarch has stopped it: {details['report']}"
                whole.failed.update(dict.fromkeys(details["ranks"], _short(text)))
        elif name == "host_lost" and _HOSTS in self._wholes:
            self._wholes[_HOSTS].failed[details["host"]] = f"worker {details['address']} is gone"
        elif name == "host_back" and _HOSTS in self._wholes:
            self._wholes[_HOSTS].failed.pop(details["host"], None)
        elif name == "failure" and details.get("id") in self._wholes:
            self._wholes[details["id"]].failed.update(dict.fromkeys(details["ranks"], _short(details["report"])))


def _ranks(shape: Shape, index: int | None) -> list[int]:
    ranks = shape.ranks()
    return ranks if index is None else ranks[index : index + 1]


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 1] + "…"
