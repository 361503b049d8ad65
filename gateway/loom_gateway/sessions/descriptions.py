"""A driver's descriptions of its session's meshes, runs and watched tensors, as the gateway passes them on.

The driver writes these as JSON. The gateway checks them, because a driver runs its user's code.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loom.weaver.run_views import TrainingName

SHOWN_RANKS = 64
"""Elements of a mesh up to which the state of each is told. Of a larger mesh, so many failed ones are told."""


class ElementState(str, enum.Enum):
    """The state of an element of a mesh: of a host, a process or an actor."""

    STARTING = "starting"
    """Its process has not come up yet."""
    ALIVE = "alive"
    FAILED = "failed"
    """The element, its process or its host died."""
    STOPPED = "stopped"


@dataclass(frozen=True)
class FailedElement:
    """An element of a mesh that has failed."""

    rank: int
    """The number of the element in its mesh. Of actors on a part of a proc mesh, the processes have other ranks."""
    reason: str


@dataclass(frozen=True)
class MeshElements:
    """The elements of a mesh."""

    counts: Mapping[ElementState, int]
    """The number in each state; empty states are left out."""
    states: Sequence[ElementState]
    """The state of each, in the order of the ranks; empty for a mesh of more than 64."""
    failures: Sequence[FailedElement]
    """The failed ones, with the lowest ranks: at most 64 of a mesh, and 1000 of all meshes."""


@dataclass(frozen=True)
class EndpointInfo:
    """The calls of one endpoint of an actor mesh that clients have made, in all adverbs.

    A `stream` counts once for each actor. Times are from the call's arrival in the driver to its answer.
    """

    name: str
    calls: int
    """Calls since the mesh was made, with those that have not been answered."""
    failures: int
    """Calls that were answered with an error."""
    in_flight: int
    """Calls that have not been answered."""
    calls_per_second: float
    """Over the last minute, or since the first call."""
    p50: float | None
    """The median time of a call in the last minute, in seconds, within 5 %; None if none was answered."""
    p99: float | None
    """The time that 99 % of these calls did not exceed."""


@dataclass(frozen=True)
class MeshInfo:
    """A mesh of the session."""

    id: int
    name: str
    extent: Mapping[str, int]
    """The size of each dimension."""
    elements: MeshElements
    stopped: bool


@dataclass(frozen=True)
class ActorMeshInfo(MeshInfo):
    """A mesh of actors."""

    class_name: str
    """The name of the actors' class; empty for a mesh that was stopped."""
    endpoints: Sequence[EndpointInfo]
    """The endpoints that were called, in the order of their names."""


@dataclass(frozen=True)
class ProcMeshInfo(MeshInfo):
    """A mesh of processes, with the actor meshes on it or on a part of it."""

    actors: Sequence[ActorMeshInfo]


@dataclass(frozen=True)
class HostMeshInfo(MeshInfo):
    """The hosts of the session, with the proc meshes on them."""

    procs: Sequence[ProcMeshInfo]


@dataclass(frozen=True)
class SessionMeshes:
    """The meshes of a session as a tree, the oldest first. Of those that were stopped, it has the newest 16."""

    hosts: HostMeshInfo
    left_out: int
    """Meshes for which there is no room."""


class RunState(str, enum.Enum):
    """The state of a function that `Job.run` runs in the driver."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class RunInfo:
    """A function that `Job.run` runs, or has run, in the driver."""

    id: int
    name: str
    state: RunState
    started: float
    """Seconds since the epoch, as is `finished`."""
    finished: float | None
    trains: Sequence[TrainingName] = ()
    """The runs of trainings that the function is of; empty if it trains nothing."""


@dataclass(frozen=True)
class SessionRuns:
    """The runs of a session that go on, and the last that are over; the oldest first."""

    runs: Sequence[RunInfo]


@dataclass(frozen=True)
class WatchedValues:
    """The elements of a tensor. All but ``nonfinite`` is of the finite ones; None if there are none."""

    norm: float | None
    """The L2 norm."""
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    nonfinite: float
    """The share of elements that are infinite or NaN, from 0 to 1."""
    histogram: Sequence[int]
    """The number of elements in each of the bins, which have the same width, from ``min`` to ``max``; at most
    64."""


@dataclass(frozen=True)
class WatchedTensor:
    """A weight that a program watches, and its gradients."""

    mesh: str
    """The name of the mesh of workers."""
    name: str
    gradients: int
    """The number that have arrived."""
    trouble: str
    """Why the newest could not be summarized; empty if it was."""
    time: float | None
    """When the newest summary was made, in seconds since the epoch; None if there is none."""
    steps: Sequence[int]
    """The numbers of some gradients, the newest last: at most 60, which lie evenly among those that are kept."""
    weight_norms: Sequence[float | None]
    """The norm of the weight at each of the steps."""
    grad_norms: Sequence[float | None]
    weight: WatchedValues | None
    """The newest, as is `grad`."""
    grad: WatchedValues | None


@dataclass(frozen=True)
class SessionTensors:
    """The watched tensors of a session, at most 60."""

    tensors: Sequence[WatchedTensor]
    left_out: int
    """Tensors for which there is no room."""
