"""What the weaver tells, as a program sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

from loom.errors import WrongArguments

__all__ = [
    "Acknowledgement",
    "Away",
    "Change",
    "Delta",
    "DeviceInfo",
    "Point",
    "ReplicaInfo",
    "Snapshot",
    "WeaverEvent",
    "WeaverUpdate",
    "check_config",
    "read_update",
]

V = TypeVar("V")


class Change(NamedTuple):
    """A value that was changed. ``old`` is None also where it was not known."""

    old: Any
    new: Any


class Point(NamedTuple):
    """A value of a metric; ``time`` is in seconds since the epoch."""

    time: float
    step: int | None
    value: float


@dataclass(frozen=True)
class Acknowledgement:
    """What a replica made of a command."""

    ok: bool
    step: int | None = None
    """The step at which it was applied."""
    changes: Mapping[str, Change] = field(default_factory=dict)
    """What was changed, by key."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """What was not, by key, and why."""
    reason: str | None = None
    """Why it was not applied, or not all of it."""
    waiting: bool = False
    """Whether the replica has not answered yet, and may."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """Of a fault: what shows that it is there."""

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Acknowledgement:
        """As a gateway's answer has it."""
        changes = {key: Change(change.get("old"), change.get("new")) for key, change in body["changes"].items()}
        return _made(cls, {**body, "changes": changes})


@dataclass(frozen=True)
class ReplicaInfo:
    """A training process. Times are seconds since the epoch."""

    id: str
    state: str
    """registering, running, paused, draining, stalled, failed, recovering or finished."""
    group: str = ""
    host: str = ""
    pid: int = 0
    session: str | None = None
    """The session that spawned it; None for one that Loom did not spawn."""
    procs: str | None = None
    """Its proc mesh."""
    rank: int | None = None
    """Its rank in that."""
    actors: str | None = None
    devices: tuple[str, ...] = ()
    handlers: Mapping[str, str] = field(default_factory=dict)
    """Configuration keys that it takes, and the names of their types."""
    config: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    epoch: int | None = None
    max_step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
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

    @property
    def job(self) -> str:
        """The job that its time is counted for; see `WeaverProxy.goodput`."""
        return f"{self.group}@{self.session}" if self.session else self.group

    @property
    def place(self) -> tuple[str, str, int, str]:
        """To sort by: group, session, rank."""
        return self.group, self.session or "", -1 if self.rank is None else self.rank, self.id

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> ReplicaInfo:
        """As a gateway's answer has it."""
        return _made(cls, {**body, "devices": tuple(body.get("devices", ())), "metrics": numbers(body["metrics"])})


@dataclass(frozen=True)
class DeviceInfo:
    """A GPU, or the CPUs of a host where there is none."""

    uuid: str
    state: str
    """active, inactive or failed."""
    kind: str = ""
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
    def read(cls, body: Mapping[str, Any]) -> DeviceInfo:
        """As a gateway's answer has it."""
        return _made(cls, {**body, "replicas": tuple(body.get("replicas", ()))})


@dataclass(frozen=True)
class WeaverEvent:
    """Something that happened."""

    id: int
    """They grow."""
    time: float
    """Seconds since the epoch."""
    kind: str
    replica: str | None
    """The replica that it is about, if it is about one."""
    data: Mapping[str, Any]
    """What more there is to say, by its kind. ``cause`` is the id of the event that led to it."""

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> WeaverEvent:
        """As a gateway's answer has it."""
        data = {name: value for name, value in body.items() if name not in _EVENT}
        return cls(body["id"], body["time"], body["kind"], body["replica"], data)


_EVENT = ("id", "time", "kind", "replica")


@dataclass(frozen=True)
class Snapshot:
    """All that there is: the first thing a watcher gets, and again after the weaver or the connection was away."""

    status: Mapping[str, Any]
    replicas: Mapping[str, ReplicaInfo]
    devices: Mapping[str, DeviceInfo]


@dataclass(frozen=True)
class Delta:
    """What has been reported since the last one."""

    replicas: Mapping[str, Mapping[str, Any]]
    """For each id the fields of `ReplicaInfo` that change often."""
    devices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """For each uuid its `DeviceInfo.status`."""


@dataclass(frozen=True)
class Away:
    """The weaver or the connection to the gateway is away, and what comes next is a `Snapshot`."""

    reason: str


WeaverUpdate = Snapshot | WeaverEvent | Delta | Away


def read_update(body: Mapping[str, Any]) -> WeaverUpdate | None:
    """A message of ``/ws/v1/weaver``; None for one of a kind that this version does not know."""
    match body["type"]:
        case "snapshot":
            replicas = {one["id"]: ReplicaInfo.read(one) for one in body["replicas"]}
            devices = {one["uuid"]: DeviceInfo.read(one) for one in body["devices"]}
            return Snapshot(body["status"], replicas, devices)
        case "event":
            return WeaverEvent.read(body["event"])
        case "delta":
            changed = {id: {**one, "metrics": numbers(one["metrics"])} for id, one in body["replicas"].items()}
            return Delta(changed, body.get("devices", {}))
        case "away":
            return Away(body["reason"])
    return None


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Values of metrics. Those that are no number are texts in JSON, such as ``"NaN"``."""
    return {name: float(value) for name, value in metrics.items()}


def _made(cls: type[V], body: Mapping[str, Any]) -> V:
    """An object of those fields that it has; a newer gateway may tell more."""
    names = {one.name for one in fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in body.items() if name in names})


def check_config(config: Mapping[str, Any]) -> None:
    """Check that values of a configuration can be told to the weaver.

    Raises:
        WrongArguments: there is none, or one is no plain value.
    """
    if not config:
        raise WrongArguments("give at least one key and its value, such as learning_rate=0.002")
    for key, value in config.items():
        if not _is_plain(value):
            kind = type(value).__name__
            known = "numbers, texts, booleans, None, and lists and dicts of them"
            raise WrongArguments(f"{key}: values of a configuration are {known}, not {kind}")


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(type(key) is str and _is_plain(one) for key, one in value.items())
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 64
    return value is None or type(value) in (bool, float, str)
