"""What the weaver shows of replicas, devices, commands and goodput.

The weaver makes these, REST and its WebSocket pass them on as JSON, and programs read them back. Each is an object
in JSON with the fields of its class.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from loom.control.commands import Acknowledgement
from loom.weaver.states import DeviceState, ReplicaState

V = TypeVar("V", bound="_View")
C = TypeVar("C", bound="CommandState")


class _View:
    """An object of JSON. Fields that a newer weaver adds are ignored."""

    # Read by pydantic, which the gateway describes REST with: fields that have a default here are always there.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"json_schema_serialization_defaults_required": True}

    def to_body(self) -> dict[str, Any]:
        """Return the object that stands for it in JSON."""
        return {one.name: getattr(self, one.name) for one in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_body(cls: type[V], body: Mapping[str, Any]) -> V:
        """Return what such an object stands for."""
        names = {one.name for one in fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: value for name, value in body.items() if name in names})


class _JsonNumber:
    """Tells pydantic that JSON has texts for floats that are no number."""

    @staticmethod
    def __get_pydantic_json_schema__(schema: Any, handler: Any) -> dict[str, Any]:
        texts = {"type": "string", "enum": ["NaN", "Infinity", "-Infinity"]}
        return {"anyOf": [{"type": "number"}, texts]}


MetricValue = Annotated[float, _JsonNumber]


class MetricPoint(NamedTuple):
    """A value of a metric at a time."""

    time: float
    """Seconds since the epoch."""
    step: int | None
    value: MetricValue


@dataclass(frozen=True)
class WeaverStatus(_View):
    """The weaver at a glance."""

    weaver: str
    """Id of this process of it; another after a restart."""
    started: float
    """Seconds since the epoch."""
    time: float
    """Now, by the weaver's clock."""
    replicas: Mapping[str, int]
    """How many are in each state; states with none are left out."""
    devices: int
    commands: int
    """Commands that some replica has not acknowledged."""
    event: int
    """Id of the newest event."""
    reports: int
    """Status reports taken since it started."""


@dataclass(frozen=True)
class ReplicaInfo(_View):
    """A training process. Times are seconds since the epoch."""

    id: str
    state: ReplicaState
    group: str = ""
    host: str = ""
    pid: int = 0
    session: str | None = None
    """The session that spawned it; None for one that Loom did not spawn."""
    procs: str | None = None
    """The proc mesh of its process."""
    rank: int | None = None
    """The rank of its process in the proc mesh."""
    actors: str | None = None
    devices: tuple[str, ...] = ()
    handlers: Mapping[str, str] = field(default_factory=dict)
    """Configuration keys that it takes, and the names of their types."""
    config: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    epoch: int | None = None
    max_step: int | None = None
    metrics: Mapping[str, MetricValue] = field(default_factory=dict)
    reported: float | None = None
    """When it made its last status report, by its own clock."""
    phase: str = ""
    """step, between or paused."""
    registered: float = 0.0
    changed: float = 0.0
    """When its state changed."""
    died_of: str | None = None
    """Why it has failed; None unless it has."""
    injectable: bool = False
    """Whether failures may be injected into it."""
    connected: bool = False
    step_time: float | None = None
    """Seconds that one of its steps usually takes; None before there are a few."""
    instance: str = ""
    """Which process of those that have been this replica."""
    seq: int = 0
    """Number of its last status report."""

    @property
    def job(self) -> str:
        """The job that its time is counted for; see `GoodputRecord`."""
        return f"{self.group}@{self.session}" if self.session else self.group

    @property
    def place(self) -> tuple[str, str, int, str]:
        """A key to sort by: group, session, rank."""
        return self.group, self.session or "", -1 if self.rank is None else self.rank, self.id

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> ReplicaInfo:
        """Return what such an object stands for."""
        read = {"state": ReplicaState(body["state"]), "devices": tuple(body.get("devices", ()))}
        return super().from_body({**body, **read, "metrics": read_metrics(body["metrics"])})

    def changed_by(self, changes: Mapping[str, Any]) -> ReplicaInfo:
        """Return the replica as it is after the changes that a `Delta` has for it."""
        known = {name: changes[name] for name in CHANGING_FIELDS if name in changes}
        if "state" in known:
            known["state"] = ReplicaState(known["state"])
        return replace(self, **known)


CHANGING_FIELDS = ("state", "step", "epoch", "max_step", "metrics", "phase", "reported", "connected")
"""The fields of `ReplicaInfo` that change often, and that a `Delta` has."""


@dataclass(frozen=True)
class DeviceInfo(_View):
    """A GPU, or the CPU slot of a host that has none."""

    uuid: str
    state: DeviceState
    kind: str = ""
    """gpu or cpu."""
    server: str = ""
    type: str = ""
    """The model."""
    memory: int = 0
    """Bytes."""
    reason: str | None = None
    """Why it is not active."""
    replicas: tuple[str, ...] = ()
    """Ids of those that use it."""
    status: Mapping[str, Any] | None = None
    """The newest that was said of it: utilization (0 to 1), memory_used (bytes), temperature (°C), power (W)."""

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> DeviceInfo:
        """Return what such an object stands for."""
        read = {"state": DeviceState(body["state"]), "replicas": tuple(body.get("replicas", ()))}
        return super().from_body({**body, **read})


@dataclass(frozen=True)
class WeaverEvent(_View):
    """Something that happened. In JSON what is in ``data`` stands beside the other fields."""

    id: int
    """Later events have greater ids."""
    time: float
    """Seconds since the epoch."""
    kind: str
    replica: str | None
    """The replica that it is about, if it is about one."""
    data: dict[str, Any]
    """What more there is to say, by its kind. ``cause`` is the id of the event that led to it."""

    def to_body(self) -> dict[str, Any]:
        """Return the object that stands for it in JSON."""
        return {"id": self.id, "time": self.time, "kind": self.kind, "replica": self.replica, **self.data}

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> WeaverEvent:
        """Return what such an object stands for."""
        data = {name: value for name, value in body.items() if name not in ("id", "time", "kind", "replica")}
        return cls(body["id"], body["time"], body["kind"], body["replica"], data)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        described: dict[str, Any] = handler.resolve_ref_schema(handler(schema))
        described["properties"].pop("data")
        described["required"].remove("data")
        described["additionalProperties"] = True
        return described


@dataclass(frozen=True)
class CommandState(_View):
    """A command that was given, and what replicas have made of it."""

    id: str
    replicas: tuple[str, ...]
    """Whom it is for."""
    done: bool
    """Whether each of them has acknowledged it, or cannot any more."""
    outcomes: Mapping[str, Acknowledgement]
    """By replica; of one that has not answered yet, an acknowledgement that is ``waiting``."""

    def to_body(self) -> dict[str, Any]:
        """Return the object that stands for it in JSON."""
        return {**super().to_body(), "outcomes": {id: one.to_body() for id, one in self.outcomes.items()}}

    @classmethod
    def from_body(cls: type[C], body: Mapping[str, Any]) -> C:
        """Return what such an object stands for."""
        outcomes = {id: Acknowledgement.from_body(one) for id, one in body["outcomes"].items()}
        return super().from_body({**body, "replicas": tuple(body["replicas"]), "outcomes": outcomes})


@dataclass(frozen=True)
class InjectionState(CommandState):
    """A fault that was injected. ``outcomes`` have the evidence of each replica."""

    evidence: Mapping[str, Any] = field(default_factory=dict)
    """What shows that a process of Loom is gone, if that was the fault."""


@dataclass(frozen=True)
class FaultRecord(_View):
    """The death of a process, and what it cost. Times are seconds since the epoch."""

    replica: str
    reason: str
    time: float
    """When the process was last heard of."""
    detected: float
    """When the weaver knew."""
    registered: float | None = None
    """When the process came that has its place now; None as long as there is none."""
    stepped: float | None = None
    """When that began its first step."""

    @property
    def detection(self) -> float:
        """Seconds until the weaver knew."""
        return self.detected - self.time

    @property
    def respawn(self) -> float | None:
        """Seconds from then until another process had its place."""
        return None if self.registered is None else self.registered - self.detected

    @property
    def waiting(self) -> float | None:
        """Seconds from then until the first step."""
        return None if self.registered is None or self.stepped is None else self.stepped - self.registered

    @property
    def recovery(self) -> float | None:
        """Seconds from the last sign of the one process to the first step of the other."""
        return None if self.stepped is None else self.stepped - self.time


@dataclass(frozen=True)
class CoursePoint(_View):
    """What the sums of a job were at a time."""

    time: float
    """Seconds since the epoch."""
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class GoodputRecord(_View):
    """How much of a job's time was spent on steps that count. A second of it is a second of one of its replicas."""

    job: str
    """The replicas' group; ``GROUP@SESSION`` if a session spawned them."""
    since: float
    """When its first replica registered, in seconds since the epoch."""
    until: float
    """Now, or when its last replica ended."""
    replicas: int
    """How many live."""
    ratio: float | None
    """The share of ``compute``, from 0 to 1. None before there is anything."""
    seconds: Mapping[str, float]
    """By what they were spent on: `loom.control.time_account.REASONS`, and what the training names besides."""
    faults: tuple[FaultRecord, ...] = ()
    """Deaths of processes, the first first."""
    course: tuple[CoursePoint, ...] = ()
    """What ``seconds`` were since the beginning, at several times, the last of them ``until``."""

    def share(self, reason: str) -> float:
        """Return the share of a reason, from 0 to 1."""
        whole = sum(self.seconds.values())
        return self.seconds.get(reason, 0.0) / whole if whole > 0 else 0.0

    def to_body(self) -> dict[str, Any]:
        """Return the object that stands for it in JSON."""
        faults, course = [one.to_body() for one in self.faults], [one.to_body() for one in self.course]
        return {**super().to_body(), "faults": faults, "course": course}

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> GoodputRecord:
        """Return what such an object stands for."""
        faults = tuple(map(FaultRecord.from_body, body["faults"]))
        return super().from_body(
            {**body, "faults": faults, "course": tuple(map(CoursePoint.from_body, body["course"]))}
        )


@dataclass(frozen=True)
class Snapshot:
    """All that there is: the first thing a watcher gets, and again after the weaver or the connection was away."""

    status: Mapping[str, Any]
    """The fields of `WeaverStatus`."""
    replicas: Mapping[str, ReplicaInfo]
    devices: Mapping[str, DeviceInfo]


@dataclass(frozen=True)
class Delta:
    """What has been reported since the last one."""

    replicas: Mapping[str, Mapping[str, Any]]
    """For each id the fields of `ReplicaInfo` that change often; see `ReplicaInfo.changed_by`."""
    devices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """For each uuid its `DeviceInfo.status`."""


@dataclass(frozen=True)
class Away:
    """The weaver or the connection to the gateway is away, and what comes next is a `Snapshot`."""

    reason: str


WeaverUpdate = Snapshot | WeaverEvent | Delta | Away


def read_update(body: Mapping[str, Any]) -> WeaverUpdate | None:
    """Return what a message of ``/ws/v1/weaver`` says; None for a kind that this version does not know."""
    match body["type"]:
        case "snapshot":
            replicas = {one["id"]: ReplicaInfo.from_body(one) for one in body["replicas"]}
            devices = {one["uuid"]: DeviceInfo.from_body(one) for one in body["devices"]}
            return Snapshot(body["status"], replicas, devices)
        case "event":
            return WeaverEvent.from_body(body["event"])
        case "delta":
            changed = {id: {**one, "metrics": read_metrics(one["metrics"])} for id, one in body["replicas"].items()}
            return Delta(changed, body.get("devices", {}))
        case "away":
            return Away(body["reason"])
    return None


def few(names: Collection[str]) -> str:
    """Return the first five names as text, and how many more there are."""
    first = ", ".join(itertools.islice(names, 5)) or "none"
    return first + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def read_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return values of metrics, of which those that are no number are texts in JSON, such as ``"NaN"``."""
    return {name: float(value) for name, value in metrics.items()}
