"""The troubles of replicas, the injected faults and the restarts of the weaver, as a weaver's events tell them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from loom.control.commands import CommandKind
from loom.weaver.replicas import Cause
from loom.weaver.states import ReplicaState
from loom.weaver.views import ReplicaInfo, WeaverEvent


class TroubleKind(str, Enum):
    """An event in the life of a replica."""

    DIED = "died"
    RAISED = "raised"
    """Its process said that it failed, and ended."""
    SILENT = "silent"
    """Its connection was lost, and nobody said that its process had died."""
    STALLED = "stalled"
    """It took no step, and its heartbeats went on."""


@dataclass
class Trouble:
    """A trouble of a replica. Times are seconds since the epoch, by the weaver's clock."""

    replica: str
    kind: TroubleKind
    since: float
    noticed: float
    """The time at which the weaver logged it."""
    reason: str = ""
    until: float | None = None
    """The time of its end: the process was back, another one had registered, or a step was taken."""
    same: bool = False
    """True if the process that was silent came back."""
    back: float | None = None
    """The time at which the replica ran again."""


@dataclass
class Injection:
    """A fault that somebody injected."""

    id: str
    at: float
    fault: str
    params: Mapping[str, Any]
    duration: float | None
    target: str | list[str]
    struck: set[str] = field(default_factory=set)
    """The replicas that have acknowledged the fault, or that died of it."""
    refused: str = ""
    over: float | None = None


@dataclass
class IncidentReplica:
    """The known facts of a replica."""

    group: str = ""
    rank: int | None = None
    host: str = ""


class Incident:
    """The events of some time, read from the oldest to the newest."""

    def __init__(self, events: Iterable[WeaverEvent], replicas: Mapping[str, ReplicaInfo]) -> None:
        self.events = sorted(events, key=lambda event: (event.time, event.id))
        self.places = {id: IncidentReplica(one.group, one.rank, one.host) for id, one in replicas.items()}
        self.troubles: list[Trouble] = []
        self.injections: dict[str, Injection] = {}
        self.weaver_restarts: list[float] = []
        self.left_out: list[tuple[float, str]] = []
        """(time, description with the reason) of each event that no fault replays."""
        self._open: dict[str, Trouble] = {}
        self._alive: set[str] = set()
        for event in self.events:
            if event.replica is None:
                self._of_no_replica(event)
            else:
                self._of_replica(event.replica, event)

    def _of_no_replica(self, event: WeaverEvent) -> None:
        data = event.data
        match event.kind:
            case "weaver_started" if event is not self.events[0]:
                self.weaver_restarts.append(event.time)
            case "device_failed":
                device = data.get("device")
                uuid = device.get("uuid") if isinstance(device, dict) else device
                text = f"device {uuid} failed: no fault breaks a device; `loom fail-device` reports one as failed"
                self.left_out.append((event.time, text))
            case "command" if data.get("do") == CommandKind.INJECT.value:
                params, id = data.get("params") or {}, str(data.get("command"))
                given = params.get("params") or {}
                target = data.get("target") or "*"
                self.injections[id] = Injection(
                    id, event.time, str(params.get("fault")), given, params.get("duration"), target
                )
            case "command" if data.get("cause") is None:
                text = f"{data.get('do')} of {data.get('target')} by {data.get('by')}: a plan has faults only"
                self.left_out.append((event.time, text))

    def _of_replica(self, id: str, event: WeaverEvent) -> None:
        data, trouble = event.data, self._open.get(id)
        match event.kind:
            case "applied" | "refused" | "unanswered":
                self._answered(id, event)
            case "fault_removed" if (injection := self.injections.get(str(data.get("injection")))) is not None:
                injection.over = event.time
            case "registered" | "reconnected":
                self._came(id, event, trouble)
            case ReplicaState.STALLED.value:
                since = event.time - float(data.get("seconds") or 0.0)
                self._begin(Trouble(id, TroubleKind.STALLED, since, event.time))
            case ReplicaState.RECOVERING.value if trouble is not None and trouble.kind is TroubleKind.STALLED:
                trouble.kind = TroubleKind.SILENT  # it hung, which the weaver noticed by its steps first
            case ReplicaState.RECOVERING.value:
                self._begin(Trouble(id, TroubleKind.SILENT, event.time, event.time))
            case ReplicaState.FAILED.value:
                self._failed(id, event, trouble)
            case ReplicaState.RUNNING.value | ReplicaState.PAUSED.value | ReplicaState.DRAINING.value:
                self._alive.add(id)
                if trouble is not None and (trouble.kind is TroubleKind.STALLED or trouble.until is not None):
                    trouble.until = event.time if trouble.until is None else trouble.until
                    trouble.back = event.time
                    del self._open[id]
            case ReplicaState.FINISHED.value:
                self._open.pop(id, None)
                self._alive.discard(id)

    def _answered(self, id: str, event: WeaverEvent) -> None:
        injection = self.injections.get(str(event.data.get("command")))
        if injection is None:
            return
        if event.kind == "refused":
            injection.refused = str(event.data.get("reason") or "it was refused")
            return
        if event.kind == "applied" and not injection.struck:
            injection.at = event.time
        injection.struck.add(id)

    def _came(self, id: str, event: WeaverEvent, trouble: Trouble | None) -> None:
        """Note that a process has connected: a new one, or the same again."""
        data, known = event.data, self.places.setdefault(id, IncidentReplica())
        known.group, known.host = str(data.get("group") or known.group), str(data.get("host") or known.host)
        if "rank" in data:  # events of an earlier Loom have none
            known.rank = data["rank"]
        same = event.kind == "reconnected"
        if trouble is not None and trouble.kind is TroubleKind.STALLED and not same:
            trouble.until = event.time
            trouble = None
        if trouble is None and not same and id in self._alive:
            trouble = self._begin(
                Trouble(id, TroubleKind.DIED, event.time, event.time, "another process took its place")
            )
        if trouble is not None and trouble.kind is not TroubleKind.STALLED:
            trouble.until, trouble.same = event.time, same
        self._alive.add(id)

    def _failed(self, id: str, event: WeaverEvent, trouble: Trouble | None) -> None:
        self._alive.discard(id)
        why, reason = event.data.get("why"), str(event.data.get("reason") or "")
        silent = trouble is not None and trouble.kind is TroubleKind.SILENT and trouble.until is None
        kind = TroubleKind.RAISED if why == Cause.SAID_FAILED.value else TroubleKind.DIED
        if silent and trouble is not None:
            trouble.reason = reason
            trouble.kind = TroubleKind.SILENT if why == Cause.SILENT.value else kind
        else:
            kind = TroubleKind.SILENT if why == Cause.SILENT.value else kind
            self._begin(Trouble(id, kind, event.time, event.time, reason))

    def _begin(self, trouble: Trouble) -> Trouble:
        """Begin a trouble of a replica, which ends the one that it had."""
        if (before := self._open.get(trouble.replica)) is not None and before.until is None:
            before.until = trouble.since
        self._open[trouble.replica] = trouble
        self.troubles.append(trouble)
        return trouble
