"""The weaver's view of replicas, devices, commands and goodput, for users.

The weaver makes these objects, REST and its WebSocket pass them on as JSON, and programs read them back. Each is a
JSON object with the fields of its class.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from loom.control.commands import Acknowledgement
from loom.weaver.states import DeviceState, ReplicaEnding, ReplicaState

V = TypeVar("V", bound="View")
C = TypeVar("C", bound="CommandState")


class View:
    """A JSON object. Fields that only a newer weaver knows are ignored."""

    # For pydantic, with which the gateway describes REST: fields with a default here are always present in JSON.
    __pydantic_config__: ClassVar[Mapping[str, bool]] = {"json_schema_serialization_defaults_required": True}

    def to_body(self) -> dict[str, object]:
        """Return the JSON object."""
        return {one.name: getattr(self, one.name) for one in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_body(cls: type[V], body: Mapping[str, Any]) -> V:
        """Return the view that a JSON object holds."""
        names = {one.name for one in fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: value for name, value in body.items() if name in names})


def to_json(result: Any) -> Any:
    """Return the result of an operation as JSON has it, if it is a view or a list of views."""
    if isinstance(result, View):
        return result.to_body()
    return [to_json(one) for one in result] if isinstance(result, list) else result


class _JsonNumber:
    """The pydantic schema of a float, for which JSON has texts if it is not finite."""

    @staticmethod
    def __get_pydantic_json_schema__(schema: Any, handler: Any) -> dict[str, object]:
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
class WeaverStatus(View):
    """The weaver at a glance."""

    weaver: str
    """Id of the weaver's process; a restarted weaver has another."""
    started: float
    """Seconds since the epoch."""
    time: float
    """The current time by the weaver's clock."""
    replicas: Mapping[str, int]
    """The number of replicas in each state; states without replicas are left out."""
    devices: int
    commands: int
    """Commands that some replica has not acknowledged."""
    event: int
    """Id of the newest event."""
    reports: int
    """Status reports taken since the weaver started."""
    undurable_since: float | None = None
    """Since when nothing is stored, as on a full disk: commands are refused. None: everything is stored."""
    undurable_reason: str = ""


@dataclass(frozen=True)
class ProfileInfo(View):
    """A profile of a replica: samples of its busy threads' stacks; for some ``folded`` had no room."""

    replica: str
    seconds: float
    samples: int
    left_out: int
    sampler: str  # py-spy, or threadlet on another host than the weaver's
    folded: str
    """Lines such as ``outer (a.py:3);inner (b.py:7) 12``, the most frequent stack first."""


@dataclass(frozen=True)
class ReplicaInfo(View):
    """A training process. Times are seconds since the epoch."""

    id: str
    state: ReplicaState
    group: str = ""
    host: str = ""
    pid: int = 0
    session: str | None = None
    """The session that spawned the replica; None if Loom did not spawn it."""
    procs: str | None = None
    """Id of the proc mesh of the replica's process."""
    mesh: str | None = None
    """The name of that proc mesh."""
    rank: int | None = None
    """The rank of the replica's process in the proc mesh."""
    actors: str | None = None
    devices: tuple[str, ...] = ()
    handlers: Mapping[str, str] = field(default_factory=dict)
    """Configuration keys that the replica takes, and the names of their types."""
    config: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    epoch: int | None = None
    max_step: int | None = None
    metrics: Mapping[str, MetricValue] = field(default_factory=dict)
    reported: float | None = None
    """When the replica made its last status report, by its own clock."""
    phase: str = ""
    """step, between or paused."""
    status_type: str | None = None
    """The type of the last status that had one, such as batch_update."""
    registered: float = 0.0
    changed: float = 0.0
    """When the replica's state last changed."""
    died_of: str | None = None
    """Why the replica has failed; None unless it has."""
    ending: ReplicaEnding | None = None
    """The end of the replica; None while it lives."""
    ended_by: str | None = None
    """The user, or ``weaver``, that told the replica to stop; None if nobody is known to have."""
    end_reason: str | None = None
    """Why the replica ended, in words; None while it lives."""
    exit: Mapping[str, Any] | None = None
    """The end of the replica's process, if that was seen: ``signal`` or ``code`` (both None if the machine
    does not tell), ``out_of_memory`` (whether the kernel counted a process that it killed for memory), and
    ``last_lines``, the end of its standard error."""
    respawns: bool = False
    """True if something starts another process in the replica's place when its process dies."""
    injectable: bool = False
    """True if failures may be injected into the replica."""
    cohort: Mapping[str, Any] | None = None
    """The place of the replica among the ranks of its job, which take commands at one step: ``id``, ``rank`` and
    ``world``, the number of ranks. None if it takes commands by itself."""
    not_offered: Mapping[str, str] = field(default_factory=dict)
    """Commands that nothing in the replica's process carries out now, such as ``save``, each with the reason."""
    connected: bool = False
    step_time: float | None = None
    """Median seconds of the replica's last steps; None before there are a few."""
    instance: str = ""
    """Id of the process; each process that takes the replica's name has another."""
    seq: int = 0
    """Number of the replica's last status report."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Addresses of the replica's run in trackers, by the tracker's name."""
    run: str | None = None
    """Id of the run that the replica's process is of."""
    user: str = ""
    """The user that the replica belongs to."""

    @property
    def job(self) -> str:
        """The job in whose goodput the replica counts; see `GoodputRecord`."""
        return f"{self.group}@{self.session}" if self.session else self.group

    @property
    def place(self) -> tuple[str, str, int, str]:
        """A key to sort by: group, session, rank."""
        return self.group, self.session or "", -1 if self.rank is None else self.rank, self.id

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> ReplicaInfo:
        ending = body.get("ending")
        read: dict[str, object] = {"state": ReplicaState(body["state"]), "devices": tuple(body.get("devices", ()))}
        read["ending"] = ReplicaEnding(ending) if ending in list(ReplicaEnding) else None
        return super().from_body({**body, **read, "metrics": read_metrics(body["metrics"])})

    def changed_by(self, changes: Mapping[str, Any]) -> ReplicaInfo:
        """Return the replica with the changes of a `Delta` applied."""
        known = {name: changes[name] for name in CHANGING_FIELDS if name in changes}
        if "state" in known:
            known["state"] = ReplicaState(known["state"])
        return replace(self, **known)


CHANGING_FIELDS = ("state", "step", "epoch", "max_step", "metrics", "phase", "reported", "connected", "status_type")
"""The fields of `ReplicaInfo` that change often, and that a `Delta` has; ``status_type`` only if there is one."""


@dataclass(frozen=True)
class DeviceInfo(View):
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
    """Why the device is not active."""
    replicas: tuple[str, ...] = ()
    """Ids of the replicas that use the device."""
    status: Mapping[str, Any] | None = None
    """The newest report on the device: the fields of `loom.devices.DeviceUse`, as utilization (0 to 1), memory_used
    (bytes), temperature (°C), power (W), throttled and error; ``xid``, the last Xid of a GPU; ``time``, in seconds
    since the epoch, and ``by``, the replica that made the report."""
    user: str = ""
    """The user whose replicas these are. Another user of the device has a state of it of their own."""

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> DeviceInfo:
        read = {"state": DeviceState(body["state"]), "replicas": tuple(body.get("replicas", ()))}
        return super().from_body({**body, **read})


@dataclass(frozen=True)
class WeaverEvent(View):
    """Something that happened. In JSON the items of ``data`` are fields next to the others."""

    id: int
    """Later events have greater ids."""
    time: float
    """Seconds since the epoch."""
    kind: str
    replica: str | None
    """The replica that the event is about, if it is about one."""
    data: Mapping[str, Any]
    """Further fields, by the event's kind. ``cause`` is the id of the event that led to this one."""

    def to_body(self) -> dict[str, object]:
        return {"id": self.id, "time": self.time, "kind": self.kind, "replica": self.replica, **self.data}

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> WeaverEvent:
        data = {name: value for name, value in body.items() if name not in ("id", "time", "kind", "replica")}
        return cls(body["id"], body["time"], body["kind"], body["replica"], data)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, object]:
        described: dict[str, Any] = handler.resolve_ref_schema(handler(schema))
        described["properties"].pop("data")
        described["required"].remove("data")
        described["additionalProperties"] = True
        return described


@dataclass(frozen=True)
class CommandState(View):
    """A command that was given, and the replicas' acknowledgements."""

    id: str
    replicas: tuple[str, ...]
    """Ids of the replicas that the command is for."""
    done: bool
    """True if each replica has acknowledged the command, or no longer can."""
    outcomes: Mapping[str, Acknowledgement]
    """The acknowledgements by replica; one that is ``waiting`` for a replica that has not answered yet."""

    def to_body(self) -> dict[str, object]:
        return {**super().to_body(), "outcomes": {id: one.to_body() for id, one in self.outcomes.items()}}

    @classmethod
    def from_body(cls: type[C], body: Mapping[str, Any]) -> C:
        outcomes = {id: Acknowledgement.from_body(one) for id, one in body["outcomes"].items()}
        return super().from_body({**body, "replicas": tuple(body["replicas"]), "outcomes": outcomes})


@dataclass(frozen=True)
class InjectionState(CommandState):
    """An injected fault. ``outcomes`` have the evidence of each replica."""

    evidence: Mapping[str, Any] = field(default_factory=dict)
    """Evidence that a process of Loom is gone, if the fault ended one."""


@dataclass(frozen=True)
class NewPoints(View):
    """The points of a replica's metrics after a cursor."""

    metrics: Mapping[str, tuple[MetricPoint, ...]]
    """The points of each metric that has some, in the order in which they were reported."""
    cursor: str
    """The cursor with which to ask for what follows."""
    more: bool
    """True if more points are there already."""
    coarse: bool = False
    """True if there are means among the points, in the place of those that were made coarser."""

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> NewPoints:
        metrics = {
            name: tuple(MetricPoint(at, step, float(value)) for at, step, value in points)
            for name, points in body["metrics"].items()
        }
        return super().from_body({**body, "metrics": metrics})


@dataclass(frozen=True)
class QueryResult(View):
    """The result of a query. Values are numbers, texts and None; a blob is the text of its hexadecimal digits."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    types: tuple[str, ...] = ()
    """``INTEGER``, ``REAL`` or ``TEXT`` for each column; empty for a computed one without a ``CAST``."""


@dataclass(frozen=True)
class FaultRecord(View):
    """The death of a process, and its cost. Times are seconds since the epoch."""

    replica: str
    reason: str
    time: float
    """When the process was last heard of."""
    detected: float
    """When the weaver noticed the death."""
    registered: float | None = None
    """When the next process in the replica's place registered; None while there is none."""
    stepped: float | None = None
    """When the next process began its first step."""

    @property
    def detection(self) -> float:
        """Seconds from the last sign of the process to the weaver's notice of its death."""
        return self.detected - self.time

    @property
    def respawn(self) -> float | None:
        """Seconds from the notice of the death until another process took the place."""
        return None if self.registered is None else self.registered - self.detected

    @property
    def waiting(self) -> float | None:
        """Seconds from the next process's registration to its first step."""
        return None if self.registered is None or self.stepped is None else self.stepped - self.registered

    @property
    def recovery(self) -> float | None:
        """Seconds from the last sign of the dead process to the first step of the next."""
        return None if self.stepped is None else self.stepped - self.time


@dataclass(frozen=True)
class CoursePoint(View):
    """The sums of a job at a time."""

    time: float
    """Seconds since the epoch."""
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class GoodputRecord(View):
    """The share of a job's time that was spent on steps that count.

    A second of it is a second of one of its replicas.
    """

    job: str
    """The replicas' group; ``GROUP@SESSION`` if a session spawned them."""
    since: float
    """When the job's first replica registered, in seconds since the epoch."""
    until: float
    """The current time, or when the job's last replica ended."""
    replicas: int
    """The number of living replicas."""
    ratio: float | None
    """The share of ``compute``, from 0 to 1; None before any time has passed."""
    seconds: Mapping[str, float]
    """Seconds by reason: `loom.control.reports.REASONS`, and the reasons that the training names itself."""
    faults: tuple[FaultRecord, ...] = ()
    """Deaths of processes, the earliest first."""
    course: tuple[CoursePoint, ...] = ()
    """The timeline of ``seconds``: their values at several times, the last of them ``until``."""
    user: str = ""
    """The user that the job belongs to."""

    def share(self, reason: str) -> float:
        """Return the share of a reason, from 0 to 1."""
        whole = sum(self.seconds.values())
        return self.seconds.get(reason, 0.0) / whole if whole > 0 else 0.0

    def to_body(self) -> dict[str, object]:
        faults, course = [one.to_body() for one in self.faults], [one.to_body() for one in self.course]
        return {**super().to_body(), "faults": faults, "course": course}

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> GoodputRecord:
        faults = tuple(map(FaultRecord.from_body, body["faults"]))
        return super().from_body(
            {**body, "faults": faults, "course": tuple(map(CoursePoint.from_body, body["course"]))}
        )


@dataclass(frozen=True)
class Snapshot:
    """The whole state: a watcher's first update, and the next one after the weaver or the connection was away."""

    status: Mapping[str, Any]
    """The fields of `WeaverStatus`."""
    replicas: Mapping[str, ReplicaInfo]
    devices: Mapping[str, DeviceInfo]


@dataclass(frozen=True)
class Delta:
    """The changes that were reported since the last update of this kind."""

    replicas: Mapping[str, Mapping[str, Any]]
    """For each id the fields of `ReplicaInfo` that change often; see `ReplicaInfo.changed_by`."""
    devices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """For each uuid the new `DeviceInfo.status`."""


@dataclass(frozen=True)
class Away:
    """The weaver, or the connection to the gateway, is away. The next update is a `Snapshot`."""

    reason: str


WeaverUpdate = Snapshot | WeaverEvent | Delta | Away


def read_update(body: Mapping[str, Any]) -> WeaverUpdate | None:
    """Return the update in a message of ``/ws/v1/weaver``, or None for a kind that this version does not know."""
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


def how_ended(replica: Any) -> str:
    """Return how a replica ended in a few words, such as ``stopped by alice``; "" while it lives.

    Args:
        replica: a `ReplicaInfo`, or the weaver's own record of one.
    """
    if replica.ending is None:
        return ""
    return f"{replica.ending} by {replica.ended_by}" if replica.ended_by else str(replica.ending)


def few(names: Collection[str]) -> str:
    """Return the first five names as text, and how many more there are."""
    first = ", ".join(itertools.islice(names, 5)) or "none"
    return first + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def read_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of metrics as floats; JSON has texts, such as ``"NaN"``, for those that are not finite."""
    return {name: float(value) for name, value in metrics.items()}
