"""The meshes of a session, by the ids that the client gave them, and its worker hosts.

Monarch's host mesh of the session knows the first addresses only. Processes on a host that has moved are started
through another mesh, which was attached to the host's new address.

Stopped meshes are released: Monarch itself keeps them until the process ends (torchmonarch 0.7 and 0.8), and a
session of days may make and stop thousands of meshes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from monarch._rust_bindings.monarch_hyperactor.endpoint import ActorEndpoint
from monarch._src.actor.actor_mesh import ActorMesh
from monarch._src.actor.proc_mesh import ProcMesh
from monarch._src.actor.shape import NDSlice, Shape
from monarch.actor import as_endpoint, context

from loom.errors import LoomError, NoSuchMesh, SupervisionError
from loom.wire.bodies import MakeView
from loom_gateway.driver.monarch.call_statistics import EndpointCalls
from loom_gateway.driver.monarch.root_client import attach


def release(meshes: Iterable[Any]) -> None:
    """Drop Monarch's own references to whole actor and proc meshes that have stopped."""
    made = [mesh for mesh in meshes if isinstance(mesh, (ActorMesh, ProcMesh))]  # some could not be made
    children = context().actor_instance._children or [] if made else []
    for mesh in made:
        _drop(children, mesh)
        if isinstance(mesh, ActorMesh):
            if mesh._proc_mesh is not None:
                _drop(mesh._proc_mesh._pending_actor_spawns, mesh)
        else:
            for child in children.copy():  # such as the actor that has run the bootstrap function
                if isinstance(child, ActorMesh) and child._proc_mesh is mesh:
                    _drop(children, child)
            mesh._pending_actor_spawns.clear()
            if hasattr(mesh._logging_manager, "_log_level_actor"):  # in 0.8: its endpoint holds the mesh, in Rust
                mesh._logging_manager._log_level_actor = None
            hosts = mesh._host_mesh
            _drop(hosts._proc_meshes, mesh)
            for spawn in hosts._pending_spawns.copy():
                if _is_done(spawn):
                    _drop(hosts._pending_spawns, spawn)


def _drop(references: list[Any], thing: Any) -> None:
    with contextlib.suppress(ValueError):
        references.remove(thing)  # in one step, because other threads append


def _is_done(spawn: Any) -> bool:
    try:
        return spawn.poll() is not None
    except Exception:  # noqa: BLE001 - the spawn failed with any of Monarch's errors
        return True


class HostTable:
    """The hosts of one session, by number. Safe on any thread."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = list(addresses)
        self.first = len(self.addresses)
        """The number of hosts with which the session was opened. Those that have joined it have higher numbers."""
        self.lost: set[int] = set()  # numbers of the hosts that are gone
        self._reasons: dict[int, str] = {}  # why they are, by number
        self.draining: dict[int, str] = {}  # why hosts that live are about to be left, by number
        self.moved: set[int] = set()  # numbers of the hosts whose address has changed since the session was opened
        self._at: dict[tuple[str, ...], Any] = {}  # meshes of moved hosts, by their addresses
        self._attached: list[Any] = []

    def check(self, hosts: Iterable[int]) -> None:
        gone = sorted(self.lost.intersection(hosts))
        if gone:
            named = " and ".join(
                f"worker host {host} at {self.addresses[host]}{self._reason(host)}" for host in gone
            )
            raise SupervisionError(
                f"{named} {'is' if len(gone) == 1 else 'are'} gone: job.living_hosts() is a mesh of the others. If "
                f"a worker was started there again, call job.refresh_hosts() first"
            )

    def _reason(self, host: int) -> str:
        return f" ({reason})" if (reason := self._reasons.get(host)) else ""

    def lose(self, host: int, reason: str) -> None:
        """Note that a host is gone, and why."""
        self._reasons[host] = reason
        self.draining.pop(host, None)
        self.lost.add(host)

    def mesh_on(self, hosts: tuple[int, ...], mesh: Any, python: str = "") -> Any:
        """Return the host mesh on which to start processes of some hosts, at their current addresses.

        ``mesh`` is Monarch's mesh of them, with the first addresses; ``python`` an interpreter instead of its own.
        """
        # A mesh that was made when hosts had joined is not used: Monarch waits for all of it, also for lost hosts.
        if self.moved.isdisjoint(hosts) and len(self.addresses) == self.first:
            return mesh
        there = self.at_addresses(hosts)
        return there.with_python_executable(python) if python else there

    def at_addresses(self, hosts: tuple[int, ...]) -> Any:
        """Return a mesh of some hosts, in this order, at their current addresses."""
        addresses = tuple(self.addresses[host] for host in hosts)
        if addresses not in self._at:
            self._at[addresses] = self.attach_to(list(addresses))
        return self._at[addresses]

    def living(self) -> tuple[int, ...]:
        """Return the numbers of the hosts that are not lost and, unless all others are drained, not drained.

        Raises:
            SupervisionError: all hosts are lost.
        """
        there = tuple(host for host in range(len(self.addresses)) if host not in self.lost)
        if not there:
            self.check(range(len(self.addresses)))
        return tuple(host for host in there if host not in self.draining) or there

    def attach_to(self, addresses: list[str]) -> Any:
        mesh = attach(addresses, f"back{len(self._attached)}")
        self._attached.append(mesh)  # Monarch might stop the processes of a host mesh without references
        return mesh

    def join(self, address: str) -> int:
        """Note a further host, which counts as gone until its worker has answered. Return its number."""
        host = len(self.addresses)
        self.lose(host, "it has joined, and has not answered yet")
        self.addresses.append(address)
        self.moved.add(host)
        return host

    def move(self, host: int, address: str) -> None:
        self.addresses[host] = address
        self.moved.add(host)

    def back_at(self, host: int, mesh: Any) -> None:
        """Note that a host is back, as a new host mesh of its own."""
        if host in self.moved:
            self._at[(self.addresses[host],)] = mesh


logger = logging.getLogger(__name__)

_OF_ACTORS, _OF_PROCS = "ActorMeshController received explicit stop request", "stopped by client"
"""Monarch's words for actors that were stopped, and for those whose processes were."""

NAME_TIMEOUT = 1.0  # seconds to report Monarch's name of a mesh; one that is being made has none
STOP_TIMEOUT = 5.0  # seconds for stopping the processes of a mesh
HOST_MESH = 0  # id of the session's host mesh, which exists from the start
KEPT_NAMES = 1024  # meshes that were stopped or not made whose names are kept, for the errors of late calls


MeshShape: TypeAlias = tuple[tuple[str, ...], int, tuple[int, ...], tuple[int, ...]]
"""Labels, offset, sizes and strides of a mesh, as they travel."""


def shape_of(mesh: Any) -> MeshShape:
    """Return the shape of a Monarch mesh."""
    slice_ = mesh._ndslice
    return tuple(mesh._labels), slice_.offset, tuple(slice_.sizes), tuple(slice_.strides)


class _Stopped(SupervisionError):
    """The failure of every operation on a mesh that was stopped."""

    def __init__(self, kind: str, name: str, monarchs: str) -> None:
        text = f"mesh {name!r} was stopped"
        super().__init__(f"`ProcMesh` has already been stopped: {text}" if kind == "procs" else text)
        self._name = name
        self._monarchs = monarchs

    def of_call(self, endpoint: str) -> SupervisionError:
        """Return the failure of a call, in Monarch's words."""
        return SupervisionError(
            f"Endpoint call {self._name}.{endpoint}() failed, Supervision event: actor {self._name} has status:\n"
            f"  stopped: {self._monarchs} ({self})"
        )


@dataclass
class MeshEntry:
    """A mesh, or the reason why it could not be made."""

    kind: str  # ``hosts``, ``procs`` or ``actors``
    name: str
    mesh: Any
    root: int  # id of the whole mesh that contains this one; a whole mesh's own id
    failure: LoomError | None = None
    procs: int = -1  # id of the proc mesh of this mesh; a proc mesh's own id; -1 for hosts
    ranks: tuple[int, ...] = ()  # of the proc mesh, row by row; for a host mesh, the numbers of its hosts
    hosts: tuple[int, ...] = ()  # number of each rank's host; only for a whole proc mesh
    cls: type | None = None  # actors' class of an actor mesh
    python: str = ""  # interpreter of processes that are started on a host mesh, if it is not the workers' own
    stopped: bool = False
    stop_reason: str = ""  # why it was stopped, in words; "" if it was not
    last_shape: MeshShape | None = None  # of a mesh that was stopped
    calls: dict[str, EndpointCalls] = field(default_factory=dict)  # by endpoint; a part has those of the whole mesh

    @property
    def shape(self) -> MeshShape | None:
        """The mesh's shape, also if it was stopped; None if it was never made."""
        return self.last_shape if self.mesh is None else shape_of(self.mesh)

    def calls_of(self, endpoint: str, now: float) -> EndpointCalls:
        """Return the calls of an endpoint; at the first one, begin to count them."""
        return self.calls.get(endpoint) or self.calls.setdefault(endpoint, EndpointCalls(now))


class MeshTable:
    """The meshes and ports of a session, by id."""

    def __init__(self) -> None:
        self._entries: dict[int, MeshEntry] = {}  # iterated as a copy, because other threads change it
        self._endpoints: dict[tuple[int, str], Any] = {}  # by mesh and name
        self._unusable: deque[int] = deque()  # ids of meshes that were stopped or not made, the oldest first
        self._forgetting = threading.Lock()  # guards `_unusable`
        self.ports: dict[int, Any] = {}  # Monarch's, which the client opened, with ids as meshes have
        self._resolved = threading.local()  # a count for each thread

    def add(self, ident: int, entry: MeshEntry) -> None:
        self._entries[ident] = entry

    def fail(self, ident: int, kind: str, failure: LoomError) -> None:
        """Note that the mesh of this id could not be made. Every operation on it fails with the same cause."""
        self._entries[ident] = MeshEntry(kind, "", None, ident, failure)
        self._keep_names([ident])

    @staticmethod
    def shape(entry: MeshEntry) -> MeshShape:
        return shape_of(entry.mesh)

    def element(self, name: str, point: Mapping[str, tuple[int, int]]) -> tuple[int, int] | None:
        """Return the id of a whole mesh and the rank of one of its elements; None if several could be meant.

        ``point`` has the element's index in each dimension, and the dimension's size.
        """
        sizes = {label: size for label, (_, size) in point.items()}
        found = []
        for ident, entry in self.whole():
            labels, offset, lengths, strides = self.shape(entry)
            if entry.name == name and dict(zip(labels, lengths, strict=True)) == sizes:
                steps = zip(labels, strides, strict=True)
                found.append((ident, offset + sum(point[label][0] * stride for label, stride in steps)))
        return found[0] if len(found) == 1 else None

    def root(self, ident: int) -> int:
        """Return the id of the whole mesh that contains a mesh; the id itself if there is no such mesh."""
        entry = self._entries.get(ident)
        return ident if entry is None else entry.root

    def entry(self, ident: int) -> MeshEntry:
        """Return the entry of an id.

        Raises:
            NoSuchMesh: the session has no mesh of this id.
            LoomError: the operation that should have made the mesh failed with this error.
        """
        entry = self._entries.get(ident)
        if entry is None:
            raise NoSuchMesh(
                f"this session has no mesh with the id {ident}; it may have been stopped long ago, or made in "
                f"another session"
            )
        if entry.failure is not None:
            raise entry.failure
        return entry

    def known(self, ident: int) -> MeshEntry | None:
        return self._entries.get(ident)

    def mesh(self, ident: int) -> Any:
        """Return the Monarch mesh of an id. Raises the errors of `entry`."""
        return self.entry(ident).mesh

    @property
    def resolved(self) -> int:
        """The number of references to meshes in payloads that this thread has resolved so far."""
        return getattr(self._resolved, "count", 0)

    def resolve(self, ident: int) -> Any:
        """Return the mesh or port of a reference in a payload. Raises the errors of `entry`."""
        port = self.ports.get(ident)
        if port is not None:
            return port
        self._resolved.count = self.resolved + 1
        return self.mesh(ident)

    def add_view(self, ident: int, part: MakeView) -> None:
        entry = self.entry(part.mesh)
        slice_ = NDSlice(offset=part.offset, sizes=list(part.sizes), strides=list(part.strides))
        shape = Shape(list(part.labels), slice_)
        view = entry.mesh._new_with_shape(shape)
        # Slices, and actors on slices of procs, keep the ranks of the whole mesh.
        ranks = tuple(shape.ranks())
        if entry.kind == "hosts":  # a mesh of the hosts that live leaves out numbers
            whole = self.entry(entry.root)
            numbers = dict(zip(Shape(whole.mesh._labels, whole.mesh._ndslice).ranks(), whole.ranks, strict=True))
            ranks = tuple(numbers[rank] for rank in ranks)
        self._entries[ident] = MeshEntry(
            entry.kind,
            entry.name,
            view,
            entry.root,
            procs=entry.procs,
            ranks=ranks,
            cls=entry.cls,
            python=entry.python,
            calls=entry.calls,
        )

    def endpoint(self, ident: int, name: str) -> Any:
        """Return an endpoint of an actor mesh, such as ``mesh.add``, that does not check its arguments."""
        key = (ident, name)
        found = self._endpoints.get(key)
        if found is None:
            known = self._entries.get(ident)
            if known is not None and isinstance(known.failure, _Stopped):  # also of a part made afterwards
                raise known.failure.of_call(name)
            found = self._endpoints[key] = _unchecked(self.mesh(ident), name)
        return found

    def find(self, mesh: Any) -> tuple[int, MeshEntry] | None:
        """Return the id and entry of this very Monarch mesh object, or None."""
        for ident, entry in self._entries.copy().items():
            if entry.mesh is mesh:
                return ident, entry
        return None

    async def named_by_monarch(self, name: str) -> tuple[int, MeshEntry] | None:
        """Return the id and entry of the actor mesh with this lower-case name in Monarch, or None."""
        meshes = [(ident, entry) for ident, entry in self.whole("actors") if not entry.stopped]
        names = await asyncio.gather(*(monarchs_name(entry) for _, entry in meshes))
        return next((mesh for mesh, found in zip(meshes, names, strict=True) if found.lower() == name), None)

    def forget(self, ident: int) -> None:
        """Drop a mesh with its parts, or a port."""
        self.ports.pop(ident, None)
        for key in [key for key, entry in self._entries.copy().items() if ident in (key, entry.root)]:
            del self._entries[key]
            for called in [called for called in self._endpoints.copy() if called[0] == key]:
                del self._endpoints[called]

    def retire(self, ident: int) -> Collection[int]:
        """Release a whole mesh that was stopped, with its parts and the actors on it. Return the ids of all.

        Only their names are kept. Every operation on them fails.
        """
        belong = {
            key: entry
            for key, entry in self._entries.copy().items()
            if ident in (entry.root, entry.procs) and entry.failure is None
        }
        release([belong[key].mesh for key in sorted(belong, reverse=True)])
        for key, entry in belong.items():
            failure = _Stopped(entry.kind, entry.name, _OF_ACTORS if ident == entry.root else _OF_PROCS)
            self._entries[key] = MeshEntry(
                entry.kind,
                entry.name,
                None,
                entry.root,
                failure,
                entry.procs,
                entry.ranks,
                stopped=True,
                stop_reason=entry.stop_reason,
                last_shape=entry.shape,
            )
        for called in [called for called in self._endpoints.copy() if called[0] in belong]:
            self._endpoints.pop(called, None)
        self._keep_names(sorted(belong))
        return belong

    def _keep_names(self, idents: Sequence[int]) -> None:
        with self._forgetting:
            self._unusable.extend(idents)
            while len(self._unusable) > KEPT_NAMES:
                self._entries.pop(self._unusable.popleft(), None)

    def of_procs(self, procs: int) -> list[MeshEntry]:
        """Return the entries of a proc mesh, of the actor meshes on it, and of the parts of all of them."""
        return [entry for entry in self._entries.copy().values() if entry.procs == procs and entry.failure is None]

    def whole_and_stopped(self) -> list[tuple[int, MeshEntry]]:
        """Return every whole mesh that was made, oldest first, and the stopped ones that are remembered."""
        return [
            (ident, entry)
            for ident, entry in self._entries.copy().items()
            if entry.root == ident and (entry.failure is None or entry.stopped)
        ]

    def stopped_parts(self) -> dict[int, set[int]]:
        """Return the ranks that were stopped as a part of a whole mesh, by the id of the whole mesh."""
        found: dict[int, set[int]] = {}
        for ident, entry in self._entries.copy().items():
            if entry.stopped and entry.root != ident:
                found.setdefault(entry.root, set()).update(entry.ranks)
        return found

    def whole(self, kind: str | None = None) -> list[tuple[int, MeshEntry]]:
        """Return every whole mesh that was made, oldest first. With ``kind``, only those of one kind."""
        return [
            (ident, entry)
            for ident, entry in self._entries.copy().items()
            if entry.root == ident and entry.failure is None and kind in (None, entry.kind)
        ]


async def monarchs_name(entry: MeshEntry) -> str:
    """Return Monarch's name of an actor mesh; empty if it has none yet."""
    try:
        name: str = await asyncio.wait_for(entry.mesh._inner.name().as_asyncio(), NAME_TIMEOUT)
    except Exception:  # noqa: BLE001 - the mesh could not be made
        return ""
    return name


async def stop_quietly(procs: Any, name: str, reason: str) -> None:
    """Stop a proc mesh within `STOP_TIMEOUT` seconds. The workers reap what is left, such as dead ranks."""
    try:
        await asyncio.wait_for(procs.stop(reason).as_asyncio(), STOP_TIMEOUT)
    except Exception as error:  # noqa: BLE001 - Monarch's, of many classes
        logger.warning("stopping proc mesh %s: %s", name, str(error)[:500])


class _AnyArguments:
    """Stands for an ``inspect.Signature`` whose ``bind`` would take a tenth of a call's time."""

    def bind(self, *args: Any, **kwargs: Any) -> None: ...


_ANY_ARGUMENTS = _AnyArguments()


def _unchecked(mesh: Any, name: str) -> Any:
    """Return an endpoint without Monarch's argument check: the laptop has checked the arguments already."""
    name, parenthesis, port = name.partition("(")
    endpoint = getattr(mesh, name)
    if parenthesis:
        endpoint = as_endpoint(endpoint, explicit_response_port=port == "port)")
    if not isinstance(endpoint, ActorEndpoint):
        return endpoint
    return ActorEndpoint(
        endpoint._actor_mesh, endpoint._name, mesh._shape, mesh._mesh_name, _ANY_ARGUMENTS, mesh._proc_mesh, None
    )
