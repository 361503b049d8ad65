"""Making, dividing, stopping and listing meshes. From client to driver; a new mesh gets the message's id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loom.wire.bodies.base import Body, Id
from loom.wire.fields import sendable_fields
from loom.wire.messages import Kind

__all__ = [
    "AwaitInitialized",
    "ForgetMeshes",
    "HostOf",
    "ListMeshes",
    "MakeView",
    "RefreshHosts",
    "SpawnActors",
    "SpawnProcs",
    "StopHosts",
    "StopMesh",
    "WithPython",
]


@dataclass(frozen=True, slots=True)
class SpawnProcs(Body, kind=Kind.SPAWN_PROCS):
    """Spawn processes on the hosts of a mesh. Answered only if it fails.

    Payload: ``(bootstrap, proc_bind, bootstrap_command, *marks)``: Monarch's arguments of those names, and then
    maps of further environment variables for the processes, such as the one that marks them as injectable.
    """

    hosts: Id
    name: str
    per_host: Mapping[str, int]
    """Sizes of the dimensions on each host."""


@dataclass(frozen=True, slots=True)
class SpawnActors(Body, kind=Kind.SPAWN_ACTORS):
    """Spawn an actor in each process of a mesh. Answered only if it fails.

    Payload: ``(class, args, kwargs)``.
    """

    procs: Id
    name: str


@dataclass(frozen=True, slots=True)
class MakeView(Body, kind=Kind.VIEW):
    """Give a part of a mesh an id. Answered only if it fails."""

    mesh: Id
    """The whole mesh, or another part of it."""
    labels: Sequence[str]
    """Names of the part's dimensions."""
    offset: int
    """Rank, in the whole mesh, of the part's first element."""
    sizes: Sequence[int]
    """Elements of each dimension."""
    strides: Sequence[int]
    """Distance between neighbours of each dimension, in ranks of the whole mesh."""


@dataclass(frozen=True, slots=True)
class StopMesh(Body, kind=Kind.STOP):
    """Stop a proc or actor mesh. Result: None, when it has stopped."""

    mesh: Id
    reason: str


@dataclass(frozen=True, slots=True)
class AwaitInitialized(Body, kind=Kind.INITIALIZED):
    """Answer when a mesh has been created. Result: True."""

    mesh: Id


@dataclass(frozen=True, slots=True)
class WithPython(Body, kind=Kind.WITH_PYTHON):
    """Make a mesh of the same hosts, whose processes run another Python. Answered only if it fails."""

    hosts: Id
    executable: str
    """Path of the interpreter on the hosts."""


@dataclass(frozen=True, slots=True)
class HostOf(Body, kind=Kind.HOST_OF):
    """Make a host mesh of the host of a single process. Answered only if it fails."""

    procs: Id
    """A proc mesh of one process."""


@dataclass(frozen=True, slots=True)
class StopHosts(Body, kind=Kind.STOP_HOSTS):
    """Stop every process of the session on all hosts; the hosts stay. Result: None."""


@dataclass(frozen=True, slots=True)
class RefreshHosts(Body, kind=Kind.REFRESH_HOSTS):
    """Use lost hosts again that have come back. Result: the list of their indexes."""


@dataclass(frozen=True, slots=True)
class ListMeshes(Body, kind=Kind.MESHES):
    """List the meshes of the session.

    Result: a list of ``(id, kind, name, (labels, offset, sizes, strides), class, endpoints or None, stopped)``.
    """


@dataclass(frozen=True, slots=True)
class ForgetMeshes(Body, kind=Kind.FORGET):
    """Release meshes that came in results, and their parts, which no later message names. Never answered."""

    meshes: Sequence[int]
    """Ids of the meshes. The body is this list itself."""

    def to_body(self) -> list[Any]:
        return list(sendable_fields(self)["meshes"])

    @classmethod
    def from_body(cls, body: Sequence[Any]) -> ForgetMeshes:
        return super(ForgetMeshes, cls).from_body([body])
